"""Kernels that multiply one row or two by a matrix, in the time that reading the matrix takes.

The weights of a row of the matrix are the columns. A team of warps shares out the columns of four matrix rows at a
time, a batch: each lane has 16 bytes of every row, and twice as many on their way. What lanes and warps have found is
added up in a fixed order. Everything is added in float32. Addresses are at multiples of 16, pitches are in bytes.
"""

from __future__ import annotations

from typing import Any

from tpplan.decoder.fast.kernels import dot_products
from tpplan.decoder.fast.kernels.dot_products import ask, ask_now, collected, eight_of, products_of
from tpplan.decoder.fast.kernels.finishing import ADD, add_up_of, finish_of
from tpplan.decoder.fast.kernels.row_norms import MOST_WARPS, norm_of
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.channel import end_sum, send_part, wait_of
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.protocol.channel import CALLERS
from tpplan.exec.toolchain.language import cuda, types

#: Bytes of rows that a kernel with a norm keeps in shared memory, at most.
MOST_BYTES = 2**15

#: Columns of a lane: 16 bytes.
_LANE = 8
#: Sums that a warp keeps until they are stored.
_KEPT = 128
#: Lengths of arrays in shared memory.
_SUMS, _WORDS = MOST_WARPS * _KEPT, MOST_BYTES // 4

_WORD, _FLOAT = types.uint64, types.float32


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
        up = _WORD(2 * count)  # from a gate to what it is for
        wide = up + up if mode == ADD else up
        total = slots * wide
        while index < total:
            slot = index >> _WORD(2 + bits) if mode == ADD else index >> _WORD(1 + bits)
            value = index & (wide - _WORD(1))
            place = base + slot * (up + up) + value
            row = value & _WORD(count - 1)
            start = (batch + slot * stride) * per
            n = min(start, size - per) + (value >> _WORD(bits))
            s = t = _FLOAT(0)
            i = _WORD(0)
            while i < warps:
                s += sums[place]
                if mode != ADD:
                    t += sums[place + up]
                place += _WORD(_KEPT)
                i += _WORD(1)
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
    norm, add_up = norm_of(count, eight, both), add_up_of(first, both)

    start, use = products_of(count, eight, normed=normed)

    @device_function
    def multiply(  # noqa: C901, PLR0915 (the kernel)
        y: Any, y_pitch: Any, x: Any, x_pitch: Any, weight: Any, pitch: Any, half: Any, size: Any, per: Any,
        width: Any, rows: Any, plus: Any, plus_pitch: Any, mode: Any, team: Any, teams: Any, inverse: Any,
        gain: Any, eps: Any, more: Any,
    ) -> None:  # fmt: skip
        sums = cuda.shared.array(_SUMS, _FLOAT)
        thread = _WORD(cuda.threadIdx.x)
        lane, warp = thread & _WORD(31), thread >> _WORD(5)
        mine = (warp * inverse) >> _WORD(16)  # the team: the quotient by its size
        member = warp - mine * team
        wide = team * _WORD(32 * _LANE)
        begin = (member * _WORD(32) + lane) * _WORD(_LANE)
        again = begin + wide
        lead, stride = _WORD(cuda.blockIdx.x) * teams, _WORD(cuda.gridDim.x) * teams
        end = (size + per - _WORD(1)) >> (per >> _WORD(1))  # batches: of four or two
        offsets = offsets_of(x_pitch)
        base = weight + min((lead + mine) * per, size - per) * pitch
        last = width - _WORD(_LANE)
        w = ask_now(base + min(begin, last) * _WORD(2), pitch, half)
        v = ask_now(base + min(again, last) * _WORD(2), pitch, half)
        number, is_alone = wait()
        if normed:  # while they come
            rows_kept = cuda.shared.array(_WORDS, types.uint32, 16)
            kept, places = ptx.shared_address(rows_kept), offsets_of(width * _WORD(2))
            cuda.syncthreads()
            norm(kept, sums, x, offsets, places, width, gain, eps, more)
            x, offsets = kept, places
        totals = start(offsets, offsets, 0)
        phase, slots, near = lead + mine, _WORD(0), _WORD(0)
        while lead < end:
            ahead, far = lead, near + wide + wide
            if far >= width:
                ahead, far = lead + stride, _WORD(0)
                base = weight + min((ahead + mine) * per, size - per) * pitch
            until = width if ahead < end else _WORD(0)
            totals = use(totals, w, x, offsets, near + begin, width)
            if is_alone:  # known since the rows are there; a step takes 2 % less than if told at the end of the sum
                ptx.let_next_begin()
            if far + begin < until:
                w = ask(base + (far + begin) * _WORD(2), pitch, half)
            totals = use(totals, v, x, offsets, near + again, width)
            if far + again < until:
                v = ask(base + (far + again) * _WORD(2), pitch, half)
            near = far
            if far == _WORD(0):
                s = collect(totals, lane)
                if lane & _WORD((8 >> bits) - 1) == 0:
                    sums[warp * _WORD(_KEPT) + slots * _WORD(values) + (lane >> _WORD(3 - bits))] = s
                totals = start(offsets, offsets, 0)
                lead = ahead
                slots += _WORD(1)
                if slots == _WORD(_KEPT // values) or lead >= end:
                    cuda.syncthreads()
                    finish(
                        sums, mine * team * _WORD(_KEPT), team, member * _WORD(32) + lane, team * _WORD(32),
                        slots, phase, stride, y, y_pitch, plus, plus_pitch, size, per, rows, mode, number,
                    )  # fmt: skip
                    phase, slots = lead + mine, _WORD(0)
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
            word(CALLERS + 10), word(CALLERS + 11), word(CALLERS + 12), _WORD(ADD), word(CALLERS + 14),
            word(CALLERS + 15), word(CALLERS + 16), _WORD(0), _WORD(0), _WORD(0),
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
