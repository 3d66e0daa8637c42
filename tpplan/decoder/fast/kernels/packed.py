"""Kernels that multiply up to sixteen rows by a matrix of codes, in the time that reading the codes takes.

Tensor cores multiply, as in :mod:`tpplan.decoder.fast.kernels.skinny`. A step is 64 bytes of a matrix row: 128 columns
of 4 bits, or 64 of 8. Of it lane 4 g + t has

================  ====================  ====================
of                columns of 4 bits     columns of 8 bits
================  ====================  ====================
matrix row g      32 t to 32 t + 31     16 t to 16 t + 15
matrix row g + 8  the same              the same
row g             the same              the same
================  ====================  ====================

A warp has up to four steps that follow each other on their way, mostly into shared memory, and no other warp has these;
of more than eight rows, two steps of tiles that are twice as high, because these rows are read for each tile. What
warps have found is added up in a fixed order.

Of every group of columns that share a scale, a product is

    (sum of (base + code) x  -  (base + zero) sum of x)  scale

where base + code is what :mod:`tpplan.decoder.fast.kernels.packed_codes` makes of a code. Rows are multiplied by ones
for the sum of x; of floats, which have neither base nor zeros, there is nothing to take off.

The instruction multiplies 16 matrix rows by eight rows, of 16 columns; lane 4 g + t has

==========  =================  =================================================================================
registers   of                 are
==========  =================  =================================================================================
left 0, 2   matrix row g       pairs 2 t and 2 t + 1 of the columns, which are in any order, the same on all sides
left 1, 3   matrix row g + 8   the same pairs
right 0, 1  row g              the same pairs
sums 0, 1   matrix row g       with rows 2 t and 2 t + 1
sums 2, 3   matrix row g + 8   with rows 2 t and 2 t + 1
==========  =================  =================================================================================

where columns that a lane has of all rows are neighbours: its pairs are those of a word of codes, or of half of one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from attrs import frozen

from tpplan.decoder.fast.kernels import dot_products, tiles
from tpplan.decoder.fast.kernels.dot_products import eight_of
from tpplan.decoder.fast.kernels.finishing import ADD, add_up_of
from tpplan.decoder.fast.kernels.gemv import norm_of
from tpplan.decoder.fast.kernels.packed_codes import BF16_4, BF16_8, BF16_E4M3, F16_4, F16_8, F16_E4M3, Codes
from tpplan.decoder.fast.kernels.packed_scales import chosen, matrix_rows
from tpplan.decoder.fast.kernels.tile_sums import TILE, rows_of, tile_sums
from tpplan.decoder.fast.kernels.tiles import all_of
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.channel import end_sum, wait_of
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.protocol.channel import CALLERS
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64, cuda, intrinsic, ir

#: In shared memory: bytes of a warp's step, of one of a lane's two matrix rows in it, and words of all steps of a warp.
_STEP_BYTES, _ROW_BYTES, WARP_WORDS = 1024, 512, 1024


@frozen
class Way:
    """How a lane's codes of a step are asked for, and where they are until they are needed.

    All take where the warp's are in shared memory, and the number of a step among those on their way.

    Attributes:
        first: asks for those of a step, before all else, given its first column and whether a warp has so many.
        ask: the same later, if there is such a step, in the place of those asked for before.
        take: returns those asked for.
    """

    first: Any
    ask: Any
    take: Any


@cache
def by_registers(kind: Codes, tall: int) -> Way:
    """Return how codes of two matrix rows, or four, come into registers.

    Args:
        kind: of codes.
        tall: times that a tile has 16 matrix rows.
    """
    halvings = kind.halvings

    def loading(load: Any) -> Any:
        @device_function
        def two(at: Any, column: Any) -> Any:
            to = UINT64(column) >> UINT64(halvings)
            return load(at[0] + to) + load(at[1] + to)

        @device_function
        def four(at: Any, column: Any) -> Any:
            to = UINT64(column) >> UINT64(halvings)
            return load(at[0] + to) + load(at[1] + to) + load(at[2] + to) + load(at[3] + to)

        return {1: two, 2: four}[tall]

    load_now, load = loading(ptx.poll_128), loading(ptx.stream_128)

    @device_function
    def first(_: Any, number: Any, at: Any, column: Any, is_there: Any) -> Any:  # noqa: ARG001
        return load_now(at, column)

    @device_function
    def ask(_: Any, number: Any, at: Any, column: Any, is_there: Any, codes: Any) -> Any:  # noqa: ARG001
        return load(at, column) if is_there else codes

    @device_function
    def take(_: Any, number: Any, codes: Any) -> Any:  # noqa: ARG001
        return codes

    return Way(first, ask, take)


@cache
def by_shared_memory(kind: Codes) -> Way:
    """Return how codes of two matrix rows are copied into shared memory, by each lane what it needs itself.

    The assembler moves loads into registers behind all products of the tile before, so that nothing is on its way
    during these. On an H200 a gate of 28,672 x 4,096 takes 33 us by registers and 27 by shared memory, of e4m3 52 and
    37; but of whole numbers of 8 bits 42 and 44.
    """
    halvings = kind.halvings

    @device_function
    def first(room: Any, number: Any, at: Any, column: Any, is_there: Any) -> Any:
        if is_there:
            to, place = UINT64(column) >> UINT64(halvings), room + UINT64(_STEP_BYTES * number)
            ptx.copy_128(UINT32(place), at[0] + to)
            ptx.copy_128(UINT32(place + UINT64(_ROW_BYTES)), at[1] + to)
        ptx.end_copies()
        return number

    @device_function
    def ask(room: Any, number: Any, at: Any, column: Any, is_there: Any, codes: Any) -> Any:
        first(room, number, at, column, is_there)
        return codes

    @device_function
    def take(room: Any, number: Any, _: Any) -> Any:
        ptx.copied_but_three()
        place = room + UINT64(_STEP_BYTES * number)
        return ptx.shared_load_128(place) + ptx.shared_load_128(place + UINT64(_ROW_BYTES))

    return Way(first, ask, take)


@device_function
def _two_vectors(at: Any) -> Any:
    return ptx.load_128(at) + ptx.load_128(at + UINT64(16))


@device_function
def _four_vectors(at: Any) -> Any:
    first, second = ptx.load_128(at) + ptx.load_128(at + UINT64(16)), ptx.load_128(at + UINT64(32))
    return first + second + ptx.load_128(at + UINT64(48))


@device_function
def _four_kept_vectors(at: Any) -> Any:
    first, second = ptx.shared_load_128(at) + ptx.shared_load_128(at + UINT64(16)), ptx.shared_load_128(at + UINT64(32))
    return first + second + ptx.shared_load_128(at + UINT64(48))


@cache
def looking_at(kind: Codes, eights: int, *, kept: bool = False) -> Any:
    """Make what asks for what a lane has of its rows, one of each eight.

    Args:
        kind: of codes and rows.
        eights: of rows: 1 or 2.
        kept: whether the rows are in shared memory; of codes of 4 bits.
    """
    quarter = _four_kept_vectors if kept else {8: _two_vectors, 16: _four_vectors}[kind.part]

    @device_function
    def look_at_one(at: Any, column: Any) -> Any:
        return quarter(at[0] + UINT64(column) * UINT64(2))

    @device_function
    def look_at_two(at: Any, column: Any) -> Any:
        return quarter(at[0] + UINT64(column) * UINT64(2)) + quarter(at[1] + UINT64(column) * UINT64(2))

    return {1: look_at_one, 2: look_at_two}[eights]


#: Registers of a lane's codes of a matrix row, and pairs of an instruction.
_CODES, _PAIRS = 4, 2
_INT, _FLOAT = ir.IntType(32), ir.FloatType()


@cache
def products_of(kind: Codes) -> Any:  # noqa: C901 (the instructions)
    """Return an intrinsic that adds the products of a tile and some rows, of one step.

    It takes the sums so far, four for every 16 matrix rows and eight rows; the codes of the lane's matrix rows; what it
    has of every eighth row; for each matrix row the scale, and base and zero together; and the mask of codes.

    Args:
        kind: of codes.
    """
    nothing, one = ir.Constant(_FLOAT, 0.0), ir.Constant(_INT, kind.floats.one)
    part, multiply, is_less = kind.part, kind.floats.multiply, kind.base is not None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        totals, codes, rows, scales, bases = (all_of(builder, each) for each in values[:-1])
        eights = len(rows) // part
        ones = [[nothing] * 4 for _ in range(eights)]
        for tile in range(len(codes) // (2 * _CODES)):
            sums = [[nothing] * 4 for _ in range(eights)]
            for i in range(_CODES):
                at = 2 * tile * _CODES + i
                low, high = (kind.pairs(builder, codes[each], values[-1]) for each in (at, at + _CODES))
                for k in range(0, len(low), _PAIRS):
                    left = [low[k], high[k], low[k + 1], high[k + 1]]
                    for j in range(eights):
                        start = j * part + len(low) * i + k
                        right = rows[start : start + _PAIRS]
                        sums[j] = multiply(builder, left + right + sums[j])
                        if is_less and not tile:
                            ones[j] = multiply(builder, [one] * 4 + right + ones[j])
            for half in range(2):
                scale, base = scales[2 * tile + half], bases[2 * tile + half]
                for j in range(eights):
                    for i in (2 * half, 2 * half + 1):
                        at, exact = 4 * (tile * eights + j) + i, sums[j][i]
                        if is_less:
                            exact = builder.fsub(exact, builder.fmul(base, ones[j][i]))
                        totals[at] = builder.fadd(totals[at], builder.fmul(scale, exact))
        return context.make_tuple(builder, signature.return_type, totals)

    def typer(typingctx, totals, codes, rows, scales, bases, kept):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return totals(totals, codes, rows, scales, bases, kept), codegen

    return intrinsic(typer)


#: Warps of a block, at most.
MOST_WARPS = 8
#: Bits of a code that is a byte.
_BYTE = 8


def _packed(  # noqa: C901, PLR0915 (the kernel)
    name: str, kind: Codes, eights: int, *, normed: int = 0, joint: bool = False
) -> Kernel:
    """Make a kernel for up to so many rows.

    Its words:

    - y, its pitch: where the result goes.
    - x, its pitch: rows.
    - codes, scales, zeros: of the matrix, which no kernel that may still run writes; zeros may be 0.
    - groups, bits: scales beside each other, and the power of two that their columns are.
    - form: the kind of scales, see :mod:`tpplan.decoder.fast.kernels.scale_kinds`.
    - more: of whole numbers a float32, which is added to stored zeros, or is all of them if none are; of floats the
      power of two that the rows are that share a scale.
    - run: steps that a warp has on their way, up to four; of more than eight rows up to two.
    - size: columns of the result.
    - width: columns of the matrix, whole steps.
    - rows: how many.
    - plus, its pitch, mode: see :func:`tpplan.decoder.fast.kernels.finishing.finish_of`.
    - gain, eps, offset: weights of a norm, what is added to the mean square, and to the weights; only of such kernels.

    Args:
        name: of it.
        kind: of codes and rows.
        eights: of rows: 1 or 2; a tile has 16 matrix rows for each.
        normed: how many rows, 1 or 2, are divided by their root mean square first, see
            :func:`tpplan.decoder.fast.kernels.gemv.norm_of`; they are in shared memory that the launch asks for. With 0
            rows are as they are.
        joint: whether the products of all devices are added up, see :mod:`tpplan.exec.kernels.channel`; there
            is no mode then, and the words are the caller's.
    """
    first, both = kind.floats.first, kind.floats.both
    found = tile_sums(first, both, eights, MOST_WARPS, tall=eights, joint=joint)
    keep, finish, floats, kept, half = found.keep, found.finish, found.floats, found.warp, found.half
    own_rows = matrix_rows(kind, eights)
    numbers_of, places_of, marks_of, ask_scales = own_rows.numbers, own_rows.places, own_rows.marks, own_rows.ask
    made, told = own_rows.made, own_rows.told
    is_normed = normed > 0
    row_places, look, wait = rows_of(eights), looking_at(kind, eights, kept=is_normed), wait_of(joint=joint)
    ask_gain, norm = norm_of(normed or 1, eight_of(first, kind.floats.second), both)
    offsets = dot_products.offsets_of(normed or 1)
    products, add_up = products_of(kind), add_up_of(first, both)
    is_deep = eights == 1  # four steps are on their way, and a lane has its part of the rows of two
    step, halvings, part, has_zeros = kind.step, kind.halvings, 4 * kind.part, kind.base is not None
    is_shared = is_deep and not (kind.bits == _BYTE and has_zeros)
    way = by_shared_memory(kind) if is_shared else by_registers(kind, eights)
    ask_first, ask, take, words = way.first, way.ask, way.take, MOST_WARPS * WARP_WORDS if is_shared else 4
    zeros_of, no_rows = tiles.zeros(4 * eights * eights), tiles.zeros(eights * kind.part, UINT32)
    number, mask = kind.base or 0, kind.mask

    @device_function
    def multiply_rows(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915
        y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, more, run, size, width, rows,
        plus, plus_pitch, mode, gain, eps, offset,
    ):  # fmt: skip
        sums, on_their_way = cuda.shared.array(floats, FLOAT32), cuda.shared.array(words, UINT32, alignment=16)
        lane, warp = UINT64(cuda.threadIdx.x) & UINT64(31), UINT64(ptx.of_first(UINT32(cuda.threadIdx.x >> 5)))
        g, t = lane >> UINT64(2), lane & UINT64(3)
        long, width32, size32 = UINT32(run * UINT64(step)), UINT32(width), UINT32(size)
        begin, wide = UINT32(UINT32(warp) * long), UINT32(UINT32(cuda.blockDim.x >> 5) * long)
        last, own, mine = UINT32(width32 - UINT32(step)), codes + t * UINT64(16), UINT32(t * UINT64(step))
        pitch = width >> UINT64(halvings)
        base = FLOAT32(number) + ptx.float_of(UINT32(more)) if has_zeros else FLOAT32(0)
        per = UINT32(TILE * eights) if mode == ADD else UINT32(TILE // 2 * eights)
        start, stride = UINT32(UINT32(cuda.blockIdx.x) * per), UINT32(UINT32(cuda.gridDim.x) * per)
        numbers = numbers_of(UINT64(start) + g, size, mode)
        places, marks = places_of(numbers, own, pitch), marks_of(numbers, groups, more)
        room = ptx.shared_address(on_their_way) + warp * UINT64(4 * WARP_WORDS) + lane * UINT64(16)
        w0 = ask_first(room, 0, places, min(begin, last), run > UINT64(0))
        w1 = ask_first(room, 1, places, min(UINT32(begin + UINT32(step)), last), run > UINT64(1))
        if is_deep:
            w2 = ask_first(room, 2, places, min(UINT32(begin + UINT32(2 * step)), last), run > UINT64(2))
            w3 = ask_first(room, 3, places, min(UINT32(begin + UINT32(3 * step)), last), run > UINT64(3))
        s = ask_scales(scales, zeros, marks, UINT32(min(UINT32(begin + mine), last) >> UINT32(bits)), form)
        if is_normed:
            asked = ask_gain(gain, width)
        turn, is_alone = wait()
        if is_normed:  # while codes come
            rows_kept = cuda.shared.array(0, UINT32, alignment=16)
            into, pitch_kept = ptx.shared_address(rows_kept), width * UINT64(2)
            norm(into, sums, x, offsets(x_pitch), offsets(pitch_kept), width, asked, gain, eps, offset)
            x, x_pitch = into, pitch_kept
        at, is_row, p, q = row_places(x + t * UINT64(part), x_pitch, g, rows), g < rows, no_rows(), no_rows()
        if is_row:  # or the lane's is no row's, and asks for nothing
            p = look(at, min(begin, last))
            if is_deep:
                q = look(at, min(UINT32(begin + UINT32(step)), last))
        totals, near, buffer = zeros_of(), UINT32(0), UINT32(0)
        kept_mask = UINT32(UINT32(~ptx.active()) + UINT32(mask))  # a register, of which the compiler makes no constants
        while start < size32:
            following, far, here = start, UINT32(near + wide), UINT32(near + begin)
            left = UINT32(min(UINT32(here + long), width32) - here) if here < width32 else UINT32(0)
            if far >= width32:
                following, far = UINT32(start + stride), UINT32(0)
                numbers = numbers_of(UINT64(following) + g, size, mode)
                places, marks = places_of(numbers, own, pitch), marks_of(numbers, groups, more)
            there, then = UINT32(far + begin), UINT32(0)
            if there < width32 and following < size32:
                then = UINT32(min(UINT32(there + long), width32) - there)
            pieces = made(s, form, base, left > mine)
            if then > UINT32(0):
                s = ask_scales(scales, zeros, marks, UINT32(min(UINT32(there + mine), last) >> UINT32(bits)), form)
            its_scales, its_zeros = told(pieces, chosen(0, g, t))
            totals = products(totals, take(room, 0, w0), p, its_scales, its_zeros, kept_mask)
            w0 = ask(room, 0, places, there, then > UINT32(0), w0)
            if is_deep:
                if left > UINT32(2 * step) and is_row:
                    p = look(at, UINT32(here + UINT32(2 * step)))
            elif left > UINT32(step) and is_row:
                p = look(at, UINT32(here + UINT32(step)))
            its_scales, its_zeros = told(pieces, chosen(1, g, t))
            codes_1 = take(room, 1, w1)
            if run > UINT64(1):
                totals = products(totals, codes_1, q if is_deep else p, its_scales, its_zeros, kept_mask)
            w1 = ask(room, 1, places, UINT32(there + UINT32(step)), then > UINT32(step), w1)
            if is_deep:
                if left > UINT32(3 * step) and is_row:
                    q = look(at, UINT32(here + UINT32(3 * step)))
                its_scales, its_zeros = told(pieces, chosen(2, g, t))
                codes_2 = take(room, 2, w2)
                if run > UINT64(2):
                    totals = products(totals, codes_2, p, its_scales, its_zeros, kept_mask)
                w2 = ask(room, 2, places, UINT32(there + UINT32(2 * step)), then > UINT32(2 * step), w2)
            if then > UINT32(0) and is_row:
                p = look(at, there)
            if is_deep:
                its_scales, its_zeros = told(pieces, chosen(3, g, t))
                codes_3 = take(room, 3, w3)
                if run > UINT64(3):
                    totals = products(totals, codes_3, q, its_scales, its_zeros, kept_mask)
                w3 = ask(room, 3, places, UINT32(there + UINT32(3 * step)), then > UINT32(3 * step), w3)
                if then > UINT32(step) and is_row:
                    q = look(at, UINT32(there + UINT32(step)))
            near = far
            if far == UINT32(0):
                keep(sums, totals, UINT64(buffer) + warp * UINT64(kept), g, t)
                cuda.syncthreads()
                finish(sums, UINT64(buffer), UINT64(start), y, y_pitch, plus, plus_pitch, size, rows, mode, turn)
                # The next tile's sums go elsewhere: not all threads may have read these.
                totals, start, buffer = zeros_of(), following, UINT32(UINT32(half) - buffer)
        if joint:
            end_sum(turn, is_alone)
            add_up(y, y_pitch, plus, plus_pitch, size, rows, turn)

    def alone(  # type: ignore[no-untyped-def]
        y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, more, run, size, width, rows,
        plus, plus_pitch, mode,
    ):  # fmt: skip
        multiply_rows(
            y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, more, run, size, width, rows,
            plus, plus_pitch, mode, UINT64(0), UINT64(0), UINT64(0),
        )  # fmt: skip

    def behind_norm(  # type: ignore[no-untyped-def]
        y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, more, run, size, width, rows,
        plus, plus_pitch, mode, gain, eps, offset,
    ):  # fmt: skip
        multiply_rows(
            y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, more, run, size, width, rows,
            plus, plus_pitch, mode, gain, eps, offset,
        )  # fmt: skip

    def together(_words):  # type: ignore[no-untyped-def]
        multiply_rows(
            word(CALLERS), word(CALLERS + 1), word(CALLERS + 2), word(CALLERS + 3), word(CALLERS + 4),
            word(CALLERS + 5), word(CALLERS + 6), word(CALLERS + 7), word(CALLERS + 8), word(CALLERS + 9),
            word(CALLERS + 10), word(CALLERS + 11), word(CALLERS + 12), word(CALLERS + 13), word(CALLERS + 14),
            word(CALLERS + 15), word(CALLERS + 16), UINT64(ADD), UINT64(0), UINT64(0), UINT64(0),
        )  # fmt: skip

    bounds = (32 * MOST_WARPS, 2 // eights)
    if is_normed:
        return Kernel(name, behind_norm, 21, bounds=bounds)
    return Kernel(name, together, 1, bounds=bounds) if joint else Kernel(name, alone, 18, bounds=bounds)


PACKED_BF16_4_8 = _packed("packed_bf16_4_8", BF16_4, 1)
PACKED_BF16_4_16 = _packed("packed_bf16_4_16", BF16_4, 2)
PACKED_NORM_BF16_4_1 = _packed("packed_norm_bf16_4_1", BF16_4, 1, normed=1)
PACKED_NORM_BF16_4_2 = _packed("packed_norm_bf16_4_2", BF16_4, 1, normed=2)
PACKED_JOINT_BF16_4_8 = _packed("packed_joint_bf16_4_8", BF16_4, 1, joint=True)
PACKED_BF16_8_8 = _packed("packed_bf16_8_8", BF16_8, 1)
PACKED_BF16_8_16 = _packed("packed_bf16_8_16", BF16_8, 2)
PACKED_JOINT_BF16_8_8 = _packed("packed_joint_bf16_8_8", BF16_8, 1, joint=True)
PACKED_BF16_E4M3_8 = _packed("packed_bf16_e4m3_8", BF16_E4M3, 1)
PACKED_BF16_E4M3_16 = _packed("packed_bf16_e4m3_16", BF16_E4M3, 2)
PACKED_JOINT_BF16_E4M3_8 = _packed("packed_joint_bf16_e4m3_8", BF16_E4M3, 1, joint=True)
PACKED_F16_4_8 = _packed("packed_f16_4_8", F16_4, 1)
PACKED_F16_4_16 = _packed("packed_f16_4_16", F16_4, 2)
PACKED_NORM_F16_4_1 = _packed("packed_norm_f16_4_1", F16_4, 1, normed=1)
PACKED_NORM_F16_4_2 = _packed("packed_norm_f16_4_2", F16_4, 1, normed=2)
PACKED_JOINT_F16_4_8 = _packed("packed_joint_f16_4_8", F16_4, 1, joint=True)
PACKED_F16_8_8 = _packed("packed_f16_8_8", F16_8, 1)
PACKED_F16_8_16 = _packed("packed_f16_8_16", F16_8, 2)
PACKED_JOINT_F16_8_8 = _packed("packed_joint_f16_8_8", F16_8, 1, joint=True)
PACKED_F16_E4M3_8 = _packed("packed_f16_e4m3_8", F16_E4M3, 1)
PACKED_F16_E4M3_16 = _packed("packed_f16_e4m3_16", F16_E4M3, 2)
PACKED_JOINT_F16_E4M3_8 = _packed("packed_joint_f16_e4m3_8", F16_E4M3, 1, joint=True)
