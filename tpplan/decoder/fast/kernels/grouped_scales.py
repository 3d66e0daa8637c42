"""Scales and zeros of codes, as the kernels for grouped rows have them: in registers, of each lane its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from tpplan.decoder.fast.kernels.expert_scales import SCALES_OF, scales_at, times
from tpplan.decoder.fast.kernels.lane_products import scale_of
from tpplan.decoder.fast.kernels.wide_limits import VECTOR
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import copied_function
from tpplan.exec.toolchain.language import types

if TYPE_CHECKING:
    from tpplan.decoder.fast.kernels.packed_codes import Codes

#: Of e2m1: the largest exponent of a scale, what is added to make its float a number of 16 bits times the factor of
#: floats, and what this leaves too small.
_LARGEST, _LESS, _SMALLER = 160, 94, 2**32
_WORD, _FLOAT, _BITS = types.uint64, types.float32, types.uint32


@frozen
class Scaling:
    """What makes scales and zeros of a lane's four matrix rows.

    Attributes:
        ask: asks for those of 16 bytes of codes, given the address of the first row, bytes to the second, and from
            these two to the others; the number of the first row, the number of 16 bytes, and what the kernel is told.
        made: returns scales, and what is added to codes' floats, each twice in 32 bits, given what was asked for, and
            what the kernel is told. Floats have nothing to add: scales stand in its place.
        factor: what sums are to be multiplied by.
    """

    ask: Any
    made: Any
    factor: int = 1


def by_numbers(kind: Codes, codes: str) -> Scaling:
    """Return what does it of scales of 16 or 32 bits; the kernel is told of them, and of zeros."""
    numbers, ask_zeros, zeros_of = SCALES_OF[codes]
    both, factor, base, has_zeros = kind.floats.both, kind.factor, max(kind.base or 0, 0), kind.base is not None

    @copied_function
    def ask(_: Any, place: Any, unit: Any, more: Any) -> Any:
        of_scales, of_zeros = more
        indexes = numbers(place, times(unit, of_scales[6]), of_scales)
        return scales_at(indexes, of_scales), ask_zeros(indexes, of_zeros)

    @copied_function
    def twice(bits: Any, form: Any) -> Any:
        scale = scale_of(bits, form) * _FLOAT(factor)
        return both(scale, scale)

    @copied_function
    def less(zero: Any) -> Any:
        found = -(_FLOAT(base) + zero)
        return both(found, found)

    @copied_function
    def made(found: Any, more: Any) -> Any:
        (a, b, c, d), zeros = found
        form = more[0][2]
        scales = twice(a, form), twice(b, form), twice(c, form), twice(d, form)
        if not has_zeros:
            return scales, scales
        e, f, g, h = zeros_of(zeros, more[1], more[0])
        return scales, (less(e), less(f), less(g), less(h))

    return Scaling(ask, made)


def by_exponents() -> Scaling:
    """Return what does it of e2m1, whose scales are where :mod:`tpplan.decoder.fast.kernels.coded_experts` has them."""

    @copied_function
    def exponent_at(address: Any, scales: Any) -> Any:
        return _BITS(ptx.load_8(scales + (address >> _WORD(4))))

    @copied_function
    def ask(rows: Any, _: Any, unit: Any, scales: Any) -> Any:
        row, pitch, half = rows
        first = row + _WORD(_BITS(unit * _BITS(VECTOR)))
        second = first + half
        one, other = exponent_at(first, scales), exponent_at(first + pitch, scales)
        return one, other, exponent_at(second, scales), exponent_at(second + pitch, scales)

    @copied_function
    def twice(exponent: Any) -> Any:
        return _BITS(_BITS(min(exponent, _BITS(_LARGEST)) + _BITS(_LESS)) * _BITS(0x00800080))

    @copied_function
    def made(found: Any, _: Any) -> Any:
        scales = twice(found[0]), twice(found[1]), twice(found[2]), twice(found[3])
        return scales, scales

    return Scaling(ask, made, _SMALLER)


def by_nothing() -> Scaling:
    """Return what does it of elements of 16 bits, which have none."""

    @copied_function
    def ask(_: Any, __: Any, ___: Any, ____: Any) -> Any:
        return _BITS(0)

    @copied_function
    def made(found: Any, _: Any) -> Any:
        return (found, found, found, found), (found, found, found, found)

    return Scaling(ask, made)
