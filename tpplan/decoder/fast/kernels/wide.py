"""Kernels that multiply 17 (on sm_90: 9) to 64 rows by a matrix of codes, which are read and made floats once.

Tensor cores multiply, as in :mod:`tpplan.decoder.fast.kernels.packed`; on sm_90 by instructions of four warps, see
:mod:`tpplan.decoder.fast.kernels.warpgroup`, which pays from 9 rows on. A warp has 32 matrix rows, which are a strip,
and all rows; the warps of a block have strips that follow each other, and share what they have of the rows. All that a
step needs is copied into shared memory, without registers, while some steps before it are multiplied: loads that codes
wait for in registers would be waited for together with those of later steps, by the scoreboards of the machine.

The strips of a block's warps are a tile, of as many steps as there are of columns. Tiles follow each other, and every
block has as many of all their steps as others, or one more. Of a tile that several blocks have, each leaves in memory
what it has found, and of those with the same strip the last warp adds that up, in the blocks' order. None waits.

A stage of shared memory has what a block needs for a step:

- of every row, the columns of the step; vector 4 i + t of these is the one that lane t needs i-th, and of odd rows the
  other four of each eight come first, so that eight lanes read all banks; where four warps multiply together, they
  lie as that module says;
- of every warp, 512 bytes for each of the four matrix rows of its lanes: 16 bytes of codes for each lane, which alone
  copies and reads them;
- then scales and zeros: lane 4 g + t copies those of one of the four matrix rows that lanes 4 g to 4 g + 3 have; all
  four read those of all.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from attrs import frozen

from tpplan.decoder.fast.kernels import packed_codes, tiles, warpgroup
from tpplan.decoder.fast.kernels.finishing import ADD, activation
from tpplan.decoder.fast.kernels.packed_scales import mark_of_block, mark_of_row
from tpplan.decoder.fast.kernels.scale_kinds import BF16, F32
from tpplan.decoder.fast.kernels.wide_limits import (
    CODES,
    FEWEST,
    GROUP_FEWEST,
    GROUP_WARPS,
    LANES,
    OF_LANES,
    OF_WARP,
    SCALES,
    STRIP,
    VECTOR,
    WARPS,
)
from tpplan.decoder.fast.kernels.wide_products import products_of
from tpplan.decoder.fast.kernels.wide_sums import PER_EIGHT, begun, leave, stored, turned, with_last, with_left
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, copied_function
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64, cuda, intrinsic, ir, types

if TYPE_CHECKING:
    from tpplan.decoder.fast.kernels.packed_codes import Codes


#: Bits of a code, of which there are words.
_NIBBLE = 4


@frozen
class Scaling:
    """What kernels do with scales and zeros.

    Attributes:
        mark: returns the index of a matrix row's first scale, given the row, how many a row of blocks has, and the
            power of two that the rows of a block are, which matters of floats only.
        ask: copies the words that a scale and its zero are in, given where to, where all begin, its index, and the kind
            of scales.
        factors: returns four scales, and what is added to their codes' floats, each twice in 32 bits; given where in
            shared memory they are, the marks of their matrix rows, a group, the kind of scales, the base with what is
            added to zeros, and where all zeros begin. Floats have nothing to add: scales stand in its place.
    """

    mark: Any
    ask: Any
    factors: Any


@copied_function
def _ask_scale(to: Any, scales: Any, index: Any, form: Any) -> None:
    """Copy the word that a scale is in; of one in its first half, only that, as nothing may follow."""
    if form == UINT64(F32):
        ptx.copy_32(to, scales + UINT64(UINT32(index << UINT32(2))), UINT32(4))
    else:
        half = UINT32(index & UINT32(1))
        ptx.copy_32(
            to,
            scales + UINT64(UINT32(UINT32(index - half) << UINT32(1))),
            UINT32(UINT32(half + UINT32(1)) << UINT32(1)),
        )


@copied_function
def _scales_of(words: Any, indices: Any, form: Any) -> Any:
    """Return four scales in float32."""
    a, b, c, d = words
    if form == UINT64(F32):
        return ptx.float_of(a), ptx.float_of(b), ptx.float_of(c), ptx.float_of(d)
    four = UINT32(4)
    a, b = ptx.shifted(a, UINT32(indices[0] << four)), ptx.shifted(b, UINT32(indices[1] << four))
    c, d = ptx.shifted(c, UINT32(indices[2] << four)), ptx.shifted(d, UINT32(indices[3] << four))
    if form == UINT64(BF16):
        return ptx.low_bf16(a), ptx.low_bf16(b), ptx.low_bf16(c), ptx.low_bf16(d)
    return ptx.low_f16(a), ptx.low_f16(b), ptx.low_f16(c), ptx.low_f16(d)


def scaling_of(kind: Codes) -> Scaling:
    """Return what kernels do with the scales and zeros of a kind of codes."""
    both, factor, has_zeros, bits = kind.floats.both, kind.factor, kind.base is not None, kind.bits
    per_word, by, all_bits = (32 // bits).bit_length() - 1, bits.bit_length() - 1, (1 << bits) - 1
    in_words = bits == _NIBBLE

    @copied_function
    def ask(to: Any, scales: Any, zeros: Any, index: Any, form: Any) -> None:
        _ask_scale(to, scales, index, form)
        if has_zeros and zeros != UINT64(0):
            # Zeros of 4 bits fill words; others may end at any byte.
            count = UINT32(4) if in_words else UINT32(UINT32(index & UINT32(3)) + UINT32(1))
            at = zeros + UINT64(UINT32(UINT32(index >> UINT32(per_word)) << UINT32(2)))
            ptx.copy_32(UINT32(to + UINT32(SCALES)), at, count)

    @copied_function
    def twice(scale: Any) -> Any:
        return both(scale * FLOAT32(factor), scale * FLOAT32(factor))

    @copied_function
    def less(word: Any, index: Any, base: Any) -> Any:
        found = -(base + FLOAT32(UINT32(ptx.shifted(word, UINT32(index << UINT32(by))) & UINT32(all_bits))))
        return both(found, found)

    @copied_function
    def factors(at: Any, marks: Any, group: Any, form: Any, base: Any, zeros: Any) -> Any:
        i, j = UINT32(marks[0] + group), UINT32(marks[1] + group)
        m, n = UINT32(marks[2] + group), UINT32(marks[3] + group)
        a, b, c, d = _scales_of(ptx.shared_load_128(UINT64(at)), (i, j, m, n), form)
        scales = twice(a), twice(b), twice(c), twice(d)
        if not has_zeros:
            return scales, scales
        if zeros == UINT64(0):
            same = both(-base, -base)
            return scales, (same, same, same, same)
        e, f, u, v = ptx.shared_load_128(UINT64(UINT32(at + UINT32(SCALES))))
        return scales, (less(e, i, base), less(f, j, base), less(u, m, base), less(v, n, base))

    return Scaling(mark_of_row if has_zeros else mark_of_block, ask, factors)


_EIGHT = 8


def rows_by(kind: Codes, eights: int, fewest: int) -> tuple[Any, Any]:
    """Return what finds a thread's vectors in rows, and what copies those of a step.

    The first takes where rows are, and the bytes from one to the next. It returns the row of the first vector, where
    this is, where in a stage it goes, and how many rows and bytes the others are apart. The second takes these, a step,
    a stage, and how many rows there are.

    Args:
        kind: of codes.
        eights: of rows, at most.
        fewest: warps of a block, at least.
    """
    row_bytes = 2 * kind.step
    chunks = row_bytes // VECTOR
    chunk_bits, per_lane, count = (
        chunks.bit_length() - 1,
        chunks // LANES,
        -(-eights * _EIGHT * chunks // (32 * fewest)),
    )
    copy = _copies(count, row_bytes)

    @copied_function
    def find(x: Any, pitch: Any) -> Any:
        thread = UINT64(cuda.threadIdx.x)
        row, place = thread >> UINT64(chunk_bits), thread & UINT64(chunks - 1)
        chunk = (place & UINT64(LANES - 1)) * UINT64(per_lane) + (place >> UINT64(2))
        to = row * UINT64(row_bytes) + (place ^ ((row & UINT64(1)) << UINT64(2))) * UINT64(VECTOR)
        apart = UINT64(cuda.blockDim.x) >> UINT64(chunk_bits)
        return UINT32(row), x + row * pitch + chunk * UINT64(VECTOR), UINT32(to), UINT32(apart), apart * pitch

    @copied_function
    def ask(found: Any, k: Any, stage: Any, rows: Any) -> None:
        row, at, to, apart, pitch = found
        copy(row, at + UINT64(UINT32(k * UINT32(row_bytes))), UINT32(to + stage), apart, pitch, UINT32(rows))

    return find, ask


def _copies(count: int, row_bytes: int) -> Any:
    """Return an intrinsic that copies so many vectors, of rows that there are."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        row, at, to, apart, pitch, rows = values
        further = builder.mul(apart, ir.Constant(apart.type, row_bytes))
        for _ in range(count):
            ptx.emit_copy_128_below(builder, [to, at, row, rows])
            row, at, to = builder.add(row, apart), builder.add(at, pitch), builder.add(to, further)
        return context.get_dummy_value()

    word, bits = types.uint64, types.uint32
    signature = types.void(bits, word, bits, bits, word, bits)
    return intrinsic(lambda typingctx, row, at, to, apart, pitch, rows: (signature, codegen))  # noqa: ARG005


