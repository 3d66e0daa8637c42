"""Kernels for the experts of few rows whose matrices are codes: products that read the codes where they are.

They are as :mod:`tpplan.decoder.kernels.pair_products` has them, and make floats of codes as
:mod:`tpplan.decoder.kernels.lane_products` does. 16 bytes of a matrix row share a scale, and a zero if codes are whole
numbers: a lane finds

    scale × (sum of code × column - zero × sum of columns)
"""

from __future__ import annotations

from typing import Any

from numba.cuda import types

from tpplan.decoder.kernels.dot_products import ask
from tpplan.decoder.kernels.lane_products import BASES, BITS_OF_BASES, CODES, products_of, scale_of
from tpplan.decoder.kernels.pair_products import BLOCK_WARPS, FORMATS, Format, pair_products
from tpplan.decoder.kernels.scale_kinds import F32
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function

#: Bits behind the point of a fraction.
_POINT = 31

_WORD, _FLOAT, _BITS = types.uint64, types.float32, types.uint32


@device_function
def _bits_of_bases() -> Any:
    """Return them in registers: the compiler, which does not know them, makes none again for each code."""
    none = _BITS(~ptx.active())
    return (
        _BITS(none + _BITS(BITS_OF_BASES[0])),
        _BITS(none + _BITS(BITS_OF_BASES[1])),
        _BITS(none + _BITS(BITS_OF_BASES[2])),
        _BITS(none + _BITS(BITS_OF_BASES[3])),
        _BITS(none + _BITS(BITS_OF_BASES[4])),
    )


@device_function
def _nothing() -> Any:
    return _BITS(0)


@device_function
def _wide(a: Any, b: Any) -> Any:
    """Multiply numbers of 32 bits: one instruction."""
    return _WORD(_BITS(a)) * _WORD(_BITS(b))


@device_function
def _times(number: Any, fraction: Any) -> Any:
    return _BITS(_wide(number, fraction) >> _WORD(_POINT))


@device_function
def _by_row(place: Any, group: Any, told: Any) -> Any:
    """Return the numbers of the scales of four rows that each have their own."""
    _, _, _, groups, ahead, _, _ = told
    first, further = _BITS(place * groups + group), _BITS(ahead * groups)
    second, third = _BITS(first + groups), _BITS(first + further)
    return first, second, third, _BITS(third + groups)


@device_function
def _by_block(place: Any, group: Any, told: Any) -> Any:
    """Return the numbers of the scales of four rows, of which blocks share one."""
    _, _, _, groups, ahead, row, _ = told
    second, third = _BITS(place + _BITS(1)), _BITS(place + ahead)
    a, b = _times(place, row), _times(second, row)
    c, d = _times(third, row), _times(_BITS(third + _BITS(1)), row)
    one, other = _BITS(a * groups + group), _BITS(b * groups + group)
    return one, other, _BITS(c * groups + group), _BITS(d * groups + group)


@device_function
def _scale_at(scales: Any, index: Any, wide: Any) -> Any:
    return ptx.load_32_or_16(scales + _wide(index, _WORD(2) + wide + wide), wide)


@device_function
def _scales_at(indexes: Any, told: Any) -> Any:
    """Ask for the scales of four rows."""
    (a, b, c, d), (scales, half, form, _, _, _, _) = indexes, told
    wide, further = _WORD(form == _WORD(F32)), scales + half
    one, other = _scale_at(scales, a, wide), _scale_at(scales, b, wide)
    return one, other, _scale_at(further, c, wide), _scale_at(further, d, wide)


@device_function
def _nibble_at(zeros: Any, index: Any, is_there: Any) -> Any:
    return ptx.load_32_if(zeros + _wide(_BITS(index >> _BITS(3)), 4), is_there)


@device_function
def _byte_at(zeros: Any, index: Any, is_there: Any) -> Any:
    return ptx.load_8_if(zeros + _WORD(index), is_there)


@device_function
def _number(bits: Any, less: Any) -> Any:
    """Return a whole number less another, which has the base in it."""
    return ptx.float_of(_BITS(bits | _BITS(BITS_OF_BASES[0]))) - less


@device_function
def _nibble(word: Any, index: Any, less: Any) -> Any:
    return _number(_BITS(ptx.shifted(word, _BITS(index << _BITS(2))) & _BITS(15)), less)


@device_function
def _byte(word: Any, _: Any, less: Any) -> Any:
    return _number(word, less)


