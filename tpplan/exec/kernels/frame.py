"""Kernels that exchange larger messages through host memory, in frames, one running on each device.

A frame is written, fenced, and told by a flag beside it, so that the link carries nothing twice: packets, which carry
their flags inside, are sooner there, but take twice the room. While a block of threads fills a frame, or waits for one,
others do the same, so the link is busy in both directions. A block has sent all that it has of a frame before it adds
up what others have of the same columns: a sum may be written over a part.

How messages are cut is told in :mod:`tpplan.exec.gpu.frame_table`, and what a kernel exchanges, in its table.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from tpplan.exec.gpu.exchange_table import PIECE, ROWS
from tpplan.exec.gpu.frame_table import (
    BLOCKS,
    COLUMN,
    FILLED,
    LOCAL_COLUMN,
    LOCAL_TO,
    LOCAL_WIDTH,
    LONGEST,
    MOST_QUEUES,
    OUT,
    OWN,
    RECEIVE_WORDS,
    RECEIVES,
    RECEIVES_AT,
    RESIDUAL,
    VECTOR_BYTES,
    VECTORS,
    WIDTH,
    X,
)
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.frame_numbers import await_credit, await_frame, begin, end, entry, line, place, turn, watched
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.kernels.slot import load_piece, row, store_piece
from tpplan.exec.kernels.sums import none, only

_WORD = types.uint64
_HALF = types.uint32


@device_function
def _address(matrix: Any, column: Any, width: Any, at: Any) -> Any:
    """Return the address of a byte of a message, which is columns of a matrix."""
    return word(matrix) + column + at + row(at, width) * (word(matrix + 1) - width)


@device_function
def _is_wanted(at: Any, message: Any, skip: Any, width: Any) -> Any:
    """Tell whether a byte of a message with so many bytes a row is one of ``width`` behind ``skip``."""
    if at >= word(ROWS) * message:
        return False
    return at - row(at, message) * message - skip < width  # which a column before those skipped is not


@device_function
def _target(to: Any, message: Any, skip: Any, at: Any) -> Any:
    """Return where in the output a byte of a message belongs."""
    which = row(at, message)
    return word(OUT) + to + which * word(OUT + 1) + (at - which * message - skip)


@device_function
def _load(address: Any, wanted: Any) -> Any:
    """Return a vector of a matrix; zeros if it is not wanted."""
    zero = _HALF(0)
    if wanted:
        return ptx.load_128(address)
    return zero, zero, zero, zero


@device_function
def _poll(address: Any, wanted: Any) -> Any:
    """Return a vector of a frame; zeros if it is not wanted."""
    zero = _HALF(0)
    if wanted:
        return ptx.poll_128(address)
    return zero, zero, zero, zero


@device_function
def _post(address: Any, vector: Any, wanted: Any) -> None:
    """Write a vector into a frame, if it is wanted."""
    if wanted:
        ptx.post_128(address, vector[0], vector[1], vector[2], vector[3])


@device_function
def _store(address: Any, vector: Any, wanted: Any) -> None:
    """Write a vector into a matrix, if it is wanted."""
    if wanted:
        ptx.store_128(address, vector[0], vector[1], vector[2], vector[3])


@device_function
def _offsets() -> Any:
    """Return where this thread's vectors begin in a frame."""
    first, step = _WORD(cuda.threadIdx.x) * _WORD(VECTOR_BYTES), turn()
    return first, first + step, first + _WORD(2) * step, first + _WORD(3) * step


@device_function
def _loaded(start: Any) -> Any:
    """Return the vectors of the message from ``start`` on with which this thread fills a frame."""
    i, j, k, m = _offsets()
    column, width = word(COLUMN), word(WIDTH)
    total = word(ROWS) * width if word(PIECE) == VECTOR_BYTES else _WORD(0)
    a = _load(_address(X, column, width, start + i), start + i < total)
    b = _load(_address(X, column, width, start + j), start + j < total)
    c = _load(_address(X, column, width, start + k), start + k < total)
    d = _load(_address(X, column, width, start + m), start + m < total)
    return a, b, c, d


