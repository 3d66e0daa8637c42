"""GEMV: products of one or two rows and a matrix, with an RMS norm in front and a gate or a sum as epilogue.

Shapes are suffixes of names: R rows (one or two), K columns of the matrix, N rows of the matrix, I intermediate.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.fast.launches.launcher import DTYPES, Launcher
from tpplan.decoder.fast.launches.norms import MOST_ROWS, Norm, NormKernels
from tpplan.decoder.weights.row_kernels import is_vectors
from tpplan.exec.protocol.channel import MOST_BLOCKS

if TYPE_CHECKING:
    from tpplan.decoder.weights.quantised import Matrix
    from tpplan.exec.cuda.channel import Channel

_ITEM: Final = 2
#: Bytes that one access moves, columns that a warp reads at a time, matrix rows that it reads at a time.
_VECTOR, _STEP, _FOUR = 16, 256, 4
#: Warps of a block, and the warps that a multiprocessor has registers for: two such blocks (on sm_90).
_BLOCK_WARPS, _WARPS = 8, 16


@frozen
class Shape:
    """How the warps of a kernel share a matrix.

    Attributes:
        team: warps that share the columns of four matrix rows.
        teams: teams of a block.
        blocks: blocks of the kernel.
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
    """Return how warps share a matrix, in blocks of about eight warps.

    All blocks are resident from the start where a multiprocessor has registers for two, as on sm_90. A warp loads two
    steps ahead, so that it makes an even number of them. A team is the largest that leaves fewest of its warps without
    columns: 8 for 4,096 columns, 7 for 3,584, 2 for 1,024.

    Args:
        batches: groups of matrix rows, each of which a team reads at once.
        width: columns of the matrix.
        processors: multiprocessors of the GPU.
    """
    pairs = -(-width // (2 * _STEP))
    team = min(range(_BLOCK_WARPS, 0, -1), key=lambda size: -pairs % size)
    teams = _BLOCK_WARPS // team
    resident = processors * (_WARPS // (team * teams))
    return Shape(team, teams, min(resident, -(-batches // teams), MOST_BLOCKS))


def names_of(dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """Return the names of the kernels for a dtype: without a norm for one and two rows, then with a norm."""
    name = DTYPES[dtype]
    return [f"gemv_{name}_{count}" for count in (1, 2)], [f"gemv_norm_{name}_{count}" for count in (1, 2)]


def joint_names_of(dtype: torch.dtype) -> list[str]:
    """Return the names of the kernels whose epilogue is an all-reduce over the devices."""
    return [f"gemv_joint_{DTYPES[dtype]}_{count}" for count in (1, 2)]


class Gemv(NormKernels[Tensor]):
    """GEMV kernels for one device and dtype."""

    def __init__(self, place: torch.device, dtype: torch.dtype, *, joint: bool = False) -> None:
        """Load the kernels.

        Args:
            place: a CUDA device.
            dtype: 16-bit dtype of rows and matrices.
            joint: whether to load the kernels whose epilogue is an all-reduce over the devices, too.
        """
        self._plain, self._normed = ([Launcher(name, place) for name in names] for names in names_of(dtype))
        self._dtype = dtype
        self._joint = [Launcher(name, place, is_array=True) for name in joint_names_of(dtype)] if joint else []
        self._processors = torch.cuda.get_device_properties(place).multi_processor_count

    def takes(self, x_RK: Tensor, matrix_NK: Matrix, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for rows and a matrix, and it is not slower than torch.

        Args:
            x_RK: rows.
            matrix_NK: the matrix.
            gated: whether a gate follows.
        """
        rows = len(x_RK)
        if not 0 < rows <= MOST_ROWS or len(matrix_NK) < _FOUR or (gated and len(matrix_NK) % 2):
            return False
        return isinstance(matrix_NK, Tensor) and all(is_vectors(each, self._dtype) for each in (x_RK, matrix_NK))

    def takes_normed(self, x_RK: Tensor, matrix_NK: Matrix, norm: Norm, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for the norm of rows and a matrix, and it is not slower than two."""
        return self.takes(x_RK, matrix_NK, gated=gated) and norm.is_fitting(x_RK)

    def adds_up(self, x_RK: Tensor, matrix_NK: Matrix) -> bool:
        """Return whether there is a kernel with an all-reduce as epilogue for rows and a matrix."""
        return self.takes(x_RK, matrix_NK)

    def _run(self, y: Tensor, x: Tensor, matrix: Tensor, plus: tuple[int, int], mode: int) -> None:
        shape, words = self._words(y, x, matrix, plus, mode)
        self._plain[len(x) - 1](shape.blocks, shape.threads, *words, 0, 0, 0)

    def _run_normed(  # noqa: PLR0917
        self, y: Tensor, x: Tensor, matrix: Tensor, plus: tuple[int, int], mode: int, norm: Norm
    ) -> None:
        shape, words = self._words(y, x, matrix, plus, mode)
        self._normed[len(x) - 1](shape.blocks, shape.threads, *words, *norm.words())

    def _run_joint(  # noqa: PLR0917
        self, y: Tensor, x: Tensor, matrix: Tensor, plus: tuple[int, int], channel: Channel, device: int
    ) -> None:
        shape, words = self._words(y, x, matrix, plus, 0)
        self._joint[len(x) - 1](shape.blocks, shape.threads, *channel.words(device, words))

    def _words(
        self, y: Tensor, x: Tensor, weight: Tensor, plus: tuple[int, int], mode: int
    ) -> tuple[Shape, tuple[int, ...]]:
        """Return how warps share a matrix, and the parameters common to all kernels."""
        rows, width = x.shape
        size, pitch = y.shape[1], 2 * weight.stride(0)
        per = 2 if mode else _FOUR
        shape = shape_of(-(-size // per), width, self._processors)
        return shape, (
            y.data_ptr(), 2 * y.stride(0), x.data_ptr(), 2 * x.stride(0),
            weight.data_ptr(), pitch, pitch * (size if mode else 2), size, per, width, rows, *plus, mode,
            shape.team, shape.teams, -(-(2**16) // shape.team),
        )  # fmt: skip
