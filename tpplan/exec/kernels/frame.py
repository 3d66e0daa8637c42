"""Kernels that exchange larger messages through host memory, in frames, one running on each device.

A frame is written, fenced, and told by a flag beside it, so that the link carries nothing twice: packets, which carry
their flags inside, are sooner there, but take twice the room. While a block of threads fills a frame, or waits for one,
others do the same, so the link is busy in both directions. A block has sent all that it has of a frame before it adds
up what others have of the same columns: a sum may be written over a part.

How messages are cut is told in :mod:`tpplan.exec.protocol.frames`, and what a kernel exchanges, in its table.

A frame's number, its place and which frames were read are kept by counters. That a frame was read is told at once, as
its place is wanted while the exchange goes on: without a fence, for all have what they read in registers by then. Who
has waited in vain waits for nothing more in the same exchange. A vector that is not wanted is neither read nor written.
"""

from __future__ import annotations

from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.exchange import counter, expired, fail
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.kernels.slot import load_piece, row, store_piece
from tpplan.exec.kernels.sums import none, only
from tpplan.exec.protocol.frames import (
    BLOCKS,
    COLUMN,
    COUNT,
    FILLED,
    FIRST_QUEUE,
    LINE,
    LOCAL_COLUMN,
    LOCAL_TO,
    LOCAL_WIDTH,
    LONGEST,
    MOVE_WORDS,
    MOVES,
    MOVES_AT,
    QUEUE_WORDS,
    QUEUES,
    SHARE_SKIP,
    SHARE_WIDTH,
    SHARED,
    SOURCES,
    SOURCES_AT,
    STRIDE,
    VECTOR_BYTES,
    VECTORS,
    WIDTH,
)
from tpplan.exec.protocol.words import ALONE, MOST_QUEUES, OUT, OWN, PIECE, RESIDUAL, ROWS, X
from tpplan.exec.toolchain.language import UINT32, UINT64, cuda, types

#: Lanes of a warp: those of the first look after what is filled, those of the second after what is read.
_WARP = 32
#: So far ahead is the number of who waits no more.
_NO_MORE = 0x40000000


@device_function
def entry(queue: Any) -> Any:
    """Return where the words of a queue are."""
    return UINT64(FIRST_QUEUE) + UINT64(QUEUE_WORDS) * UINT64(queue)


@device_function
def watched() -> Any:
    """Return the queue that this thread looks after, and whether that is filled, or read; neither, if it has none."""
    thread = UINT64(cuda.threadIdx.x)
    queue = thread if thread < UINT64(_WARP) else word(FILLED) + thread - UINT64(_WARP)
    return queue, thread < word(FILLED), thread >= UINT64(_WARP) and queue < word(QUEUES)


@device_function
def turn() -> Any:
    """Return the bytes that the threads of a block move at once."""
    return UINT64(cuda.blockDim.x) * UINT64(VECTOR_BYTES)


@device_function
def line(flags: Any) -> Any:
    """Return the address of the block's line of some flags."""
    return flags + UINT64(LINE) * UINT64(cuda.blockIdx.x)


@device_function
def await_credit(mine: Any, freed: Any, number: Any, read: Any) -> Any:
    """Wait until the place of a frame was read, if it is this thread's, and return the latest that is known to be."""
    count = UINT32(word(COUNT))
    if mine and _is_behind(UINT32(read + count), number):
        start, polls = ptx.nanoseconds(), UINT32(0)
        while _is_behind(UINT32(read + count), number):
            polls += UINT32(1)
            if expired(polls, start):
                fail(2)
                return UINT32(number + UINT32(_NO_MORE))
            read = ptx.poll_32(freed)
    return read


@device_function
def await_frame(mine: Any, full: Any, number: Any, seen: Any) -> Any:
    """Wait until a frame is there, if it is this thread's, and return the number of the latest that is."""
    if mine and _is_behind(seen, number):
        seen = ptx.acquire_32(full)
    if mine and _is_behind(seen, number):
        start, polls = ptx.nanoseconds(), UINT32(0)
        while _is_behind(seen, number):
            polls += UINT32(1)
            if expired(polls, start):
                fail(1)
                return UINT32(number + UINT32(_NO_MORE))
            seen = ptx.acquire_32(full)
    return seen


@device_function
def _is_behind(seen: Any, number: Any) -> Any:
    """Tell whether a number comes before another one; they wrap."""
    return UINT32(seen - number) > UINT32(0x7FFFFFFF)


