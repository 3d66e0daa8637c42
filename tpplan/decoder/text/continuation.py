"""The text of new tokens, piece by piece, up to a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.decoder.text.tokenizer import Stream, check_text
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.decoder.text.tokenizer import Tokenizer


def check_stops(stops: Sequence[str]) -> None:
    """Check that stop strings are texts that can occur.

    Raises:
        RequestError: one is empty, or see :func:`tpplan.decoder.text.tokenizer.check_text`.
    """
    for stop in stops:
        if not stop:
            raise RequestError("a stop string is empty", "leave it out")
        check_text(stop, "a stop string")


class Continuation:
    """Decodes new tokens in pieces of whole characters, and ends at the first stop string, wherever tokens divide it.

    Attributes:
        stop: the stop string that was found; empty while there is none.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        """Start after the tokens of a prompt."""
        self.stop = ""
        self._stream = Stream(tokenizer, prompt)
        self._stops = stops
        self._held = ""

    def add(self, token: int) -> str:
        """Add a token, and return the new text that cannot be the beginning of a stop string."""
        return self._before_stop(self._stream.add(token))

    def rest(self) -> str:
        """Return the text that is left when no token follows, incomplete characters included."""
        piece = self._before_stop(self._stream.rest())
        return piece if self.stop else piece + self._held

    def _before_stop(self, piece: str) -> str:
        """Return the text held back and a new piece, up to where a stop string begins or may begin."""
        if self.stop:
            return ""
        text, self._held = self._held + piece, ""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            first, self.stop = min(found)
            return text[:first]
        held = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _begun(text: str, stop: str) -> int:
    """Return how many of the last characters of a text are the first ones of a stop string."""
    return next(size for size in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:size]))
