"""What to read of a checkpoint's files and where to put it: every byte is read once, whoever needs it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tpplan.checkpoint import Tensor as Header
    from tpplan.weights.slices import TensorSlice

    #: Of one device: which, where its part starts in its block, bytes of a row of it, and its ranges of a row's bytes.
    Part = tuple[int, int, int, tuple[tuple[int, int], ...]]

#: Bytes that are read at a time.
CHUNK_BYTES: Final = 8 * 2**20


class Move(NamedTuple):
    """Bytes that one device gets of a read: so many of each of some rows. Where there is one row, steps mean nothing.

    Attributes:
        device: index into the plan's devices.
        target: where they go, in bytes from the start of the device's block.
        target_step: bytes from one row to the next there.
        source: where they are, in bytes from the start of the read.
        source_step: bytes from one row to the next there.
        width: bytes of a row.
        rows: how many.
    """

    device: int
    target: int
    target_step: int
    source: int
    source_step: int
    width: int
    rows: int


class Read(NamedTuple):
    """Bytes of a file that are read at once.

    Attributes:
        file: name of the file.
        start: first byte.
        nbytes: how many.
        moves: where they go.
    """

    file: str
    start: int
    nbytes: int
    moves: list[Move]


def reads_of(header: Header, held: Sequence[tuple[TensorSlice, int]]) -> Iterator[Read]:
    """Yield the reads of one tensor.

    Args:
        header: says where it is.
        held: the parts of the devices, all cut in the same dimension, and where each starts in its device's block.
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
    """Yield where whole rows go."""
    for device, at, own, ranges in parts:
        to = at + row * own
        for start, end in ranges:
            if end - start == own == width:
                yield Move(device, to, 0, 0, 0, rows * width, 1)
            else:
                yield Move(device, to, own, start, width, end - start, rows)
            to += end - start


def _within(header: Header, row: int, width: int, parts: Sequence[Part]) -> Iterator[Read]:
    """Yield the reads of a single row, which may be wide."""
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
    """Yield the same, neighbours in a file together while they are no more than one read may be.

    Lists of moves grow in place: a read may be of thousands of small tensors.
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
