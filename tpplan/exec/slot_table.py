"""The table of a slot kernel: what one device does in an exchange through slots.

It starts with the number and the place of the entries of each kind, and then has the entries:

- sequences, of the queues that the device takes part in: the number of the counter of their messages;
- credits, of the slots that it fills: which counter of its own counts the messages, and the address of the count of
  those that a receiver has freed;
- frees, of the slots that it reads: which counter of its own counts the messages, and the address of the count of
  freed ones, that the sender reads;
- sends: first column, width, number and place of the lanes, and 1 more than the column of the output to which the
  device itself copies, or 0. A lane is the address of the slots, and which of the sequences;
- receives: of a move, the address of the slots, which of the sequences, the width of the message, the columns that are
  skipped, the width that is taken, and the column of the output; of a sum, what the source is, and then the first two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import Factory, define, frozen

from tpplan.errors import InternalError
from tpplan.exec.exchange_table import BLOCKS, MOST_SEQUENCES, MOST_WORDS, OPERANDS
from tpplan.exec.program import INPUT, SLOT, Await, Copy, Queue, Signal, Sum

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.exec.program import Exchange, View

#: Threads of a block: each block has a part of every slot of its own.
THREADS = 256
#: Bytes that a packet carries, and that it takes in a slot.
DATA_BYTES, PACKET_BYTES = 8, 16

#: Address, pitch, and largest aligned piece of the input, of the output, and of the residual.
X, OUT, RESIDUAL = OPERANDS, OPERANDS + 3, OPERANDS + 6
_TABLE = OPERANDS + 9
#: Where the number of entries of each kind is; their place is in the next word.
SEQUENCES, CREDITS, FREES, SENDS, RECEIVES = _TABLE, _TABLE + 2, _TABLE + 4, _TABLE + 6, _TABLE + 8
#: Bytes of a block's part of a slot, of a slot, and of a row of a sum.
REGION, STRIDE, WIDTH = _TABLE + 10, _TABLE + 11, _TABLE + 12
_ENTRIES = _TABLE + 13

#: What a source of a sum is.
OWN, RESIDUE, FETCHED = 0, 1, 2


@frozen
class Place:
    """Where a queue is, for one of its devices.

    Attributes:
        slots: address of the first slot.
        sequence: which of the device's counters is of the messages.
        credits: the addresses of the counts of the messages that each receiver has freed; the sender reads all of them,
            a receiver writes its own.
    """

    slots: int
    sequence: int
    credits: tuple[int, ...]


def regions(stride: int) -> tuple[int, int]:
    """Return into how many parts a slot of ``stride`` bytes is cut, one for each block, and their bytes."""
    least = PACKET_BYTES * THREADS
    blocks = min(BLOCKS, stride // least)
    return (blocks, stride // blocks // least * least) if blocks else (0, 0)


def capacity(stride: int) -> int:
    """Return the bytes of data that fit a slot of ``stride`` bytes."""
    blocks, region = regions(stride)
    return blocks * region // PACKET_BYTES * DATA_BYTES


@define
class _Send:
    """Columns that are sent, and perhaps copied to the device's own output."""

    first: int
    width: int
    lanes: list[tuple[int, int]] = Factory(list)
    local: int = 0


