"""Kernels for the experts of few rows: which experts rows are sent to, and products with these experts' matrices.

A row and one of its experts are a pair. A product reads the matrices where they are, in the time that reading them
takes: a team of warps shares out the columns of four matrix rows at a time, as in
:mod:`tpplan.decoder.dot_products`, whose ways of asking and adding these are. Pairs that have an expert in common go
through its matrices at the same time, so that all but the first find them in the cache. Everything is added in float32,
in a fixed order.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import libdevice, types

from tpplan.decoder.dot_products import ask, collected, dot, eight_of, over_warp, zeros
from tpplan.exec import ptx
from tpplan.exec.finishing import ADD, finish_of
from tpplan.exec.kernels import Kernel, device_function

#: Experts that a row can choose from, and that it can choose: a lane has 16 of the ones, and one of the others.
MOST_EXPERTS, MOST_CHOSEN = 512, 32

#: Warps of a block, of which a multiprocessor shall have registers for two.
BLOCK_WARPS = 8
#: Columns of a lane: 16 bytes.
_LANE = 8
#: Batches whose sums a warp keeps until they are stored.
_KEPT = 32
#: Lengths of an array in shared memory.
_SUMS = BLOCK_WARPS * _KEPT * 4
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

    A block is a warp and takes a row. Its words: scores and the bytes from one row to the next; experts; where the
    result goes, the bytes from one row to the next; experts that are chosen; and whether their weights shall add up to
    1. The result of a row is weights, then numbers of experts, all in float32.

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


def _finish_of(first: Any, both: Any) -> Any:
    """Make what adds up what the warps of a team have found for some batches, and stores what comes of it.

    Args:
        first: makes a float32 of the first element in 32 bits.
        both: makes 32 bits of two float32.
    """
    store = finish_of(first, both)

    @device_function
    def finish(
        sums: Any, base: Any, warps: Any, index: Any, step: Any, slots: Any, batch: Any, stride: Any, batches: Any,
        group: Any, y: Any, y_pitch: Any, plus: Any, plus_pitch: Any, mode: Any,
    ) -> None:  # fmt: skip
        bits = _WORD(2) if mode == ADD else _WORD(1)  # four sums of a batch, or two gates and what they are for
        while index < slots << bits:
            slot = index >> bits
            value = index - (slot << bits)
            place, number = base + slot * _WORD(4) + value, batch + slot * stride
            s = t = _FLOAT(0)
            i = _WORD(0)
            while i < warps:
                s += sums[place]
                if mode != ADD:
                    t += sums[place + _WORD(2)]
                place += _WORD(4 * _KEPT)
                i += _WORD(1)
            if number < batches:
                store(s, t, group, (number << bits) + value, y, y_pitch, plus, plus_pitch, _WORD(0), mode)
            index += step

    return finish


@device_function
def _apart(count: Any, width: Any) -> Any:
    """Return a quotient and what is left."""
    quotient = _BITS(count // width)
    return quotient, _BITS(count - quotient * width)


@device_function
def _onward(pair: Any, column: Any, pairs: Any, columns: Any, width: Any) -> Any:
    """Return the place that is so many pairs and columns further on."""
    pair, column = _BITS(pair + pairs), _BITS(column + columns)
    return (_BITS(pair + _BITS(1)), _BITS(column - width)) if column >= width else (pair, column)


def _product(name: str, first: Any, second: Any, both: Any) -> Kernel:  # noqa: C901, PLR0915 (the kernel)
    """Make a kernel that multiplies pairs' rows by their experts' matrices.

    The second dimension of its grid are groups of pairs: of one, for gates and what they are for, or all of a row,
    whose products are weighed and added. Its words:

    - y, its pitch: address, and bytes from one group's to the next.
    - x, its pitch: address, and bytes from one row, or where products are added from one pair, to the next.
    - weight: address of the experts' matrices; bytes from one to the next, from one row of it to the next, and to the
      second two rows of four: what a gate is for, or the second next.
    - choices, chosen: address of what tells of each row weights and experts, see ``experts_choose``; and how many.
    - many: pairs of a group.
    - width: columns of a matrix.
    - batches: of a group, each of which is four rows of a matrix: two gates and what they are for, or four.
    - plus, its pitch: as y, what is added; or 0.
    - mode: what follows the product.
    - team, teams: warps that share a batch, and such of a block.

    Args:
        name: of the kernel.
        first: makes a float32 of the first element in 32 bits.
        second: the same of the second.
        both: makes 32 bits of two float32.
    """
    eight, collect, finish = eight_of(first, second), collected(1), _finish_of(first, both)

    @device_function
    def use(totals: Any, w: Any, address: Any, factor: Any) -> Any:
        """Add what 16 bytes of a row and of four matrix rows make, so many times."""
        x, none = eight(ptx.load_128(address)), _FLOAT(0)
        return (
            totals[0] + factor * dot(none, eight(w[0]), x),
            totals[1] + factor * dot(none, eight(w[1]), x),
            totals[2] + factor * dot(none, eight(w[2]), x),
            totals[3] + factor * dot(none, eight(w[3]), x),
        )

    @device_function
    def look_up(tables: Any, thread: Any, first: Any, weight: Any, of_expert: Any, x: Any, x_pitch: Any,
                choices: Any, chosen: Any, mode: Any) -> None:  # fmt: skip
        """Find a pair's matrices, its row, and how much it counts."""
        matrices, rows, factors = tables
        pair = first + _WORD(thread)
        row = _WORD(_BITS(pair) // _BITS(chosen))
        at = choices + _WORD(4) * (pair + row * chosen)
        factor, expert = ptx.float_of(ptx.load_32(at)), ptx.float_of(ptx.load_32(at + _WORD(4) * chosen))
        matrices[thread] = weight + _WORD(_BITS(expert)) * of_expert
        rows[thread] = x + (pair if mode == ADD else row) * x_pitch
        factors[thread] = factor if mode == ADD else _FLOAT(1)

    def multiply(  # type: ignore[no-untyped-def] # noqa: C901, PLR0915
        y, y_pitch, x, x_pitch, weight, of_expert, pitch, half, choices, chosen, many, width, batches, plus, plus_pitch,
        mode, team, teams,
    ):  # fmt: skip
        sums = cuda.shared.array(_SUMS, _FLOAT)
        matrices, rows = cuda.shared.array(MOST_CHOSEN, _WORD), cuda.shared.array(MOST_CHOSEN, _WORD)
        factors = cuda.shared.array(MOST_CHOSEN, _FLOAT)
        thread, group = _BITS(cuda.threadIdx.x), _WORD(cuda.blockIdx.y)
        lane, warp = _BITS(thread & _BITS(31)), _BITS(thread >> _BITS(5))
        mine, member = _apart(warp, _BITS(team))
        # Columns of all pairs of a group follow each other: a lane's first are 8 of them, and 8 that are a step behind.
        pairs, columns, step = _BITS(many), _BITS(width), _BITS(_BITS(team) * _BITS(32 * _LANE))
        begin, twice = _BITS((member * _BITS(32) + lane) * _BITS(_LANE)), _BITS(step + step)
        p0, c0 = _apart(begin, columns)
        p1, c1 = _apart(_BITS(begin + step), columns)
        pairs_on, columns_on = _apart(twice, columns)
        rounds, _ = _apart(_BITS(pairs * columns + twice - _BITS(1)), twice)
        of_batch = pitch * (_WORD(4) if mode == ADD else _WORD(2))
        lead, stride = _WORD(cuda.blockIdx.x) * teams, _WORD(cuda.gridDim.x) * teams
        phase, offset = lead + _WORD(mine), min(lead + _WORD(mine), batches - _WORD(1)) * of_batch
        last = _BITS(pairs - _BITS(1))

        ptx.after_earlier()
        if thread < pairs:
            tables = matrices, rows, factors
            look_up(tables, thread, group * many, weight, of_expert, x, x_pitch, choices, chosen, mode)
        cuda.syncthreads()
        w = ask(matrices[min(p0, last)] + offset + _WORD(c0) * _WORD(2), pitch, half)
        v = ask(matrices[min(p1, last)] + offset + _WORD(c1) * _WORD(2), pitch, half)
        totals, done, slots = zeros(), _BITS(0), _WORD(0)
        p, c, q, d = p0, c0, p1, c1  # where both are
        while lead < batches:
            done = _BITS(done + _BITS(1))
            ends = done == rounds
            ahead = lead + stride if ends else lead
            offset = (ahead + _WORD(mine)) * of_batch
            until = pairs if ahead + _WORD(mine) < batches else _BITS(0)
            if p < pairs:
                totals = use(totals, w, rows[p] + _WORD(c) * _WORD(2), factors[p])
            p, c = (p0, c0) if ends else _onward(p, c, pairs_on, columns_on, columns)
            if p < until:
                w = ask(matrices[p] + offset + _WORD(c) * _WORD(2), pitch, half)
            if q < pairs:
                totals = use(totals, v, rows[q] + _WORD(d) * _WORD(2), factors[q])
            q, d = (p1, c1) if ends else _onward(q, d, pairs_on, columns_on, columns)
            if q < until:
                v = ask(matrices[q] + offset + _WORD(d) * _WORD(2), pitch, half)
            if ends:
                s = collect((totals,), _WORD(lane))
                if lane & _BITS(7) == _BITS(0):
                    sums[(_WORD(warp) * _WORD(_KEPT) + slots) * _WORD(4) + _WORD(lane >> _BITS(3))] = s
                totals, done, lead = zeros(), _BITS(0), ahead
                slots += _WORD(1)
                if slots == _WORD(_KEPT) or lead >= batches:
                    cuda.syncthreads()
                    finish(
                        sums, _WORD(mine) * team * _WORD(4 * _KEPT), team, _WORD(member * _BITS(32) + lane),
                        team * _WORD(32), slots, phase, stride, batches, group, y, y_pitch, plus, plus_pitch, mode,
                    )  # fmt: skip
                    phase, slots = lead + _WORD(mine), _WORD(0)
                    if lead < batches:
                        cuda.syncthreads()

    return Kernel(name, multiply, 18, bounds=(32 * BLOCK_WARPS, 2))


_BF16 = (ptx.low_bf16, ptx.high_bf16, ptx.two_bf16)
_F16 = (ptx.low_f16, ptx.high_f16, ptx.two_f16)
EXPERTS_CHOOSE_BF16 = _choose("experts_choose_bf16", ptx.low_bf16)
EXPERTS_CHOOSE_F16 = _choose("experts_choose_f16", ptx.low_f16)
EXPERTS_PRODUCT_BF16 = _product("experts_product_bf16", *_BF16)
EXPERTS_PRODUCT_F16 = _product("experts_product_f16", *_F16)
