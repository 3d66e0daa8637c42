"""What to read of a checkpoint's files and where to put it: every byte is read once, whoever needs it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tpplan.checkpoint import Tensor as Header
    from tpplan.weights.slices import TensorSlice

#: Bytes that are read at a time.
CHUNK_BYTES: Final = 8 * 2**20

Ranges = tuple[tuple[int, int], ...]


class Move(NamedTuple):
    """What one device gets of a read.

    Attributes:
        target: bytes of the device, one after the other.
        ranges: of the bytes of each row, to be put side by side.
    """

    target: Tensor
    ranges: Ranges


class Read(NamedTuple):
    """Bytes of a file that are read at once.

    Attributes:
        file: name of the file.
        start: first byte.
        rows: of a matrix that they are.
        width: bytes of a row.
        moves: where they go.
    """

    file: str
    start: int
    rows: int
    width: int
    moves: tuple[Move, ...]


def reads_of(header: Header, held: Sequence[tuple[TensorSlice, Tensor]]) -> Iterator[Read]:
    """Yield the reads of one tensor.

    Args:
        header: says where it is.
        held: the parts of the devices, all cut in the same dimension, and as many bytes of each for them.
    """
    whole, dim = held[0][0].whole, held[0][0].dim
    outer = 1 if dim is None else prod(whole[:dim])
    width = header.nbytes // outer
    size = width if dim is None else width // whole[dim]
    parts = []
    for part, memory in held:
        ranges = tuple((start * size, end * size) for start, end in part.ranges) or ((0, width),)
        parts.append((memory.view(outer, -1), ranges))
    if outer == 1 or width > CHUNK_BYTES:
        for row in range(outer):
            yield from _within(header, row, width, parts)
        return
    step = CHUNK_BYTES // width
    for row in range(0, outer, step):
        rows = min(step, outer - row)
        moves = tuple(Move(memory[row : row + rows].flatten(), ranges) for memory, ranges in parts)
        yield Read(header.file, header.start + row * width, rows, width, moves)


def _within(header: Header, row: int, width: int, parts: Sequence[tuple[Tensor, Ranges]]) -> Iterator[Read]:
    """Yield the reads of a single row, which may be wide."""
    for first in range(0, width, CHUNK_BYTES):
        last = min(width, first + CHUNK_BYTES)
        moves = []
        for memory, ranges in parts:
            at = 0
            for start, end in ranges:
                a, b = max(start, first), min(end, last)
                if a < b:
                    target = memory[row, at + a - start : at + b - start]
                    moves.append(Move(target, ((a - first, b - first),)))
                at += end - start
        yield Read(header.file, header.start + row * width + first, 1, last - first, tuple(moves))