@device_function
def place(queue: Any, number: Any) -> Any:
    """Return the address of the block's frame of some number."""
    slot = UINT64(number & UINT32(word(COUNT) - UINT64(1))) * word(STRIDE)
    return word(entry(queue) + UINT64(1)) + slot + UINT64(cuda.blockIdx.x) * turn() * UINT64(VECTORS)


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
    words, block = entry(queue), UINT64(4) * UINT64(cuda.blockIdx.x)
    last = seen = UINT32(0)
    if fills or reads:
        last = ptx.poll_32(word(words) + block)
        seen = ptx.poll_32(word(words + UINT64(4)) + block) if fills else last
        firsts[queue] = last + UINT32(1)
    if alone:  # see tpplan.exec.cuda.programmatic_launch
        ptx.let_next_begin()
    cuda.syncthreads()
    return UINT32(last + UINT32(1)), seen


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
    words, block = entry(queue), UINT64(4) * UINT64(cuda.blockIdx.x)
    if fills or reads:
        ptx.store_32(word(words) + block, UINT32(number - UINT32(1)))
    if fills:
        ptx.store_32(word(words + UINT64(4)) + block, seen)


@device_function
def address_of(matrix: Any, column: Any, width: Any, at: Any) -> Any:
    """Return the address of a byte of a message, which is columns of a matrix."""
    return word(matrix) + column + at + row(at, width) * (word(matrix + 1) - width)


@device_function
def is_wanted(at: Any, message: Any, skip: Any, width: Any) -> Any:
    """Tell whether a byte of a message with so many bytes a row is one of ``width`` behind ``skip``."""
    if at >= word(ROWS) * message:
        return False
    return at - row(at, message) * message - skip < width  # which a column before those skipped is not


@device_function
def target_of(to: Any, message: Any, skip: Any, at: Any) -> Any:
    """Return where in the output a byte of a message belongs."""
    which = row(at, message)
    return word(OUT) + to + which * word(OUT + 1) + (at - which * message - skip)


@device_function
def load(address: Any, wanted: Any) -> Any:
    """Return a vector of a matrix; zeros if it is not wanted."""
    zero = UINT32(0)
    if wanted:
        return ptx.load_128(address)
    return zero, zero, zero, zero


@device_function
def poll(address: Any, wanted: Any) -> Any:
    """Return a vector of a frame; zeros if it is not wanted."""
    zero = UINT32(0)
    if wanted:
        return ptx.poll_128(address)
    return zero, zero, zero, zero


@device_function
def post(address: Any, vector: Any, wanted: Any) -> None:
    """Write a vector into a frame, if it is wanted."""
    if wanted:
        ptx.post_128(address, vector[0], vector[1], vector[2], vector[3])


@device_function
def store(address: Any, vector: Any, wanted: Any) -> None:
    """Write a vector into a matrix, if it is wanted."""
    if wanted:
        ptx.store_128(address, vector[0], vector[1], vector[2], vector[3])


@device_function
def offsets() -> Any:
    """Return where this thread's vectors begin in a frame."""
    first, step = UINT64(cuda.threadIdx.x) * UINT64(VECTOR_BYTES), turn()
    return first, first + step, first + UINT64(2) * step, first + UINT64(3) * step


@device_function
def _loaded(start: Any) -> Any:
    """Return the vectors of the message from ``start`` on with which this thread fills a frame."""
    i, j, k, m = offsets()
    column, width = word(COLUMN), word(WIDTH)
    total = word(ROWS) * width if word(PIECE) == VECTOR_BYTES else UINT64(0)
    a = load(address_of(X, column, width, start + i), start + i < total)
    b = load(address_of(X, column, width, start + j), start + j < total)
    c = load(address_of(X, column, width, start + k), start + k < total)
    d = load(address_of(X, column, width, start + m), start + m < total)
    return a, b, c, d


@device_function
def _fill(frame: Any, start: Any, vectors: Any) -> None:
    """Fill a frame with the bytes of the message from ``start`` on, as far as there are any."""
    column, width, piece = word(COLUMN), word(WIDTH), word(PIECE)
    total = word(ROWS) * width
    if piece == VECTOR_BYTES:
        i, j, k, m = offsets()
        a, b, c, d = vectors
        post(frame + i, a, start + i < total)
        post(frame + j, b, start + j < total)
        post(frame + k, c, start + k < total)
        post(frame + m, d, start + m < total)
    else:
        at = UINT64(cuda.threadIdx.x) * piece
        while at < turn() * UINT64(VECTORS) and start + at < total:
            store_piece(frame + at, load_piece(address_of(X, column, width, start + at), piece), piece)
            at += UINT64(cuda.blockDim.x) * piece


