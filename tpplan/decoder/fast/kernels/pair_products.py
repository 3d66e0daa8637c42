"""Products of pairs with their experts' matrices, by warps that share out the columns of four matrix rows at a time.

A row and one of its experts are a pair. Pairs that have an expert in common go through its matrices at the same time,
so that all but the first find them in the cache. How a lane asks for 16 bytes of matrix rows, and multiplies them, is
told by who makes a kernel. Everything is added in float32, in a fixed order.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

from tpplan.decoder.fast.kernels.dot_products import over_eight, spread, zeros
from tpplan.decoder.fast.kernels.finishing import ADD, finish_of
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64, cuda

#: Experts that a row can choose.
MOST_CHOSEN = 32
#: Warps of a block, of which a multiprocessor shall have registers for two.
BLOCK_WARPS = 8

#: Batches whose sums a warp keeps until they are stored.
_KEPT = 32
#: Lengths of an array in shared memory.
_SUMS = BLOCK_WARPS * _KEPT * 4


@frozen
class Format:
    """What elements of rows and results of 16 bits are.

    Attributes:
        first: makes a float32 of the first element in 32 bits.
        both: makes 32 bits of two float32.
        emit: writes what the former does, and the same of the second element, for intrinsics.
    """

    first: Any
    both: Any
    emit: tuple[ptx.Emitter, ptx.Emitter]


FORMATS = {
    "bf16": Format(ptx.low_bf16, ptx.two_bf16, (ptx.emit_low_bf16, ptx.emit_high_bf16)),
    "f16": Format(ptx.low_f16, ptx.two_f16, (ptx.emit_low_f16, ptx.emit_high_f16)),
}


def _finish_of(rows: Format) -> Any:
    """Make what adds up what the warps of a team have found for some batches, and stores what comes of it."""
    store = finish_of(rows.first, rows.both)

    @device_function
    def finish(
        sums: Any, base: Any, warps: Any, index: Any, step: Any, slots: Any, batch: Any, stride: Any, batches: Any,
        group: Any, y: Any, y_pitch: Any, plus: Any, plus_pitch: Any, mode: Any,
    ) -> None:  # fmt: skip
        bits = UINT64(2) if mode == ADD else UINT64(1)  # four sums of a batch, or two gates and what they are for
        while index < slots << bits:
            slot = index >> bits
            value = index - (slot << bits)
            place, number = base + slot * UINT64(4) + value, batch + slot * stride
            s = t = FLOAT32(0)
            i = UINT64(0)
            while i < warps:
                s += sums[place]
                if mode != ADD:
                    t += sums[place + UINT64(2)]
                place += UINT64(4 * _KEPT)
                i += UINT64(1)
            if number < batches:
                store(s, t, group, (number << bits) + value, y, y_pitch, plus, plus_pitch, UINT64(0), mode)
            index += step

    return finish


@device_function
def _apart(count: Any, width: Any) -> Any:
    """Return a quotient and what is left."""
    quotient = UINT32(count // width)
    return quotient, UINT32(count - quotient * width)


@device_function
def _onward(pair: Any, column: Any, pairs: Any, columns: Any, width: Any) -> Any:
    """Return the place that is so many pairs and columns further on."""
    pair, column = UINT32(pair + pairs), UINT32(column + columns)
    return (UINT32(pair + UINT32(1)), UINT32(column - width)) if column >= width else (pair, column)


def pair_products(lane_columns: int, ask: Any, use: Any, rows_of: Format) -> Any:  # noqa: C901, PLR0915 (a kernel)
    """Make what multiplies pairs' rows by their experts' matrices, and is all of a kernel.

    The second dimension of its grid are groups of pairs: of one, for gates and what they are for, or all of a row,
    whose products are weighed and added. It takes:

    - y, its pitch: address, and bytes from one group's to the next.
    - x, its pitch: address, and bytes from one row, or where products are added from one pair, to the next.
    - matrix, of_expert, of_row: where the experts' matrices begin, and how far it is from one to the next and from one
      row of it to the next, as ``ask`` counts.
    - choices, chosen: address of what tells of each row weights and experts, see ``experts_choose``; and how many.
    - many: pairs of a group; with biases up to eight.
    - width: columns of a matrix.
    - batches: of a group, each of which is four rows of a matrix: two gates and what they are for, or four.
    - plus, its pitch: as y, what is added; or 0.
    - biases: address of those of the first expert, or 0; bytes from one expert's to the next, from one of these to the
      next, and to that of the second two rows of four. They are added to the products.
    - mode: what follows the product.
    - team, teams: warps that share a batch, and such of a block.
    - more: for ``ask`` and ``use``.

    Args:
        lane_columns: of a matrix row, that a lane reads at a time: 16 bytes.
        ask: asks for these of a batch, given where its first row begins, the first column, and ``more``.
        use: adds to four sums what they and a row make, given the sums, what ``ask`` returned, the address of the row's
            columns, what the products are multiplied by, and ``more``.
        rows_of: what these and results are made of.
    """
    finish, first_of = _finish_of(rows_of), rows_of.first

    @device_function
    def look_up(tables: Any, thread: Any, first: Any, matrix: Any, of_expert: Any, x: Any, x_pitch: Any,
                choices: Any, chosen: Any, mode: Any) -> None:  # fmt: skip
        """Find a pair's matrices, its row, and how much it counts."""
        matrices, rows, factors = tables
        pair = first + UINT64(thread)
        row = UINT64(UINT32(pair) // UINT32(chosen))
        at = choices + UINT64(4) * (pair + row * chosen)
        factor, expert = ptx.float_of(ptx.load_32(at)), ptx.float_of(ptx.load_32(at + UINT64(4) * chosen))
        matrices[thread] = matrix + UINT64(UINT32(expert)) * of_expert
        rows[thread] = x + (pair if mode == ADD else row) * x_pitch
        factors[thread] = factor if mode == ADD else FLOAT32(1)

    @device_function
    def look_up_bias(tables: Any, lane: Any, first: Any, pairs: Any, choices: Any, chosen: Any, biases: Any) -> None:
        """Find where a lane's bias of the first batch is: of one of eight pairs, for one of four rows; or 0."""
        (factors, places), (bias, of_expert, step, half) = tables, biases
        own, value = lane & UINT32(7), UINT64(lane >> UINT32(3))
        places[lane] = UINT64(0)
        if lane >= pairs:
            factors[lane] = FLOAT32(0)
        if bias != UINT64(0) and own < pairs:
            pair = first + UINT64(own)
            row = UINT64(UINT32(pair) // UINT32(chosen))
            expert = ptx.float_of(ptx.load_32(choices + UINT64(4) * (pair + (row + UINT64(1)) * chosen)))
            place = bias + UINT64(UINT32(expert)) * of_expert
            places[lane] = place + (value & UINT64(1)) * step + (value >> UINT64(1)) * half

    @device_function
    def ask_bias(places: Any, lane: Any, is_asked: Any, batch: Any, step: Any, mode: Any) -> Any:
        """Ask for a lane's bias of a batch, which is 0 if there is none."""
        place = places[lane] if is_asked else UINT64(0)
        return ptx.load_16_if(place + (UINT64(batch) * step << (UINT64(2) if mode == ADD else UINT64(1))), place)

    @device_function
    def multiply(  # noqa: C901, PLR0915 (the kernel)
        y: Any, y_pitch: Any, x: Any, x_pitch: Any, matrix: Any, of_expert: Any, of_row: Any, choices: Any, chosen: Any,
        many: Any, width: Any, batches: Any, plus: Any, plus_pitch: Any, biases: Any, mode: Any, team: Any, teams: Any,
        more: Any,
    ) -> None:  # fmt: skip
        sums = cuda.shared.array(_SUMS, FLOAT32)
        matrices, rows = cuda.shared.array(MOST_CHOSEN, UINT64), cuda.shared.array(MOST_CHOSEN, UINT64)
        factors, places = cuda.shared.array(MOST_CHOSEN, FLOAT32), cuda.shared.array(MOST_CHOSEN, UINT64)
        thread, group = UINT32(cuda.threadIdx.x), UINT64(cuda.blockIdx.y)
        lane, warp = UINT32(thread & UINT32(31)), UINT32(thread >> UINT32(5))
        mine, member = _apart(warp, UINT32(team))
        # Columns of all pairs of a group follow each other: a lane has some, and as many that are a step behind.
        pairs, columns, step = UINT32(many), UINT32(width), UINT32(UINT32(team) * UINT32(32 * lane_columns))
        begin, twice = UINT32((member * UINT32(32) + lane) * UINT32(lane_columns)), UINT32(step + step)
        p0, c0 = _apart(begin, columns)
        p1, c1 = _apart(UINT32(begin + step), columns)
        pairs_on, columns_on = _apart(twice, columns)
        rounds, _ = _apart(UINT32(pairs * columns + twice - UINT32(1)), twice)
        of_batch = of_row * (UINT64(4) if mode == ADD else UINT64(2))
        count, lead = UINT32(batches), UINT32(UINT32(cuda.blockIdx.x) * UINT32(teams))
        stride, phase = UINT32(UINT32(cuda.gridDim.x) * UINT32(teams)), UINT32(lead + mine)
        offset = UINT64(min(phase, UINT32(count - UINT32(1)))) * of_batch
        last = UINT32(pairs - UINT32(1))

        ptx.after_earlier_with_next()
        if thread < pairs:
            tables = matrices, rows, factors
            look_up(tables, thread, group * many, matrix, of_expert, x, x_pitch, choices, chosen, mode)
        if warp == UINT32(0):
            look_up_bias((factors, places), lane, group * many, pairs, choices, chosen, biases)
        cuda.syncthreads()
        w = ask(matrices[min(p0, last)] + offset, c0, more)
        v = ask(matrices[min(p1, last)] + offset, c1, more)
        bias = ask_bias(places, lane, member == UINT32(0) and phase < count, phase, biases[2], mode)
        totals, done, slots = zeros(), UINT32(0), UINT32(0)
        p, c, q, d = p0, c0, p1, c1  # where both are
        while lead < count:
            done = UINT32(done + UINT32(1))
            ends = done == rounds
            ahead = UINT32(lead + stride) if ends else lead
            offset = UINT64(UINT32(ahead + mine)) * of_batch
            until = pairs if UINT32(ahead + mine) < count else UINT32(0)
            if p < pairs:
                totals = use(totals, w, rows[p] + UINT64(c) * UINT64(2), factors[p], more)
            p, c = (p0, c0) if ends else _onward(p, c, pairs_on, columns_on, columns)
            if p < until:
                w = ask(matrices[p] + offset, c, more)
            if q < pairs:
                totals = use(totals, v, rows[q] + UINT64(d) * UINT64(2), factors[q], more)
            q, d = (p1, c1) if ends else _onward(q, d, pairs_on, columns_on, columns)
            if q < until:
                v = ask(matrices[q] + offset, d, more)
            if ends:
                s = over_eight(spread(totals, UINT64(lane)) + factors[lane & UINT32(7)] * first_of(bias))
                if lane & UINT32(7) == UINT32(0):
                    sums[UINT32((warp * UINT32(_KEPT) + slots) * UINT32(4) + (lane >> UINT32(3)))] = s
                bias = ask_bias(places, lane, member == UINT32(0) and until, UINT32(ahead + mine), biases[2], mode)
                totals, done, lead = zeros(), UINT32(0), ahead
                slots = UINT32(slots + UINT32(1))
                if slots == UINT32(_KEPT) or lead >= count:
                    cuda.syncthreads()
                    finish(
                        sums, UINT64(mine) * team * UINT64(4 * _KEPT), team, UINT64(member * UINT32(32) + lane),
                        team * UINT64(32), UINT64(slots), UINT64(phase), UINT64(stride), batches, group, y, y_pitch,
                        plus, plus_pitch, mode,
                    )  # fmt: skip
                    phase, slots = UINT32(lead + mine), UINT32(0)
                    if lead < count:
                        cuda.syncthreads()

    return multiply
