"""The parameter of every exchange kernel: an array of words of 8 bytes.

The first words are those that change from call to call; behind them comes the table of the program, which
:mod:`tpplan.exec.protocol.slots`, :mod:`tpplan.exec.protocol.frames` and :mod:`tpplan.exec.protocol.direct` make.
Columns are in bytes. A device's counters are numbered, and each has a part for every block of threads: blocks of the
same index on all devices exchange with each other, and wait for no other block.
"""

from __future__ import annotations

#: Maximum blocks of a launch.
BLOCKS = 128
#: Bytes of a counter: 4 for each block.
COUNTER_BYTES = 4 * BLOCKS

#: Rows of all operands, timeout of waits in nanoseconds, and address of the status word that reports it to the host.
ROWS, DEADLINE, STATUS = 0, 1, 2
#: Address of the device's counters, and index of the operands.
COUNTERS, OPERANDS = 3, 4
#: The largest piece to which everything is aligned, and the first of the operands: address and pitch of each.
PIECE, FIRST_OPERAND = OPERANDS, OPERANDS + 1
#: Where the operands of exchanges through slots, in frames too, are: address and pitch of each.
X, OUT, RESIDUAL = FIRST_OPERAND, FIRST_OPERAND + 2, FIRST_OPERAND + 4
#: Most queues of a device in such an exchange, enough for eight; and sources of a sum that are in no queue.
MOST_QUEUES = 16
OWN, RESIDUE = MOST_QUEUES, MOST_QUEUES + 1
#: Numbers of counters that no device waits for: of failures, and 1 as long as the context has its GPUs to itself.
FAILURES, ALONE = 0, 1

#: The name of the parameter in PTX, where it is an array.
PARAMETER = "tpplan_words"
#: PTX's instructions of launches that overlap, see :mod:`tpplan.exec.cuda.programmatic_launch`, and of what is read
#: ahead meanwhile. Older GPUs have none, and kernels for them leave them out.
GRID_DEPENDENCY, PREFETCH = "griddepcontrol", "cp.async.bulk.prefetch"

#: Maximum words of the parameter, and maximum sequences: enough for eight devices.
MOST_WORDS, MOST_SEQUENCES = 480, 48
