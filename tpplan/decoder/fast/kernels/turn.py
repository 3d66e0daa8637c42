"""Kernels that turn the heads of rows (RoPE), behind norms if there are, and write keys and values to a cache.

All but the addresses and pitches of 8-bit caches are multiples of 16 bytes. What goes to a cache is rounded as
:class:`tpplan.decoder.cache.store.Store` rounds it, finite numbers to the bit, by instructions that every generation of
GPUs has; NaN is not kept.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from tpplan.decoder.fast.kernels.cache_tiles import SHARING
from tpplan.decoder.fast.kernels.pointwise import over_lanes, scaled_by, squares_of, weights_by
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import FLOAT32, INT32, UINT32, UINT64, cuda, libdevice, types

#: Vectors of a block: two for each of its threads.
VECTORS = 512

_NAME = re.compile("TURN_(?P<dtype>BF16|F16)(_(?P<kind>Q8|FP8))?")
#: Numbers of sequences from here on are below 0, and rows that have them are not written to caches.
_BELOW = 0x80000000
#: Vectors of 8 elements that share a scale.
_SHARED = 4
_LARGEST, _TINY = 127, 2.0**-24  # the latter is the least float16 above 0

#: Bits of float32: of the largest number of fp8, of its least normal one, and of that which has its least one as ulp.
_TOP, _NORMAL, _ROUNDING = 0x43E00000, 0x3C800000, 0x46800000
_INFINITE = 0x7F800000


@cache
def _pair_of(low: Any, high: Any, two: Any) -> Any:
    """Make what turns a vector of firsts and one of seconds; products are rounded, and their sums."""

    @device_function
    def product(a: Any, b: Any) -> Any:
        return two(low(a) * low(b), high(a) * high(b))

    @device_function
    def first_of(a: Any, b: Any, sin: Any, cos: Any) -> Any:
        p, q = product(a, cos), product(b, sin)
        return two(low(p) - low(q), high(p) - high(q))

    @device_function
    def second_of(a: Any, b: Any, sin: Any, cos: Any) -> Any:
        p, q = product(a, sin), product(b, cos)
        return two(low(p) + low(q), high(p) + high(q))

    @device_function
    def pair(a: Any, b: Any, sin: Any, cos: Any) -> Any:
        c0, d0 = first_of(a[0], b[0], sin[0], cos[0]), second_of(a[0], b[0], sin[0], cos[0])
        c1, d1 = first_of(a[1], b[1], sin[1], cos[1]), second_of(a[1], b[1], sin[1], cos[1])
        c2, d2 = first_of(a[2], b[2], sin[2], cos[2]), second_of(a[2], b[2], sin[2], cos[2])
        c3, d3 = first_of(a[3], b[3], sin[3], cos[3]), second_of(a[3], b[3], sin[3], cos[3])
        return (c0, c1, c2, c3), (d0, d1, d2, d3)

    return pair


@device_function
def vectors_of(lane: Any, width: Any, turned: Any, is_value: Any) -> Any:
    """Return where in its head a lane's first vector is, and how much farther its second one.

    Where a head has an odd number of vectors, of which none are turned, the second one of a lane is the next one's
    first.
    """
    pairs = UINT32(turned) // UINT32(32)
    if is_value:  # its halves
        return UINT64(16) * UINT64(lane), width // UINT64(32) * UINT64(16)
    if lane < pairs:
        return UINT64(16) * UINT64(lane), turned // UINT64(2)
    rest = (width - turned) // UINT64(32) * UINT64(16)
    return turned + UINT64(16) * UINT64(lane - pairs), rest  # behind what is turned


@cache
def turned_by(low: Any, high: Any, two: Any) -> Any:
    """Make what reads two vectors of a head, divides it by its root mean square, and turns them.

    Where there is a norm, all lanes of a warp are here, and heads are within one.

    Args:
        low: makes a float32 of the first element in 32 bits.
        high: the same of the second.
        two: makes 32 bits of both.
    """
    squares, weights_at, scaled = squares_of(low, high), weights_by(low, high), scaled_by(low, high, two)
    turned_pair = _pair_of(low, high, two)

    @device_function
    def turned_vectors(
        head: Any, offset: Any, half: Any, lanes: Any, is_value: Any, is_turned: Any, sin: Any, cos: Any, norm: Any,
        more: Any, inverse: Any, eps: Any,
    ) -> Any:  # fmt: skip
        a, b = ptx.load_128(head + offset), ptx.load_128(head + offset + half)
        if norm != UINT64(0):
            g, h = weights_at(norm + offset, more), weights_at(norm + offset + half, more)
            s = over_lanes(squares(a[0], a[1], a[2], a[3]) + squares(b[0], b[1], b[2], b[3]), lanes)
            by = libdevice.rsqrtf(s * ptx.float_of(UINT32(inverse)) + ptx.float_of(UINT32(eps)))
            c, d = scaled(a, g, by), scaled(b, h, by)
            if not is_value:
                a, b = c, d
        if is_turned:
            a, b = turned_pair(a, b, sin, cos)
        return a, b

    return turned_vectors


@device_function
def _packed(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return four bytes in one register."""
    return UINT32(UINT32(a) | UINT32(b) << UINT32(8) | UINT32(c) << UINT32(16) | UINT32(d) << UINT32(24))


