"""Regions of memory, as far as programs without rows and dtypes can tell them apart."""

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
        view: how the command calls them.
        memory: regions of different memories never overlap.
        cut: (piece, pieces) of the memory; different ones of as many pieces do not overlap.
        shape: how rows lie in the piece; regions of different shapes are taken to overlap.
        rows: (part, parts) of the rows whose data is there.
        start: first column.
        stop: one past the last.
    """

    view: View
    memory: Memory
    cut: tuple[int, int]
    shape: tuple[int, int]
    rows: tuple[int, int]
    start: int
    stop: int

    def overlaps(self, other: Region) -> bool:
        """Tell whether there may be bytes of both, given that they are of the same memory."""
        if self.cut != other.cut:
            return self.cut[1] != other.cut[1]
        return self.shape != other.shape or (self.start < other.stop and other.start < self.stop)

    def covers(self, other: Region) -> bool:
        """Tell whether what overlaps the other overlaps this one too, given that they are of the same memory."""
        return (
            self.start <= other.start
            and other.stop <= self.stop
            and self.cut == other.cut
            and self.shape == other.shape
        )


def regions(view: View, program: int, parts: int, slot: int = 0) -> Iterator[Region]:
    """Yield the regions of a view.

    Operands of different programs are different memory, and so are different rows of one. The context's memory is
    everybody's: what two programs keep in the same place may have rows of different lengths and dtypes.

    Args:
        view: in a command.
        program: a number for the program that it is in.
        parts: into which the rows of operands can be cut so that every view of the program has whole parts.
        slot: of the queue, if there is one.
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
    """Return the first column from ``start`` to ``stop`` that is in no span (start, stop)."""
    for first, last in sorted(spans):
        if first <= start < last:
            start = last
    return start if start < stop else None
