"""Kernels beside matrix products, in 16 bits: embeddings, norms, gates, merged attention, the choice of tokens.

They compute in float32, on vectors of 16 bytes: all addresses, pitches and widths are multiples of that, and all are in
bytes. A matrix is an address and a pitch: from one row to the next.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from tpplan.decoder.fast.kernels.finishing import gelu, gelu_tanh, limited_plus_one, limited_silu, silu
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import FLOAT32, INT64, UINT64, cuda, libdevice, types

_WARP, _EVERY = 32, 0xFFFFFFFF
#: No row has so many elements.
_NOBODY = 2**32
#: The signs of two elements of 16 bits.
_SIGNS = 0x80008000


@device_function
def over_lanes(value: Any, lanes: Any) -> Any:
    """Return the sum over as many neighbouring lanes of a warp, a power of 2; all of it is here."""
    distance = lanes >> types.uint32(1)
    while distance:
        value += cuda.shfl_xor_sync(_EVERY, value, distance)
        distance >>= types.uint32(1)
    return value


def squares_of(low: Any, high: Any) -> Any:
    """Make what adds up the squares of a vector."""

    @device_function
    def squares(w0: Any, w1: Any, w2: Any, w3: Any) -> Any:
        s = low(w0) * low(w0) + high(w0) * high(w0) + low(w1) * low(w1) + high(w1) * high(w1)
        t = low(w2) * low(w2) + high(w2) * high(w2) + low(w3) * low(w3) + high(w3) * high(w3)
        return s + t

    return squares


@cache
def weights_by(low: Any, high: Any) -> Any:
    """Make what reads a vector of a norm's weights, and adds a number to them."""

    @device_function
    def weights_at(address: Any, offset: Any) -> Any:
        (a, b, c, d), more = ptx.load_128(address), ptx.float_of(types.uint32(offset))
        return (
            low(a) + more, high(a) + more, low(b) + more, high(b) + more,
            low(c) + more, high(c) + more, low(d) + more, high(d) + more,
        )  # fmt: skip

    return weights_at


@cache
def scaled_by(low: Any, high: Any, two: Any) -> Any:
    """Make what multiplies a vector by a number and by weights, and rounds once."""

    @device_function
    def scaled(w: Any, g: Any, by: Any) -> Any:
        return (
            two(by * low(w[0]) * g[0], by * high(w[0]) * g[1]),
            two(by * low(w[1]) * g[2], by * high(w[1]) * g[3]),
            two(by * low(w[2]) * g[4], by * high(w[2]) * g[5]),
            two(by * low(w[3]) * g[6], by * high(w[3]) * g[7]),
        )

    return scaled


def _angles(positions, stride, last, sines, cosines, pitch, out, width):  # type: ignore[no-untyped-def]
    """Write cosines, sines, negative sines and cosines of a row's position, each of ``width`` bytes, side by side.

    A block takes a row. Positions behind the last of the tables are the last.
    """
    ptx.after_earlier_with_next()
    row, at = UINT64(cuda.blockIdx.x), UINT64(4) * UINT64(cuda.threadIdx.x)
    low, high = ptx.load_64(positions + row * stride)
    place = min(UINT64(high) << UINT64(32) | UINT64(low), last) * pitch
    target = out + row * UINT64(4) * width
    while at < width:
        sine, cosine = ptx.load_32(sines + place + at), ptx.load_32(cosines + place + at)
        ptx.store_32(target + at, cosine)
        ptx.store_32(target + width + at, sine)
        ptx.store_32(target + UINT64(2) * width + at, sine ^ types.uint32(_SIGNS))
        ptx.store_32(target + UINT64(3) * width + at, cosine)
        at += UINT64(4) * UINT64(cuda.blockDim.x)


def _embed(tokens, pitch, start, count, table, table_pitch, out, width):  # type: ignore[no-untyped-def]
    """Copy the embeddings of rows' tokens from a table of ``count`` tokens, or write zeros for tokens beside it.

    Blocks take rows, each some of their vectors.
    """
    ptx.after_earlier_with_next()
    row = UINT64(cuda.blockIdx.x)
    at = UINT64(16) * (UINT64(cuda.blockIdx.y) * UINT64(cuda.blockDim.x) + UINT64(cuda.threadIdx.x))
    if at < width:
        low, high = ptx.load_64(tokens + row * pitch)
        own = (UINT64(high) << UINT64(32) | UINT64(low)) - start  # of smaller ones more than any count
        zero = types.uint32(0)
        a, b, c, d = zero, zero, zero, zero
        if own < count:
            a, b, c, d = ptx.load_128(table + own * table_pitch + at)
        ptx.store_128(out + row * width + at, a, b, c, d)


