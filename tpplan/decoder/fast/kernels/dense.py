"""Kernels that make rows of quantised matrices in 16 bits, which torch multiplies many rows by.

A thread makes eight columns of each of four rows: 16 bytes, beside its neighbours'. An element is its code, less a zero
if codes are whole numbers, times the scale of its block: in float32, where only the product is rounded, and then once
more. Codes of eight columns are at multiples of their size, the result's of 16 bytes; pitches are in bytes.
"""

from __future__ import annotations

from typing import Any

from tpplan.decoder.fast.kernels.scale_kinds import F16, F32
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64, cuda

#: Rows of a thread.
_ROWS = 4
#: Bits behind the point of a fraction.
_POINT = 31

_low, _high = ptx.low_f16, ptx.high_f16


@device_function
def _one(at: Any) -> Any:
    return (ptx.load_32(at),)


@device_function
def _two(at: Any) -> Any:
    return ptx.load_64(at)


@device_function
def _pair(bits: Any, mask: Any) -> Any:
    """Return two whole numbers as float16, each 1024 more."""
    return UINT32(bits & UINT32(mask) | UINT32(0x64006400))


@device_function
def _four_bits(words: Any) -> Any:
    """Return eight codes by columns, see :data:`tpplan.decoder.weights.quantised.ORDER`."""
    word = words[0]
    a, b = _pair(word, 0x000F000F), _pair(word >> UINT32(4), 0x000F000F)
    c, d = _pair(word >> UINT32(8), 0x000F000F), _pair(word >> UINT32(12), 0x000F000F)
    return _low(a), _high(a), _low(b), _high(b), _low(c), _high(c), _low(d), _high(d)


@device_function
def _eight_bits(word: Any) -> Any:
    return _pair(word, 0x00FF00FF), _pair(word >> UINT32(8), 0x00FF00FF)


@device_function
def _e4m3(word: Any) -> Any:
    """Return a 256th of each: what has all bits but the sign, which is no number, must not become one."""
    even = UINT32((word & UINT32(0x007F007F)) << UINT32(7) | (word & UINT32(0x00800080)) << UINT32(8))
    odd = UINT32((word & UINT32(0x7F007F00)) >> UINT32(1) | word & UINT32(0x80008000))
    return (
        UINT32(even | even + UINT32(0x00800080) & UINT32(0x40004000)),
        UINT32(odd | odd + UINT32(0x00800080) & UINT32(0x40004000)),
    )


@device_function
def _e5m2(word: Any) -> Any:
    return UINT32(word << UINT32(8) & UINT32(0xFF00FF00)), UINT32(word & UINT32(0xFF00FF00))


@device_function
def _bytes_of(signs: Any, others: Any) -> Any:
    """Return the first bytes of float16, each 2 ** -14 of an e2m1: its sign, and its other bits."""
    return UINT32(signs & UINT32(0x80808080) | others & UINT32(0x0E0E0E0E))


@device_function
def _e2m1(words: Any) -> Any:
    word, by = words[0], FLOAT32(2**14)
    first, second = _bytes_of(word << UINT32(4), word << UINT32(1)), _bytes_of(word, word >> UINT32(3))
    a, b = UINT32(first << UINT32(8) & UINT32(0xFF00FF00)), UINT32(second << UINT32(8) & UINT32(0xFF00FF00))
    c, d = UINT32(first & UINT32(0xFF00FF00)), UINT32(second & UINT32(0xFF00FF00))
    half = by * _low(a), by * _low(b), by * _low(c), by * _low(d)
    return *half, by * _high(a), by * _high(b), by * _high(c), by * _high(d)


def _bytes_by(pairs: Any) -> Any:
    """Make what returns eight codes by columns, given what makes float16 of the first and third byte, and others."""

    @device_function
    def codes(words: Any) -> Any:
        (a, b), (c, d) = pairs(words[0]), pairs(words[1])
        return _low(a), _low(b), _high(a), _high(b), _low(c), _low(d), _high(c), _high(d)

    return codes


@device_function
def _as_codes_are(zero: Any) -> Any:
    return _low(UINT32(zero + UINT32(0x6400)))


@device_function
def _none(_: Any) -> Any:
    return FLOAT32(0)


