"""Scales and zeros of matrices of codes, and the matrix rows of a lane, as kernels find them.

Lane 4 g + t has matrix rows g and g + 8 of every 16, or gate g and what it is for. It asks for their scales and zeros
of step t only, of the four steps that a warp may have on their way. The lanes of a matrix row tell each other by tensor
cores, exactly: a scale is a sum of three bfloat16, base and zero together are one; these are multiplied by ones, and
what other lanes have by zeros:

==========  =================  =====================================================================================
registers   of                 are
==========  =================  =====================================================================================
left 0, 2   matrix row g       of step t: first and second piece of the scale; its third piece, and base with zero
left 1, 3   matrix row g + 8   the same
right 0, 1  column g           where t is the step: 1, 1 and 1, 0 if g is even; 0, 0 and 0, 1 if not; else zeros
sums 0, 1   matrix row g       of the step: the scale, and base with zero
sums 2, 3   matrix row g + 8   the same
==========  =================  =====================================================================================

Shuffles would do as well, but before sm_90 make the assembler keep much else in memory.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import frozen

from tpplan.decoder.fast.kernels.finishing import ADD
from tpplan.decoder.fast.kernels.scale_kinds import BF16, F16, F32
from tpplan.decoder.fast.kernels.tile_sums import TILE
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import copied_function
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64, intrinsic, ir, types

if TYPE_CHECKING:
    from tpplan.decoder.fast.kernels.packed_codes import Codes

#: In bfloat16.
_ONE = 0x3F80
_EIGHT = TILE // 2


@frozen
class MatrixRows:
    """What knows a lane's matrix rows.

    Attributes:
        numbers: returns them, given the first row of the tile and g, the columns of the result, and the mode.
        places: returns their addresses, given the first one's and the bytes of a row.
        marks: returns where the scales of each begin, given how many a row of blocks has, and the power of two that
            the rows of a block are, which matters of floats only.
        ask: asks for scales and zeros, given where they are, the marks, a group, and the kind of scales.
        made: returns the pieces of scales, and bases with zeros, of what was asked for; scales are 0 of no step.
        told: returns those of a step, which one of four lanes has, given pieces and what :func:`chosen` returns.
    """

    numbers: Any
    places: Any
    marks: Any
    ask: Any
    made: Any
    told: Any


@copied_function
def _pair(first: Any, size: Any, mode: Any) -> Any:
    """Return two matrix rows: eight apart, or a gate and what it is for."""
    low = min(first, size - UINT64(1))
    return low, (min(first + UINT64(_EIGHT), size - UINT64(1)) if mode == ADD else low + size)


@copied_function
def mark_of_row(row: Any, groups: Any, _: Any) -> Any:
    """Return the index of the first scale of a matrix row, of so many groups."""
    return UINT32(UINT32(row) * UINT32(groups))


@copied_function
def mark_of_block(row: Any, groups: Any, rows: Any) -> Any:
    """Return the same where so many rows share their scales, two to this power."""
    return UINT32(UINT32(UINT32(row) >> UINT32(rows)) * UINT32(groups))


@copied_function
def _ask_words(scales: Any, zeros: Any, index: Any, form: Any) -> Any:
    """Ask for the words that a scale and its zero of 4 bits are in; return these and the index."""
    at = UINT32(index << UINT32(2)) if form == UINT64(F32) else UINT32(index << UINT32(1))
    scale, zero = ptx.load_32(scales + UINT64(UINT32(at & UINT32(0xFFFFFFFC)))), UINT32(0)
    if zeros:
        zero = ptx.load_32(zeros + UINT64(UINT32(UINT32(index >> UINT32(3)) << UINT32(2))))
    return scale, zero, index


@copied_function
def _of_words(found: Any, form: Any) -> Any:
    """Return the bits of a scale, and the zero."""
    scale, zero, index = found
    bits = scale if form == UINT64(F32) else ptx.shifted(scale, UINT32(index << UINT32(4)))
    return bits, UINT32(ptx.shifted(zero, UINT32(index << UINT32(2))) & UINT32(15))


@copied_function
def _ask_scale(scales: Any, _: Any, index: Any, form: Any) -> Any:
    """Ask for a scale, which may be the only one; return it, no zero, and the index."""
    is_wide = UINT64(1) if form == UINT64(F32) else UINT64(0)
    return ptx.load_32_or_16(scales + (UINT64(index) << (UINT64(1) + is_wide)), is_wide), UINT32(0), index


@copied_function
def _ask_both(scales: Any, zeros: Any, index: Any, form: Any) -> Any:
    """Ask for its zero of 8 bits too."""
    scale, _, _ = _ask_scale(scales, zeros, index, form)
    return scale, ptx.load_8_if(zeros + UINT64(index), zeros), index


@copied_function
def _as_they_are(found: Any, _: Any) -> Any:
    return found[0], found[1]


def _scale_by(kind: Codes) -> tuple[Any, Any]:
    """Make what asks for a scale and its zero, and what makes pieces of them."""
    has_zeros, factor = kind.base is not None, kind.factor
    ask, bits_of = {
        (4, True): (_ask_words, _of_words),
        (8, True): (_ask_both, _as_they_are),
        (8, False): (_ask_scale, _as_they_are),
    }[kind.bits, has_zeros]

    @copied_function
    def scale_of(found: Any, form: Any, base: Any, is_there: Any) -> Any:
        """Return a scale, and base and zero together."""
        bits, zero = bits_of(found, form)
        if form == UINT64(BF16):
            scale = ptx.low_bf16(bits)
        elif form == UINT64(F16):
            scale = ptx.low_f16(bits)
        else:
            scale = ptx.float_of(bits)
        scale = scale * FLOAT32(factor) if is_there else FLOAT32(0)
        return scale, base + FLOAT32(zero) if has_zeros else FLOAT32(0)

    @copied_function
    def pieces_of(found: Any, form: Any, base: Any, is_there: Any) -> Any:
        """Return a scale in three pieces, and base and zero together: each a bfloat16, exactly, two in a register."""
        scale, zero = scale_of(found, form, base, is_there)
        first = ptx.bits_of(scale)
        rest = scale - ptx.high_bf16(first)
        second = ptx.bits_of(rest)
        third = ptx.bits_of(rest - ptx.high_bf16(second))
        return ptx.two_highs(first, second), ptx.two_highs(third, ptx.bits_of(zero))

    return ask, pieces_of


@copied_function
def chosen(k: Any, g: Any, t: Any) -> Any:
    """Return what lanes multiply pieces by, for all four of a matrix row to have those of one: each two registers.

    Columns 2 t of the product are scales, columns 2 t + 1 bases with zeros.
    """
    scale, is_one = (g & UINT64(1)) == UINT64(0), t == UINT64(k)
    first, second = UINT32(_ONE | _ONE << 16) if scale else UINT32(0), UINT32(_ONE) if scale else UINT32(_ONE << 16)
    return first if is_one else UINT32(0), second if is_one else UINT32(0)


@intrinsic  # type: ignore[untyped-decorator]
def _spread(typingctx: Any, pieces: Any, first: Any, second: Any) -> Any:  # noqa: ARG001
    """Return the products of pieces, for two matrix rows, as the instruction does."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        left = [builder.extract_value(values[0], i) for i in range(4)]
        nothing = ir.Constant(ir.FloatType(), 0.0)
        found = ptx.emit_multiply_bf16(builder, [*left, *values[1:], *[nothing] * 4])
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.float32, 4)(pieces, first, second), codegen


