"""Products of 17 to 64 rows and a quantised matrix in one kernel that reads codes once, followed by a gate or a sum.

Shapes are suffixes of names: R rows, K columns of the matrix, N rows of the matrix, I intermediate.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tpplan.decoder.fast.kernels.wide_limits import STRIP, WARPS, stage_bytes
from tpplan.decoder.fast.launches.dense import kind_of
from tpplan.decoder.fast.launches.launcher import DTYPES, Launcher
from tpplan.decoder.fast.launches.packed import STEPS, is_read, words_of
from tpplan.decoder.weights.quantised import IntMatrix, Matrix, Quantised
from tpplan.decoder.weights.row_kernels import RowKernels, is_vectors

if TYPE_CHECKING:
    from collections.abc import Collection

#: Rows that are taken, at least and at most.
FEWEST_ROWS: Final = 17
MOST_ROWS: Final = 64

#: Bytes of what a warp leaves for each row, and how many such parts a block may leave.
_ROW_BYTES, _MOST_PARTS = 128, 2
#: Warps of a block, at most, and where there are two for each multiprocessor and few strips; and blocks that have steps
#: of the same matrix rows, at most.
_MOST_WARPS, _FEWER_WARPS, _MOST_SPLITS = 8, 6, 16
#: Bytes that scales are copied by, and results written.
_WORD = 4
#: Steps that a block has in shared memory, at least and at most; bytes of it that each block takes for itself.
_FEWEST_STAGES, _MOST_STAGES, _RESERVED = 2, 3, 1024
#: What torch calls the bytes of shared memory that a block may have, and that a multiprocessor has; of GPUs from
#: capability 8.0 on, what all of them have, if it does not tell.
_LIMITS: Final = {"shared_memory_per_block_optin": 99 << 10, "shared_memory_per_multiprocessor": 100 << 10}
#: Steps of each warp that make more warps worth while, and strips for each multiprocessor that make yet more so.
_MANY_STEPS, _MANY_STRIPS = 5, 2


@cache
def shape_of(strips: int, steps: int, processors: int, warps: int, paired: int) -> tuple[int, int]:
    """Return how many blocks share all steps of a matrix evenly, and the warps of each.

    Two blocks of a multiprocessor hide what each waits for, but leave more for others to add up; so do large blocks.

    Args:
        strips: 32 rows of the matrix each, half of them gates if there are any.
        steps: of its columns.
        processors: of the GPU.
        warps: that each of these has registers for, at least eight.
        paired: warps of blocks of which each has shared memory for two, at most; 0 if there are none.
    """
    together, size = 1, _MOST_WARPS
    pair = min(size if strips >= _MANY_STRIPS * processors else _FEWER_WARPS, warps // 2, paired)
    if pair >= _FEWER_WARPS and strips * steps >= _MANY_STEPS * size * processors:
        together, size = 2, pair
    tiles = -(-strips // size)
    blocks = min(together * processors, tiles * min(steps, _MOST_SPLITS))
    longest = -(-tiles * steps // blocks)
    even = blocks // tiles * tiles  # so many that none has parts of two tiles, where that takes no longer
    return even if even * longest >= tiles * steps else blocks, size


def names_of(dtype: torch.dtype, kinds: Collection[str]) -> list[str]:
    """Return the names of kernels for a dtype.

    Args:
        dtype: of rows.
        kinds: of codes; of some there are none.
    """
    return [f"wide_{DTYPES[dtype]}_{kind}_{rows}" for kind in kinds if kind in STEPS for rows in WARPS]


def bytes_of(blocks: int, warps: int, rows: int) -> int:
    """Return the bytes of what blocks leave for each other: up to 19 MiB on a GPU of 132 multiprocessors."""
    return _MOST_PARTS * _ROW_BYTES * blocks * warps * rows


def stages_of(stage: int, together: int, limits: tuple[int, ...]) -> int:
    """Return how many steps a block has in shared memory.

    Args:
        stage: bytes of each.
        together: blocks that a multiprocessor is to have.
        limits: bytes of shared memory that a block may have, and that a multiprocessor has.
    """
    of_block, of_all = limits
    return max(_FEWEST_STAGES, min(_MOST_STAGES, of_block // stage, (of_all // together - _RESERVED) // stage))


def paired_of(rows: int, step: int, limits: tuple[int, ...]) -> int:
    """Return the warps of blocks of which a multiprocessor has shared memory for two, at most; 0 if it has for none.

    Args:
        rows: that the kernel is for.
        step: columns of a step.
        limits: bytes of shared memory that a block may have, and that a multiprocessor has.
    """
    room = limits[1] // 2 - _RESERVED
    sizes = (_MOST_WARPS, _FEWER_WARPS)
    return next((warps for warps in sizes if _FEWEST_STAGES * stage_bytes(rows, step, warps) <= room), 0)


class QuantisedGemm(RowKernels[Quantised]):
    """Kernels for one device and dtype.

    NaN codes of e4m3 count as 480. Elements of the matrix are rounded to 16 bits, and so are scales. Launches of one
    object must not overlap, because their blocks use the same counters to find the last one.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype, kinds: Collection[str]) -> None:
        """Load the kernels.

        Args:
            place: a CUDA device.
            dtype: 16-bit dtype of rows.
            kinds: kinds of codes; those without kernels are ignored.
        """
        found = torch.cuda.get_device_properties(place)
        self._limits = tuple(getattr(found, name, least) for name, least in _LIMITS.items())
        self._kernels = {
            kind: {
                rows: Launcher(name, place, most_shared=self._limits[0])
                for rows, name in zip(WARPS, names_of(dtype, [kind]), strict=True)
            }
            for kind in kinds
            if kind in STEPS
        }
        self._dtype = dtype
        self._processors = found.multi_processor_count
        self._turns = torch.zeros(self._processors * max(WARPS.values()), dtype=torch.int32, device=place)

    def takes(self, x_RK: Tensor, matrix_NK: Matrix, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for rows and a matrix, which is not slower than codes made 16-bit for torch.

        Scales become numbers of the rows' dtype, for which those that are not of float16 may be too small.

        Args:
            x_RK: rows.
            matrix_NK: the matrix.
            gated: whether a gate follows.
        """
        if isinstance(matrix_NK, Tensor) or kind_of(matrix_NK) not in self._kernels:
            return False
        if self._dtype is torch.float16 and matrix_NK.scales.dtype is not torch.float16:
            return False
        if not FEWEST_ROWS <= len(x_RK) <= MOST_ROWS or len(matrix_NK) % (4 if gated else 2):
            return False
        scaling = matrix_NK.scales, matrix_NK.zeros if isinstance(matrix_NK, IntMatrix) else None
        if any(each is not None and each.data_ptr() % _WORD for each in scaling):
            return False
        return is_vectors(x_RK, self._dtype) and is_read(matrix_NK, gated=gated)

    def _run(self, y: Tensor, x: Tensor, matrix: Quantised, plus: tuple[int, int], mode: int) -> None:
        if any(word % _WORD for word in (y.data_ptr(), 2 * y.stride(0), *plus)):
            msg = "biases and rows of results begin at multiples of 4 bytes"
            raise ValueError(msg)
        (size, width), kind = matrix.shape, kind_of(matrix)
        rows = next(each for each in WARPS if len(x) <= each)
        # A strip has as many matrix rows with a gate as without.
        step = STEPS[kind]
        paired = paired_of(rows, step, self._limits)
        blocks, warps = shape_of(-(-size // STRIP), width // step, self._processors, WARPS[rows], paired)
        parts = torch.empty(bytes_of(blocks, warps, rows), dtype=torch.uint8, device=x.device)
        stage = stage_bytes(rows, step, warps)
        stages = stages_of(stage, -(-blocks // self._processors), self._limits)
        self._kernels[kind][rows](
            blocks, 32 * warps,
            y.data_ptr(), 2 * y.stride(0), x.data_ptr(), 2 * x.stride(0), *words_of(matrix),
            parts.data_ptr(), self._turns.data_ptr(), y.shape[1], width, len(x), stages, *plus, mode,
            shared=stages * stage,
        )  # fmt: skip
