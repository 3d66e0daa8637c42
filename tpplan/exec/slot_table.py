"""The table of a slot kernel: what one device does in an exchange through slots.

Everything has a place of its own, whatever the program, so that a kernel finds it without looking anything up:

- queues that the device fills, and then those that it reads: the address of the counter of their messages, and that of
  the count of those that a receiver has freed, which the sender reads and the receiver writes;
- sends: first column, width, first lane and the one past the last, and 1 more than the column of the output to which
  the device itself copies, or 0;
- lanes: the address of the slots, and which of the queues;
- receives: of a move, the address of the slots, which of the queues, the width of the message, the columns that are
  skipped, the width that is taken, and the column of the output; of a sum, the first two, and what the source is.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from attrs import Factory, define, frozen

from tpplan.errors import InternalError
from tpplan.exec.exchange_table import BLOCKS, OPERANDS
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
#: How many queues are filled, and how many there are in all; how many sends and receives.
FILLED, QUEUES, SENDS, RECEIVES = range(OPERANDS + 9, OPERANDS + 13)
#: Bytes of a block's part of a slot, of a slot, and of a row of a sum.
REGION, STRIDE, WIDTH = range(RECEIVES + 1, RECEIVES + 4)
#: Most entries of each kind, and words of each: enough for eight devices.
MOST_QUEUES, _MOST_SENDS, _MOST_LANES, _MOST_RECEIVES = 16, 8, 16, 16
QUEUE_WORDS, SEND_WORDS, LANE_WORDS, RECEIVE_WORDS = 2, 5, 2, 6
#: Where the first entry of each kind is.
FIRST_QUEUE = WIDTH + 1
FIRST_SEND = FIRST_QUEUE + MOST_QUEUES * QUEUE_WORDS
FIRST_LANE = FIRST_SEND + _MOST_SENDS * SEND_WORDS
FIRST_RECEIVE = FIRST_LANE + _MOST_LANES * LANE_WORDS
_END = FIRST_RECEIVE + _MOST_RECEIVES * RECEIVE_WORDS

#: What a source of a sum is.
FETCHED, OWN, RESIDUE = 0, 1, 2


@frozen
class Place:
    """Where a queue is, for one of its devices.

    Attributes:
        slots: address of the first slot.
        messages: address of the device's counter of the messages.
        freed: the addresses of the counts of the messages that each receiver has freed; the sender reads all of them,
            a receiver writes its own.
    """

    slots: int
    messages: int
    freed: tuple[int, ...]


def regions(stride: int, most: int = BLOCKS) -> tuple[int, int]:
    """Return into how many parts a slot of ``stride`` bytes is cut, one for each block, and their bytes.

    A message has a turn of its threads in each part, then another; so there are only as many parts as blocks may run.

    Args:
        stride: bytes of a slot.
        most: blocks that may run.
    """
    least = PACKET_BYTES * THREADS
    blocks = min(most, stride // least)
    return (blocks, stride // blocks // least * least) if blocks else (0, 0)


def capacity(stride: int, most: int = BLOCKS) -> int:
    """Return the bytes of data that fit a slot of ``stride`` bytes, if so many blocks may run."""
    blocks, region = regions(stride, most)
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
    filled: list[tuple[int, int]]
    emptied: list[tuple[int, int]]
    sends: list[_Send] = Factory(list)
    receives: list[tuple[int, ...]] = Factory(list)
    width: int = 0
    read: int = 0
    written: int = 0

    def lane(self, queue: Queue) -> tuple[int, int]:
        """Return the address of a queue's slots, and which of the queues it is."""
        place = self.places[queue]
        counters = [messages for messages, _ in (*self.filled, *self.emptied)]
        return place.slots, counters.index(place.messages)

    def columns(self, view: View) -> tuple[int, int]:
        """Return the first byte and the bytes of a view's columns."""
        return view.start * self.item, (view.stop - view.start) * self.item

    def copy(self, step: Copy) -> None:
        """Add what is sent, received, or copied within the device."""
        first, width = self.columns(step.source)
        to, _ = self.columns(step.target)
        if step.target.buffer.queue is not None:
            self.read |= first | width
            same = [send for send in self.sends if (send.first, send.width) == (first, width)]
            self.sends += [] if same else [_Send(first, width)]
            (same or self.sends)[-1].lanes.append(self.lane(step.target.buffer.queue))
        elif step.source.buffer.queue is not None:
            message = step.source.width * self.item
            self.written |= message | first | width | to
            self.receives.append((*self.lane(step.source.buffer.queue), message, first, width, to))
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
                self.receives.append((0, 0, OWN if view.buffer.role == INPUT else RESIDUE))
            else:
                self.receives.append((*self.lane(queue), FETCHED))

    def words(self, stride: int, most: int) -> list[int]:
        """Return the table.

        Raises:
            InternalError: there are more entries of a kind than there is room for.
        """
        queues = [*self.filled, *self.emptied]
        lanes = [lane for send in self.sends for lane in send.lanes]
        ends = [0, *accumulate(len(send.lanes) for send in self.sends)]
        sends = [(s.first, s.width, a, b, s.local) for s, (a, b) in zip(self.sends, pairwise(ends), strict=True)]
        words = [0] * (_END - FILLED)
        region = regions(stride, most)[1]
        header = (len(self.filled), len(queues), len(sends), len(self.receives), region, stride, self.width)
        words[: len(header)] = header
        for place, room, size, entries in (
            (FIRST_QUEUE, MOST_QUEUES, QUEUE_WORDS, queues),
            (FIRST_SEND, _MOST_SENDS, SEND_WORDS, sends),
            (FIRST_LANE, _MOST_LANES, LANE_WORDS, lanes),
            (FIRST_RECEIVE, _MOST_RECEIVES, RECEIVE_WORDS, self.receives),
        ):
            if len(entries) > room:
                raise InternalError(f"a slot kernel has room for {room} entries of a kind, not for {len(entries)}")
            for i, entry in enumerate(entries):
                first = place - FILLED + i * size
                words[first : first + len(entry)] = entry
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


def table(exchange: Exchange, item: int, places: dict[Queue, Place], stride: int, most: int = BLOCKS) -> SlotTable:
    """Return the table of an exchange through slots.

    Args:
        exchange: of one device.
        item: bytes per element.
        places: of its queues.
        stride: bytes of a slot.
        most: blocks that may run.

    Raises:
        InternalError: it has steps that no slot kernel knows, or too many.
    """
    device = exchange.stream.device
    filled = [(p.messages, freed) for queue, p in places.items() if queue.sender == device for freed in p.freed]
    emptied = [(p.messages, freed) for queue, p in places.items() if queue.sender != device for freed in p.freed]
    entries = _Entries(item, places, filled, emptied)
    for step in exchange.steps:
        if isinstance(step, Copy):
            entries.copy(step)
        elif isinstance(step, Sum):
            entries.add(step)
        elif step.flag.name not in {"full", "free"}:
            raise InternalError(f"no slot kernel for {step}")
    return SlotTable(entries.words(stride, most), entries.read, entries.written)


def queues(exchange: Exchange) -> tuple[Queue, ...]:
    """Return the queues that an exchange uses."""
    flags = (step.flag for step in exchange.steps if isinstance(step, Await | Signal))
    return tuple(dict.fromkeys(flag.queue for flag in flags))


def widest(exchanges: Iterable[Exchange]) -> int:
    """Return the columns of the widest message of a program."""
    steps = (step for exchange in exchanges for step in exchange.steps)
    return max((s.target.width for s in steps if isinstance(s, Copy) and s.target.buffer.role == SLOT), default=0)
