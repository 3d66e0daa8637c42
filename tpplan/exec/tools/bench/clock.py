"""Interleaved timing of alternatives, so that a slow moment of the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from attrs import frozen

from tpplan.render.bench import ROUNDS_OF_TENTHS
from tpplan.reports.bench import Spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

K = TypeVar("K")

#: Target duration of a turn, and its maximum number of calls.
_TURN_SECONDS = 0.005
_MOST_CALLS = 50


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run torch in one thread, and restore its thread count and current device on exit.

    Most tensors are small, and synchronising threads would take longer; the programs of virtual devices do the same.
    """
    threads = torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_device(device)


@frozen(eq=False)
class Run:
    """A function to be timed.

    Attributes:
        call: the function.
        operations: number of operations that one call runs.
    """

    call: Callable[[], object]
    operations: int = 1


class Clock:
    """Times runs on given devices, which are idle at the start and at the end of every measurement."""

    def __init__(self, places: Sequence[torch.device], rounds: int) -> None:
        """Create a clock.

        Args:
            places: devices to synchronise with.
            rounds: number of turns of each run, at least 2.
        """
        self._places = [place for place in dict.fromkeys(places) if place.type == "cuda"]
        self._rounds = rounds

    def synchronize(self) -> None:
        """Wait until all devices are idle."""
        for place in self._places:
            torch.cuda.synchronize(place)

    def times(self, runs: Mapping[K, Run], failed: Callable[[K, Exception], None]) -> dict[K, Spread]:
        """Return the time of one operation of each run; the runs take turns.

        Args:
            runs: runs by key; each must already be warmed up.
            failed: called with the key and error of a run that fails; this run gets no time.
        """
        calls: dict[K, int] = {}
        for key, run in runs.items():
            try:
                calls[key] = min(_MOST_CALLS, int(_TURN_SECONDS / self._turn(run, 1)) + 1)
            except Exception as error:  # noqa: BLE001 (from any library)
                failed(key, error)
        seen: dict[K, list[float]] = {key: [] for key in calls}
        for _ in range(self._rounds):
            for key in tuple(seen):
                try:
                    seen[key].append(self._turn(runs[key], calls[key]) / (calls[key] * runs[key].operations))
                except Exception as error:  # noqa: BLE001 (from any library)
                    del seen[key]
                    failed(key, error)
        return {key: spread(seconds) for key, seconds in seen.items()}

    def _turn(self, run: Run, calls: int) -> float:
        """Return the seconds that ``calls`` consecutive calls take, until their last result is complete."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run.call()
        self.synchronize()
        return time.perf_counter() - start


def spread(seconds: list[float]) -> Spread:
    """Return the median of several times, and those that a tenth of them is below and above; of few, the extremes."""
    ends = (min(seconds), max(seconds))
    if len(seconds) >= ROUNDS_OF_TENTHS:
        low_end, *_, high_end = statistics.quantiles(seconds, n=10, method="inclusive")
        ends = (low_end, high_end)
    low, median, high = (round(x * 10**9) for x in (ends[0], statistics.median(seconds), ends[1]))
    return Spread(median_ns=median, low_ns=low, high_ns=high)
