"""Exchanges in frames on CUDA devices: the parameters of their kernels."""

from __future__ import annotations

from itertools import chain, takewhile
from typing import TYPE_CHECKING

from attrs import Factory, define, frozen

from tpplan.errors import InternalError
from tpplan.exec.cuda.encode_slots import queues
from tpplan.exec.cuda.launch import Operands, Work
from tpplan.exec.programs.program import HOST, INPUT, OUTPUT, RESIDUAL, Buffer, Copy, Queue, Sum
from tpplan.exec.protocol.frames import FILLED, FIRST_QUEUE, LINES_BYTES, QUEUE_WORDS, VECTOR_BYTES, VECTORS
from tpplan.exec.protocol.words import COUNTER_BYTES, MOST_QUEUES, MOST_WORDS, OWN, RESIDUE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.exec.cuda.counters import Counters
    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.programs.program import Exchange, View

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


@frozen
class Place:
    """The addresses of a queue, for one of its devices.

    Attributes:
        slots: address of the first slot.
        numbers: address of the device's frame numbers, 4 bytes for each block.
        full: address of the sender's lines of flags.
        freed: address of the lines of flags of each receiver that the device writes or waits for.
        copies: for the sender, the address of its copy of each of these, 4 bytes for each block.
    """

    slots: int
    numbers: int
    full: int
    freed: tuple[int, ...]
    copies: tuple[int, ...] = ()

    def entries(self, width: int) -> list[tuple[int, ...]]:
        """Return the queue's entries, one for each receiver, given the bytes of a row of its messages."""
        known = self.copies or (0,) * len(self.freed)
        return [
            (self.numbers, self.slots, self.full, freed, noted, width)
            for freed, noted in zip(self.freed, known, strict=True)
        ]


@frozen
class FrameTable:
    """The parameter table of a frame kernel.

    Attributes:
        words: the words that follow the operands.
        bits: bitwise or of all byte offsets in rows of operands and of all widths, for alignment.
        longest: bytes of the longest row that is sent, received or copied.
    """

    words: list[int]
    bits: int
    longest: int


@define
class _Entries:
    """Builds a table.

    Attributes:
        item: bytes per element.
        places: addresses of the queues.
        widths: bytes of a row of each queue's messages, in the order of the entries.
        filled: number of entries of the queue that the device fills.
        message: first byte in a row, and bytes, of the columns that the device sends or sums.
        local: first byte in a row, and bytes, of the copy to its own output, and first byte in the output's row.
        share: first byte in a row, and bytes, of the columns that it sums.
        shared: whether it also sends the sum.
        sources: the sum's sources in order.
        moves: the moves in order.
        bits: bitwise or of all byte offsets and widths so far.
    """

    item: int
    places: dict[Queue, Place]
    widths: dict[Queue, int] = Factory(dict)
    filled: int = 0
    message: tuple[int, int] = (0, 0)
    local: tuple[int, int, int] = (0, 0, 0)
    share: tuple[int, int] = (0, 0)
    shared: bool = False
    sources: list[int] = Factory(list)
    moves: list[tuple[int, ...]] = Factory(list)
    bits: int = 0

    def columns(self, view: View) -> tuple[int, int]:
        """Return the first byte and the bytes of a view's columns."""
        found = view.start * self.item, (view.stop - view.start) * self.item
        self.bits |= found[0] | found[1]
        return found

    def received(self, view: View, queue: Queue) -> int:
        """Return the index of the entry of a queue that is read, adding the queue if it is new."""
        if queue not in self.widths:
            self.widths[queue] = view.width * self.item
            self.bits |= self.widths[queue]
        before = takewhile(lambda each: each != queue, self.widths)
        return sum(len(self.places[each].freed) for each in before)

    def copy(self, step: Copy) -> None:
        """Add a copy: a send, a receive, or a copy within the device."""
        (first, width), (to, _) = self.columns(step.source), self.columns(step.target)
        if step.source.buffer.role == OUTPUT and (first, width) == self.share:
            self.shared = True
        elif queue := step.target.buffer.queue:
            if self.widths:
                raise InternalError(f"no frame kernel sends anything but one message, first: {step}")
            self.message, self.widths[queue], self.filled = (first, width), width, len(self.places[queue].freed)
        elif queue := step.source.buffer.queue:
            skip = to if self.shared else first  # sums have their place in a whole row
            self.moves.append((self.received(step.source, queue), to, skip, width))
        elif self.local[1]:
            raise InternalError(f"no frame kernel copies twice within its device: {step}")
        else:
            self.local = first, width, to

    def add(self, step: Sum) -> None:
        """Add the sources of a sum."""
        self.share = self.columns(step.target)
        self.message = self.message if self.filled else self.share
        for view in step.sources:
            if queue := view.buffer.queue:
                self.sources.append(self.received(view, queue))
            else:
                self.sources.append(OWN if view.buffer.role == INPUT else RESIDUE)

    def table(self, blocks: int, stride: int) -> FrameTable:
        """Return the table.

        Raises:
            InternalError: there are too many entries.
        """
        entries = [entry for queue, width in self.widths.items() for entry in self.places[queue].entries(width)]
        longest = max(self.message[1], self.local[1], *self.widths.values(), 0)
        slots = max((queue.slots for queue in self.widths), default=1)
        at = FIRST_QUEUE + QUEUE_WORDS * len(entries)
        counts = self.filled, len(entries), len(self.sources), len(self.moves)
        head = *counts, blocks, stride, slots, *self.message, longest, *self.local
        places = int(self.shared), *self.share, at, at + len(self.sources)
        words = [*head, *places, *chain.from_iterable(entries), *self.sources, *chain.from_iterable(self.moves)]
        if len(entries) > MOST_QUEUES or FILLED + len(words) > MOST_WORDS:
            raise InternalError(f"no frame kernel has room for {len(entries)} queues and {FILLED + len(words)} words")
        return FrameTable(words, self.bits, longest)


def table(exchange: Exchange, item: int, places: dict[Queue, Place], blocks: int, stride: int) -> FrameTable:
    """Return the table of an exchange in frames.

    Args:
        exchange: the exchange of one device.
        item: bytes per element.
        places: addresses of its queues.
        blocks: number of blocks that share a slot.
        stride: bytes of a slot.

    Raises:
        InternalError: it has steps that frame kernels do not support, or too many.
    """
    entries = _Entries(item, places)
    for step in exchange.steps:
        if isinstance(step, Copy):
            entries.copy(step)
        elif isinstance(step, Sum):
            entries.add(step)
        elif step.flag.name not in {"full", "free"}:
            raise InternalError(f"no frame kernel for {step}")
    return entries.table(blocks, stride)
