"""Scales and zeros of four rows of experts' matrices, as a lane finds those of 16 bytes of codes of each.

What kernels are told of them is one tuple for scales and one for zeros. Of scales:

- scales, half: address, and bytes to those of what a gate is for, or 0.
- form: what they are, of :mod:`tpplan.decoder.fast.kernels.scale_kinds`.
- groups: scales beside each other; of all rows there are fewer than 2 ** 32.
- ahead: 2 where the second two rows of four are the next ones, 0 where they are of another matrix.
- row: of floats, the fraction that the numbers of rows are multiplied by to find their blocks.
- inverse: the same of 16 bytes beside each other; or 0 if there is one group.

And of zeros:

- zeros, half: address and bytes as of scales. Of 4 bits there are words of eight, of 8 bits bytes; or the former is 0.
  Of floats there are none.
- offset: is added to each zero, bits of a float32; it is the zero if there are none. Those of 8 bits are less 128.
"""

from __future__ import annotations

from typing import Any

from tpplan.decoder.fast.kernels.lane_products import BASES, BITS_OF_BASES
from tpplan.decoder.fast.kernels.scale_kinds import F32
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64

#: Bits behind the point of a fraction.
_POINT = 31


@device_function
def wide_product(a: Any, b: Any) -> Any:
    """Multiply numbers of 32 bits: one instruction."""
    return UINT64(UINT32(a)) * UINT64(UINT32(b))


@device_function
def times(number: Any, fraction: Any) -> Any:
    """Multiply a number by a fraction, and return the whole part."""
    return UINT32(wide_product(number, fraction) >> UINT64(_POINT))


@device_function
def _by_row(place: Any, group: Any, told: Any) -> Any:
    """Return the numbers of the scales of four rows that each have their own."""
    _, _, _, groups, ahead, _, _ = told
    first, further = UINT32(place * groups + group), UINT32(ahead * groups)
    second, third = UINT32(first + groups), UINT32(first + further)
    return first, second, third, UINT32(third + groups)


@device_function
def _by_block(place: Any, group: Any, told: Any) -> Any:
    """Return the numbers of the scales of four rows, of which blocks share one."""
    _, _, _, groups, ahead, row, _ = told
    second, third = UINT32(place + UINT32(1)), UINT32(place + ahead)
    a, b = times(place, row), times(second, row)
    c, d = times(third, row), times(UINT32(third + UINT32(1)), row)
    one, other = UINT32(a * groups + group), UINT32(b * groups + group)
    return one, other, UINT32(c * groups + group), UINT32(d * groups + group)


@device_function
def _scale_at(scales: Any, index: Any, wide: Any) -> Any:
    return ptx.load_32_or_16(scales + wide_product(index, UINT64(2) + wide + wide), wide)


@device_function
def scales_at(indexes: Any, told: Any) -> Any:
    """Ask for the scales of four rows."""
    (a, b, c, d), (scales, half, form, _, _, _, _) = indexes, told
    wide, further = UINT64(form == UINT64(F32)), scales + half
    one, other = _scale_at(scales, a, wide), _scale_at(scales, b, wide)
    return one, other, _scale_at(further, c, wide), _scale_at(further, d, wide)


@device_function
def _nibble_at(zeros: Any, index: Any, is_there: Any) -> Any:
    return ptx.load_32_if(zeros + wide_product(UINT32(index >> UINT32(3)), 4), is_there)


@device_function
def _byte_at(zeros: Any, index: Any, is_there: Any) -> Any:
    return ptx.load_8_if(zeros + UINT64(index), is_there)


@device_function
def _number(bits: Any, less: Any) -> Any:
    """Return a whole number less another, which has the base in it."""
    return ptx.float_of(UINT32(bits | UINT32(BITS_OF_BASES[0]))) - less


@device_function
def _nibble(word: Any, index: Any, less: Any) -> Any:
    return _number(UINT32(ptx.shifted(word, UINT32(index << UINT32(2))) & UINT32(15)), less)


@device_function
def _byte(word: Any, _: Any, less: Any) -> Any:
    return _number(word, less)


def _zeros_by(load: Any, value: Any) -> tuple[Any, Any]:
    """Make what asks for the zeros of four rows, and what makes float32 of them.

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
    def zeros_of(found: Any, told: Any, of_scales: Any) -> Any:
        (p, q, r, s), index = found
        _, _, _, groups, ahead, _, _ = of_scales
        base = FLOAT32(BASES[0]) - ptx.float_of(UINT32(told[2]))  # exact
        second, third = UINT32(index + groups), UINT32(index + ahead * groups)
        a, b = value(p, index, base), value(q, second, base)
        return a, b, value(r, third, base), value(s, UINT32(third + groups), base)

    return ask_zeros, zeros_of


@device_function
def _ask_none(_: Any, __: Any) -> Any:
    return UINT32(0)


@device_function
def _no_zeros(_: Any, __: Any, ___: Any) -> Any:
    return FLOAT32(0), FLOAT32(0), FLOAT32(0), FLOAT32(0)


#: Of codes: what returns the numbers of scales, asks for zeros, and makes float32 of these.
SCALES_OF = {
    "4": (_by_row, *_zeros_by(_nibble_at, _nibble)),
    "8": (_by_row, *_zeros_by(_byte_at, _byte)),
    "e4m3": (_by_block, _ask_none, _no_zeros),
}
