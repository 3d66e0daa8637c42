"""The parameter of callers' kernels that use a channel: the first words of an array of words of 8 bytes.

The first are those of every exchange, see :mod:`tpplan.exec.protocol.words`. A device's memory of a channel has a
slot for every device that gives a part, of 8 bytes for each element: a float32 and the number of the sum that it
belongs to. There are two such sets of slots, which successive sums take in turn.

A device begins a sum when all of the one before is complete, so that it has every device's part of that; and these
began it when they had read all of the one before that. So nobody writes what has not been read.
"""

from __future__ import annotations

from tpplan.exec.protocol.words import COUNTERS

#: Address of the numbers of the device's next sum, one for each block of a kernel, all of which are equal.
NUMBERS = COUNTERS + 1
#: Number of devices, and index of this device among them.
DEVICES, OWN = NUMBERS + 1, NUMBERS + 2
#: Bytes of a slot, and of a set of them.
SLOT, SET = NUMBERS + 3, NUMBERS + 4
#: Maximum blocks of a kernel that sum.
ADDERS = NUMBERS + 5
#: Addresses of the devices' memory.
MEMORIES = NUMBERS + 6

#: Maximum devices, and index of the kernel's own words.
MOST_DEVICES = 16
CALLERS = MEMORIES + MOST_DEVICES
#: Maximum blocks of a kernel, and of those that sum.
MOST_BLOCKS, MOST_ADDERS = 1024, 64
#: Bytes of an element in a slot.
ELEMENT = 8
