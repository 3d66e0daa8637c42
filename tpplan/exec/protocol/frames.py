"""The parameter table of a frame kernel: a device's part of an exchange through slots of frames in host memory.

A message is cut into frames, row by row. Frames are dealt to thread blocks in turn: every block owns one frame of each
slot, and the last block's frame is followed by the first block's frame in the next slot. Each block has flags, a line
of memory each: ``full`` is the number of the latest frame that the sender's block has filled; ``freed``, one for each
receiver, is the number of the latest frame that the receiver's block has read. Numbers continue across messages. A
message may have any length, as it passes through the slots while they become free.

The header is followed by one entry for each queue that the device reads, preceded by one per receiver for the queue
that it fills:

- the addresses of the block's latest frame number, of the slots, of ``full``, of ``freed``, and of the sender's copy of
  the latter, as reading host memory is slow; then the bytes of a row of the message.

Then come the sources of a sum, each the index of a queue or the code of an operand; and the moves to the output, each
with the index of a queue, the output's column, the columns to skip and the width to take.

If a sum is divided by columns, every device sums its share and sends it in the frame after that with its part. The
share has the same place as in a whole row, so each thread sends the elements that it has summed.
"""

from __future__ import annotations

from tpplan.core.workspace import FRAME_BYTES, FRAME_SLOT_BYTES
from tpplan.exec.protocol.words import FIRST_OPERAND

#: Bytes that a thread moves at once, and how many times per frame.
VECTOR_BYTES, VECTORS = 16, 4
#: Threads per block, and maximum number of blocks.
THREADS = FRAME_BYTES // VECTORS // VECTOR_BYTES
MOST_BLOCKS = FRAME_SLOT_BYTES // FRAME_BYTES
#: Bytes of a block's line of flags, and of all lines of a queue's sender or of one receiver.
LINE = 64
LINES_BYTES = LINE * MOST_BLOCKS

#: Number of entries of the filled queue, of all queues, of the sum's sources, and of moves.
FILLED, QUEUES, SOURCES, MOVES = range(FIRST_OPERAND + 6, FIRST_OPERAND + 10)
#: Blocks that share a slot, bytes of a slot, and number of slots.
BLOCKS, STRIDE, COUNT = range(MOVES + 1, MOVES + 4)
#: First byte in a row, and bytes, of the message or else of the sum; bytes of the longest row.
COLUMN, WIDTH, LONGEST = range(COUNT + 1, COUNT + 4)
#: Copy to the device's own output: first byte in a row, bytes, and first byte in the output's row.
LOCAL_COLUMN, LOCAL_WIDTH, LOCAL_TO = range(LONGEST + 1, LONGEST + 4)
#: Whether the sum is divided by columns; first byte in a row, and bytes, of the device's share.
SHARED, SHARE_SKIP, SHARE_WIDTH = range(LOCAL_TO + 1, LOCAL_TO + 4)
#: Indices of the first source, move and queue.
SOURCES_AT, MOVES_AT, FIRST_QUEUE = range(SHARE_WIDTH + 1, SHARE_WIDTH + 4)
#: Words per entry of a queue and of a move; a source takes one.
QUEUE_WORDS, MOVE_WORDS = 6, 4
