"""Exchanges through slots on CUDA devices: the parameters of their kernels."""

from __future__ import annotations

from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

from attrs import Factory, define, frozen

from tpplan.errors import InternalError
from tpplan.exec.cuda.launch import Operands, Work
from tpplan.exec.programs.program import HOST, INPUT, OUTPUT, RESIDUAL, SLOT, Await, Buffer, Copy, Queue, Signal, Sum
from tpplan.exec.protocol.slots import DATA_BYTES, FILLED, FIRST_QUEUE, regions
from tpplan.exec.protocol.words import BLOCKS, MOST_QUEUES, MOST_WORDS, OWN, RESIDUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpplan.exec.cuda.counters import Counters
    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.programs.program import Exchange, View


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


@frozen
class Place:
    """The addresses of a queue, for one of its devices.

    Attributes:
        slots: address of the first slot.
        messages: address of the device's message counter.
        freed: addresses of each receiver's count of freed messages; the sender reads them all, a receiver writes its
            own.
        copies: for the sender of a queue in host memory, the addresses of its copies of these counts; else empty.
    """

    slots: int
    messages: int
    freed: tuple[int, ...]
    copies: tuple[int, ...] = ()

    @property
    def entries(self) -> tuple[tuple[int, int, int, int], ...]:
        """The queue's entries, one for each receiver."""
        known = self.copies or self.freed
        return tuple((self.messages, f, 0 if i else self.slots, known[i]) for i, f in enumerate(self.freed))


@define
class _Send:
    """Columns to send, and optionally to copy to the device's own output.

    Attributes:
        first: first byte in a row.
        width: bytes in a row.
        lanes: indices of the queues to send to.
        local: 1 plus the first byte in the output's row, or 0 if they are not copied there.
    """

    first: int
    width: int
    lanes: list[int] = Factory(list)
    local: int = 0


@define
class _Entries:
    """Builds a table.

    Attributes:
        item: bytes per element.
        queues: the queues with their entries, first those that the device fills.
        filled: number of entries of queues that it fills.
        by_reader: for each reader of a queue in host memory that it fills, the index of its entry.
        sends: the sends in order.
        receives: the receives in order.
        width: bytes of a row of the sum; 0 if there is none.
        bits: bitwise or of all byte offsets and widths so far.
    """

    item: int
    queues: list[tuple[Queue, tuple[int, int, int, int]]]
    filled: int
    by_reader: dict[int, int]
    sends: list[_Send] = Factory(list)
    receives: list[tuple[int, ...]] = Factory(list)
    width: int = 0
    bits: int = 0

    @property
    def simple(self) -> bool:
        """Whether :mod:`tpplan.exec.kernels.packet` supports this, if everything is aligned to packets."""
        if self.width:
            return all((send.first, send.width) == (0, self.width) for send in self.sends)
        return len(self.sends) <= 1 and all(message == width for _, _, message, _, _, width in self.receives)

    def lane(self, queue: Queue) -> int:
        """Return the index of a queue."""
        return [each for each, _ in self.queues].index(queue)

    def source(self, queue: Queue) -> tuple[int, int]:
        """Return the index of a queue to read, and 1 plus the index of the filled queue that it answers, or 0."""
        return self.lane(queue), self.by_reader.get(queue.sender, -1) + 1

    def columns(self, view: View) -> tuple[int, int]:
        """Return the first byte and the bytes of a view's columns."""
        return view.start * self.item, (view.stop - view.start) * self.item

    def copy(self, step: Copy) -> None:
        """Add a copy: a send, a receive, or a copy within the device."""
        first, width = self.columns(step.source)
        to, _ = self.columns(step.target)
        if step.target.buffer.queue is not None:
            self.bits |= first | width
            same = [send for send in self.sends if (send.first, send.width) == (first, width)]
            self.sends += [] if same else [_Send(first, width)]
            (same or self.sends)[-1].lanes.append(self.lane(step.target.buffer.queue))
        elif step.source.buffer.queue is not None:
            message = step.source.width * self.item
            self.bits |= message | first | width | to
            self.receives.append((*self.source(step.source.buffer.queue), message, to, first, width))
        else:
            self.bits |= first | width | to
            same = [send for send in self.sends if (send.first, send.width, send.local) == (first, width, 0)]
            self.sends += [] if same else [_Send(first, width)]
            (same or self.sends)[-1].local = to + 1

    def add(self, step: Sum) -> None:
        """Add the sources of a sum."""
        self.width = self.columns(step.target)[1]
        self.bits |= self.width
        for view in step.sources:
            queue = view.buffer.queue
            other = OWN if view.buffer.role == INPUT else RESIDUE
            self.receives.append((other, 0) if queue is None else self.source(queue))

    def words(self, stride: int, most: int) -> list[int]:
        """Return the table.

        Raises:
            InternalError: there are too many entries.
        """
        ends = [0, *accumulate(len(send.lanes) for send in self.sends)]
        sends = [(s.first, s.width, a, b, s.local) for s, (a, b) in zip(self.sends, pairwise(ends), strict=True)]
        lanes = [lane for send in self.sends for lane in send.lanes]
        entries = (entry for _, entry in self.queues), sends, [lanes], self.receives
        kinds = [list(chain.from_iterable(each)) for each in entries]
        _, *places, end = accumulate(map(len, kinds), initial=FIRST_QUEUE)
        if len(self.queues) > MOST_QUEUES or end > MOST_WORDS:
            raise InternalError(f"no slot kernel has room for {len(self.queues)} queues and {end} words")
        counts = self.filled, len(self.queues), len(sends), len(self.receives)
        only = self.sends[0] if len(self.sends) == 1 else _Send(0, 0)
        slots = max((queue.slots for queue, _ in self.queues), default=1)  # all are in one kind of memory
        sizes = regions(stride, most)[1], stride, slots, self.width or only.width, only.first, only.local
        return [*counts, *sizes, *places, *chain.from_iterable(kinds)]


