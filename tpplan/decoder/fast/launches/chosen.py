"""The matrices of experts, as kernels read those that are chosen: where they are, and how they lie.

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

#: Bytes of an access, and of an element that is no code.
_VECTOR, _ITEM = 16, 2
#: Of whole numbers, by bits: the dtype of zeros, and what kernels take off codes.
_ZEROS: Final = {4: (torch.int32, 0), 8: (torch.uint8, 128)}


@frozen
class Readable:
    """Those of a layer; equal ones lie in the same way.

    Attributes:
        kind: of codes, see :data:`tpplan.decoder.fast.launches.dense.KINDS`; empty if there are none.
        size: rows of each.
        width: columns.
        row: bytes of a row.
        further: bytes from a row to the one after the next.
        steps: what kernels are told of how far it is from one to the next.
        scaling: what they are told of codes: kind of scales, how many there are beside each other, the fractions that
            rows and columns are multiplied by to find theirs, and bits of what is added to zeros; of e2m1 where the
            scale of 16 bytes of codes is, less a 16th of where these are.
        places: addresses of elements, scales and zeros; 0 of what there is not.
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
        """Return what a kernel is told of them, before all else and behind it.

        Args:
            other: what these are the gates of, if they are; they are equal.
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
    """Return matrices as kernels read them; None if they do not. What is no number in e4m3 counts as 480.

    Args:
        matrix_EOI: tensors are of 16 bits, and of whole vectors.
        kinds: of codes that there are kernels for.
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
    """Return matrices of so many rows each."""
    pitch, place = matrix.codes.stride(0), matrix.codes.data_ptr()
    scales = (matrix.scales.data_ptr() - place // _VECTOR) % 2**64
    of_row = matrix.codes.shape[1]
    return Readable("e2m1", size, 2 * of_row, of_row, 2 * pitch, (size * pitch, pitch), (scales,), (place, 0, 0))


def _is_beside(matrix: Float4Matrix) -> bool:
    """Tell whether kernels read a matrix: its rows are of 16 bytes of codes, and its scales as far apart as these."""
    (pitch, one), (of_scales, next_one), width = matrix.codes.stride(), matrix.scales.stride(), matrix.codes.shape[1]
    if not width or (width | pitch | matrix.codes.data_ptr()) % _VECTOR:
        return False
    return (one, next_one, of_scales * _VECTOR) == (1, 1, pitch)


def words_of_biases(*biases_EO: Tensor | None) -> tuple[int, int, int, int] | None:
    """Return what kernels are told of the biases of gates and of what these are for, or of all; None if they cannot be.

    Args:
        biases_EO: biases in 16 bits; None for a projection without.
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
    """Tell whether kernels read a matrix: 16 bytes of codes share a scale and a zero."""
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
    """Return where zeros are, if anywhere, and what is added to them, as codes are where kernels have them."""
    if not isinstance(matrix, IntMatrix):
        return 0, 0.0
    _, less = _ZEROS[matrix.bits]
    if matrix.zeros is None:
        return 0, float((1 << (matrix.bits - 1)) - less)
    return matrix.zeros.data_ptr(), float(matrix.plus - less)
