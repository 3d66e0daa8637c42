"""Kernels that write straight into the tensors of other devices, one running on each device.

A kernel goes through the steps of its table: it tells others where its tensors are, which may be read and written from
then on, waits until they tell theirs, moves or adds up columns, tells that it has, and waits until all have. Blocks of
the same index on all devices go together: each has a part of every step, the same on all devices, and flags of its own.

See :mod:`tpplan.exec.protocol.direct`.
"""

from __future__ import annotations

from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.exchange import counter, expired, fail
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.kernels.sums import none, only
from tpplan.exec.protocol.direct import (
    AWAIT,
    COPY,
    LEARN,
    SEQUENCES,
    SIGNAL,
    STEPS,
    TELL,
    TOLD,
    TOLD_BYTES,
    VECTOR_BYTES,
)
from tpplan.exec.protocol.words import FIRST_OPERAND, MOST_SEQUENCES, PIECE, ROWS
from tpplan.exec.toolchain.language import UINT32, UINT64, cuda, types

#: Words of the operands.
PLACES = TOLD - FIRST_OPERAND


@device_function
def begin(counts: Any, places: Any) -> None:
    """Read and raise the counters of the flags, and note the operands' addresses and pitches."""
    thread, number = UINT64(cuda.threadIdx.x), UINT32(0)
    if thread < UINT64(PLACES):
        places[thread] = word(UINT64(FIRST_OPERAND) + thread)
    entry = word(SEQUENCES + 1) + UINT64(2) * thread
    if thread < word(SEQUENCES):
        number = ptx.poll_32(counter(word(entry)))
        counts[thread] = number
    cuda.syncthreads()
    if thread < word(SEQUENCES):
        ptx.store_32(counter(word(entry)), number + UINT32(word(entry + UINT64(1))))


@device_function
def tell(counts: Any, at: Any) -> Any:
    """Tell others where operands are; return where the next step is.

    What the device did before this kernel is done: it was complete when the kernel began.
    """
    thread, count = UINT64(cuda.threadIdx.x), word(at + UINT64(1))
    if thread < count:
        entry = at + UINT64(2) + UINT64(5) * thread
        number = counts[word(entry)] + UINT32(word(entry + UINT64(1)))
        place = word(entry + UINT64(2)) + UINT64(TOLD_BYTES) * UINT64(cuda.blockIdx.x)
        address = word(word(entry + UINT64(3)))
        pitch = word(UINT64(FIRST_OPERAND + 1) + UINT64(2) * word(entry + UINT64(4)))
        ptx.post_128(place, UINT32(address), number, UINT32(address >> UINT64(32)), number)
        ptx.post_128(place + UINT64(16), UINT32(pitch), number, UINT32(pitch >> UINT64(32)), number)
    return at + UINT64(2) + UINT64(5) * count


@device_function
def _hear(place: Any, number: Any) -> Any:
    """Return the two halves of what is told at a place, and whether it never was."""
    low, first, high, second = ptx.poll_128(place)
    start, polls, late = UINT64(0), UINT32(0), UINT32(0)
    while first != number or second != number:
        if polls == UINT32(0):
            start = ptx.nanoseconds()
        polls += UINT32(1)
        if expired(polls, start):
            fail(3)
            late = UINT32(1)
            break
        low, first, high, second = ptx.poll_128(place)
    return UINT64(low) | UINT64(high) << UINT64(32), late


@device_function
def learn(counts: Any, places: Any, at: Any) -> Any:
    """Wait until others have told where their operands are; tell whether any of them did not.

    What another device wrote before its kernel is read by what follows if that asks the memory, as polls do: a cache
    may have older bytes.
    """
    thread, late = UINT64(cuda.threadIdx.x), UINT32(0)
    if thread < word(at + UINT64(1)):
        entry = at + UINT64(2) + UINT64(4) * thread
        number = counts[word(entry)] + UINT32(word(entry + UINT64(1)))
        place = word(entry + UINT64(2)) + UINT64(TOLD_BYTES) * UINT64(cuda.blockIdx.x)
        operand = UINT64(2) * word(entry + UINT64(3))
        address, late = _hear(place, number)
        if late == UINT32(0):
            pitch, late = _hear(place + UINT64(16), number)
            places[operand], places[operand + UINT64(1)] = address, pitch
    return cuda.syncthreads_or(late)


