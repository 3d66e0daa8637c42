"""Memory that stands in for tensors which other processes cannot reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from attrs import frozen

from tpplan.core.workspace import ALIGNMENT
from tpplan.errors import InternalError
from tpplan.exec.programs.fence import own
from tpplan.exec.programs.program import EXCHANGE, INPUT, OPERANDS, OUTPUT, Buffer, Copy, Sum, View, flat, reads, writes

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    import torch
    from torch import Tensor

    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.programs.program import Program


@frozen
class Mirrors:
    """The mirrored operands of a program, the same in all processes.

    A mirror is a piece of its device's exchange buffer, of which each device needs one or two. In a sum, a device's
    input and output have the same one, as sums may be in place.

    Attributes:
        columns: columns of each mirrored operand.
        pieces: the mirror of each.
    """

    columns: Mapping[Buffer, int]
    pieces: Mapping[Buffer, Buffer]

    @classmethod
    def of(cls, program: Program) -> Self:
        """Return the operands that a device other than their own reads or writes.

        Where devices relay what they read from another, all operands are mirrored: kernels then move pieces of the same
        size, for which all operands have to be aligned alike.
        """
        steps = [*flat(program)]
        touched = [(view, step.stream.device) for step in steps for view in (*reads(step), *writes(step))]
        found = {view.buffer for view, device in touched if view.buffer.device != device}
        is_sum = any(isinstance(step, Sum) for step in steps)
        if not is_sum and any(buffer.role == INPUT for buffer in found):
            found = {view.buffer for view, _ in touched if view.buffer.role in OPERANDS}
        counts, pieces = Counter(buffer.device for buffer in found), dict[Buffer, Buffer]()
        for buffer in sorted(found):
            before = sum(other.device == buffer.device for other in pieces)
            piece, count = (0, 1) if is_sum else (before, counts[buffer.device])
            pieces[buffer] = Buffer(EXCHANGE, buffer.device, piece, count)
        return cls({each: max(v.stop for v, _ in touched if v.buffer == each) for each in pieces}, pieces)

    def rows(self, room: int, item_bytes: int) -> int:
        """Return how many rows there is room for at a time.

        Args:
            room: bytes of each device's exchange buffer.
            item_bytes: bytes of an element.

        Raises:
            InternalError: there is no room for one.
        """
        rows = min(
            room // piece.pieces // ALIGNMENT * ALIGNMENT // (self.columns[buffer] * item_bytes)
            for buffer, piece in self.pieces.items()
        )
        if rows < 1:
            raise InternalError(f"mirrors of {max(self.columns.values())} columns have no room in {room} bytes")
        return rows

    def over(self, memory: Memory, rows: int, dtype: torch.dtype) -> dict[Buffer, Tensor]:
        """Return the mirrors ``[rows, columns]`` of all devices.

        Args:
            memory: memory with the exchange buffers of all devices.
            rows: rows of the operands.
            dtype: dtype of the operands.
        """
        sizes = {buffer: rows * columns * dtype.itemsize for buffer, columns in self.columns.items()}
        return {
            buffer: memory.block(piece, 0)[: sizes[buffer]].view(dtype).view(rows, self.columns[buffer])
            for buffer, piece in self.pieces.items()
        }

    def inward(self, devices: Container[int]) -> Iterator[Copy]:
        """Yield the copies of these devices' inputs to mirrors, before the kernels run."""
        for buffer, (operand, mirror) in self._views(devices):
            if buffer.role != OUTPUT:
                yield Copy(own(buffer.device), operand, mirror)

    def outward(self, devices: Container[int]) -> Iterator[Copy]:
        """Yield the copies of mirrors to these devices' outputs, after the kernels."""
        for buffer, (operand, mirror) in self._views(devices):
            if buffer.role == OUTPUT:
                yield Copy(own(buffer.device), mirror, operand)

    def _views(self, devices: Container[int]) -> Iterator[tuple[Buffer, tuple[View, View]]]:
        for buffer, piece in self.pieces.items():
            columns = self.columns[buffer]
            if buffer.device in devices:
                yield buffer, (View(buffer, 0, columns), View(piece, 0, columns, width=columns))
