"""Products of tiles of codes and of rows, by tensor cores, as kernels write them.

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
from typing import TYPE_CHECKING, Any

from tpplan.decoder.fast.kernels.tiles import all_of
from tpplan.exec.toolchain.language import intrinsic, ir

if TYPE_CHECKING:
    from tpplan.decoder.fast.kernels.packed_codes import Codes

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
