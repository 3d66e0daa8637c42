"""Measure planning and loading within one process on this machine, against their aims.

Peak memory is what Python allocates during one run that is not timed, because tracing slows it.
"""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING

import tpplan
from benchmarks.rows import GPUS, MODEL, PLANS, TOKENS, Row, measure, rounds_wanted
from tpplan.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.model import ModelSpec

CROWDS = (16, 32, 64, 128, 256, 512, 1024)


def row(name: str, work: Callable[[], object], aim: float = 0) -> Row:
    """Return the line for ``work``, its peak of memory measured."""
    work()  # imports are not counted
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    def run() -> int:
        work()
        return peak

    return Row(name, run, aim)


def planning(model: ModelSpec, spec: str) -> Callable[[], object]:
    """Return a function that plans ``model`` on the devices of ``spec``; reading both is not part of it."""
    devices = tpplan.parse_devices(spec)
    cache = tpplan.Cache("q8", tokens=TOKENS)

    def work() -> None:
        with suppress(tpplan.InfeasibleError):
            tpplan.plan(model, devices, cache=cache, layout="reduce")

    return work


def uneven(count: int) -> str:
    """Return the specification of ``count`` devices of four sizes."""
    return ",".join(f"{count // 4}x{size}GiB" for size in (48, 24, 16, 12))


def main() -> None:
    """Measure plans for more and more devices, one that does not exist, and the largest example file."""
    rounds = rounds_wanted(__doc__)
    model = tpplan.read_model(MODEL)
    largest = max(PLANS.rglob("*.json"), key=lambda path: path.stat().st_size)
    crowds = {count: row(f"plan(), {count} devices", planning(model, uneven(count))) for count in CROWDS}
    crowds[1024].aim = 2
    rows = [
        row("read_model(), 70B", lambda: tpplan.read_model(MODEL)),
        row("plan(), 8 devices", planning(model, GPUS), 0.030),
        row("plan(), 8 devices, does not fit", planning(model, "5x19GiB,3x15GiB")),
        *crowds.values(),
        row(f"load(), {largest.name}, {format_bytes(largest.stat().st_size)}", lambda: tpplan.load(largest), 0.005),
    ]
    measure(rows, rounds)
    print(f"\n1024 devices take {crowds[1024].median / crowds[256].median:.1f} times as long as 256")


if __name__ == "__main__":
    main()
