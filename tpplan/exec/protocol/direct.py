"""The parameter table of a direct kernel: the steps of a device that reads and writes other devices' tensors.

It starts with the number and the index of the sequences, and the number and the index of the steps. A sequence is the
index of a counter of the device and its increment by the exchange. The steps are:

- ``TELL``, before any work, to tell other devices that operands are ready and where they are: the number of operands,
  then for each the index of its sequence, its offset from the start of the exchange, the address of the place in the
  other device's memory, the index of the word with the operand's address *for that device*, and the operand;
- ``LEARN``, to wait until others have told: the number of operands, then for each the index of its sequence, its
  offset, the address of the place, and the operand;
- ``SIGNAL``, to raise flags after the work before it, and ``AWAIT``: the number of flags, then for each the index of
  its sequence, its offset, and the flag's address;
- ``COPY``: the source's operand and first column, the width, the part of the rows, the number of parts, the number of
  targets, and the operand and the first column of each;
- ``ADD``: the same without the source, then the number of sources, and the operand and the first column of each.

The operands are matrices on all devices, each with address and pitch, which every device numbers by itself. It knows
its own, and learns those of others: in another process, nobody else knows which memory an operand has this time.

What is told takes two packets of 16 bytes for each block: a half of the address or of the pitch, the number of the
exchange, the other half, and the number again. A packet's halves arrive whole.

A one-shot kernel has the steps ``TELL``, ``LEARN``, ``ADD``, ``SIGNAL``, ``AWAIT`` and ``COPY`` in this order, and
holds the sum in registers from the third to the last.
"""

from __future__ import annotations

from tpplan.exec.protocol.words import BLOCKS, COUNTER_BYTES, FIRST_OPERAND

#: Threads per block.
THREADS = 512
#: Bytes that a thread reads at once, if everything is aligned to them.
VECTOR_BYTES = 16
#: Vectors of a sum that a thread of a one-shot kernel holds at most, and that it holds rather than have more blocks.
HELD, HELD_EACH = 4, 2

#: Bytes of what a block tells of an operand, and counters that this takes of all blocks.
TOLD_BYTES = 32
TOLD_COUNTERS = BLOCKS * TOLD_BYTES // COUNTER_BYTES

#: Maximum number of operands: an input, a residual and an output of each of eight devices.
_MOST_OPERANDS = 24
#: Operands that others reach on a device, and other devices.
_MOST_TOLD = 2 * 7
#: Index of the first address of an own operand for another device.
TOLD = FIRST_OPERAND + 2 * _MOST_OPERANDS
#: Indices of the numbers of sequences and of steps; the word after each is the index of the first one.
SEQUENCES = TOLD + _MOST_TOLD
STEPS = SEQUENCES + 2
_FIRST_ENTRY = SEQUENCES + 4

TELL, SIGNAL, LEARN, AWAIT, COPY, ADD = range(6)