def _norm(name: str, low: Any, high: Any, two: Any) -> Kernel:
    """Make a kernel that divides rows by their root mean square, and multiplies them by weights plus a number.

    It rounds the result, or adds what it has rounded to what is in its place, and rounds the sum. A block takes a row.

    Args:
        name: of the kernel.
        low: makes a float32 of the first element in 32 bits.
        high: the same of the second.
        two: makes 32 bits of both.
    """
    squares, weights_at, scaled = squares_of(low, high), weights_by(low, high), scaled_by(low, high, two)

    @device_function
    def sum_of(a: Any, b: Any) -> Any:
        return two(low(a) + low(b), high(a) + high(b))

    @device_function
    def store(target: Any, w: Any, g: Any, by: Any, adds: Any) -> None:
        a, b, c, d = scaled(w, g, by)
        if adds:
            p, q, r, s = ptx.load_128(target)
            a, b, c, d = sum_of(p, a), sum_of(q, b), sum_of(r, c), sum_of(s, d)
        ptx.store_128(target, a, b, c, d)

    def norm(  # type: ignore[no-untyped-def]
        x, x_pitch, out, out_pitch, weight, offset, width, inverse, eps, adds,
    ):  # fmt: skip
        ptx.after_earlier_with_next()
        sums = cuda.shared.array(_WARP, FLOAT32)
        row, step = UINT64(cuda.blockIdx.x), UINT64(16) * UINT64(cuda.blockDim.x)
        source, target, first = x + row * x_pitch, out + row * out_pitch, UINT64(16) * UINT64(cuda.threadIdx.x)
        # The first vector of a thread stays in registers: mostly there is no other.
        own = first if first < width else UINT64(0)
        w = ptx.load_128(source + own)
        g = weights_at(weight + own, offset)
        s = squares(w[0], w[1], w[2], w[3]) if first < width else FLOAT32(0)
        at = first + step
        while at < width:
            v = ptx.load_128(source + at)
            s += squares(v[0], v[1], v[2], v[3])
            at += step
        lane, warp = types.uint32(cuda.threadIdx.x % _WARP), types.uint32(cuda.threadIdx.x // _WARP)
        s = over_lanes(s, types.uint32(_WARP))
        if lane == types.uint32(0):
            sums[warp] = s
        cuda.syncthreads()
        s = sums[lane] if lane * types.uint32(_WARP) < types.uint32(cuda.blockDim.x) else FLOAT32(0)
        s = over_lanes(s, types.uint32(_WARP))
        mean = s * ptx.float_of(types.uint32(inverse))
        by = libdevice.rsqrtf(mean + ptx.float_of(types.uint32(eps)))
        if first < width:
            store(target + first, w, g, by, adds)
        at = first + step
        while at < width:
            store(target + at, ptx.load_128(source + at), weights_at(weight + at, offset), by, adds)
            at += step

    return Kernel(name, norm, 10)


@device_function
def _itself(x: Any) -> Any:
    return x


def _gate(name: str, act: Any, low: Any, high: Any, two: Any, other: Any = _itself) -> Kernel:
    """Make a kernel that multiplies the activation of one matrix by another one; the activation is rounded too.

    Blocks take rows, each some of their columns; the result may be in the place of the former matrix.

    Args:
        name: of the kernel.
        act: the activation of a float32.
        low: makes a float32 of the first element in 32 bits.
        high: the same of the second.
        two: makes 32 bits of both.
        other: makes what is multiplied by of an element of the other matrix.
    """

    @device_function
    def gated(gate: Any, up: Any) -> Any:
        acted = two(act(low(gate)), act(high(gate)))
        return two(low(acted) * other(low(up)), high(acted) * other(high(up)))

    def gate(gate, gate_pitch, up, up_pitch, out, out_pitch, width):  # type: ignore[no-untyped-def]
        ptx.after_earlier_with_next()
        row = UINT64(cuda.blockIdx.x)
        at = UINT64(16) * (UINT64(cuda.blockIdx.y) * UINT64(cuda.blockDim.x) + UINT64(cuda.threadIdx.x))
        if at < width:
            g0, g1, g2, g3 = ptx.load_128(gate + row * gate_pitch + at)
            u0, u1, u2, u3 = ptx.load_128(up + row * up_pitch + at)
            ptx.store_128(out + row * out_pitch + at, gated(g0, u0), gated(g1, u1), gated(g2, u2), gated(g3, u3))

    return Kernel(name, gate, 7)


@device_function
def _better(value: Any, token: Any, other: Any, number: Any) -> Any:
    """Return the larger of two values with its number; of equal ones that with the smaller, and NaN before all."""
    is_larger = other > value or (other == value and number < token)
    is_first_nan = other != other and value == value  # noqa: PLR0124 (only NaN is unequal to itself)
    if is_larger or is_first_nan:
        return other, number
    return value, token


@device_function
def _best_of_warp(value: Any, token: Any) -> Any:
    """Return the largest of a warp's values with its number, in all lanes."""
    distance = types.uint32(_WARP // 2)
    while distance:
        other = cuda.shfl_xor_sync(_EVERY, value, distance)
        number = cuda.shfl_xor_sync(_EVERY, token, distance)
        value, token = _better(value, token, other, number)
        distance >>= types.uint32(1)
    return value, token


def _best(name: str, low: Any, high: Any) -> Kernel:
    """Make a kernel that finds the largest element in each part of a row, and writes it and its number as float32.

    Blocks take rows, each a part of one. In the result, a row has a pair of columns for each part of each of several
    devices' rows; what are other devices' are zeros.

    Args:
        name: of the kernel.
        low: makes a float32 of the first element in 32 bits.
        high: the same of the second.
    """

    @device_function
    def among(value: Any, token: Any, w: Any, number: Any) -> Any:
        value, token = _better(value, token, low(w), number)
        return _better(value, token, high(w), number + INT64(1))

    def best(x, pitch, width, start, out, out_pitch, place, places):  # type: ignore[no-untyped-def]
        ptx.after_earlier_with_next()
        values, tokens = cuda.shared.array(_WARP, FLOAT32), cuda.shared.array(_WARP, INT64)
        row, part, parts = UINT64(cuda.blockIdx.x), UINT64(cuda.blockIdx.y), UINT64(cuda.gridDim.y)
        step = UINT64(16) * UINT64(cuda.blockDim.x)
        at = step * part + UINT64(16) * UINT64(cuda.threadIdx.x)
        step *= parts
        value, token = FLOAT32(-math.inf), INT64(_NOBODY)  # behind all others
        while at < width:
            w0, w1, w2, w3 = ptx.load_128(x + row * pitch + at)
            number = INT64(at // UINT64(2))
            value, token = among(value, token, w0, number)
            value, token = among(value, token, w1, number + INT64(2))
            value, token = among(value, token, w2, number + INT64(4))
            value, token = among(value, token, w3, number + INT64(6))
            at += step
        value, token = _best_of_warp(value, token)
        lane, warp = types.uint32(cuda.threadIdx.x % _WARP), types.uint32(cuda.threadIdx.x // _WARP)
        if lane == types.uint32(0):
            values[warp], tokens[warp] = value, token
        cuda.syncthreads()
        if warp == types.uint32(0):
            known = lane * types.uint32(_WARP) < types.uint32(cuda.blockDim.x)
            value, token = _best_of_warp(values[lane if known else 0], tokens[lane if known else 0])
            at, number = UINT64(lane), FLOAT32(token + INT64(start))
            while at < places:
                is_own, to = at == place, out + row * out_pitch + UINT64(8) * (at * parts + part)
                first, second = value if is_own else FLOAT32(0), number if is_own else FLOAT32(0)
                ptx.store_64(to, ptx.bits_of(first), ptx.bits_of(second))
                at += UINT64(_WARP)

    return Kernel(name, best, 8)


def _next(found, pitch, pairs, tokens, positions, missing):  # type: ignore[no-untyped-def]
    """Write the token of the largest logit of each row's pairs, or ``missing`` if it is not finite; advance positions.

    A warp takes a row. Positions are 0 if there are none.
    """
    ptx.after_earlier_with_next()
    row, at = UINT64(cuda.blockIdx.x), UINT64(cuda.threadIdx.x)
    value, token = FLOAT32(-math.inf), FLOAT32(math.inf)  # behind all others
    while at < pairs:
        logit, number = ptx.load_64(found + row * pitch + UINT64(8) * at)
        value, token = _better(value, token, ptx.float_of(logit), ptx.float_of(number))
        at += UINT64(_WARP)
    value, token = _best_of_warp(value, token)
    if cuda.threadIdx.x == 0:
        chosen = UINT64(token) if abs(value) < FLOAT32(math.inf) else missing
        ptx.store_64(tokens + UINT64(8) * row, types.uint32(chosen), types.uint32(chosen >> UINT64(32)))
        if positions:
            low, high = ptx.load_64(positions + UINT64(8) * row)
            after = (UINT64(high) << UINT64(32) | UINT64(low)) + UINT64(1)
            ptx.store_64(positions + UINT64(8) * row, types.uint32(after), types.uint32(after >> UINT64(32)))


def _merge(name: str, low: Any, high: Any, two: Any) -> Kernel:
    """Make a kernel that merges attention over two parts of the tokens, into that over the first.

    Blocks take rows, each some of their vectors; rows consist of heads. Each head of a row has the logarithm of its
    softmax's denominator over a part, in float32: all of a head side by side.

    Args:
        name: of the kernel.
        low: makes a float32 of the first element in 32 bits.
        high: the same of the second.
        two: makes 32 bits of both.
    """

    @device_function
    def between(a: Any, b: Any, kept: Any, added: Any) -> Any:
        return two(kept * low(a) + added * low(b), kept * high(a) + added * high(b))

    def merge(  # type: ignore[no-untyped-def]
        out, out_pitch, other, other_pitch, row_width, head_width, sums, other_sums, merged_sums, sums_pitch,
    ):  # fmt: skip
        ptx.after_earlier_with_next()
        row = UINT64(cuda.blockIdx.x)
        at = types.uint32(types.uint32(16) * types.uint32(cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x))
        if at < types.uint32(row_width):
            target = out + row * out_pitch + UINT64(at)
            a0, a1, a2, a3 = ptx.load_128(target)
            b0, b1, b2, b3 = ptx.load_128(other + row * other_pitch + UINT64(at))
            head = types.uint32(at // types.uint32(head_width))
            of_sum = UINT64(head) * sums_pitch + UINT64(4) * row
            first, second = ptx.float_of(ptx.load_32(sums + of_sum)), ptx.float_of(ptx.load_32(other_sums + of_sum))
            added = FLOAT32(1) / (FLOAT32(1) + libdevice.expf(first - second))
            kept = FLOAT32(1) - added
            a0, a1 = between(a0, b0, kept, added), between(a1, b1, kept, added)
            a2, a3 = between(a2, b2, kept, added), between(a3, b3, kept, added)
            ptx.store_128(target, a0, a1, a2, a3)
            if at == types.uint32(head * types.uint32(head_width)):
                both = ptx.larger(first, second) + libdevice.log1pf(libdevice.expf(-abs(first - second)))
                ptx.store_32(merged_sums + of_sum, ptx.bits_of(both))

    return Kernel(name, merge, 10)


_BF16 = ptx.low_bf16, ptx.high_bf16, ptx.two_bf16
_F16 = ptx.low_f16, ptx.high_f16, ptx.two_f16

POINTWISE_NORM_BF16 = _norm("pointwise_norm_bf16", *_BF16)
POINTWISE_NORM_F16 = _norm("pointwise_norm_f16", *_F16)
POINTWISE_SILU_BF16 = _gate("pointwise_silu_bf16", silu, *_BF16)
POINTWISE_SILU_F16 = _gate("pointwise_silu_f16", silu, *_F16)
POINTWISE_GELU_BF16 = _gate("pointwise_gelu_bf16", gelu, *_BF16)
POINTWISE_GELU_F16 = _gate("pointwise_gelu_f16", gelu, *_F16)
POINTWISE_GELU_TANH_BF16 = _gate("pointwise_gelu_tanh_bf16", gelu_tanh, *_BF16)
POINTWISE_GELU_TANH_F16 = _gate("pointwise_gelu_tanh_f16", gelu_tanh, *_F16)
POINTWISE_SWIGLU_OAI_BF16 = _gate("pointwise_swiglu_oai_bf16", limited_silu, *_BF16, limited_plus_one)
POINTWISE_SWIGLU_OAI_F16 = _gate("pointwise_swiglu_oai_f16", limited_silu, *_F16, limited_plus_one)
POINTWISE_MERGE_BF16 = _merge("pointwise_merge_bf16", *_BF16)
POINTWISE_MERGE_F16 = _merge("pointwise_merge_f16", *_F16)
POINTWISE_BEST_BF16 = _best("pointwise_best_bf16", ptx.low_bf16, ptx.high_bf16)
POINTWISE_BEST_F16 = _best("pointwise_best_f16", ptx.low_f16, ptx.high_f16)
POINTWISE_ANGLES = Kernel("pointwise_angles", _angles, 8)
POINTWISE_NEXT = Kernel("pointwise_next", _next, 6)
POINTWISE_EMBED = Kernel("pointwise_embed", _embed, 8)