@device_function
def _copy(start: Any) -> None:
    """Copy what the device has to its own output, as much of it as a frame holds."""
    column, width, to, piece = word(LOCAL_COLUMN), word(LOCAL_WIDTH), word(LOCAL_TO), word(PIECE)
    at = UINT64(cuda.threadIdx.x) * piece
    while at < turn() * UINT64(VECTORS) and start + at < word(ROWS) * width:
        source, target = address_of(X, column, width, start + at), target_of(to, width, UINT64(0), start + at)
        if piece == VECTOR_BYTES:
            store(target, ptx.load_128(source), True)  # noqa: FBT003
        else:
            store_piece(target, load_piece(source, piece), piece)
        at += UINT64(cuda.blockDim.x) * piece


@device_function
def _move(firsts: Any, start: Any, turns: Any) -> None:
    """Take what is wanted of the frames of one number."""
    for r in range(word(MOVES)):
        words, piece = word(MOVES_AT) + UINT64(MOVE_WORDS) * UINT64(r), word(PIECE)
        queue, to, skip, width = word(words), word(words + UINT64(1)), word(words + UINT64(2)), word(words + UINT64(3))
        message, frame = word(entry(queue) + UINT64(5)), place(queue, UINT32(firsts[queue] + turns))
        if piece == VECTOR_BYTES:
            i, j, k, m = offsets()
            first, second = is_wanted(start + i, message, skip, width), is_wanted(start + j, message, skip, width)
            third, fourth = is_wanted(start + k, message, skip, width), is_wanted(start + m, message, skip, width)
            a, b = poll(frame + i, first), poll(frame + j, second)
            c, d = poll(frame + k, third), poll(frame + m, fourth)
            store(target_of(to, message, skip, start + i), a, first)
            store(target_of(to, message, skip, start + j), b, second)
            store(target_of(to, message, skip, start + k), c, third)
            store(target_of(to, message, skip, start + m), d, fourth)
        else:
            at = UINT64(cuda.threadIdx.x) * piece
            while at < turn() * UINT64(VECTORS) and start + at < word(ROWS) * message:
                if is_wanted(start + at, message, skip, width):
                    store_piece(target_of(to, message, skip, start + at), load_piece(frame + at, piece), piece)
                at += UINT64(cuda.blockDim.x) * piece


def _sum(item: int, first: Any, second: Any, both: Any) -> Any:  # noqa: C901 (four functions)
    """Make what adds up frames of one number in float32, in order, and rounds once; totals may go into the next frame.

    Args:
        item: bytes per element: 2 or 4.
        first: makes a float32 of the first element in 32 bits.
        second: the same of the second, if there are two.
        both: makes 32 bits of as many float32 as they hold.
    """

    @device_function
    def plus(s: Any, v: Any) -> Any:
        return (
            s[0] + first(v[0]), s[1] + second(v[0]), s[2] + first(v[1]), s[3] + second(v[1]),
            s[4] + first(v[2]), s[5] + second(v[2]), s[6] + first(v[3]), s[7] + second(v[3]),
        )  # fmt: skip

    @device_function
    def rounded(s: Any) -> Any:
        return both(s[0], s[1]), both(s[2], s[3]), both(s[4], s[5]), both(s[6], s[7])

    @device_function
    def element(source: Any, firsts: Any, turns: Any, start: Any, at: Any) -> Any:
        if source >= OWN:
            address = address_of(X if source == OWN else RESIDUAL, UINT64(0), word(WIDTH), start + at)
        else:
            address = place(source, UINT32(firsts[source] + turns)) + at
        return first(UINT32(load_piece(address, UINT64(item))))

    @device_function
    def add(firsts: Any, start: Any, turns: Any) -> None:
        width, skip, share = word(WIDTH), word(SHARE_SKIP), word(SHARE_WIDTH)
        zero = types.float32(-0.0)  # which added to keeps the sign of a zero
        sends = word(SHARED) > 0
        out = place(UINT64(0), UINT32(firsts[0] + turns + UINT32(1))) if sends else UINT64(0)
        if word(PIECE) == VECTOR_BYTES:
            i, j, k, m = offsets()
            one, two = is_wanted(start + i, width, skip, share), is_wanted(start + j, width, skip, share)
            three, four = is_wanted(start + k, width, skip, share), is_wanted(start + m, width, skip, share)
            s = t = u = v = (zero, zero, zero, zero, zero, zero, zero, zero)
            for r in range(word(SOURCES)):
                source = word(word(SOURCES_AT) + UINT64(r))
                if source >= OWN:
                    matrix = X if source == OWN else RESIDUAL
                    a = load(address_of(matrix, UINT64(0), width, start + i), one)
                    b = load(address_of(matrix, UINT64(0), width, start + j), two)
                    c = load(address_of(matrix, UINT64(0), width, start + k), three)
                    d = load(address_of(matrix, UINT64(0), width, start + m), four)
                else:
                    frame = place(source, UINT32(firsts[source] + turns))
                    a, b = poll(frame + i, one), poll(frame + j, two)
                    c, d = poll(frame + k, three), poll(frame + m, four)
                s, t, u, v = plus(s, a), plus(t, b), plus(u, c), plus(v, d)
            a, b, c, d = rounded(s), rounded(t), rounded(u), rounded(v)
            store(target_of(skip, width, skip, start + i), a, one)
            store(target_of(skip, width, skip, start + j), b, two)
            store(target_of(skip, width, skip, start + k), c, three)
            store(target_of(skip, width, skip, start + m), d, four)
            post(out + i, a, one and sends)
            post(out + j, b, two and sends)
            post(out + k, c, three and sends)
            post(out + m, d, four and sends)
        else:
            at = UINT64(cuda.threadIdx.x) * UINT64(item)
            while at < turn() * UINT64(VECTORS) and start + at < word(ROWS) * width:
                if is_wanted(start + at, width, skip, share):
                    total = zero
                    for r in range(word(SOURCES)):
                        total = total + element(word(word(SOURCES_AT) + UINT64(r)), firsts, turns, start, at)
                    value = UINT64(both(total, total))
                    store_piece(target_of(skip, width, skip, start + at), value, UINT64(item))
                    if sends:
                        store_piece(out + at, value, UINT64(item))
                at += UINT64(cuda.blockDim.x) * UINT64(item)

    return add


