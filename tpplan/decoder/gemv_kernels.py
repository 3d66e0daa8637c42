"""Kernels that multiply one row or two by a matrix, in the time that reading the matrix takes.

The weights of a row of the matrix are the columns. A team of warps shares out the columns of four matrix rows at a
time, a batch: each lane has 16 bytes of every row, and twice as many on their way. What lanes and warps have found is
added up in a fixed order. Everything is added in float32. Addresses are at multiples of 16, pitches are in bytes.
"""

from __future__ import annotations

from math import exp
from typing import Any

from numba import cuda
from numba.cuda import libdevice, types

from tpplan.exec import ptx
from tpplan.exec.channel_messages import begin_sum, end_sum, first_element, send_part, sum_of_parts
from tpplan.exec.channel_table import CALLERS
from tpplan.exec.kernels import Kernel
from tpplan.exec.ptx import word

#: Warps of a block, at most.
MOST_WARPS = 16
#: Bytes of rows that a kernel with a norm keeps in shared memory, at most.
MOST_BYTES = 2**15
#: What follows a product.
ADD, SILU, GELU, GELU_TANH = range(4)

#: Columns of a lane: 16 bytes.
_LANE = 8
#: Sums that a warp keeps until they are stored.
_KEPT = 128
#: Lengths of arrays in shared memory.
_SUMS, _WORDS = MOST_WARPS * _KEPT, MOST_BYTES // 4

_WORD, _FLOAT, _HALF, _EVERY = types.uint64, types.float32, types.uint16, 0xFFFFFFFF


def _jit(function: Any) -> Any:
    return cuda.jit(device=True, inline="always")(function)


def _mapped(count: int, function: Any) -> Any:
    """Make what calls a function for each of 1, 2 or 4 pairs, with a third argument for all."""

    @_jit
    def of_one(a: Any, b: Any, c: Any) -> Any:
        return (function(a[0], b[0], c),)

    @_jit
    def of_two(a: Any, b: Any, c: Any) -> Any:
        return function(a[0], b[0], c), function(a[1], b[1], c)

    @_jit
    def of_four(a: Any, b: Any, c: Any) -> Any:
        return function(a[0], b[0], c), function(a[1], b[1], c), function(a[2], b[2], c), function(a[3], b[3], c)

    return {1: of_one, 2: of_two, 4: of_four}[count]


def _offsets_of(count: int) -> Any:
    """Make what tells where 1, 2 or 4 rows start; the last of four may be the third."""

    @_jit
    def of_one(pitch: Any, rows: Any) -> Any:  # noqa: ARG001 (as the others)
        return (_WORD(0),)

    @_jit
    def of_two(pitch: Any, rows: Any) -> Any:  # noqa: ARG001
        return _WORD(0), pitch

    @_jit
    def of_four(pitch: Any, rows: Any) -> Any:
        return _WORD(0), pitch, _WORD(2) * pitch, (rows - _WORD(1)) * pitch

    return {1: of_one, 2: of_two, 4: of_four}[count]


@_jit
def _zeros() -> Any:
    return _FLOAT(0), _FLOAT(0), _FLOAT(0), _FLOAT(0)


@_jit
def _dot(total: Any, f: Any, x: Any) -> Any:
    """Add the products of eight pairs."""
    total = total + f[0] * x[0]
    total = total + f[1] * x[1]
    total = total + f[2] * x[2]
    total = total + f[3] * x[3]
    total = total + f[4] * x[4]
    total = total + f[5] * x[5]
    total = total + f[6] * x[6]
    return total + f[7] * x[7]


@_jit
def _fold(a: Any, b: Any, bit: Any, lane: Any) -> Any:
    """Add two numbers of two lanes; the lane whose bit is set has the second's sum, the other the first's."""
    if lane & bit:
        keep, send = b, a
    else:
        keep, send = a, b
    return keep + cuda.shfl_xor_sync(_EVERY, send, bit)