def _each(make: Any) -> Any:
    """Make what does the same for each of four, which it is told something for."""

    @device_function
    def four(values: Any, told: Any) -> Any:
        return make(values[0], told), make(values[1], told), make(values[2], told), make(values[3], told)

    return four


@device_function
def _times(number: Any, fraction: Any) -> Any:
    return UINT32(UINT64(number) * UINT64(fraction) >> UINT64(_POINT))


@device_function
def _until(number: Any, last: Any) -> Any:
    return min(number, last)


@device_function
def _block_of(row: Any, told: Any) -> Any:
    fraction, per_row, column = told
    return UINT32(_times(row, fraction) * per_row + column)


@device_function
def _scale_16(block: Any, scales: Any) -> Any:
    return UINT32(ptx.load_16(scales + UINT64(block) * UINT64(2)))


@device_function
def _scale_32(block: Any, scales: Any) -> Any:
    return ptx.load_32(scales + UINT64(block) * UINT64(4))


@device_function
def _scale_8(block: Any, scales: Any) -> Any:
    return UINT32(ptx.load_8(scales + UINT64(block)))


@device_function
def _zero_byte(block: Any, told: Any) -> Any:
    zeros, packed = told
    return UINT32(ptx.load_8(zeros + UINT64(block >> packed)))


_numbers, _blocks = _each(_until), _each(_block_of)
_scales_16, _scales_32, _scales_8, _zero_bytes = (_each(each) for each in (_scale_16, _scale_32, _scale_8, _zero_byte))


@device_function
def _scales(blocks: Any, scales: Any, kind: Any) -> Any:
    return _scales_32(blocks, scales) if kind == UINT32(F32) else _scales_16(blocks, scales)


@device_function
def _zeros(blocks: Any, zeros: Any, packed: Any) -> Any:
    nothing = UINT32(0)
    return _zero_bytes(blocks, (zeros, packed)) if zeros else (nothing, nothing, nothing, nothing)


@device_function
def _zero_in(byte: Any, block: Any, packed: Any, plus: Any) -> Any:
    """Return what is in a byte, or in the half that the number of a block tells, and some more."""
    return UINT32((byte >> ((block & packed) << UINT32(2)) & UINT32(255) >> (packed << UINT32(2))) + plus)


@device_function
def _float_of(bits: Any, kind: Any) -> Any:
    if kind == UINT32(F16):
        return _low(bits)
    return ptx.float_of(bits) if kind == UINT32(F32) else ptx.low_bf16(bits)


@device_function
def _exponents(blocks: Any, scales: Any, _: Any) -> Any:
    return _scales_8(blocks, scales)


@device_function
def _power_of(bits: Any, _: Any) -> Any:
    return ptx.float_of(UINT32(bits << UINT32(23)))


_FLOATS, _POWERS = (_scales, _each(_float_of)), (_exponents, _each(_power_of))


