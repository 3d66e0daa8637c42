"""Packing of 4-bit and 8-bit codes into 32-bit words, in the order of stored formats and of the decoder.

Shapes are those of :mod:`tpplan.decoder.weights.quantised`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tpplan.decoder.model.stored import NIBBLE, WORD
from tpplan.decoder.weights.quantised import ORDER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


#: Codes to unpack at a time; each takes a few bytes of temporary memory.
_AT_ONCE: Final = 2**20


def unpacked(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpack the codes in words, one code to a byte.

    Args:
        words: packed codes, ``int32``.
        bits: bits of a code.
        dim: dimension along which to put the codes of a word.
        order: position in a word of the first code, the second, and so on, counted from the lowest bits; ascending if
            not given.
    """
    words = words.movedim(dim, -1)
    if not words.is_contiguous() or words.stride(-1) > 1:  # torch says that rows of one word are, with any stride
        words = words.clone(memory_format=torch.contiguous_format)
    codes = words.view(torch.uint8)
    if bits == NIBBLE:
        codes = torch.stack((codes & 15, codes >> NIBBLE), dim=-1).flatten(-2)
    if order:
        codes = torch.unflatten(codes, -1, (-1, len(order)))[..., list(order)].flatten(-2)
    return codes.movedim(-1, dim)


def packed(codes: Tensor, order: Sequence[int]) -> Tensor:
    """Pack each eight 4-bit codes along the last dimension into a word.

    Args:
        codes: one code to a byte.
        order: which of the eight codes is in the lowest bits of the word, the next ones, and so on.
    """
    eights = torch.unflatten(codes, -1, (-1, len(order)))[..., list(order)]
    return (eights[..., ::2] | eights[..., 1::2] << NIBBLE).flatten(-2).view(torch.int32)


def rearranged(words: Tensor, size: tuple[int, int], bits: int, some: Callable[[Tensor, int, int], Tensor]) -> Tensor:
    """Rearrange stored codes into the decoder's layout, in the same memory.

    Args:
        words: stored codes, ``int32``, contiguous.
        size: rows and columns of the matrix.
        bits: bits of a code.
        some: returns the codes of rows ``start`` to ``end`` from words, ``uint8 [end - start, K]``.
    """
    rows, columns = size
    memory = words.view(-1).view(torch.int32 if bits == NIBBLE else torch.uint8)
    to = memory.view(rows, -1)
    words = words.clone()
    step = max(WORD, _AT_ONCE // columns // WORD * WORD)  # rows of whole words, where words pack rows
    for start in range(0, rows, step):
        end = min(start + step, rows)
        codes = some(words, start, end)
        to[start:end] = packed(codes, ORDER) if bits == NIBBLE else codes
    return to