@copied_function
def ask_codes(codes: Any, pitch: Any, low: Any, high: Any, k: Any, to: Any) -> None:
    """Ask for a lane's codes of a step.

    Args:
        codes: where those of the first matrix row are.
        pitch: bytes of a matrix row.
        low: the first two of its matrix rows, by the number of one.
        high: the others.
        k: the step.
        to: where in shared memory they go.
    """
    at = codes + UINT64(UINT32(k * UINT32(LANES * VECTOR)))
    first, second = at + UINT64(low) * pitch, at + UINT64(high) * pitch
    ptx.copy_128(to, first)
    ptx.copy_128(UINT32(to + UINT32(OF_LANES)), first + pitch)
    ptx.copy_128(UINT32(to + UINT32(2 * OF_LANES)), second)
    ptx.copy_128(UINT32(to + UINT32(3 * OF_LANES)), second + pitch)


#: Rows of an instruction.

#: What multiplies pairs and adds others, makes float32 of the first and of the second of a pair, and pairs of two.
_OF_PAIRS = {
    "bf16": (ptx.emit_fma_bf16, ptx.emit_low_bf16, ptx.emit_high_bf16, ptx.emit_two_bf16),
    "f16": (ptx.emit_fma_f16, ptx.emit_low_f16, ptx.emit_high_f16, ptx.emit_two_f16),
}
_NAME = re.compile("(?P<way>WIDE|WGMMA)_(?P<kind>(BF16|F16)_(4|8|E4M3))_(?P<rows>16|32|48|64)")