@cache
def matrix_rows(kind: Codes, tall: int) -> MatrixRows:  # noqa: C901 (of two heights)
    """Return what knows a lane's matrix rows.

    Args:
        kind: of codes.
        tall: times that a tile has 16 matrix rows: 1 or 2.
    """
    mark = mark_of_block if kind.base is None else mark_of_row
    ask, pieces_of = _scale_by(kind)

    @copied_function
    def pair_of(first: Any, size: Any, mode: Any) -> Any:
        return _pair(first, size, mode)

    @copied_function
    def pairs_of(first: Any, size: Any, mode: Any) -> Any:
        second = first + (UINT64(TILE) if mode == ADD else UINT64(_EIGHT))
        return _pair(first, size, mode) + _pair(second, size, mode)

    @copied_function
    def two(own: Any, at: Any, pitch: Any) -> Any:
        return at + own[0] * pitch, at + own[1] * pitch

    @copied_function
    def four(own: Any, at: Any, pitch: Any) -> Any:
        return at + own[0] * pitch, at + own[1] * pitch, at + own[2] * pitch, at + own[3] * pitch

    @copied_function
    def two_marks(own: Any, groups: Any, rows: Any) -> Any:
        return mark(own[0], groups, rows), mark(own[1], groups, rows)

    @copied_function
    def four_marks(own: Any, groups: Any, rows: Any) -> Any:
        return two_marks(own[:2], groups, rows) + two_marks(own[2:], groups, rows)

    @copied_function
    def ask_two(scales: Any, zeros: Any, own: Any, group: Any, form: Any) -> Any:
        return ask(scales, zeros, UINT32(own[0] + group), form) + ask(scales, zeros, UINT32(own[1] + group), form)

    @copied_function
    def ask_four(scales: Any, zeros: Any, own: Any, group: Any, form: Any) -> Any:
        return ask_two(scales, zeros, own[:2], group, form) + ask_two(scales, zeros, own[2:], group, form)

    @copied_function
    def pieces_two(found: Any, form: Any, base: Any, is_there: Any) -> Any:
        a, b = pieces_of(found[:3], form, base, is_there), pieces_of(found[3:], form, base, is_there)
        return a[0], b[0], a[1], b[1]

    @copied_function
    def pieces_four(found: Any, form: Any, base: Any, is_there: Any) -> Any:
        return pieces_two(found[:6], form, base, is_there) + pieces_two(found[6:], form, base, is_there)

    @copied_function
    def told_two(pieces: Any, by: Any) -> Any:
        a, b, c, d = _spread(pieces, by[0], by[1])
        return (a, c), (b, d)

    @copied_function
    def told_four(pieces: Any, by: Any) -> Any:
        a, b = told_two(pieces[:4], by), told_two(pieces[4:], by)
        return a[0] + b[0], a[1] + b[1]

    if tall == 1:
        return MatrixRows(pair_of, two, two_marks, ask_two, pieces_two, told_two)
    return MatrixRows(pairs_of, four, four_marks, ask_four, pieces_four, told_four)
