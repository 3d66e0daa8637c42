"""Kernels that multiply 17 to 64 rows by a matrix of codes, which are read and made floats once.

Tensor cores multiply, as in :mod:`tpplan.decoder.kernels.packed`. A warp has 32 matrix rows, which are a strip, and all
rows; the warps of a block have strips that follow each other, and share what they have of the rows: two steps in shared
memory, of which the second is copied while they multiply by the first. Codes go straight to registers, two steps ahead.

The strips of a block's warps are a tile, of as many steps as there are of columns. Tiles follow each other, and every
block has as many of all their steps as others, or one more. Of a tile that several blocks have, each leaves in memory
what it has found, and of those with the same strip the last warp adds that up, in the blocks' order. None waits.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from numba import cuda
from numba.cuda import types

from tpplan.decoder.kernels import packed_codes, tiles
from tpplan.decoder.kernels.finishing import ADD, activation
from tpplan.decoder.kernels.packed_scales import scale_by
from tpplan.decoder.kernels.wide_limits import STRIP, WARPS
from tpplan.decoder.kernels.wide_products import OWN, products_of
from tpplan.decoder.kernels.wide_sums import PER_EIGHT, begun, leave, turned, with_left
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, copied_function

if TYPE_CHECKING:
    from tpplan.decoder.kernels.packed_codes import Codes

#: Rows of an instruction, and bytes of a vector.
_EIGHT, _VECTOR = 8, 16
#: Lanes that have the same matrix rows.
_LANES = 4
#: Steps in shared memory, and steps of codes on their way.
_STAGES = 2
#: Words of a warp for each step in shared memory: scales of its matrix rows, and bases with zeros.
_SCALES = 2 * STRIP
#: What multiplies pairs and adds others, and makes float32 of the first and of the second of a pair.
_OF_PAIRS = {
    "bf16": (ptx.emit_fma_bf16, ptx.emit_low_bf16, ptx.emit_high_bf16),
    "f16": (ptx.emit_fma_f16, ptx.emit_low_f16, ptx.emit_high_f16),
}
_NAME = re.compile("WIDE_(?P<kind>(BF16|F16)_(4|8|E4M3))_(?P<rows>32|48|64)")
_WORD, _FLOAT, _BITS = types.uint64, types.float32, types.uint32


@copied_function
def _pairs(low: Any, size: Any, mode: Any) -> Any:
    """Return the first of a lane's two pairs of matrix rows: one in each half of a strip, or of gates and of others.

    The last pair there is stands for those behind it.
    """
    first = min(low, size - _WORD(2))
    return first, (min(low + _WORD(STRIP // 2), size - _WORD(2)) if mode == ADD else first + size)


def _asking_by(load: Any) -> Any:
    """Make what asks for the codes that a lane has of its pairs of matrix rows, so many bytes behind an address."""

    @copied_function
    def ask(places: Any, offset: Any) -> Any:
        a, c, pitch = places
        first, second = a + _WORD(offset), c + _WORD(offset)
        return load(first) + load(first + pitch) + load(second) + load(second + pitch)

    return ask


_ask, _ask_now = _asking_by(ptx.stream_128), _asking_by(ptx.poll_128)


def _store_by(kind: Codes) -> Any:
    """Make what stores sums of eight rows, or gates times what these are for, from a row on."""
    first, both, half = kind.floats.first, kind.floats.both, STRIP // 2

    @copied_function
    def gated(s: Any, t: Any, u: Any, v: Any, mode: Any) -> Any:
        """Return the activations of two sums, times two others; all are rounded."""
        gates, ups, move = both(s, t), both(u, v), _BITS(16)
        acted = both(activation(first(gates), mode), activation(first(_BITS(gates >> move)), mode))
        return both(first(acted) * first(ups), first(_BITS(acted >> move)) * first(_BITS(ups >> move)))

    @copied_function
    def store(sums: Any, y: Any, pitch: Any, row: Any, rows: Any, column: Any, size: Any, mode: Any) -> None:
        at = y + row * pitch + column * _WORD(2)
        is_second = row + _WORD(1) < rows
        if mode != ADD:
            a, b = gated(sums[0], sums[2], sums[4], sums[6], mode), gated(sums[1], sums[3], sums[5], sums[7], mode)
        else:
            a, b = both(sums[0], sums[2]), both(sums[1], sums[3])
            if column + _WORD(half) < size:
                ptx.store_32(at + _WORD(2 * half), both(sums[4], sums[6]))
                if is_second:
                    ptx.store_32(at + pitch + _WORD(2 * half), both(sums[5], sums[7]))
        if column < size:
            ptx.store_32(at, a)
            if is_second:
                ptx.store_32(at + pitch, b)

    return store


def _wide(name: str, kind: Codes, eights: int, warps: int) -> Kernel:  # noqa: C901, PLR0915 (the kernel)
    """Make a kernel for up to so many rows.

    Its grid: at most as many blocks as tiles have steps. Its words:

    - y, its pitch: where the result goes, all multiples of 4.
    - x, its pitch: rows.
    - codes, scales, zeros: of the matrix, which no kernel that may still run writes; zeros may be 0.
    - groups, bits: scales of a matrix row, and the power of two that their columns are.
    - form: the kind of scales, see :mod:`tpplan.decoder.kernels.scale_kinds`.
    - more: a float32: what is added to stored zeros, or all of them if none are; of floats, the power of two that the
      matrix rows of a block are, which share their scales.
    - parts: address of what blocks leave, a multiple of 16: twice 128 bytes for each of their warps and every row that
      there may be.
    - turns: address of 32 bits for each warp of all blocks; zero, and zero again afterwards.
    - size: columns of the result, of which there are an even number.
    - width: columns of the matrix, a multiple of a step's.
    - rows: how many.
    - plus, its pitch, mode: see :func:`tpplan.decoder.kernels.finishing.finish_of`; multiples of 4.

    Args:
        name: of it.
        kind: of codes.
        eights: of rows.
        warps: that a multiprocessor must have registers for, and a block at most.
    """
    step, row_bytes, own_bytes = kind.step, 2 * kind.step, _LANES * _VECTOR
    chunks, stage, kept, part = row_bytes // _VECTOR, eights * _EIGHT * row_bytes, warps * _SCALES, 1024 * eights
    chunk_bits, per_lane, all_rows = chunks.bit_length() - 1, chunks // _LANES, _STAGES * stage // 4
    words = all_rows + _STAGES * kept
    fma, low_of, high_of = _OF_PAIRS[name.split("_")[1]]
    products, zeros_of = products_of(kind, fma, eights), tiles.zeros(PER_EIGHT * eights)
    begin, store, (ask_one, pieces_of) = begun(eights, low_of, high_of), _store_by(kind), scale_by(kind)
    both, mask, number, has_zeros = kind.floats.both, kind.mask, kind.base or 0, kind.base is not None

    @copied_function
    def copies(x: Any, pitch: Any) -> Any:
        """Return the row of which a thread copies a vector of each step, and others below it; from where, and to where.

        Vector 4 i + t of a row is the one that lane t needs i-th; of odd rows the other four of each eight come first.
        """
        thread = _WORD(cuda.threadIdx.x)
        row, place = thread >> _WORD(chunk_bits), thread & _WORD(chunks - 1)
        chunk = (place & _WORD(_LANES - 1)) * _WORD(per_lane) + (place >> _WORD(2))
        to = row * _WORD(row_bytes) + (place ^ ((row & _WORD(1)) << _WORD(2))) * _WORD(_VECTOR)
        return _BITS(row), x + row * pitch + chunk * _WORD(_VECTOR), _BITS(to)

    @copied_function
    def fill(copied: Any, offset: Any, to: Any, pitch: Any, rows: Any) -> None:
        """Ask for a step of rows."""
        row, at, there = copied
        at, there, block = at + _WORD(offset), _BITS(there + to), _BITS(cuda.blockDim.x)
        while row < _BITS(rows):
            ptx.roll()
            ptx.copy_128(there, at)
            more = _BITS(block >> _BITS(chunk_bits))
            row, at, there = _BITS(row + more), at + _WORD(more) * pitch, _BITS(there + _BITS(block * _BITS(_VECTOR)))

    @copied_function
    def put(room: Any, start: Any, found: Any, form: Any, base: Any) -> None:
        """Write the scale of a lane's matrix row, and what it is less than a float, each twice in 32 bits."""
        a, b = pieces_of(found, form, base, True)  # noqa: FBT003 (it is there)
        scale, zero = ptx.low_bf16(a) + ptx.high_bf16(a) + ptx.low_bf16(b), ptx.high_bf16(b)
        room[start], room[_BITS(start + _BITS(STRIP))] = both(scale, scale), both(-zero, -zero)

    @copied_function
    def ask_scale(of: Any, k: Any) -> Any:
        scales, zeros, mark, bits, form = of
        return ask_one(scales, zeros, _BITS(mark + _BITS(_BITS(k * _BITS(step)) >> _BITS(bits))), form)

    @copied_function
    def advance(
        sums: Any, codes: Any, asked: Any, k: Any, end: Any, which: Any, shared: Any, rows: Any, of: Any
    ) -> Any:
        """Multiply by a step, of which all is asked for, and ask for others."""
        room, address, even, own, kept_mask = shared
        copied, x_pitch, count = rows
        places, scales, base = of
        ptx.copied()
        cuda.syncthreads()
        after, other = _BITS(k + _BITS(1)), _BITS(_BITS(1) - which)
        if after < end:
            to = _BITS(address + _BITS(other * _BITS(stage)))
            fill(copied, _BITS(after * _BITS(row_bytes)), to, x_pitch, count)
            put(room, _BITS(own + _BITS(other * _BITS(kept))), asked, scales[4], base)
            asked = ask_scale(scales, min(_BITS(after + _BITS(1)), _BITS(end - _BITS(1))))
        start = _BITS(address + _BITS(which * _BITS(stage)))
        # All lanes write scales at their own places; four of them read those of the same four matrix rows.
        of_four = _BITS(_BITS(own & _BITS(~(OWN - 1) & 0xFFFFFFFF)) + _BITS(which * _BITS(kept)))
        own_scales = _BITS(address + _BITS(of_four << _BITS(2)))
        sums = products(sums, codes, _BITS(start + even), _BITS(start + (even ^ _BITS(64))), own_scales, kept_mask)
        if _BITS(k + _BITS(_STAGES)) < end:
            codes = _ask(places, _BITS(_BITS(k + _BITS(_STAGES)) * _BITS(own_bytes)))
        return sums, codes, asked

    def multiply_rows(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0915
        y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, more, parts, turns, size, width, rows,
        plus, plus_pitch, mode,
    ):  # fmt: skip
        room = cuda.shared.array(words, _BITS, alignment=128)
        lane, warp = _WORD(cuda.threadIdx.x) & _WORD(31), _WORD(ptx.of_first(_BITS(cuda.threadIdx.x >> 5)))
        g, t = lane >> _WORD(2), lane & _WORD(3)
        team, blocks, block = _BITS(cuda.blockDim.x >> 5), _BITS(cuda.gridDim.x), _BITS(cuda.blockIdx.x)
        one, of_strip = _BITS(1), _BITS(STRIP) if mode == ADD else _BITS(STRIP // 2)
        of_tile, steps = _BITS(team * of_strip), _BITS(width // _WORD(step))
        total = _BITS(_BITS(_BITS(_BITS(size) + of_tile - one) // of_tile) * steps)
        # Steps of all tiles are counted as those of one: the next that this block has, and where others have the rest.
        unit, until = _BITS(_BITS(block * total) // blocks), _BITS(_BITS(_BITS(block + one) * total) // blocks)
        address, own = _BITS(ptx.shared_address(room)), _BITS(_WORD(all_rows) + warp * _WORD(_SCALES) + lane)
        even = _BITS(g * _WORD(row_bytes) + ((g & _WORD(1)) << _WORD(6)) + t * _WORD(_VECTOR))
        base = _FLOAT(number) + ptx.float_of(_BITS(more))
        pitch, own_codes = _WORD(steps) * _WORD(own_bytes), codes + t * _WORD(_VECTOR)
        kept_mask = _BITS(_BITS(~ptx.active()) + _BITS(mask))  # a register, of which the compiler makes no constants
        copied = copies(x, x_pitch)
        shared, of_rows = (room, address, even, own, kept_mask), (copied, x_pitch, rows)
        while unit < until:
            ptx.roll()
            tile = _BITS(unit // steps)
            start = _BITS(tile * steps)
            k, end = _BITS(unit - start), min(steps, _BITS(until - start))
            last, is_first = _BITS(end - one), k == _BITS(0)
            column = _WORD(_BITS(_BITS(_BITS(tile * team) + _BITS(warp)) * of_strip)) + (g << _WORD(1))
            low, high = _pairs(column, size, mode)
            places = own_codes + low * pitch, own_codes + high * pitch, pitch
            # Of the four lanes that have the same matrix rows, each has the scale of one.
            own_row = (low if t < _WORD(2) else high) + (t & _WORD(1))
            next_one = min(_BITS(k + one), last)
            w0 = _ask_now(places, _BITS(k * _BITS(own_bytes)))
            w1 = _ask_now(places, _BITS(next_one * _BITS(own_bytes)))
            of_scales = scales, zeros, _BITS((own_row if has_zeros else own_row >> more) * groups), bits, form
            now, asked = ask_scale(of_scales, k), ask_scale(of_scales, next_one)
            ptx.after_earlier_with_next()
            fill(copied, _BITS(k * _BITS(row_bytes)), address, x_pitch, rows)
            put(room, own, now, form, base)
            sums = zeros_of()
            if plus != _WORD(0) and is_first:
                sums = begin(plus, plus_pitch, t << _WORD(1), rows - _WORD(1), low * _WORD(2), high * _WORD(2))
            of, which = (places, of_scales, base), _BITS(0)
            while k < end:
                sums, w0, asked = advance(sums, w0, asked, k, end, which, shared, of_rows, of)
                k, which = _BITS(k + one), _BITS(one - which)
                if k < end:
                    sums, w1, asked = advance(sums, w1, asked, k, end, which, shared, of_rows, of)
                    k, which = _BITS(k + one), _BITS(one - which)
            is_mine = is_first and end == steps
            if not is_mine:
                # The blocks that have the first step of the tile and the last one.
                begins = _BITS(_BITS(_BITS(_BITS(start + one) * blocks) - one) // total)
                ends = _BITS(_BITS(_BITS(_BITS(start + steps) * blocks) - one) // total)
                # A block leaves at most two: of a tile that others have begun, and behind it of one that it begins.
                own_part, pitch_part = parts + warp * _WORD(part) + lane * _WORD(_VECTOR), _WORD(team) * _WORD(part)
                leave(own_part + (_WORD(block + block) + _WORD(is_first)) * pitch_part, sums)
                ptx.near_fence()
                cuda.syncwarp()
                turn, others = _BITS(0), _BITS(ends - begins)
                if lane == _WORD(0):
                    turn = ptx.next_turn(turns + (_WORD(begins) * _WORD(team) + warp) * _WORD(4), others)
                turn = ptx.of_first(turn)
                ptx.near_fence()
                is_mine = turn == others
                if is_mine:
                    sums, place = zeros_of(), _BITS(begins + begins + one)
                    while begins <= ends:
                        ptx.roll()
                        sums = with_left(sums, own_part + _WORD(place) * pitch_part)
                        begins = _BITS(begins + one)
                        place = _BITS(begins + begins)
            if is_mine:
                row = t << _WORD(1)
                while row < rows:
                    ptx.roll()
                    store(sums, y, y_pitch, row, rows, column, size, mode)
                    sums, row = turned(sums), row + _WORD(_EIGHT)
            unit = _BITS(start + end)
            cuda.syncthreads()  # as the next step is written over the last one

    return Kernel(name, multiply_rows, 19, bounds=(32 * warps, 1))


def __getattr__(name: str) -> Kernel:
    """Return the kernel of a dtype of rows, a kind of codes and a number of rows, such as ``WIDE_BF16_E4M3_64``."""
    found = _NAME.fullmatch(name)
    if not found:
        raise AttributeError(name)
    rows = int(found["rows"])
    return _wide(name.lower(), getattr(packed_codes, found["kind"]), rows // _EIGHT, WARPS[rows])
