"""Kernels for the experts of few rows whose matrices are 4-bit codes: products that read the codes where they are.

They are as :mod:`tpplan.decoder.pair_products` has them. 16 bytes are 32 columns, which share a scale and a zero. A
code becomes a float where it is, by the bits before it: those of 128 are 0x43000000, and bit 16 is worth 1 there, so
that ``word & 0x000F0000 | 0x43000000`` are the bits of 128 and the code; the former is taken off, which is exact.
"""

from __future__ import annotations

from typing import Any

from numba.cuda import types

from tpplan.decoder.dot_products import ask, dot, eight_of
from tpplan.decoder.pair_products import BLOCK_WARPS, pair_products
from tpplan.exec import ptx
from tpplan.exec.kernels import Kernel, device_function

#: Kinds of scales.
BF16, F16, F32 = range(3)

#: Columns of a lane: 16 bytes.
_LANE = 32
#: Floats whose bits of the value 1 are where the first five nibbles begin.
_BASES = tuple(2.0**power for power in (23, 19, 15, 11, 7))
#: From the sixth nibble to the third, as from the eighth to the fifth.
_FURTHER = 12

_WORD, _FLOAT, _BITS = types.uint64, types.float32, types.uint32


def _code_of(nibble: int) -> Any:
    """Make what returns one of the first five nibbles of a word as a float, given the bits of all bases."""
    mask, base = 0xF << 4 * nibble, _BASES[nibble]

    @device_function
    def code(word: Any, bits: Any) -> Any:
        return ptx.float_of(_BITS((word & _BITS(mask)) | bits[nibble])) - _FLOAT(base)

    return code


_code_0, _code_1, _code_2, _code_3, _code_4 = (_code_of(nibble) for nibble in range(5))


@device_function
def _codes(word: Any, bits: Any) -> Any:
    """Return eight columns: the nibbles are those of 0, 2, 4, 6, 1, 3, 5 and 7, lowest bits first."""
    further = _BITS(word >> _BITS(_FURTHER))
    a, b, c, d = _code_0(word, bits), _code_4(word, bits), _code_1(word, bits), _code_2(further, bits)
    return a, b, c, d, _code_2(word, bits), _code_3(further, bits), _code_3(word, bits), _code_4(further, bits)


@device_function
def _bits_of_bases() -> Any:
    """Return them in registers: the compiler, which does not know them, makes none again for each code."""
    none = _BITS(~ptx.active())
    a, b, c = _BITS(none + _BITS(0x4B000000)), _BITS(none + _BITS(0x49000000)), _BITS(none + _BITS(0x47000000))
    return a, b, c, _BITS(none + _BITS(0x45000000)), _BITS(none + _BITS(0x43000000))


@device_function
def _scale_at(scales: Any, index: Any, form: Any) -> Any:
    """Ask for the word that a scale is in, or half of which it is."""
    shift = _WORD(2) if form == _WORD(F32) else _WORD(1)
    return ptx.load_32(scales + ((_WORD(index) << shift) & ~_WORD(3)))


@device_function
def _zero_at(zeros: Any, index: Any) -> Any:
    """Ask for the word that a zero is in, if there are any."""
    return ptx.load_32(zeros + ((_WORD(index) >> _WORD(3)) << _WORD(2))) if zeros else _BITS(0)


@device_function
def _zero_of(word: Any, index: Any, offset: Any, bits: Any) -> Any:
    return _code_0(_BITS(ptx.shifted(word, _BITS(index << _BITS(2)))), bits) + offset


