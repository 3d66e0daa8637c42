"""Generate with a process for each GPU, as servers do that torchrun starts.

    torchrun --nproc-per-node 2 examples/generate_together.py plans/llama.json models/llama 5,17,99

prints the tokens that follow, each as it comes. Every process owns as many of the plan's devices as the others, loads
their part of the checkpoint, and works out the same tokens. With ``cpu`` as a fourth argument, devices are virtual.
``--engine transformers`` shards transformers' model instead of running tpplan's decoder.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

import torch

import tpplan
from tpplan import exec as tpx
from tpplan.decoder import Decoder, generate, prepare
from tpplan.errors import DeviceError, TpplanError
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def generated(
    path: str, directory: str, prompt: Sequence[int], *, backend: str, new: int, timeout_s: float
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, the same in all processes.

    Raises:
        TpplanError: a process is lost, or the plan, the checkpoint, the processes and their GPUs do not fit together.
    """
    with tpx.process_group("gloo" if backend == "cpu" else "cpu:gloo,cuda:nccl", timeout_s=timeout_s) as group:
        plan = tpplan.load(path)  # here, so that the others notice at once if it is missing
        with tpx.compile(plan, backend=backend, model=directory, group=group, scratch=False) as context:
            decoder = Decoder(context, directory, load_weights(plan, directory, context))
            prepare(decoder)
            for (token,) in generate(decoder, [prompt], new):
                assert token is not None  # noqa: S101 (a single text has not ended before itself)
                yield token


def generated_by_transformers(
    path: str, directory: str, prompt: Sequence[int], *, backend: str, new: int, timeout_s: float
) -> Iterator[int]:
    """Yield the tokens that follow a prompt by transformers' own ``generate``, the same in all processes.

    Raises:
        TpplanError: see :func:`generated`; or transformers does not run the model on several devices.
    """
    from tpplan.transformers import shard  # noqa: PLC0415 (an extra)

    with tpx.process_group("gloo" if backend == "cpu" else "cpu:gloo,cuda:nccl", timeout_s=timeout_s) as group:
        plan = tpplan.load(path)
        with tpx.compile(plan, backend=backend, model=directory, group=group, scratch=False) as context:
            model = shard(directory, plan, context)
            tokens = torch.tensor([prompt], device=model.device)
            texts = model.generate(tokens, max_new_tokens=new, do_sample=False)
            yield from texts[0, len(prompt) :].tolist()


def choose_gpu() -> None:
    """Make the GPU that torchrun has for this process current."""
    local, count = os.environ.get("LOCAL_RANK", "0"), torch.cuda.device_count()
    if not local.isdecimal() or int(local) >= count:
        message = f"LOCAL_RANK is {local}, and this machine has {count} CUDA devices"
        raise DeviceError(message, "start as many processes as it has, or run on virtual devices with cpu at the end")
    torch.cuda.set_device(int(local))


def main() -> None:
    """Be one of the processes; the first prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("model", help="directory of the checkpoint")
    parser.add_argument("prompt", help="tokens, such as 5,17,99")
    parser.add_argument("backend", nargs="?", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--new", type=int, default=32, help="most new tokens (default: 32)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for other processes (default: 60)")
    parser.add_argument("--engine", choices=["tpplan", "transformers"], default="tpplan")
    given = parser.parse_args()
    try:
        prompt = [int(token) for token in given.prompt.split(",")]
    except ValueError:
        parser.error(f"prompt: {given.prompt!r:.40} is not a list of tokens such as 5,17,99")
    try:
        if given.backend == "cuda":
            choose_gpu()
        options = {"backend": given.backend, "new": given.new, "timeout_s": given.timeout}
        tokens = generated_by_transformers if given.engine == "transformers" else generated
        for token in tokens(given.plan, given.model, prompt, **options):
            if os.environ["RANK"] == "0":
                print(token, flush=True)
    except TpplanError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
