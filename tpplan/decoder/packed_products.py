"""Products of tiles of 4-bit codes and of rows, by tensor cores, as kernels write them.

Codes become pairs of 16-bit floats by putting them into the lowest bits of a larger number, the base, and are
multiplied as such: what the base and the zero are too much is taken off the sum, times the sum of the row's columns,
which are multiplied by ones for that. What is left is multiplied by the scale.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen
from llvmlite import ir
from numba.cuda.extending import intrinsic

from tpplan.exec import ptx

#: Registers of a lane's codes of a matrix row, and of its columns of a row.
_CODES, _PART = 4, 16
_INT, _FLOAT = ir.IntType(32), ir.FloatType()


@frozen
class Floats:
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
    multiply: ptx.Emitter
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


BF16 = Floats(
    (0, 4, 8, 12), 0x000F000F, 0x43004300, 128, 0x3F803F80, ptx.emit_multiply_bf16, ptx.low_bf16, ptx.two_bf16
)
F16 = Floats((-4, 0, 4, 8), 0x00F000F0, 0x54005400, 64, 0x3C003C00, ptx.emit_multiply_f16, ptx.low_f16, ptx.two_f16)


def products_of(kind: Floats) -> Any:  # noqa: C901 (the instructions)
    """Return an intrinsic that adds the products of a tile and some rows, of one step.

    It takes the sums so far, four for every 16 matrix rows and eight rows; the codes of the lane's matrix rows; what it
    has of every eighth row; for each matrix row the scale, and base and zero together; and the mask of codes.

    Args:
        kind: of the rows.
    """
    nothing, one = ir.Constant(_FLOAT, 0.0), ir.Constant(_INT, kind.one)

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

    def typer(typingctx, totals, codes, rows, scales, bases, kept):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001, PLR0917
        return totals(totals, codes, rows, scales, bases, kept), codegen

    return intrinsic(typer)
