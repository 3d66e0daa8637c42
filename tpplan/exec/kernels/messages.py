"""What the kernels of exchanges through slots know of messages: their numbers, where they are, and which were read.

That a slot was read is told at the start of the next kernel that reads one of the same queue: told at the end, it would
keep the kernel from ending until it has arrived. A message tells it, too: see :mod:`tpplan.exec.protocol.slots`.
"""

from __future__ import annotations

from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.exchange import counter, expired, fail
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.protocol.slots import (
    COUNT,
    FILLED,
    FIRST_QUEUE,
    PACKET_BYTES,
    QUEUE_WORDS,
    QUEUES,
    REGION,
    STRIDE,
)
from tpplan.exec.protocol.words import ALONE, COUNTER_BYTES
from tpplan.exec.toolchain.language import UINT32, UINT64, cuda

#: Bytes of a line of memory, and lines of a counter.
_LINE, _LINES = 64, COUNTER_BYTES // 64


@device_function
def part() -> Any:
    """Return where in a counter this block's part is: of few blocks, each in another line of the memory.

    In host memory a part of a line is written only when nobody else has that, and whoever polls it does.
    """
    block = UINT64(cuda.blockIdx.x)
    return UINT64(_LINE) * (block % UINT64(_LINES)) + UINT64(4) * (block // UINT64(_LINES))


@device_function
def peek() -> Any:
    """Return the number of the latest message of the thread's queue, and, if it fills that, of one that was read.

    And whether the next kernel may begin. Comes first in a kernel: nothing was touched before.
    """
    ptx.after_earlier()
    alone = ptx.poll_32(counter(ALONE))
    thread = UINT64(cuda.threadIdx.x)  # as what it is compared with, or numba compares in float64
    block = part()
    entry = UINT64(FIRST_QUEUE) + UINT64(QUEUE_WORDS) * thread
    last = read = UINT32(0)
    if thread < word(QUEUES):
        messages, known = word(entry) + block, word(entry + UINT64(3)) + block
        last, read = ptx.poll_32(messages), ptx.poll_32(known if thread < word(FILLED) else messages)
    return last, read, alone


@device_function
def begin(counts: Any, slots: Any, peeked: Any) -> None:
    """Number the messages of this exchange, tell which were read before, and wait for the slots that are to be filled.

    Args:
        counts: in shared memory, for the number of each queue's message.
        slots: in shared memory, for the address of the slot that each queue's message is in; 0 if it is another's.
        peeked: see :func:`peek`.
    """
    last, read, alone = peeked
    if alone:  # see tpplan.exec.cuda.programmatic_launch
        ptx.let_next_begin()
    thread = UINT64(cuda.threadIdx.x)
    block = part()
    entry = UINT64(FIRST_QUEUE) + UINT64(QUEUE_WORDS) * thread
    if thread < word(QUEUES):
        freed, place, number = word(entry + UINT64(1)), word(entry + UINT64(2)), UINT32(last + UINT32(1))
        count = UINT32(word(COUNT))
        counts[thread] = number
        slots[thread] = place + UINT64(number & UINT32(count - UINT32(1))) * word(STRIDE) if place else place
        if thread >= word(FILLED):
            ptx.post_32(freed + block, last)
        elif UINT32(number - read) > count:
            read, known = _await_credit(freed + block, number, count), word(entry + UINT64(3))
            if known != freed:  # which only the receiver writes
                ptx.store_32(known + block, read)
    cuda.syncthreads()
    if thread < word(QUEUES):
        ptx.store_32(word(entry) + block, counts[thread])


@device_function
def _await_credit(freed: Any, number: Any, count: Any) -> Any:
    """Wait until the slot for a message was read, and return which message was read last."""
    read = ptx.poll_32(freed)
    if UINT32(number - read) > count:
        start, polls = ptx.nanoseconds(), UINT32(0)
        while UINT32(number - read) > count:
            polls += UINT32(1)
            if expired(polls, start):
                fail(2)
                break
            read = ptx.poll_32(freed)
    return read


@device_function
def receive(address: Any, number: Any) -> Any:
    """Return the data of a packet as soon as it is there; garbage after the deadline, which the status tells."""
    low, first, high, second = ptx.poll_128(address)
    if first != number or second != number:
        start, polls = ptx.nanoseconds(), UINT32(0)
        while first != number or second != number:
            polls += UINT32(1)
            if expired(polls, start):
                fail(1)
                break
            low, first, high, second = ptx.poll_128(address)
    return UINT64(low) | UINT64(high) << UINT64(32)


@device_function
def answered(counts: Any, entry: Any) -> None:
    """Note what is known of the queue that a message, of which something has come, is an answer to.

    Args:
        counts: of :func:`begin`.
        entry: where the table says which queue that is.
    """
    which = word(entry)
    if which and cuda.threadIdx.x == 0:
        known = word(UINT64(FIRST_QUEUE) + UINT64(QUEUE_WORDS) * (which - UINT64(1)) + UINT64(3))
        ptx.store_32(known + part(), UINT32(counts[which - UINT64(1)] - UINT32(1)))


@device_function
def region() -> Any:
    """Return where in a slot the first packet of this thread is."""
    return UINT64(cuda.blockIdx.x) * word(REGION) + UINT64(cuda.threadIdx.x) * UINT64(PACKET_BYTES)