@frozen
class SlotTable:
    """The parameter table of a slot kernel.

    Attributes:
        words: the words that follow the operands.
        bits: bitwise or of all byte offsets in rows of operands and of all widths, for alignment.
        simple: whether at most one message is sent, and every received message is used in full.
    """

    words: list[int]
    bits: int
    simple: bool


def table(exchange: Exchange, item: int, places: dict[Queue, Place], stride: int, most: int = BLOCKS) -> SlotTable:
    """Return the table of an exchange through slots.

    Args:
        exchange: the exchange of one device.
        item: bytes per element.
        places: addresses of its queues.
        stride: bytes of a slot.
        most: maximum number of blocks that may run.

    Raises:
        InternalError: it has steps that slot kernels do not support, or too many.
    """
    device = exchange.stream.device
    own = [(queue, entry) for queue, place in places.items() if queue.sender == device for entry in place.entries]
    read = [(queue, entry) for queue, place in places.items() if queue.sender != device for entry in place.entries]
    readers = [reader for queue, place in places.items() if queue.sender == device for reader in queue.receivers]
    by_reader = {reader: i for i, reader in enumerate(readers) if places[own[i][0]].copies}
    entries = _Entries(item, own + read, len(own), by_reader)
    for step in exchange.steps:
        if isinstance(step, Copy):
            entries.copy(step)
        elif isinstance(step, Sum):
            entries.add(step)
        elif step.flag.name not in {"full", "free"}:
            raise InternalError(f"no slot kernel for {step}")
    return SlotTable(entries.words(stride, most), entries.bits, entries.simple)


def queues(exchange: Exchange) -> tuple[Queue, ...]:
    """Return the queues that an exchange uses."""
    flags = (step.flag for step in exchange.steps if isinstance(step, Await | Signal))
    return tuple(dict.fromkeys(flag.queue for flag in flags))


def widest(exchanges: Iterable[Exchange]) -> int:
    """Return the number of columns of a program's widest message."""
    steps = (step for exchange in exchanges for step in exchange.steps)
    return max((s.target.width for s in steps if isinstance(s, Copy) and s.target.buffer.role == SLOT), default=0)
