"""Scales and zeros of matrices of 4-bit codes, and the matrix rows of a lane, as kernels find them.

A lane has matrix rows g and g + 8 of every 16, or a gate and what it is for. Of the scales and zeros of a matrix row,
lane t asks for those of step t, for the three beside it too. These get them by tensor cores, exactly: each
is a sum of 16-bit floats, which is multiplied by ones, and what other lanes have by zeros. Shuffles would do as well,
but before sm_90 make the assembler keep much else in memory.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from tpplan.decoder.tile_sums import TILE
from tpplan.exec import ptx
from tpplan.exec.finishing import ADD
from tpplan.exec.kernels import device_function

#: Kinds of scales.
BF16, F16, F32 = range(3)

#: In bfloat16.
_ONE = 0x3F80
_EIGHT = TILE // 2
_WORD, _FLOAT, _BITS = types.uint64, types.float32, types.uint32


@frozen
class MatrixRows:
    """What knows a lane's matrix rows.

    Attributes:
        numbers: returns them, given the first row of the tile and g, the columns of the result, and the mode.
        places: returns their addresses, given the first one's and the bytes of a row.
        marks: returns where the scales of each begin, given how many a row has.
        ask: asks for scales and zeros, given where they are, the marks, a group and the kind of scales.
        made: returns the pieces of scales, and bases with zeros, of what was asked for; scales are 0 of no step.
        told: returns those of a step, which one of four lanes has, given pieces and what :func:`chosen` returns.
    """

    numbers: Any
    places: Any
    marks: Any
    ask: Any
    made: Any
    told: Any


@device_function
def _pair(first: Any, size: Any, mode: Any) -> Any:
    """Return two matrix rows: eight apart, or a gate and what it is for."""
    low = min(first, size - _WORD(1))
    return low, (min(first + _WORD(_EIGHT), size - _WORD(1)) if mode == ADD else low + size)


@device_function
def _scale_at(scales: Any, zeros: Any, index: Any, form: Any) -> Any:
    """Ask for the words that a scale and its zero are in; return them and the bits before them."""
    at = _BITS(index << _BITS(2)) if form == _WORD(F32) else _BITS(index << _BITS(1))
    scale, zero = ptx.load_32(scales + _WORD(_BITS(at & _BITS(0xFFFFFFFC)))), _BITS(0)
    if zeros:
        zero = ptx.load_32(zeros + _WORD(_BITS(_BITS(index >> _BITS(3)) << _BITS(2))))
    return scale, zero, index


@device_function
def _scale_of(found: Any, form: Any, base: Any, is_there: Any) -> Any:
    """Return a scale, and base and zero together."""
    index = found[2]
    bits = found[0] if form == _WORD(F32) else ptx.shifted(found[0], _BITS(index << _BITS(4)))
    if form == _WORD(BF16):
        scale = ptx.low_bf16(bits)
    elif form == _WORD(F16):
        scale = ptx.low_f16(bits)
    else:
        scale = ptx.float_of(bits)
    code = _BITS(ptx.shifted(found[1], _BITS(index << _BITS(2))) & _BITS(15))
    return scale if is_there else _FLOAT(0), base + _FLOAT(code)


@device_function
def _pieces_of(found: Any, form: Any, base: Any, is_there: Any) -> Any:
    """Return a scale in three pieces, and base and zero together: each a bfloat16, exactly, two in a register."""
    scale, zero = _scale_of(found, form, base, is_there)
    first = ptx.bits_of(scale)
    rest = scale - ptx.high_bf16(first)
    second = ptx.bits_of(rest)
    third = ptx.bits_of(rest - ptx.high_bf16(second))
    return ptx.two_highs(first, second), ptx.two_highs(third, ptx.bits_of(zero))


@device_function
def chosen(k: Any, g: Any, t: Any) -> Any:
    """Return what lanes multiply pieces by, for all four of a matrix row to have those of one: each two registers.

    Columns 2 t of the product are scales, columns 2 t + 1 bases with zeros.
    """
    scale, is_one = (g & _WORD(1)) == _WORD(0), t == _WORD(k)
    first, second = _BITS(_ONE | _ONE << 16) if scale else _BITS(0), _BITS(_ONE) if scale else _BITS(_ONE << 16)
    return first if is_one else _BITS(0), second if is_one else _BITS(0)


@intrinsic  # type: ignore[untyped-decorator]
def _spread(typingctx: Any, pieces: Any, first: Any, second: Any) -> Any:  # noqa: ARG001
    """Return the products of pieces, for two matrix rows, as the instruction does."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        left = [builder.extract_value(values[0], i) for i in range(4)]
        nothing = ir.Constant(ir.FloatType(), 0.0)
        found = ptx.emit_multiply_bf16(builder, [*left, *values[1:], *[nothing] * 4])
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.float32, 4)(pieces, first, second), codegen


