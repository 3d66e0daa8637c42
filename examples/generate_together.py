"""Generate with a process for each GPU, as servers do that torchrun starts.

    torchrun --nproc-per-node 2 examples/generate_together.py plans/llama.json models/llama 5,17,99

prints the tokens that follow, each as it comes. Every process owns as many of the plan's devices as the others, loads
their part of the checkpoint, and works out the same tokens. With ``cpu`` as a fourth argument, devices are virtual.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed

import tpplan
from tpplan import exec as tpx
from tpplan.decoder import Decoder, generate, prepare
from tpplan.errors import TpplanError
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_NEW_TOKENS = 32
#: For processes that load more slowly than others; torch's own is 30 minutes.
LONGEST_WAIT = timedelta(minutes=5)


def generated(path: str, directory: str, prompt: Sequence[int], backend: str = "cuda") -> Iterator[int]:
    """Yield the tokens that follow a prompt, the same in all processes.

    Raises:
        TpplanError: the plan, the checkpoint, the processes and their GPUs do not fit together.
    """
    plan = tpplan.load(path)
    everyone = distributed.group.WORLD
    with tpx.compile(plan, backend=backend, model=directory, group=everyone, scratch=False) as context:
        decoder = Decoder(context, directory, load_weights(plan, directory, context))
        prepare(decoder)
        for (token,) in generate(decoder, [prompt], MOST_NEW_TOKENS):
            assert token is not None  # noqa: S101 (a single text has not ended before itself)
            yield token


def main() -> None:
    """Be one of the processes; the first prints."""
    if len(sys.argv) < 4 or "RANK" not in os.environ:  # noqa: PLR2004 (names)
        sys.exit(__doc__)
    path, directory, prompt, *backend = sys.argv[1:]
    on_gpus = backend != ["cpu"]
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout=LONGEST_WAIT)
    try:
        for token in generated(path, directory, list(map(int, prompt.split(","))), *backend):
            if distributed.get_rank() == 0:
                print(token, flush=True)
    except TpplanError as error:
        sys.exit(f"error: {error}")
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