@define
class _Entries:
    """A table in the making."""

    item: int
    places: dict[Queue, Place]
    sequences: list[int] = Factory(list)
    credits: list[tuple[int, int]] = Factory(list)
    frees: list[tuple[int, int]] = Factory(list)
    sends: list[_Send] = Factory(list)
    receives: list[tuple[int, ...]] = Factory(list)
    width: int = 0
    read: int = 0
    written: int = 0

    def lane(self, queue: Queue) -> tuple[int, int]:
        """Return the address of a queue's slots, and which of the sequences counts its messages."""
        place = self.places[queue]
        if place.sequence not in self.sequences:
            self.sequences.append(place.sequence)
        return place.slots, self.sequences.index(place.sequence)

    def columns(self, view: View) -> tuple[int, int]:
        """Return the first byte and the bytes of a view's columns."""
        return view.start * self.item, (view.stop - view.start) * self.item

    def copy(self, step: Copy) -> None:
        """Add what is sent, received, or copied within the device."""
        first, width = self.columns(step.source)
        to, _ = self.columns(step.target)
        if step.target.buffer.queue is not None:
            queue = step.target.buffer.queue
            self.read |= first | width
            same = [send for send in self.sends if (send.first, send.width) == (first, width)]
            self.sends += [] if same else [_Send(first, width)]
            (same or self.sends)[-1].lanes.append(self.lane(queue))
            self.credits += ((self.places[queue].sequence, address) for address in self.places[queue].credits)
        elif step.source.buffer.queue is not None:
            message = step.source.width * self.item
            self.written |= message | first | width | to
            self.receives.append((*self.lane(step.source.buffer.queue), message, first, width, to))
            self.free(step.source.buffer.queue)
        else:
            self.read |= first | width
            self.written |= to | width
            same = [send for send in self.sends if (send.first, send.width, send.local) == (first, width, 0)]
            self.sends += [] if same else [_Send(first, width)]
            (same or self.sends)[-1].local = to + 1

    def add(self, step: Sum) -> None:
        """Add the sources of a sum."""
        self.width = self.columns(step.target)[1]
        self.read |= self.width
        self.written |= self.width
        for view in step.sources:
            queue = view.buffer.queue
            if queue is None:
                self.receives.append((OWN if view.buffer.role == INPUT else RESIDUE, 0, 0))
            else:
                self.receives.append((FETCHED, *self.lane(queue)))
                self.free(queue)

    def free(self, queue: Queue) -> None:
        """Add the slots of a queue to those that are freed."""
        self.frees.append((self.places[queue].sequence, self.places[queue].credits[0]))

    def words(self, stride: int) -> list[int]:
        """Return the table."""
        place = _ENTRIES + len(self.sequences) + 2 * len(self.credits) + 2 * len(self.frees) + 5 * len(self.sends)
        sends: list[int] = []
        for send in self.sends:
            sends += [send.first, send.width, len(send.lanes), place, send.local]
            place += 2 * len(send.lanes)
        lanes = [word for send in self.sends for lane in send.lanes for word in lane]
        sections = [self.sequences, _flat(self.credits), _flat(self.frees), [*sends, *lanes], _flat(self.receives)]
        counts = [len(e) for e in (self.sequences, self.credits, self.frees, self.sends, self.receives)]
        header, place = [], _ENTRIES
        for count, section in zip(counts, sections, strict=True):
            header += [count, place]
            place += len(section)
        words = [*header, regions(stride)[1], stride, self.width, *(word for section in sections for word in section)]
        if _TABLE + len(words) > MOST_WORDS or len(self.sequences) > MOST_SEQUENCES:
            raise InternalError(f"a table of {len(words)} words and {len(self.sequences)} sequences is too long")
        return words


@frozen
class SlotTable:
    """What a slot kernel is told of a program.

    Attributes:
        words: of the table, to be put behind the operands.
        read: bits of all bytes at which it starts to read a row, and of those that it reads.
        written: the same of what it writes.
    """

    words: list[int]
    read: int
    written: int


def table(exchange: Exchange, item: int, places: dict[Queue, Place], stride: int) -> SlotTable:
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
    return SlotTable(entries.words(stride), entries.read, entries.written)


def queues(exchange: Exchange) -> tuple[Queue, ...]:
    """Return the queues that an exchange uses."""
    flags = (step.flag for step in exchange.steps if isinstance(step, Await | Signal))
    return tuple(dict.fromkeys(flag.queue for flag in flags))


def widest(exchanges: Iterable[Exchange]) -> int:
    """Return the columns of the widest message of a program."""
    steps = (step for exchange in exchanges for step in exchange.steps)
    return max((s.target.width for s in steps if isinstance(s, Copy) and s.target.buffer.role == SLOT), default=0)


def _flat(rows: Iterable[Iterable[int]]) -> list[int]:
    return [word for row in rows for word in row]
