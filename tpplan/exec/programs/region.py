"""Regions of memory, as far as programs can tell them apart without row counts and dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tpplan.exec.programs.program import OPERANDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpplan.exec.programs.program import View

Memory = tuple[object, ...]


class Region(NamedTuple):
    """Bytes that a command reads or writes.

    Attributes:
        view: the command's view of them.
        memory: identifies the memory; regions of different memories never overlap.
        cut: (piece, pieces) of the memory; different pieces of equally many do not overlap.
        shape: layout of rows in the piece; regions of different layouts are assumed to overlap.
        rows: (part, parts) of the rows whose data it holds.
        start: first column.
        stop: one past the last column.
    """

    view: View
    memory: Memory
    cut: tuple[int, int]
    shape: tuple[int, int]
    rows: tuple[int, int]
    start: int
    stop: int

    def overlaps(self, other: Region) -> bool:
        """Return whether two regions of the same memory may overlap."""
        if self.cut != other.cut:
            return self.cut[1] != other.cut[1]
        return self.shape != other.shape or (self.start < other.stop and other.start < self.stop)

    def covers(self, other: Region) -> bool:
        """Return whether whatever overlaps ``other``, a region of the same memory, also overlaps this one."""
        return (
            self.start <= other.start
            and other.stop <= self.stop
            and self.cut == other.cut
            and self.shape == other.shape
        )


def regions(view: View, program: int, parts: int, slot: int = 0) -> Iterator[Region]:
    """Yield the regions of a view.

    Operands of different programs count as different memory, and so do different rows of an operand. The context's
    memory is shared by all programs, which may use it with rows of different lengths and dtypes.

    Args:
        view: a view in a command.
        program: number of its program.
        parts: number of parts of the operands' rows such that every view of the program covers whole parts.
        slot: index of the queue's slot, if the view is in one.
    """
    buffer, start, stop, part, of = view[:5]
    if buffer.role in OPERANDS:
        for each in range(part * parts // of, (part + 1) * parts // of):
            yield Region(view, (buffer.role, buffer.device, program, each), (0, 1), (0, 0), (0, 1), start, stop)
    else:
        memory = (buffer.queue, slot) if buffer.queue else (buffer.role, buffer.device)
        cut, shape = (buffer.piece, buffer.pieces), (program, view.width)
        yield Region(view, memory, cut, shape, (part, of), start, stop)


def gap(spans: Iterable[tuple[int, int]], start: int, stop: int) -> int | None:
    """Return the first column from ``start`` to ``stop`` that no span (start, stop) contains; None if all do."""
    for first, last in sorted(spans):
        if first <= start < last:
            start = last
    return start if start < stop else None
