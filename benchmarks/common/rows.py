"""A table of measurements that take turns, so that a slow minute of the machine slows all of them."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "models" / "Llama-3.1-70B" / "config.json"
PLANS = ROOT / "examples" / "plans"
GPUS = "RTX5090,2xRTX4090,RTX3090,A100-80GB,A6000,2x16GiB"
TOKENS = 32768


@dataclass
class Row:
    """One line of the table.

    Attributes:
        name: what is measured.
        run: runs it once, and returns the peak of memory in bytes, or 0 if that is measured in another way.
        aim: seconds that the median should stay under, 0 for none.
        calls: how often a round runs it, for what is too short to be timed once.
        seconds: seconds per call in each round.
        peak_bytes: largest peak of memory seen.
    """

    name: str
    run: Callable[[], int]
    aim: float = 0
    calls: int = 1
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def measure(self) -> None:
        """Run once more, or ``calls`` times."""
        start = time.perf_counter()
        for _ in range(self.calls):
            peak = self.run()
        self.seconds.append((time.perf_counter() - start) / self.calls)
        self.peak_bytes = max(self.peak_bytes, peak)

    @property
    def median(self) -> float:
        """Median of the rounds in seconds per call."""
        return statistics.median(self.seconds)


def rounds_wanted(doc: str | None) -> int:
    """Read the command line, say where we are, and return how often to run each line."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--rounds", type=int, default=15, help="runs of each line, at least 2 (default 15)")
    rounds: int = max(2, parser.parse_args().rounds)
    machine = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    print(f"{machine}; {rounds} rounds")
    return rounds


def measure(rows: list[Row], rounds: int, unit: str = "ms") -> None:
    """Run every row in turn, first once to warm up, and print the table, in ms or µs."""
    scale = {"ms": 1e3, "µs": 1e6}[unit]
    for turn in range(rounds + 1):
        for row in rows:
            row.measure()
            if not turn:
                row.seconds.clear()
    with_peaks = any(row.peak_bytes for row in rows)
    peaks = f"{'peak MiB':>11}" if with_peaks else ""
    print(f"\n{f'times in {unit}':42}{'median':>10}{'10 %':>9}{'90 %':>9}{'aim':>8}{peaks}")
    for row in rows:
        tenths = statistics.quantiles(row.seconds, n=10, method="inclusive")
        times = "".join(f"{t * scale:{w}.1f}" for t, w in ((row.median, 10), (tenths[0], 9), (tenths[-1], 9)))
        aim = f"{row.aim * scale:.0f}" if row.aim else ""
        over = "  over" if 0 < row.aim < row.median else ""
        peak = f"{row.peak_bytes / 2**20:11.2f}" if with_peaks else ""
        print(f"{row.name:42}{times}{aim:>8}{peak}{over}")
