"""Kernels that write straight into the tensors of other devices, one running on each device.

A kernel goes through the steps of its table: it tells others that its tensors may be read and written, waits until
they say so, moves or adds up columns, tells that it has, and waits until all have. Blocks of the same index on all
devices go together: each has a part of every step, the same on all devices, and flags of its own.

See :mod:`tpplan.exec.protocol.direct`.
"""

from __future__ import annotations

from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.exchange import counter, expired, fail
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.kernels.sums import none, only
from tpplan.exec.protocol.direct import AWAIT, COPY, SEQUENCES, SIGNAL, STEPS, VECTOR_BYTES
from tpplan.exec.protocol.words import FIRST_OPERAND, MOST_SEQUENCES, PIECE, ROWS
from tpplan.exec.toolchain.language import UINT32, UINT64, cuda, types


@device_function
def _begin(counts: Any) -> None:
    """Read and raise the counters of the flags."""
    thread, number = UINT64(cuda.threadIdx.x), UINT32(0)
    entry = word(SEQUENCES + 1) + UINT64(2) * thread
    if thread < word(SEQUENCES):
        number = ptx.poll_32(counter(word(entry)))
        counts[thread] = number
    cuda.syncthreads()
    if thread < word(SEQUENCES):
        ptx.store_32(counter(word(entry)), number + UINT32(word(entry + UINT64(1))))


@device_function
def _signal(counts: Any, at: Any, fenced: Any) -> None:
    """Raise flags, after everything that the block has done if that has to be ``fenced``.

    What the device did before this kernel is done: it was complete when the kernel began.
    """
    cuda.syncthreads()
    thread = UINT64(cuda.threadIdx.x)
    if thread < word(at + UINT64(1)):
        entry = at + UINT64(2) + UINT64(3) * thread
        if fenced:
            ptx.fence()
        number = counts[word(entry)] + UINT32(word(entry + UINT64(1)))
        ptx.post_32(word(entry + UINT64(2)) + UINT64(4) * UINT64(cuda.blockIdx.x), number)


@device_function
def _await(counts: Any, at: Any) -> Any:
    """Wait for flags, before anything that the block does next; tell whether any of them did not come."""
    thread, late = UINT64(cuda.threadIdx.x), UINT32(0)
    if thread < word(at + UINT64(1)):
        entry = at + UINT64(2) + UINT64(3) * thread
        number = counts[word(entry)] + UINT32(word(entry + UINT64(1)))
        address = word(entry + UINT64(2)) + UINT64(4) * UINT64(cuda.blockIdx.x)
        start, polls = ptx.nanoseconds(), UINT32(0)
        while UINT32(ptx.acquire_32(address) - number) > UINT32(0x7FFFFFFF):  # it is behind
            polls += UINT32(1)
            if expired(polls, start):
                fail(3)
                late = UINT32(1)
                break
    return cuda.syncthreads_or(late)


@device_function
def _operand(entry: Any, first: Any) -> Any:
    """Return the address of a row of an operand, at a column."""
    operand = UINT64(FIRST_OPERAND) + UINT64(2) * word(entry)
    return word(operand) + first * word(operand + UINT64(1)) + word(entry + UINT64(1))


@device_function
def _pitch(entry: Any) -> Any:
    """Return the bytes from one row of an operand to the next."""
    return word(UINT64(FIRST_OPERAND) + UINT64(2) * word(entry) + UINT64(1))


@device_function
def _first(part: Any, parts: Any) -> Any:
    """Return the first row of a part of the rows."""
    return word(ROWS) * part // parts