@device_function
def _fill(frame: Any, start: Any, vectors: Any) -> None:
    """Fill a frame with the bytes of the message from ``start`` on, as far as there are any."""
    column, width, piece = word(COLUMN), word(WIDTH), word(PIECE)
    total = word(ROWS) * width
    if piece == VECTOR_BYTES:
        i, j, k, m = _offsets()
        a, b, c, d = vectors
        _post(frame + i, a, start + i < total)
        _post(frame + j, b, start + j < total)
        _post(frame + k, c, start + k < total)
        _post(frame + m, d, start + m < total)
    else:
        at = _WORD(cuda.threadIdx.x) * piece
        while at < turn() * _WORD(VECTORS) and start + at < total:
            store_piece(frame + at, load_piece(_address(X, column, width, start + at), piece), piece)
            at += _WORD(cuda.blockDim.x) * piece


@device_function
def _copy(start: Any) -> None:
    """Copy what the device has to its own output, as much of it as a frame holds."""
    column, width, to, piece = word(LOCAL_COLUMN), word(LOCAL_WIDTH), word(LOCAL_TO), word(PIECE)
    at = _WORD(cuda.threadIdx.x) * piece
    while at < turn() * _WORD(VECTORS) and start + at < word(ROWS) * width:
        source, target = _address(X, column, width, start + at), _target(to, width, _WORD(0), start + at)
        if piece == VECTOR_BYTES:
            _store(target, ptx.load_128(source), True)  # noqa: FBT003
        else:
            store_piece(target, load_piece(source, piece), piece)
        at += _WORD(cuda.blockDim.x) * piece


@device_function
def _move(firsts: Any, start: Any, turns: Any) -> None:
    """Take what is wanted of this turn's frames."""
    for r in range(word(RECEIVES)):
        words, piece = word(RECEIVES_AT) + _WORD(RECEIVE_WORDS) * _WORD(r), word(PIECE)
        queue, to, skip, width = word(words), word(words + _WORD(1)), word(words + _WORD(2)), word(words + _WORD(3))
        message, frame = word(entry(queue) + _WORD(5)), place(queue, _HALF(firsts[queue] + turns))
        if piece == VECTOR_BYTES:
            i, j, k, m = _offsets()
            first, second = _is_wanted(start + i, message, skip, width), _is_wanted(start + j, message, skip, width)
            third, fourth = _is_wanted(start + k, message, skip, width), _is_wanted(start + m, message, skip, width)
            a, b = _poll(frame + i, first), _poll(frame + j, second)
            c, d = _poll(frame + k, third), _poll(frame + m, fourth)
            _store(_target(to, message, skip, start + i), a, first)
            _store(_target(to, message, skip, start + j), b, second)
            _store(_target(to, message, skip, start + k), c, third)
            _store(_target(to, message, skip, start + m), d, fourth)
        else:
            at = _WORD(cuda.threadIdx.x) * piece
            while at < turn() * _WORD(VECTORS) and start + at < word(ROWS) * message:
                if _is_wanted(start + at, message, skip, width):
                    store_piece(_target(to, message, skip, start + at), load_piece(frame + at, piece), piece)
                at += _WORD(cuda.blockDim.x) * piece


