"""The parameter table of a slot kernel: a device's part of an exchange through slots.

The table is dense, as a kernel stalls on its first read of each part of its parameter. The header is followed by the
queues that the device fills, then those that it reads, with one entry for each receiver:

- the addresses of the message counter; of the count of freed messages, which the receiver writes and the sender reads;
  of the slots, or 0 if an earlier entry has it; and of the sender's copy of the freed count. This is the count itself
  unless that is in host memory, which is slow to read. Then the sender reads the count only if its copy does not allow
  it to send, and updates the copy.

The header gives the indices of the other entries:

- sends: first column, width, first lane, one past the last lane, and 1 plus the column of the output to which the
  device itself copies, or 0;
- lanes: the index of a queue;
- receives: the index of a queue or the code of another source of a sum, and 1 plus the index of the filled queue that
  the message answers, or 0; a move also has the width of the message, the output's column, the columns to skip and the
  width to take.

The sender of a message has read all messages that it got in earlier exchanges. So a device that gets an answer knows
that all of its messages but the latest were freed, and need not check host memory before the next exchange.
"""

from __future__ import annotations

from tpplan.exec.protocol.words import BLOCKS, FIRST_OPERAND

#: Threads per block; each block owns a part of every slot.
THREADS = 256
#: Bytes of data in a packet, and bytes that it takes in a slot.
DATA_BYTES, PACKET_BYTES = 8, 16

#: Number of queues to fill, of all queues, of sends, and of receives.
FILLED, QUEUES, SENDS, RECEIVES = range(FIRST_OPERAND + 6, FIRST_OPERAND + 10)
#: Bytes of a block's part of a slot, bytes of a slot, and number of slots of a queue.
REGION, STRIDE, COUNT = range(RECEIVES + 1, RECEIVES + 4)
#: Bytes of a row of the sum, or else of the only send; that send's first column and its word for the output.
WIDTH, COLUMN, LOCAL = range(COUNT + 1, COUNT + 4)
#: Indices of the first send, lane and receive.
SENDS_AT, LANES_AT, RECEIVES_AT = range(LOCAL + 1, LOCAL + 4)
FIRST_QUEUE = RECEIVES_AT + 1
#: Words per entry of each kind; a lane takes one.
QUEUE_WORDS, SEND_WORDS, SOURCE_WORDS, RECEIVE_WORDS = 4, 5, 2, 6


def regions(stride: int, most: int = BLOCKS) -> tuple[int, int]:
    """Return the number of parts of a slot of ``stride`` bytes, one for each block, and the bytes of each.

    A message has a turn of its threads in each part, then another; so there are only as many parts as blocks may run.

    Args:
        stride: bytes of a slot.
        most: maximum number of blocks that may run.
    """
    least = PACKET_BYTES * THREADS
    blocks = min(most, stride // least)
    return (blocks, stride // blocks // least * least) if blocks else (0, 0)


def capacity(stride: int, most: int = BLOCKS) -> int:
    """Return the bytes of data that fit a slot of ``stride`` bytes, if at most ``most`` blocks may run."""
    blocks, region = regions(stride, most)
    return blocks * region // PACKET_BYTES * DATA_BYTES
