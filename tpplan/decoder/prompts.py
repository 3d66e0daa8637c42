"""Prompts, cut into passes of as many rows as a plan allows. The rows of a pass may belong to several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import evolve, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator


@frozen
class Prompt:
    """The next tokens of a sequence.

    Attributes:
        tokens: one or more.
        sequence: its number.
        start: tokens that it has already.
    """

    tokens: Sequence[int]
    sequence: int = 0
    start: int = 0


@frozen
class Stretch:
    """Rows of a pass that are successive tokens of a sequence, or as many of each of several sequences.

    Attributes:
        first: of the rows.
        size: rows of a sequence.
        start: tokens that it has before them.
        sequence: the number of the first sequence.
        count: of sequences; their numbers follow each other, and so do their rows.
        is_last: whether prompts end with them.
        is_full: whether they are of one sequence, and there is no room for more rows in a pass.
    """

    first: int
    size: int
    start: int
    sequence: int
    count: int
    is_last: bool
    is_full: bool

    @property
    def rows(self) -> slice:
        """All of them."""
        return slice(self.first, self.first + self.count * self.size)

    @property
    def ends(self) -> range:
        """The rows with which prompts end."""
        return range(self.first + self.size - 1, self.rows.stop, self.size) if self.is_last else range(0)


def cut(prompts: Sequence[Prompt], most: int) -> Iterator[tuple[list[int], list[Stretch]]]:
    """Yield the tokens of each pass, and whose they are: prompts follow each other, and break where a pass is full.

    Args:
        prompts: of different sequences.
        most: rows of a pass.
    """
    tokens: list[int] = []
    stretches: list[Stretch] = []
    for prompt in prompts:
        read = 0
        while read < len(prompt.tokens):
            first, start = len(tokens), prompt.start + read
            tokens += prompt.tokens[read : read + most - first]
            size = len(tokens) - first
            read += size
            is_last = read == len(prompt.tokens)
            new = Stretch(first, size, start, prompt.sequence, 1, is_last=is_last, is_full=size == most)
            stretches[-1:] = _joined(stretches[-1:], new)
            if len(tokens) == most:
                yield tokens, stretches
                tokens, stretches = [], []
    if tokens:
        yield tokens, stretches


def _joined(before: list[Stretch], new: Stretch) -> list[Stretch]:
    """Return one stretch for the latest and a new one if they are alike, so that they are computed at once.

    Only what begins is: what sequences have already may take much memory, of many of them.
    """
    for old in before:
        if new.start == 0 and new == evolve(old, first=old.rows.stop, sequence=old.sequence + old.count, count=1):
            return [evolve(old, count=old.count + 1)]
    return [*before, new]