@device_function
def _copy(at: Any) -> Any:
    """Copy columns to every target; return where the next step is."""
    source, width = at + UINT64(1), word(at + UINT64(3))
    first, targets = _first(word(at + UINT64(4)), word(at + UINT64(5))), word(at + UINT64(6))
    rows = _first(word(at + UINT64(4)) + UINT64(1), word(at + UINT64(5))) - first
    read, pitch, piece = _operand(source, first), _pitch(source), word(PIECE)
    per_row = UINT32(width) // UINT32(piece)
    index, step, total = UINT64(cuda.grid(1)), UINT64(cuda.gridsize(1)), rows * UINT64(per_row)
    if piece == VECTOR_BYTES:
        while index + UINT64(3) * step < total:
            i0, i1, i2, i3 = index, index + step, index + UINT64(2) * step, index + UINT64(3) * step
            r0, r1 = UINT64(UINT32(i0) // per_row), UINT64(UINT32(i1) // per_row)
            r2, r3 = UINT64(UINT32(i2) // per_row), UINT64(UINT32(i3) // per_row)
            c0, c1 = (i0 - r0 * UINT64(per_row)) * UINT64(16), (i1 - r1 * UINT64(per_row)) * UINT64(16)
            c2, c3 = (i2 - r2 * UINT64(per_row)) * UINT64(16), (i3 - r3 * UINT64(per_row)) * UINT64(16)
            w0, w1, w2, w3 = ptx.load_128(read + r0 * pitch + c0)
            x0, x1, x2, x3 = ptx.load_128(read + r1 * pitch + c1)
            y0, y1, y2, y3 = ptx.load_128(read + r2 * pitch + c2)
            z0, z1, z2, z3 = ptx.load_128(read + r3 * pitch + c3)
            for k in range(targets):
                target = at + UINT64(7) + UINT64(2) * UINT64(k)
                write, step_down = _operand(target, first), _pitch(target)
                ptx.store_128(write + r0 * step_down + c0, w0, w1, w2, w3)
                ptx.store_128(write + r1 * step_down + c1, x0, x1, x2, x3)
                ptx.store_128(write + r2 * step_down + c2, y0, y1, y2, y3)
                ptx.store_128(write + r3 * step_down + c3, z0, z1, z2, z3)
            index += UINT64(4) * step
    while index < total:
        row = index // UINT64(per_row)  # in 64 bits, for there may be many small pieces
        column = (index - row * UINT64(per_row)) * piece
        if piece == VECTOR_BYTES:
            w0, w1, w2, w3 = ptx.load_128(read + row * pitch + column)
        else:
            w0, w1, w2, w3 = _load_piece(read + row * pitch + column, piece)
        for k in range(targets):
            target = at + UINT64(7) + UINT64(2) * UINT64(k)
            write = _operand(target, first) + row * _pitch(target) + column
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


def _kernel(name: str, add: Any) -> Kernel:
    """Make a kernel that goes through its steps; ``add`` does those that add up, and returns where the next one is."""

    def run(_words):  # type: ignore[no-untyped-def]
        counts = cuda.shared.array(MOST_SEQUENCES, UINT32)
        _begin(counts)
        at = word(STEPS + 1)
        for _ in range(word(STEPS)):
            kind = word(at)
            if kind <= SIGNAL:
                _signal(counts, at, kind == SIGNAL)
                at += UINT64(2) + UINT64(3) * word(at + UINT64(1))
            elif kind == AWAIT:
                if _await(counts, at):
                    return  # without touching what nobody has opened
                at += UINT64(2) + UINT64(3) * word(at + UINT64(1))
            elif kind == COPY:
                at = _copy(at)
            else:
                at = add(at)

    return Kernel(name, run, 1)


@device_function
def _nothing(at: Any) -> Any:
    """Add up nothing."""
    return at


def _sum(name: str, item: int, first: Any, second: Any, both: Any) -> Kernel:  # noqa: C901, PLR0915 (five functions)
    """Make a kernel whose steps may add up, in float32, in order; it rounds once."""
    halves = item == 2  # noqa: PLR2004

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
    def add_vectors(source: Any, sources: Any, top: Any, row: Any, column: Any) -> Any:
        """Return 16 bytes of the sum; two sources are read at a time, for one of them may be far away."""
        s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = types.float32(-0.0)  # which added to keeps the sign of a zero
        k = UINT64(0)
        while k + UINT64(1) < sources:
            other = source + UINT64(2)
            w0, w1, w2, w3 = ptx.load_128(_operand(source, top) + row * _pitch(source) + column)
            x0, x1, x2, x3 = ptx.load_128(_operand(other, top) + row * _pitch(other) + column)
            s0, s1, s2, s3 = s0 + first(w0), s1 + first(w1), s2 + first(w2), s3 + first(w3)
            t0, t1, t2, t3 = t0 + second(w0), t1 + second(w1), t2 + second(w2), t3 + second(w3)
            s0, s1, s2, s3 = s0 + first(x0), s1 + first(x1), s2 + first(x2), s3 + first(x3)
            t0, t1, t2, t3 = t0 + second(x0), t1 + second(x1), t2 + second(x2), t3 + second(x3)
            source += UINT64(4)
            k += UINT64(2)
        if k < sources:
            w0, w1, w2, w3 = ptx.load_128(_operand(source, top) + row * _pitch(source) + column)
            s0, s1, s2, s3 = s0 + first(w0), s1 + first(w1), s2 + first(w2), s3 + first(w3)
            t0, t1, t2, t3 = t0 + second(w0), t1 + second(w1), t2 + second(w2), t3 + second(w3)
        return both(s0, t0), both(s1, t1), both(s2, t2), both(s3, t3)

    @device_function
    def add_one(source: Any, sources: Any, top: Any, row: Any, column: Any) -> Any:
        """Return one element of the sum."""
        total = types.float32(-0.0)
        for _ in range(sources):
            total = total + load_one(_operand(source, top) + row * _pitch(source) + column)
            source += UINT64(2)
        return total

    @device_function
    def add(at: Any) -> Any:
        """Add up columns and write them to every target; return where the next step is."""
        top = _first(word(at + UINT64(2)), word(at + UINT64(3)))
        rows = _first(word(at + UINT64(2)) + UINT64(1), word(at + UINT64(3))) - top
        targets = word(at + UINT64(4))
        entries = at + UINT64(5) + UINT64(2) * targets
        source, sources, vectors = entries + UINT64(1), word(entries), word(PIECE) == VECTOR_BYTES
        piece = UINT64(VECTOR_BYTES) if vectors else UINT64(item)
        per_row = UINT32(word(at + UINT64(1))) // UINT32(piece)
        index, step, total = UINT64(cuda.grid(1)), UINT64(cuda.gridsize(1)), rows * UINT64(per_row)
        while index < total:
            row = UINT64(UINT32(index) // per_row) if vectors else index // UINT64(per_row)
            column = (index - row * UINT64(per_row)) * piece
            if vectors:
                w0, w1, w2, w3 = add_vectors(source, sources, top, row, column)
                for k in range(targets):
                    target = at + UINT64(5) + UINT64(2) * UINT64(k)
                    ptx.store_128(_operand(target, top) + row * _pitch(target) + column, w0, w1, w2, w3)
            else:
                one = add_one(source, sources, top, row, column)
                for k in range(targets):
                    target = at + UINT64(5) + UINT64(2) * UINT64(k)
                    store_one(_operand(target, top) + row * _pitch(target) + column, one)
            index += step
        return entries + UINT64(1) + UINT64(2) * sources

    return _kernel(name, add)


DIRECT_MOVE = _kernel("direct_move", _nothing)
DIRECT_SUM_BF16 = _sum("direct_sum_bf16", 2, ptx.low_bf16, ptx.high_bf16, ptx.two_bf16)
DIRECT_SUM_F16 = _sum("direct_sum_f16", 2, ptx.low_f16, ptx.high_f16, ptx.two_f16)
DIRECT_SUM_F32 = _sum("direct_sum_f32", 4, ptx.float_of, none, only)
