"""Skinny GEMM: products of up to sixteen rows and a matrix by tensor cores, with a gate or a sum as epilogue.

Shapes are suffixes of names: R rows (up to 16), K columns of the matrix, N rows of the matrix, I intermediate.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tpplan.decoder.fast.launches.launcher import DTYPES, Launcher
from tpplan.decoder.weights.row_kernels import AllReduceKernels, is_vectors
from tpplan.exec.protocol.channel import MOST_BLOCKS

if TYPE_CHECKING:
    from tpplan.decoder.weights.quantised import Matrix
    from tpplan.exec.cuda.channel import Channel

#: Maximum rows of kernels; and of those with an all-reduce as epilogue: for more rows, a separate one is faster.
MOST_ROWS: Final = 16
MOST_JOINT: Final = 8

#: Rows of one mma instruction, columns that a warp reads at a time, matrix rows of a tile, bytes of an element.
_EIGHT, _STEP, _TILE, _ITEM = 8, 64, 16, 2
#: Warps that a multiprocessor has registers for (on sm_80).
_WARPS = 16
#: Maximum rows for which it costs little that all warps of a block add up their partial sums.
_FEW: Final = 4
#: Bytes of a matrix for each multiprocessor: with more than the first, torch is as fast (on an H200); with fewer than
#: the second, reading more than eight rows takes longer than reading the matrix.
_MOST_SHARE, _LEAST_SHARE = 512 * 1024, 160 * 1024


@cache
def shape_of(tiles: int, width: int, processors: int, rows: int, *, joint: bool = False) -> tuple[int, int]:
    """Return the number of blocks that share a matrix, and the warps of a block; all blocks are resident at once.

    A multiprocessor has one, two or four blocks, so that each has one tile if there are not too many tiles; for few
    rows at most two. A warp loads two steps ahead, so that it makes an even number of them. A block has as many warps
    as leave fewest without columns: 8 for 4,096 columns, 7 for 3,584, 4 for 512.

    Args:
        tiles: tiles of the matrix.
        width: columns of the matrix.
        processors: multiprocessors of the GPU.
        rows: rows that the matrix is multiplied by.
        joint: whether blocks wait for those of other devices, and so must not each take a whole multiprocessor.
    """
    together = 1 if tiles <= processors and not joint else 2 if tiles <= 2 * processors or rows <= _FEW else 4
    most = _WARPS // together
    pairs = -(-width // (2 * _STEP))
    warps = pairs if pairs <= most else min(range(most, most // 2, -1), key=lambda size: -(-pairs // size) * size)
    return min(processors * (_WARPS // warps), tiles, MOST_BLOCKS), warps


def names_of(dtype: torch.dtype) -> list[str]:
    """Return the names of the kernels for a dtype: for up to eight rows, and up to sixteen."""
    return [f"skinny_{DTYPES[dtype]}_{rows}" for rows in (_EIGHT, 2 * _EIGHT)]


def joint_name_of(dtype: torch.dtype) -> str:
    """Return the name of the kernel whose epilogue is an all-reduce over the devices."""
    return f"skinny_joint_{DTYPES[dtype]}_{_EIGHT}"


class SkinnyGemm(AllReduceKernels[Tensor]):
    """Skinny GEMM kernels for one device and dtype."""

    def __init__(self, place: torch.device, dtype: torch.dtype, *, joint: bool = False) -> None:
        """Load the kernels.

        Args:
            place: a CUDA device.
            dtype: 16-bit dtype of rows and matrices.
            joint: whether to load the kernels whose epilogue is an all-reduce over the devices, too.
        """
        self._single = [Launcher(name, place) for name in names_of(dtype)]
        self._joint = [Launcher(joint_name_of(dtype), place, is_array=True)] if joint else []
        self._dtype = dtype
        self._processors = torch.cuda.get_device_properties(place).multi_processor_count

    def takes(self, x_RK: Tensor, matrix_NK: Matrix, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for rows and a matrix, and it is not slower than torch.

        It is not slower if each block has one tile, or two if that saves a separate kernel for the gate.

        Args:
            x_RK: rows.
            matrix_NK: the matrix.
            gated: whether a gate follows.
        """
        (size, width), rows = matrix_NK.shape, len(x_RK)
        share = size * width * _ITEM / self._processors
        if share > _MOST_SHARE or (rows > _EIGHT and share < _LEAST_SHARE):
            return False
        if size > (4 if gated else 2) * self._processors * _TILE or (gated and size % 2):
            return False
        return rows <= MOST_ROWS and self._reads(x_RK, matrix_NK)

    def adds_up(self, x_RK: Tensor, matrix_NK: Matrix) -> bool:
        """Return whether there is a kernel with an all-reduce as epilogue for rows and a matrix."""
        return len(x_RK) <= MOST_JOINT and self._reads(x_RK, matrix_NK)

    def _reads(self, x_RK: Tensor, matrix_NK: Matrix) -> bool:
        """Return whether rows and a matrix are not empty, and have the layout that kernels need."""
        if not isinstance(matrix_NK, Tensor) or not len(x_RK) or not len(matrix_NK):
            return False
        return all(is_vectors(each, self._dtype) for each in (x_RK, matrix_NK))

    def _run(self, y: Tensor, x: Tensor, matrix: Tensor, plus: tuple[int, int], mode: int) -> None:
        blocks, threads, words = self._words(y, x, matrix, plus)
        self._single[len(x) > _EIGHT](blocks, threads, *words, mode)

    def _run_joint(  # noqa: PLR0917
        self, y: Tensor, x: Tensor, matrix: Tensor, plus: tuple[int, int], channel: Channel, device: int
    ) -> None:
        blocks, threads, words = self._words(y, x, matrix, plus, joint=True)
        (launch,) = self._joint
        launch(blocks, threads, *channel.words(device, words))

    def _words(
        self, y: Tensor, x: Tensor, matrix: Tensor, plus: tuple[int, int], *, joint: bool = False
    ) -> tuple[int, int, tuple[int, ...]]:
        """Return the number of blocks, the threads of each, and the parameters common to all kernels."""
        rows, width = x.shape
        blocks, warps = shape_of(-(-len(matrix) // _TILE), width, self._processors, rows, joint=joint)
        words = (
            y.data_ptr(), 2 * y.stride(0), x.data_ptr(), 2 * x.stride(0),
            matrix.data_ptr(), 2 * matrix.stride(0), y.shape[1], width, rows, *plus,
        )  # fmt: skip
        return blocks, 32 * warps, words
