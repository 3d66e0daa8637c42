"""Exchanges through slots on CUDA devices: the parameters of their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.exec.cuda.launch import Operands, Work
from tpplan.exec.programs.program import HOST, INPUT, OUTPUT, RESIDUAL, Buffer
from tpplan.exec.protocol.slots import DATA_BYTES, FILLED, Place, queues, regions, table, widest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpplan.exec.cuda.counters import Counters
    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.programs.program import Exchange, Queue


def fresh(exchanges: Iterable[Exchange], counters: Counters) -> set[Queue]:
    """Return the queues that were not used before, whose slots must be cleared."""
    found = {queue for exchange in exchanges for queue in queues(exchange)}
    return {queue for queue in found if (queue.sender, "messages", queue) not in counters}


def number(queue: Queue, counters: Counters) -> None:
    """Number the counters of a queue in device memory."""
    for device in (queue.sender, queue.place):
        counters.number(device, "messages", queue)
    counters.number(queue.sender, "freed", queue, queue.place)


def prepare(exchanges: Sequence[Exchange], item: int, memory: Memory, counters: Counters, most: int) -> list[Work]:
    """Return the work of each device.

    Args:
        exchanges: the exchanges of a program.
        item: bytes per element.
        memory: the context's memory.
        counters: the context's counters.
        most: maximum number of blocks that may run.
    """
    row_bytes, works = widest(exchanges) * item, []
    for exchange in exchanges:
        device = exchange.stream.device
        places = {queue: _place(queue, device, memory, counters) for queue in queues(exchange)}
        stride = max((memory.slots(queue).shape[1] for queue in places), default=0)
        made = table(exchange, item, places, stride, most)
        buffers = tuple(Buffer(role, device) for role in (INPUT, OUTPUT, RESIDUAL))
        blocks = regions(stride, most)[0] or 1  # a device that only copies needs no slot
        operands = Operands(buffers, made.bits, DATA_BYTES)
        works.append(Work(exchange.stream, FILLED, made.words, operands, row_bytes, blocks, made.simple))
    return works


def _place(queue: Queue, device: int, memory: Memory, counters: Counters) -> Place:
    """Return where a device finds a queue; its sender has the credits, unless that is the host's memory."""
    readers = queue.receivers if device == queue.sender else (device,)
    home = HOST if queue.place == HOST else queue.sender
    knows = device == queue.sender != home
    return Place(
        memory.slots(queue).data_ptr(),
        counters.address(device, "messages", queue),
        tuple(counters.address(home, "freed", queue, reader) for reader in readers),
        tuple(counters.address(device, "known", queue, reader) for reader in readers if knows),
    )
