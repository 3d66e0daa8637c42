"""Kernels that multiply one row or two by a matrix, in the time that reading the matrix takes.

The weights of a row of the matrix are the columns. A team of warps shares out the columns of four matrix rows at a
time, a batch: each lane has 16 bytes of every row, and twice as many on their way. What lanes and warps have found is
added up in a fixed order. Everything is added in float32. Addresses are at multiples of 16, pitches are in bytes.

The root mean square norm in front of a product is done by a whole block, which keeps the result in shared memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tpplan.decoder.fast.kernels import dot_products
from tpplan.decoder.fast.kernels.dot_products import (
    ask,
    ask_now,
    collected,
    dot,
    eight_of,
    mapped,
    over_warp,
    products_of,
    zeros,
)
from tpplan.decoder.fast.kernels.finishing import ADD, add_up_of, finish_of
from tpplan.decoder.fast.kernels.norm_limits import MOST_BYTES
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.channel import end_sum, send_part, wait_of
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.protocol.channel import CALLERS
from tpplan.exec.toolchain.language import FLOAT32, UINT64, cuda, libdevice, types

#: Warps of a block, at most.
MOST_WARPS = 16

#: Columns of a lane: 16 bytes.
_LANE = 8


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
        if lane == UINT64(0):
            sums[row * UINT64(MOST_WARPS) + warp] = total
        return total

    @device_function
    def factors(_: Any, row: Any, given: Any) -> Any:
        sums, warps, lane, width, least = given
        total = over_warp(sums[row * UINT64(MOST_WARPS) + lane] if lane < warps else FLOAT32(0))
        return libdevice.rsqrtf(total / width + least)

    share, factor = mapped(count, shares), mapped(count, factors)

    @device_function
    def factors_of(totals: Any, sums: Any, width: Any, eps: Any) -> Any:
        lane, warp = UINT64(cuda.threadIdx.x) & UINT64(31), UINT64(cuda.threadIdx.x) >> UINT64(5)
        numbers = (UINT64(0), UINT64(1))
        share(totals, numbers, (sums, warp, lane))
        cuda.syncthreads()
        warps, least = UINT64(cuda.blockDim.x) >> UINT64(5), ptx.float_of(types.uint32(eps))
        return factor(totals, numbers, (sums, warps, lane, FLOAT32(types.int64(width)), least))

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


def norm_of(count: int, eight: Any, both: Any) -> tuple[Any, Any]:
    """Make what asks for a norm's weights, and what writes the norm of rows to shared memory.

    That is rows divided by their root mean square, times weights plus a number. A thread's first two vectors of every
    row, and of the weights, stay in registers: mostly there are no others.

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
    def places_of(width: Any) -> Any:
        """Return how far behind the first column a thread's vectors are; one behind the last column is the first."""
        first = UINT64(cuda.threadIdx.x) * UINT64(_LANE)
        second = first + UINT64(cuda.blockDim.x) * UINT64(_LANE)
        return UINT64(2) * (first if first < width else UINT64(0)), UINT64(2) * (
            second if second < width else UINT64(0)
        )

    @device_function
    def ask(gain: Any, width: Any) -> Any:
        first, second = places_of(width)
        return ptx.load_128(gain + first), ptx.load_128(gain + second)

    @device_function
    def norm(
        kept: Any, sums: Any, x: Any, offsets: Any, places: Any, width: Any, asked: Any, gain: Any, eps: Any,
        offset: Any,
    ) -> None:  # fmt: skip
        (first, second), (g, h) = places_of(width), asked
        r, s = load(offsets, offsets, x + first), load(offsets, offsets, x + second)
        more = ptx.float_of(types.uint32(offset))
        first, stride = UINT64(cuda.threadIdx.x) * UINT64(_LANE), UINT64(cuda.blockDim.x) * UINT64(_LANE)
        second = first + stride
        totals = square(square(zeros()[:count], r, first < width), s, second < width)
        column = second + stride
        while column < width:
            totals = square(totals, load(offsets, offsets, x + column * UINT64(2)), column < width)
            column += stride
        by = factors_of(totals, sums, width, eps)
        if first < width:
            write(r, places, by, kept + first * UINT64(2), g, more)
        if second < width:
            write(s, places, by, kept + second * UINT64(2), h, more)
        column = second + stride
        while column < width:
            at = column * UINT64(2)
            write(load(offsets, offsets, x + at), places, by, kept + at, ptx.load_128(gain + at), more)
            column += stride
        cuda.syncthreads()

    return ask, norm


#: Sums that a warp keeps until they are stored.
_KEPT = 128
#: Lengths of arrays in shared memory.
_SUMS, _WORDS = MOST_WARPS * _KEPT, MOST_BYTES // 4