@device_function
def signal(counts: Any, at: Any, fenced: Any) -> Any:
    """Raise flags, after everything that the block has written if that has to be ``fenced``; return the next step."""
    cuda.syncthreads()
    thread = UINT64(cuda.threadIdx.x)
    if thread < word(at + UINT64(1)):
        entry = at + UINT64(2) + UINT64(3) * thread
        if fenced:
            ptx.fence()
        number = counts[word(entry)] + UINT32(word(entry + UINT64(1)))
        ptx.post_32(word(entry + UINT64(2)) + UINT64(4) * UINT64(cuda.blockIdx.x), number)
    return at + UINT64(2) + UINT64(3) * word(at + UINT64(1))


def _waiting(poll: Any) -> Any:
    """Make a function that waits for flags, and tells whether any of them did not come."""

    @device_function
    def wait(counts: Any, at: Any) -> Any:
        thread, late = UINT64(cuda.threadIdx.x), UINT32(0)
        if thread < word(at + UINT64(1)):
            entry = at + UINT64(2) + UINT64(3) * thread
            number = counts[word(entry)] + UINT32(word(entry + UINT64(1)))
            address = word(entry + UINT64(2)) + UINT64(4) * UINT64(cuda.blockIdx.x)
            start, polls = ptx.nanoseconds(), UINT32(0)
            while UINT32(poll(address) - number) > UINT32(0x7FFFFFFF):  # it is behind
                polls += UINT32(1)
                if expired(polls, start):
                    fail(3)
                    late = UINT32(1)
                    break
        return cuda.syncthreads_or(late)

    return wait


#: What comes behind sees what others wrote before; or, which is faster, only that others have read what they had to.
wait, wait_for_reads = _waiting(ptx.acquire_32), _waiting(ptx.poll_32)


@device_function
def operand(places: Any, entry: Any, first: Any) -> Any:
    """Return the address of a row of an operand, at a column."""
    at = UINT64(2) * word(entry)
    return places[at] + first * places[at + UINT64(1)] + word(entry + UINT64(1))


@device_function
def pitch(places: Any, entry: Any) -> Any:
    """Return the bytes from one row of an operand to the next."""
    return places[UINT64(2) * word(entry) + UINT64(1)]


@device_function
def _first(part: Any, parts: Any) -> Any:
    """Return the first row of a part of the rows."""
    return word(ROWS) * part // parts


