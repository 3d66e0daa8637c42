"""The reads of a checkpoint's files and their targets on devices; every byte is read at most once."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tpplan.models.checkpoint import Tensor as Header
    from tpplan.weights.slices import TensorSlice

    #: A device's part of a tensor: device index, offset in its block, bytes per row, and byte ranges of a whole row.
    Part = tuple[int, int, int, tuple[tuple[int, int], ...]]

#: Most bytes of a read.
CHUNK_BYTES: Final = 8 * 2**20


class Move(NamedTuple):
    """A strided copy of part of a read to one device; the steps are ignored if there is only one row.

    Attributes:
        device: index of the device in the plan.
        target: offset in the device's block, in bytes.
        target_step: bytes between the starts of rows in the block.
        source: offset in the read, in bytes.
        source_step: bytes between the starts of rows in the read.
        width: bytes to copy per row.
        rows: number of rows.
    """

    device: int
    target: int
    target_step: int
    source: int
    source_step: int
    width: int
    rows: int


class Read(NamedTuple):
    """A contiguous range of a file's bytes that is read at once.

    Attributes:
        file: name of the file.
        start: offset in the file, in bytes.
        nbytes: number of bytes.
        moves: copies to devices.
    """

    file: str
    start: int
    nbytes: int
    moves: list[Move]


def reads_of(header: Header, held: Sequence[tuple[TensorSlice, int]]) -> Iterator[Read]:
    """Yield the reads of one tensor.

    Args:
        header: the tensor's header, with its position.
        held: the devices' slices, all cut in the same dimension, each with its offset in its device's block.
    """
    if not header.nbytes:
        return
    whole, dim = held[0][0].whole, held[0][0].dim
    outer = 1 if dim is None else prod(whole[:dim])
    width = header.nbytes // outer
    size = width if dim is None else width // whole[dim]
    parts: list[Part] = []
    for part, at in held:
        ranges = tuple((start * size, end * size) for start, end in part.ranges) or ((0, width),)
        parts.append((part.device, at, part.nbytes // outer, ranges))
    if outer == 1 or width > CHUNK_BYTES:
        for row in range(outer):
            yield from _within(header, row, width, parts)
        return
    step = CHUNK_BYTES // width
    for row in range(0, outer, step):
        rows = min(step, outer - row)
        yield Read(header.file, header.start + row * width, rows * width, list(_of_rows(row, rows, width, parts)))


def _of_rows(row: int, rows: int, width: int, parts: Sequence[Part]) -> Iterator[Move]:
    """Yield the moves of a read of whole rows."""
    for device, at, own, ranges in parts:
        to = at + row * own
        for start, end in ranges:
            if end - start == own == width:
                yield Move(device, to, 0, 0, 0, rows * width, 1)
            else:
                yield Move(device, to, own, start, width, end - start, rows)
            to += end - start


def _within(header: Header, row: int, width: int, parts: Sequence[Part]) -> Iterator[Read]:
    """Yield the reads of a single row, which may exceed one read."""
    for first in range(0, width, CHUNK_BYTES):
        last = min(width, first + CHUNK_BYTES)
        moves = []
        for device, at, own, ranges in parts:
            to = at + row * own
            for start, end in ranges:
                a, b = max(start, first), min(end, last)
                if a < b:
                    moves.append(Move(device, to + a - start, 0, a - first, 0, b - a, 1))
                to += end - start
        yield Read(header.file, header.start + row * width + first, last - first, moves)


def joined(reads: Iterable[Read]) -> Iterator[Read]:
    """Merge reads that are adjacent in a file, up to the most bytes of a read.

    Lists of moves are extended in place, because a read may cover thousands of small tensors.
    """
    held: Read | None = None
    for read in reads:
        if held and held[:2] == (read.file, read.start - held.nbytes) and held.nbytes + read.nbytes <= CHUNK_BYTES:
            held.moves.extend(move._replace(source=move.source + held.nbytes) for move in read.moves)
            held = held._replace(nbytes=held.nbytes + read.nbytes)
        else:
            if held:
                yield held
            held = read
    if held:
        yield held
