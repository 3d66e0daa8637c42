"""GEMM of 17 to 64 rows with quantised weights, whose codes are read once, with a gate or a sum as epilogue.

On sm_90 it takes 9 to 64 rows, see :mod:`tpplan.decoder.fast.kernels.warpgroup`.

Blocks share the steps of all tiles evenly (stream-K, arXiv:2301.03598): the last block of a tile adds up the partial
sums of the others.

Shapes are suffixes of names: R rows, K columns of the matrix, N rows of the matrix, I intermediate.
"""

from __future__ import annotations

from functools import cache
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.fast.kernels.wide_limits import FEWEST, GROUP_FEWEST, GROUP_WARPS, STRIP, WARPS, stage_bytes
from tpplan.decoder.fast.launches.dense import kind_of
from tpplan.decoder.fast.launches.launcher import DTYPES, Launcher, shared_memory_of
from tpplan.decoder.fast.launches.packed import STEPS, is_read, words_of
from tpplan.decoder.weights.quantised import IntMatrix, Matrix, Quantised
from tpplan.decoder.weights.row_kernels import RowKernels, is_vectors

if TYPE_CHECKING:
    from collections.abc import Collection

#: Minimum rows of the kernels, and of those by which four warps multiply together; the maximum of both.
FEWEST_ROWS: Final = 17
FEWEST_GROUP_ROWS: Final = 9
MOST_ROWS: Final = 64
#: The compute capability that has instructions of four warps.
GROUPS: Final = (9, 0)

#: Bytes of the partial sums of a warp for each row, and the maximum tiles of which a block leaves partial sums.
_ROW_BYTES, _MOST_PARTS = 128, 2
#: Maximum warps of a block, and the maximum blocks that share a tile (split-K).
_MOST_WARPS, _MOST_SPLITS = 8, 16
#: Bytes of one copy of scales, and of one write of results.
_WORD = 4
#: Minimum and maximum stages (steps in shared memory) of a block; bytes of shared memory that CUDA reserves per block.
_FEWEST_STAGES, _MOST_STAGES, _RESERVED = 2, 3, 1024
#: Maximum elements of a matrix that kernels for few rows multiply as fast by 9 to 16.
_SMALL: Final = 2**25
#: Minimum steps of each warp for two blocks on a multiprocessor, and minimum strips per multiprocessor for full ones.
_MANY_STEPS, _MANY_STRIPS = 5, 2


