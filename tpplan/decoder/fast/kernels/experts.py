"""Kernels for the experts of few rows: which experts rows are sent to, and products with these experts' matrices.

A product reads the matrices where they are, in the time that reading them takes: a lane has 16 bytes of four matrix
rows at a time, see :mod:`tpplan.decoder.fast.kernels.pair_products`.
"""

from __future__ import annotations

from typing import Any

from tpplan.decoder.fast.kernels.dot_products import ask, over_warp
from tpplan.decoder.fast.kernels.lane_products import of_halves, products_of
from tpplan.decoder.fast.kernels.pair_products import BLOCK_WARPS, FORMATS, Format, pair_products
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64, cuda, libdevice

#: Experts whose scores a warp takes at a time: each lane those of four.
_FEW = 128

#: Of 16 bits: all, and the sign; and what experts are counted down from, so that no key is the largest number.
_ALL, _SIGN, _LAST = 0xFFFF, 0x8000, 0xFFFE


@device_function
def _key(bits: Any, expert: Any, count: Any) -> Any:
    """Return what is larger for larger scores, and of equal ones for the first expert; 0 for none."""
    bits = UINT32(0) if bits == UINT32(_SIGN) else bits  # zeros are equal
    ordered = bits ^ UINT32(_ALL if bits & UINT32(_SIGN) else _SIGN)
    return UINT32((ordered << UINT32(16)) | (UINT32(_LAST) - expert)) if expert < count else UINT32(0)


@device_function
def _keys(scores: Any, expert: Any, count: Any) -> Any:
    """Return those of four experts of a lane."""
    e0, e1, e2, e3 = expert, UINT32(expert + UINT32(32)), UINT32(expert + UINT32(64)), UINT32(expert + UINT32(96))
    last = UINT32(count - UINT32(1))
    b0 = ptx.load_16(scores + UINT64(2) * UINT64(min(e0, last)))
    b1 = ptx.load_16(scores + UINT64(2) * UINT64(min(e1, last)))
    b2 = ptx.load_16(scores + UINT64(2) * UINT64(min(e2, last)))
    b3 = ptx.load_16(scores + UINT64(2) * UINT64(min(e3, last)))
    first = _key(UINT32(b0), e0, count), _key(UINT32(b1), e1, count)
    return *first, _key(UINT32(b2), e2, count), _key(UINT32(b3), e3, count)


@device_function
def _below(key: Any, limit: Any) -> Any:
    return key if key < limit else UINT32(0)


@device_function
def _largest(keys: Any, limit: Any) -> Any:
    """Return the largest of four keys below a limit, or 0."""
    return max(_below(keys[0], limit), _below(keys[1], limit), _below(keys[2], limit), _below(keys[3], limit))


