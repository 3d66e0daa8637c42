"""How many tokens were read and generated, and how fast; and what the first of them waited for."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.core.speed import Speed

#: Rates from here on are told in whole tokens.
_WHOLE: Final = 100
#: Place of a process's start among the fields of ``/proc/PID/stat`` behind its name.
_START: Final = 19


class Timing:
    """Counts tokens of prompts and new ones, and the time that both take."""

    def __init__(self, predicted: Speed | None = None, waits: Sequence[tuple[str, float]] = ()) -> None:
        """Count from zero.

        Args:
            predicted: what a plan predicts of steps, if it predicts something of where they run.
            waits: what comes before the first prompt, and its seconds; empty if nobody is to be told.
        """
        self._waits = [*waits]
        self._predicted = {each.rows: each.tokens_per_second for each in predicted.decode} if predicted else {}
        self._rows: set[int] = set()
        self._read = self._new = self._stepped = 0
        self._reading = self._stepping = 0.0

    def of(self, read: int, tokens: Iterator[tuple[int | None, ...]]) -> Iterator[tuple[int | None, ...]]:
        """Yield new tokens, and count them and the time until each comes.

        Args:
            read: number of tokens of prompts that are read before the first ones.
            tokens: from :func:`tpplan.decoder.generation.generate.generate`.
        """
        is_first = True
        while True:
            start = perf_counter()
            step = next(tokens, None)
            if step is None:
                return
            seconds, count = perf_counter() - start, len(step) - step.count(None)
            self._new += count
            if is_first:
                if self._waits and self._new == count:
                    self._waits.append(("prompt", seconds))
                self._read += read
                self._reading += seconds
            else:
                self._stepped += count
                self._rows.add(count)
                self._stepping += seconds
            is_first = False
            yield step

    def __str__(self) -> str:
        """Return counts and rates; the first new token of a text comes with its prompt, and no rate counts it.

        The plan's prediction is of little context, and told where every step was of as many texts as it is for.
        """
        predicted = self._predicted.get(max(self._rows), 0) if len(self._rows) == 1 else 0
        rates = f"{_rate(self._read, self._read, self._reading, 'prompt')}, " + _rate(
            self._new, self._stepped, self._stepping, "new", predicted
        )
        if not self._waits or not self._new:
            return rates
        total = sum(seconds for _, seconds in self._waits)
        return f"{rates}; the first after {total:.1f} s: " + ", ".join(f"{what} {s:.1f}" for what, s in self._waits)


def _rate(count: int, timed: int, seconds: float, kind: str, predicted: int = 0) -> str:
    what = f"{count} {kind} token{'' if count == 1 else 's'}"
    rate = timed / seconds if seconds else 0
    beside = f", the plan says {predicted}" if predicted else ""
    return f"{what} ({rate:.{0 if rate >= _WHOLE else 1}f} tokens/s{beside})" if rate else what


def seconds_since_start() -> float:
    """Return for how long this process has run, in seconds; 0 where the system does not tell, as only Linux does."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[_START])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0
