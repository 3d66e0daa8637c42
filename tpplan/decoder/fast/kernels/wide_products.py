"""Products of tiles of codes and of many rows, by tensor cores, as kernels write them.

A warp has 32 matrix rows, two for each of an instruction's 16, and all rows, which lie in shared memory. A code becomes
an element in 16 bits once for all of them: a float, less base and zero, which is exact, times the scale, which is
rounded. So there is one set of sums.

Lane 4 g + t has columns of four matrix rows, 16 bytes of codes of each: those of pairs 2 t and 2 t + 1 of the
instruction, see :mod:`tpplan.decoder.fast.kernels.packed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.decoder.fast.kernels.tiles import all_of
from tpplan.decoder.fast.kernels.wide_limits import OF_LANES
from tpplan.decoder.fast.kernels.wide_sums import PER_EIGHT
from tpplan.exec.kernels import ptx
from tpplan.exec.toolchain.language import intrinsic, ir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.decoder.fast.kernels.packed_codes import Codes

#: Matrix rows of a lane, and registers of its codes of one.
_OWN, _CODES = 4, 4
#: Registers of 16 bytes, and pairs of an instruction.
_VECTOR, _PAIRS = 4, 2
#: Eights of rows that are read together, so that no instruction waits for the one before.
_AT_ONCE = 2
#: Bytes in shared memory of as many eights of vectors as lanes read at a time.
_BANKS = 128
#: Bits of an element that is no code.
_WHOLE = 16
_INT = ir.IntType(32)
#: Two negative zeros.
_NOTHING = 0x80008000


def _vector(builder: Any, start: Any, offset: int) -> list[Any]:
    """Return 16 bytes in shared memory."""
    return ptx.emit_shared_load_128(builder, [builder.add(start, ir.Constant(_INT, offset))])


def floats_of(
    kind: Codes, fma: ptx.Emitter, builder: Any, codes_at: Any, others: Sequence[Any]
) -> Callable[[int], list[list[Any]]]:
    """Read a lane's codes of a step, and return what makes 16-bit floats of those of its rows in a vector of each.

    Args:
        kind: of codes.
        fma: writes what multiplies pairs and adds others.
        builder: of what is written.
        codes_at: see :func:`products_of`.
        others: scales, what is added to floats first, and the mask, see there.
    """
    one, nothing = ir.Constant(_INT, kind.floats.one), ir.Constant(_INT, _NOTHING)
    scales, bases = all_of(builder, others[0]), all_of(builder, others[1]) if kind.base is not None else []
    codes = [word for row in range(_OWN) for word in _vector(builder, codes_at, OF_LANES * row)]
    count = _CODES * _VECTOR // kind.part

    def floats(row: int, index: int) -> list[Any]:
        found = []
        for word in codes[_CODES * row + count * index : _CODES * row + count * (index + 1)]:
            for pair in kind.pairs(builder, word, others[2]):
                code = fma(builder, [pair, one, bases[row]])[0] if bases else pair
                found += [code] if kind.bits == _WHOLE else fma(builder, [code, scales[row], nothing])
        return found

    return lambda index: [floats(row, index) for row in range(_OWN)]


def products_of(kind: Codes, fma: ptx.Emitter, eights: int) -> Any:
    """Return an intrinsic that adds the products of a warp's matrix rows and all rows, of one step.

    It takes the sums so far, see :mod:`tpplan.decoder.fast.kernels.wide_sums`. Then where in shared memory the lane's
    codes are, of one matrix row 512 bytes behind those of the one before; where its columns of row g begin, its first
    vector and its second, which others follow by turns. Then scales of its matrix rows, and what is added to floats
    first, each twice in 32 bits, and the mask of codes.

    Args:
        kind: of codes.
        fma: writes what multiplies pairs and adds others.
        eights: of rows.
    """
    multiply, row_bytes = kind.floats.multiply, kind.step * 2

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        sums, starts = all_of(builder, values[0]), values[2:4]
        left_of = floats_of(kind, fma, builder, values[1], values[4:7])
        for index in range(kind.part // _VECTOR):
            left = left_of(index)
            for first in range(0, eights, _AT_ONCE):
                some = range(first, min(first + _AT_ONCE, eights))
                right = [_vector(builder, starts[index % 2], index // 2 * _BANKS + j * 8 * row_bytes) for j in some]
                for k in range(0, _VECTOR, _PAIRS):
                    for j, row in zip(some, right, strict=True):
                        for i in range(_OWN // 2):
                            low, high = left[2 * i], left[2 * i + 1]
                            at = PER_EIGHT * j + 4 * i
                            sums[at : at + 4] = multiply(
                                builder,
                                [low[k], high[k], low[k + 1], high[k + 1], *row[k : k + 2], *sums[at : at + 4]],
                            )
        return context.make_tuple(builder, signature.return_type, sums)

    def typer(  # type: ignore[no-untyped-def]
        typingctx, sums, codes, even, odd, scales, bases, mask,  # noqa: ARG001
    ):  # fmt: skip
        return sums(sums, codes, even, odd, scales, bases, mask), codegen

    return intrinsic(typer)
