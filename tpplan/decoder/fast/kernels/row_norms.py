"""The root mean square norm of one or two rows, by a whole block, which keeps the result in shared memory."""

from __future__ import annotations

from functools import cache
from typing import Any

from tpplan.decoder.fast.kernels.dot_products import dot, mapped, over_warp, zeros
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.toolchain.language import cuda, libdevice, types

#: Warps of a block, at most.
MOST_WARPS = 16

#: Columns of a lane: 16 bytes.
_LANE = 8
_WORD, _FLOAT = types.uint64, types.float32


@cache
def _squares_of(count: int, eight: Any) -> Any:
    """Make what adds the squares of 16 bytes of every row.

    Args:
        count: of rows.
        eight: makes floats of 16 bytes.
    """

    @device_function
    def squares(total: Any, w: Any, is_there: Any) -> Any:
        f = eight(w)
        return dot(total, f, f) if is_there else total

    return mapped(count, squares)


@cache
def _factors_of(count: int) -> Any:
    """Make what returns, in all threads, what rows are multiplied by, of sums of squares of their own."""

    @device_function
    def shares(total: Any, row: Any, to: Any) -> Any:
        total = over_warp(total)
        sums, warp, lane = to
        if lane == _WORD(0):
            sums[row * _WORD(MOST_WARPS) + warp] = total
        return total

    @device_function
    def factors(_: Any, row: Any, given: Any) -> Any:
        sums, warps, lane, width, least = given
        total = over_warp(sums[row * _WORD(MOST_WARPS) + lane] if lane < warps else _FLOAT(0))
        return libdevice.rsqrtf(total / width + least)

    share, factor = mapped(count, shares), mapped(count, factors)

    @device_function
    def factors_of(totals: Any, sums: Any, width: Any, eps: Any) -> Any:
        lane, warp = _WORD(cuda.threadIdx.x) & _WORD(31), _WORD(cuda.threadIdx.x) >> _WORD(5)
        numbers = (_WORD(0), _WORD(1))
        share(totals, numbers, (sums, warp, lane))
        cuda.syncthreads()
        warps, least = _WORD(cuda.blockDim.x) >> _WORD(5), ptx.float_of(types.uint32(eps))
        return factor(totals, numbers, (sums, warps, lane, _FLOAT(types.int64(width)), least))

    return factors_of


def _write_of(count: int, eight: Any, both: Any) -> Any:
    """Make what multiplies 16 bytes of every row by its factor and by weights, plus a number, and writes the products.

    Args:
        count: of rows.
        eight: makes floats of 16 bytes.
        both: makes 32 bits of two floats.
    """

    @device_function
    def writes(w: Any, given: Any, to: Any) -> Any:
        place, by = given
        start, g, more = to
        f, h = eight(w), eight(g)
        ptx.shared_store_128(
            start + place,
            both((h[0] + more) * (by * f[0]), (h[1] + more) * (by * f[1])),
            both((h[2] + more) * (by * f[2]), (h[3] + more) * (by * f[3])),
            both((h[4] + more) * (by * f[4]), (h[5] + more) * (by * f[5])),
            both((h[6] + more) * (by * f[6]), (h[7] + more) * (by * f[7])),
        )
        return by

    @device_function
    def pairs(a: Any, b: Any, _: Any) -> Any:
        return a, b

    write, pair = mapped(count, writes), mapped(count, pairs)

    @device_function
    def write_all(w: Any, places: Any, by: Any, to: Any, g: Any, more: Any) -> None:
        write(w, pair(places, by, 0), (to, g, more))

    return write_all


def norm_of(count: int, eight: Any, both: Any) -> Any:
    """Make what writes rows divided by their root mean square, times weights plus a number, to shared memory.

    A thread's first two vectors of every row, and of the weights, stay in registers: mostly there are no others.

    Args:
        count: of rows.
        eight: makes floats of 16 bytes.
        both: makes 32 bits of two floats.
    """
    square, factors_of, write = _squares_of(count, eight), _factors_of(count), _write_of(count, eight, both)

    @device_function
    def loads(offset: Any, _: Any, at: Any) -> Any:
        return ptx.load_128(at + offset)

    load = mapped(count, loads)

    @device_function
    def ask(x: Any, offsets: Any, width: Any, gain: Any) -> Any:
        """Ask for a thread's vectors; one behind the last column is the first."""
        first = _WORD(cuda.threadIdx.x) * _WORD(_LANE)
        second = first + _WORD(cuda.blockDim.x) * _WORD(_LANE)
        first = _WORD(2) * (first if first < width else _WORD(0))
        second = _WORD(2) * (second if second < width else _WORD(0))
        r, s = load(offsets, offsets, x + first), load(offsets, offsets, x + second)
        return r, s, ptx.load_128(gain + first), ptx.load_128(gain + second)

    @device_function
    def norm(
        kept: Any, sums: Any, x: Any, offsets: Any, places: Any, width: Any, gain: Any, eps: Any, offset: Any
    ) -> None:  # fmt: skip
        r, s, g, h = ask(x, offsets, width, gain)
        more = ptx.float_of(types.uint32(offset))
        first, stride = _WORD(cuda.threadIdx.x) * _WORD(_LANE), _WORD(cuda.blockDim.x) * _WORD(_LANE)
        second = first + stride
        totals = square(square(zeros()[:count], r, first < width), s, second < width)
        column = second + stride
        while column < width:
            totals = square(totals, load(offsets, offsets, x + column * _WORD(2)), column < width)
            column += stride
        by = factors_of(totals, sums, width, eps)
        if first < width:
            write(r, places, by, kept + first * _WORD(2), g, more)
        if second < width:
            write(s, places, by, kept + second * _WORD(2), h, more)
        column = second + stride
        while column < width:
            at = column * _WORD(2)
            write(load(offsets, offsets, x + at), places, by, kept + at, ptx.load_128(gain + at), more)
            column += stride
        cuda.syncthreads()

    return norm
