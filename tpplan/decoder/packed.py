"""Products of up to sixteen rows and a matrix of 4-bit codes, with a gate or a sum behind, in one kernel.

Shapes are written at the end of a name: R rows (up to 16), K columns of the matrix, N rows of it, I intermediate.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from tpplan.decoder.gemv import GATES, is_vectors
from tpplan.decoder.launcher import DTYPES, Launcher, bits_of
from tpplan.decoder.quantised import IntMatrix, Matrix
from tpplan.exec.channel_table import MOST_BLOCKS

#: Rows that kernels take.
MOST_ROWS: Final = 16

#: Rows of one instruction, columns of a step, matrix rows of a tile, bits of a code.
_EIGHT, _STEP, _TILE, _NIBBLE = 8, 128, 16, 4
#: Steps that a warp has on their way.
_DEEP: Final = 4
#: What kernels call the dtypes of scales.
_FORMS: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
#: A power of two that no columns are more than.
_ALL: Final = 31


@cache
def shape_of(tiles: int, steps: int, processors: int, warps: int) -> tuple[int, int, int]:
    """Return how many blocks share a matrix, the warps of each, and the steps that a warp has on their way.

    Args:
        tiles: of the matrix.
        steps: of a tile.
        processors: of the GPU.
        warps: that a multiprocessor has registers for.
    """
    found = []
    for together in (1, 2, 3, 4):
        most = warps // together
        run = min(_DEEP, -(-steps // most))
        count = -(-steps // run)
        size = count if count <= most else min(range(most, most // 2, -1), key=lambda each: -(-count // each) * each)
        turns = -(-tiles // (together * processors)) * -(-count // size)
        resident = size * min(together, -(-tiles // processors))
        found.append((turns * (run * max(resident * 49, 500) + 800), -together, size, run))
    _, together, size, run = min(found)
    return min(processors * -together, tiles, MOST_BLOCKS), size, run


def names_of(dtype: torch.dtype) -> list[str]:
    """Return the names of the kernels for a dtype: for up to eight rows, and up to sixteen."""
    return [f"packed_{DTYPES[dtype]}_{rows}" for rows in (_EIGHT, 2 * _EIGHT)]


class Packed:
    """Kernels for one device and dtype.

    They are right for what :meth:`takes` accepts, and unchecked.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype) -> None:
        """Load them.

        Args:
            place: a CUDA device.
            dtype: of rows, of 16 bits.
        """
        self._launch = [Launcher(name, place) for name in names_of(dtype)]
        self._dtype = dtype
        self._processors = torch.cuda.get_device_properties(place).multi_processor_count

    def takes(self, x_RK: Tensor, weight: Matrix, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for rows and a matrix.

        Args:
            x_RK: rows.
            weight: ``[N, K]``.
            gated: whether there is a gate behind.
        """
        if not isinstance(weight, IntMatrix):
            return False
        (size, width), group = weight.shape, weight.group
        return (
            weight.bits == _NIBBLE
            and weight.columns is None
            and weight.codes.is_contiguous()
            and weight.scales.dtype in _FORMS
            and not weight.scales.data_ptr() % 4
            and not width % _STEP
            and (group >= width or (group >= _STEP and not group & (group - 1)))
            and not (gated and size % 2)
            and 0 < len(x_RK) <= MOST_ROWS
            and size > 0
            and is_vectors(x_RK, self._dtype)
        )

    def linear(self, x_RK: Tensor, weight: IntMatrix, bias_N: Tensor | None = None) -> Tensor:
        """Return ``functional.linear`` of rows: ``[R, N]``, rounded once."""
        y_RN = x_RK.new_empty((len(x_RK), len(weight)))
        self._run(y_RN, x_RK, weight, (0, 0) if bias_N is None else (bias_N.data_ptr(), 0), 0)
        return y_RN

    def add(self, to_RN: Tensor, x_RK: Tensor, weight: IntMatrix) -> None:
        """Add a product to rows, where they are, and round once, as ``addmm_`` does."""
        self._run(to_RN, x_RK, weight, (to_RN.data_ptr(), 2 * to_RN.stride(0)), 0)

    def gated(self, x_RK: Tensor, weight: IntMatrix, gate: str, bias_N: Tensor | None = None) -> Tensor:
        """Return the products of the matrix's second half, times the activations of its first's: ``[R, I]``.

        Products, activations and what comes of both are rounded, as they are where each is a kernel.

        Args:
            x_RK: rows.
            weight: gate and up projection, one below the other.
            gate: the activation, of :data:`tpplan.decoder.gemv.GATES`.
            bias_N: of both.
        """
        h_RI = x_RK.new_empty((len(x_RK), len(weight) // 2))
        self._run(h_RI, x_RK, weight, (0, 0) if bias_N is None else (bias_N.data_ptr(), 0), GATES[gate])
        return h_RI

    def _run(self, y: Tensor, x: Tensor, weight: IntMatrix, plus: tuple[int, int], mode: int) -> None:
        rows, width = x.shape
        is_more = rows > _EIGHT
        tiles, steps = -(-len(weight) // _TILE), width // _STEP
        blocks, warps, run = shape_of(tiles, steps, self._processors, 12 if is_more else 16)
        zeros = weight.zeros
        self._launch[is_more](
            blocks, 32 * warps, y.data_ptr(), 2 * y.stride(0), x.data_ptr(), 2 * x.stride(0),
            weight.codes.data_ptr(), weight.scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(),
            weight.scales.shape[1], _ALL if weight.group >= width else weight.group.bit_length() - 1,
            _FORMS[weight.scales.dtype], bits_of(8.0 if zeros is None else float(weight.plus)), run,
            y.shape[1], width, rows, *plus, mode,
        )  # fmt: skip
