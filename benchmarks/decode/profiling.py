"""Tell where the time of a decoding step goes, and of a prompt: on each GPU, kind by kind, and the longest kernels.

Makes a checkpoint of random weights of the shape of Llama-3.1-8B, and runs it by an even plan in a process of its own
for each number of GPUs, under torch's profiler. Steps are replayed graphs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from benchmarks.common.rows import ROOT
from benchmarks.decode.checkpoint import checkpoint_of
from benchmarks.decode.options import numbers_of, parser_of
from benchmarks.decode.order import Order
from tpplan.exec.tools.bench.between import children

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> NoReturn:
    """Profile as the arguments say, print tables as they come, and exit."""
    wanted = _parse(arguments)
    failed = False
    with checkpoint_of(wanted) as directory:
        for gpus in wanted.gpus:
            order = Order(
                directory=str(directory),
                gpus=gpus,
                backend=wanted.backend,
                transport=wanted.transport,
                batches=wanted.batch,
                tokens=wanted.steps,
                prefill=wanted.prefill,
                max_rows=wanted.max_rows,
            )
            command = [sys.executable, "-m", "benchmarks.decode.profile_run", order.dump()]
            failure = children.run(command, 1, wanted.watchdog, lambda line: print(line, flush=True), ROOT)
            if failure:
                print(f"{gpus} GPUs: {failure}", file=sys.stderr, flush=True)
                failed = True
    sys.exit(failed)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--batch", type=numbers_of, default=(1,), help="sequences that decode together (default 1)")
    add("--steps", type=int, default=20, help="that are profiled (default 20)")
    add("--prefill", type=int, default=0, help="tokens of a prompt that is profiled too (default none)")
    return parser.parse_args(arguments)
