"""Exchanges in frames on CUDA devices: the parameters of their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.exec.cuda.launch import Operands, Work
from tpplan.exec.programs.program import HOST, INPUT, OUTPUT, RESIDUAL, Buffer
from tpplan.exec.protocol.frames import FILLED, LINES_BYTES, VECTOR_BYTES, VECTORS, Place, table
from tpplan.exec.protocol.slots import queues
from tpplan.exec.protocol.words import COUNTER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.exec.cuda.counters import Counters
    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.programs.program import Exchange, Queue

#: Counters that the lines of flags of a queue's sender, or of one receiver, take.
_LINES = LINES_BYTES // COUNTER_BYTES


def prepare(exchanges: Sequence[Exchange], item: int, memory: Memory, counters: Counters, blocks: int) -> list[Work]:
    """Return the work of each device.

    Args:
        exchanges: the exchanges of a program.
        item: bytes per element.
        memory: the context's memory.
        counters: the context's counters.
        blocks: number of blocks that share a slot.
    """
    works = []
    for exchange in exchanges:
        device = exchange.stream.device
        places = {queue: _place(queue, device, memory, counters) for queue in queues(exchange)}
        stride = max((memory.slots(queue).shape[1] for queue in places), default=0)
        made = table(exchange, item, places, blocks, stride)
        buffers = tuple(Buffer(role, device) for role in (INPUT, OUTPUT, RESIDUAL))
        operands = Operands(buffers, made.bits, VECTOR_BYTES)
        works.append(Work(exchange.stream, FILLED, made.words, operands, made.longest, blocks, pieces=VECTORS))
    return works


def _place(queue: Queue, device: int, memory: Memory, counters: Counters) -> Place:
    """Return the addresses of a queue for a device."""
    sends = device == queue.sender
    readers = queue.receivers if sends else (device,)
    return Place(
        memory.slots(queue).data_ptr(),
        counters.address(device, "frames", queue),
        counters.address(HOST, "filled", queue, count=_LINES),
        tuple(counters.address(HOST, "freed", queue, reader, count=_LINES) for reader in readers),
        tuple(counters.address(device, "known", queue, reader) for reader in readers if sends),
    )
