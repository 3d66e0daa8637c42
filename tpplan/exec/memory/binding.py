"""Binding of a program's views to tensors, for given operands and a context's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch import Tensor

from tpplan.core.workspace import ALIGNMENT
from tpplan.errors import InternalError
from tpplan.exec.programs.program import EXCHANGE, OPERANDS, SLOT, Flag, Queue

if TYPE_CHECKING:
    from collections import Counter

    from tpplan.exec.programs.program import Buffer, View


#: Integer dtype of each size in bytes, to handle elements of any dtype bitwise: a NaN equals itself.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@frozen
class Memory:
    """The memory of a context; every tensor is contiguous uint8 and starts at a multiple of 64 bytes.

    Attributes:
        exchange: exchange buffer ``[bytes]`` of each device.
        rings: pinned host memory ``[bytes]`` of each sender, the host included; programs divide it into slots.
        slots: returns the slots ``[slots, slot bytes]`` of a queue, always the same tensor for the same queue.
        flags: memory ``[bytes]`` for the counters of kernels, on each device and on the host.
    """

    exchange: Mapping[int, Tensor] = field(repr=False)
    rings: Mapping[int, Tensor] = field(repr=False)
    slots: Callable[[Queue], Tensor] = field(repr=False)
    flags: Mapping[int, Tensor] = field(factory=dict, repr=False)

    def block(self, buffer: Buffer, slot: int) -> Tensor:
        """Return the bytes of a buffer of the context, rounded down to a multiple of 64.

        Args:
            buffer: ``exchange``, ``stage`` or ``slot``.
            slot: index in the queue; see :func:`slot_number`.
        """
        if buffer.role == SLOT:
            return self.slots(_queue(buffer))[slot]
        whole = (self.exchange if buffer.role == EXCHANGE else self.rings)[buffer.device]
        size = whole.shape[0] // buffer.pieces // ALIGNMENT * ALIGNMENT
        return whole[buffer.piece * size : (buffer.piece + 1) * size]


def no_memory() -> Memory:
    """Return the empty memory of a closed context."""
    return Memory({}, {}, lambda _: torch.empty((0, 0), dtype=torch.uint8, device="cpu"))


def pitch(matrix: Tensor) -> int:
    """Return the row pitch of ``[rows, columns]`` in bytes; for a single row, its size."""
    rows, columns = matrix.shape
    return (columns if rows == 1 else matrix.stride(0)) * matrix.element_size()


def span(view: View, rows: int) -> tuple[int, int]:
    """Return the range of rows of a view's part, end exclusive; it may be empty."""
    return rows * view.part // view.parts, rows * (view.part + 1) // view.parts


def resolve(
    view: View, operands: Mapping[Buffer, Tensor], memory: Memory, rows: int, dtype: torch.dtype, *, slot: int = 0
) -> Tensor:
    """Return a view's elements ``[rows of its part, columns]``, without copying.

    Args:
        view: view of an operand or of the context's memory.
        operands: the caller's tensors, ``[rows, columns]`` with any strides.
        memory: memory of the context, viewed as ``dtype``.
        rows: rows of the operands.
        dtype: dtype of the operands.
        slot: index of the slot in a queue.

    Raises:
        InternalError: the part does not fit its place in the context's memory.
    """
    first, end = span(view, rows)
    if view.buffer.role in OPERANDS:
        tensor = operands[view.buffer]
        if view.parts > 1:
            tensor = tensor.narrow(0, first, end - first)
    else:
        block = memory.block(view.buffer, slot)
        size = (end - first) * view.width * dtype.itemsize
        if size > block.shape[0]:
            raise InternalError(f"{view} takes {size} bytes, but its place has {block.shape[0]}")
        tensor = block[:size].view(dtype).view(end - first, view.width)
    if view.start == 0 and view.stop == tensor.shape[1]:
        return tensor
    return tensor.narrow(1, view.start, view.stop - view.start)


#: Returns the address of a view's first element, its row pitch in bytes and its number of rows, for given operands and
#: their rows.
Finder = Callable[[Mapping["Buffer", Tensor], int], tuple[int, int, int]]


def finder(view: View, memory: Memory, itemsize: int) -> Finder:
    """Return a finder for a view, ten times as fast as :func:`resolve`; its columns must be contiguous.

    Args:
        view: view of an operand or of the context's memory, but not of a slot.
        memory: memory of the context, at fixed addresses.
        itemsize: bytes of an element.
    """
    buffer, start = view.buffer, view.start * itemsize

    def find(operands: Mapping[Buffer, Tensor], rows: int) -> tuple[int, int, int]:
        tensor = operands[buffer]
        return tensor.data_ptr() + start, tensor.stride()[0] * itemsize, rows

    def find_part(operands: Mapping[Buffer, Tensor], rows: int) -> tuple[int, int, int]:
        address, step, _ = find(operands, rows)
        first, end = span(view, rows)
        return address + first * step, step, end - first

    if buffer.role in OPERANDS:
        return find if view.parts == 1 else find_part
    block, step = memory.block(buffer, 0), view.width * itemsize
    address, room = block.data_ptr() + start, block.shape[0]

    def find_own(_: Mapping[Buffer, Tensor], rows: int) -> tuple[int, int, int]:
        first, end = span(view, rows)
        if (end - first) * step > room:
            raise InternalError(f"{view} takes {(end - first) * step} bytes, but its place has {room}")
        return address, step, end - first

    return find_own


def slot_number(view: View, device: int, raised: Counter[Flag]) -> int:
    """Return the index of the slot that a view refers to, in its queue; 0 if the view is not of a slot.

    Args:
        view: view that the device reads or writes.
        device: sender or receiver of the queue.
        raised: number of times that each flag was raised.
    """
    if view.buffer.role != SLOT:
        return 0
    queue = _queue(view.buffer)
    return raised[Flag("full", queue) if device == queue.sender else Flag("free", queue, device)] % queue.slots


def _queue(buffer: Buffer) -> Queue:
    if buffer.queue is None:
        raise InternalError(f"{buffer} is of no queue")
    return buffer.queue