def _finish_of(count: int, first: Any, both: Any, *, joint: bool) -> Any:
    """Make what adds up what the warps of a team have found for some batches, and stores what comes of it.

    Args:
        count: of rows.
        first: makes a float of the first half of 32 bits.
        both: makes 32 bits of two floats.
        joint: whether it is sent instead, see :mod:`tpplan.exec.kernels.channel`.
    """
    bits, finish = count.bit_length() - 1, finish_of(first, both)

    @device_function
    def finish_all(
        sums: Any, base: Any, warps: Any, index: Any, step: Any, slots: Any, batch: Any, stride: Any,
        y: Any, y_pitch: Any, plus: Any, plus_pitch: Any, size: Any, per: Any, rows: Any, mode: Any, number: Any,
    ) -> None:  # fmt: skip
        up = UINT64(2 * count)  # from a gate to what it is for
        wide = up + up if mode == ADD else up
        total = slots * wide
        while index < total:
            slot = index >> UINT64(2 + bits) if mode == ADD else index >> UINT64(1 + bits)
            value = index & (wide - UINT64(1))
            place = base + slot * (up + up) + value
            row = value & UINT64(count - 1)
            start = (batch + slot * stride) * per
            n = min(start, size - per) + (value >> UINT64(bits))
            s = t = FLOAT32(0)
            i = UINT64(0)
            while i < warps:
                s += sums[place]
                if mode != ADD:
                    t += sums[place + up]
                place += UINT64(_KEPT)
                i += UINT64(1)
            if n >= start and row < rows:  # not what another batch has
                if joint:
                    send_part(row * size + n, s, number)
                else:
                    finish(s, t, row, n, y, y_pitch, plus, plus_pitch, size, mode)
            index += step

    return finish_all