@_jit
def _spread(totals: Any, lane: Any) -> Any:
    """Add four numbers over lanes that differ in their two highest bits, which tell whose sum a lane has."""
    return _fold(_fold(totals[0], totals[2], 16, lane), _fold(totals[1], totals[3], 16, lane), 8, lane)


def _collected(count: int) -> Any:
    """Make what adds up four numbers of each row over a warp; the highest bits of a lane tell whose sum it has."""

    @_jit
    def of_one(totals: Any, lane: Any) -> Any:
        s = _spread(totals[0], lane)
        s += cuda.shfl_xor_sync(_EVERY, s, 4)
        s += cuda.shfl_xor_sync(_EVERY, s, 2)
        return s + cuda.shfl_xor_sync(_EVERY, s, 1)

    @_jit
    def of_two(totals: Any, lane: Any) -> Any:
        s = _fold(_spread(totals[0], lane), _spread(totals[1], lane), 4, lane)
        s += cuda.shfl_xor_sync(_EVERY, s, 2)
        return s + cuda.shfl_xor_sync(_EVERY, s, 1)

    @_jit
    def of_four(totals: Any, lane: Any) -> Any:
        s = _fold(_spread(totals[0], lane), _spread(totals[2], lane), 4, lane)
        t = _fold(_spread(totals[1], lane), _spread(totals[3], lane), 4, lane)
        s = _fold(s, t, 2, lane)
        return s + cuda.shfl_xor_sync(_EVERY, s, 1)

    return {1: of_one, 2: of_two, 4: of_four}[count]


@_jit
def _over_warp(total: Any) -> Any:
    """Return the sum over all lanes, in all lanes."""
    total += cuda.shfl_xor_sync(_EVERY, total, 16)
    total += cuda.shfl_xor_sync(_EVERY, total, 8)
    total += cuda.shfl_xor_sync(_EVERY, total, 4)
    total += cuda.shfl_xor_sync(_EVERY, total, 2)
    return total + cuda.shfl_xor_sync(_EVERY, total, 1)


def _asking_by(load: Any) -> Any:
    """Make what asks for 16 bytes of each of four matrix rows."""

    @_jit
    def ask(address: Any, step: Any, half: Any) -> Any:
        w0, w1, w2, w3 = load(address)
        w4, w5, w6, w7 = load(address + step)
        w8, w9, wa, wb = load(address + half)
        wc, wd, we, wf = load(address + half + step)
        return (w0, w1, w2, w3), (w4, w5, w6, w7), (w8, w9, wa, wb), (wc, wd, we, wf)

    return ask


#: The latter where the compiler must not do so later.
_ask, _ask_now = _asking_by(ptx.stream_128), _asking_by(ptx.poll_128)


@_jit
def _act(gate: Any, mode: Any) -> Any:
    """Return the activation of a gate, computed as torch does."""
    if mode == SILU:
        return gate / (_FLOAT(1) + exp(-gate))
    if mode == GELU:
        return _FLOAT(0.5) * gate * (_FLOAT(1) + libdevice.erff(gate * _FLOAT(0.7071067811865476)))
    inner = _FLOAT(0.7978845608028654) * (gate + _FLOAT(0.044715) * gate * gate * gate)
    return _FLOAT(0.5) * gate * (_FLOAT(1) + libdevice.tanhf(inner))


def _eight_of(first: Any, second: Any) -> Any:
    """Make what returns the eight floats of 16 bytes, by what makes a float of each half of 32 bits."""

    @_jit
    def eight(w: Any) -> Any:
        a, b, c, d = w
        return first(a), second(a), first(b), second(b), first(c), second(c), first(d), second(d)

    return eight


def _squares_of(count: int, eight: Any) -> Any:
    """Make what adds the squares of 16 bytes of every row.

    Args:
        count: of rows.
        eight: makes floats of 16 bytes.
    """

    @_jit
    def squares(total: Any, w: Any, is_there: Any) -> Any:
        f = eight(w)
        return _dot(total, f, f) if is_there else total

    return _mapped(count, squares)


