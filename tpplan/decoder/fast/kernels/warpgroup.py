"""Products of tiles of codes and of many rows by instructions of four warps (wgmma), which only sm_90 has.

The matrix is in registers, as for instructions of one warp, see :mod:`tpplan.decoder.fast.kernels.wide_products`. Rows
are read from shared memory by the instruction itself, while the next codes become floats.

An instruction takes 16 columns, four of each of the lanes 4 g to 4 g + 3: its first eight are two of each lane, and the
second eight two more. So rows are copied by two columns, to where the instruction looks for them. Of 64 columns a row
has 128 bytes there, first and second eights in turns, 16 bytes each, of which number c is the ``c ^ r % 8``-th in row
r: the swizzle of 128 bytes, by which no bank is read twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.decoder.fast.kernels.tiles import all_of
from tpplan.decoder.fast.kernels.wide_limits import LANES
from tpplan.decoder.fast.kernels.wide_products import floats_of
from tpplan.decoder.fast.kernels.wide_sums import PER_EIGHT
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import copied_function
from tpplan.exec.toolchain.language import UINT32, UINT64, cuda, intrinsic, ir, types

if TYPE_CHECKING:
    from tpplan.decoder.fast.kernels.packed_codes import Codes

#: Rows after which the swizzle is the same again; bytes of one that lie together, and of all of them; and those of an
#: instruction's columns.
_EIGHT, _ROW = 8, 128
_OF_EIGHT, _COLUMNS = _EIGHT * _ROW, 32
#: Tiles of matrix rows of a warp, registers of a vector, and those of an instruction's columns.
_TILES, _VECTOR, _PAIRS = 2, 4, 2
#: Of descriptors (PTX ISA, matrix descriptor): that of a swizzle of 128 bytes, the first bit of those that tell how far
#: it is from eight rows to the next, the unit of bytes, and those that addresses have.
_SWIZZLE, _NEXT_EIGHT, _UNIT, _SPACE = 1 << 62, 32, 16, (1 << 18) - 1
_INT, _WORD = ir.IntType(32), ir.IntType(64)


def rows_by(kind: Codes, eights: int) -> tuple[Any, Any]:
    """Return what finds a thread's columns of rows, and what copies those of a step; blocks have eight warps.

    As :func:`tpplan.decoder.fast.kernels.wide.rows_by`.

    Args:
        kind: of codes.
        eights: of rows, at most.
    """
    row_bytes = 2 * kind.step
    copy = _copies(row_bytes // _ROW, eights)

    @copied_function
    def find(x: Any, pitch: Any) -> Any:
        row, lane = UINT64(cuda.threadIdx.x) >> UINT64(5), UINT64(cuda.threadIdx.x) & UINT64(31)
        t, chunk = lane >> UINT64(3), lane & UINT64(7)
        at = x + row * pitch + t * UINT64(row_bytes // LANES) + chunk * UINT64(4)
        to = row * UINT64(_ROW) + ((chunk ^ row) << UINT64(4)) + (t << UINT64(2))
        return UINT32(row), at, UINT32(to), UINT64(pitch << UINT64(3))

    @copied_function
    def ask(found: Any, k: Any, stage: Any, rows: Any) -> None:
        row, at, to, apart = found
        copy(row, at + UINT64(UINT32(k * UINT32(row_bytes))), UINT32(to + stage), apart, UINT32(rows))

    return find, ask


def _copies(tiles: int, eights: int) -> Any:
    """Return an intrinsic that copies two columns of every eighth row that there is, of all tiles of 64 columns."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        row, at, to, apart, rows = values
        for j in range(eights):
            own = builder.add(row, ir.Constant(_INT, _EIGHT * j))
            for tile in range(tiles):
                place = builder.add(to, ir.Constant(_INT, _OF_EIGHT * (eights * tile + j)))
                source = builder.add(at, ir.Constant(_WORD, _COLUMNS * tile))
                ptx.emit_copy_32_below(builder, [place, source, own, rows])
            at = builder.add(at, apart)
        return context.get_dummy_value()

    word, bits = types.uint64, types.uint32
    signature = types.void(bits, word, bits, word, bits)
    return intrinsic(lambda typingctx, row, at, to, apart, rows: (signature, codegen))  # noqa: ARG005


def products_of(kind: Codes, fma: ptx.Emitter, eights: int) -> Any:
    """Return an intrinsic that begins to add the products of a warp's matrix rows and all rows, of one step.

    What it returns is there behind :func:`settled`. It takes what that of
    :func:`tpplan.decoder.fast.kernels.wide_products.products_of` takes, but one place: where all rows begin, in 64
    bits, a multiple of 1024.

    Args:
        kind: of codes.
        fma: writes what multiplies pairs and adds others.
        eights: of rows.
    """
    multiply = ptx.emit_multiply_group(kind.floats.name, eights)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        sums, start = all_of(builder, values[0]), values[2]
        left_of = floats_of(kind, fma, builder, values[1], values[3:6])
        units = builder.lshr(builder.and_(start, ir.Constant(_WORD, _SPACE)), ir.Constant(_WORD, 4))
        first = builder.or_(units, ir.Constant(_WORD, _SWIZZLE | _OF_EIGHT // _UNIT << _NEXT_EIGHT))
        # By tiles of matrix rows, as instructions have them.
        by_tile = [sums[PER_EIGHT * j + 4 * i + e] for i in range(_TILES) for j in range(eights) for e in range(4)]
        for index in range(kind.part // _VECTOR):
            left = left_of(index)
            for k in range(0, _VECTOR, _PAIRS):
                tile, within = divmod((index * _VECTOR // _PAIRS + k // _PAIRS) * _COLUMNS, _ROW)
                right = builder.add(first, ir.Constant(_WORD, (tile * eights * _OF_EIGHT + within) // _UNIT))
                own = [left[2 * i + e][k + half] for i in range(_TILES) for half in range(2) for e in range(2)]
                by_tile = multiply(builder, [*by_tile, *own, right])
        found = [by_tile[4 * eights * i + 4 * j + e] for j in range(eights) for i in range(_TILES) for e in range(4)]
        return context.make_tuple(builder, signature.return_type, found)

    def typer(  # type: ignore[no-untyped-def]
        typingctx, sums, codes, rows, scales, bases, mask,  # noqa: ARG001
    ):  # fmt: skip
        return sums(sums, codes, rows, scales, bases, mask), codegen

    return intrinsic(typer)


@intrinsic  # type: ignore[untyped-decorator]
def settled(typingctx: Any, sums: Any) -> Any:  # noqa: ARG001
    """Return sums when all that was begun is added."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = all_of(builder, values[0])
        return context.make_tuple(builder, signature.return_type, ptx.emit_settle_group(len(found))(builder, found))

    return sums(sums), codegen