@cache
def shape_of(strips: int, steps: int, processors: int, warps: int, fewest: int, paired: int) -> tuple[int, int]:  # noqa: PLR0917
    """Return the number of blocks that share all steps of a matrix evenly, and the warps of a block.

    Two blocks on a multiprocessor hide each other's latency, but leave more partial sums to add up; so do large blocks.

    Args:
        strips: strips of 32 matrix rows, half of them rows of the gate if there is one.
        steps: steps that the columns take.
        processors: multiprocessors of the GPU.
        warps: warps that a multiprocessor has registers for, at least eight.
        fewest: minimum warps of a block.
        paired: maximum warps of a block for which a multiprocessor has shared memory for two; 0 if it never has.
    """
    together, size = 1, _MOST_WARPS
    pair = min(size if strips >= _MANY_STRIPS * processors else fewest, warps // 2, paired)
    if pair >= fewest and strips * steps >= _MANY_STEPS * size * processors:
        together, size = 2, pair
    tiles = -(-strips // size)
    blocks = min(together * processors, tiles * min(steps, _MOST_SPLITS))
    longest = -(-tiles * steps // blocks)
    even = blocks // tiles * tiles  # no block has parts of two tiles, if that takes no longer
    return even if even * longest >= tiles * steps else blocks, size


@frozen
class Form:
    """A kernel for up to some number of rows.

    Attributes:
        name: of it, for a dtype and a kind of codes in place of the braces.
        warps: that a multiprocessor has registers for.
        fewest: minimum warps of a block.
    """

    name: str
    warps: int
    fewest: int


def forms_of(kind: str, capability: tuple[int, int]) -> dict[int, Form]:
    """Return the kernels for a kind of codes, by their maximum rows.

    Args:
        kind: of codes.
        capability: compute capability of the GPU; 9.0 has instructions by which four warps multiply (wgmma).
    """
    by_warp = {rows: Form(f"wide_{{}}_{kind}_{rows}", WARPS[rows], FEWEST[rows]) for rows in WARPS}
    if capability != GROUPS:
        return by_warp
    forms = {rows: Form(f"wgmma_{{}}_{kind}_{rows}", warps, GROUP_FEWEST) for rows, warps in GROUP_WARPS.items()}
    return forms if STEPS[kind] == STEPS["4"] else {**forms, 32: by_warp[32]}  # where it is no slower


def names_of(dtype: torch.dtype, kinds: Collection[str], capability: tuple[int, int]) -> list[str]:
    """Return the names of kernels for a dtype.

    Args:
        dtype: dtype of the rows.
        kinds: kinds of codes; those without kernels are left out.
        capability: compute capability of the GPU.
    """
    found = (forms_of(kind, capability).values() for kind in kinds if kind in STEPS)
    return [form.name.format(DTYPES[dtype]) for form in chain.from_iterable(found)]


def bytes_of(blocks: int, warps: int, rows: int) -> int:
    """Return the bytes of the partial sums of all blocks: up to 19 MiB on a GPU with 132 multiprocessors."""
    return _MOST_PARTS * _ROW_BYTES * blocks * warps * rows


def stages_of(stage: int, together: int, limits: tuple[int, ...]) -> int:
    """Return the number of pipeline stages of a block, each with one step in shared memory.

    Args:
        stage: bytes of a stage.
        together: blocks that a multiprocessor is to have.
        limits: bytes of shared memory that a block may have, and that a multiprocessor has.
    """
    of_block, of_all = limits
    return max(_FEWEST_STAGES, min(_MOST_STAGES, of_block // stage, (of_all // together - _RESERVED) // stage))


def paired_of(rows: int, step: int, fewest: int, limits: tuple[int, ...]) -> int:
    """Return the maximum warps of a block for which a multiprocessor has shared memory for two; 0 if it never has.

    Args:
        rows: maximum rows of the kernel.
        step: columns of a step.
        fewest: minimum warps of a block.
        limits: bytes of shared memory that a block may have, and that a multiprocessor has.
    """
    room = limits[1] // 2 - _RESERVED
    sizes = (_MOST_WARPS, fewest)
    return next((warps for warps in sizes if _FEWEST_STAGES * stage_bytes(rows, step, warps) <= room), 0)


class QuantisedGemm(RowKernels[Quantised]):
    """GEMM kernels for quantised weights, for one device and dtype.

    NaN codes of e4m3 count as 480. Elements of the matrix are rounded to 16 bits, and so are scales. Launches of one
    object must not overlap, because their blocks find the last one of a tile by the same counters.

    Attributes:
        fewest_rows: minimum rows that they take.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype, kinds: Collection[str]) -> None:
        """Load the kernels.

        Args:
            place: a CUDA device.
            dtype: 16-bit dtype of rows.
            kinds: kinds of codes; those without kernels are ignored.
        """
        self._limits, capability = shared_memory_of(place), torch.cuda.get_device_capability(place)
        self._kernels = {
            kind: {
                rows: (form, Launcher(form.name.format(DTYPES[dtype]), place, most_shared=self._limits[0]))
                for rows, form in forms_of(kind, capability).items()
            }
            for kind in kinds
            if kind in STEPS
        }
        self.fewest_rows = FEWEST_GROUP_ROWS if capability == GROUPS else FEWEST_ROWS
        self._dtype = dtype
        self._processors = torch.cuda.get_device_properties(place).multi_processor_count
        self._turns = torch.zeros(self._processors * max(WARPS.values()), dtype=torch.int32, device=place)

    def takes(self, x_RK: Tensor, matrix_NK: Matrix, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for rows and a matrix that is not slower than dequantising for torch.

        Scales are converted to the dtype of the rows; in float16, scales of other dtypes could underflow.

        Args:
            x_RK: rows.
            matrix_NK: the matrix.
            gated: whether a gate follows.
        """
        if isinstance(matrix_NK, Tensor) or kind_of(matrix_NK) not in self._kernels:
            return False
        if self._dtype is torch.float16 and matrix_NK.scales.dtype is not torch.float16:
            return False
        if not self.fewest_rows <= len(x_RK) <= MOST_ROWS or len(matrix_NK) % (4 if gated else 2):
            return False
        if len(x_RK) < FEWEST_ROWS and prod(matrix_NK.shape) <= _SMALL:
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
        rows, (form, kernel) = next(each for each in self._kernels[kind].items() if len(x) <= each[0])
        # A strip has as many matrix rows with a gate as without.
        step = STEPS[kind]
        paired = paired_of(rows, step, form.fewest, self._limits)
        blocks, warps = shape_of(-(-size // STRIP), width // step, self._processors, form.warps, form.fewest, paired)
        parts = torch.empty(bytes_of(blocks, warps, rows), dtype=torch.uint8, device=x.device)
        stage = stage_bytes(rows, step, warps)
        stages = stages_of(stage, -(-blocks // self._processors), self._limits)
        kernel(
            blocks, 32 * warps,
            y.data_ptr(), 2 * y.stride(0), x.data_ptr(), 2 * x.stride(0), *words_of(matrix),
            parts.data_ptr(), self._turns.data_ptr(), y.shape[1], width, len(x), stages, *plus, mode,
            shared=stages * stage,
        )  # fmt: skip