def _kernel(name: str, add: Any) -> Kernel:
    """Make a kernel; ``add`` adds up frames that have come, if anything does.

    A turn of the blocks has two barriers to fill frames, and two to read those of others: sums that are shared out have
    as many again for the totals.
    """
    adds, add = add is not None, add or _nothing

    def run(_words):  # type: ignore[no-untyped-def]
        firsts = cuda.shared.array(MOST_QUEUES, UINT32)
        number, seen = begin(firsts)
        queue, fills, reads = watched()
        words, turns, shared = entry(queue), UINT32(0), word(SHARED) > 0
        full, freed = line(word(words + UINT64(2))), line(word(words + UINT64(3)))
        sent = word(ROWS) * word(WIDTH) if word(FILLED) > 0 else UINT64(0)
        mine = word(ROWS) * word(words + UINT64(5)) if fills or reads else UINT64(0)
        start = UINT64(cuda.blockIdx.x) * turn() * UINT64(VECTORS)
        while start < word(ROWS) * word(LONGEST):
            is_mine = start < mine
            if start < sent:
                vectors = _loaded(start)  # while it is waited
                seen = await_credit(fills, freed, number, seen)
                cuda.syncthreads()
                _fill(place(UINT64(0), UINT32(firsts[0] + turns)), start, vectors)
                tell(full, number)
            _copy(start)
            if adds:
                seen = await_frame(reads and is_mine, full, number, seen)
                seen = await_credit(fills and is_mine and shared, freed, UINT32(number + UINT32(1)), seen)
                cuda.syncthreads()
                add(firsts, start, turns)
                free(reads and is_mine, freed, number)
                if shared:
                    turns, number = UINT32(turns + UINT32(1)), UINT32(number + UINT32(1))
                    tell(full, number)
            if shared or not adds:
                seen = await_frame(reads and is_mine, full, number, seen)
                cuda.syncthreads()
                _move(firsts, start, turns)
                free(reads and is_mine, freed, number)
            turns, number = UINT32(turns + UINT32(1)), UINT32(number + UINT32(is_mine))
            start += turn() * UINT64(VECTORS) * word(BLOCKS)
        end(number, seen)

    return Kernel(name, run, 1)


@device_function
def _nothing(_firsts: Any, _start: Any, _turns: Any) -> None:
    """Add up nothing."""


FRAME_MOVE = _kernel("frame_move", None)
FRAME_SUM_BF16 = _kernel("frame_sum_bf16", _sum(2, ptx.low_bf16, ptx.high_bf16, ptx.two_bf16))
FRAME_SUM_F16 = _kernel("frame_sum_f16", _sum(2, ptx.low_f16, ptx.high_f16, ptx.two_f16))
FRAME_SUM_F32 = _kernel("frame_sum_f32", _sum(4, ptx.float_of, none, only))