def _factors_of(count: int) -> Any:
    """Make what returns, in all threads, what rows are multiplied by, of sums of squares of their own."""

    @_jit
    def shares(total: Any, row: Any, to: Any) -> Any:
        total = _over_warp(total)
        sums, warp, lane = to
        if lane == _WORD(0):
            sums[row * _WORD(MOST_WARPS) + warp] = total
        return total

    @_jit
    def factors(_: Any, row: Any, given: Any) -> Any:
        sums, warps, lane, width, least = given
        total = _over_warp(sums[row * _WORD(MOST_WARPS) + lane] if lane < warps else _FLOAT(0))
        return libdevice.rsqrtf(total / width + least)

    share, factor = _mapped(count, shares), _mapped(count, factors)

    @_jit
    def factors_of(totals: Any, sums: Any, width: Any, eps: Any) -> Any:
        lane, warp = _WORD(cuda.threadIdx.x) & _WORD(31), _WORD(cuda.threadIdx.x) >> _WORD(5)
        numbers = (_WORD(0), _WORD(1), _WORD(2), _WORD(3))
        share(totals, numbers, (sums, warp, lane))
        cuda.syncthreads()
        warps, least = _WORD(cuda.blockDim.x) >> _WORD(5), ptx.float_of(types.uint32(eps))
        return factor(totals, numbers, (sums, warps, lane, _FLOAT(types.int64(width)), least))

    return factors_of


def _write_of(count: int, eight: Any, both: Any) -> Any:
    """Make what multiplies 16 bytes of every row by its factor and by weights, and writes them to shared memory.

    Args:
        count: of rows.
        eight: makes floats of 16 bytes.
        both: makes 32 bits of two floats.
    """

    @_jit
    def writes(w: Any, given: Any, to: Any) -> Any:
        place, by = given
        f, h = eight(w), eight(to[1])
        ptx.shared_store_128(
            to[0] + place,
            both(h[0] * (by * f[0]), h[1] * (by * f[1])),
            both(h[2] * (by * f[2]), h[3] * (by * f[3])),
            both(h[4] * (by * f[4]), h[5] * (by * f[5])),
            both(h[6] * (by * f[6]), h[7] * (by * f[7])),
        )
        return by

    @_jit
    def pairs(a: Any, b: Any, _: Any) -> Any:
        return a, b

    write, pair = _mapped(count, writes), _mapped(count, pairs)

    @_jit
    def write_all(w: Any, places: Any, by: Any, to: Any, g: Any) -> None:
        write(w, pair(places, by, 0), (to, g))

    return write_all


def _norm_of(count: int, eight: Any, both: Any) -> Any:
    """Make what writes rows divided by their root mean square, times weights, to shared memory.

    A thread's first two vectors of every row, and of the weights, stay in registers: mostly there are no others.

    Args:
        count: of rows.
        eight: makes floats of 16 bytes.
        both: makes 32 bits of two floats.
    """
    square, factors_of, write = _squares_of(count, eight), _factors_of(count), _write_of(count, eight, both)

    @_jit
    def loads(offset: Any, _: Any, at: Any) -> Any:
        return ptx.load_128(at + offset)

    load = _mapped(count, loads)

    @_jit
    def ask(x: Any, offsets: Any, width: Any, gain: Any) -> Any:
        """Ask for a thread's vectors; one behind the last column is the first."""
        first = _WORD(cuda.threadIdx.x) * _WORD(_LANE)
        second = first + _WORD(cuda.blockDim.x) * _WORD(_LANE)
        first = _WORD(2) * (first if first < width else _WORD(0))
        second = _WORD(2) * (second if second < width else _WORD(0))
        r, s = load(offsets, offsets, x + first), load(offsets, offsets, x + second)
        return r, s, ptx.load_128(gain + first), ptx.load_128(gain + second)

    @_jit
    def norm(kept: Any, sums: Any, x: Any, offsets: Any, places: Any, width: Any, gain: Any, eps: Any) -> None:
        r, s, g, h = ask(x, offsets, width, gain)
        first, stride = _WORD(cuda.threadIdx.x) * _WORD(_LANE), _WORD(cuda.blockDim.x) * _WORD(_LANE)
        second = first + stride
        totals = square(square(_zeros()[:count], r, first < width), s, second < width)
        column = second + stride
        while column < width:
            totals = square(totals, load(offsets, offsets, x + column * _WORD(2)), column < width)
            column += stride
        by = factors_of(totals, sums, width, eps)
        if first < width:
            write(r, places, by, kept + first * _WORD(2), g)
        if second < width:
            write(s, places, by, kept + second * _WORD(2), h)
        column = second + stride
        while column < width:
            at = column * _WORD(2)
            write(load(offsets, offsets, x + at), places, by, kept + at, ptx.load_128(gain + at))
            column += stride
        cuda.syncthreads()

    return norm


