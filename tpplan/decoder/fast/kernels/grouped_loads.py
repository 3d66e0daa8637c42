"""Copies of rows and codes into shared memory, as the kernels for grouped rows ask for them.

A stage of shared memory has what a block needs for a step: rows, then codes, both as in
:mod:`tpplan.decoder.fast.kernels.wide_loads`. Before all stages there is a table of where the rows are: of each its
distance from the first one there is, in 16 bytes.

The last step may have columns that there are not: what is copied there of rows is zeros, of codes it is the first ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.decoder.fast.kernels.wide_limits import LANES, OF_LANES, VECTOR
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import copied_function
from tpplan.exec.toolchain.language import cuda, intrinsic, ir, types

if TYPE_CHECKING:
    from tpplan.decoder.fast.kernels.packed_codes import Codes

#: What the table has of rows that there are not, which are not copied.
NONE = 2**32 - 1
_WORD, _BITS = types.uint64, types.uint32


def rows_by(kind: Codes, rows: int, threads: int) -> tuple[Any, Any]:
    """Return what finds a thread's vectors in rows, and what copies those of a step.

    The first takes the address of the table, which has none for rows behind those of a tile. It returns where in it the
    row of the first vector is, this one's first byte in a row, and where in a stage it goes. The second takes these, a
    step, a stage, where rows are, and the bytes of one.

    Args:
        kind: of codes.
        rows: of a tile.
        threads: of a block.
    """
    row_bytes = 2 * kind.step
    chunks = row_bytes // VECTOR
    chunk_bits, per_lane, apart = chunks.bit_length() - 1, chunks // LANES, threads // chunks
    copy = _copies(-(-rows // apart), 4 * apart, row_bytes * apart)
    swapped = LANES if chunks > LANES else 0  # of odd rows, so that eight lanes read all banks

    @copied_function
    def find(table: Any) -> Any:
        thread = _BITS(cuda.threadIdx.x)
        row, place = _BITS(thread >> _BITS(chunk_bits)), _BITS(thread & _BITS(chunks - 1))
        chunk = _BITS(_BITS(_BITS(place & _BITS(LANES - 1)) * _BITS(per_lane)) + _BITS(place >> _BITS(2)))
        other = _BITS(place ^ _BITS(_BITS(row & _BITS(1)) * _BITS(swapped)))
        to = _BITS(_BITS(row * _BITS(row_bytes)) + _BITS(other * _BITS(VECTOR)))
        return _BITS(table + _BITS(row << _BITS(2))), _BITS(chunk * _BITS(VECTOR)), to

    @copied_function
    def ask(found: Any, k: Any, stage: Any, x: Any, limit: Any) -> None:
        entry, column, to = found
        column = _BITS(column + _BITS(k * _BITS(row_bytes)))
        is_there = column < limit
        count = _BITS(VECTOR) if is_there else _BITS(0)
        copy(entry, x + _WORD(column if is_there else _BITS(0)), _BITS(to + stage), count)

    return find, ask


def _copies(count: int, apart: int, to_apart: int) -> Any:
    """Return an intrinsic that copies vectors of so many rows.

    It takes where in the table the first one is, the vector's address if it were of the first row there is, where it
    goes, and how many bytes of it are read.

    Args:
        count: of rows.
        apart: bytes of the table from one row to the next.
        to_apart: the same of a stage.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        entry, x, to, size = values
        for i in range(count):
            (row,) = ptx.emit_shared_load_32(builder, [builder.add(entry, ir.Constant(entry.type, i * apart))])
            (at,) = ptx.emit_vector_at(builder, [row, x])
            goes = builder.add(to, ir.Constant(to.type, i * to_apart))
            ptx.emit_copy_128_filled_below(builder, [goes, at, size, row, ir.Constant(row.type, NONE)])
        return context.get_dummy_value()

    word, bits = types.uint64, types.uint32
    return intrinsic(lambda typingctx, entry, x, to, size: (types.void(bits, word, bits, bits), codegen))  # noqa: ARG005


@copied_function
def ask_codes(place: Any, unit: Any, to: Any) -> None:
    """Ask for a lane's codes of a step.

    Args:
        place: address of the first of four matrix rows, bytes to the second, and from these two to the others.
        unit: number of 16 bytes in a row.
        to: where in shared memory they go.
    """
    row, pitch, half = place
    first = row + _WORD(_BITS(unit * _BITS(VECTOR)))
    second = first + half
    ptx.copy_128(to, first)
    ptx.copy_128(_BITS(to + _BITS(OF_LANES)), first + pitch)
    ptx.copy_128(_BITS(to + _BITS(2 * OF_LANES)), second)
    ptx.copy_128(_BITS(to + _BITS(3 * OF_LANES)), second + pitch)
