"""Kernels for the experts of few rows whose matrices are codes: products that read the codes where they are.

They are as :mod:`tpplan.decoder.fast.kernels.pair_products` has them, and make floats of codes as
:mod:`tpplan.decoder.fast.kernels.lane_products` does. 16 bytes of a matrix row share a scale, and a zero if codes are
whole
numbers: a lane finds

    scale × (sum of code × column - zero × sum of columns)
"""

from __future__ import annotations

from typing import Any

from tpplan.decoder.fast.kernels.dot_products import ask
from tpplan.decoder.fast.kernels.expert_scales import SCALES_OF, scales_at, times, wide_product
from tpplan.decoder.fast.kernels.lane_products import BITS_OF_BASES, CODES, products_of, scale_of
from tpplan.decoder.fast.kernels.pair_products import BLOCK_WARPS, FORMATS, Format, pair_products
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64


@device_function
def _bits_of_bases() -> Any:
    """Return them in registers: the compiler, which does not know them, makes none again for each code."""
    none = UINT32(~ptx.active())
    return (
        UINT32(none + UINT32(BITS_OF_BASES[0])),
        UINT32(none + UINT32(BITS_OF_BASES[1])),
        UINT32(none + UINT32(BITS_OF_BASES[2])),
        UINT32(none + UINT32(BITS_OF_BASES[3])),
        UINT32(none + UINT32(BITS_OF_BASES[4])),
    )


@device_function
def _nothing() -> Any:
    return UINT32(0)


@device_function
def _less(sums: Any, zeros: Any) -> Any:
    """Return four sums without what zeros make, of which the fifth is the sum of columns."""
    a, b, c, d, x = sums
    return a - zeros[0] * x, b - zeros[1] * x, c - zeros[2] * x, d - zeros[3] * x


@device_function
def _as_they_are(sums: Any, _: Any) -> Any:
    return sums


#: What a kernel keeps for codes.
_KEPT = {"4": _bits_of_bases, "8": _nothing, "e4m3": _nothing}


def _product(name: str, kind: str, rows: Format) -> Kernel:
    """Make a kernel that multiplies pairs' rows by their experts' matrices.

    Its words are those of :func:`tpplan.decoder.fast.kernels.pair_products.pair_products`. Of the experts' matrices,
    one below the other, it is told:

    - codes: address.
    - size: rows of each.
    - half: bytes to the codes of the second two rows of four: what a gate is for, or the second next.

    And behind the others:

    - what :mod:`tpplan.decoder.fast.kernels.expert_scales` has of scales, then of zeros.

    Args:
        name: of the kernel.
        kind: of codes.
        rows: what these are made of.
    """
    elements, (numbers, ask_zeros, zeros_of), kept_of = CODES[kind], SCALES_OF[kind], _KEPT[kind]
    products = products_of(elements, *rows.emit)
    per_byte, unit, factor = 8 // elements.bits - 1, elements.columns.bit_length() - 1, float(elements.factor)

    less = _less if elements.sums else _as_they_are

    @device_function
    def ask_rows(place: Any, column: Any, more: Any) -> Any:
        """Ask for codes, scales and zeros; a place is the number of a row."""
        (codes, pitch, half), of_scales, of_zeros, _ = more
        w = ask(codes + wide_product(place, pitch) + UINT64(UINT32(column >> UINT32(per_byte))), pitch, half)
        indexes = numbers(UINT32(place), times(column >> UINT32(unit), of_scales[6]), of_scales)
        return w, scales_at(indexes, of_scales), ask_zeros(indexes, of_zeros)

    @device_function
    def use(totals: Any, found: Any, address: Any, by: Any, more: Any) -> Any:
        """Add what 16 bytes of four matrix rows and the columns of a row make, so many times."""
        (w, scales, zeros), (_, of_scales, of_zeros, kept) = found, more
        form, by = of_scales[2], by * FLOAT32(factor)
        sums = less(products(w, address, kept), zeros_of(zeros, of_zeros, of_scales))
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
        of_scales = scales, scales_half, form, UINT32(groups), UINT32(ahead), row, inverse
        more = (codes, width >> UINT64(per_byte), half), of_scales, (zeros, zeros_half, offset), kept_of()
        multiply(
            y, y_pitch, x, x_pitch, UINT64(0), size, UINT64(1), choices, chosen, many, width, batches, plus, plus_pitch,
            (bias, of_bias, bias_step, bias_half), mode, team, teams, more,
        )  # fmt: skip

    return Kernel(name, multiply_codes, 31, bounds=(32 * BLOCK_WARPS, 2))


def _float_product(name: str, rows: Format) -> Kernel:
    """Make the same for e2m1, each 32 of which share a power of two. Matrix rows may be apart.

    Its words are those of products of 16 bits, see :mod:`tpplan.decoder.fast.kernels.experts`, and one behind them:

    - scales: where that of 16 bytes of codes is, less a 16th of where these are. It is the exponent of a float32.

    Args:
        name: of the kernel.
        rows: what these are made of.
    """
    elements = CODES["e2m1"]
    products, factor = products_of(elements, *rows.emit), float(elements.factor)

    @device_function
    def exponent_at(place: Any, scales: Any) -> Any:
        return UINT32(ptx.load_8(scales + (place >> UINT64(4))))

    @device_function
    def ask_rows(address: Any, column: Any, more: Any) -> Any:
        """Ask for codes and scales."""
        pitch, half, scales = more
        place = address + UINT64(column >> UINT32(1))
        further = place + half
        one, other = exponent_at(place, scales), exponent_at(place + pitch, scales)
        third, fourth = exponent_at(further, scales), exponent_at(further + pitch, scales)
        return ask(place, pitch, half), (one, other, third, fourth)

    @device_function
    def power(exponent: Any) -> Any:
        return ptx.float_of(UINT32(exponent << UINT32(23)))

    @device_function
    def use(totals: Any, found: Any, address: Any, by: Any, _: Any) -> Any:
        """Add what 16 bytes of four matrix rows and the columns of a row make, so many times."""
        w, scales = found
        sums, by = products(w, address, None), by * FLOAT32(factor)
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
