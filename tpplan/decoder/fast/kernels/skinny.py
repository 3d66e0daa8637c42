"""Kernels that multiply up to sixteen rows by a matrix, in the time that reading the matrix takes, by tensor cores.

Sixteen matrix rows, a tile, are the left matrix of the instruction, and eight rows the right one. The warps of a block
share out a tile's columns, 64 at a time: lane 4 g + t has columns 8 t to 8 t + 7, and those 32 behind, of matrix rows g
and g + 8 and of row g, and twice as many on their way. Products do not mind in which order columns are added, if it is
the same on both sides, so that all of this is read 16 bytes at a time and used as it is. What warps have found is added
up in a fixed order. Everything is added in float32. Addresses are at multiples of 16, pitches are in bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tpplan.decoder.fast.kernels import tiles
from tpplan.decoder.fast.kernels.finishing import ADD, add_up_of
from tpplan.decoder.fast.kernels.tile_sums import TILE, rows_of, tile_sums
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.channel import end_sum, wait_of
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.protocol.channel import CALLERS
from tpplan.exec.toolchain.language import FLOAT32, UINT64, cuda, intrinsic, types

#: Warps of a block, at most.
MOST_WARPS = 16
#: Columns that a warp reads at a time.
STEP = 64

#: Registers of what a lane has of a matrix row or a row: two vectors.
_PART = 8


@cache
def _products(multiply: Any) -> Any:
    """Return an intrinsic that adds the products of 16 matrix rows and some rows.

    It takes the sums so far, four for eight rows, what the lane has of its two matrix rows, and of every eighth row. It
    returns the sums of matrix row g and rows 2 t and 2 t + 1, then those of g + 8; then those of the next eight rows.

    Args:
        multiply: writes the instruction.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        sums, weights, rows = (tiles.all_of(builder, each) for each in values)
        for i in range(0, _PART, 2):
            left = [weights[i], weights[i + _PART], weights[i + 1], weights[i + 1 + _PART]]
            for j in range(len(rows) // _PART):
                right, own = rows[j * _PART + i : j * _PART + i + 2], slice(4 * j, 4 * j + 4)
                sums[own] = multiply(builder, [*left, *right, *sums[own]])
        return context.make_tuple(builder, signature.return_type, sums)

    return intrinsic(lambda typingctx, sums, weights, rows: (sums(sums, weights, rows), codegen))  # noqa: ARG005


@cache
def _asking_by(load: Any) -> Any:
    """Make what asks for what a lane has of two matrix rows; behind the last column is the last vector."""

    @device_function
    def ask(low: Any, high: Any, column: Any, last: Any) -> Any:
        at, behind = min(column, last) * UINT64(2), min(column + UINT64(32), last) * UINT64(2)
        a, b, c, d = load(low + at)
        e, f, g, h = load(low + behind)
        i, j, k, m = load(high + at)
        n, o, p, q = load(high + behind)
        return a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q

    return ask


#: The latter where the compiler must not do so later.
_ask, _ask_now = _asking_by(ptx.stream_128), _asking_by(ptx.poll_128)


@device_function
def _vector(row: Any, column: Any, last: Any) -> Any:
    """Return 16 bytes of a row; zeros behind the last column."""
    a, b, c, d = ptx.load_128(row + min(column, last) * UINT64(2))
    nothing, is_there = types.uint32(0), column <= last
    return (
        a if is_there else nothing,
        b if is_there else nothing,
        c if is_there else nothing,
        d if is_there else nothing,
    )


@cache
def _looking_at(eights: int) -> Any:
    """Make what asks for what a lane has of its rows, one of each eight.

    Args:
        eights: of rows: 1 or 2.
    """

    @device_function
    def look_at_one(at: Any, column: Any, last: Any) -> Any:
        return _vector(at[0], column, last) + _vector(at[0], column + UINT64(32), last)

    @device_function
    def look_at_two(at: Any, column: Any, last: Any) -> Any:
        first = _vector(at[0], column, last) + _vector(at[0], column + UINT64(32), last)
        return first + _vector(at[1], column, last) + _vector(at[1], column + UINT64(32), last)

    return {1: look_at_one, 2: look_at_two}[eights]


@device_function
def _matrix_rows(weight: Any, pitch: Any, first: Any, size: Any, mode: Any) -> Any:
    """Return the addresses of a lane's two matrix rows: eight apart, or a gate and what it is for."""
    low = min(first, size - UINT64(1))
    high = min(first + UINT64(8), size - UINT64(1)) if mode == ADD else low + size
    return weight + low * pitch, weight + high * pitch


def _skinny(  # noqa: C901 (the kernel)
    name: str, eights: int, first: Any, both: Any, multiply: Any, *, joint: bool = False
) -> Kernel:
    """Make a kernel for up to so many rows.

    Its words:

    - y, its pitch: where the result goes.
    - x, its pitch: rows.
    - weight, its pitch: the matrix, which no kernel that may still run writes.
    - size: columns of the result.
    - width: columns of the matrix, a multiple of 8.
    - rows: how many.
    - plus, its pitch, mode: see :func:`tpplan.decoder.fast.kernels.finishing.finish_of`.

    Args:
        name: of it.
        eights: of rows: 1 or 2.
        first: makes a float32 of the first element in 32 bits.
        both: makes 32 bits of two float32.
        multiply: writes the instruction.
        joint: whether the products of all devices are added up, see :mod:`tpplan.exec.kernels.channel`; there
            is no mode then, and the words are the caller's.
    """
    products, zeros, add_up = _products(multiply), tiles.zeros(4 * eights), add_up_of(first, both)
    row_places, look, wait = rows_of(eights), _looking_at(eights), wait_of(joint=joint)
    found = tile_sums(first, both, eights, MOST_WARPS, joint=joint)
    keep, finish, floats, kept, half = found.keep, found.finish, found.floats, found.warp, found.half

    @device_function
    def multiply_rows(
        y: Any, y_pitch: Any, x: Any, x_pitch: Any, weight: Any, pitch: Any, size: Any, width: Any, rows: Any,
        plus: Any, plus_pitch: Any, mode: Any,
    ) -> None:  # fmt: skip
        sums = cuda.shared.array(floats, FLOAT32)
        lane, warp = UINT64(cuda.threadIdx.x) & UINT64(31), UINT64(cuda.threadIdx.x) >> UINT64(5)
        g, t = lane >> UINT64(2), lane & UINT64(3)
        begin, wide = warp * UINT64(STEP), (UINT64(cuda.blockDim.x) >> UINT64(5)) * UINT64(STEP)
        again, own, last = begin + wide, t * UINT64(8), width - UINT64(8)
        per = UINT64(TILE) if mode == ADD else UINT64(TILE // 2)
        start, stride = UINT64(cuda.blockIdx.x) * per, UINT64(cuda.gridDim.x) * per
        low, high = _matrix_rows(weight, pitch, start + g, size, mode)
        w = _ask_now(low, high, begin + own, last)
        v = _ask_now(low, high, again + own, last)
        number, is_alone = wait()
        at = row_places(x, x_pitch, g, rows)
        p, q = look(at, begin + own, last), look(at, again + own, last)
        totals, near, buffer = zeros(), UINT64(0), UINT64(0)
        while start < size:
            ahead, far = start, near + wide + wide
            if far >= width:
                ahead, far = start + stride, UINT64(0)
                low, high = _matrix_rows(weight, pitch, ahead + g, size, mode)
            until = width if ahead < size else UINT64(0)
            if near + begin < width:
                totals = products(totals, w, p)
            if far + begin < until:
                w, p = _ask(low, high, far + begin + own, last), look(at, far + begin + own, last)
            if near + again < width:
                totals = products(totals, v, q)
            if far + again < until:
                v, q = _ask(low, high, far + again + own, last), look(at, far + again + own, last)
            near = far
            if far == UINT64(0):
                keep(sums, totals, buffer + warp * UINT64(kept), g, t)
                cuda.syncthreads()
                finish(sums, buffer, start, y, y_pitch, plus, plus_pitch, size, rows, mode, number)
                # The next tile's sums go elsewhere: not all threads may have read these.
                totals, start, buffer = zeros(), ahead, UINT64(half) - buffer

        if joint:
            end_sum(number, is_alone)
            add_up(y, y_pitch, plus, plus_pitch, size, rows, number)

    def alone(  # type: ignore[no-untyped-def]
        y, y_pitch, x, x_pitch, weight, pitch, size, width, rows, plus, plus_pitch, mode
    ):
        multiply_rows(y, y_pitch, x, x_pitch, weight, pitch, size, width, rows, plus, plus_pitch, mode)

    def together(_words):  # type: ignore[no-untyped-def]
        multiply_rows(
            word(CALLERS), word(CALLERS + 1), word(CALLERS + 2), word(CALLERS + 3), word(CALLERS + 4),
            word(CALLERS + 5), word(CALLERS + 6), word(CALLERS + 7), word(CALLERS + 8), word(CALLERS + 9),
            word(CALLERS + 10), UINT64(ADD),
        )  # fmt: skip

    bounds = (32 * MOST_WARPS, 1)
    return Kernel(name, together, 1, bounds=bounds) if joint else Kernel(name, alone, 12, bounds=bounds)


_BF16 = (ptx.low_bf16, ptx.two_bf16, ptx.emit_multiply_bf16)
_F16 = (ptx.low_f16, ptx.two_f16, ptx.emit_multiply_f16)
SKINNY_BF16_8 = _skinny("skinny_bf16_8", 1, *_BF16)
SKINNY_BF16_16 = _skinny("skinny_bf16_16", 2, *_BF16)
SKINNY_F16_8 = _skinny("skinny_f16_8", 1, *_F16)
SKINNY_F16_16 = _skinny("skinny_f16_16", 2, *_F16)
SKINNY_JOINT_BF16_8 = _skinny("skinny_joint_bf16_8", 1, *_BF16, joint=True)
SKINNY_JOINT_F16_8 = _skinny("skinny_joint_f16_8", 1, *_F16, joint=True)
