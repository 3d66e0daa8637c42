"""Prompts, cut into passes of as many rows as a plan allows. The rows of a pass may belong to several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

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
    """Rows of a pass that are successive tokens of one sequence.

    Attributes:
        first: of the rows.
        end: behind the last of them.
        sequence: its number.
        start: tokens that it has before them.
        is_last: whether a prompt ends with them.
    """

    first: int
    end: int
    sequence: int
    start: int
    is_last: bool


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
            read += len(tokens) - first
            stretches.append(Stretch(first, len(tokens), prompt.sequence, start, read == len(prompt.tokens)))
            if len(tokens) == most:
                yield tokens, stretches
                tokens, stretches = [], []
    if tokens:
        yield tokens, stretches