def _choose(name: str, first: Any) -> Kernel:  # noqa: C901 (four functions)
    """Make a kernel that finds the largest scores of each row, and the parts of their experts by softmax.

    A block is a warp and takes a row, of at most :data:`tpplan.decoder.fast.kernels.grouped_limits.MOST_EXPERTS`
    experts, of which a lane has 16. Its words: scores and the bytes from one row to the next; experts; where the result
    goes, the bytes from one row to the next; experts that are chosen; and whether their weights shall add up to 1. The
    result of a row is weights, then numbers of experts, all in float32.

    Args:
        name: of the kernel.
        first: makes a float32 of the first element in 32 bits.
    """

    @device_function
    def score(key: Any) -> Any:
        ordered = key >> UINT32(16)
        return first(UINT32(ordered ^ UINT32(_SIGN if ordered & UINT32(_SIGN) else _ALL)))

    @device_function
    def share(key: Any, peak: Any) -> Any:
        """Return the exponential of what a score is less than the largest."""
        return libdevice.expf(score(key) - peak) if key else FLOAT32(0)

    @device_function
    def shares(keys: Any, peak: Any) -> Any:
        return (share(keys[0], peak) + share(keys[1], peak)) + (share(keys[2], peak) + share(keys[3], peak))

    def choose(scores, pitch, experts, out, out_pitch, chosen, normalised):  # type: ignore[no-untyped-def]
        ptx.after_earlier_with_next()
        row, lane, count = UINT64(cuda.blockIdx.x), UINT32(cuda.threadIdx.x), UINT32(experts)
        scores += row * pitch
        none = UINT32(0), UINT32(0), UINT32(0), UINT32(0)
        k0, k1, k2, k3 = _keys(scores, lane, count), none, none, none
        if count > UINT32(_FEW):
            k1 = _keys(scores, UINT32(lane + UINT32(_FEW)), count)
            k2 = _keys(scores, UINT32(lane + UINT32(2 * _FEW)), count)
            k3 = _keys(scores, UINT32(lane + UINT32(3 * _FEW)), count)
        limit, own, top, index = UINT32(0xFFFFFFFF), UINT32(0), UINT32(0), UINT32(0)
        while index < UINT32(chosen):  # the next is the largest below the one before: no two are equal
            best = _largest(k0, limit)
            if count > UINT32(_FEW):
                best = max(best, _largest(k1, limit), _largest(k2, limit), _largest(k3, limit))
            limit = ptx.largest_of_warp(UINT32(best))
            if index == UINT32(0):
                top = limit
            if index == lane:
                own = limit
            index = UINT32(index + UINT32(1))
        peak = score(top)
        total = shares(k0, peak)
        if count > UINT32(_FEW):
            total += shares(k1, peak) + (shares(k2, peak) + shares(k3, peak))
        weight = share(own, peak) / over_warp(total)
        if normalised:
            weight = weight / over_warp(weight)
        if lane < UINT32(chosen):
            to = out + row * out_pitch + UINT64(4) * UINT64(lane)
            ptx.store_32(to, ptx.bits_of(weight))
            expert = UINT32(UINT32(_LAST) - (own & UINT32(_ALL)))
            ptx.store_32(to + UINT64(4) * chosen, ptx.bits_of(FLOAT32(expert)))

    return Kernel(name, choose, 7)


def _product(name: str, rows: Format) -> Kernel:
    """Make a kernel that multiplies pairs' rows by their experts' matrices.

    Its words are those of :func:`tpplan.decoder.fast.kernels.pair_products.pair_products`; of the experts' matrices it
    is told the address, and the bytes from one to the next, from one row of it to the next, and to the second two rows
    of
    four: what a gate is for, or the second next.

    Args:
        name: of the kernel.
        rows: what these and matrices are made of.
    """
    elements = of_halves(*rows.emit)
    products = products_of(elements, *rows.emit)

    @device_function
    def ask_rows(address: Any, column: Any, more: Any) -> Any:
        return ask(address + UINT64(column) * UINT64(2), more[0], more[1])

    @device_function
    def use(totals: Any, w: Any, address: Any, factor: Any, _: Any) -> Any:
        """Add what 16 bytes of a row and of four matrix rows make, so many times."""
        a, b, c, d = products(w, address, None)
        return totals[0] + factor * a, totals[1] + factor * b, totals[2] + factor * c, totals[3] + factor * d

    multiply = pair_products(elements.columns, ask_rows, use, rows)

    def product(  # type: ignore[no-untyped-def]
        y, y_pitch, x, x_pitch, weight, of_expert, pitch, half, choices, chosen, many, width, batches, plus, plus_pitch,
        bias, of_bias, bias_step, bias_half, mode, team, teams,
    ):  # fmt: skip
        multiply(
            y, y_pitch, x, x_pitch, weight, of_expert, pitch, choices, chosen, many, width, batches, plus, plus_pitch,
            (bias, of_bias, bias_step, bias_half), mode, team, teams, (pitch, half),
        )  # fmt: skip

    return Kernel(name, product, 22, bounds=(32 * BLOCK_WARPS, 2))


EXPERTS_CHOOSE_BF16 = _choose("experts_choose_bf16", ptx.low_bf16)
EXPERTS_CHOOSE_F16 = _choose("experts_choose_f16", ptx.low_f16)
EXPERTS_PRODUCT_BF16 = _product("experts_product_bf16", FORMATS["bf16"])
EXPERTS_PRODUCT_F16 = _product("experts_product_f16", FORMATS["f16"])