def _zeros_by(load: Any, value: Any) -> tuple[Any, Any]:
    """Make what asks for the zeros of four rows, and what takes them off four sums; see :func:`_product`.

    Args:
        load: asks for what a zero is in, given its number.
        value: makes a float32 of it, less another.
    """

    @device_function
    def ask_zeros(indexes: Any, told: Any) -> Any:
        (a, b, c, d), (zeros, half, _) = indexes, told
        further = zeros + half
        one, other = load(zeros, a, zeros), load(zeros, b, zeros)
        return (one, other, load(further, c, zeros), load(further, d, zeros)), a

    @device_function
    def less(sums: Any, found: Any, told: Any, of_scales: Any) -> Any:
        (p, q, r, s), index = found
        _, _, _, groups, ahead, _, _ = of_scales
        base, x = _FLOAT(BASES[0]) - ptx.float_of(_BITS(told[2])), sums[4]  # exact
        second, third = _BITS(index + groups), _BITS(index + ahead * groups)
        a, b = sums[0] - value(p, index, base) * x, sums[1] - value(q, second, base) * x
        c, fourth = sums[2] - value(r, third, base) * x, _BITS(third + groups)
        return a, b, c, sums[3] - value(s, fourth, base) * x

    return ask_zeros, less


@device_function
def _ask_none(_: Any, __: Any) -> Any:
    return _BITS(0)


@device_function
def _less_none(sums: Any, _: Any, __: Any, ___: Any) -> Any:
    return sums


#: Of codes: the numbers of scales, what asks for zeros and takes them off, and what a kernel keeps.
_KINDS = {
    "4": (_by_row, *_zeros_by(_nibble_at, _nibble), _bits_of_bases),
    "8": (_by_row, *_zeros_by(_byte_at, _byte), _nothing),
    "e4m3": (_by_block, _ask_none, _less_none, _nothing),
}


def _product(name: str, kind: str, rows: Format) -> Kernel:
    """Make a kernel that multiplies pairs' rows by their experts' matrices.

    Its words are those of :func:`tpplan.decoder.kernels.pair_products.pair_products`. Of the experts' matrices, one
    below the other, it is told:

    - codes: address.
    - size: rows of each.
    - half: bytes to the codes of the second two rows of four: what a gate is for, or the second next.

    And behind the others:

    - scales, half: address, and bytes to those of what a gate is for, or 0.
    - form: what they are, of :mod:`tpplan.decoder.kernels.scale_kinds`.
    - groups: scales beside each other; of all rows there are fewer than 2 ** 32.
    - ahead: 2 where the second two rows of four are the next ones, 0 where they are of another matrix.
    - row: of floats, the fraction that the numbers of rows are multiplied by to find their blocks.
    - inverse: the same of 16 bytes beside each other; or 0 if there is one group.
    - zeros, half: address and bytes as of scales. Of 4 bits there are words of eight, of 8 bits bytes; or the former
      is 0. Of floats there are none.
    - offset: is added to each zero, bits of a float32; it is the zero if there are none. Those of 8 bits are less 128.

    Args:
        name: of the kernel.
        kind: of codes.
        rows: what these are made of.
    """
    elements, (numbers, ask_zeros, less, kept_of) = CODES[kind], _KINDS[kind]
    products = products_of(elements, *rows.emit)
    per_byte, unit, factor = 8 // elements.bits - 1, elements.columns.bit_length() - 1, float(elements.factor)

    @device_function
    def ask_rows(place: Any, column: Any, more: Any) -> Any:
        """Ask for codes, scales and zeros; a place is the number of a row."""
        (codes, pitch, half), of_scales, of_zeros, _ = more
        w = ask(codes + _wide(place, pitch) + _WORD(_BITS(column >> _BITS(per_byte))), pitch, half)
        indexes = numbers(_BITS(place), _times(column >> _BITS(unit), of_scales[6]), of_scales)
        return w, _scales_at(indexes, of_scales), ask_zeros(indexes, of_zeros)

    @device_function
    def use(totals: Any, found: Any, address: Any, by: Any, more: Any) -> Any:
        """Add what 16 bytes of four matrix rows and the columns of a row make, so many times."""
        (w, scales, zeros), (_, of_scales, of_zeros, kept) = found, more
        form, by = of_scales[2], by * _FLOAT(factor)
        sums = less(products(w, address, kept), zeros, of_zeros, of_scales)
        return (
            totals[0] + by * scale_of(scales[0], form) * sums[0],
            totals[1] + by * scale_of(scales[1], form) * sums[1],
            totals[2] + by * scale_of(scales[2], form) * sums[2],
            totals[3] + by * scale_of(scales[3], form) * sums[3],
        )

    multiply = pair_products(elements.columns, ask_rows, use, rows)

    def multiply_codes(  # type: ignore[no-untyped-def]
        y, y_pitch, x, x_pitch, codes, size, half, choices, chosen, many, width, batches, plus, plus_pitch,
        bias, of_bias, bias_step, bias_half, mode, team, teams, scales, scales_half, form, groups, ahead, row, inverse,
        zeros, zeros_half, offset,
    ):  # fmt: skip
        of_scales = scales, scales_half, form, _BITS(groups), _BITS(ahead), row, inverse
        more = (codes, width >> _WORD(per_byte), half), of_scales, (zeros, zeros_half, offset), kept_of()
        multiply(
            y, y_pitch, x, x_pitch, _WORD(0), size, _WORD(1), choices, chosen, many, width, batches, plus, plus_pitch,
            (bias, of_bias, bias_step, bias_half), mode, team, teams, more,
        )  # fmt: skip

    return Kernel(name, multiply_codes, 31, bounds=(32 * BLOCK_WARPS, 2))


