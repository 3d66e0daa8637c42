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
from tpplan.exec.toolchain.language import cuda, libdevice, types

#: Experts whose scores a warp takes at a time: each lane those of four.
_FEW = 128

_WORD, _FLOAT, _BITS = types.uint64, types.float32, types.uint32
#: Of 16 bits: all, and the sign; and what experts are counted down from, so that no key is the largest number.
_ALL, _SIGN, _LAST = 0xFFFF, 0x8000, 0xFFFE


@device_function
def _key(bits: Any, expert: Any, count: Any) -> Any:
    """Return what is larger for larger scores, and of equal ones for the first expert; 0 for none."""
    bits = _BITS(0) if bits == _BITS(_SIGN) else bits  # zeros are equal
    ordered = bits ^ _BITS(_ALL if bits & _BITS(_SIGN) else _SIGN)
    return _BITS((ordered << _BITS(16)) | (_BITS(_LAST) - expert)) if expert < count else _BITS(0)


@device_function
def _keys(scores: Any, expert: Any, count: Any) -> Any:
    """Return those of four experts of a lane."""
    e0, e1, e2, e3 = expert, _BITS(expert + _BITS(32)), _BITS(expert + _BITS(64)), _BITS(expert + _BITS(96))
    last = _BITS(count - _BITS(1))
    b0 = ptx.load_16(scores + _WORD(2) * _WORD(min(e0, last)))
    b1 = ptx.load_16(scores + _WORD(2) * _WORD(min(e1, last)))
    b2 = ptx.load_16(scores + _WORD(2) * _WORD(min(e2, last)))
    b3 = ptx.load_16(scores + _WORD(2) * _WORD(min(e3, last)))
    first = _key(_BITS(b0), e0, count), _key(_BITS(b1), e1, count)
    return *first, _key(_BITS(b2), e2, count), _key(_BITS(b3), e3, count)


@device_function
def _below(key: Any, limit: Any) -> Any:
    return key if key < limit else _BITS(0)


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
        ordered = key >> _BITS(16)
        return first(_BITS(ordered ^ _BITS(_SIGN if ordered & _BITS(_SIGN) else _ALL)))

    @device_function
    def share(key: Any, peak: Any) -> Any:
        """Return the exponential of what a score is less than the largest."""
        return libdevice.expf(score(key) - peak) if key else _FLOAT(0)

    @device_function
    def shares(keys: Any, peak: Any) -> Any:
        return (share(keys[0], peak) + share(keys[1], peak)) + (share(keys[2], peak) + share(keys[3], peak))

    def choose(scores, pitch, experts, out, out_pitch, chosen, normalised):  # type: ignore[no-untyped-def]
        ptx.after_earlier_with_next()
        row, lane, count = _WORD(cuda.blockIdx.x), _BITS(cuda.threadIdx.x), _BITS(experts)
        scores += row * pitch
        none = _BITS(0), _BITS(0), _BITS(0), _BITS(0)
        k0, k1, k2, k3 = _keys(scores, lane, count), none, none, none
        if count > _BITS(_FEW):
            k1 = _keys(scores, _BITS(lane + _BITS(_FEW)), count)
            k2 = _keys(scores, _BITS(lane + _BITS(2 * _FEW)), count)
            k3 = _keys(scores, _BITS(lane + _BITS(3 * _FEW)), count)
        limit, own, top, index = _BITS(0xFFFFFFFF), _BITS(0), _BITS(0), _BITS(0)
        while index < _BITS(chosen):  # the next is the largest below the one before: no two are equal
            best = _largest(k0, limit)
            if count > _BITS(_FEW):
                best = max(best, _largest(k1, limit), _largest(k2, limit), _largest(k3, limit))
            limit = ptx.largest_of_warp(_BITS(best))
            if index == _BITS(0):
                top = limit
            if index == lane:
                own = limit
            index = _BITS(index + _BITS(1))
        peak = score(top)
        total = shares(k0, peak)
        if count > _BITS(_FEW):
            total += shares(k1, peak) + (shares(k2, peak) + shares(k3, peak))
        weight = share(own, peak) / over_warp(total)
        if normalised:
            weight = weight / over_warp(weight)
        if lane < _BITS(chosen):
            to = out + row * out_pitch + _WORD(4) * _WORD(lane)
            ptx.store_32(to, ptx.bits_of(weight))
            expert = _BITS(_BITS(_LAST) - (own & _BITS(_ALL)))
            ptx.store_32(to + _WORD(4) * chosen, ptx.bits_of(_FLOAT(expert)))

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
        return ask(address + _WORD(column) * _WORD(2), more[0], more[1])

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
