"""Skinny GEMM with quantised weights: products of up to sixteen rows, with a gate or a sum as epilogue.

Shapes are suffixes of names: R rows (up to 16), K columns of the matrix, N rows of the matrix, I intermediate.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.fast.kernels.scale_kinds import FORMS
from tpplan.decoder.fast.launches import norms
from tpplan.decoder.fast.launches.dense import block_of, kind_of
from tpplan.decoder.fast.launches.launcher import DTYPES, Launcher, bits_of, shared_memory_of
from tpplan.decoder.fast.launches.norms import NormKernels
from tpplan.decoder.weights.quantised import IntMatrix, Matrix, Quantised
from tpplan.decoder.weights.row_kernels import is_vectors
from tpplan.exec.protocol.channel import MOST_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Collection

    from tpplan.decoder.fast.launches.norms import Norm
    from tpplan.exec.cuda.channel import Channel

#: Maximum rows of kernels; and of those whose epilogue is an all-reduce over the devices.
MOST_ROWS: Final = 16
MOST_JOINT: Final = 8

#: Kinds of codes that there are kernels for, from :data:`tpplan.decoder.fast.launches.dense.KINDS`, and the columns
#: that a warp reads in one step.
STEPS: Final = {"4": 128, "8": 64, "e4m3": 64}

#: The kind of codes that there are kernels with a norm in front for: with bytes a step takes no less time.
_NORMED: Final = "4"

#: Rows of one mma instruction, and matrix rows of a tile for every eight rows.
_EIGHT, _TILE = 8, 16
#: Dtypes of their stored zero points.
_ZEROS: Final = {"4": torch.int32, "8": torch.uint8}
#: Bytes of an element of the rows; and of shared memory that a block takes beside the rows that it has normed, some of
#: them for the system.
_ITEM, _BLOCK_BYTES = 2, 43 * 1024
#: A shift by so many bits makes the index of any row or column 0.
_ALL: Final = 31


@frozen
class _Form:
    """The limits of a kernel's blocks, measured on an H200.

    Attributes:
        warps: warps of a multiprocessor.
        deep: maximum steps that a warp loads ahead (stages of its pipeline); at least two, if there are as many.
        turns: relative time until each block has computed a tile, by the number of blocks on a multiprocessor.
    """

    warps: int
    deep: int
    turns: dict[int, int]


#: For up to eight rows, and up to sixteen. One block on a multiprocessor was never the best for eight rows, and three
#: never for sixteen. With four, the codes that are loaded ahead leave too little of the cache to the rows.
_FORM_OF: Final = (_Form(16, 4, {2: 9, 3: 13}), _Form(8, 2, {1: 9, 2: 16}))
#: Compute capabilities with 100 KiB of shared memory on a multiprocessor: room for two blocks of up to eight rows.
_SMALL: Final = frozenset({(8, 6), (8, 9), (12, 0), (12, 1)})


@cache
def shape_of(size: int, steps: int, processors: int, rows: int, most: int = 3) -> tuple[int, int, int]:
    """Return the number of blocks that share a matrix, the warps of a block, and the steps that a warp loads ahead.

    All blocks are resident at once; a multiprocessor has as many as finish all tiles first.

    Args:
        size: rows of the matrix.
        steps: steps that its columns take.
        processors: multiprocessors of the GPU.
        rows: rows that the matrix is multiplied by.
        most: maximum blocks that a multiprocessor has room for.
    """
    form = _FORM_OF[rows > _EIGHT]
    tiles = -(-size // (_TILE * (1 + (rows > _EIGHT))))
    counts = (count for count in form.turns if count <= most)
    together = min(counts, key=lambda count: -(-tiles // (count * processors)) * form.turns[count])
    room = form.warps // together
    run = min(form.deep, steps, max(2, -(-steps // room)))
    count = -(-steps // run)
    warps = count if count <= room else min(range(room, room // 2, -1), key=lambda each: -(-count // each) * each)
    return min(processors * together, tiles, MOST_BLOCKS), warps, run


def names_of(dtype: torch.dtype, kinds: Collection[str], *, joint: bool = False) -> list[str]:
    """Return the names of kernels for a dtype.

    Args:
        dtype: dtype of the rows.
        kinds: kinds of codes; those without kernels are left out.
        joint: whether to return the kernels with an all-reduce as epilogue, for up to eight rows, instead of those for
            up to eight and up to sixteen rows.
    """
    family, counts = ("packed_joint", (MOST_JOINT,)) if joint else ("packed", (_EIGHT, MOST_ROWS))
    return [f"{family}_{DTYPES[dtype]}_{kind}_{rows}" for kind in kinds if kind in STEPS for rows in counts]


def normed_names_of(dtype: torch.dtype, kinds: Collection[str]) -> list[str]:
    """Return the names of the kernels with a norm in front, for one row and for two."""
    counts = range(1, norms.MOST_ROWS + 1)
    return [f"packed_norm_{DTYPES[dtype]}_{_NORMED}_{rows}" for rows in counts if _NORMED in kinds]


class QuantisedSkinnyGemm(NormKernels[Quantised]):
    """Skinny GEMM kernels for quantised weights, for one device and dtype.

    NaN codes of e4m3 count as 480.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype, kinds: Collection[str], *, joint: bool = False) -> None:
        """Load the kernels.

        Args:
            place: a CUDA device.
            dtype: 16-bit dtype of rows.
            kinds: kinds of codes; those without kernels are ignored.
            joint: whether to load the kernels whose epilogue is an all-reduce over the devices, too.
        """
        self._single = {
            kind: [Launcher(name, place) for name in names_of(dtype, [kind])] for kind in kinds if kind in STEPS
        }
        self._joint = {
            kind: Launcher(name, place, is_array=True)
            for kind in (self._single if joint else ())
            for name in names_of(dtype, [kind], joint=True)
        }
        self._dtype = dtype
        found = torch.cuda.get_device_properties(place)
        self._processors, self._most = found.multi_processor_count, 2 if (found.major, found.minor) in _SMALL else 3
        self._room = shared_memory_of(place)[1] // self._most - _BLOCK_BYTES
        self._normed = [Launcher(name, place, most_shared=norms.MOST_BYTES) for name in normed_names_of(dtype, kinds)]

    def takes(self, x_RK: Tensor, matrix_NK: Matrix, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for rows and a matrix.

        For all matrices measured, it is faster than dequantising to 16 bits and multiplying in torch.

        Args:
            x_RK: rows.
            matrix_NK: the matrix.
            gated: whether a gate follows.
        """
        if isinstance(matrix_NK, Tensor) or kind_of(matrix_NK) not in self._single:
            return False
        return 0 < len(x_RK) <= MOST_ROWS and is_vectors(x_RK, self._dtype) and is_read(matrix_NK, gated=gated)

    def takes_normed(self, x_RK: Tensor, matrix_NK: Matrix, norm: Norm, *, gated: bool = False) -> bool:
        """Return whether there is a kernel for the norm of rows and a matrix, whose blocks all have room at once."""
        if not isinstance(matrix_NK, IntMatrix) or kind_of(matrix_NK) != _NORMED or matrix_NK.columns is not None:
            return False
        has_room = norm.is_fitting(x_RK) and x_RK.numel() * _ITEM <= self._room
        return has_room and self.takes(x_RK, matrix_NK, gated=gated)

    def adds_up(self, x_RK: Tensor, matrix_NK: Matrix) -> bool:
        """Return whether there is a kernel with an all-reduce as epilogue for rows and a matrix."""
        return len(x_RK) <= MOST_JOINT and self.takes(x_RK, matrix_NK)

    def _run(self, y: Tensor, x: Tensor, matrix: Quantised, plus: tuple[int, int], mode: int) -> None:
        blocks, threads, words = self._words(y, x, matrix, plus)
        self._single[kind_of(matrix)][len(x) > _EIGHT](blocks, threads, *words, mode)

    def _run_normed(  # noqa: PLR0917
        self, y: Tensor, x: Tensor, matrix: Quantised, plus: tuple[int, int], mode: int, norm: Norm
    ) -> None:
        blocks, threads, words = self._words(y, x, matrix, plus)
        self._normed[len(x) - 1](blocks, threads, *words, mode, *norm.words(), shared=x.numel() * _ITEM)

    def _run_joint(  # noqa: PLR0917
        self, y: Tensor, x: Tensor, matrix: Quantised, plus: tuple[int, int], channel: Channel, device: int
    ) -> None:
        blocks, threads, words = self._words(y, x, matrix, plus)
        self._joint[kind_of(matrix)](blocks, threads, *channel.words(device, words))

    def _words(
        self, y: Tensor, x: Tensor, matrix: Quantised, plus: tuple[int, int]
    ) -> tuple[int, int, tuple[int, ...]]:
        """Return the number of blocks, the threads of each, and the parameters common to all kernels."""
        size, width = matrix.shape
        steps = width // STEPS[kind_of(matrix)]
        blocks, warps, run = shape_of(size, steps, self._processors, len(x), self._most)
        words = (
            y.data_ptr(), 2 * y.stride(0), x.data_ptr(), 2 * x.stride(0), *words_of(matrix), run,
            y.shape[1], width, len(x), *plus,
        )  # fmt: skip
        return blocks, 32 * warps, words


def words_of(matrix: Quantised) -> tuple[int, ...]:
    """Return the kernel's parameters for a matrix: addresses of codes, scales and zero points, and their indexing."""
    (size, width), (height, columns), scales = matrix.shape, block_of(matrix), matrix.scales
    if not isinstance(matrix, IntMatrix):
        zeros, more = 0, _power_of(height, size)
    elif matrix.zeros is None:
        zeros, more = 0, bits_of(float(1 << (matrix.bits - 1)))
    else:
        zeros, more = matrix.zeros.data_ptr(), bits_of(float(matrix.plus))
    columns = _power_of(columns, width)
    return (
        matrix.codes.data_ptr(), scales.data_ptr(), zeros, scales.shape[1], columns, FORMS[str(scales.dtype)], more
    )  # fmt: skip


def is_read(matrix: Quantised, *, gated: bool) -> bool:
    """Return whether the layout of a matrix is one that kernels can read, given that they support its kind of codes."""
    (size, width), (height, columns), kind = matrix.shape, block_of(matrix), kind_of(matrix)
    zeros = matrix.zeros if isinstance(matrix, IntMatrix) else None
    return (
        matrix.codes.is_contiguous()
        and not matrix.codes.data_ptr() % 16
        and size > 0
        and not (gated and size % 2)
        and not width % STEPS[kind]
        and min(columns, width) >= STEPS[kind]
        and _has_power(columns, width)
        and _has_power(height, size)
        and str(matrix.scales.dtype) in FORMS
        and matrix.scales.is_contiguous()
        and (kind != "4" or _is_words(matrix.scales))
        and (zeros is None or (zeros.dtype is _ZEROS[kind] and zeros.is_contiguous()))
    )


def _is_words(tensor: Tensor) -> bool:
    """Return whether a tensor can be read in words of 32 bits, the last of which may reach beyond its end."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    return not tensor.data_ptr() % 4 and -(-end // 4) * 4 <= tensor.untyped_storage().nbytes()


def _has_power(block: int, count: int) -> bool:
    """Return whether a shift can replace division of numbers below ``count`` by ``block``."""
    return block >= count or not block & (block - 1)


def _power_of(block: int, count: int) -> int:
    """Return the bits of the shift that replaces division of numbers below ``count`` by ``block``."""
    return _ALL if block >= count else block.bit_length() - 1
