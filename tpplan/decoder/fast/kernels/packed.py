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
"""

from __future__ import annotations

from tpplan.decoder.fast.kernels import tiles
from tpplan.decoder.fast.kernels.finishing import ADD, add_up_of
from tpplan.decoder.fast.kernels.packed_codes import BF16_4, BF16_8, BF16_E4M3, F16_4, F16_8, F16_E4M3, Codes
from tpplan.decoder.fast.kernels.packed_loads import WARP_WORDS, by_registers, by_shared_memory, looking_at
from tpplan.decoder.fast.kernels.packed_products import products_of
from tpplan.decoder.fast.kernels.packed_scales import chosen, matrix_rows
from tpplan.decoder.fast.kernels.tile_sums import TILE, rows_of, tile_sums
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.channel import end_sum, wait_of
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.protocol.channel import CALLERS
from tpplan.exec.toolchain.language import cuda, types

#: Warps of a block, at most.
MOST_WARPS = 8
#: Bits of a code that is a byte.
_BYTE = 8
_WORD, _FLOAT, _BITS = types.uint64, types.float32, types.uint32


def _packed(  # noqa: C901, PLR0915 (the kernel)
    name: str, kind: Codes, eights: int, *, joint: bool = False
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

    Args:
        name: of it.
        kind: of codes and rows.
        eights: of rows: 1 or 2; a tile has 16 matrix rows for each.
        joint: whether the products of all devices are added up, see :mod:`tpplan.exec.kernels.channel`; there
            is no mode then, and the words are the caller's.
    """
    first, both = kind.floats.first, kind.floats.both
    found = tile_sums(first, both, eights, MOST_WARPS, tall=eights, joint=joint)
    keep, finish, floats, kept, half = found.keep, found.finish, found.floats, found.warp, found.half
    own_rows = matrix_rows(kind, eights)
    numbers_of, places_of, marks_of, ask_scales = own_rows.numbers, own_rows.places, own_rows.marks, own_rows.ask
    made, told = own_rows.made, own_rows.told
    row_places, look, wait = rows_of(eights), looking_at(kind, eights), wait_of(joint=joint)
    products, add_up = products_of(kind), add_up_of(first, both)
    is_deep = eights == 1  # four steps are on their way, and a lane has its part of the rows of two
    step, halvings, part, has_zeros = kind.step, kind.halvings, 4 * kind.part, kind.base is not None
    is_shared = is_deep and not (kind.bits == _BYTE and has_zeros)
    way = by_shared_memory(kind) if is_shared else by_registers(kind, eights)
    ask_first, ask, take, words = way.first, way.ask, way.take, MOST_WARPS * WARP_WORDS if is_shared else 4
    zeros_of, no_rows = tiles.zeros(4 * eights * eights), tiles.zeros(eights * kind.part, _BITS)
    number, mask = kind.base or 0, kind.mask

    @device_function
    def multiply_rows(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915
        y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, more, run, size, width, rows,
        plus, plus_pitch, mode,
    ):  # fmt: skip
        sums, on_their_way = cuda.shared.array(floats, _FLOAT), cuda.shared.array(words, _BITS, alignment=16)
        lane, warp = _WORD(cuda.threadIdx.x) & _WORD(31), _WORD(ptx.of_first(_BITS(cuda.threadIdx.x >> 5)))
        g, t = lane >> _WORD(2), lane & _WORD(3)
        long, width32, size32 = _BITS(run * _WORD(step)), _BITS(width), _BITS(size)
        begin, wide = _BITS(_BITS(warp) * long), _BITS(_BITS(cuda.blockDim.x >> 5) * long)
        last, own, mine = _BITS(width32 - _BITS(step)), codes + t * _WORD(16), _BITS(t * _WORD(step))
        pitch = width >> _WORD(halvings)
        base = _FLOAT(number) + ptx.float_of(_BITS(more)) if has_zeros else _FLOAT(0)
        per = _BITS(TILE * eights) if mode == ADD else _BITS(TILE // 2 * eights)
        start, stride = _BITS(_BITS(cuda.blockIdx.x) * per), _BITS(_BITS(cuda.gridDim.x) * per)
        numbers = numbers_of(_WORD(start) + g, size, mode)
        places, marks = places_of(numbers, own, pitch), marks_of(numbers, groups, more)
        room = ptx.shared_address(on_their_way) + warp * _WORD(4 * WARP_WORDS) + lane * _WORD(16)
        w0 = ask_first(room, 0, places, min(begin, last), run > _WORD(0))
        w1 = ask_first(room, 1, places, min(_BITS(begin + _BITS(step)), last), run > _WORD(1))
        if is_deep:
            w2 = ask_first(room, 2, places, min(_BITS(begin + _BITS(2 * step)), last), run > _WORD(2))
            w3 = ask_first(room, 3, places, min(_BITS(begin + _BITS(3 * step)), last), run > _WORD(3))
        s = ask_scales(scales, zeros, marks, _BITS(min(_BITS(begin + mine), last) >> _BITS(bits)), form)
        turn, is_alone = wait()
        at, is_row, p, q = row_places(x + t * _WORD(part), x_pitch, g, rows), g < rows, no_rows(), no_rows()
        if is_row:  # or the lane's is no row's, and asks for nothing
            p = look(at, min(begin, last))
            if is_deep:
                q = look(at, min(_BITS(begin + _BITS(step)), last))
        totals, near, buffer = zeros_of(), _BITS(0), _BITS(0)
        kept_mask = _BITS(_BITS(~ptx.active()) + _BITS(mask))  # a register, of which the compiler makes no constants
        while start < size32:
            following, far, here = start, _BITS(near + wide), _BITS(near + begin)
            left = _BITS(min(_BITS(here + long), width32) - here) if here < width32 else _BITS(0)
            if far >= width32:
                following, far = _BITS(start + stride), _BITS(0)
                numbers = numbers_of(_WORD(following) + g, size, mode)
                places, marks = places_of(numbers, own, pitch), marks_of(numbers, groups, more)
            there, then = _BITS(far + begin), _BITS(0)
            if there < width32 and following < size32:
                then = _BITS(min(_BITS(there + long), width32) - there)
            pieces = made(s, form, base, left > mine)
            if then > _BITS(0):
                s = ask_scales(scales, zeros, marks, _BITS(min(_BITS(there + mine), last) >> _BITS(bits)), form)
            its_scales, its_zeros = told(pieces, chosen(0, g, t))
            totals = products(totals, take(room, 0, w0), p, its_scales, its_zeros, kept_mask)
            w0 = ask(room, 0, places, there, then > _BITS(0), w0)
            if is_deep:
                if left > _BITS(2 * step) and is_row:
                    p = look(at, _BITS(here + _BITS(2 * step)))
            elif left > _BITS(step) and is_row:
                p = look(at, _BITS(here + _BITS(step)))
            its_scales, its_zeros = told(pieces, chosen(1, g, t))
            codes_1 = take(room, 1, w1)
            if run > _WORD(1):
                totals = products(totals, codes_1, q if is_deep else p, its_scales, its_zeros, kept_mask)
            w1 = ask(room, 1, places, _BITS(there + _BITS(step)), then > _BITS(step), w1)
            if is_deep:
                if left > _BITS(3 * step) and is_row:
                    q = look(at, _BITS(here + _BITS(3 * step)))
                its_scales, its_zeros = told(pieces, chosen(2, g, t))
                codes_2 = take(room, 2, w2)
                if run > _WORD(2):
                    totals = products(totals, codes_2, p, its_scales, its_zeros, kept_mask)
                w2 = ask(room, 2, places, _BITS(there + _BITS(2 * step)), then > _BITS(2 * step), w2)
            if then > _BITS(0) and is_row:
                p = look(at, there)
            if is_deep:
                its_scales, its_zeros = told(pieces, chosen(3, g, t))
                codes_3 = take(room, 3, w3)
                if run > _WORD(3):
                    totals = products(totals, codes_3, q, its_scales, its_zeros, kept_mask)
                w3 = ask(room, 3, places, _BITS(there + _BITS(3 * step)), then > _BITS(3 * step), w3)
                if then > _BITS(step) and is_row:
                    q = look(at, _BITS(there + _BITS(step)))
            near = far
            if far == _BITS(0):
                keep(sums, totals, _WORD(buffer) + warp * _WORD(kept), g, t)
                cuda.syncthreads()
                finish(sums, _WORD(buffer), _WORD(start), y, y_pitch, plus, plus_pitch, size, rows, mode, turn)
                # The next tile's sums go elsewhere: not all threads may have read these.
                totals, start, buffer = zeros_of(), following, _BITS(_BITS(half) - buffer)
        if joint:
            end_sum(turn, is_alone)
            add_up(y, y_pitch, plus, plus_pitch, size, rows, turn)

    def alone(  # type: ignore[no-untyped-def]
        y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, more, run, size, width, rows,
        plus, plus_pitch, mode,
    ):  # fmt: skip
        multiply_rows(
            y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, more, run, size, width, rows,
            plus, plus_pitch, mode,
        )  # fmt: skip

    def together(_words):  # type: ignore[no-untyped-def]
        multiply_rows(
            word(CALLERS), word(CALLERS + 1), word(CALLERS + 2), word(CALLERS + 3), word(CALLERS + 4),
            word(CALLERS + 5), word(CALLERS + 6), word(CALLERS + 7), word(CALLERS + 8), word(CALLERS + 9),
            word(CALLERS + 10), word(CALLERS + 11), word(CALLERS + 12), word(CALLERS + 13), word(CALLERS + 14),
            word(CALLERS + 15), word(CALLERS + 16), _WORD(ADD),
        )  # fmt: skip

    bounds = (32 * MOST_WARPS, 2 // eights)
    return Kernel(name, together, 1, bounds=bounds) if joint else Kernel(name, alone, 18, bounds=bounds)


PACKED_BF16_4_8 = _packed("packed_bf16_4_8", BF16_4, 1)
PACKED_BF16_4_16 = _packed("packed_bf16_4_16", BF16_4, 2)
PACKED_JOINT_BF16_4_8 = _packed("packed_joint_bf16_4_8", BF16_4, 1, joint=True)
PACKED_BF16_8_8 = _packed("packed_bf16_8_8", BF16_8, 1)
PACKED_BF16_8_16 = _packed("packed_bf16_8_16", BF16_8, 2)
PACKED_JOINT_BF16_8_8 = _packed("packed_joint_bf16_8_8", BF16_8, 1, joint=True)
PACKED_BF16_E4M3_8 = _packed("packed_bf16_e4m3_8", BF16_E4M3, 1)
PACKED_BF16_E4M3_16 = _packed("packed_bf16_e4m3_16", BF16_E4M3, 2)
PACKED_JOINT_BF16_E4M3_8 = _packed("packed_joint_bf16_e4m3_8", BF16_E4M3, 1, joint=True)
PACKED_F16_4_8 = _packed("packed_f16_4_8", F16_4, 1)
PACKED_F16_4_16 = _packed("packed_f16_4_16", F16_4, 2)
PACKED_JOINT_F16_4_8 = _packed("packed_joint_f16_4_8", F16_4, 1, joint=True)
PACKED_F16_8_8 = _packed("packed_f16_8_8", F16_8, 1)
PACKED_F16_8_16 = _packed("packed_f16_8_16", F16_8, 2)
PACKED_JOINT_F16_8_8 = _packed("packed_joint_f16_8_8", F16_8, 1, joint=True)
PACKED_F16_E4M3_8 = _packed("packed_f16_e4m3_8", F16_E4M3, 1)
PACKED_F16_E4M3_16 = _packed("packed_f16_e4m3_16", F16_E4M3, 2)
PACKED_JOINT_F16_E4M3_8 = _packed("packed_joint_f16_e4m3_8", F16_E4M3, 1, joint=True)
