"""Texts that are decoded together, and whether they can go on: their caches may have been overwritten since."""

from __future__ import annotations

from attrs import define, field

from tpplan.core.sizes import counted
from tpplan.decoder.read_back import ReadBack
from tpplan.errors import RequestError


@define(eq=False)
class Texts:
    """Texts in the first sequences of the cache, one in each.

    Attributes:
        tokens: the tokens of each text, with those of its prompt; none before any text has begun.
        cached: for each text, how many of its first tokens the cache has.
        obstacle: why the texts cannot go on; empty as long as they can.
        ahead: the tokens of a step that was launched ahead of the texts; None if there is none, or if they were taken.
    """

    tokens: list[list[int]] = field(factory=list)
    cached: list[int] = field(factory=list)
    obstacle: str = "no text has begun"
    ahead: ReadBack | None = None

    def lose(self, why: str) -> None:
        """Note that something overwrites the cache; what did so first is what an error names."""
        if any(self.cached):
            self.cached, self.obstacle = [0] * len(self.tokens), why

    def refusal(self) -> RequestError:
        """Return the error for texts that cannot go on."""
        if not self.tokens:
            return RequestError(f"steps cannot be taken: {self.obstacle}", "call start() with the prompts first")
        what = "this text" if len(self.tokens) == 1 else f"these {counted(len(self.tokens), 'text')}"
        hint = "begin again; finish texts before others begin in the same sequences, or begin them together"
        return RequestError(f"{what} cannot go on: {self.obstacle}", hint)