@device_function
def _copy(places: Any, at: Any) -> Any:
    """Copy columns to every target; return where the next step is."""
    source, width = at + UINT64(1), word(at + UINT64(3))
    first, targets = _first(word(at + UINT64(4)), word(at + UINT64(5))), word(at + UINT64(6))
    rows = _first(word(at + UINT64(4)) + UINT64(1), word(at + UINT64(5))) - first
    read, down, piece = operand(places, source, first), pitch(places, source), word(PIECE)
    per_row = UINT32(width) // UINT32(piece)
    index, step, total = UINT64(cuda.grid(1)), UINT64(cuda.gridsize(1)), rows * UINT64(per_row)
    if piece == VECTOR_BYTES:
        while index + UINT64(3) * step < total:
            i0, i1, i2, i3 = index, index + step, index + UINT64(2) * step, index + UINT64(3) * step
            r0, r1 = UINT64(UINT32(i0) // per_row), UINT64(UINT32(i1) // per_row)
            r2, r3 = UINT64(UINT32(i2) // per_row), UINT64(UINT32(i3) // per_row)
            c0, c1 = (i0 - r0 * UINT64(per_row)) * UINT64(16), (i1 - r1 * UINT64(per_row)) * UINT64(16)
            c2, c3 = (i2 - r2 * UINT64(per_row)) * UINT64(16), (i3 - r3 * UINT64(per_row)) * UINT64(16)
            w0, w1, w2, w3 = ptx.poll_128(read + r0 * down + c0)
            x0, x1, x2, x3 = ptx.poll_128(read + r1 * down + c1)
            y0, y1, y2, y3 = ptx.poll_128(read + r2 * down + c2)
            z0, z1, z2, z3 = ptx.poll_128(read + r3 * down + c3)
            for k in range(targets):
                target = at + UINT64(7) + UINT64(2) * UINT64(k)
                write, step_down = operand(places, target, first), pitch(places, target)
                ptx.store_128(write + r0 * step_down + c0, w0, w1, w2, w3)
                ptx.store_128(write + r1 * step_down + c1, x0, x1, x2, x3)
                ptx.store_128(write + r2 * step_down + c2, y0, y1, y2, y3)
                ptx.store_128(write + r3 * step_down + c3, z0, z1, z2, z3)
            index += UINT64(4) * step
    while index < total:
        row = index // UINT64(per_row)  # in 64 bits, for there may be many small pieces
        column = (index - row * UINT64(per_row)) * piece
        if piece == VECTOR_BYTES:
            w0, w1, w2, w3 = ptx.poll_128(read + row * down + column)
        else:
            w0, w1, w2, w3 = _load_piece(read + row * down + column, piece)
        for k in range(targets):
            target = at + UINT64(7) + UINT64(2) * UINT64(k)
            write = operand(places, target, first) + row * pitch(places, target) + column
            if piece == VECTOR_BYTES:
                ptx.store_128(write, w0, w1, w2, w3)
            else:
                _store_piece(write, w0, w1, piece)
        index += step
    return at + UINT64(7) + UINT64(2) * targets


@device_function
def _load_piece(address: Any, piece: Any) -> Any:
    """Return 1, 2, 4 or 8 bytes, in as many words as 16 have."""
    zero = UINT32(0)
    if piece == 8:  # noqa: PLR2004
        low, high = ptx.load_64(address)
        return low, high, zero, zero
    if piece == 4:  # noqa: PLR2004
        return ptx.load_32(address), zero, zero, zero
    if piece == 2:  # noqa: PLR2004
        return UINT32(ptx.load_16(address)), zero, zero, zero
    return UINT32(ptx.load_8(address)), zero, zero, zero


@device_function
def _store_piece(address: Any, low: Any, high: Any, piece: Any) -> None:
    """Write 1, 2, 4 or 8 bytes."""
    if piece == 8:  # noqa: PLR2004
        ptx.store_64(address, low, high)
    elif piece == 4:  # noqa: PLR2004
        ptx.store_32(address, low)
    elif piece == 2:  # noqa: PLR2004
        ptx.store_16(address, types.uint16(low))
    else:
        ptx.store_8(address, types.uint16(low))


def _kernel(name: str, add: Any) -> Kernel:  # noqa: C901 (a step of each kind)
    """Make a kernel that goes through its steps; ``add`` does those that add up, and returns where the next one is."""

    def run(_words):  # type: ignore[no-untyped-def]
        counts = cuda.shared.array(MOST_SEQUENCES, UINT32)
        places = cuda.shared.array(PLACES, UINT64)
        begin(counts, places)
        at = word(STEPS + 1)
        for _ in range(word(STEPS)):
            kind = word(at)
            if kind == TELL:
                at = tell(counts, at)
            elif kind == SIGNAL:
                at = signal(counts, at, UINT32(1))
            elif kind == LEARN:
                if learn(counts, places, at):
                    return  # without touching what nobody has opened
                if word(PIECE) != VECTOR_BYTES:
                    ptx.fence()  # as single elements are read from caches
                at += UINT64(2) + UINT64(4) * word(at + UINT64(1))
            elif kind == AWAIT:
                if wait(counts, at):
                    return
                at += UINT64(2) + UINT64(3) * word(at + UINT64(1))
            elif kind == COPY:
                at = _copy(places, at)
            else:
                at = add(places, at)

    return Kernel(name, run, 1)


@device_function
def _nothing(places: Any, at: Any) -> Any:  # noqa: ARG001 (as those that add up)
    """Add up nothing."""
    return at


def adding(first: Any, second: Any, both: Any) -> tuple[Any, Any]:
    """Make functions: one adds a vector to the sums of its eight halves, the low ones first, the other rounds these."""

    @device_function
    def plus(totals: Any, words: Any) -> Any:
        s0, s1, s2, s3, t0, t1, t2, t3 = totals
        w0, w1, w2, w3 = words
        low = (s0 + first(w0), s1 + first(w1), s2 + first(w2), s3 + first(w3))
        return (*low, t0 + second(w0), t1 + second(w1), t2 + second(w2), t3 + second(w3))

    @device_function
    def rounded(totals: Any) -> Any:
        s0, s1, s2, s3, t0, t1, t2, t3 = totals
        return both(s0, t0), both(s1, t1), both(s2, t2), both(s3, t3)

    return plus, rounded


def _sum(name: str, item: int, first: Any, second: Any, both: Any) -> Kernel:  # noqa: C901, PLR0915 (five functions)
    """Make a kernel whose steps may add up, in float32, in order; it rounds once."""
    halves = item == 2  # noqa: PLR2004
    plus, rounded = adding(first, second, both)

    @device_function
    def load_one(address: Any) -> Any:
        return first(UINT32(ptx.load_16(address))) if halves else first(ptx.load_32(address))

    @device_function
    def store_one(address: Any, value: Any) -> None:
        if halves:
            ptx.store_16(address, types.uint16(both(value, value) & UINT32(0xFFFF)))
        else:
            ptx.store_32(address, both(value, value))

    @device_function
    def add_vectors(places: Any, source: Any, sources: Any, top: Any, at: Any, then: Any) -> Any:
        """Return 16 bytes of the sum at each of two places; two sources are read at a time, for one may be far away.

        Args:
            places: see :func:`begin`.
            source: entry of the first source.
            sources: number of sources.
            top: first row.
            at: row and column of a place.
            then: those of the other, which may be the same.
        """
        zero = types.float32(-0.0)  # which added to keeps the sign of a zero
        a = b = (zero, zero, zero, zero, zero, zero, zero, zero)
        k = UINT64(0)
        while k + UINT64(1) < sources:
            other = source + UINT64(2)
            start, down = operand(places, source, top), pitch(places, source)
            far, step = operand(places, other, top), pitch(places, other)
            v, w = ptx.poll_128(start + at[0] * down + at[1]), ptx.poll_128(start + then[0] * down + then[1])
            x, y = ptx.poll_128(far + at[0] * step + at[1]), ptx.poll_128(far + then[0] * step + then[1])
            a, b = plus(plus(a, v), x), plus(plus(b, w), y)
            source += UINT64(4)
            k += UINT64(2)
        if k < sources:
            start, down = operand(places, source, top), pitch(places, source)
            v, w = ptx.poll_128(start + at[0] * down + at[1]), ptx.poll_128(start + then[0] * down + then[1])
            a, b = plus(a, v), plus(b, w)
        return rounded(a), rounded(b)

    @device_function
    def store_vectors(places: Any, entry: Any, targets: Any, top: Any, at: Any, words: Any) -> None:
        """Write 16 bytes to a place of every target."""
        for _ in range(targets):
            where = operand(places, entry, top) + at[0] * pitch(places, entry) + at[1]
            ptx.store_128(where, words[0], words[1], words[2], words[3])
            entry += UINT64(2)

    @device_function
    def add_one(places: Any, source: Any, sources: Any, top: Any, row: Any, column: Any) -> Any:
        """Return one element of the sum."""
        total = types.float32(-0.0)
        for _ in range(sources):
            total = total + load_one(operand(places, source, top) + row * pitch(places, source) + column)
            source += UINT64(2)
        return total

    @device_function
    def add(places: Any, at: Any) -> Any:
        """Add up columns and write them to every target; return where the next step is."""
        top = _first(word(at + UINT64(2)), word(at + UINT64(3)))
        rows = _first(word(at + UINT64(2)) + UINT64(1), word(at + UINT64(3))) - top
        targets = word(at + UINT64(4))
        entries = at + UINT64(5) + UINT64(2) * targets
        source, sources, vectors = entries + UINT64(1), word(entries), word(PIECE) == VECTOR_BYTES
        piece = UINT64(VECTOR_BYTES) if vectors else UINT64(item)
        per_row = UINT32(word(at + UINT64(1))) // UINT32(piece)
        index, step, total = UINT64(cuda.grid(1)), UINT64(cuda.gridsize(1)), rows * UINT64(per_row)
        while vectors and index < total:
            then = index + step if index + step < total else index
            row, next_row = UINT64(UINT32(index) // per_row), UINT64(UINT32(then) // per_row)
            here = row, (index - row * UINT64(per_row)) * piece
            there = next_row, (then - next_row * UINT64(per_row)) * piece
            first_words, second_words = add_vectors(places, source, sources, top, here, there)
            store_vectors(places, at + UINT64(5), targets, top, here, first_words)
            if then != index:
                store_vectors(places, at + UINT64(5), targets, top, there, second_words)
            index += UINT64(2) * step
        while index < total:
            row = index // UINT64(per_row)
            column = (index - row * UINT64(per_row)) * piece
            one = add_one(places, source, sources, top, row, column)
            for k in range(targets):
                target = at + UINT64(5) + UINT64(2) * UINT64(k)
                store_one(operand(places, target, top) + row * pitch(places, target) + column, one)
            index += step
        return entries + UINT64(1) + UINT64(2) * sources

    return _kernel(name, add)


DIRECT_MOVE = _kernel("direct_move", _nothing)
DIRECT_SUM_BF16 = _sum("direct_sum_bf16", 2, ptx.low_bf16, ptx.high_bf16, ptx.two_bf16)
DIRECT_SUM_F16 = _sum("direct_sum_f16", 2, ptx.low_f16, ptx.high_f16, ptx.two_f16)
DIRECT_SUM_F32 = _sum("direct_sum_f32", 4, ptx.float_of, none, only)
