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
from tpplan.exec.toolchain.language import cuda, types

_WORD = types.uint64
_HALF = types.uint32


@device_function
def begin_sum() -> Any:
    """Return the number of the sum that the kernel takes part in, the same in all blocks, and whether it is alone.

    Comes behind ``after_earlier``, and in all threads before one calls :func:`end_sum`.
    """
    number = ptx.poll_32(word(NUMBERS) + _WORD(4) * _WORD(cuda.blockIdx.x))
    return number, ptx.poll_32(word(COUNTERS) + _WORD(ALONE * COUNTER_BYTES))


@device_function
def _begin_alone() -> Any:
    ptx.after_earlier_with_next()
    return _HALF(0), _HALF(0)


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
    block = _WORD(cuda.blockIdx.x) + _WORD(cuda.threadIdx.x) * _WORD(cuda.gridDim.x)
    following = _HALF(number + _HALF(1))
    if following == _HALF(0):  # which is what memory has that nobody has written yet
        following = _HALF(2)
    while block < _WORD(MOST_BLOCKS):
        ptx.store_32(word(NUMBERS) + _WORD(4) * block, following)
        block += _WORD(cuda.blockDim.x) * _WORD(cuda.gridDim.x)


@device_function
def send_part(element: Any, value: Any, number: Any) -> None:
    """Send the device's part of an element to all devices, itself included.

    Args:
        element: its number.
        value: the part, a float32.
        number: of the sum.
    """
    at = _WORD(number & _HALF(1)) * word(SET) + word(OWN) * word(SLOT) + element * _WORD(ELEMENT)
    bits, k = ptx.bits_of(value), _HALF(0)
    while k < _HALF(word(DEVICES)):
        ptx.roll()
        ptx.post_64(word(_WORD(MEMORIES) + _WORD(k)) + at, bits, number)
        k = _HALF(k + _HALF(1))


@device_function
def first_element() -> Any:
    """Return which element this thread is the first to add up, and how far it is from there to its next.

    The former is more than there are in blocks that add up none.
    """
    adders, block = min(word(ADDERS), _WORD(cuda.gridDim.x)), _WORD(cuda.blockIdx.x)
    first = block * _WORD(cuda.blockDim.x) + _WORD(cuda.threadIdx.x)
    return (first if block < adders else ~_WORD(0)), adders * _WORD(cuda.blockDim.x)


@device_function
def _arrived(address: Any, bits: Any, found: Any, number: Any) -> Any:
    """Return a part as soon as it is there, given what its place had at first; garbage after the deadline."""
    if found != number:
        start, polls = ptx.nanoseconds(), _HALF(0)
        while found != number:
            polls += _HALF(1)
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
    at = word(_WORD(MEMORIES) + word(OWN)) + _WORD(number & _HALF(1)) * word(SET) + element * _WORD(ELEMENT)
    step, left = word(SLOT), word(DEVICES)
    total = types.float32(-0.0)  # which added to keeps the sign of a zero
    while left > _WORD(0):
        ptx.roll()
        a1 = at + step if left > _WORD(1) else at
        a2 = a1 + step if left > _WORD(2) else at
        a3 = a2 + step if left > _WORD(3) else at
        b0, f0 = ptx.poll_64(at)
        b1, f1 = ptx.poll_64(a1)
        b2, f2 = ptx.poll_64(a2)
        b3, f3 = ptx.poll_64(a3)
        total += _arrived(at, b0, f0, number)
        if left > _WORD(1):
            total += _arrived(a1, b1, f1, number)
        if left > _WORD(2):
            total += _arrived(a2, b2, f2, number)
        if left > _WORD(3):
            total += _arrived(a3, b3, f3, number)
        at += _WORD(4) * step
        left = left - _WORD(4) if left > _WORD(4) else _WORD(0)
    return total
