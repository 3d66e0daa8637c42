"""Products of few rows and a matrix, with a norm before and a gate or a sum behind, in one kernel.

Shapes are written at the end of a name: R rows (one or two), K columns of the matrix, N rows of it, I intermediate.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.launcher import DTYPES, Launcher, bits_of
from tpplan.exec.channel_table import MOST_BLOCKS

if TYPE_CHECKING:
    from tpplan.exec.channel import Channel

#: Rows that a kernel takes: of more, what multiplies by tensor cores is faster, with a kernel for the norm before too.
MOST_ROWS: Final = 2

#: What the kernels call the activations of :data:`tpplan.decoder.settings.ACTIVATIONS`.
GATES: Final = {"silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3}

#: Bytes of rows that are normed in shared memory, at most.
_NORMED: Final = 2**15
_ITEM: Final = 2
#: Bytes that one access moves, columns that a warp reads at a time, matrix rows that it reads at a time.
_VECTOR, _STEP, _FOUR = 16, 256, 4
#: Warps of a block, and of a multiprocessor, whose registers are enough for two such blocks (on sm_90).
_BLOCK_WARPS, _WARPS = 8, 16


@frozen
class Norm:
    """What rows are divided by, and multiplied with, before a product.

    Attributes:
        weight: of the norm, ``[K]``, in the rows' dtype.
        eps: is added to the mean square.
    """

    weight: Tensor
    eps: float


@frozen
class Shape:
    """How the warps of a kernel share a matrix.

    Attributes:
        team: warps that share the columns of four matrix rows.
        teams: of a block.
        blocks: of the kernel.
    """

    team: int
    teams: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.team * self.teams


@cache
def shape_of(batches: int, width: int, processors: int) -> Shape:
    """Return how warps share a matrix: all in blocks of about eight.

    They are all on the GPU from the start where registers are enough for two on a multiprocessor, as on sm_90.
    A warp has two steps on their way, so a team is the largest in which fewest are without columns, if all make an even
    number of steps: 8 of 4,096 columns, 7 of 3,584, 2 of 1,024.

    Args:
        batches: times that four rows of it are read.
        width: columns.
        processors: of the GPU.
    """
    pairs = -(-width // (2 * _STEP))
    team = min(range(_BLOCK_WARPS, 0, -1), key=lambda size: -pairs % size)
    teams = _BLOCK_WARPS // team
    resident = processors * (_WARPS // (team * teams))
    return Shape(team, teams, min(resident, -(-batches // teams), MOST_BLOCKS))


def names_of(dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """Return the names of the kernels for a dtype, for one row and two, and of those with a norm."""
    name = DTYPES[dtype]
    return [f"gemv_{name}_{count}" for count in (1, 2)], [f"gemv_norm_{name}_{count}" for count in (1, 2)]


def joint_names_of(dtype: torch.dtype) -> list[str]:
    """Return the names of those that add up the products of several devices."""
    return [f"gemv_joint_{DTYPES[dtype]}_{count}" for count in (1, 2)]


class Gemv:
    """Kernels for one device and dtype.

    They are right for what :meth:`takes` accepts, and unchecked.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype, *, joint: bool = False) -> None:
        """Load them.

        Args:
            place: a CUDA device.
            dtype: of rows and matrices, of 16 bits.
            joint: whether also those that add up the products of several devices.
        """
        self._plain, self._normed = ([Launcher(name, place) for name in names] for names in names_of(dtype))
        self._dtype = dtype
        self._joint = [Launcher(name, place, is_array=True) for name in joint_names_of(dtype)] if joint else []
        self._processors = torch.cuda.get_device_properties(place).multi_processor_count

    def takes(self, x_RK: Tensor, weight_NK: Tensor, norm: Tensor | None = None, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for rows and a matrix, and it is not slower than torch.

        Args:
            x_RK: rows.
            weight_NK: the matrix.
            norm: the weights of the norm before, if there is one.
            gated: whether there is a gate behind.
        """
        rows, width = x_RK.shape
        if not 0 < rows <= MOST_ROWS or len(weight_NK) < _FOUR or (gated and len(weight_NK) % 2):
            return False
        if norm is not None:
            is_there = norm.dtype is self._dtype and norm.is_contiguous() and not norm.data_ptr() % _VECTOR
            if not is_there or rows * width * _ITEM > _NORMED:
                return False
        return all(is_vectors(each, self._dtype) for each in (x_RK, weight_NK))

    def linear(self, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """Return ``functional.linear`` of rows, normed first if there is a norm: ``[R, N]``, rounded once."""
        y_RN = x_RK.new_empty((len(x_RK), len(weight_NK)))
        plus = (0, 0) if bias_N is None else (bias_N.data_ptr(), 0)
        self._run(y_RN, x_RK, weight_NK, plus, norm, 0)
        return y_RN

    def add(self, to_RN: Tensor, x_RK: Tensor, weight_NK: Tensor) -> None:
        """Add a product to rows, where they are, and round once, as ``addmm_`` does."""
        self._run(to_RN, x_RK, weight_NK, (to_RN.data_ptr(), 2 * to_RN.stride(0)), None, 0)

    def joint(self, to_RN: Tensor, x_RK: Tensor, weight_NK: Tensor, channel: Channel, device: int) -> None:
        """Add to rows, where they are, what all devices' products add up to, and round once.

        Args:
            to_RN: rows, the same on all devices.
            x_RK: the device's columns of what is multiplied.
            weight_NK: its columns of the matrix.
            channel: by which they are added up; every device launches such a kernel, by :meth:`Channel.run`.
            device: the plan's.
        """
        plus = to_RN.data_ptr(), 2 * to_RN.stride(0)
        shape, words = self._words(to_RN, x_RK, weight_NK, plus, 0)
        self._joint[len(x_RK) - 1](shape.blocks, shape.threads, *channel.words(device, words))

    def gated(self, x_RK: Tensor, weight_NK: Tensor, gate: str, norm: Norm, bias_N: Tensor | None = None) -> Tensor:
        """Return the products of the matrix's second half, times the activations of its first's: ``[R, I]``.

        Products, activations and what comes of both are rounded, as they are where each is a kernel.

        Args:
            x_RK: rows.
            weight_NK: gate and up projection, one below the other.
            gate: the activation, of :data:`GATES`.
            norm: of the rows, before all.
            bias_N: of both.
        """
        h_RI = x_RK.new_empty((len(x_RK), len(weight_NK) // 2))
        plus = (0, 0) if bias_N is None else (bias_N.data_ptr(), 0)
        self._run(h_RI, x_RK, weight_NK, plus, norm, GATES[gate])
        return h_RI

    def _run(  # noqa: PLR0917
        self, y: Tensor, x: Tensor, weight: Tensor, plus: tuple[int, int], norm: Norm | None, mode: int
    ) -> None:
        shape, words = self._words(y, x, weight, plus, mode)
        kernels = self._plain if norm is None else self._normed
        gain, eps = (0, 0) if norm is None else (norm.weight.data_ptr(), bits_of(norm.eps))
        kernels[len(x) - 1](shape.blocks, shape.threads, *words, gain, eps)

    def _words(
        self, y: Tensor, x: Tensor, weight: Tensor, plus: tuple[int, int], mode: int
    ) -> tuple[Shape, tuple[int, ...]]:
        """Return how warps share a matrix, and what all kernels are told."""
        rows, width = x.shape
        size, pitch = y.shape[1], 2 * weight.stride(0)
        per = 2 if mode else _FOUR
        shape = shape_of(-(-size // per), width, self._processors)
        return shape, (
            y.data_ptr(), 2 * y.stride(0), x.data_ptr(), 2 * x.stride(0),
            weight.data_ptr(), pitch, pitch * (size if mode else 2), size, per, width, rows, *plus, mode,
            shape.team, shape.teams, -(-(2**16) // shape.team),
        )  # fmt: skip


def is_vectors(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether rows of a matrix are of 16 bytes each, at multiples of them."""
    if matrix.dtype is not dtype or matrix.stride(1) != 1 or not matrix.shape[1]:
        return False
    return not (matrix.data_ptr() | matrix.stride(0) * _ITEM | matrix.shape[1] * _ITEM) % _VECTOR
