"""Tell where the time of a decoding step goes, and of a prompt: on each GPU, kind by kind, and the longest kernels.

Makes a checkpoint of random weights of the shape of Llama-3.1-8B, and runs it by an even plan in a process of its own
for each number of GPUs, under torch's profiler. Steps are replayed graphs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

import torch

from benchmarks import children
from benchmarks.bench_decode import MODEL, checkpoint, numbers_of
from benchmarks.decode_order import Order
from benchmarks.rows import ROOT


def main() -> None:
    """Profile, and print tables as they come."""
    wanted = _wanted()
    config = json.loads(Path(wanted.config or MODEL).read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": wanted.layers} if wanted.layers else {}
    failed = False
    with checkpoint(config, wanted.folder, asked=bool(wanted.config or wanted.layers)) as directory:
        for gpus in wanted.gpus:
            order = Order(
                directory=str(directory),
                gpus=gpus,
                backend=wanted.backend,
                batches=wanted.batch,
                tokens=wanted.steps,
                prefill=wanted.prefill,
            )
            command = [sys.executable, "-m", "benchmarks.profile_run", order.dump()]
            failure = children.run(command, 1, wanted.watchdog, lambda line: print(line, flush=True), ROOT)
            if failure:
                print(f"{gpus} GPUs: {failure}", file=sys.stderr, flush=True)
                failed = True
    sys.exit(failed)


def _wanted() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--gpus", type=numbers_of, default=(1, 2), help="how many, one after the other (default 1,2)")
    add("--batch", type=numbers_of, default=(1,), help="sequences that decode together (default 1)")
    add("--steps", type=int, default=20, help="that are profiled (default 20)")
    add("--prefill", type=int, default=0, help="tokens of a prompt that is profiled too (default none)")
    add("--layers", type=int, default=0, help="of the model (default: all that it has)")
    add("--config", default="", help="config.json of another model than Llama-3.1-8B")
    add("--folder", default="", help="where the checkpoint is made, or any is already; it stays there")
    add("--backend", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--watchdog", type=float, default=180, help="seconds after which one run is ended (default 180)")
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("ended from outside")
    )  # without leaving processes or files behind
    main()
