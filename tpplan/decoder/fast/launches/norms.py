"""The common interface of kernels that apply an RMS norm to rows before they multiply these by a matrix.

Shapes are suffixes of names: R rows (one or two), K columns of the matrix, N rows of the matrix, I intermediate.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from attrs import frozen
from torch import Tensor

from tpplan.decoder.fast.kernels import norm_limits
from tpplan.decoder.fast.launches.launcher import bits_of
from tpplan.decoder.weights.row_kernels import GATES, AllReduceKernels, M, bias_of

if TYPE_CHECKING:
    from tpplan.decoder.weights.quantised import Matrix

#: Maximum rows of these kernels, as for more a kernel of its own is faster; and maximum bytes of them in shared memory.
MOST_ROWS, MOST_BYTES = 2, norm_limits.MOST_BYTES

#: Bytes of an access, and of an element.
_VECTOR, _ITEM = 16, 2


@frozen
class Norm:
    """The RMS norm applied to rows before a product.

    Attributes:
        weight: weights of the norm, ``[K]``, in the rows' dtype.
        eps: epsilon added to the mean square.
        offset: number added to the weights.
    """

    weight: Tensor
    eps: float
    offset: float = 0.0

    def is_fitting(self, x_RK: Tensor) -> bool:
        """Tell whether kernels read these weights, and have room for the norm of rows."""
        weight, few = self.weight, len(x_RK) <= MOST_ROWS and x_RK.numel() * _ITEM <= MOST_BYTES
        return few and weight.dtype is x_RK.dtype and weight.is_contiguous() and not weight.data_ptr() % _VECTOR

    def words(self) -> tuple[int, int, int]:
        """Return how kernels are told of it."""
        return self.weight.data_ptr(), bits_of(self.eps), bits_of(self.offset)


class NormKernels(AllReduceKernels[M]):
    """Such kernels of which some apply an RMS norm to one row or two before the product."""

    @abstractmethod
    def takes_normed(self, x_RK: Tensor, matrix_NK: Matrix, norm: Norm, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for the norm of rows and a matrix, and it is not slower than two."""

    def normed(self, x_RK: Tensor, matrix_NK: M, norm: Norm, bias_N: Tensor | None = None) -> Tensor:
        """Return the result of :meth:`linear` for the norm of rows."""
        y_RN = x_RK.new_empty((len(x_RK), len(matrix_NK)))
        self._run_normed(y_RN, x_RK, matrix_NK, bias_of(bias_N), 0, norm)
        return y_RN

    def normed_gated(self, x_RK: Tensor, matrix_NK: M, gate: str, norm: Norm, bias_N: Tensor | None = None) -> Tensor:
        """Return the result of :meth:`gated` for the norm of rows."""
        h_RI = x_RK.new_empty((len(x_RK), len(matrix_NK) // 2))
        self._run_normed(h_RI, x_RK, matrix_NK, bias_of(bias_N), GATES[gate], norm)
        return h_RI

    @abstractmethod
    def _run_normed(  # noqa: PLR0917
        self, y: Tensor, x: Tensor, matrix: M, plus: tuple[int, int], mode: int, norm: Norm
    ) -> None:
        """Write products of the norm of rows."""
