"""The common interface of kernels that multiply few rows by a matrix, with a gate or a sum as epilogue.

Shapes are suffixes of names: R rows, K columns of the matrix, N rows of the matrix, I intermediate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from tpplan.decoder.model.gates import SWIGLU_OAI
from tpplan.decoder.weights.quantised import Matrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tpplan.exec.cuda.channel import Channel

#: The kernels' numbers for the gates of :func:`tpplan.decoder.model.gates.gated`; 0 is none.
GATES: Final = {"silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, SWIGLU_OAI: 4}

#: Bytes of one access, and of an element.
_VECTOR, _ITEM = 16, 2

M = TypeVar("M", bound=Matrix)


class RowKernels(ABC, Generic[M]):
    """Kernels for one device and one 16-bit dtype of rows.

    They may only be called with tensors that :meth:`takes` accepts, and do not check this. Rows must be in the order of
    the matrix's columns, see :func:`tpplan.decoder.weights.quantised.ordered`.
    """

    @abstractmethod
    def takes(self, x_RK: Tensor, matrix_NK: Matrix, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for rows and a matrix, and it is not slower than torch.

        Args:
            x_RK: rows.
            matrix_NK: the matrix.
            gated: whether a gate follows.
        """

    def linear(self, x_RK: Tensor, matrix_NK: M, bias_N: Tensor | None = None, out_RN: Tensor | None = None) -> Tensor:
        """Return ``functional.linear`` of rows: ``[R, N]``, rounded once; a new tensor if ``out_RN`` is not given."""
        y_RN = x_RK.new_empty((len(x_RK), len(matrix_NK))) if out_RN is None else out_RN
        self._run(y_RN, x_RK, matrix_NK, bias_of(bias_N), 0)
        return y_RN

    def add(self, to_RN: Tensor, x_RK: Tensor, matrix_NK: M) -> None:
        """Add a product to rows in place, rounding once, as ``addmm_`` does."""
        self._run(to_RN, x_RK, matrix_NK, _rows(to_RN), 0)

    def gated(self, x_RK: Tensor, matrix_NK: M, gate: str, bias_N: Tensor | None = None) -> Tensor:
        """Return the products with the matrix's second half, times the activations of those with its first: ``[R, I]``.

        Products, activations and results are each rounded, as they would be by separate kernels.

        Args:
            x_RK: rows.
            matrix_NK: gate and up projection, stacked along their rows.
            gate: name of the activation, from :data:`GATES`.
            bias_N: bias of both projections, if there is one.
        """
        h_RI = x_RK.new_empty((len(x_RK), len(matrix_NK) // 2))
        self._run(h_RI, x_RK, matrix_NK, bias_of(bias_N), GATES[gate])
        return h_RI

    @abstractmethod
    def _run(self, y: Tensor, x: Tensor, matrix: M, plus: tuple[int, int], mode: int) -> None:
        """Write products.

        Args:
            y: tensor for the result.
            x: rows.
            matrix: the matrix.
            plus: address of the values to add, and the bytes from one row of them to the next.
            mode: 0 without a gate, else a number of :data:`GATES`.
        """


class AllReduceKernels(RowKernels[M]):
    """Kernels for few rows, some of which have an all-reduce over the devices as epilogue."""

    @abstractmethod
    def adds_up(self, x_RK: Tensor, matrix_NK: Matrix) -> bool:
        """Return whether there is a kernel with an all-reduce as epilogue for rows and a matrix."""

    def joint(self, to_RN: Tensor, x_RK: Tensor, matrix_NK: M, channel: Channel, device: int) -> None:
        """Add the sum of all devices' products to rows in place, rounding once.

        Args:
            to_RN: rows, equal on all devices.
            x_RK: the device's columns of the rows to multiply.
            matrix_NK: the device's columns of the matrix, which :meth:`adds_up` accepts.
            channel: channel that adds up the products; every device launches such a kernel, by :meth:`Channel.run`.
            device: index of the device in the plan.
        """
        self._run_joint(to_RN, x_RK, matrix_NK, _rows(to_RN), channel, device)

    @abstractmethod
    def _run_joint(  # noqa: PLR0917
        self, y: Tensor, x: Tensor, matrix: M, plus: tuple[int, int], channel: Channel, device: int
    ) -> None:
        """Write sums of all devices' products."""


def bias_of(bias_N: Tensor | None) -> tuple[int, int]:
    """Return the address of a bias and a row pitch of 0, to add it to every row; zeros if there is none."""
    return (0, 0) if bias_N is None else (bias_N.data_ptr(), 0)


def _rows(to_RN: Tensor) -> tuple[int, int]:
    """Return the address and pitch in bytes of rows to add."""
    return to_RN.data_ptr(), _ITEM * to_RN.stride(0)


def is_vectors(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether slices along the last dimension, in a dtype, begin at multiples of 16 bytes and consist of these."""
    *steps, one = tensor.stride()
    if tensor.dtype is not dtype or one != 1 or not tensor.shape[-1]:
        return False
    places = tensor.data_ptr() | _ITEM * tensor.shape[-1]
    for step in steps:
        places |= _ITEM * step
    return not places % _VECTOR
