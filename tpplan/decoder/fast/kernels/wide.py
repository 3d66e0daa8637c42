"""Kernels that multiply 17 to 64 rows by a matrix of codes, which are read and made floats once.

Tensor cores multiply, as in :mod:`tpplan.decoder.fast.kernels.packed`. A warp has 32 matrix rows, which are a strip,
and all rows; the warps of a block have strips that follow each other, and share what they have of the rows. All that a
step needs is copied into shared memory, without registers, while some steps before it are multiplied: loads that codes
wait for in registers would be waited for together with those of later steps, by the scoreboards of the machine.

The strips of a block's warps are a tile, of as many steps as there are of columns. Tiles follow each other, and every
block has as many of all their steps as others, or one more. Of a tile that several blocks have, each leaves in memory
what it has found, and of those with the same strip the last warp adds that up, in the blocks' order. None waits.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tpplan.decoder.fast.kernels import packed_codes, tiles
from tpplan.decoder.fast.kernels.finishing import ADD, activation
from tpplan.decoder.fast.kernels.wide_limits import CODES, FEWEST, LANES, OF_WARP, SCALES, STRIP, VECTOR, WARPS
from tpplan.decoder.fast.kernels.wide_loads import ask_codes, rows_by
from tpplan.decoder.fast.kernels.wide_products import products_of
from tpplan.decoder.fast.kernels.wide_scales import scaling_of
from tpplan.decoder.fast.kernels.wide_sums import PER_EIGHT, begun, leave, stored, turned, with_last, with_left
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, copied_function
from tpplan.exec.toolchain.language import cuda, types

if TYPE_CHECKING:
    from tpplan.decoder.fast.kernels.packed_codes import Codes

#: Rows of an instruction.
_EIGHT = 8
#: What multiplies pairs and adds others, makes float32 of the first and of the second of a pair, and pairs of two.
_OF_PAIRS = {
    "bf16": (ptx.emit_fma_bf16, ptx.emit_low_bf16, ptx.emit_high_bf16, ptx.emit_two_bf16),
    "f16": (ptx.emit_fma_f16, ptx.emit_low_f16, ptx.emit_high_f16, ptx.emit_two_f16),
}
_NAME = re.compile("WIDE_(?P<kind>(BF16|F16)_(4|8|E4M3))_(?P<rows>32|48|64)")
_WORD, _FLOAT, _BITS = types.uint64, types.float32, types.uint32


@copied_function
def _pairs(low: Any, size: Any, mode: Any) -> Any:
    """Return the first of a lane's two pairs of matrix rows: one in each half of a strip, or of gates and of others.

    The last pair there is stands for those behind it.
    """
    last = _BITS(_BITS(size) - _BITS(2))
    first = min(low, last)
    return first, (min(_BITS(low + _BITS(STRIP // 2)), last) if mode == ADD else _BITS(first + _BITS(size)))


def _gates_by(kind: Codes) -> Any:
    """Make what stores gates times what these are for, of eight rows, from a row on."""
    first, both = kind.floats.first, kind.floats.both

    @copied_function
    def gated(s: Any, t: Any, u: Any, v: Any, mode: Any) -> Any:
        """Return the activations of two sums, times two others; all are rounded."""
        gates, ups, move = both(s, t), both(u, v), _BITS(16)
        acted = both(activation(first(gates), mode), activation(first(_BITS(gates >> move)), mode))
        return both(first(acted) * first(ups), first(_BITS(acted >> move)) * first(_BITS(ups >> move)))

    @copied_function
    def store(sums: Any, at: Any, pitch: Any, is_second: Any, mode: Any) -> None:
        ptx.store_32(at, gated(sums[0], sums[2], sums[4], sums[6], mode))
        if is_second:
            ptx.store_32(at + pitch, gated(sums[1], sums[3], sums[5], sums[7], mode))

    return store


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
    products, zeros_of = products_of(kind, fma, eights), tiles.zeros(PER_EIGHT * eights)
    begin, store, scaling = begun(eights, low_of, high_of), stored(eights, two_of), scaling_of(kind)
    ask_scale, factors, mark_of, mask = scaling.ask, scaling.factors, scaling.mark, kind.mask
    (find_rows, ask_rows), number = rows_by(kind, eights, fewest), kind.base or 0
    store_gates = _gates_by(kind)

    @copied_function
    def ask_matrix(k: Any, to: Any, low: Any, high: Any, own: Any, matrix: Any) -> None:
        """Ask for a lane's codes of a step, and for the scale of one of its matrix rows."""
        codes_at, scale_at, t = own
        codes, pitch, scales, zeros, groups, bits, form, more = matrix
        ask_codes(codes + t * _WORD(VECTOR), pitch, low, high, k, _BITS(to + codes_at))
        mark = mark_of(_BITS((low if t < _WORD(2) else high) + _BITS(t & _WORD(1))), groups, more)
        ask_scale(_BITS(to + scale_at), scales, zeros, _BITS(mark + group_of(k, bits)), form)

    @copied_function
    def group_of(k: Any, bits: Any) -> Any:
        return _BITS(_BITS(k * _BITS(step)) >> _BITS(bits))

    @copied_function
    def after(ahead: Any, k: Any, first: Any, low: Any, high: Any, tiles_of: Any) -> Any:
        """Return what is asked for behind a step."""
        steps, of_tile, size, mode = tiles_of
        k = _BITS(k + _BITS(1))
        if k == steps:
            k, first = _BITS(0), _BITS(first + of_tile)
            low, high = _pairs(first, size, mode)
        return _BITS(ahead + _BITS(1)), k, first, low, high

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
        if stages == _WORD(3):
            ptx.copied_but_one()
        else:
            ptx.copied()

    def multiply_rows(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915
        y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, more, parts, turns, size, width, rows,
        stages, plus, plus_pitch, mode,
    ):  # fmt: skip
        room = cuda.shared.array(0, _BITS, alignment=128)
        lane, warp = _WORD(cuda.threadIdx.x) & _WORD(31), _WORD(ptx.of_first(_BITS(cuda.threadIdx.x >> 5)))
        g, t = lane >> _WORD(2), lane & _WORD(3)
        team, blocks, block = _BITS(cuda.blockDim.x >> 5), _BITS(cuda.gridDim.x), _BITS(cuda.blockIdx.x)
        one, of_strip = _BITS(1), _BITS(STRIP) if mode == ADD else _BITS(STRIP // 2)
        of_tile, steps = _BITS(team * of_strip), _BITS(width // _WORD(step))
        total = _BITS(_BITS(_BITS(_BITS(size) + of_tile - one) // of_tile) * steps)
        # Steps of all tiles are counted as those of one: the next that this block has, and where others have the rest.
        unit, until = _BITS(_BITS(block * total) // blocks), _BITS(_BITS(_BITS(block + one) * total) // blocks)
        # Where stages are, and what this lane copies and reads in each.
        stage, begin_stages = _BITS(_BITS(of_rows) + _BITS(team * _BITS(OF_WARP))), _BITS(ptx.shared_address(room))
        end_stages = _BITS(begin_stages + _BITS(_BITS(stages) * stage))
        codes_at = _BITS(_WORD(of_rows) + warp * _WORD(CODES) + lane * _WORD(VECTOR))
        its_scales = _BITS(_BITS(_BITS(of_rows) + _BITS(team * _BITS(CODES))) + _BITS(warp * _WORD(2 * SCALES)))
        scale_at, scales_at = _BITS(its_scales + _BITS(lane << _WORD(2))), _BITS(its_scales + _BITS(g << _WORD(4)))
        even = _BITS(g * _WORD(row_bytes) + ((g & _WORD(1)) << _WORD(6)) + t * _WORD(VECTOR))
        base, pitch = _FLOAT(number) + ptx.float_of(_BITS(more)), _WORD(steps) * _WORD(LANES * VECTOR)
        kept_mask = _BITS(_BITS(~ptx.active()) + _BITS(mask))  # a register, of which the compiler makes no constants
        found, matrix = find_rows(x, x_pitch), (codes, pitch, scales, zeros, groups, bits, form, more)
        # The step that is asked for next, to where, the first column of its tile that is the lane's, and what is.
        tile = _BITS(unit // steps)
        k, to = _BITS(unit - _BITS(tile * steps)), begin_stages
        own_strip = _BITS(_BITS(_BITS(warp) * of_strip) + _BITS(g << _WORD(1)))
        ahead, ahead_k, first = unit, k, _BITS(_BITS(tile * of_tile) + own_strip)
        low, high = _pairs(first, size, mode)
        own, tiles_of = (codes_at, scale_at, t), (steps, of_tile, size, mode)
        last = min(until, _BITS(unit + _BITS(stages) - one))
        while ahead < last:
            ptx.roll()
            ask_matrix(ahead_k, to, low, high, own, matrix)
            ahead, ahead_k, first, low, high = after(ahead, ahead_k, first, low, high, tiles_of)
            to = _BITS(to + stage)
        ptx.after_earlier_with_next()
        to, last = begin_stages, _BITS(begin_stages + _BITS(_BITS(until - unit) * stage))
        while _BITS(to + stage) < end_stages:
            ptx.roll()
            if to < last:
                ask_rows(found, k, to, rows)
            ptx.end_copies()
            to, k = _BITS(to + stage), _BITS(k + one) if _BITS(k + one) < steps else _BITS(0)
        here, asks_first = begin_stages, _BITS(warp) < _BITS(team >> one)
        while unit < until:
            ptx.roll()
            tile = _BITS(unit // steps)
            start = _BITS(tile * steps)
            k, end = _BITS(unit - start), min(steps, _BITS(until - start))
            is_first, column = k == _BITS(0), _BITS(_BITS(tile * of_tile) + own_strip)
            a, c = _pairs(column, size, mode)
            marks = (
                mark_of(a, groups, more), mark_of(_BITS(a + one), groups, more),
                mark_of(c, groups, more), mark_of(_BITS(c + one), groups, more),
            )  # fmt: skip
            sums = zeros_of()
            if plus != _WORD(0) and is_first:
                offsets = _WORD(a) * _WORD(2), _WORD(c) * _WORD(2)
                sums = begin(plus, plus_pitch, t << _WORD(1), rows - _WORD(1), offsets[0], offsets[1])
            while k < end:
                ptx.roll()
                arrive(stages)
                cuda.syncthreads()  # all have copied what they do of this step, and read what is written over now
                # One half of the warps asks while the other multiplies, and then the other way round.
                if asks_first:
                    ahead, ahead_k, first, low, high = ask_next(
                        ahead, ahead_k, first, low, high, to, until, own, matrix, found, rows, tiles_of
                    )
                by, less = factors(_BITS(here + scales_at), marks, group_of(k, bits), form, base, zeros)
                row = _BITS(here + even)
                sums = products(sums, _BITS(here + codes_at), row, _BITS(row ^ _BITS(64)), by, less, kept_mask)
                if not asks_first:
                    ahead, ahead_k, first, low, high = ask_next(
                        ahead, ahead_k, first, low, high, to, until, own, matrix, found, rows, tiles_of
                    )
                k = _BITS(k + one)
                to = _BITS(to + stage) if _BITS(to + stage) < end_stages else begin_stages
                here = _BITS(here + stage) if _BITS(here + stage) < end_stages else begin_stages
            is_mine = is_first and end == steps
            if not is_mine:
                # The blocks that have the first step of the tile and the last one.
                begins = _BITS(_BITS(_BITS(_BITS(start + one) * blocks) - one) // total)
                ends = _BITS(_BITS(_BITS(_BITS(start + steps) * blocks) - one) // total)
                # A block leaves at most two: of a tile that others have begun, and behind it of one that it begins.
                own_part, pitch_part = parts + warp * _WORD(part) + lane * _WORD(VECTOR), _WORD(team) * _WORD(part)
                leave(own_part + (_WORD(block + block) + _WORD(is_first)) * pitch_part, sums)
                ptx.near_fence()
                cuda.syncwarp()
                turn, others = _BITS(0), _BITS(ends - begins)
                if lane == _WORD(0):
                    turn = ptx.next_turn(turns + (_WORD(begins) * _WORD(team) + warp) * _WORD(4), others)
                is_mine = ptx.of_first(turn) == others
                if is_mine:
                    ptx.near_fence()
                    # What the first block has left is behind what it may have left of the tile before.
                    left = own_part + _WORD(_BITS(begins + begins)) * pitch_part
                    sums = with_left(zeros_of(), left + pitch_part, left + pitch_part + pitch_part)
                    begins, both_parts = _BITS(begins + _BITS(2)), pitch_part + pitch_part
                    left = left + both_parts + both_parts
                    while begins < ends:
                        ptx.roll()
                        sums = with_left(sums, left, left + both_parts)
                        begins, left = _BITS(begins + _BITS(2)), left + both_parts + both_parts
                    if begins == ends:
                        sums = with_last(sums, left)
            if is_mine:
                row = t << _WORD(1)
                at = y + row * y_pitch + _WORD(column) * _WORD(2)
                if mode == ADD:
                    count, nothing, last = _BITS(rows), _BITS(0), _BITS(size)
                    in_first = count if column < last else nothing
                    in_second = count if _BITS(column + _BITS(STRIP // 2)) < last else nothing
                    store(sums, at, _WORD(STRIP), y_pitch, _BITS(row), in_first, in_second)
                elif column < _BITS(size):
                    while row < rows:
                        ptx.roll()
                        store_gates(sums, at, y_pitch, row + _WORD(1) < rows, mode)
                        sums, row, at = turned(sums), row + _WORD(_EIGHT), at + _WORD(_EIGHT) * y_pitch
            unit = _BITS(start + end)

    return Kernel(name, multiply_rows, 20, bounds=(32 * warps, 1))


def __getattr__(name: str) -> Kernel:
    """Return the kernel of a dtype of rows, a kind of codes and a number of rows, such as ``WIDE_BF16_E4M3_64``."""
    found = _NAME.fullmatch(name)
    if not found:
        raise AttributeError(name)
    rows = int(found["rows"])
    return _wide(name.lower(), getattr(packed_codes, found["kind"]), rows // _EIGHT, WARPS[rows], FEWEST[rows])
