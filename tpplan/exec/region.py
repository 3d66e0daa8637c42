"""Regions of memory, as far as programs without rows and dtypes can tell them apart."""

from __future__ import annotations

from collections import defaultdict
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from tpplan.exec.program import OPERANDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.exec.program import View


class Region(NamedTuple):
    """Bytes that a command reads or writes.

    Attributes:
        view: how the command calls them.
        memory: regions of different memories never overlap.
        cut: (piece, pieces) of the memory; different ones of as many pieces do not overlap.
        shape: how rows lie in the piece; regions of different shapes are taken to overlap.
        start: first column.
        stop: one past the last.
        part: of the rows.
        parts: of the rows.
    """

    view: View
    memory: tuple[object, ...]
    cut: tuple[int, int]
    shape: tuple[int, int]
    start: int
    stop: int
    part: int
    parts: int

    def overlaps(self, other: Region) -> bool:
        """Tell whether there may be bytes of both, given that they are of the same memory."""
        if self.cut != other.cut:
            return self.cut[1] != other.cut[1]
        return self.shape != other.shape or (
            self.start < other.stop
            and other.start < self.stop
            and self.part * other.parts < (other.part + 1) * self.parts
            and other.part * self.parts < (self.part + 1) * other.parts
        )

    def covers(self, other: Region) -> bool:
        """Tell whether what overlaps the other overlaps this one too, given that they are of the same memory."""
        return (
            self.cut == other.cut
            and self.shape == other.shape
            and self.start <= other.start
            and other.stop <= self.stop
            and self.part * other.parts <= other.part * self.parts
            and (other.part + 1) * self.parts <= (self.part + 1) * other.parts
        )


def region(view: View, program: int, slot: int = 0) -> Region:
    """Return the region of a view.

    Operands of different programs are different memory. The context's memory is everybody's: what two programs keep in
    the same place may have different row lengths and dtypes, and so may two views of different widths.

    Args:
        view: in a command.
        program: a number for the program that it is in.
        slot: of the queue, if there is one.
    """
    buffer, start, stop = view.buffer, view.start, view.stop
    if buffer.role in OPERANDS:
        memory = (buffer.role, buffer.device, program)
        return Region(view, memory, (0, 1), (0, 0), start, stop, view.part, view.parts)
    place = (buffer.queue, slot) if buffer.queue else (buffer.role, buffer.device)
    return Region(view, place, (buffer.piece, buffer.pieces), (program, view.width), start, stop, 0, 1)


def missing(wanted: View, written: Iterable[View]) -> View | None:
    """Return the first columns and rows of a view that no other view of its buffer has; None if there are none."""
    views = tuple(written)
    parts = lcm(wanted.parts, *(view.parts for view in views))
    spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for view in views:
        for part in _parts(view, parts):
            spans[part].append((view.start, view.stop))
    for part in _parts(wanted, parts):
        reached = wanted.start
        for start, stop in sorted(spans[part]):
            reached = max(reached, stop) if start <= reached else reached
        if reached < wanted.stop:
            return wanted._replace(start=reached, part=part, parts=parts)
    return None


def _parts(view: View, parts: int) -> range:
    """Return which of so many parts of the rows a view has."""
    return range(view.part * parts // view.parts, (view.part + 1) * parts // view.parts)
