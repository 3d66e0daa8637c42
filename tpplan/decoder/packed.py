"""Products of few rows and a matrix of 4-bit codes, with a gate or a sum behind, in one kernel for every sixteen.

Shapes are written at the end of a name: R rows (up to 64), K columns of the matrix, N rows of it, I intermediate.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.few_rows import FewRows, is_vectors
from tpplan.decoder.launcher import DTYPES, Launcher, bits_of
from tpplan.decoder.quantised import IntMatrix, Matrix
from tpplan.exec.channel_table import MOST_BLOCKS

if TYPE_CHECKING:
    from tpplan.exec.channel import Channel

#: Rows that are taken, sixteen by each kernel; and by those that add up the products of several devices.
MOST_ROWS: Final = 64
MOST_JOINT: Final = 8

#: Rows of one instruction, of a kernel, columns of a step, matrix rows of a tile for every eight rows, bits of a code.
_EIGHT, _SIXTEEN, _STEP, _TILE, _NIBBLE = 8, 16, 128, 16, 4
#: What kernels call the dtypes of scales.
_FORMS: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
#: A power of two that no columns are more than.
_ALL: Final = 31


@frozen
class _Form:
    """What blocks of a kernel are, measured on an H200.

    Attributes:
        warps: that a multiprocessor has registers for.
        deep: steps that a warp has on their way, at most; at least two, if there are.
        turns: by the blocks on a multiprocessor, what it takes until each has gone through a tile, in proportion.
    """

    warps: int
    deep: int
    turns: dict[int, int]


#: Of up to eight rows, and up to sixteen. A single block on a multiprocessor was never the best for the former; three
#: or four were not for the latter.
_FORM_OF: Final = (_Form(16, 4, {2: 9, 3: 13, 4: 15}), _Form(8, 2, {1: 9, 2: 16}))


@cache
def shape_of(size: int, width: int, processors: int, rows: int) -> tuple[int, int, int]:
    """Return how many blocks share a matrix, the warps of each, and the steps that a warp has on their way.

    All blocks are on the GPU from the start, as many on each multiprocessor as let all be done with their tiles first.
    For all that was measured (eight matrices of a model with 4,096 columns and of its quarters, 1 to 16 rows), this is
    within 1 % of the best number.

    Args:
        size: rows of the matrix.
        width: columns.
        processors: of the GPU.
        rows: that it is multiplied by.
    """
    form = _FORM_OF[rows > _EIGHT]
    tiles, steps = -(-size // (_TILE * (1 + (rows > _EIGHT)))), width // _STEP
    together = min(form.turns, key=lambda count: -(-tiles // (count * processors)) * form.turns[count])
    most = form.warps // together
    run = min(form.deep, steps, max(2, -(-steps // most)))
    count = -(-steps // run)
    warps = count if count <= most else min(range(most, most // 2, -1), key=lambda each: -(-count // each) * each)
    return min(processors * together, tiles, MOST_BLOCKS), warps, run


def names_of(dtype: torch.dtype) -> list[str]:
    """Return the names of the kernels for a dtype: for up to eight rows, and up to sixteen."""
    return [f"packed_{DTYPES[dtype]}_{rows}" for rows in (_EIGHT, 2 * _EIGHT)]


def joint_names_of(dtype: torch.dtype) -> list[str]:
    """Return the names of what adds up the products of several devices."""
    return [f"packed_joint_{DTYPES[dtype]}_{_EIGHT}"]


class Packed(FewRows[IntMatrix]):
    """Kernels for one device and dtype."""

    def __init__(self, place: torch.device, dtype: torch.dtype, *, joint: bool = False) -> None:
        """Load them.

        Args:
            place: a CUDA device.
            dtype: of rows, of 16 bits.
            joint: whether also those that add up the products of several devices.
        """
        self._alone = [Launcher(name, place) for name in names_of(dtype)]
        self._joint = [Launcher(name, place, is_array=True) for name in joint_names_of(dtype)] if joint else []
        self._dtype = dtype
        self._processors = torch.cuda.get_device_properties(place).multi_processor_count

    def takes(self, x_RK: Tensor, matrix_NK: Matrix, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for rows and a matrix.

        It is faster than to make 16-bit floats of the codes for torch to multiply by, of all matrices measured, even if
        the codes are read again for every sixteen rows.

        Args:
            x_RK: rows.
            matrix_NK: the matrix.
            gated: whether there is a gate behind.
        """
        return 0 < len(x_RK) <= MOST_ROWS and is_vectors(x_RK, self._dtype) and _is_read(matrix_NK, gated=gated)

    def adds_up(self, x_RK: Tensor, matrix_NK: Matrix) -> bool:
        """Return whether there is a kernel for rows and a matrix that saves a sum of devices."""
        return len(x_RK) <= MOST_JOINT and self.takes(x_RK, matrix_NK)

    def _run(self, y: Tensor, x: Tensor, matrix: IntMatrix, plus: tuple[int, int], mode: int) -> None:
        to, pitch = plus
        for start in range(0, len(x), _SIXTEEN):
            some = slice(start, start + _SIXTEEN)
            blocks, threads, words = self._words(y[some], x[some], matrix, (to + start * pitch, pitch))
            self._alone[len(x[some]) > _EIGHT](blocks, threads, *words, mode)

    def _run_joint(  # noqa: PLR0917
        self, y: Tensor, x: Tensor, matrix: IntMatrix, plus: tuple[int, int], channel: Channel, device: int
    ) -> None:
        blocks, threads, words = self._words(y, x, matrix, plus)
        (launch,) = self._joint
        launch(blocks, threads, *channel.words(device, words))

    def _words(
        self, y: Tensor, x: Tensor, matrix: IntMatrix, plus: tuple[int, int]
    ) -> tuple[int, int, tuple[int, ...]]:
        """Return how many blocks share a matrix, the threads of each, and what all kernels are told."""
        (rows, width), zeros = x.shape, matrix.zeros
        blocks, warps, run = shape_of(len(matrix), width, self._processors, rows)
        words = (
            y.data_ptr(), 2 * y.stride(0), x.data_ptr(), 2 * x.stride(0),
            matrix.codes.data_ptr(), matrix.scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(),
            matrix.scales.shape[1], _ALL if matrix.group >= width else matrix.group.bit_length() - 1,
            _FORMS[matrix.scales.dtype], bits_of(8.0 if zeros is None else float(matrix.plus)), run,
            y.shape[1], width, rows, *plus,
        )  # fmt: skip
        return blocks, 32 * warps, words


def _is_read(weight: Matrix, *, gated: bool) -> bool:
    """Return whether kernels can read a matrix: scales are read in words, of which the last may be half behind them."""
    if not isinstance(weight, IntMatrix):
        return False
    (size, width), group, scales, zeros = weight.shape, weight.group, weight.scales, weight.zeros
    end = (scales.storage_offset() + scales.numel()) * scales.itemsize
    return (
        weight.bits == _NIBBLE
        and weight.codes.is_contiguous()
        and not weight.codes.data_ptr() % 16
        and size > 0
        and not (gated and size % 2)
        and not width % _STEP
        and (group >= width or (group >= _STEP and not group & (group - 1)))
        and scales.dtype in _FORMS
        and scales.is_contiguous()
        and not scales.data_ptr() % 4
        and -(-end // 4) * 4 <= scales.untyped_storage().nbytes()
        and (zeros is None or (zeros.dtype == torch.int32 and zeros.is_contiguous()))
    )
