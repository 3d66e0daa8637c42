"""The parameter table of a straight kernel: the steps of a device that reads and writes other devices' tensors.

It starts with the number and the index of the sequences, and the number and the index of the steps. A sequence is the
index of a counter of the device and its increment by the exchange. The steps are:

- ``OPEN`` and ``SIGNAL``, to raise flags before and after any work, and ``AWAIT``: the number of flags, then for each
  the index of its sequence, its offset from the start of the exchange, and the flag's address;
- ``COPY``: the source's operand and first column, the width, the part of the rows, the number of parts, the number of
  targets, and the operand and the first column of each;
- ``ADD``: the same without the source, then the number of sources, and the operand and the first column of each.

The operands are the caller's tensors on all devices, each with address and pitch, in the same order on all devices.
"""

from __future__ import annotations

from tpplan.exec.protocol.words import FIRST_OPERAND

#: Threads per block.
THREADS = 512
#: Bytes that a thread reads at once, if everything is aligned to them.
VECTOR_BYTES = 16

#: Maximum number of operands: an input, a residual and an output of each of eight devices.
_MOST_OPERANDS = 24
#: Indices of the numbers of sequences and of steps; the word after each is the index of the first one.
SEQUENCES = FIRST_OPERAND + 2 * _MOST_OPERANDS
STEPS = SEQUENCES + 2
_FIRST_ENTRY = SEQUENCES + 4

OPEN, SIGNAL, AWAIT, COPY, ADD = range(5)
