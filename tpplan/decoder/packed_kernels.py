"""Kernels that multiply up to sixteen rows by a matrix of 4-bit codes, in the time that reading the codes takes.

Tensor cores multiply, as in :mod:`tpplan.decoder.skinny_kernels`. A step is 128 columns: lane 4 g + t has columns 32 t
to 32 t + 31 of matrix rows g and g + 8, 16 bytes each, and of row g. A warp has up to four steps that follow each other
on their way, and no other warp has these. Codes become pairs of 16-bit floats by putting them into the lowest bits of
a larger number, the base, and are multiplied as such: what the base and the zero are too much is taken off the step's
sum, times the sum of the row's columns, which are multiplied by ones for that. What is left is multiplied by the
step's scale. Of those, and of zeros, lane t asks for the ones of step t, for the other lanes too. What warps have found
is added up in a fixed order.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen
from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from tpplan.decoder.tile_sums import TILE, tile_sums
from tpplan.exec import ptx, tiles
from tpplan.exec.finishing import ADD
from tpplan.exec.kernels import Kernel, device_function

#: Warps of a block, at most.
MOST_WARPS = 16
#: Columns of a step, and steps that a warp has on their way.
STEP, DEEP = 128, 4
#: Kinds of scales.
BF16, F16, F32 = range(3)

#: Registers of a lane's codes of a matrix row, and of its columns of a row; rows of an instruction.
_CODES, _PART, _EIGHT = 4, 16, 8
_INT, _FLOAT_OF_LLVM = ir.IntType(32), ir.FloatType()
_WORD, _FLOAT, _BITS = types.uint64, types.float32, types.uint32


@frozen
class _Type:
    """What makes floats of 16 bits out of codes.

    Attributes:
        shifts: to the right, that bring two codes to where they add up to the base, for the four pairs of a word.
        mask: of these codes.
        base: a pair of them in 16 bits.
        number: it.
        one: a pair of ones.
        multiply: writes the instruction.
        first: makes a float32 of the first element in 32 bits.
        both: makes 32 bits of two float32.
    """

    shifts: tuple[int, ...]
    mask: int
    base: int
    number: float
    one: int
    multiply: Any
    first: Any
    both: Any

    def pairs(self, builder: Any, word: Any, mask: Any) -> list[Any]:
        """Return the columns of a word, each larger than its code by the base."""
        found = []
        for shift in self.shifts:
            move = builder.lshr if shift > 0 else builder.shl
            moved = move(word, ir.Constant(_INT, abs(shift))) if shift else word
            code = builder.and_(moved, mask)
            found.append(builder.or_(code, ir.Constant(_INT, self.base)))
        return found


_BF16 = _Type(
    (0, 4, 8, 12), 0x000F000F, 0x43004300, 128, 0x3F803F80, ptx.emit_multiply_bf16, ptx.low_bf16, ptx.two_bf16
)
_F16 = _Type((-4, 0, 4, 8), 0x00F000F0, 0x54005400, 64, 0x3C003C00, ptx.emit_multiply_f16, ptx.low_f16, ptx.two_f16)


def _products(kind: _Type) -> Any:  # noqa: C901 (the instructions)
    """Return an intrinsic that adds the products of a tile and some rows, of one step.

    It takes the sums so far, as :func:`_step_sums` has them; the codes of the lane's matrix rows; what it has of every
    eighth row; for each matrix row the scale, and base and zero together; and the mask of codes.

    Args:
        kind: of the rows.
    """
    nothing, one = ir.Constant(_FLOAT_OF_LLVM, 0.0), ir.Constant(_INT, kind.one)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        totals, codes, rows, scales, bases = (
            [builder.extract_value(each, i) for i in range(each.type.count)] for each in values[:-1]
        )
        eights = len(rows) // _PART
        ones = [[nothing] * 4 for _ in range(eights)]
        for tile in range(len(codes) // (2 * _CODES)):
            sums = [[nothing] * 4 for _ in range(eights)]
            for i in range(_CODES):
                at = 2 * tile * _CODES + i
                low, high = (kind.pairs(builder, codes[each], values[-1]) for each in (at, at + _CODES))
                for k in (0, 2):
                    left = [low[k], high[k], low[k + 1], high[k + 1]]
                    for j in range(eights):
                        right = rows[j * _PART + 4 * i + k : j * _PART + 4 * i + k + 2]
                        sums[j] = kind.multiply(builder, left + right + sums[j])
                        if not tile:
                            ones[j] = kind.multiply(builder, [one] * 4 + right + ones[j])
            for half in range(2):
                scale, base = scales[2 * tile + half], bases[2 * tile + half]
                for j in range(eights):
                    for i in (2 * half, 2 * half + 1):
                        at = 4 * (tile * eights + j) + i
                        exact = builder.fsub(sums[j][i], builder.fmul(base, ones[j][i]))
                        totals[at] = builder.fadd(totals[at], builder.fmul(scale, exact))
        return context.make_tuple(builder, signature.return_type, totals)

    def typer(typingctx, totals, codes, rows, scales, bases, kept):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return totals(totals, codes, rows, scales, bases, kept), codegen

    return intrinsic(typer)


def _asking_by(load: Any, tall: int) -> Any:
    """Make what asks for the codes that a lane has of its matrix rows."""

    @device_function
    def ask_two(at: Any, column: Any) -> Any:
        half = _WORD(column) >> _WORD(1)
        return load(at[0] + half) + load(at[1] + half)

    @device_function
    def ask_four(at: Any, column: Any) -> Any:
        half = _WORD(column) >> _WORD(1)
        return load(at[0] + half) + load(at[1] + half) + load(at[2] + half) + load(at[3] + half)

    return {1: ask_two, 2: ask_four}[tall]


@device_function
def _quarter(row: Any) -> Any:
    """Return what a lane has of a row in a step."""
    first, second = ptx.load_128(row) + ptx.load_128(row + _WORD(16)), ptx.load_128(row + _WORD(32))
    return first + second + ptx.load_128(row + _WORD(48))


def _rows_of(eights: int) -> tuple[Any, Any]:
    """Make what returns a lane's rows, one of each eight, and what asks for what it has of them.

    A row that there is not is the last one.
    """

    @device_function
    def row_of(x: Any, pitch: Any, g: Any, rows: Any) -> Any:
        return x + min(g, rows - _WORD(1)) * pitch

    @device_function
    def of_eight(x: Any, pitch: Any, g: Any, rows: Any) -> Any:
        return (row_of(x, pitch, g, rows),)

    @device_function
    def of_sixteen(x: Any, pitch: Any, g: Any, rows: Any) -> Any:
        return row_of(x, pitch, g, rows), row_of(x, pitch, g + _WORD(_EIGHT), rows)

    @device_function
    def look_at_one(at: Any, column: Any) -> Any:
        return _quarter(at[0] + _WORD(column) * _WORD(2))

    @device_function
    def look_at_two(at: Any, column: Any) -> Any:
        return _quarter(at[0] + _WORD(column) * _WORD(2)) + _quarter(at[1] + _WORD(column) * _WORD(2))

    return {1: (of_eight, look_at_one), 2: (of_sixteen, look_at_two)}[eights]


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
    return scale if is_there else _FLOAT(0), base + _FLOAT(
        _BITS(ptx.shifted(found[1], _BITS(index << _BITS(2))) & _BITS(15))
    )


def _matrix_of(tall: int) -> tuple[Any, Any, Any, Any, Any]:  # noqa: C901 (of two heights)
    """Make what knows a lane's matrix rows.

    These are what returns them, their addresses, what asks for their scales and zeros, and what returns those.

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
    def made_two(found: Any, form: Any, base: Any, is_there: Any) -> Any:
        a, b = _scale_of(found[:3], form, base, is_there), _scale_of(found[3:], form, base, is_there)
        return (a[0], b[0]), (a[1], b[1])

    @device_function
    def made_four(found: Any, form: Any, base: Any, is_there: Any) -> Any:
        a, b = made_two(found[:6], form, base, is_there), made_two(found[6:], form, base, is_there)
        return a[0] + b[0], a[1] + b[1]

    return {
        1: (pair_of, two, two_marks, ask_two, made_two),
        2: (pairs_of, four, four_marks, ask_four, made_four),
    }[tall]


