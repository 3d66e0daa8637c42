"""How kernels of callers add up what all devices have: every block sends what it has, and some wait for all of it.

Blocks that have sent end, so that those of other kernels find room: only a few wait, and what they wait for never does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.exchange import expired, fail
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.protocol.channel import (
    ADDERS,
    DEVICES,
    ELEMENT,
    MEMORIES,
    MOST_BLOCKS,
    NUMBERS,
    OWN,
    SET,
    SLOT,
)
from tpplan.exec.protocol.words import ALONE, COUNTER_BYTES, COUNTERS
from tpplan.exec.toolchain.language import UINT32, UINT64, cuda, types


@device_function
def begin_sum() -> Any:
    """Return the number of the sum that the kernel takes part in, the same in all blocks, and whether it is alone.

    Comes behind ``after_earlier``, and in all threads before one calls :func:`end_sum`.
    """
    number = ptx.poll_32(word(NUMBERS) + UINT64(4) * UINT64(cuda.blockIdx.x))
    return number, ptx.poll_32(word(COUNTERS) + UINT64(ALONE * COUNTER_BYTES))


@device_function
def _begin_alone() -> Any:
    ptx.after_earlier_with_next()
    return UINT32(0), UINT32(0)


@device_function
def _begin_together() -> Any:
    ptx.after_earlier()
    return begin_sum()


@cache
def wait_of(*, joint: bool) -> Any:
    """Return what a kernel begins with, when it has asked for what never changes: it waits for all work before.

    It returns what :func:`begin_sum` does; a kernel that takes part in no sum lets the next begin, and has zeros.

    Args:
        joint: whether the kernel takes part in a sum.
    """
    return _begin_together if joint else _begin_alone


@device_function
def end_sum(number: Any, alone: Any) -> None:
    """Number the next sum, for the blocks of any kernel: each writes what it, or none of this kernel, has read.

    Comes when everything is sent. The next kernel may begin then, which takes all room that it finds, if no other
    context may want some: see :mod:`tpplan.exec.cuda.exclusive`.
    """
    if alone:
        ptx.let_next_begin()
    block = UINT64(cuda.blockIdx.x) + UINT64(cuda.threadIdx.x) * UINT64(cuda.gridDim.x)
    following = UINT32(number + UINT32(1))
    if following == UINT32(0):  # which is what memory has that nobody has written yet
        following = UINT32(2)
    while block < UINT64(MOST_BLOCKS):
        ptx.store_32(word(NUMBERS) + UINT64(4) * block, following)
        block += UINT64(cuda.blockDim.x) * UINT64(cuda.gridDim.x)


@device_function
def send_part(element: Any, value: Any, number: Any) -> None:
    """Send the device's part of an element to all devices, itself included.

    Args:
        element: its number.
        value: the part, a float32.
        number: of the sum.
    """
    at = UINT64(number & UINT32(1)) * word(SET) + word(OWN) * word(SLOT) + element * UINT64(ELEMENT)
    bits, k = ptx.bits_of(value), UINT32(0)
    while k < UINT32(word(DEVICES)):
        ptx.roll()
        ptx.post_64(word(UINT64(MEMORIES) + UINT64(k)) + at, bits, number)
        k = UINT32(k + UINT32(1))


@device_function
def first_element() -> Any:
    """Return which element this thread is the first to add up, and how far it is from there to its next.

    The former is more than there are in blocks that add up none.
    """
    adders, block = min(word(ADDERS), UINT64(cuda.gridDim.x)), UINT64(cuda.blockIdx.x)
    first = block * UINT64(cuda.blockDim.x) + UINT64(cuda.threadIdx.x)
    return (first if block < adders else ~UINT64(0)), adders * UINT64(cuda.blockDim.x)


@device_function
def _arrived(address: Any, bits: Any, found: Any, number: Any) -> Any:
    """Return a part as soon as it is there, given what its place had at first; garbage after the deadline."""
    if found != number:
        start, polls = ptx.nanoseconds(), UINT32(0)
        while found != number:
            polls += UINT32(1)
            if expired(polls, start):
                fail(1)
                break
            bits, found = ptx.poll_64(address)
    return ptx.float_of(bits)


@device_function
def sum_of_parts(element: Any, number: Any) -> Any:
    """Return the sum of all devices' parts of an element, in their order: the same on every device.

    Four are asked for at a time.
    """
    at = word(UINT64(MEMORIES) + word(OWN)) + UINT64(number & UINT32(1)) * word(SET) + element * UINT64(ELEMENT)
    step, left = word(SLOT), word(DEVICES)
    total = types.float32(-0.0)  # which added to keeps the sign of a zero
    while left > UINT64(0):
        ptx.roll()
        a1 = at + step if left > UINT64(1) else at
        a2 = a1 + step if left > UINT64(2) else at
        a3 = a2 + step if left > UINT64(3) else at
        b0, f0 = ptx.poll_64(at)
        b1, f1 = ptx.poll_64(a1)
        b2, f2 = ptx.poll_64(a2)
        b3, f3 = ptx.poll_64(a3)
        total += _arrived(at, b0, f0, number)
        if left > UINT64(1):
            total += _arrived(a1, b1, f1, number)
        if left > UINT64(2):
            total += _arrived(a2, b2, f2, number)
        if left > UINT64(3):
            total += _arrived(a3, b3, f3, number)
        at += UINT64(4) * step
        left = left - UINT64(4) if left > UINT64(4) else UINT64(0)
    return total