def _float_product(name: str, rows: Format) -> Kernel:
    """Make the same for e2m1, each 32 of which share a power of two. Matrix rows may be apart.

    Its words are those of products of 16 bits, see :mod:`tpplan.decoder.kernels.experts`, and one behind them:

    - scales: where that of 16 bytes of codes is, less a 16th of where these are. It is the exponent of a float32.

    Args:
        name: of the kernel.
        rows: what these are made of.
    """
    elements = CODES["e2m1"]
    products, factor = products_of(elements, *rows.emit), float(elements.factor)

    @device_function
    def exponent_at(place: Any, scales: Any) -> Any:
        return _BITS(ptx.load_8(scales + (place >> _WORD(4))))

    @device_function
    def ask_rows(address: Any, column: Any, more: Any) -> Any:
        """Ask for codes and scales."""
        pitch, half, scales = more
        place = address + _WORD(column >> _BITS(1))
        further = place + half
        one, other = exponent_at(place, scales), exponent_at(place + pitch, scales)
        third, fourth = exponent_at(further, scales), exponent_at(further + pitch, scales)
        return ask(place, pitch, half), (one, other, third, fourth)

    @device_function
    def power(exponent: Any) -> Any:
        return ptx.float_of(_BITS(exponent << _BITS(23)))

    @device_function
    def use(totals: Any, found: Any, address: Any, by: Any, _: Any) -> Any:
        """Add what 16 bytes of four matrix rows and the columns of a row make, so many times."""
        w, scales = found
        sums, by = products(w, address, None), by * _FLOAT(factor)
        return (
            totals[0] + by * power(scales[0]) * sums[0],
            totals[1] + by * power(scales[1]) * sums[1],
            totals[2] + by * power(scales[2]) * sums[2],
            totals[3] + by * power(scales[3]) * sums[3],
        )

    multiply = pair_products(elements.columns, ask_rows, use, rows)

    def multiply_floats(  # type: ignore[no-untyped-def]
        y, y_pitch, x, x_pitch, codes, of_expert, pitch, half, choices, chosen, many, width, batches, plus, plus_pitch,
        bias, of_bias, bias_step, bias_half, mode, team, teams, scales,
    ):  # fmt: skip
        multiply(
            y, y_pitch, x, x_pitch, codes, of_expert, pitch, choices, chosen, many, width, batches, plus, plus_pitch,
            (bias, of_bias, bias_step, bias_half), mode, team, teams, (pitch, half, scales),
        )  # fmt: skip

    return Kernel(name, multiply_floats, 23, bounds=(32 * BLOCK_WARPS, 2))


CODED_PRODUCT_BF16_4 = _product("coded_product_bf16_4", "4", FORMATS["bf16"])
CODED_PRODUCT_BF16_8 = _product("coded_product_bf16_8", "8", FORMATS["bf16"])
CODED_PRODUCT_BF16_E4M3 = _product("coded_product_bf16_e4m3", "e4m3", FORMATS["bf16"])
CODED_PRODUCT_BF16_E2M1 = _float_product("coded_product_bf16_e2m1", FORMATS["bf16"])
CODED_PRODUCT_F16_4 = _product("coded_product_f16_4", "4", FORMATS["f16"])
CODED_PRODUCT_F16_8 = _product("coded_product_f16_8", "8", FORMATS["f16"])
CODED_PRODUCT_F16_E4M3 = _product("coded_product_f16_e4m3", "e4m3", FORMATS["f16"])
CODED_PRODUCT_F16_E2M1 = _float_product("coded_product_f16_e2m1", FORMATS["f16"])