def _dense(
    name: str, both: Any, size: int, load: Any, codes_of: Any, zero_of: Any, factor: int = 1, scaling: Any = _FLOATS
) -> Kernel:
    """Make a kernel.

    Its words:

    - out, its pitch: where the rows go.
    - codes, their pitch: those of the matrix's first row; no kernel that may still run writes them, scales or zeros.
    - start, end: rows of the matrix.
    - units: eights of columns.
    - scales, kind: one for each block, row after row of blocks, see :mod:`tpplan.decoder.fast.kernels.scale_kinds`.
    - per_row: how many scales it is from one row of blocks to the next.
    - row, column: fractions that rows and units are multiplied by to find their blocks.
    - zeros, packed: in bytes, one for each scale, or two if ``packed`` is 1; none are 0.
    - plus: is added to each of them.

    Blocks of threads have rows in the first dimension, columns in the second.

    Args:
        name: of it.
        both: makes 32 bits of two float32.
        size: bytes of eight codes.
        load: loads them.
        codes_of: makes float32 of them, with what ``zero_of`` makes of zeros too much.
        zero_of: makes a float32 of a zero.
        factor: a power of 2 that these are too small by.
        scaling: loads scales, and makes float32 of them.
    """
    scales_at, floats_of = scaling

    @device_function
    def store(to: Any, words: Any, scale: Any, zero: Any) -> None:
        code, z, by = codes_of(words), zero_of(zero), scale * FLOAT32(factor)
        ptx.store_128(
            to,
            both((code[0] - z) * by, (code[1] - z) * by),
            both((code[2] - z) * by, (code[3] - z) * by),
            both((code[4] - z) * by, (code[5] - z) * by),
            both((code[6] - z) * by, (code[7] - z) * by),
        )

    @device_function
    def load_of(row: Any, told: Any) -> Any:
        at, pitch = told
        return load(at + UINT64(row) * pitch)

    loads = _each(load_of)

    def dense(  # type: ignore[no-untyped-def]
        out, out_pitch, codes, pitch, start, end, units, scales, kind, per_row, row, column, zeros, packed, plus
    ):
        start, end, units, kind, packed = UINT32(start), UINT32(end), UINT32(units), UINT32(kind), UINT32(packed)
        unit = UINT32(cuda.blockIdx.y) * UINT32(cuda.blockDim.x) + UINT32(cuda.threadIdx.x)
        before = UINT32(cuda.blockIdx.x) * UINT32(_ROWS)
        first, own = UINT32(start + before), UINT32(min(unit, units - UINT32(1)))
        # All is asked for before anything is looked at; of rows that there are not, for the last one.
        rows = first, UINT32(first + UINT32(1)), UINT32(first + UINT32(2)), UINT32(first + UINT32(3))
        rows = _numbers(rows, UINT32(end - UINT32(1)))
        words = loads(rows, (codes + UINT64(own) * UINT64(size), pitch))
        blocks = _blocks(rows, (UINT32(row), UINT32(per_row), _times(own, UINT32(column))))
        scale = scales_at(blocks, scales, kind)
        zero = _zeros(blocks, zeros, packed)
        ptx.after_earlier_with_next()
        by, more = floats_of(scale, kind), UINT32(plus)
        to = out + UINT64(before) * out_pitch + UINT64(unit) * UINT64(16)
        if unit < units:
            store(to, words[0], by[0], _zero_in(zero[0], blocks[0], packed, more))
            if first + UINT32(1) < end:
                store(to + out_pitch, words[1], by[1], _zero_in(zero[1], blocks[1], packed, more))
            if first + UINT32(2) < end:
                store(to + UINT64(2) * out_pitch, words[2], by[2], _zero_in(zero[2], blocks[2], packed, more))
            if first + UINT32(3) < end:
                store(to + UINT64(3) * out_pitch, words[3], by[3], _zero_in(zero[3], blocks[3], packed, more))

    return Kernel(name, dense, 15)


_KINDS: dict[str, tuple[Any, ...]] = {
    "4": (4, _one, _four_bits, _as_codes_are),
    "8": (8, _two, _bytes_by(_eight_bits), _as_codes_are),
    "e4m3": (8, _two, _bytes_by(_e4m3), _none, 256),
    "e5m2": (8, _two, _bytes_by(_e5m2), _none),
    "e2m1": (4, _one, _e2m1, _none, 1, _POWERS),
}
DENSE_BF16_4 = _dense("dense_bf16_4", ptx.two_bf16, *_KINDS["4"])
DENSE_BF16_8 = _dense("dense_bf16_8", ptx.two_bf16, *_KINDS["8"])
DENSE_BF16_E4M3 = _dense("dense_bf16_e4m3", ptx.two_bf16, *_KINDS["e4m3"])
DENSE_BF16_E5M2 = _dense("dense_bf16_e5m2", ptx.two_bf16, *_KINDS["e5m2"])
DENSE_BF16_E2M1 = _dense("dense_bf16_e2m1", ptx.two_bf16, *_KINDS["e2m1"])
DENSE_F16_4 = _dense("dense_f16_4", ptx.two_f16, *_KINDS["4"])
DENSE_F16_8 = _dense("dense_f16_8", ptx.two_f16, *_KINDS["8"])
DENSE_F16_E4M3 = _dense("dense_f16_e4m3", ptx.two_f16, *_KINDS["e4m3"])
DENSE_F16_E5M2 = _dense("dense_f16_e5m2", ptx.two_f16, *_KINDS["e5m2"])
DENSE_F16_E2M1 = _dense("dense_f16_e2m1", ptx.two_f16, *_KINDS["e2m1"])
