"""The table of a frame kernel: what one device does in an exchange through slots of frames in host memory.

A message is cut into frames, row by row. Every block of threads has a frame of each slot: the first block has the first
frame of a message, the last one's is followed by the first block's next, in the next slot. Beside the slots are flags,
a line of memory for each block: ``full`` is the number of the latest frame that the block of the sender has filled,
``freed``, one for each receiver, of the latest that the block of a receiver has read. Numbers go on from message to
message, so a message may have any length: it passes through the slots as these get free.

Behind the header come the queues, first that which the device fills, once for each receiver, and then those that it
reads:

- the addresses of the block's number of the latest frame, of the slots, of ``full`` and of ``freed``, and of what the
  sender knows of the last one, for that takes long to be read; then the bytes of a row of the message.

Then the sources of a sum, each a queue, or what else it is; and what is moved to the output: which of the queues, the
column of the output, the columns that are skipped and the width that is taken.

Where a sum is shared out, every device adds up its share of the columns, and sends that in the frame after the one with
its part, where it lies as in a whole row: what a thread has added up is what it sends, and what others take.
"""

from __future__ import annotations

from itertools import chain, takewhile
from typing import TYPE_CHECKING

from attrs import Factory, define, frozen

from tpplan.errors import InternalError
from tpplan.exec.gpu.exchange_table import FIRST_OPERAND, MOST_QUEUES, MOST_WORDS, OWN, RESIDUE
from tpplan.exec.programs.program import INPUT, OUTPUT, Copy, Queue, Sum
from tpplan.workspace import FRAME_BYTES, FRAME_SLOT_BYTES

if TYPE_CHECKING:
    from tpplan.exec.programs.program import Exchange, View

#: Bytes that a thread moves at once, and how often it does for a frame.
VECTOR_BYTES, VECTORS = 16, 4
#: Threads of a block, and most blocks.
THREADS = FRAME_BYTES // VECTORS // VECTOR_BYTES
MOST_BLOCKS = FRAME_SLOT_BYTES // FRAME_BYTES
#: Bytes of a line of flags, and of those of a queue's sender or of one receiver.
LINE = 64
LINES_BYTES = LINE * MOST_BLOCKS

#: How many entries of queues are of the one that is filled, and how many there are in all; of a sum and of moves.
FILLED, QUEUES, SOURCES, MOVES = range(FIRST_OPERAND + 6, FIRST_OPERAND + 10)
#: Blocks that share a slot, bytes of a slot, and how many there are.
BLOCKS, STRIDE, COUNT = range(MOVES + 1, MOVES + 4)
#: First byte of the message in a row of the input, and its bytes, or those of a sum; of the longest row of all.
COLUMN, WIDTH, LONGEST = range(COUNT + 1, COUNT + 4)
#: First byte of what is copied to the device's own output, its bytes, and where to.
LOCAL_COLUMN, LOCAL_WIDTH, LOCAL_TO = range(LONGEST + 1, LONGEST + 4)
#: Whether the sum is shared out, the first byte of the device's share in a row, and its bytes.
SHARED, SHARE_SKIP, SHARE_WIDTH = range(LOCAL_TO + 1, LOCAL_TO + 4)
#: Where sources and moves are, and the first queue.
SOURCES_AT, MOVES_AT, FIRST_QUEUE = range(SHARE_WIDTH + 1, SHARE_WIDTH + 4)
#: Words of an entry; a source is one.
QUEUE_WORDS, MOVE_WORDS = 6, 4


@frozen
class Place:
    """Where a queue is, for one of its devices.

    Attributes:
        slots: address of the first slot.
        numbers: address of the device's numbers of frames, of 4 bytes for each block.
        full: address of the lines of the sender's flags.
        freed: those of each receiver's that the device writes or waits for.
        known: of the sender, the address of what it knows of each of them, of 4 bytes for each block.
    """

    slots: int
    numbers: int
    full: int
    freed: tuple[int, ...]
    known: tuple[int, ...] = ()

    def entries(self, width: int) -> list[tuple[int, ...]]:
        """Return the words of the queue, for each receiver, given the bytes of a row of its messages."""
        known = self.known or (0,) * len(self.freed)
        return [
            (self.numbers, self.slots, self.full, freed, noted, width)
            for freed, noted in zip(self.freed, known, strict=True)
        ]


@frozen
class FrameTable:
    """What a frame kernel is told of a program.

    Attributes:
        words: of the table, to be put behind the operands.
        bits: of all bytes at which something starts in a row of an operand, and of all widths.
        longest: bytes of the longest row that is sent, received or copied.
    """

    words: list[int]
    bits: int
    longest: int


@define
class _Entries:
    """A table in the making.

    Attributes:
        item: bytes per element.
        places: of the queues.
        widths: bytes of a row of each queue's messages, in the order of the entries.
        filled: how many entries are of the queue that the device fills.
        message: first byte and bytes of a row of what it sends or adds up.
        local: first byte and bytes of a row of what it copies to its own output, and where to.
        share: first byte and bytes of a row of what it adds up.
        shared: whether it sends that, too.
        sources: of the sum, in order.
        moves: in order.
        bits: of all that was added.
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
        """Return which entry is that of a queue that is read, perhaps again."""
        if queue not in self.widths:
            self.widths[queue] = view.width * self.item
            self.bits |= self.widths[queue]
        before = takewhile(lambda each: each != queue, self.widths)
        return sum(len(self.places[each].freed) for each in before)

    def copy(self, step: Copy) -> None:
        """Add what is sent, received, or copied within the device."""
        (first, width), (to, _) = self.columns(step.source), self.columns(step.target)
        if step.source.buffer.role == OUTPUT and (first, width) == self.share:
            self.shared = True
        elif queue := step.target.buffer.queue:
            if self.widths:
                raise InternalError(f"no frame kernel sends anything but one message, first: {step}")
            self.message, self.widths[queue], self.filled = (first, width), width, len(self.places[queue].freed)
        elif queue := step.source.buffer.queue:
            skip = to if self.shared else first  # totals lie as in a whole row
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
            InternalError: there are more entries than there is room for.
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
        exchange: of one device.
        item: bytes per element.
        places: of its queues.
        blocks: that share a slot.
        stride: bytes of a slot.

    Raises:
        InternalError: it has steps that no frame kernel knows, or too many.
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
