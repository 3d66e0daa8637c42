"""Dequantisation of matrix rows to 16 bits, by one kernel.

Shapes: R rows, K columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from tpplan.decoder.fast.kernels.scale_kinds import FORMS
from tpplan.decoder.fast.launches.launcher import DTYPES, Launcher
from tpplan.decoder.weights.quantised import Exl2Matrix, Float4Matrix, Float8Matrix, IntMatrix, Quantised

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

#: Kinds of codes that kernels support, as in kernels' names: the bits of integers, or the format of floats.
KINDS: Final = ("4", "8", "e4m3", "e5m2", "e2m1")

_FLOATS: Final = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

#: Columns that share a scale of MXFP4.
_MX: Final = 32
#: Kinds of codes of 4 bits.
_HALVES: Final = ("4", "e2m1")
#: Rows and columns of a thread, bytes of an element of the result, threads of a warp, and of a block, at most.
_ROWS, _COLUMNS, _ITEM, _WARP, _THREADS = 4, 8, 2, 32, 256
#: Denominator of fixed-point factors: division by multiplication is exact if divisor times dividend is not larger.
_ONE: Final = 2**31


def kind_of(matrix: Quantised) -> str:
    """Return the kind of a matrix's codes, from :data:`KINDS` if there are kernels for it."""
    if isinstance(matrix, Float4Matrix):  # kernels have exponents for scales
        return "e2m1" if matrix.scales.dtype == torch.uint8 and matrix.group == _MX and matrix.factors is None else ""
    return str(matrix.bits) if isinstance(matrix, IntMatrix) else _FLOATS.get(matrix.codes.dtype, "")


def names_of(dtype: torch.dtype, kinds: Collection[str] = KINDS) -> list[str]:
    """Return the names of the kernels that dequantise codes of some kinds to a dtype."""
    return [f"dense_{DTYPES[dtype]}_{kind}" for kind in kinds]


class Dequantiser:
    """Dequantisation kernels for one device and dtype.

    They may only be called with matrices that :meth:`takes` accepts, and do not check this.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype, kinds: Collection[str] = KINDS) -> None:
        """Load the kernels.

        Args:
            place: a CUDA device.
            dtype: dtype of the result, one of :data:`tpplan.decoder.fast.launches.launcher.DTYPES`.
            kinds: kinds of codes of the device's matrices.
        """
        names = names_of(dtype, kinds)
        self._launchers = {kind: Launcher(name, place) for kind, name in zip(kinds, names, strict=True)}

    def takes(self, matrix: Quantised) -> bool:
        """Return whether there is a kernel for a matrix; each eight columns must share a scale."""
        (size, width), (rows, columns), kind = matrix.shape, block_of(matrix), kind_of(matrix)
        if kind not in self._launchers or _form_of(matrix) is None:
            return False
        if (width | min(columns, width)) % _COLUMNS:
            return False
        if (matrix.codes.data_ptr() | matrix.codes.stride(0) * matrix.codes.itemsize) % (4 if kind in _HALVES else 8):
            return False
        return has_quotients(rows, size) and has_quotients(columns // _COLUMNS, width // _COLUMNS)

    def __call__(self, matrix: Quantised, start: int, end: int, out_RK: Tensor) -> None:
        """Dequantise rows as :meth:`dense` of the matrix does: in float32, rounded once.

        Args:
            matrix: a matrix on the device, with contiguous rows; only those of MXFP4 may have another stride.
            start: first row.
            end: row after the last.
            out_RK: tensor for the result, in the kernels' dtype, with rows at multiples of 16 bytes.
        """
        (size, width), (rows, columns), scales = matrix.shape, block_of(matrix), matrix.scales
        units = width // _COLUMNS
        blocks = -(-units // _THREADS)
        threads = -(-units // (blocks * _WARP)) * _WARP
        self._launchers[kind_of(matrix)](
            (-(-(end - start) // _ROWS), blocks, 1),
            threads,
            out_RK.data_ptr(),
            out_RK.stride(0) * _ITEM,
            matrix.codes.data_ptr(),
            matrix.codes.stride(0) * matrix.codes.itemsize,
            start,
            end,
            units,
            scales.data_ptr(),
            _form_of(matrix) or 0,
            scales.stride(0),
            fraction_of(rows, size),
            fraction_of(columns // _COLUMNS, units),
            *_zeros_of(matrix),
        )


def block_of(matrix: Quantised) -> tuple[int, int]:
    """Return the numbers of rows and columns that share a scale; 1 where groups differ, as in EXL2."""
    if isinstance(matrix, Exl2Matrix):
        return 1, 1
    return (matrix.rows, matrix.columns) if isinstance(matrix, Float8Matrix) else (1, matrix.group)


def _form_of(matrix: Quantised) -> int | None:
    """Return the kernels' number for the dtype of scales, 0 for MXFP4; None if they support no such scales."""
    if isinstance(matrix, Float4Matrix):
        return 0
    return FORMS.get(str(matrix.scales.dtype))


def _zeros_of(matrix: Quantised) -> tuple[int, int, int]:
    """Return the address of zero points, whether two share a byte, and the number to add; address 0 if none are stored.

    Without stored zero points, the last number is the zero point of all codes.
    """
    if not isinstance(matrix, IntMatrix):
        return 0, 0, 0
    if matrix.zeros is None:
        return 0, 0, 1 << (matrix.bits - 1)
    return matrix.zeros.data_ptr(), matrix.zeros.dtype != torch.uint8, matrix.plus


def has_quotients(block: int, count: int) -> bool:
    """Return whether division of all numbers below ``count`` by ``block`` can be done by multiplication."""
    return block >= count or block * count <= _ONE


def fraction_of(block: int, count: int) -> int:
    """Return the fixed-point factor that replaces division of numbers below ``count`` by ``block``."""
    return -(-_ONE // block) if block < count else 0