@copied_function
def _pairs(low: Any, size: Any, mode: Any) -> Any:
    """Return the first of a lane's two pairs of matrix rows: one in each half of a strip, or of gates and of others.

    The last pair there is stands for those behind it.
    """
    last = UINT32(UINT32(size) - UINT32(2))
    first = min(low, last)
    return first, (min(UINT32(low + UINT32(STRIP // 2)), last) if mode == ADD else UINT32(first + UINT32(size)))


def _gates_by(kind: Codes) -> Any:
    """Make what stores gates times what these are for, of eight rows, from a row on."""
    first, both = kind.floats.first, kind.floats.both

    @copied_function
    def gated(s: Any, t: Any, u: Any, v: Any, mode: Any) -> Any:
        """Return the activations of two sums, times two others; all are rounded."""
        gates, ups, move = both(s, t), both(u, v), UINT32(16)
        acted = both(activation(first(gates), mode), activation(first(UINT32(gates >> move)), mode))
        return both(first(acted) * first(ups), first(UINT32(acted >> move)) * first(UINT32(ups >> move)))

    @copied_function
    def store(sums: Any, at: Any, pitch: Any, is_second: Any, mode: Any) -> None:
        ptx.store_32(at, gated(sums[0], sums[2], sums[4], sums[6], mode))
        if is_second:
            ptx.store_32(at + pitch, gated(sums[1], sums[3], sums[5], sums[7], mode))

    return store


def _products_by(kind: Codes, fma: ptx.Emitter, eights: int) -> Any:
    """Return what adds the products of a step, given also where a stage's rows begin, and a lane's first one there."""
    products = products_of(kind, fma, eights)

    @copied_function
    def add(sums: Any, codes: Any, rows: Any, own: Any, scales: Any, bases: Any, mask: Any) -> Any:
        row = UINT32(rows + own)
        return products(sums, codes, row, UINT32(row ^ UINT32(64)), scales, bases, mask)

    return add


def _group_products_by(kind: Codes, fma: ptx.Emitter, eights: int) -> Any:
    """Return the same by instructions of four warps, which begin to add; a lane has no row of its own."""
    products = warpgroup.products_of(kind, fma, eights)

    @copied_function
    def add(sums: Any, codes: Any, rows: Any, own: Any, scales: Any, bases: Any, mask: Any) -> Any:  # noqa: ARG001
        return products(sums, codes, UINT64(rows), scales, bases, mask)

    return add


@copied_function
def _same(sums: Any) -> Any:
    """Return sums, to which nothing is still added."""
    return sums


@copied_function
def _nothing() -> None:
    """Do nothing."""


def _wide(name: str, kind: Codes, eights: int, warps: int, fewest: int) -> Kernel:  # noqa: C901, PLR0915 (the kernel)
    """Make a kernel for up to so many rows.

    Its grid: at most as many blocks as tiles have steps. Its shared memory: a whole number of stages, see
    :func:`tpplan.decoder.fast.kernels.wide_limits.stage_bytes`. Its words:

    - y, its pitch: where the result goes, all multiples of 4.
    - x, its pitch: rows.
    - codes, scales, zeros: of the matrix, which no kernel that may still run writes; multiples of 4; zeros may be 0.
    - groups, bits: scales of a matrix row, and the power of two that their columns are.
    - form: the kind of scales, see :mod:`tpplan.decoder.fast.kernels.scale_kinds`.
    - more: a float32: what is added to stored zeros, or all of them if none are; of floats, the power of two that the
      matrix rows of a block are, which share their scales.
    - parts: address of what blocks leave, a multiple of 16: twice 128 bytes for each of their warps and every row that
      there may be.
    - turns: address of 32 bits for each warp of all blocks; zero, and zero again afterwards.
    - size: columns of the result, of which there are an even number.
    - width: columns of the matrix, a multiple of a step's.
    - rows: how many.
    - stages: that there is shared memory for: two or three.
    - plus, its pitch, mode: see :func:`tpplan.decoder.fast.kernels.finishing.finish_of`; multiples of 4.

    Args:
        name: of it.
        kind: of codes.
        eights: of rows.
        warps: that a multiprocessor must have registers for, and a block at most.
        fewest: warps of a block, at least.
    """
    step, row_bytes, part = kind.step, 2 * kind.step, 1024 * eights
    of_rows = eights * _EIGHT * row_bytes
    fma, low_of, high_of, two_of = _OF_PAIRS[name.split("_")[1]]
    in_groups = name.startswith("wgmma")
    products = _group_products_by(kind, fma, eights) if in_groups else _products_by(kind, fma, eights)
    settle, share = (warpgroup.settled, ptx.shared_for_groups) if in_groups else (_same, _nothing)
    zeros_of = tiles.zeros(PER_EIGHT * eights)
    begin, store, scaling = begun(eights, low_of, high_of), stored(eights, two_of), scaling_of(kind)
    ask_scale, factors, mark_of, mask = scaling.ask, scaling.factors, scaling.mark, kind.mask
    find_rows, ask_rows = warpgroup.rows_by(kind, eights) if in_groups else rows_by(kind, eights, fewest)
    number = kind.base or 0
    store_gates = _gates_by(kind)

    @copied_function
    def ask_matrix(k: Any, to: Any, low: Any, high: Any, own: Any, matrix: Any) -> None:
        """Ask for a lane's codes of a step, and for the scale of one of its matrix rows."""
        codes_at, scale_at, t = own
        codes, pitch, scales, zeros, groups, bits, form, more = matrix
        ask_codes(codes + t * UINT64(VECTOR), pitch, low, high, k, UINT32(to + codes_at))
        mark = mark_of(UINT32((low if t < UINT64(2) else high) + UINT32(t & UINT64(1))), groups, more)
        ask_scale(UINT32(to + scale_at), scales, zeros, UINT32(mark + group_of(k, bits)), form)

    @copied_function
    def group_of(k: Any, bits: Any) -> Any:
        return UINT32(UINT32(k * UINT32(step)) >> UINT32(bits))

    @copied_function
    def after(ahead: Any, k: Any, first: Any, low: Any, high: Any, tiles_of: Any) -> Any:
        """Return what is asked for behind a step."""
        steps, of_tile, size, mode = tiles_of
        k = UINT32(k + UINT32(1))
        if k == steps:
            k, first = UINT32(0), UINT32(first + of_tile)
            low, high = _pairs(first, size, mode)
        return UINT32(ahead + UINT32(1)), k, first, low, high

    @copied_function
    def ask_next(
        ahead: Any, k: Any, first: Any, low: Any, high: Any, to: Any, until: Any, own: Any, matrix: Any, found: Any,
        rows: Any, tiles_of: Any,
    ) -> Any:  # fmt: skip
        """Ask for a step, if there is one, and return what is asked for behind it."""
        if ahead < until:
            ask_matrix(k, to, low, high, own, matrix)
            ask_rows(found, k, to, rows)
            ahead, k, first, low, high = after(ahead, k, first, low, high, tiles_of)
        ptx.end_copies()
        return ahead, k, first, low, high

    @copied_function
    def arrive(stages: Any) -> None:
        """Wait for the oldest step that is asked for."""
        if stages == UINT64(3):
            ptx.copied_but_one()
        else:
            ptx.copied()

    def multiply_rows(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915
        y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, more, parts, turns, size, width, rows,
        stages, plus, plus_pitch, mode,
    ):  # fmt: skip
        room = cuda.shared.array(0, UINT32, alignment=1024)
        lane, warp = UINT64(cuda.threadIdx.x) & UINT64(31), UINT64(ptx.of_first(UINT32(cuda.threadIdx.x >> 5)))
        g, t = lane >> UINT64(2), lane & UINT64(3)
        team, blocks, block = UINT32(cuda.blockDim.x >> 5), UINT32(cuda.gridDim.x), UINT32(cuda.blockIdx.x)
        one, of_strip = UINT32(1), UINT32(STRIP) if mode == ADD else UINT32(STRIP // 2)
        of_tile, steps = UINT32(team * of_strip), UINT32(width // UINT64(step))
        total = UINT32(UINT32(UINT32(UINT32(size) + of_tile - one) // of_tile) * steps)
        # Steps of all tiles are counted as those of one: the next that this block has, and where others have the rest.
        unit, until = UINT32(UINT32(block * total) // blocks), UINT32(UINT32(UINT32(block + one) * total) // blocks)
        # Where stages are, and what this lane copies and reads in each.
        stage, begin_stages = UINT32(UINT32(of_rows) + UINT32(team * UINT32(OF_WARP))), UINT32(ptx.shared_address(room))
        end_stages = UINT32(begin_stages + UINT32(UINT32(stages) * stage))
        codes_at = UINT32(UINT64(of_rows) + warp * UINT64(CODES) + lane * UINT64(VECTOR))
        its_scales = UINT32(UINT32(UINT32(of_rows) + UINT32(team * UINT32(CODES))) + UINT32(warp * UINT64(2 * SCALES)))
        scale_at, scales_at = (
            UINT32(its_scales + UINT32(lane << UINT64(2))),
            UINT32(its_scales + UINT32(g << UINT64(4))),
        )
        even = UINT32(g * UINT64(row_bytes) + ((g & UINT64(1)) << UINT64(6)) + t * UINT64(VECTOR))
        base, pitch = FLOAT32(number) + ptx.float_of(UINT32(more)), UINT64(steps) * UINT64(LANES * VECTOR)
        kept_mask = UINT32(UINT32(~ptx.active()) + UINT32(mask))  # a register, of which the compiler makes no constants
        found, matrix = find_rows(x, x_pitch), (codes, pitch, scales, zeros, groups, bits, form, more)
        # The step that is asked for next, to where, the first column of its tile that is the lane's, and what is.
        tile = UINT32(unit // steps)
        k, to = UINT32(unit - UINT32(tile * steps)), begin_stages
        own_strip = UINT32(UINT32(UINT32(warp) * of_strip) + UINT32(g << UINT64(1)))
        ahead, ahead_k, first = unit, k, UINT32(UINT32(tile * of_tile) + own_strip)
        low, high = _pairs(first, size, mode)
        own, tiles_of = (codes_at, scale_at, t), (steps, of_tile, size, mode)
        last = min(until, UINT32(unit + UINT32(stages) - one))
        while ahead < last:
            ptx.roll()
            ask_matrix(ahead_k, to, low, high, own, matrix)
            ahead, ahead_k, first, low, high = after(ahead, ahead_k, first, low, high, tiles_of)
            to = UINT32(to + stage)
        ptx.after_earlier_with_next()
        to, last = begin_stages, UINT32(begin_stages + UINT32(UINT32(until - unit) * stage))
        while UINT32(to + stage) < end_stages:
            ptx.roll()
            if to < last:
                ask_rows(found, k, to, rows)
            ptx.end_copies()
            to, k = UINT32(to + stage), UINT32(k + one) if UINT32(k + one) < steps else UINT32(0)
        here, asks_first = begin_stages, UINT32(warp) < UINT32(team >> one)
        while unit < until:
            ptx.roll()
            tile = UINT32(unit // steps)
            start = UINT32(tile * steps)
            k, end = UINT32(unit - start), min(steps, UINT32(until - start))
            is_first, column = k == UINT32(0), UINT32(UINT32(tile * of_tile) + own_strip)
            a, c = _pairs(column, size, mode)
            marks = (
                mark_of(a, groups, more), mark_of(UINT32(a + one), groups, more),
                mark_of(c, groups, more), mark_of(UINT32(c + one), groups, more),
            )  # fmt: skip
            sums = zeros_of()
            if plus != UINT64(0) and is_first:
                offsets = UINT64(a) * UINT64(2), UINT64(c) * UINT64(2)
                sums = begin(plus, plus_pitch, t << UINT64(1), rows - UINT64(1), offsets[0], offsets[1])
            while k < end:
                ptx.roll()
                arrive(stages)
                share()
                if in_groups:  # scales are the warp's own; with other instructions registers are short
                    cuda.syncwarp()  # whose lanes have copied all scales that they read
                    by, less = factors(UINT32(here + scales_at), marks, group_of(k, bits), form, base, zeros)
                cuda.syncthreads()  # all have copied what they do of this step, and read what is written over now
                # One half of the warps asks while the other multiplies, and then the other way round.
                if asks_first:
                    ahead, ahead_k, first, low, high = ask_next(
                        ahead, ahead_k, first, low, high, to, until, own, matrix, found, rows, tiles_of
                    )
                if not in_groups:
                    by, less = factors(UINT32(here + scales_at), marks, group_of(k, bits), form, base, zeros)
                sums = products(sums, UINT32(here + codes_at), here, even, by, less, kept_mask)
                if not asks_first:
                    ahead, ahead_k, first, low, high = ask_next(
                        ahead, ahead_k, first, low, high, to, until, own, matrix, found, rows, tiles_of
                    )
                sums = settle(sums)
                k = UINT32(k + one)
                to = UINT32(to + stage) if UINT32(to + stage) < end_stages else begin_stages
                here = UINT32(here + stage) if UINT32(here + stage) < end_stages else begin_stages
            is_mine = is_first and end == steps
            if not is_mine:
                # The blocks that have the first step of the tile and the last one.
                begins = UINT32(UINT32(UINT32(UINT32(start + one) * blocks) - one) // total)
                ends = UINT32(UINT32(UINT32(UINT32(start + steps) * blocks) - one) // total)
                # A block leaves at most two: of a tile that others have begun, and behind it of one that it begins.
                own_part, pitch_part = parts + warp * UINT64(part) + lane * UINT64(VECTOR), UINT64(team) * UINT64(part)
                leave(own_part + (UINT64(block + block) + UINT64(is_first)) * pitch_part, sums)
                ptx.near_fence()
                cuda.syncwarp()
                turn, others = UINT32(0), UINT32(ends - begins)
                if lane == UINT64(0):
                    turn = ptx.next_turn(turns + (UINT64(begins) * UINT64(team) + warp) * UINT64(4), others)
                is_mine = ptx.of_first(turn) == others
                if is_mine:
                    ptx.near_fence()
                    # What the first block has left is behind what it may have left of the tile before.
                    left = own_part + UINT64(UINT32(begins + begins)) * pitch_part
                    sums = with_left(zeros_of(), left + pitch_part, left + pitch_part + pitch_part)
                    begins, both_parts = UINT32(begins + UINT32(2)), pitch_part + pitch_part
                    left = left + both_parts + both_parts
                    while begins < ends:
                        ptx.roll()
                        sums = with_left(sums, left, left + both_parts)
                        begins, left = UINT32(begins + UINT32(2)), left + both_parts + both_parts
                    if begins == ends:
                        sums = with_last(sums, left)
            if is_mine:
                row = t << UINT64(1)
                at = y + row * y_pitch + UINT64(column) * UINT64(2)
                if mode == ADD:
                    count, nothing, last = UINT32(rows), UINT32(0), UINT32(size)
                    in_first = count if column < last else nothing
                    in_second = count if UINT32(column + UINT32(STRIP // 2)) < last else nothing
                    store(sums, at, UINT64(STRIP), y_pitch, UINT32(row), in_first, in_second)
                elif column < UINT32(size):
                    while row < rows:
                        ptx.roll()
                        store_gates(sums, at, y_pitch, row + UINT64(1) < rows, mode)
                        sums, row, at = turned(sums), row + UINT64(_EIGHT), at + UINT64(_EIGHT) * y_pitch
            unit = UINT32(start + end)

    return Kernel(name, multiply_rows, 20, bounds=(32 * warps, 1))


def __getattr__(name: str) -> Kernel:
    """Return the kernel of a dtype of rows, a kind of codes and a number of rows, such as ``WIDE_BF16_E4M3_64``."""
    found = _NAME.fullmatch(name)
    if not found:
        raise AttributeError(name)
    rows = int(found["rows"])
    in_groups = found["way"] == "WGMMA"
    warps = (GROUP_WARPS if in_groups else WARPS).get(rows)
    if warps is None:
        raise AttributeError(name)
    fewest = GROUP_FEWEST if in_groups else FEWEST[rows]
    return _wide(name.lower(), getattr(packed_codes, found["kind"]), rows // _EIGHT, warps, fewest)
