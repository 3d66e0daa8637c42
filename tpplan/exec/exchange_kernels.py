"""What the kernels of exchanges have in common: counters, deadlines, and what happens when one passes."""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from tpplan.exec import ptx
from tpplan.exec.exchange_table import COUNTER_BYTES, COUNTERS, DEADLINE, FAILURES, STATUS
from tpplan.exec.program import SLOTS
from tpplan.exec.ptx import word

_WORD = types.uint64
_HALF = types.uint32
#: How often a thread polls before it looks at the clock.
_PATIENCE = 0xFFF


def device_function(function: Any) -> Any:
    """Make a function of kernels, without a call."""
    return cuda.jit(device=True, inline="always")(function)


@device_function
def counter(number: Any) -> Any:
    """Return the address of the block's part of one of the device's counters."""
    return word(COUNTERS) + _WORD(COUNTER_BYTES) * _WORD(number) + _WORD(4) * _WORD(cuda.blockIdx.x)


@device_function
def expired(polls: Any, start: Any) -> Any:
    """Tell now and then whether the deadline has passed; at once if the block has failed before."""
    if polls & _HALF(_PATIENCE) != 0:
        return False
    return ptx.cycles() - start > word(DEADLINE) or ptx.poll_32(counter(FAILURES)) != 0


@device_function
def fail(code: Any) -> None:
    """Tell the host, and the kernels to come, that a device waited in vain."""
    ptx.post_32(word(STATUS), _HALF(code))
    ptx.post_32(counter(FAILURES), _HALF(code))


@device_function
def begin(counts: Any, sequences: Any, owed: Any, frees: Any, start: Any) -> None:
    """Number the messages of this exchange, tell what was read before, and wait for the slots that are to be filled.

    Args:
        counts: in shared memory, for the number of each sequence's message.
        sequences: where in the parameter the number of sequences is, behind which is the place of the first.
        owed: the same of credits.
        frees: the same of frees.
        start: of the kernel, for the deadline.
    """
    thread = _WORD(cuda.threadIdx.x)  # as what it is compared with, or numba compares in float64
    number = _HALF(0)
    if thread < word(sequences):
        number = ptx.poll_32(counter(word(word(sequences + 1) + thread))) + _HALF(1)
        counts[thread] = number
    other = thread - word(sequences)  # wraps around, and is large then
    if other < word(owed):
        entry = word(owed + 1) + _WORD(2) * other
        address = word(entry + _WORD(1)) + _WORD(4) * _WORD(cuda.blockIdx.x)
        message, freed = ptx.poll_32(counter(word(entry))) + _HALF(1), ptx.poll_32(address)
        polls = _HALF(0)
        while _HALF(message - freed) > _HALF(SLOTS):
            polls += _HALF(1)
            if expired(polls, start):
                fail(2)
                break
            freed = ptx.poll_32(address)
    other -= word(owed)
    if other < word(frees):
        entry = word(frees + 1) + _WORD(2) * other
        ptx.post_32(word(entry + _WORD(1)) + _WORD(4) * _WORD(cuda.blockIdx.x), ptx.poll_32(counter(word(entry))))
    cuda.syncthreads()
    if thread < word(sequences):
        ptx.store_32(counter(word(word(sequences + 1) + thread)), number)