@device_function
def _whole(x: Any, scale: Any) -> Any:
    """Return the byte of the whole number of scales that is nearest."""
    count = libdevice.float2int_rn(x / scale)
    return UINT32(min(max(count, INT32(-_LARGEST)), INT32(_LARGEST))) & UINT32(0xFF)


@device_function
def _float8(x: Any, _: Any) -> Any:
    """Return the byte of the nearest number of fp8."""
    bits = ptx.bits_of(x)
    magnitude = UINT32(bits & UINT32(0x7FFFFFFF))
    m = UINT32(min(magnitude, UINT32(_TOP)))
    few = UINT32(ptx.bits_of(ptx.float_of(m) + FLOAT32(2.0**14)) - UINT32(_ROUNDING))
    many = UINT32((m + UINT32(0x7FFFF) + (m >> UINT32(20) & UINT32(1))) >> UINT32(20)) - UINT32(120 << 3)
    code = UINT32(few) if m < UINT32(_NORMAL) else UINT32(many)
    code = code if magnitude <= UINT32(_INFINITE) else UINT32(0x7F)
    return UINT32(bits >> UINT32(24) & UINT32(0x80)) | code


@device_function
def _larger_half(w: Any) -> Any:
    return UINT32(max(UINT32(w & UINT32(0x7FFF)), UINT32(w >> UINT32(16) & UINT32(0x7FFF))))


@device_function
def _largest(w: Any) -> Any:
    """Return the bits of the largest magnitude of a vector, which are in order as the numbers are."""
    p, q = UINT32(max(_larger_half(w[0]), _larger_half(w[1]))), UINT32(max(_larger_half(w[2]), _larger_half(w[3])))
    return UINT32(max(p, q))


@cache
def _encode(low: Any, high: Any, of_one: Any) -> Any:
    """Make what writes a vector in bytes."""

    @device_function
    def encode(to: Any, w: Any, scale: Any) -> None:
        a, b = of_one(low(w[0]), scale), of_one(high(w[0]), scale)
        c, d = of_one(low(w[1]), scale), of_one(high(w[1]), scale)
        e, f = of_one(low(w[2]), scale), of_one(high(w[2]), scale)
        g, h = of_one(low(w[3]), scale), of_one(high(w[3]), scale)
        ptx.store_64(to, _packed(a, b, c, d), _packed(e, f, g, h))

    return encode


