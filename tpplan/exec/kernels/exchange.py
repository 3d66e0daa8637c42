"""What the kernels of exchanges have in common: counters, deadlines, and what happens when one passes."""

from __future__ import annotations

from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.protocol.words import COUNTER_BYTES, COUNTERS, DEADLINE, FAILURES, STATUS
from tpplan.exec.toolchain.language import UINT32, UINT64, cuda

#: How often a thread polls before it looks at the clock, and at the word by which the host learns of failures: that is
#: in host memory, where all threads of a kernel looking at once would be in the way of messages.
_PATIENCE, _LONG_PATIENCE = 0xFFF, 0xFFFF


@device_function
def counter(number: Any) -> Any:
    """Return the address of the block's part of one of the device's counters."""
    return word(COUNTERS) + UINT64(COUNTER_BYTES) * UINT64(number) + UINT64(4) * UINT64(cuda.blockIdx.x)


@device_function
def expired(polls: Any, start: Any) -> Any:
    """Tell now and then whether the deadline has passed; sooner if the block has failed before, or anything else.

    Args:
        polls: so far, from 1.
        start: of the waiting, by the clock.
    """
    if polls & UINT32(_PATIENCE) != 0:
        return False
    if ptx.nanoseconds() - start > word(DEADLINE) or ptx.poll_32(counter(FAILURES)) != 0:
        return True
    return polls & UINT32(_LONG_PATIENCE) == 0 and ptx.poll_32(word(STATUS)) != 0


@device_function
def fail(code: Any) -> None:
    """Tell the host, unless there is an earlier cause, and the kernels to come, that a device waited in vain."""
    if ptx.poll_32(word(STATUS)) == 0:
        ptx.post_32(word(STATUS), UINT32(code))
    ptx.post_32(counter(FAILURES), UINT32(code))