def _finish_of(count: int, first: Any, both: Any, *, joint: bool) -> Any:  # noqa: C901 (four functions)
    """Make what adds up what the warps of a team have found for some batches, and stores what comes of it.

    Args:
        count: of rows.
        first: makes a float of the first half of 32 bits.
        both: makes 32 bits of two floats.
        joint: whether it is sent instead, see :mod:`tpplan.exec.channel_messages`.
    """
    bits = count.bit_length() - 1

    @_jit
    def load_one(address: Any) -> Any:
        return first(types.uint32(ptx.load_16(address)))

    @_jit
    def bits_of(value: Any) -> Any:
        return both(value, value) & types.uint32(0xFFFF)

    @_jit
    def rounded(value: Any) -> Any:
        return first(bits_of(value))

    @_jit
    def finish(
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
            if joint:
                if n >= start and row < rows:
                    send_part(row * size + n, s, number)
            elif n >= start and row < rows:  # not what another batch has
                if plus != _WORD(0):
                    at = plus + row * plus_pitch + n * _WORD(2)
                    s += load_one(at)
                    if mode != ADD:
                        t += load_one(at + size * _WORD(2))
                if mode != ADD:
                    s = rounded(_act(rounded(s), mode)) * rounded(t)
                ptx.store_16(y + row * y_pitch + n * _WORD(2), _HALF(bits_of(s)))
            index += step

    return finish


def _products_of(count: int, eight: Any, *, normed: bool) -> tuple[Any, Any]:
    """Make what returns sums of nothing, and what adds to them the products of rows and 16 bytes of four matrix rows.

    Args:
        count: of rows.
        eight: makes floats of 16 bytes.
        normed: whether the rows are in shared memory.
    """

    @_jit
    def adds(totals: Any, offset: Any, given: Any) -> Any:
        """Add the products of a row and four matrix rows."""
        at, f = given
        x = eight(ptx.shared_load_128(at + offset) if normed else ptx.load_128(at + offset))
        return _dot(totals[0], f[0], x), _dot(totals[1], f[1], x), _dot(totals[2], f[2], x), _dot(totals[3], f[3], x)

    @_jit
    def starts(_: Any, __: Any, ___: Any) -> Any:
        return _zeros()

    add = _mapped(count, adds)

    @_jit
    def use(totals: Any, w: Any, x: Any, offsets: Any, column: Any, width: Any) -> Any:
        if column < width:
            f = eight(w[0]), eight(w[1]), eight(w[2]), eight(w[3])
            return add(totals, offsets, (x + column * _WORD(2), f))
        return totals

    return _mapped(count, starts), use


def _add_up_of(first: Any, both: Any) -> Any:
    """Make what adds up the parts of all devices, and what is there, and stores the sums.

    Args:
        first: makes a float of the first half of 32 bits.
        both: makes 32 bits of two floats.
    """

    @_jit
    def add_up(y: Any, y_pitch: Any, plus: Any, plus_pitch: Any, size: Any, rows: Any, number: Any) -> None:
        element, step = first_element()
        while element < rows * size:
            row = _WORD(types.uint32(element) // types.uint32(size))
            n = element - row * size
            more = first(types.uint32(ptx.load_16(plus + row * plus_pitch + n * _WORD(2)))) if plus else _FLOAT(-0.0)
            s = sum_of_parts(element, number) + more
            ptx.store_16(y + row * y_pitch + n * _WORD(2), _HALF(both(s, s) & types.uint32(0xFFFF)))
            element += step

    return add_up


def _gemv(  # noqa: C901, PLR0915 (the kernel)
    name: str, count: int, first: Any, second: Any, both: Any, *, normed: bool = False, joint: bool = False
) -> Kernel:
    """Make a kernel for so many rows.

    Args:
        name: of it.
        count: of rows: 1, 2 or 4.
        first: makes a float32 of the first element in 32 bits.
        second: the same of the second.
        both: makes 32 bits of two float32.
        normed: whether the rows are divided by their root mean square first; they are in shared memory then.
        joint: whether the products of all devices are added up, see :mod:`tpplan.exec.channel_messages`.
    """
    bits, values = count.bit_length() - 1, 4 * count
    eight, offsets_of, collected = _eight_of(first, second), _offsets_of(count), _collected(count)
    finish, add_up = _finish_of(count, first, both, joint=joint), _add_up_of(first, both)
    norm = _norm_of(count, eight, both)

    start, use = _products_of(count, eight, normed=normed)

    @_jit
    def multiply(  # noqa: C901, PLR0915 (the kernel)
        y: Any, y_pitch: Any, x: Any, x_pitch: Any, weight: Any, pitch: Any, half: Any, size: Any, per: Any,
        width: Any, rows: Any, plus: Any, plus_pitch: Any, mode: Any, team: Any, teams: Any, inverse: Any,
        gain: Any, eps: Any,
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
        offsets = offsets_of(x_pitch, rows)
        base = weight + min((lead + mine) * per, size - per) * pitch
        last = width - _WORD(_LANE)
        w = _ask_now(base + min(begin, last) * _WORD(2), pitch, half)
        v = _ask_now(base + min(again, last) * _WORD(2), pitch, half)
        ptx.after_earlier()
        number, is_alone = begin_sum() if joint else (types.uint32(0), types.uint32(0))
        if normed:  # while they come
            rows_kept = cuda.shared.array(_WORDS, types.uint32, 16)
            kept, places = ptx.shared_address(rows_kept), offsets_of(width * _WORD(2), rows)
            cuda.syncthreads()
            norm(kept, sums, x, offsets, places, width, gain, eps)
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
            if far + begin < until:
                w = _ask(base + (far + begin) * _WORD(2), pitch, half)
            totals = use(totals, v, x, offsets, near + again, width)
            if far + again < until:
                v = _ask(base + (far + again) * _WORD(2), pitch, half)
            near = far
            if far == _WORD(0):
                s = collected(totals, lane)
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
        team, teams, inverse, gain, eps,
    ):  # fmt: skip
        multiply(
            y, y_pitch, x, x_pitch, weight, pitch, half, size, per, width, rows, plus, plus_pitch, mode,
            team, teams, inverse, gain, eps,
        )  # fmt: skip

    def together(_words):  # type: ignore[no-untyped-def]
        multiply(
            word(CALLERS), word(CALLERS + 1), word(CALLERS + 2), word(CALLERS + 3), word(CALLERS + 4),
            word(CALLERS + 5), word(CALLERS + 6), word(CALLERS + 7), word(CALLERS + 8), word(CALLERS + 9),
            word(CALLERS + 10), word(CALLERS + 11), word(CALLERS + 12), _WORD(ADD), word(CALLERS + 14),
            word(CALLERS + 15), word(CALLERS + 16), _WORD(0), _WORD(0),
        )  # fmt: skip

    return Kernel(name, together, 1) if joint else Kernel(name, alone, 19)


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
