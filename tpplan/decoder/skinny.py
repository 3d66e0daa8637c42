"""Products of up to sixteen rows and a matrix, with a gate or a sum behind, in one kernel by tensor cores.

Shapes are written at the end of a name: R rows (up to 16), K columns of the matrix, N rows of it, I intermediate.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from tpplan.decoder.gemv import GATES, _is_vectors
from tpplan.decoder.launcher import DTYPES, Launcher

#: Rows that kernels take.
MOST_ROWS: Final = 16

#: Rows of one instruction, columns that a warp reads at a time, matrix rows of a tile.
_EIGHT, _STEP, _TILE = 8, 64, 16
#: Warps of a multiprocessor, whose registers are enough for so many (on sm_80).
_WARPS = 16


@cache
def shape_of(tiles: int, width: int, processors: int) -> tuple[int, int]:
    """Return how many blocks share a matrix, and the warps of each: all are on the GPU from the start.

    There are two blocks on a multiprocessor, so that one reads while the other adds up, or one where there are not
    tiles for more. A warp has two steps on their way, so it has the number of warps with which fewest are without
    columns, if all make an even number of steps: 8 of 4,096 columns, 7 of 3,584, 4 of 512.

    Args:
        tiles: of the matrix.
        width: columns.
        processors: of the GPU.
    """
    most = _WARPS if tiles <= processors else _WARPS // 2
    pairs = -(-width // (2 * _STEP))
    warps = pairs if pairs <= most else min(range(most, most // 2, -1), key=lambda size: -(-pairs // size) * size)
    return min(processors * (_WARPS // warps), tiles), warps


def names_of(dtype: torch.dtype) -> list[str]:
    """Return the names of the kernels for a dtype: for up to eight rows, and up to sixteen."""
    return [f"skinny_{DTYPES[dtype]}_{rows}" for rows in (_EIGHT, 2 * _EIGHT)]


class Skinny:
    """Kernels for one device and dtype.

    They are right for what :meth:`takes` accepts, and unchecked.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype) -> None:
        """Load them.

        Args:
            place: a CUDA device.
            dtype: of rows and matrices, of 16 bits.
        """
        self._eight, self._sixteen = (Launcher(name, place) for name in names_of(dtype))
        self._dtype = dtype
        self._processors = torch.cuda.get_device_properties(place).multi_processor_count

    def takes(self, x_RK: Tensor, weight_NK: Tensor, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for rows and a matrix.

        Args:
            x_RK: rows.
            weight_NK: the matrix.
            gated: whether there is a gate behind.
        """
        if not 0 < len(x_RK) <= MOST_ROWS or not len(weight_NK) or (gated and len(weight_NK) % 2):
            return False
        return all(_is_vectors(each, self._dtype) for each in (x_RK, weight_NK))

    def linear(self, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Return ``functional.linear`` of rows: ``[R, N]``, rounded once."""
        y_RN = x_RK.new_empty((len(x_RK), len(weight_NK)))
        self._run(y_RN, x_RK, weight_NK, (0, 0) if bias_N is None else (bias_N.data_ptr(), 0), 0)
        return y_RN

    def add(self, to_RN: Tensor, x_RK: Tensor, weight_NK: Tensor) -> None:
        """Add a product to rows, where they are, and round once, as ``addmm_`` does."""
        self._run(to_RN, x_RK, weight_NK, (to_RN.data_ptr(), 2 * to_RN.stride(0)), 0)

    def gated(self, x_RK: Tensor, weight_NK: Tensor, gate: str, bias_N: Tensor | None = None) -> Tensor:
        """Return the products of the matrix's second half, times the activations of its first's: ``[R, I]``.

        Products, activations and what comes of both are rounded, as they are where each is a kernel.

        Args:
            x_RK: rows.
            weight_NK: gate and up projection, one below the other.
            gate: the activation, of :data:`tpplan.decoder.gemv.GATES`.
            bias_N: of both.
        """
        h_RI = x_RK.new_empty((len(x_RK), len(weight_NK) // 2))
        self._run(h_RI, x_RK, weight_NK, (0, 0) if bias_N is None else (bias_N.data_ptr(), 0), GATES[gate])
        return h_RI

    def _run(self, y: Tensor, x: Tensor, weight: Tensor, plus: tuple[int, int], mode: int) -> None:
        rows, width = x.shape
        size = y.shape[1]
        blocks, warps = shape_of(-(-len(weight) // _TILE), width, self._processors)
        kernel = self._eight if rows <= _EIGHT else self._sixteen
        kernel(
            blocks, 32 * warps, y.data_ptr(), 2 * y.stride(0), x.data_ptr(), 2 * x.stride(0),
            weight.data_ptr(), 2 * weight.stride(0), size, width, rows, *plus, mode,
        )  # fmt: skip
