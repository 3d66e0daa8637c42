"""What kernels of exchanges in frames read and write: where bytes of a message are in matrices, and vectors of them.

A vector that is not wanted is neither read nor written.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.frame_numbers import turn
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.kernels.slot import row
from tpplan.exec.protocol.frames import VECTOR_BYTES
from tpplan.exec.protocol.words import OUT, ROWS

_WORD = types.uint64
_HALF = types.uint32


@device_function
def address_of(matrix: Any, column: Any, width: Any, at: Any) -> Any:
    """Return the address of a byte of a message, which is columns of a matrix."""
    return word(matrix) + column + at + row(at, width) * (word(matrix + 1) - width)


@device_function
def is_wanted(at: Any, message: Any, skip: Any, width: Any) -> Any:
    """Tell whether a byte of a message with so many bytes a row is one of ``width`` behind ``skip``."""
    if at >= word(ROWS) * message:
        return False
    return at - row(at, message) * message - skip < width  # which a column before those skipped is not


@device_function
def target_of(to: Any, message: Any, skip: Any, at: Any) -> Any:
    """Return where in the output a byte of a message belongs."""
    which = row(at, message)
    return word(OUT) + to + which * word(OUT + 1) + (at - which * message - skip)


@device_function
def load(address: Any, wanted: Any) -> Any:
    """Return a vector of a matrix; zeros if it is not wanted."""
    zero = _HALF(0)
    if wanted:
        return ptx.load_128(address)
    return zero, zero, zero, zero


@device_function
def poll(address: Any, wanted: Any) -> Any:
    """Return a vector of a frame; zeros if it is not wanted."""
    zero = _HALF(0)
    if wanted:
        return ptx.poll_128(address)
    return zero, zero, zero, zero


@device_function
def post(address: Any, vector: Any, wanted: Any) -> None:
    """Write a vector into a frame, if it is wanted."""
    if wanted:
        ptx.post_128(address, vector[0], vector[1], vector[2], vector[3])


@device_function
def store(address: Any, vector: Any, wanted: Any) -> None:
    """Write a vector into a matrix, if it is wanted."""
    if wanted:
        ptx.store_128(address, vector[0], vector[1], vector[2], vector[3])


@device_function
def offsets() -> Any:
    """Return where this thread's vectors begin in a frame."""
    first, step = _WORD(cuda.threadIdx.x) * _WORD(VECTOR_BYTES), turn()
    return first, first + step, first + _WORD(2) * step, first + _WORD(3) * step
