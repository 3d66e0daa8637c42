"""Binding: from the views of a program to tensors, for given operands and a given context's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch import Tensor

from tpplan.errors import InternalError
from tpplan.exec.programs.program import EXCHANGE, OPERANDS, SLOT, Flag, Queue
from tpplan.workspace import ALIGNMENT

if TYPE_CHECKING:
    from collections import Counter

    from tpplan.exec.programs.program import Buffer, View


#: Integers of so many bytes, as which elements of any dtype are handled: a NaN is equal to itself.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@frozen
class Memory:
    """What a context owns; every tensor is contiguous uint8 and starts at a multiple of 64 bytes.

    Attributes:
        exchange: exchange buffer ``[bytes]`` of each device.
        rings: pinned host memory ``[bytes]`` of each sender, the host included; programs divide it into slots.
        slots: the slots ``[slots, slot bytes]`` of a queue; the same tensor whenever it is asked for the same queue.
        flags: ``[bytes]`` on each device, and on the host, for the counters of kernels.
    """

    exchange: Mapping[int, Tensor] = field(repr=False)
    rings: Mapping[int, Tensor] = field(repr=False)
    slots: Callable[[Queue], Tensor] = field(repr=False)
    flags: Mapping[int, Tensor] = field(factory=dict, repr=False)

    def block(self, buffer: Buffer, slot: int) -> Tensor:
        """Return the bytes of one of the context's buffers, without those that no 64-byte boundary reaches.

        Args:
            buffer: ``exchange``, ``stage`` or ``slot``.
            slot: which of a queue's; see :func:`slot_number`.
        """
        if buffer.role == SLOT:
            return self.slots(_queue(buffer))[slot]
        whole = (self.exchange if buffer.role == EXCHANGE else self.rings)[buffer.device]
        size = whole.shape[0] // buffer.pieces // ALIGNMENT * ALIGNMENT
        return whole[buffer.piece * size : (buffer.piece + 1) * size]


def no_memory() -> Memory:
    """Return what a closed context has."""
    return Memory({}, {}, lambda _: torch.empty((0, 0), dtype=torch.uint8, device="cpu"))


def pitch(matrix: Tensor) -> int:
    """Return the bytes from one row of ``[rows, columns]`` to the next; of a single row, its bytes."""
    rows, columns = matrix.shape
    return (columns if rows == 1 else matrix.stride(0)) * matrix.element_size()


def span(view: View, rows: int) -> tuple[int, int]:
    """Return the first row of a view's part and the one past its last; a part may be empty."""
    return rows * view.part // view.parts, rows * (view.part + 1) // view.parts


def resolve(
    view: View, operands: Mapping[Buffer, Tensor], memory: Memory, rows: int, dtype: torch.dtype, *, slot: int = 0
) -> Tensor:
    """Return a view's elements ``[rows of its part, columns]``, without copying.

    Args:
        view: of an operand or of the context's memory.
        operands: the caller's tensors, ``[rows, columns]`` with any strides.
        memory: of the context; read as ``dtype``.
        rows: of the operands.
        dtype: of the operands.
        slot: which of a queue's slots.

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


#: Returns the address of a view's first element, the bytes from a row to the next, and how many rows there are, for
#: given operands and their rows.
Finder = Callable[[Mapping["Buffer", Tensor], int], tuple[int, int, int]]


def finder(view: View, memory: Memory, itemsize: int) -> Finder:
    """Return what finds a view's elements as :func:`resolve` does, in a tenth of the time; columns are contiguous.

    Args:
        view: of an operand or of the context's memory, but not of a slot.
        memory: of the context, which does not move.
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
    """Return which of its queue's slots a device means by a view; 0 if the view is of no slot.

    Args:
        view: that the device reads or writes.
        device: sender or receiver.
        raised: how often each flag was raised.
    """
    if view.buffer.role != SLOT:
        return 0
    queue = _queue(view.buffer)
    return raised[Flag("full", queue) if device == queue.sender else Flag("free", queue, device)] % queue.slots


def _queue(buffer: Buffer) -> Queue:
    if buffer.queue is None:
        raise InternalError(f"{buffer} is of no queue")
    return buffer.queue
