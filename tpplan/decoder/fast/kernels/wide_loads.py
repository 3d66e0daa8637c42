"""Copies of rows and codes into shared memory, as kernels for many rows ask for them.

A stage of shared memory has what a block needs for a step:

- of every row, the columns of the step; vector 4 i + t of these is the one that lane t needs i-th, and of odd rows the
  other four of each eight come first, so that eight lanes read all banks;
- of every warp, 512 bytes for each of the four matrix rows of its lanes: 16 bytes of codes for each lane, which alone
  copies and reads them;
- then scales and zeros, see :mod:`tpplan.decoder.fast.kernels.wide_scales`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.decoder.fast.kernels.wide_limits import LANES, OF_LANES, VECTOR
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import copied_function
from tpplan.exec.toolchain.language import cuda, intrinsic, ir, types

if TYPE_CHECKING:
    from tpplan.decoder.fast.kernels.packed_codes import Codes

_EIGHT = 8
_WORD, _BITS = types.uint64, types.uint32


def rows_by(kind: Codes, eights: int, fewest: int) -> tuple[Any, Any]:
    """Return what finds a thread's vectors in rows, and what copies those of a step.

    The first takes where rows are, and the bytes from one to the next. It returns the row of the first vector, where
    this is, where in a stage it goes, and how many rows and bytes the others are apart. The second takes these, a step,
    a stage, and how many rows there are.

    Args:
        kind: of codes.
        eights: of rows, at most.
        fewest: warps of a block, at least.
    """
    row_bytes = 2 * kind.step
    chunks = row_bytes // VECTOR
    chunk_bits, per_lane, count = (
        chunks.bit_length() - 1,
        chunks // LANES,
        -(-eights * _EIGHT * chunks // (32 * fewest)),
    )
    copy = _copies(count, row_bytes)

    @copied_function
    def find(x: Any, pitch: Any) -> Any:
        thread = _WORD(cuda.threadIdx.x)
        row, place = thread >> _WORD(chunk_bits), thread & _WORD(chunks - 1)
        chunk = (place & _WORD(LANES - 1)) * _WORD(per_lane) + (place >> _WORD(2))
        to = row * _WORD(row_bytes) + (place ^ ((row & _WORD(1)) << _WORD(2))) * _WORD(VECTOR)
        apart = _WORD(cuda.blockDim.x) >> _WORD(chunk_bits)
        return _BITS(row), x + row * pitch + chunk * _WORD(VECTOR), _BITS(to), _BITS(apart), apart * pitch

    @copied_function
    def ask(found: Any, k: Any, stage: Any, rows: Any) -> None:
        row, at, to, apart, pitch = found
        copy(row, at + _WORD(_BITS(k * _BITS(row_bytes))), _BITS(to + stage), apart, pitch, _BITS(rows))

    return find, ask


def _copies(count: int, row_bytes: int) -> Any:
    """Return an intrinsic that copies so many vectors, of rows that there are."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        row, at, to, apart, pitch, rows = values
        further = builder.mul(apart, ir.Constant(apart.type, row_bytes))
        for _ in range(count):
            ptx.emit_copy_128_below(builder, [to, at, row, rows])
            row, at, to = builder.add(row, apart), builder.add(at, pitch), builder.add(to, further)
        return context.get_dummy_value()

    word, bits = types.uint64, types.uint32
    signature = types.void(bits, word, bits, bits, word, bits)
    return intrinsic(lambda typingctx, row, at, to, apart, pitch, rows: (signature, codegen))  # noqa: ARG005


@copied_function
def ask_codes(codes: Any, pitch: Any, low: Any, high: Any, k: Any, to: Any) -> None:
    """Ask for a lane's codes of a step.

    Args:
        codes: where those of the first matrix row are.
        pitch: bytes of a matrix row.
        low: the first two of its matrix rows, by the number of one.
        high: the others.
        k: the step.
        to: where in shared memory they go.
    """
    at = codes + _WORD(_BITS(k * _BITS(LANES * VECTOR)))
    first, second = at + _WORD(low) * pitch, at + _WORD(high) * pitch
    ptx.copy_128(to, first)
    ptx.copy_128(_BITS(to + _BITS(OF_LANES)), first + pitch)
    ptx.copy_128(_BITS(to + _BITS(2 * OF_LANES)), second)
    ptx.copy_128(_BITS(to + _BITS(3 * OF_LANES)), second + pitch)
