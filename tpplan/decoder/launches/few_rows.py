"""What kernels that multiply few rows by a matrix have in common: products, with a gate or a sum behind.

Shapes are written at the end of a name: R rows, K columns of the matrix, N rows of it, I intermediate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from tpplan.decoder.quantised import Matrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tpplan.exec.gpu.channel import Channel

#: What kernels call the activations of :data:`tpplan.decoder.settings.ACTIVATIONS`; 0 is none.
GATES: Final = {"silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3}

#: Bytes that one access moves, and those of a number.
_VECTOR, _ITEM = 16, 2

M = TypeVar("M", bound=Matrix)


class FewRows(ABC, Generic[M]):
    """Kernels for one device and dtype of rows, of 16 bits.

    They are right for what :meth:`takes` accepts, and unchecked. Rows are in the order of the matrix's columns, see
    :func:`tpplan.decoder.quantised.ordered`.
    """

    @abstractmethod
    def takes(self, x_RK: Tensor, matrix_NK: Matrix, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for rows and a matrix, and it is not slower than torch.

        Args:
            x_RK: rows.
            matrix_NK: the matrix.
            gated: whether there is a gate behind.
        """

    def linear(self, x_RK: Tensor, matrix_NK: M, bias_N: Tensor | None = None) -> Tensor:
        """Return ``functional.linear`` of rows: ``[R, N]``, rounded once."""
        y_RN = x_RK.new_empty((len(x_RK), len(matrix_NK)))
        self._run(y_RN, x_RK, matrix_NK, bias_of(bias_N), 0)
        return y_RN

    def add(self, to_RN: Tensor, x_RK: Tensor, matrix_NK: M) -> None:
        """Add a product to rows, where they are, and round once, as ``addmm_`` does."""
        self._run(to_RN, x_RK, matrix_NK, _rows(to_RN), 0)

    def gated(self, x_RK: Tensor, matrix_NK: M, gate: str, bias_N: Tensor | None = None) -> Tensor:
        """Return the products of the matrix's second half, times the activations of its first's: ``[R, I]``.

        Products, activations and what comes of both are rounded, as they are where each is a kernel.

        Args:
            x_RK: rows.
            matrix_NK: gate and up projection, one below the other.
            gate: the activation, of :data:`GATES`.
            bias_N: of both.
        """
        h_RI = x_RK.new_empty((len(x_RK), len(matrix_NK) // 2))
        self._run(h_RI, x_RK, matrix_NK, bias_of(bias_N), GATES[gate])
        return h_RI

    @abstractmethod
    def _run(self, y: Tensor, x: Tensor, matrix: M, plus: tuple[int, int], mode: int) -> None:
        """Write products.

        Args:
            y: where they go.
            x: rows.
            matrix: what these are multiplied by.
            plus: what is added: an address, and the bytes from one row to the next.
            mode: 0, or one of :data:`GATES`.
        """


class JointRows(FewRows[M]):
    """Kernels of few rows, of which some add up the products of several devices."""

    @abstractmethod
    def adds_up(self, x_RK: Tensor, matrix_NK: Matrix) -> bool:
        """Return whether there is a kernel for rows and a matrix that saves a sum of devices."""

    def joint(self, to_RN: Tensor, x_RK: Tensor, matrix_NK: M, channel: Channel, device: int) -> None:
        """Add to rows, where they are, what all devices' products add up to, and round once.

        Args:
            to_RN: rows, the same on all devices.
            x_RK: the device's columns of what is multiplied.
            matrix_NK: its columns of the matrix, of which :meth:`adds_up` is true.
            channel: by which they are added up; every device launches such a kernel, by :meth:`Channel.run`.
            device: the plan's.
        """
        self._run_joint(to_RN, x_RK, matrix_NK, _rows(to_RN), channel, device)

    @abstractmethod
    def _run_joint(  # noqa: PLR0917
        self, y: Tensor, x: Tensor, matrix: M, plus: tuple[int, int], channel: Channel, device: int
    ) -> None:
        """Write sums of all devices' products."""


def bias_of(bias_N: Tensor | None) -> tuple[int, int]:
    """Return what is added to every row."""
    return (0, 0) if bias_N is None else (bias_N.data_ptr(), 0)


def _rows(to_RN: Tensor) -> tuple[int, int]:
    """Return what is added, a row to each."""
    return to_RN.data_ptr(), _ITEM * to_RN.stride(0)


def is_vectors(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether rows of a matrix are of 16 bytes each, at multiples of them."""
    if matrix.dtype is not dtype or matrix.stride(1) != 1 or not matrix.shape[1]:
        return False
    return not (matrix.data_ptr() | matrix.stride(0) * _ITEM | matrix.shape[1] * _ITEM) % _VECTOR
