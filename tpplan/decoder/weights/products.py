"""Products of rows and matrices, by torch or kernels. For torch, quantised matrices are dequantised piece by piece.

Shapes: R rows, K columns of a matrix, N rows of a matrix, E experts, O rows and I columns of an expert's matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from tpplan.decoder.weights.quantised import Matrix, Quantised, ordered
from tpplan.decoder.weights.row_kernels import RowKernels
from tpplan.decoder.weights.stacked import Stacked

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Minimum and maximum elements of a quantised matrix to dequantise at a time: 8 and 16 MiB in 16 bits. Products with
#: smaller pieces keep a GPU less busy, and larger ones do not help.
AT_ONCE: Final = 2**22
_MOST_AT_ONCE: Final = 2**23
#: The rows of a piece are a multiple of this; with other numbers cuBLAS takes two to ten times as long.
_EVEN: Final = 128
#: A piece takes at most one part in this many of the elements that a plan has scratch for.
_SHARE: Final = 8
#: Elements that there is scratch for, where no plan says how many.
ROOM: Final = _SHARE * AT_ONCE


def by_torch(matrix: Quantised, start: int, out_RK: Tensor) -> None:
    """Dequantise rows of a matrix from row ``start`` on into ``out_RK``, in torch."""
    matrix.write(start, out_RK)


def no_kernels(x_RK: Tensor, matrix_NK: Matrix) -> None:
    """Return no kernels."""


@frozen
class ProductOptions:
    """How products with matrices are computed.

    Attributes:
        rows: dequantises rows of a matrix, from a row number on, into a tensor ``[R, K]``.
        room: elements that the plan has scratch for on the device.
        kernels: returns kernels that are faster than torch for rows and a matrix, or None.
    """

    rows: Callable[[Quantised, int, Tensor], None] = by_torch
    room: int = ROOM
    kernels: Callable[[Tensor, Matrix], RowKernels[Any] | None] = no_kernels

    @property
    def at_once(self) -> int:
        """Elements to dequantise at a time."""
        return max(AT_ONCE, min(_MOST_AT_ONCE, self.room // _SHARE))


_BY_TORCH: Final = ProductOptions()


def linear(
    x_RK: Tensor,
    matrix_NK: Matrix,
    bias_N: Tensor | None = None,
    options: ProductOptions = _BY_TORCH,
    out: Tensor | None = None,
) -> Tensor:
    """Return the product of rows and a matrix, plus a bias: ``[R, N]``.

    Args:
        x_RK: rows.
        matrix_NK: the matrix.
        bias_N: the bias, if there is one.
        options: how to compute the product.
        out: tensor for the result; a new one if not given.
    """
    is_plain = bias_N is None or bias_N.is_contiguous()  # others are biases of gpt_oss
    if is_plain and (kernels := options.kernels(x_RK, matrix_NK)):
        return kernels.linear(ordered(x_RK, matrix_NK), matrix_NK, bias_N, out)
    if out is None and isinstance(matrix_NK, Tensor):
        return functional.linear(x_RK, matrix_NK, bias_N)
    y_RN = x_RK.new_empty((len(x_RK), len(matrix_NK))) if out is None else out
    if isinstance(matrix_NK, Tensor):
        return _multiply(x_RK, matrix_NK, bias_N, y_RN)
    x_RK = matrix_NK.ordered(x_RK)
    for start, end, some_NK in _pieces(matrix_NK, x_RK.dtype, options):
        _multiply(x_RK, some_NK, None if bias_N is None else bias_N[start:end], y_RN[:, start:end])
    return y_RN


def _multiply(x_RK: Tensor, matrix_NK: Tensor, bias_N: Tensor | None, out_RN: Tensor) -> Tensor:
    if bias_N is None:
        return torch.mm(x_RK, matrix_NK.mT, out=out_RN)
    return torch.addmm(bias_N, x_RK, matrix_NK.mT, out=out_RN)


def add_linear(
    to_RN: Tensor, x_RK: Tensor, matrix_NK: Matrix, bias_N: Tensor | None, options: ProductOptions = _BY_TORCH
) -> None:
    """Add the result of :func:`linear` to rows in place; without a bias, in one kernel for each piece."""
    if kernels := options.kernels(x_RK, matrix_NK):
        kernels.add(to_RN, ordered(x_RK, matrix_NK), matrix_NK)
    elif isinstance(matrix_NK, Tensor):
        to_RN.addmm_(x_RK, matrix_NK.mT)
    else:
        x_RK = matrix_NK.ordered(x_RK)
        for start, end, some_NK in _pieces(matrix_NK, x_RK.dtype, options):
            to_RN[:, start:end].addmm_(x_RK, some_NK.mT)
    if bias_N is not None:
        to_RN.add_(bias_N)


def linear_of_all(x_RK: Tensor, matrix_EOI: Tensor | Stacked, options: ProductOptions = _BY_TORCH) -> Tensor:
    """Return the products of rows and the matrices of all experts: ``[R, E, O]``."""
    if isinstance(matrix_EOI, Stacked) and matrix_EOI.columns is not None:
        y_REO = x_RK.new_empty(len(x_RK), *matrix_EOI.shape[:2])
        for expert in range(len(matrix_EOI)):
            y_REO[:, expert] = linear(x_RK, matrix_EOI[expert], options=options)
        return y_REO
    matrix = matrix_EOI.flatten(0, 1) if isinstance(matrix_EOI, Tensor) else matrix_EOI.matrix
    return torch.unflatten(linear(x_RK, matrix, options=options), 1, (len(matrix_EOI), -1))


def add_sum_of_all(
    to_RO: Tensor, x_REI: Tensor, matrix_EOI: Tensor | Stacked, options: ProductOptions = _BY_TORCH
) -> None:
    """Add the sum over experts of the products of their rows and matrices to rows in place."""
    if isinstance(matrix_EOI, Tensor) and len(matrix_EOI) > 1:
        to_RO.add_((x_REI.transpose(0, 1) @ matrix_EOI.mT).sum(0))
        return
    for expert in range(len(matrix_EOI)):
        add_linear(to_RO, x_REI[:, expert], matrix_EOI[expert], None, options)


def heads_at_once(matrix_NK: Matrix, heads: int, options: ProductOptions = _BY_TORCH) -> int:
    """Return the heads whose rows of a matrix :func:`per_head` yields at a time, up to all of them."""
    if isinstance(matrix_NK, Tensor):
        return heads
    rows, columns = matrix_NK.shape
    return min(heads, max(1, options.at_once // (rows // heads * columns)))


def per_head(
    matrix_NK: Matrix, heads: int, dtype: torch.dtype, options: ProductOptions = _BY_TORCH
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the heads that a matrix has equally many rows of, and these rows: ``[heads, rows, K]``.

    Args:
        matrix_NK: the matrix.
        heads: number of heads.
        dtype: dtype to dequantise to.
        options: how many elements to dequantise at a time, and how.
    """
    if isinstance(matrix_NK, Tensor):
        yield slice(0, heads), torch.unflatten(matrix_NK, 0, (heads, -1))
        return
    rows, columns = matrix_NK.shape
    size, step = rows // heads, heads_at_once(matrix_NK, heads, options)
    for start in range(0, heads, step):
        some = slice(start, min(start + step, heads))
        dense = torch.empty((some.stop - start) * size, columns, dtype=dtype, device=matrix_NK.codes.device)
        options.rows(matrix_NK, start * size, dense)
        yield some, torch.unflatten(matrix_NK.in_order(dense), 0, (-1, size))


def _pieces(matrix: Quantised, dtype: torch.dtype, options: ProductOptions) -> Iterator[tuple[int, int, Tensor]]:
    """Yield pieces of a matrix: first row, end row, and the dequantised rows, valid until the next piece."""
    rows, columns = matrix.shape
    step = max(1, options.at_once // columns)
    step = rows if step >= rows else step - step % _EVEN if step > _EVEN else step
    some = torch.empty(step, columns, dtype=dtype, device=matrix.codes.device)
    for start in range(0, rows, step):
        end = min(start + step, rows)
        options.rows(matrix, start, some[: end - start])
        yield start, end, some[: end - start]
