"""How many tokens were read and generated, and how fast."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.core.speed import Speed

#: Rates from here on are told in whole tokens.
_WHOLE: Final = 100


class Timing:
    """Counts tokens of prompts and new ones, and the time that both take."""

    def __init__(self, predicted: Speed | None = None) -> None:
        """Compare steps with what a plan predicts of them, if it predicts something of where they run."""
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
