"""Regions of memory, as far as programs can tell them apart without row counts and dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tpplan.exec.programs.program import OPERANDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.exec.programs.program import View

Memory = tuple[object, ...]


class Region(NamedTuple):
    """Bytes that a command reads or writes.

    Attributes:
        view: the command's view of them.
        memory: identifies the memory, an operand's within its call; regions of different memories never overlap.
        cut: (piece, pieces) of the memory; different pieces of equally many do not overlap.
        width: columns of the rows in the piece; 0 for operands.
        rows: (part, parts) of the rows whose data it holds.
        start: first column.
        stop: one past the last column.
    """

    view: View
    memory: Memory
    cut: tuple[int, int]
    width: int
    rows: tuple[int, int]
    start: int
    stop: int

    def overlaps(self, other: Region, *, alike: bool) -> bool:
        """Return whether two regions of the same memory may overlap.

        Args:
            other: the other region.
            alike: whether both are of the same call, so that rows of the same width are equally long; regions with rows
                of different lengths are assumed to overlap.
        """
        if self.cut != other.cut:
            return self.cut[1] != other.cut[1]
        return not alike or self.width != other.width or (self.start < other.stop and other.start < self.stop)

    def covers(self, other: Region, *, alike: bool) -> bool:
        """Return whether whatever overlaps ``other``, a region of the same memory, also overlaps this one."""
        return (
            alike
            and self.start <= other.start
            and other.stop <= self.stop
            and self.cut == other.cut
            and self.width == other.width
        )


def regions(view: View, parts: int) -> list[Region]:
    """Return the regions of a view.

    Different rows of an operand count as different memory. The context's memory is shared by all programs, which may
    use it with rows of different lengths and dtypes.

    Args:
        view: a view in a command; of a queue it is in the first slot.
        parts: number of parts of the operands' rows such that every view of the program covers whole parts.
    """
    (role, device, piece, pieces, queue), start, stop, part, of, width = view
    if role in OPERANDS:
        places = range(part * parts // of, (part + 1) * parts // of)
        return [Region(view, (role, device, each), (0, 1), 0, (0, 1), start, stop) for each in places]
    memory = (queue, 0) if queue else (role, device)
    return [Region(view, memory, (piece, pieces), width, (part, of), start, stop)]


def gap(spans: Iterable[tuple[int, int]], start: int, stop: int) -> int | None:
    """Return the first column from ``start`` to ``stop`` that no span (start, stop) contains; None if all do."""
    for first, last in sorted(spans):
        if first <= start < last:
            start = last
    return start if start < stop else None