def _told_of(tall: int) -> Any:
    """Make what returns scales, and bases with zeros, of a step: those that a lane of four has.

    Args:
        tall: times that a tile has 16 matrix rows: 1 or 2.
    """

    @device_function
    def two(k: Any, scales: Any, bases: Any) -> Any:
        return (ptx.of_quarter(scales[0], k), ptx.of_quarter(scales[1], k)), (
            ptx.of_quarter(bases[0], k),
            ptx.of_quarter(bases[1], k),
        )

    @device_function
    def four(k: Any, scales: Any, bases: Any) -> Any:
        a, b = two(k, scales[:2], bases[:2]), two(k, scales[2:], bases[2:])
        return a[0] + b[0], a[1] + b[1]

    return {1: two, 2: four}[tall]


def packed(  # noqa: C901, PLR0915 (the kernel)
    name: str, kind: _Type, eights: int, *, tall: int = 1, deep: int = DEEP, ahead: bool = True, warps: int = MOST_WARPS
) -> Kernel:
    """Make a kernel for up to so many rows.

    Its words:

    - y, its pitch: where the result goes.
    - x, its pitch: rows.
    - codes, scales, zeros: of the matrix, which no kernel that may still run writes; zeros may be 0.
    - groups, bits: scales of a matrix row, and the power of two that their columns are.
    - form: one of :data:`BF16`, :data:`F16` and :data:`F32`.
    - plus_zero: a float32: what is added to stored zeros, or all of them if none are.
    - run: steps that a warp has on their way, up to DEEP.
    - size: columns of the result.
    - width: columns of the matrix, a multiple of 128.
    - rows: how many.
    - plus, its pitch, mode: see :func:`tpplan.exec.finishing.finish_of`.

    Args:
        name: of it.
        kind: of rows.
        eights: of rows: 1 or 2.
        tall: times that a tile has 16 matrix rows: 1 or 2.
        deep: steps that a warp has on their way, at most: 2 or 4.
        ahead: whether a lane has the rows of two steps.
        warps: of a block, and of a multiprocessor, at most.
    """
    found = tile_sums(kind.first, kind.both, eights, warps, tall=tall)
    keep, finish, floats, kept, half = found.keep, found.finish, found.floats, found.warp, found.half
    rows_of, look = _rows_of(eights)
    products, told_by = _products(kind), _told_of(tall)
    numbers_of, places_of, marks_of, ask_scales, made = _matrix_of(tall)
    ask, ask_now = _asking_by(ptx.stream_128, tall), _asking_by(ptx.poll_128, tall)
    is_deep = deep == DEEP
    zeros_of, number, mask = tiles.zeros(4 * eights * tall), kind.number, kind.mask

    def multiply_rows(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915
        y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, plus_zero, run, size, width, rows,
        plus, plus_pitch, mode,
    ):  # fmt: skip
        sums = cuda.shared.array(floats, _FLOAT)
        lane, warp = _WORD(cuda.threadIdx.x) & _WORD(31), _WORD(ptx.of_first(_BITS(cuda.threadIdx.x >> 5)))
        g, t = lane >> _WORD(2), lane & _WORD(3)
        long, width32, size32 = _BITS(run * _WORD(STEP)), _BITS(width), _BITS(size)
        begin, wide = _BITS(_BITS(warp) * long), _BITS(_BITS(cuda.blockDim.x >> 5) * long)
        last, own, mine = _BITS(width32 - _BITS(STEP)), codes + t * _WORD(16), _BITS(t * _WORD(STEP))
        pitch, base = width >> _WORD(1), _FLOAT(number) + ptx.float_of(_BITS(plus_zero))
        per = _BITS(TILE * tall) if mode == ADD else _BITS(TILE // 2 * tall)
        start, stride = _BITS(_BITS(cuda.blockIdx.x) * per), _BITS(_BITS(cuda.gridDim.x) * per)
        numbers = numbers_of(_WORD(start) + g, size, mode)
        places, marks = places_of(numbers, own, pitch), marks_of(numbers, groups)
        w0 = ask_now(places, min(begin, last))
        w1 = ask_now(places, min(_BITS(begin + _BITS(STEP)), last))
        if is_deep:
            w2 = ask_now(places, min(_BITS(begin + _BITS(2 * STEP)), last))
            w3 = ask_now(places, min(_BITS(begin + _BITS(3 * STEP)), last))
        s = ask_scales(scales, zeros, marks, _BITS(min(_BITS(begin + mine), last) >> _BITS(bits)), form)
        ptx.after_earlier()
        at = rows_of(x + t * _WORD(64), x_pitch, g, rows)
        p = look(at, min(begin, last))
        if ahead:
            q = look(at, min(_BITS(begin + _BITS(STEP)), last))
        totals, near, buffer = zeros_of(), _BITS(0), _BITS(0)
        kept_mask = _BITS(_BITS(~ptx.active()) + _BITS(mask))
        while start < size32:
            following, far = start, _BITS(near + wide)
            here = _BITS(near + begin)
            left = _BITS(min(_BITS(here + long), width32) - here) if here < width32 else _BITS(0)
            if far >= width32:
                following, far = _BITS(start + stride), _BITS(0)
                numbers = numbers_of(_WORD(following) + g, size, mode)
                places, marks = places_of(numbers, own, pitch), marks_of(numbers, groups)
            there = _BITS(far + begin)
            then = _BITS(0)
            if there < width32 and following < size32:
                then = _BITS(min(_BITS(there + long), width32) - there)
            scale, zero = made(s, form, base, left > mine)
            if then > _BITS(0):
                s = ask_scales(scales, zeros, marks, _BITS(min(_BITS(there + mine), last) >> _BITS(bits)), form)
            scale_now, zero_now = told_by(0, scale, zero)
            totals = products(totals, w0, p, scale_now, zero_now, kept_mask)
            if then > _BITS(0):
                w0 = ask(places, there)
            if ahead:
                if is_deep:
                    if left > _BITS(2 * STEP):
                        p = look(at, _BITS(here + _BITS(2 * STEP)))
                elif then > _BITS(0):
                    p = look(at, there)
            elif left > _BITS(STEP):
                p = look(at, _BITS(here + _BITS(STEP)))
            scale_now, zero_now = told_by(1, scale, zero)
            if run > _WORD(1):
                totals = products(totals, w1, q if ahead else p, scale_now, zero_now, kept_mask)
            if then > _BITS(STEP):
                w1 = ask(places, _BITS(there + _BITS(STEP)))
            if is_deep:
                if ahead:
                    if left > _BITS(3 * STEP):
                        q = look(at, _BITS(here + _BITS(3 * STEP)))
                elif left > _BITS(2 * STEP):
                    p = look(at, _BITS(here + _BITS(2 * STEP)))
                scale_now, zero_now = told_by(2, scale, zero)
                if run > _WORD(2):
                    totals = products(totals, w2, p, scale_now, zero_now, kept_mask)
                if then > _BITS(2 * STEP):
                    w2 = ask(places, _BITS(there + _BITS(2 * STEP)))
                if ahead:
                    if then > _BITS(0):
                        p = look(at, there)
                elif left > _BITS(3 * STEP):
                    p = look(at, _BITS(here + _BITS(3 * STEP)))
                scale_now, zero_now = told_by(3, scale, zero)
                if run > _WORD(3):
                    totals = products(totals, w3, q if ahead else p, scale_now, zero_now, kept_mask)
                if then > _BITS(3 * STEP):
                    w3 = ask(places, _BITS(there + _BITS(3 * STEP)))
            if ahead:
                if then > _BITS(STEP):
                    q = look(at, _BITS(there + _BITS(STEP)))
            elif then > _BITS(0):
                p = look(at, there)
            near = far
            if far == _BITS(0):
                keep(sums, totals, _WORD(buffer) + warp * _WORD(kept), g, t)
                cuda.syncthreads()
                finish(sums, _WORD(buffer), _WORD(start), y, y_pitch, plus, plus_pitch, size, rows, mode, _BITS(0))
                # The next tile's sums go elsewhere: not all threads may have read these.
                totals, start, buffer = zeros_of(), following, _BITS(_BITS(half) - buffer)

    return Kernel(name, multiply_rows, 18, bounds=(32 * warps, 1))


PACKED_BF16_8 = packed("packed_bf16_8", _BF16, 1)
PACKED_BF16_16 = packed("packed_bf16_16", _BF16, 2, ahead=False, warps=12)
PACKED_F16_8 = packed("packed_f16_8", _F16, 1)
PACKED_F16_16 = packed("packed_f16_16", _F16, 2, ahead=False, warps=12)
