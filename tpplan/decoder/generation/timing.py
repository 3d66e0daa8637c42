"""What the first token waits for from the start of its process on; how many follow, and how fast."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Final

from tpplan.reports.generate import StartPart, TokenTimes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.core.speed import Speed

#: Rates from here on are told in whole tokens.
_WHOLE: Final = 100
#: The last part of a start.
_FIRST: Final = "first token"
#: Place of a process's start among the fields of ``/proc/PID/stat`` behind its name.
_START: Final = 19


class Startup:
    """What the time of a process goes to until its first token: parts, each from the end of the one before.

    The first is ``Python``, or ``Python and torch`` if torch is imported by now. It is left out where the system does
    not tell when the process started, which only Linux does; then the time counts from now.

    Attributes:
        parts: the parts so far.
    """

    def __init__(self, before: float | None = None) -> None:
        """Begin with the first part.

        Args:
            before: for how long the process has run, in seconds; as the system says if not given.
        """
        self.parts: list[StartPart] = []
        self._latest = perf_counter_ns()
        if before_ns := round(1e9 * (seconds_since_start() if before is None else before)):
            what = "Python and torch" if "torch" in sys.modules else "Python"
            self.parts.append(StartPart(what=what, time_ns=before_ns))

    def mark(self, what: str, size_bytes: int = 0) -> None:
        """End a part.

        Args:
            what: its name.
            size_bytes: what was loaded in it, if something was.
        """
        before, self._latest = self._latest, perf_counter_ns()
        self.parts.append(StartPart(what=what, time_ns=self._latest - before, size_bytes=size_bytes))

    def end(self) -> None:
        """End the last part, with the first token; behind that, do nothing."""
        if not self.parts or self.parts[-1].what != _FIRST:
            self.mark(_FIRST)

    @property
    def seconds(self) -> float:
        """The time of all parts."""
        return sum(part.time_ns for part in self.parts) / 1e9

    def __str__(self) -> str:
        return f"{_FIRST} after {self.seconds:.2f} s: {self.told()}"

    def told(self) -> str:
        """Return the parts and their seconds."""
        return ", ".join(f"{part.what} {part.time_ns / 1e9:.2f}{_rate_of(part)}" for part in self.parts)


class Timing:
    """Counts tokens of prompts and new ones, and the time that both take."""

    def __init__(self, predicted: Speed | None = None) -> None:
        """Count from zero.

        Args:
            predicted: what a plan predicts of steps, if it predicts something of where they run.
        """
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
                self._read += read
                self._reading += seconds
            else:
                self._stepped += count
                self._rows.add(count)
                self._stepping += seconds
            is_first = False
            yield step

    @property
    def totals(self) -> TokenTimes:
        """What was counted so far."""
        return TokenTimes(
            prompt_token_count=self._read,
            prompt_ns=round(1e9 * self._reading),
            new_token_count=self._new,
            later_token_count=self._stepped,
            later_ns=round(1e9 * self._stepping),
        )

    def __str__(self) -> str:
        """Return counts and rates; the first new token of a text comes with its prompt, and no rate counts it.

        The plan's prediction is of little context, and told where every step was of as many texts as it is for.
        """
        predicted = self._predicted.get(max(self._rows), 0) if len(self._rows) == 1 else 0
        return f"{_rate(self._read, self._read, self._reading, 'prompt')}, " + _rate(
            self._new, self._stepped, self._stepping, "new", predicted
        )


def _rate(count: int, timed: int, seconds: float, kind: str, predicted: int = 0) -> str:
    what = f"{count} {kind} token{'' if count == 1 else 's'}"
    rate = timed / seconds if seconds else 0
    beside = f", the plan says {predicted}" if predicted else ""
    return f"{what} ({rate:.{0 if rate >= _WHOLE else 1}f} tokens/s{beside})" if rate else what


def _rate_of(part: StartPart) -> str:
    """Return what was loaded in a part, and how fast; empty if nothing was."""
    size, seconds = part.size_bytes / 1e9, part.time_ns / 1e9
    return f" ({size:.3g} GB at {size / seconds:.3g} GB/s)" if size and seconds else ""


def seconds_since_start() -> float:
    """Return for how long this process has run, in seconds; 0 where the system does not tell, as only Linux does."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[_START])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0
