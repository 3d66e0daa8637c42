"""Kernels for the experts of few rows: which experts rows are sent to, and products with these experts' matrices.

A product reads the matrices where they are, in the time that reading them takes: a lane has 16 bytes of four matrix
rows at a time, see :mod:`tpplan.decoder.fast.kernels.pair_products`.
"""

from __future__ import annotations

from typing import Any

from tpplan.decoder.fast.kernels.dot_products import ask, over_warp
from tpplan.decoder.fast.kernels.grouped_limits import MOST_EXPERTS
from tpplan.decoder.fast.kernels.lane_products import of_halves, products_of
from tpplan.decoder.fast.kernels.pair_products import BLOCK_WARPS, FORMATS, Format, pair_products
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64, cuda, libdevice

#: Ranks of no experts: of those that are chosen already, and of those that cannot be.
_TAKEN, _MINUS_INFINITY = 0xFFFFFFFF, 0xFF800000
_SIGN, _ALL = 0x80000000, 0xFFFFFFFF
_WARP = 32


@device_function
def _key(rank: Any) -> Any:
    """Return what is larger for larger ranks, and largest for NaN; 0 for what is taken."""
    bits = ptx.bits_of(rank + FLOAT32(0))  # zeros are equal
    bits = UINT32(_TAKEN) if ptx.bits_of(rank) == UINT32(_TAKEN) else bits
    return UINT32(bits ^ UINT32(_ALL if bits & UINT32(_SIGN) else _SIGN))


@device_function
def _first_of_warp(key: Any, number: Any) -> Any:
    """Return the least number, below 2 ** 31, of those with the largest key of all lanes."""
    is_largest = key == ptx.largest_of_warp(key)
    return UINT32(UINT32(_ALL) - ptx.largest_of_warp(UINT32(UINT32(_ALL) - number) if is_largest else UINT32(0)))


@device_function
def _largest_over_warp(value: Any) -> Any:
    distance = UINT32(_WARP // 2)
    while distance:
        value = ptx.larger(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, distance))
        distance >>= UINT32(1)
    return value


@device_function
def _own_best(ranks: Any, lane: Any, experts: Any) -> Any:
    """Return the largest key of a lane's experts, and the first expert that has it."""
    key, best, expert = UINT32(0), lane, lane
    while expert < experts:
        other = _key(ranks[expert])
        if other > key:
            key, best = other, expert
        expert = UINT32(expert + UINT32(_WARP))
    return key, best