def matrix_rows(tall: int) -> MatrixRows:  # noqa: C901 (of two heights)
    """Return what knows a lane's matrix rows.

    Args:
        tall: times that a tile has 16 matrix rows: 1 or 2.
    """

    @device_function
    def pair_of(first: Any, size: Any, mode: Any) -> Any:
        return _pair(first, size, mode)

    @device_function
    def pairs_of(first: Any, size: Any, mode: Any) -> Any:
        second = first + (_WORD(TILE) if mode == ADD else _WORD(_EIGHT))
        return _pair(first, size, mode) + _pair(second, size, mode)

    @device_function
    def two(own: Any, at: Any, pitch: Any) -> Any:
        return at + own[0] * pitch, at + own[1] * pitch

    @device_function
    def four(own: Any, at: Any, pitch: Any) -> Any:
        return at + own[0] * pitch, at + own[1] * pitch, at + own[2] * pitch, at + own[3] * pitch

    @device_function
    def two_marks(own: Any, groups: Any) -> Any:
        return _BITS(own[0] * groups), _BITS(own[1] * groups)

    @device_function
    def four_marks(own: Any, groups: Any) -> Any:
        return _BITS(own[0] * groups), _BITS(own[1] * groups), _BITS(own[2] * groups), _BITS(own[3] * groups)

    @device_function
    def ask_two(scales: Any, zeros: Any, own: Any, group: Any, kind: Any) -> Any:
        return _scale_at(scales, zeros, _BITS(own[0] + group), kind) + _scale_at(
            scales, zeros, _BITS(own[1] + group), kind
        )

    @device_function
    def ask_four(scales: Any, zeros: Any, own: Any, group: Any, kind: Any) -> Any:
        return ask_two(scales, zeros, own[:2], group, kind) + ask_two(scales, zeros, own[2:], group, kind)

    @device_function
    def pieces_two(found: Any, form: Any, base: Any, is_there: Any) -> Any:
        a, b = _pieces_of(found[:3], form, base, is_there), _pieces_of(found[3:], form, base, is_there)
        return a[0], b[0], a[1], b[1]

    @device_function
    def pieces_four(found: Any, form: Any, base: Any, is_there: Any) -> Any:
        return pieces_two(found[:6], form, base, is_there) + pieces_two(found[6:], form, base, is_there)

    @device_function
    def told_two(pieces: Any, by: Any) -> Any:
        a, b, c, d = _spread(pieces, by[0], by[1])
        return (a, c), (b, d)

    @device_function
    def told_four(pieces: Any, by: Any) -> Any:
        a, b = told_two(pieces[:4], by), told_two(pieces[4:], by)
        return a[0] + b[0], a[1] + b[1]

    if tall == 1:
        return MatrixRows(pair_of, two, two_marks, ask_two, pieces_two, told_two)
    return MatrixRows(pairs_of, four, four_marks, ask_four, pieces_four, told_four)
