"""Codes of 4 and 8 bits in words of 32, as formats pack them and as the decoder does.

Shapes are those of :mod:`tpplan.decoder.quantised`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tpplan.decoder.quantised import ORDER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Bits of a word, and of a nibble.
WORD: Final = 32
NIBBLE: Final = 4

#: Codes that are unpacked at a time; each takes some bytes meanwhile.
_AT_ONCE: Final = 2**20

#: Where AWQ has the first of eight codes, the second, and so on.
AWQ: Final = tuple(ORDER.index(i) for i in range(8))


def unpacked(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the codes in some words, one in a byte.

    Args:
        words: ``int32``.
        bits: of a code.
        dim: the dimension that grows: along it the codes of a word follow each other.
        order: where in a word the first is, the second, and so on, lowest bits first; in their order if not given.
    """
    codes = words.movedim(dim, -1).contiguous().view(torch.uint8)
    if bits == NIBBLE:
        codes = torch.stack((codes & 15, codes >> NIBBLE), dim=-1).flatten(-2)
    if order:
        codes = torch.unflatten(codes, -1, (-1, len(order)))[..., list(order)].flatten(-2)
    return codes.movedim(-1, dim)


def packed(codes: Tensor, order: Sequence[int]) -> Tensor:
    """Return eight nibbles of the last dimension in a word.

    Args:
        codes: one in a byte.
        order: which of eight the lowest bits have, and so on.
    """
    eights = torch.unflatten(codes, -1, (-1, len(order)))[..., list(order)]
    return (eights[..., ::2] | eights[..., 1::2] << NIBBLE).flatten(-2).view(torch.int32)


def rearranged(words: Tensor, size: tuple[int, int], bits: int, some: Callable[[Tensor, int, int], Tensor]) -> Tensor:
    """Return codes as the decoder has them, in the memory of those that are stored.

    Args:
        words: ``int32``, contiguous.
        size: rows and columns of the matrix.
        bits: of a code.
        some: takes words, and returns the codes of some rows, ``uint8 [end - start, K]``.
    """
    rows, columns = size
    memory = words.view(-1).view(torch.int32 if bits == NIBBLE else torch.uint8)
    to = memory.view(rows, -1)
    words = words.clone()
    step = max(WORD, _AT_ONCE // columns // WORD * WORD)  # whole words of rows, where these are packed
    for start in range(0, rows, step):
        end = min(start + step, rows)
        codes = some(words, start, end)
        to[start:end] = packed(codes, ORDER) if bits == NIBBLE else codes
    return to
