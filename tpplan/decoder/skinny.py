"""Products of up to sixteen rows and a matrix, with a gate or a sum behind, in one kernel by tensor cores.

Shapes are written at the end of a name: R rows (up to 16), K columns of the matrix, N rows of it, I intermediate.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tpplan.decoder.gemv import GATES, is_vectors
from tpplan.decoder.launcher import DTYPES, Launcher
from tpplan.exec.channel_table import MOST_BLOCKS

if TYPE_CHECKING:
    from tpplan.exec.channel import Channel

#: Rows that kernels take; and those that add up the products of several devices, for more of which sums are faster.
MOST_ROWS: Final = 16
MOST_JOINT: Final = 8

#: Rows of one instruction, columns that a warp reads at a time, matrix rows of a tile, bytes of a number.
_EIGHT, _STEP, _TILE, _ITEM = 8, 64, 16, 2
#: Warps of a multiprocessor, whose registers are enough for so many (on sm_80).
_WARPS = 16
#: Rows, at most, of which sums are so few that it costs little if all warps of a block add them up.
_FEW: Final = 4
#: Bytes of a matrix for each multiprocessor: with more, torch's kernels are as fast (on an H200); more than eight rows
#: take longer to read than a small matrix.
_MOST_SHARE, _LEAST_SHARE = 512 * 1024, 160 * 1024


@cache
def shape_of(tiles: int, width: int, processors: int, rows: int, *, joint: bool = False) -> tuple[int, int]:
    """Return how many blocks share a matrix, and the warps of each: all are on the GPU from the start.

    There are one, two or four blocks on a multiprocessor, so that each has one tile, if tiles are not too many; of few
    rows not four. A warp has two steps on their way, so it has the number of warps with which fewest are without
    columns, if all make an even number of steps: 8 of 4,096 columns, 7 of 3,584, 4 of 512.

    Args:
        tiles: of the matrix.
        width: columns.
        processors: of the GPU.
        rows: that it is multiplied by.
        joint: whether blocks wait for others, which must not need the room of whole multiprocessors then.
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
    """Return the name of what adds up the products of several devices."""
    return f"skinny_joint_{DTYPES[dtype]}_{_EIGHT}"


class Skinny:
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
        self._alone = [Launcher(name, place) for name in names_of(dtype)]
        self._joint = [Launcher(joint_name_of(dtype), place, is_array=True)] if joint else []
        self._dtype = dtype
        self._processors = torch.cuda.get_device_properties(place).multi_processor_count

    def takes(self, x_RK: Tensor, weight_NK: Tensor, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for rows and a matrix, and it is not slower than torch.

        It is where a block has one tile, or two if that saves a kernel for the gate.

        Args:
            x_RK: rows.
            weight_NK: the matrix.
            gated: whether there is a gate behind.
        """
        share = weight_NK.numel() * _ITEM / self._processors
        if share > _MOST_SHARE or (len(x_RK) > _EIGHT and share < _LEAST_SHARE):
            return False
        if len(weight_NK) > (4 if gated else 2) * self._processors * _TILE or (gated and len(weight_NK) % 2):
            return False
        return len(x_RK) <= MOST_ROWS and self._reads(x_RK, weight_NK)

    def adds_up(self, x_RK: Tensor, weight_NK: Tensor) -> bool:
        """Return whether there is a kernel for rows and a matrix that saves a sum of devices."""
        return len(x_RK) <= MOST_JOINT and self._reads(x_RK, weight_NK)

    def _reads(self, x_RK: Tensor, weight_NK: Tensor) -> bool:
        """Return whether there is something to multiply, which kernels can read."""
        return bool(len(x_RK) and len(weight_NK)) and all(is_vectors(each, self._dtype) for each in (x_RK, weight_NK))

    def linear(self, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Return ``functional.linear`` of rows: ``[R, N]``, rounded once."""
        y_RN = x_RK.new_empty((len(x_RK), len(weight_NK)))
        self._run(y_RN, x_RK, weight_NK, (0, 0) if bias_N is None else (bias_N.data_ptr(), 0), 0)
        return y_RN

    def add(self, to_RN: Tensor, x_RK: Tensor, weight_NK: Tensor) -> None:
        """Add a product to rows, where they are, and round once, as ``addmm_`` does."""
        self._run(to_RN, x_RK, weight_NK, (to_RN.data_ptr(), 2 * to_RN.stride(0)), 0)

    def joint(self, to_RN: Tensor, x_RK: Tensor, weight_NK: Tensor, channel: Channel, device: int) -> None:
        """Add to rows, where they are, what all devices' products add up to, and round once, as GEMV does.

        Args:
            to_RN: rows, the same on all devices.
            x_RK: the device's columns of what is multiplied.
            weight_NK: its columns of the matrix, of which :meth:`adds_up` is true.
            channel: by which they are added up; every device launches such a kernel, by :meth:`Channel.run`.
            device: the plan's.
        """
        plus = to_RN.data_ptr(), 2 * to_RN.stride(0)
        blocks, threads, words = self._words(to_RN, x_RK, weight_NK, plus, joint=True)
        (launch,) = self._joint
        launch(blocks, threads, *channel.words(device, words))

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
        blocks, threads, words = self._words(y, x, weight, plus)
        self._alone[len(x) > _EIGHT](blocks, threads, *words, mode)

    def _words(
        self, y: Tensor, x: Tensor, weight: Tensor, plus: tuple[int, int], *, joint: bool = False
    ) -> tuple[int, int, tuple[int, ...]]:
        """Return how many blocks share a matrix, the threads of each, and what all kernels are told."""
        rows, width = x.shape
        blocks, warps = shape_of(-(-len(weight) // _TILE), width, self._processors, rows, joint=joint)
        words = (
            y.data_ptr(), 2 * y.stride(0), x.data_ptr(), 2 * x.stride(0),
            weight.data_ptr(), 2 * weight.stride(0), y.shape[1], width, rows, *plus,
        )  # fmt: skip
        return blocks, 32 * warps, words