def _turn(name: str, kind: str | None, low: Any, high: Any, two: Any) -> Kernel:  # noqa: C901, PLR0915 (of those in it)
    """Make a kernel that turns query and key heads, behind norms if there are, and writes keys and values to a cache.

    A row has query heads, then key heads, then value heads. A block takes heads of a row, as many as it has threads
    for, and a thread takes two vectors of a head: of the elements that are turned, those that are pairs. Products are
    rounded, and their sums.

    Args:
        name: of the kernel.
        kind: of the cache, ``Q8`` or ``FP8``; it is of 16 bits if not given.
        low: makes a float32 of the first element in 32 bits.
        high: the same of the second.
        two: makes 32 bits of both.
    """
    turned_vectors = turned_by(low, high, two)
    encode = _encode(low, high, _whole if kind == "Q8" else _float8)
    is_narrow, has_scales = kind is not None, kind == "Q8"

    @device_function
    def scale_of(peaks: Any, vector: Any) -> Any:
        """Return the bits of the scale that a vector has together with its neighbours."""
        first = vector // UINT32(_SHARED) * UINT32(_SHARED)
        largest = UINT32(max(peaks[first], peaks[first + UINT32(1)]))
        largest = UINT32(max(largest, UINT32(max(peaks[first + UINT32(2)], peaks[first + UINT32(3)]))))
        return UINT32(ptx.two_f16(low(largest) * FLOAT32(1 / _LARGEST), FLOAT32(0)))

    @device_function
    def scales_of(a: Any, b: Any, first: Any, second: Any, before: Any, is_there: Any) -> Any:
        """Return these of two vectors of a head, of which so many vectors of the block are before."""
        if not has_scales:
            return UINT32(0), UINT32(0)
        peaks = cuda.shared.array(VECTORS, UINT32)
        if is_there:
            peaks[before + first], peaks[before + second] = _largest(a), _largest(b)
        cuda.syncthreads()
        before = before if is_there else UINT32(0)
        return scale_of(peaks, before + first), scale_of(peaks, before + second)

    @device_function
    def keep(start: Any, scales: Any, at: Any, vector: Any, w: Any, scale: Any) -> None:
        """Write a vector to a row, and what begins with it of the row's scales."""
        if not is_narrow:
            ptx.store_128(start + at + UINT64(16) * UINT64(vector), w[0], w[1], w[2], w[3])
            return
        encode(start + at + UINT64(8) * UINT64(vector), w, ptx.larger(ptx.low_f16(scale), FLOAT32(_TINY)))
        if has_scales and vector % UINT32(_SHARED) == UINT32(0):
            to = scales + at // UINT64(SHARING) + UINT64(2) * UINT64(vector // UINT32(_SHARED))
            ptx.store_16(to, types.uint16(scale))

    def turn(  # type: ignore[no-untyped-def]
        x, pitch, queries, keys, heads, width, turned, angles, angle_pitch, query_norm, key_norm, more, inverse, eps,
        cached_keys, cached_values, key_scales, value_scales, sequence_step, head_step,
        sequences, sequences_step, places, places_step,
    ):  # fmt: skip
        row, thread = UINT64(cuda.blockIdx.x), UINT32(cuda.threadIdx.x)
        lanes = UINT32(width) // UINT32(32)  # of a head
        many, which = UINT32(cuda.blockDim.x) // lanes, thread // lanes
        head, lane = UINT32(UINT32(cuda.blockIdx.y) * many + which), UINT32(thread - which * lanes)
        is_there = which < many and head < UINT32(heads)
        head = head if is_there else UINT32(0)
        is_query, is_value = head < UINT32(queries), head >= UINT32(queries + keys)
        is_kept = is_there and cached_keys != UINT64(0) and not is_query
        sequence, place = UINT32(_BELOW), UINT32(0)
        if is_kept:
            sequence = ptx.load_32(sequences + row * sequences_step)
            place = ptx.load_32(places + row * places_step)
        offset, half = vectors_of(lane, width, turned, is_value)
        is_turned = offset < turned and not is_value
        source = x + row * pitch + UINT64(head) * width
        # The kernel before, which may still run, writes heads; all else is older.
        angle = angles + row * angle_pitch + (offset if is_turned else UINT64(0))
        distance = half if is_turned else UINT64(0)
        cos, sin = ptx.load_128(angle), ptx.load_128(angle + distance)
        ptx.after_earlier_with_next()
        norm = query_norm if is_query else key_norm
        a, b = turned_vectors(source, offset, half, lanes, is_value, is_turned, sin, cos, norm, more, inverse, eps)
        if is_there and not is_value:
            ptx.store_128(source + offset, a[0], a[1], a[2], a[3])
            ptx.store_128(source + offset + half, b[0], b[1], b[2], b[3])
        first, second = UINT32(offset // UINT64(16)), UINT32((offset + half) // UINT64(16))
        scale_a, scale_b = scales_of(a, b, first, second, UINT32(UINT32(2) * which * lanes), is_there)
        if sequence < UINT32(_BELOW):
            start, scales = (cached_values, value_scales) if is_value else (cached_keys, key_scales)
            number = head - UINT32(queries) - (UINT32(keys) if is_value else UINT32(0))
            size = width // UINT64(2) if is_narrow else width
            at = UINT64(sequence) * sequence_step + UINT64(number) * head_step + UINT64(place) * size
            keep(start, scales, at, first, a, scale_a)
            keep(start, scales, at, second, b, scale_b)

    return Kernel(name, turn, 24)


_OF_KINDS = {
    "BF16": (ptx.low_bf16, ptx.high_bf16, ptx.two_bf16),
    "F16": (ptx.low_f16, ptx.high_f16, ptx.two_f16),
}


@cache
def __getattr__(name: str) -> Kernel:
    """Return the kernel of a dtype and a kind of cache, such as ``TURN_BF16_Q8``; one of 16 bits has no kind."""
    found = _NAME.fullmatch(name)
    if not found:
        raise AttributeError(name)
    return _turn(name.lower(), found["kind"], *_OF_KINDS[found["dtype"]])