def _sum(item: int, first: Any, second: Any, both: Any) -> Any:  # noqa: C901 (four functions)
    """Make what adds up this turn's frames in float32, in order, and rounds once.

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
            address = _address(X if source == OWN else RESIDUAL, _WORD(0), word(WIDTH), start + at)
        else:
            address = place(source, _HALF(firsts[source] + turns)) + at
        return first(_HALF(load_piece(address, _WORD(item))))

    @device_function
    def add(firsts: Any, start: Any, turns: Any) -> None:
        width, total = word(WIDTH), word(ROWS) * word(WIDTH)
        zero = types.float32(-0.0)  # which added to keeps the sign of a zero
        if word(RECEIVES) > 0 and word(PIECE) == VECTOR_BYTES:
            i, j, k, m = _offsets()
            more, most, end, all_ = start + i < total, start + j < total, start + k < total, start + m < total
            s = t = u = v = (zero, zero, zero, zero, zero, zero, zero, zero)
            for r in range(word(RECEIVES)):
                source = word(word(RECEIVES_AT) + _WORD(r))
                if source >= OWN:
                    matrix = X if source == OWN else RESIDUAL
                    a = _load(_address(matrix, _WORD(0), width, start + i), more)
                    b = _load(_address(matrix, _WORD(0), width, start + j), most)
                    c = _load(_address(matrix, _WORD(0), width, start + k), end)
                    d = _load(_address(matrix, _WORD(0), width, start + m), all_)
                else:
                    frame = place(source, _HALF(firsts[source] + turns))
                    a, b = _poll(frame + i, more), _poll(frame + j, most)
                    c, d = _poll(frame + k, end), _poll(frame + m, all_)
                s, t, u, v = plus(s, a), plus(t, b), plus(u, c), plus(v, d)
            _store(_target(_WORD(0), width, _WORD(0), start + i), rounded(s), more)
            _store(_target(_WORD(0), width, _WORD(0), start + j), rounded(t), most)
            _store(_target(_WORD(0), width, _WORD(0), start + k), rounded(u), end)
            _store(_target(_WORD(0), width, _WORD(0), start + m), rounded(v), all_)
        elif word(RECEIVES) > 0:
            at = _WORD(cuda.threadIdx.x) * _WORD(item)
            while at < turn() * _WORD(VECTORS) and start + at < total:
                one = zero
                for r in range(word(RECEIVES)):
                    one = one + element(word(word(RECEIVES_AT) + _WORD(r)), firsts, turns, start, at)
                store_piece(_target(_WORD(0), width, _WORD(0), start + at), _WORD(both(one, one)), _WORD(item))
                at += _WORD(cuda.blockDim.x) * _WORD(item)

    return add


def _kernel(name: str, take: Any) -> Kernel:
    """Make a kernel; ``take`` does what is to be done with the frames that have come."""

    def run(_words):  # type: ignore[no-untyped-def]
        firsts = cuda.shared.array(MOST_QUEUES, _HALF)
        number, seen = begin(firsts)
        queue, fills, reads = watched()
        words, turns = entry(queue), _HALF(0)
        sent = word(ROWS) * word(WIDTH) if word(FILLED) > 0 else _WORD(0)
        mine = word(ROWS) * word(words + _WORD(5)) if fills or reads else _WORD(0)
        start = _WORD(cuda.blockIdx.x) * turn() * _WORD(VECTORS)
        while start < word(ROWS) * word(LONGEST):
            if start < sent:
                vectors = _loaded(start)  # while it is waited
                if fills:
                    seen = await_credit(line(word(words + _WORD(3))), number, seen)
                cuda.syncthreads()
                _fill(place(_WORD(0), _HALF(firsts[0] + turns)), start, vectors)
                cuda.syncthreads()
                if cuda.threadIdx.x == 0:
                    ptx.fence()
                    ptx.post_32(line(word(words + _WORD(2))), number)
            _copy(start)
            if reads and start < mine:
                seen = await_frame(line(word(words + _WORD(2))), number, seen)
            cuda.syncthreads()
            take(firsts, start, turns)
            cuda.syncthreads()
            if start < mine:
                if reads:
                    ptx.post_32(line(word(words + _WORD(3))), number)
                number = _HALF(number + _HALF(1))
            turns = _HALF(turns + _HALF(1))
            start += turn() * _WORD(VECTORS) * word(BLOCKS)
        end(number, seen)

    return Kernel(name, run, 1)


FRAME_MOVE = _kernel("frame_move", _move)
FRAME_SUM_BF16 = _kernel("frame_sum_bf16", _sum(2, ptx.low_bf16, ptx.high_bf16, ptx.two_bf16))
FRAME_SUM_F16 = _kernel("frame_sum_f16", _sum(2, ptx.low_f16, ptx.high_f16, ptx.two_f16))
FRAME_SUM_F32 = _kernel("frame_sum_f32", _sum(4, ptx.float_of, none, only))
