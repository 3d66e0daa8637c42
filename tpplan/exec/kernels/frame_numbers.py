"""What kernels of exchanges in frames know of these: their numbers, where they are, and which were read.

That a frame was read is told at once, as its place is wanted while the exchange goes on: without a fence, for all have
what they read in registers by then. Who has waited in vain waits for nothing more in the same exchange.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.exchange import counter, expired, fail
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.protocol.frames import (
    COUNT,
    FILLED,
    FIRST_QUEUE,
    LINE,
    QUEUE_WORDS,
    QUEUES,
    STRIDE,
    VECTOR_BYTES,
    VECTORS,
)
from tpplan.exec.protocol.words import ALONE

_WORD = types.uint64
_HALF = types.uint32
#: Lanes of a warp: those of the first look after what is filled, those of the second after what is read.
_WARP = 32
#: So far ahead is the number of who waits no more.
_NO_MORE = 0x40000000


@device_function
def entry(queue: Any) -> Any:
    """Return where the words of a queue are."""
    return _WORD(FIRST_QUEUE) + _WORD(QUEUE_WORDS) * _WORD(queue)


@device_function
def watched() -> Any:
    """Return the queue that this thread looks after, and whether that is filled, or read; neither, if it has none."""
    thread = _WORD(cuda.threadIdx.x)
    queue = thread if thread < _WORD(_WARP) else word(FILLED) + thread - _WORD(_WARP)
    return queue, thread < word(FILLED), thread >= _WORD(_WARP) and queue < word(QUEUES)


@device_function
def turn() -> Any:
    """Return the bytes that the threads of a block move at once."""
    return _WORD(cuda.blockDim.x) * _WORD(VECTOR_BYTES)


@device_function
def line(flags: Any) -> Any:
    """Return the address of the block's line of some flags."""
    return flags + _WORD(LINE) * _WORD(cuda.blockIdx.x)


@device_function
def await_credit(mine: Any, freed: Any, number: Any, read: Any) -> Any:
    """Wait until the place of a frame was read, if it is this thread's, and return the latest that is known to be."""
    count = _HALF(word(COUNT))
    if mine and _is_behind(_HALF(read + count), number):
        start, polls = ptx.nanoseconds(), _HALF(0)
        while _is_behind(_HALF(read + count), number):
            polls += _HALF(1)
            if expired(polls, start):
                fail(2)
                return _HALF(number + _HALF(_NO_MORE))
            read = ptx.poll_32(freed)
    return read


@device_function
def await_frame(mine: Any, full: Any, number: Any, seen: Any) -> Any:
    """Wait until a frame is there, if it is this thread's, and return the number of the latest that is."""
    if mine and _is_behind(seen, number):
        seen = ptx.acquire_32(full)
    if mine and _is_behind(seen, number):
        start, polls = ptx.nanoseconds(), _HALF(0)
        while _is_behind(seen, number):
            polls += _HALF(1)
            if expired(polls, start):
                fail(1)
                return _HALF(number + _HALF(_NO_MORE))
            seen = ptx.acquire_32(full)
    return seen


@device_function
def _is_behind(seen: Any, number: Any) -> Any:
    """Tell whether a number comes before another one; they wrap."""
    return _HALF(seen - number) > _HALF(0x7FFFFFFF)


@device_function
def place(queue: Any, number: Any) -> Any:
    """Return the address of the block's frame of some number."""
    slot = _WORD(number & _HALF(word(COUNT) - _WORD(1))) * word(STRIDE)
    return word(entry(queue) + _WORD(1)) + slot + _WORD(cuda.blockIdx.x) * turn() * _WORD(VECTORS)


@device_function
def begin(firsts: Any) -> Any:
    """Number the frames of this exchange.

    Args:
        firsts: in shared memory, for the number of each queue's first frame of this block.

    Returns:
        The number of the first frame of the queue that this thread looks after, and that of the latest that is known to
        be read, or there.
    """
    queue, fills, reads = watched()
    ptx.after_earlier()
    alone = ptx.poll_32(counter(ALONE))
    words, block = entry(queue), _WORD(4) * _WORD(cuda.blockIdx.x)
    last = seen = _HALF(0)
    if fills or reads:
        last = ptx.poll_32(word(words) + block)
        seen = ptx.poll_32(word(words + _WORD(4)) + block) if fills else last
        firsts[queue] = last + _HALF(1)
    if alone:  # see tpplan.exec.cuda.programmatic_launch
        ptx.let_next_begin()
    cuda.syncthreads()
    return _HALF(last + _HALF(1)), seen


@device_function
def tell(full: Any, number: Any) -> None:
    """Tell that the block's frame is filled, behind everything that its threads have written."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:  # which looks after what is filled
        ptx.fence()
        ptx.post_32(full, number)


@device_function
def free(mine: Any, freed: Any, number: Any) -> None:
    """Tell that a frame was read, if it is this thread's, when all threads have what they want of it."""
    cuda.syncthreads()
    if mine:
        ptx.post_32(freed, number)


@device_function
def end(number: Any, seen: Any) -> None:
    """Note the numbers for the next exchange, in the threads that look after a queue."""
    queue, fills, reads = watched()
    words, block = entry(queue), _WORD(4) * _WORD(cuda.blockIdx.x)
    if fills or reads:
        ptx.store_32(word(words) + block, _HALF(number - _HALF(1)))
    if fills:
        ptx.store_32(word(words + _WORD(4)) + block, seen)