def _gemv(  # noqa: C901, PLR0915 (the kernel)
    name: str, count: int, first: Any, second: Any, both: Any, *, normed: bool = False, joint: bool = False
) -> Kernel:
    """Make a kernel for so many rows.

    Args:
        name: of it.
        count: of rows: 1 or 2.
        first: makes a float32 of the first element in 32 bits.
        second: the same of the second.
        both: makes 32 bits of two float32.
        normed: whether the rows are divided by their root mean square first; they are in shared memory then.
        joint: whether the products of all devices are added up, see :mod:`tpplan.exec.kernels.channel`.
    """
    bits, values = count.bit_length() - 1, 4 * count
    eight, offsets_of, collect = eight_of(first, second), dot_products.offsets_of(count), collected(count)
    finish, wait = _finish_of(count, first, both, joint=joint), wait_of(joint=joint)
    (ask_gain, norm), add_up = norm_of(count, eight, both), add_up_of(first, both)

    start, use = products_of(count, eight, normed=normed)

    @device_function
    def multiply(  # noqa: C901, PLR0915 (the kernel)
        y: Any, y_pitch: Any, x: Any, x_pitch: Any, weight: Any, pitch: Any, half: Any, size: Any, per: Any,
        width: Any, rows: Any, plus: Any, plus_pitch: Any, mode: Any, team: Any, teams: Any, inverse: Any,
        gain: Any, eps: Any, more: Any,
    ) -> None:  # fmt: skip
        sums = cuda.shared.array(_SUMS, FLOAT32)
        thread = UINT64(cuda.threadIdx.x)
        lane, warp = thread & UINT64(31), thread >> UINT64(5)
        mine = (warp * inverse) >> UINT64(16)  # the team: the quotient by its size
        member = warp - mine * team
        wide = team * UINT64(32 * _LANE)
        begin = (member * UINT64(32) + lane) * UINT64(_LANE)
        again = begin + wide
        lead, stride = UINT64(cuda.blockIdx.x) * teams, UINT64(cuda.gridDim.x) * teams
        end = (size + per - UINT64(1)) >> (per >> UINT64(1))  # batches: of four or two
        offsets = offsets_of(x_pitch)
        base = weight + min((lead + mine) * per, size - per) * pitch
        last = width - UINT64(_LANE)
        w = ask_now(base + min(begin, last) * UINT64(2), pitch, half)
        v = ask_now(base + min(again, last) * UINT64(2), pitch, half)
        if normed:
            asked = ask_gain(gain, width)
        number, is_alone = wait()
        if normed:  # while they come
            rows_kept = cuda.shared.array(_WORDS, types.uint32, 16)
            kept, places = ptx.shared_address(rows_kept), offsets_of(width * UINT64(2))
            cuda.syncthreads()
            norm(kept, sums, x, offsets, places, width, asked, gain, eps, more)
            x, offsets = kept, places
        totals = start(offsets, offsets, 0)
        phase, slots, near = lead + mine, UINT64(0), UINT64(0)
        while lead < end:
            ahead, far = lead, near + wide + wide
            if far >= width:
                ahead, far = lead + stride, UINT64(0)
                base = weight + min((ahead + mine) * per, size - per) * pitch
            until = width if ahead < end else UINT64(0)
            totals = use(totals, w, x, offsets, near + begin, width)
            if is_alone:  # known since the rows are there; a step takes 2 % less than if told at the end of the sum
                ptx.let_next_begin()
            if far + begin < until:
                w = ask(base + (far + begin) * UINT64(2), pitch, half)
            totals = use(totals, v, x, offsets, near + again, width)
            if far + again < until:
                v = ask(base + (far + again) * UINT64(2), pitch, half)
            near = far
            if far == UINT64(0):
                s = collect(totals, lane)
                if lane & UINT64((8 >> bits) - 1) == 0:
                    sums[warp * UINT64(_KEPT) + slots * UINT64(values) + (lane >> UINT64(3 - bits))] = s
                totals = start(offsets, offsets, 0)
                lead = ahead
                slots += UINT64(1)
                if slots == UINT64(_KEPT // values) or lead >= end:
                    cuda.syncthreads()
                    finish(
                        sums, mine * team * UINT64(_KEPT), team, member * UINT64(32) + lane, team * UINT64(32),
                        slots, phase, stride, y, y_pitch, plus, plus_pitch, size, per, rows, mode, number,
                    )  # fmt: skip
                    phase, slots = lead + mine, UINT64(0)
                    if lead < end:
                        cuda.syncthreads()

        if joint:
            end_sum(number, is_alone)
            add_up(y, y_pitch, plus, plus_pitch, size, rows, number)

    def alone(  # type: ignore[no-untyped-def]
        y, y_pitch, x, x_pitch, weight, pitch, half, size, per, width, rows, plus, plus_pitch, mode,
        team, teams, inverse, gain, eps, more,
    ):  # fmt: skip
        multiply(
            y, y_pitch, x, x_pitch, weight, pitch, half, size, per, width, rows, plus, plus_pitch, mode,
            team, teams, inverse, gain, eps, more,
        )  # fmt: skip

    def together(_words):  # type: ignore[no-untyped-def]
        # The mode is told, too, but there is nothing else to do.
        multiply(
            word(CALLERS), word(CALLERS + 1), word(CALLERS + 2), word(CALLERS + 3), word(CALLERS + 4),
            word(CALLERS + 5), word(CALLERS + 6), word(CALLERS + 7), word(CALLERS + 8), word(CALLERS + 9),
            word(CALLERS + 10), word(CALLERS + 11), word(CALLERS + 12), UINT64(ADD), word(CALLERS + 14),
            word(CALLERS + 15), word(CALLERS + 16), UINT64(0), UINT64(0), UINT64(0),
        )  # fmt: skip

    return Kernel(name, together, 1) if joint else Kernel(name, alone, 20)


_BF16 = (ptx.low_bf16, ptx.high_bf16, ptx.two_bf16)
_F16 = (ptx.low_f16, ptx.high_f16, ptx.two_f16)
GEMV_BF16_1 = _gemv("gemv_bf16_1", 1, *_BF16)
GEMV_BF16_2 = _gemv("gemv_bf16_2", 2, *_BF16)
GEMV_F16_1 = _gemv("gemv_f16_1", 1, *_F16)
GEMV_F16_2 = _gemv("gemv_f16_2", 2, *_F16)
GEMV_NORM_BF16_1 = _gemv("gemv_norm_bf16_1", 1, *_BF16, normed=True)
GEMV_NORM_BF16_2 = _gemv("gemv_norm_bf16_2", 2, *_BF16, normed=True)
GEMV_NORM_F16_1 = _gemv("gemv_norm_f16_1", 1, *_F16, normed=True)
GEMV_NORM_F16_2 = _gemv("gemv_norm_f16_2", 2, *_F16, normed=True)
GEMV_JOINT_BF16_1 = _gemv("gemv_joint_bf16_1", 1, *_BF16, joint=True)
GEMV_JOINT_BF16_2 = _gemv("gemv_joint_bf16_2", 2, *_BF16, joint=True)
GEMV_JOINT_F16_1 = _gemv("gemv_joint_f16_1", 1, *_F16, joint=True)
GEMV_JOINT_F16_2 = _gemv("gemv_joint_f16_2", 2, *_F16, joint=True)
