"""Measure the plan half on this machine: whole processes, planning and loading, each against its aim.

The variants of a group take turns within each round, so that a slow minute of the machine slows all of them. Memory is
the peak of the process (resident), or for work within this process the peak of what Python allocates.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from attrs import define, field

import tpplan
from tpplan.sizes import format_bytes

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "models" / "Llama-3.1-70B" / "config.json"
PLANS = ROOT / "examples" / "plans"
GPUS = "RTX5090,2xRTX4090,RTX3090,A100-80GB,A6000,2x16GiB"
TOKENS = 32768
KIB = 1 if sys.platform == "darwin" else 2**10  # macOS counts ru_maxrss in bytes


@define
class Row:
    """One line of the table.

    Attributes:
        name: what is measured.
        run: does it once and returns the peak of memory in bytes, or 0 if that is measured apart.
        aim: seconds that the median should stay under, 0 for none.
        seconds: of each round.
        peak_bytes: largest peak of memory seen.
    """

    name: str
    run: Callable[[], int]
    aim: float = 0
    seconds: list[float] = field(factory=list)
    peak_bytes: int = 0

    def measure(self) -> None:
        """Run once more."""
        start = time.perf_counter()
        peak = self.run()
        self.seconds.append(time.perf_counter() - start)
        self.peak_bytes = max(self.peak_bytes, peak)

    @property
    def median(self) -> float:
        """Median of the rounds in seconds."""
        return statistics.median(self.seconds)


def process(*args: object, expect: int = 0) -> Callable[[], int]:
    """Return a function that runs a Python program to its end and returns its peak memory."""
    command = [sys.executable, *map(str, args)]

    def run() -> int:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != expect:
            sys.exit(f"{' '.join(command)} exited with {child.returncode}, expected {expect}")
        return usage.ru_maxrss * KIB

    return run


def within(work: Callable[[], object]) -> Callable[[], int]:
    """Return a function that does ``work`` in this process."""

    def run() -> int:
        work()
        return 0

    return run


def python_peak(work: Callable[[], object]) -> int:
    """Return the peak of Python's memory during ``work`` in bytes; tracing slows it, so it is not timed."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def process_rows(folder: Path) -> list[Row]:
    """Return the whole processes: the floor, and the commands as somebody calls them."""
    script = Path(sys.executable).with_name("tpplan")
    planning = ("plan", MODEL, "--cache", "q8", "--context", TOKENS)
    first, second = folder / "a.json", folder / "b.json"
    process(script, *planning, "--gpus", GPUS, "-o", first)()
    process(script, *planning, "--gpus", "8xRTX4090", "-o", second)()
    return [
        Row("python -c pass", process("-c", "pass")),
        Row("python -c 'import attrs, cattrs, json'", process("-c", "import attrs, cattrs, json")),
        Row("tpplan show", process(script, "show", first), 0.20),
        Row("tpplan diff", process(script, "diff", first, second, expect=1), 0.20),
        Row("tpplan validate", process(script, "validate", first), 0.20),
        Row("tpplan plan, 70B on 8 GPUs", process(script, *planning, "--gpus", GPUS, "-o", "-"), 0.35),
    ]


def function_rows() -> list[Row]:
    """Return the work within one process: planning on more and more devices, and loading."""
    model = tpplan.read_model(MODEL)
    cache = tpplan.Cache("q8", tokens=TOKENS)
    largest = max(PLANS.rglob("*.json"), key=lambda path: path.stat().st_size)

    def planning(spec: str) -> Callable[[], object]:
        devices = tpplan.parse_devices(spec)
        return lambda: tpplan.plan(model, devices, cache=cache, layout="reduce")

    def uneven(count: int) -> str:
        return ",".join(f"{count // 4}x{size}GiB" for size in (48, 24, 16, 12))

    works: list[tuple[str, Callable[[], object], float]] = [
        ("read_model, 70B", lambda: tpplan.read_model(MODEL), 0),
        ("plan(), 70B on 8 GPUs", planning(GPUS), 0.030),
        ("plan(), 256 devices", planning(uneven(256)), 0),
        ("plan(), 512 devices", planning(uneven(512)), 0),
        ("plan(), 1024 devices", planning(uneven(1024)), 2),
        (f"load(), {largest.name}, {format_bytes(largest.stat().st_size)}", lambda: tpplan.load(largest), 0.005),
    ]
    return [Row(name, within(work), aim, peak_bytes=python_peak(work)) for name, work, aim in works]


def show(rows: list[Row]) -> None:
    """Print the rows as a table; times in milliseconds."""
    print(f"\n{'':42}{'median':>10}{'10 %':>9}{'90 %':>9}{'aim':>8}{'peak':>13}")
    for row in rows:
        tenths = statistics.quantiles(row.seconds, n=10, method="inclusive")
        times = "".join(f"{t * 1e3:{w}.1f}" for t, w in ((row.median, 10), (tenths[0], 9), (tenths[-1], 9)))
        aim = f"{row.aim * 1e3:.0f}" if row.aim else ""
        print(f"{row.name:42}{times}{aim:>8}{format_bytes(row.peak_bytes):>13}{'  over' * (0 < row.aim < row.median)}")


def measure(rows: list[Row], rounds: int) -> None:
    """Run every row in turn, first once to warm up."""
    for turn in range(rounds + 1):
        for row in rows:
            row.measure()
            if not turn:
                row.seconds.clear()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="runs of each line, at least 2 (default 15)")
    rounds = max(2, parser.parse_args().rounds)
    print(
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs, {rounds} rounds, times in ms"
    )
    with tempfile.TemporaryDirectory() as folder:
        processes = process_rows(Path(folder))
        measure(processes, rounds)
    show(processes)
    functions = function_rows()
    measure(functions, rounds)
    show(functions)
    few, _, many = (row.median for row in functions if row.name.endswith("devices"))
    print(f"\n4 times the devices take {many / few:.1f} times the time")


if __name__ == "__main__":
    main()
