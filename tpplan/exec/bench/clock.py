"""Times of many ways to do the same: in turns, so that a slow moment of the machine slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from attrs import frozen

from tpplan.bench_report import Spread

if TYPE_CHECKING:
    from collections.abc import Mapping

K = TypeVar("K")

#: How long a turn should last, and how often it calls at most.
_TURN_SECONDS = 0.005
_MOST_CALLS = 50


@frozen(eq=False)
class Run:
    """What is timed.

    Attributes:
        call: does it.
        operations: that a call does.
    """

    call: Callable[[], object]
    operations: int = 1


class Clock:
    """Times runs on some devices, from an idle machine to an idle machine."""

    def __init__(self, places: Sequence[torch.device], rounds: int) -> None:
        """Get ready.

        Args:
            places: the devices to wait for.
            rounds: times that each run has its turn, at least 2.
        """
        self._places = [place for place in dict.fromkeys(places) if place.type == "cuda"]
        self._rounds = rounds

    def synchronize(self) -> None:
        """Wait for all devices."""
        for place in self._places:
            torch.cuda.synchronize(place)

    def times(self, runs: Mapping[K, Run], failed: Callable[[K, Exception], None]) -> dict[K, Spread]:
        """Return the time of one operation of each run; they take turns.

        Args:
            runs: by any key; each has run before.
            failed: told the error with which a run ended, which then has no time.
        """
        calls: dict[K, int] = {}
        for key, run in runs.items():
            try:
                calls[key] = min(_MOST_CALLS, int(_TURN_SECONDS / self._turn(run, 1)) + 1)
            except Exception as error:  # noqa: BLE001 (of whatever library)
                failed(key, error)
        seen: dict[K, list[float]] = {key: [] for key in calls}
        for _ in range(self._rounds):
            for key in tuple(seen):
                try:
                    seen[key].append(self._turn(runs[key], calls[key]) / (calls[key] * runs[key].operations))
                except Exception as error:  # noqa: BLE001 (of whatever library)
                    del seen[key]
                    failed(key, error)
        return {key: _spread(seconds) for key, seconds in seen.items()}

    def _turn(self, run: Run, calls: int) -> float:
        """Return the seconds of so many calls in a row, from the first one to the last result."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run.call()
        self.synchronize()
        return time.perf_counter() - start


def _spread(seconds: list[float]) -> Spread:
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    low, median, high = (round(x * 10**9) for x in (tenths[0], statistics.median(seconds), tenths[-1]))
    return Spread(median_ns=median, low_ns=low, high_ns=high)