@device_function
def _leave_groups(ranks: Any, lane: Any, experts: Any, groups: Any, eligible: Any, best: Any) -> None:
    """Make the ranks of all experts minus infinity whose groups' best ones, one or two, do not add up to enough."""
    size = UINT32(experts // groups)
    first, second, start = FLOAT32(float("-inf")), FLOAT32(float("-inf")), UINT32(lane * size)
    expert = start
    while lane < groups and expert < UINT32(start + size):
        rank = ranks[expert]
        second = ptx.larger(second, min(first, rank))
        first = ptx.larger(first, rank)
        expert = UINT32(expert + UINT32(1))
    key = _key(first + second if best > UINT32(1) else first) if lane < groups else UINT32(0)
    index = UINT32(0)
    while index < eligible:
        if _first_of_warp(key, lane) == lane:
            key = UINT32(0)
        index = UINT32(index + UINT32(1))
    if lane < groups and key:
        expert = start
        while expert < UINT32(start + size):
            ranks[expert] = ptx.float_of(UINT32(_MINUS_INFINITY))
            expert = UINT32(expert + UINT32(1))


def _choose(name: str, load: Any) -> Kernel:  # noqa: C901, PLR0915 (the kernel)
    """Make a kernel that routes rows to experts, see :func:`tpplan.decoder.layer.experts.choose`.

    A block is a warp and takes a row, of at most :data:`tpplan.decoder.fast.kernels.grouped_limits.MOST_EXPERTS`
    experts. Its words:

    - logits, and the bytes from one row to the next.
    - experts.
    - correction: the selection bias in float32, or 0.
    - out, out_pitch: where the result goes: of a row weights, then numbers of experts, all in float32.
    - chosen: experts of a row.
    - sigmoid: whether scores are that of logits, instead of their softmax.
    - groups, eligible, best: of :class:`tpplan.decoder.model.router.Router`.
    - normalised, least, factor: likewise, the last two as bits of float32.

    Args:
        name: of the kernel.
        load: reads the logit of an expert of a row.
    """

    def choose(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912
        logits, pitch, experts, correction, out, out_pitch, chosen, sigmoid, groups, eligible, best, normalised, least,
        factor,
    ):  # fmt: skip
        ptx.after_earlier_with_next()
        ranks, scores = cuda.shared.array(MOST_EXPERTS, FLOAT32), cuda.shared.array(MOST_EXPERTS, FLOAT32)
        row, lane, count = UINT64(cuda.blockIdx.x), UINT32(cuda.threadIdx.x), UINT32(experts)
        logits += row * pitch
        peak, total, expert = FLOAT32(float("-inf")), FLOAT32(0), lane
        while expert < count:
            logit = load(logits, UINT64(expert))
            ranks[expert], peak = logit, ptx.larger(peak, logit)
            expert = UINT32(expert + UINT32(_WARP))
        if sigmoid == UINT64(0):
            peak, expert = _largest_over_warp(peak), lane
            while expert < count:
                score = libdevice.expf(ranks[expert] - peak)
                scores[expert] = score
                total += score
                expert = UINT32(expert + UINT32(_WARP))
            total = over_warp(total)
        expert = lane
        while expert < count:
            score = FLOAT32(1) / (FLOAT32(1) + libdevice.expf(-ranks[expert])) if sigmoid else scores[expert] / total
            scores[expert] = score
            if correction:
                ranks[expert] = score + ptx.float_of(ptx.load_32(correction + UINT64(4) * UINT64(expert)))
            elif sigmoid or best > UINT64(1):
                ranks[expert] = score  # a softmax ranks experts as its logits do
            expert = UINT32(expert + UINT32(_WARP))
        if eligible < groups:
            cuda.syncwarp()
            _leave_groups(ranks, lane, count, UINT32(groups), UINT32(eligible), UINT32(best))
            cuda.syncwarp()
        key, own = _own_best(ranks, lane, count)
        weight, number, index = FLOAT32(0), UINT32(0), UINT32(0)
        while index < UINT32(chosen):
            found = _first_of_warp(key, own)
            if index == lane:
                number = found
            if found == own:
                ranks[own] = ptx.float_of(UINT32(_TAKEN))
                key, own = _own_best(ranks, lane, count)
            index = UINT32(index + UINT32(1))
        cuda.syncwarp()
        if lane < UINT32(chosen):
            weight = scores[number]
        if normalised:
            weight = weight / ptx.larger(over_warp(weight), ptx.float_of(UINT32(least)))
        if lane < UINT32(chosen):
            to = out + row * out_pitch + UINT64(4) * UINT64(lane)
            ptx.store_32(to, ptx.bits_of(weight * ptx.float_of(UINT32(factor))))
            ptx.store_32(to + UINT64(4) * chosen, ptx.bits_of(FLOAT32(number)))

    return Kernel(name, choose, 14)


def _loading(first: Any) -> Any:
    """Make what reads a logit of 16 bits."""

    @device_function
    def load(row: Any, expert: Any) -> Any:
        return first(UINT32(ptx.load_16(row + UINT64(2) * expert)))

    return load


@device_function
def _load_float(row: Any, expert: Any) -> Any:
    return ptx.float_of(ptx.load_32(row + UINT64(4) * expert))


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


EXPERTS_CHOOSE_BF16 = _choose("experts_choose_bf16", _loading(ptx.low_bf16))
EXPERTS_CHOOSE_F16 = _choose("experts_choose_f16", _loading(ptx.low_f16))
EXPERTS_CHOOSE_F32 = _choose("experts_choose_f32", _load_float)
EXPERTS_PRODUCT_BF16 = _product("experts_product_bf16", FORMATS["bf16"])
EXPERTS_PRODUCT_F16 = _product("experts_product_f16", FORMATS["f16"])
