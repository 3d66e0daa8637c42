"""How kernels address the matrices of a layer's experts: base addresses, strides, and the parameters of scales.

Shapes are written at the end of a name: E experts, O outputs, I inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import field, frozen
from torch import Tensor

from tpplan.decoder.fast.kernels.scale_kinds import FORMS
from tpplan.decoder.fast.launches.dense import block_of, fraction_of, has_quotients, kind_of
from tpplan.decoder.fast.launches.launcher import bits_of
from tpplan.decoder.weights.quantised import Float4Matrix, IntMatrix

if TYPE_CHECKING:
    from collections.abc import Collection

    from tpplan.decoder.weights.quantised import Quantised
    from tpplan.decoder.weights.stacked import Stacked

#: Bytes of a vector access, and of an element of a matrix that is not quantised.
_VECTOR, _ITEM = 16, 2
#: Of integer codes, by their bits: the dtype of zero points, and the number that kernels subtract from each code.
_ZEROS: Final = {4: (torch.int32, 0), 8: (torch.uint8, 128)}


@frozen
class Readable:
    """The layout of the matrices of all experts of a layer; two are equal if they differ only in addresses.

    Attributes:
        kind: kind of codes, from :data:`tpplan.decoder.fast.launches.dense.KINDS`; empty if they are not quantised.
        size: rows of each expert's matrix.
        width: columns.
        row: bytes of a row.
        further: bytes from a row to the second row behind it.
        steps: the kernel's parameters for strides: from an expert to the next and, where they are not implied, from a
            row to the next.
        scaling: the kernel's parameters for codes: the kind of scales, scales of a row, the fixed-point factors that
            give the scale's indices for a row and a column, and the bits of a float that is added to zero points. For
            e2m1, only the address of the scales less a 16th of that of the codes.
        places: addresses of elements, scales and zero points; 0 for those that do not exist.
    """

    kind: str
    size: int
    width: int
    row: int
    further: int
    steps: tuple[int, ...]
    scaling: tuple[int, ...]
    places: tuple[int, int, int] = field(eq=False)

    def words(self, other: Readable | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the kernel's parameters for these matrices: those before its other ones, and those after them.

        Args:
            other: if these are gate projections, the up projections, which have the same layout.
        """
        element, scales, zeros = self.places
        half, of_scales, of_zeros = (b - a for a, b in zip(self.places, (other or self).places, strict=True))
        before = element, *self.steps, half if other else self.further
        if not scales:
            return before, self.scaling
        form, groups, row, column, offset = self.scaling
        return before, (
            scales, of_scales, form, groups, 0 if other else 2, row, column, zeros, of_zeros, offset,
        )  # fmt: skip


def readable(matrix_EOI: Tensor | Stacked, kinds: Collection[str]) -> Readable | None:
    """Return the layout of experts' matrices; None if kernels cannot read it. NaN codes of e4m3 count as 480.

    Args:
        matrix_EOI: the matrices; a tensor has 16-bit elements, and rows that consist of vectors of 16 bytes.
        kinds: kinds of codes that there are kernels for.
    """
    _, size, width = matrix_EOI.shape
    if isinstance(matrix_EOI, Tensor):
        of_expert, pitch, _ = (_ITEM * step for step in matrix_EOI.stride())
        return Readable(
            "", size, width, _ITEM * width, 2 * pitch, (of_expert, pitch), (), (matrix_EOI.data_ptr(), 0, 0)
        )
    matrix = matrix_EOI.matrix
    kind = kind_of(matrix)
    if kind not in kinds or matrix_EOI.columns is not None:
        return None
    if isinstance(matrix, Float4Matrix):
        return _floats(matrix, size) if _is_beside(matrix) else None
    if not _is_read(matrix):
        return None
    zeros, offset = _zeros_of(matrix)
    pitch, (rows, columns) = matrix.codes.stride(0) * matrix.codes.itemsize, block_of(matrix)
    units, unit = pitch // _VECTOR, _VECTOR * width // pitch
    scaling = (
        FORMS[str(matrix.scales.dtype)], matrix.scales.shape[1], fraction_of(rows, len(matrix)),
        fraction_of(columns // unit, units), bits_of(offset),
    )  # fmt: skip
    places = matrix.codes.data_ptr(), matrix.scales.data_ptr(), zeros
    return Readable(kind, size, width, pitch, 2 * pitch, (size,), scaling, places)


def _floats(matrix: Float4Matrix, size: int) -> Readable:
    """Return the layout of MXFP4 matrices of ``size`` rows each."""
    pitch, place = matrix.codes.stride(0), matrix.codes.data_ptr()
    scales = (matrix.scales.data_ptr() - place // _VECTOR) % 2**64
    of_row = matrix.codes.shape[1]
    return Readable("e2m1", size, 2 * of_row, of_row, 2 * pitch, (size * pitch, pitch), (scales,), (place, 0, 0))


def _is_beside(matrix: Float4Matrix) -> bool:
    """Tell whether kernels can read MXFP4: rows are whole vectors of 16 bytes, and scales have matching strides."""
    (pitch, one), (of_scales, next_one), width = matrix.codes.stride(), matrix.scales.stride(), matrix.codes.shape[1]
    if not width or (width | pitch | matrix.codes.data_ptr()) % _VECTOR:
        return False
    return (one, next_one, of_scales * _VECTOR) == (1, 1, pitch)


def words_of_biases(*biases_EO: Tensor | None) -> tuple[int, int, int, int] | None:
    """Return the kernel's parameters for biases: address, strides of experts and outputs, and bytes from gate to up.

    None if kernels cannot read them, because only one projection has biases, or the strides differ.

    Args:
        biases_EO: biases in 16 bits of the gate and up projections, or of a single projection; None for one without.
    """
    first, second = biases_EO[0], biases_EO[-1]
    if first is None or second is None:
        return (0, 0, 0, 0) if first is second else None
    if first.stride() != second.stride():
        return None
    of_expert, step = (_ITEM * count for count in first.stride())
    half = 2 * step if first is second else second.data_ptr() - first.data_ptr()
    return first.data_ptr(), of_expert, step, half


def _is_read(matrix: Quantised) -> bool:
    """Tell whether kernels can read a matrix: the codes in each vector of 16 bytes share a scale and a zero point."""
    tensors, (rows, columns), width = [matrix.codes, matrix.scales], block_of(matrix), matrix.shape[1]
    if isinstance(matrix, IntMatrix):
        if matrix.columns is not None:
            return False
        if matrix.zeros is not None:
            if matrix.zeros.dtype is not _ZEROS[matrix.bits][0]:
                return False
            tensors.append(matrix.zeros)
    pitch = matrix.codes.shape[1] * matrix.codes.itemsize
    if not pitch or (pitch | matrix.codes.data_ptr()) % _VECTOR or str(matrix.scales.dtype) not in FORMS:
        return False
    units, unit = pitch // _VECTOR, _VECTOR * width // pitch
    return (
        all(each.is_contiguous() for each in tensors)
        and (columns >= width or not columns % unit)
        and has_quotients(columns // unit, units)
        and has_quotients(rows, len(matrix))
    )


def _zeros_of(matrix: Quantised) -> tuple[int, float]:
    """Return the address of stored zero points, 0 if there are none, and the number to add to them.

    It includes what kernels subtract from codes.
    """
    if not isinstance(matrix, IntMatrix):
        return 0, 0.0
    _, less = _ZEROS[matrix.bits]
    if matrix.zeros is None:
        return 0, float((1 << (matrix.bits - 1)) - less)
    return matrix.zeros.data_ptr(), float(matrix.plus - less)
