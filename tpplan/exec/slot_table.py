"""The table of a slot kernel: what one device does in an exchange, in words of 8 bytes.

A table starts with the number and the offset of the entries of each kind, and then has the entries. Columns are in
bytes. A device's counters are numbered; each has 4 bytes for every block of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import Factory, define, frozen

from tpplan.errors import InternalError
from tpplan.exec.program import INPUT, SLOT, Await, Copy, Queue, Signal, Sum

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.exec.program import Exchange, View

#: Blocks of threads of the largest launch, and threads of a block: each block has a part of every slot of its own.
BLOCKS, THREADS = 32, 256
#: Bytes that a packet carries, and that it takes in a slot.
DATA_BYTES, PACKET_BYTES = 8, 16

#: Where the number of entries of each kind is; their offset is in the next word.
SEQUENCES, CREDITS, SENDS, LOCALS, RECEIVES = 0, 2, 4, 6, 8
#: Bytes of a block's part of a slot, of a slot, and of a row of a sum.
REGION, STRIDE, WIDTH = 10, 11, 12
HEADER_WORDS = 13
#: Words of the longest table, and most counters of a device, that a kernel has room for.
MOST_WORDS, MOST_COUNTERS = 512, 128
#: Bytes of a counter: 4 for each block.
COUNTER_BYTES = 4 * BLOCKS

#: What a source of a sum is.
OWN, RESIDUE, FETCHED = 0, 1, 2


@frozen
class Place:
    """Where a queue is, for one of its devices.

    Attributes:
        slots: address of the first slot.
        sequence: which of the device's counters is of the messages.
        credits: the counts of the messages that each receiver has freed: its address, and which of the device's
            counters it is, or -1 if it is elsewhere. The sender reads all of them, a receiver writes its own.
    """

    slots: int
    sequence: int
    credits: tuple[tuple[int, int], ...]


def capacity(stride: int) -> int:
    """Return the bytes of data that fit a slot of ``stride`` bytes."""
    return BLOCKS * (stride // BLOCKS // (PACKET_BYTES * THREADS)) * THREADS * DATA_BYTES


@define
class _Entries:
    """A table in the making."""

    item: int
    places: dict[Queue, Place]
    sequences: list[int] = Factory(list)
    credits: list[tuple[int, int, int]] = Factory(list)
    sends: list[tuple[int, int, list[tuple[int, int]]]] = Factory(list)
    locals: list[tuple[int, ...]] = Factory(list)
    receives: list[tuple[int, ...]] = Factory(list)
    width: int = 0
    read: int = 0
    written: int = 0

    def sequence(self, queue: Queue) -> int:
        """Return the number of the device's counter of a queue, which is to be raised."""
        number = self.places[queue].sequence
        if number not in self.sequences:
            self.sequences.append(number)
        return number

    def columns(self, view: View) -> tuple[int, int]:
        """Return the first byte and the bytes of a view's columns."""
        return view.start * self.item, (view.stop - view.start) * self.item

    def copy(self, step: Copy) -> None:
        """Add what is sent, received, or copied within the device."""
        source, target = step.source, step.target
        if target.buffer.queue is not None:
            queue = target.buffer.queue
            first, width = self.columns(source)
            self.read |= first | width
            lane = (self.places[queue].slots, self.sequence(queue))
            self.credits += ((lane[1], number + 1, address) for address, number in self.places[queue].credits)
            if self.sends and self.sends[-1][:2] == (first, width):
                self.sends[-1][2].append(lane)
            else:
                self.sends.append((first, width, [lane]))
        elif source.buffer.queue is not None:
            place = self.places[source.buffer.queue]
            skip, width = self.columns(source)
            to, _ = self.columns(target)
            message = source.width * self.item
            self.written |= message | skip | width | to
            index = self.sequence(source.buffer.queue)
            self.receives.append((place.slots, index, place.credits[0][0], message, skip, width, to))
        else:
            entry = (self.columns(source)[0], *self.columns(target))
            self.read |= entry[0] | entry[2]
            self.written |= entry[1] | entry[2]
            self.locals.append(entry)

    def add(self, step: Sum) -> None:
        """Add the sources of a sum."""
        self.width = self.columns(step.target)[1]
        self.read |= self.width
        self.written |= self.width
        for view in step.sources:
            queue = view.buffer.queue
            if queue is None:
                self.receives.append((OWN if view.buffer.role == INPUT else RESIDUE, 0, 0, 0))
            else:
                place = self.places[queue]
                self.receives.append((FETCHED, place.slots, self.sequence(queue), place.credits[0][0]))

    def words(self, stride: int) -> list[int]:
        """Return the table."""
        lanes = [lane for _, _, each in self.sends for lane in each]
        sections: list[list[int]] = [self.sequences, [*_flat(self.credits)]]
        offset = HEADER_WORDS + sum(map(len, sections)) + 4 * len(self.sends)
        sends = []
        for first, width, each in self.sends:
            sends += [first, width, len(each), offset]
            offset += 2 * len(each)
        sections += [[*sends, *_flat(lanes)], [*_flat(self.locals)], [*_flat(self.receives)]]
        counts = [len(e) for e in (self.sequences, self.credits, self.sends, self.locals, self.receives)]
        header, offset = [], HEADER_WORDS
        for count, section in zip(counts, sections, strict=True):
            header += [count, offset]
            offset += len(section)
        region = stride // BLOCKS // (PACKET_BYTES * THREADS) * PACKET_BYTES * THREADS
        table = [*header, region, stride, self.width, *(word for section in sections for word in section)]
        if len(table) > MOST_WORDS:
            raise InternalError(f"a table of {len(table)} words is too long")
        return table


@frozen
class Table:
    """What a slot kernel is told.

    Attributes:
        words: of the table.
        read: bits of all bytes at which it starts to read a row, and of those that it reads.
        written: the same of what it writes.
    """

    words: list[int]
    read: int
    written: int


def table(exchange: Exchange, item: int, places: dict[Queue, Place], stride: int) -> Table:
    """Return the table of an exchange through slots.

    Args:
        exchange: of one device.
        item: bytes per element.
        places: of its queues.
        stride: bytes of a slot.

    Raises:
        InternalError: it has steps that no slot kernel knows, or too many.
    """
    entries = _Entries(item, places)
    for step in exchange.steps:
        if isinstance(step, Copy):
            entries.copy(step)
        elif isinstance(step, Sum):
            entries.add(step)
        elif step.flag.name not in {"full", "free"}:
            raise InternalError(f"no slot kernel for {step}")
    return Table(entries.words(stride), entries.read, entries.written)


def queues(exchange: Exchange) -> tuple[Queue, ...]:
    """Return the queues that an exchange uses."""
    flags = (step.flag for step in exchange.steps if isinstance(step, Await | Signal))
    return tuple(dict.fromkeys(flag.queue for flag in flags))


def widest(exchanges: Iterable[Exchange]) -> int:
    """Return the columns of the widest message of a program."""
    steps = (step for exchange in exchanges for step in exchange.steps)
    return max((s.target.width for s in steps if isinstance(s, Copy) and s.target.buffer.role == SLOT), default=0)


def _flat(rows: Iterable[Iterable[int]]) -> Iterable[int]:
    return (word for row in rows for word in row)