def _product(name: str, first: Any, second: Any, both: Any) -> Kernel:
    """Make a kernel that multiplies pairs' rows by their experts' matrices.

    Its words are those of :func:`tpplan.decoder.pair_products.pair_products`. Of the experts' matrices, one below the
    other, it is told:

    - codes: address.
    - size: rows of each.
    - half: bytes to the codes of the second two rows of four: what a gate is for, or the second next.

    And behind the others:

    - scales, form: address, and what they are, such as :data:`BF16`.
    - zeros: address of words with eight each; or 0.
    - scales_half, zeros_half: bytes to those of what a gate is for, or 0.
    - groups: scales of a row.
    - later: how many there are from one to that of the second next row; 0 if the second two rows are of another matrix.
    - inverse: a group's 2 ** 31 by its units of 32 columns, rounded up; or 0 if there is one group.
    - offset: is added to each zero, or is the zero if there are none: bits of a float32.

    Args:
        name: of the kernel.
        first: makes a float32 of the first element in 32 bits.
        second: the same of the second.
        both: makes 32 bits of two float32.
    """
    eight = eight_of(first, second)

    @device_function
    def ask_rows(place: Any, column: Any, more: Any) -> Any:
        """Ask for codes, scales and zeros; a place is the number of a row."""
        codes, pitch, half, scales, form, zeros, scales_half, zeros_half, groups, later, inverse, _, _ = more
        w = ask(codes + place * pitch + _WORD(_BITS(column >> _BITS(1))), pitch, half)
        unit = _WORD(_BITS(column >> _BITS(5)))
        i0 = place * groups + ((unit * inverse) >> _WORD(31))
        i1, i2 = i0 + groups, i0 + later
        i3 = i2 + groups
        s0, s1 = _scale_at(scales, i0, form), _scale_at(scales, i1, form)
        s2, s3 = _scale_at(scales + scales_half, i2, form), _scale_at(scales + scales_half, i3, form)
        z0, z1 = _zero_at(zeros, i0), _zero_at(zeros, i1)
        further = zeros + zeros_half
        z2, z3 = _zero_at(further, i2), _zero_at(further, i3)
        return w, (s0, s1, s2, s3), (z0, z1, z2, z3), _BITS(i0)

    @device_function
    def scale_of(word: Any, index: Any, form: Any) -> Any:
        bits = word if form == _WORD(F32) else ptx.shifted(word, _BITS(index << _BITS(4)))
        if form == _WORD(BF16):
            return ptx.low_bf16(bits)
        if form == _WORD(F16):
            return ptx.low_f16(bits)
        return ptx.float_of(bits)

    @device_function
    def add(sums: Any, a: Any, b: Any, c: Any, d: Any, address: Any, bits: Any) -> Any:
        """Add what a word of each of four matrix rows and a row's columns make, and these columns themselves."""
        x = eight(ptx.load_128(address))
        s, t, u, v, total = sums
        total = total + (((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])))
        s, t = dot(s, _codes(a, bits), x), dot(t, _codes(b, bits), x)
        return s, t, dot(u, _codes(c, bits), x), dot(v, _codes(d, bits), x), total

    @device_function
    def use(totals: Any, found: Any, address: Any, factor: Any, more: Any) -> Any:
        """Add what 32 columns of a row and of four matrix rows make, so many times."""
        (a, b, c, d), (s0, s1, s2, s3), (z0, z1, z2, z3), i0 = found
        form, groups, later, offset = more[4], _BITS(more[8]), _BITS(more[9]), ptx.float_of(_BITS(more[11]))
        bits = more[12]
        i1, i2 = _BITS(i0 + groups), _BITS(i0 + later)
        i3 = _BITS(i2 + groups)
        sums = _FLOAT(0), _FLOAT(0), _FLOAT(0), _FLOAT(0), _FLOAT(0)
        sums = add(sums, a[0], b[0], c[0], d[0], address, bits)
        sums = add(sums, a[1], b[1], c[1], d[1], address + _WORD(16), bits)
        sums = add(sums, a[2], b[2], c[2], d[2], address + _WORD(32), bits)
        sums = add(sums, a[3], b[3], c[3], d[3], address + _WORD(48), bits)
        x = sums[4]
        return (
            totals[0] + factor * scale_of(s0, i0, form) * (sums[0] - _zero_of(z0, i0, offset, bits) * x),
            totals[1] + factor * scale_of(s1, i1, form) * (sums[1] - _zero_of(z1, i1, offset, bits) * x),
            totals[2] + factor * scale_of(s2, i2, form) * (sums[2] - _zero_of(z2, i2, offset, bits) * x),
            totals[3] + factor * scale_of(s3, i3, form) * (sums[3] - _zero_of(z3, i3, offset, bits) * x),
        )

    multiply = pair_products(_LANE, ask_rows, use, first, both)

    def multiply_codes(  # type: ignore[no-untyped-def]
        y, y_pitch, x, x_pitch, codes, size, half, choices, chosen, many, width, batches, plus, plus_pitch,
        mode, team, teams, scales, form, zeros, scales_half, zeros_half, groups, later, inverse, offset,
    ):  # fmt: skip
        more = (
            codes, width >> _WORD(1), half, scales, form, zeros, scales_half, zeros_half, groups, later, inverse,
            offset, _bits_of_bases(),
        )  # fmt: skip
        multiply(
            y, y_pitch, x, x_pitch, _WORD(0), size, _WORD(1), choices, chosen, many, width, batches, plus, plus_pitch,
            mode, team, teams, more,
        )  # fmt: skip

    return Kernel(name, multiply_codes, 26, bounds=(32 * BLOCK_WARPS, 2))


CODED_PRODUCT_BF16 = _product("coded_product_bf16", ptx.low_bf16, ptx.high_bf16, ptx.two_bf16)
CODED_PRODUCT_F16 = _product("coded_product_f16", ptx.low_f16, ptx.high_f16, ptx.two_f16)
