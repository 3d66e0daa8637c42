"""Grouped GEMM: a mixture of experts for many rows, by kernels that read the experts' matrices in place.

Rows are grouped by their experts on the device: the host does not wait, and no shape depends on the choice.

Shapes are suffixes of names: R rows, D hidden, C experts of a row, I intermediate (the device's part).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.fast.kernels.grouped_limits import (
    GROUPING_THREADS,
    MOST_EXPERTS,
    OWN,
    STRIP,
    TILE_BYTES,
    WARPS,
    most_tiles,
    shared_bytes,
)
from tpplan.decoder.fast.kernels.scale_kinds import F16
from tpplan.decoder.fast.launches.chosen import Readable, readable, words_of_biases
from tpplan.decoder.fast.launches.launcher import DTYPES, Launcher, shared_memory_of
from tpplan.decoder.weights.row_kernels import GATES, is_vectors

if TYPE_CHECKING:
    from collections.abc import Collection

    from tpplan.decoder.weights.stacked import Projection

#: Kind of matrices that are not quantised, in the names of kernels.
WHOLE: Final = "whole"

#: Bits of an element, by the dtype of rows and the kinds of codes that there are kernels for, from
#: :data:`tpplan.decoder.fast.launches.dense.KINDS`.
_BITS: Final = {
    torch.bfloat16: {WHOLE: 16, "4": 4, "8": 8, "e4m3": 8, "e2m1": 4},
    torch.float16: {WHOLE: 16, "4": 4, "8": 8, "e4m3": 8},
}
_ITEM, _FLOAT, _VECTOR, _INT = 2, 4, 16, 4
#: Columns of a thread in the kernel of weighted sums, and its threads per block.
_COLUMNS, _THREADS = 8, 128
#: Elements of outputs that may be allocated beyond the size of the activations: 4 MiB.
_FREE: Final = 2**21
#: Maximum rows or tiles of a grid, in its second dimension.
_MOST_IN_GRID: Final = 2**16 - 1
#: Pairs of rows and experts per expert, on average, up to which the GEMV kernels are faster.
_FEW: Final = 1 / 2
#: Rows of a tile, and the pairs per expert, on average, from which on that size is the fastest.
_TILES: Final = ((128, 256), (64, 48), (32, 16), (16, 0))
#: Multiplications per expert, on average, from which on torch is faster for matrices that are not quantised.
_LARGE: Final = 2**32


def names_of(dtype: torch.dtype, codes: Collection[str] = ()) -> list[str]:
    """Return the names of the kernels for a dtype, and kinds of codes; kinds without kernels are left out."""
    name = DTYPES[dtype]
    products = [f"grouped_{name}_{kind}_{rows}" for kind in _kinds(dtype, codes) for rows in WARPS]
    return ["grouping_tiles", f"grouping_sum_{name}", *products]


def _kinds(dtype: torch.dtype, codes: Collection[str]) -> list[str]:
    """Return the kinds of matrices that there are kernels for: not quantised, and those of ``codes``."""
    return [kind for kind in _BITS[dtype] if kind in {WHOLE, *codes}]


@frozen(eq=False)
class _Groups:
    """Rows grouped by their experts.

    Attributes:
        choices: the rows' experts, ``[R, 2 × C]``.
        rows: rows of a tile.
        tiles: for each tile its expert and its range of pairs, as kernels read it.
        order: numbers of the pairs of rows and experts, sorted by expert.
    """

    choices: Tensor
    rows: int
    tiles: Tensor
    order: Tensor


class GroupedGemm:
    """Grouped GEMM of experts on one device, for rows of one dtype.

    Each method returns None if no kernel supports its tensors, or if other kernels or torch are faster. Choices are
    those of :meth:`tpplan.decoder.fast.launches.experts.ExpertGemv.choose`. Scales of codes are rounded to 16 bits, and
    so are the dequantised elements, and the outputs of the experts before their weighted sum. NaN codes of e4m3 count
    as 480, and scales of e2m1 above 2 ** 33 as 2 ** 33.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype, activation: str, codes: Collection[str] = ()) -> None:
        """Load the kernels.

        Args:
            place: a CUDA device.
            dtype: 16-bit dtype of rows.
            activation: name of the gates' activation, one of :data:`tpplan.decoder.weights.row_kernels.GATES`.
            codes: kinds of codes of quantised matrices; those without kernels are ignored.
        """
        self._dtype, self._mode, self._bits = dtype, GATES[activation], _BITS[dtype]
        self._tiles, self._sum = (Launcher(name, place) for name in names_of(dtype)[:2])
        most, _ = shared_memory_of(place)
        # the columns of a step have as many bytes of codes for any kind, and the rows most where a code has 4 bits
        self._sizes = [(rows, least) for rows, least in _TILES if shared_bytes(rows, min(self._bits.values())) <= most]
        self._products = {
            kind: {
                rows: Launcher(
                    f"grouped_{DTYPES[dtype]}_{kind}_{rows}", place, most_shared=shared_bytes(rows, self._bits[kind])
                )
                for rows, _ in self._sizes
            }
            for kind in _kinds(dtype, codes)
        }
        self._latest: _Groups | None = None

    def takes_up(self, rows: int, chosen: int, gates: Projection, ups: Projection) -> bool:
        """Tell whether these kernels support gate and up projections for ``rows`` rows of ``chosen`` experts each."""
        return self._is_faster(rows, chosen, gates) and self._pair(gates, ups) is not None

    def takes_down(self, rows: int, chosen: int, downs: Projection) -> bool:
        """Tell whether these kernels support down projections for ``rows`` rows of ``chosen`` experts each."""
        return self._is_faster(rows, chosen, downs) and self._down(downs) is not None

    def up(self, x_RD: Tensor, gates: Projection, ups: Projection, choice_RC: Tensor) -> Tensor | None:
        """Return the intermediate activations of the chosen experts, or None if other kernels are to compute them.

        See :meth:`tpplan.decoder.fast.launches.experts.ExpertGemv.up`.
        """
        rows, chosen = len(x_RD), choice_RC.shape[1] // 2
        if not _is_of_choices(choice_RC) or not self._is_faster(rows, chosen, gates):
            return None
        pair = self._pair(gates, ups)
        if pair is None or not is_vectors(x_RD, self._dtype):
            return None
        gate, up, biases = pair
        h_RCI = x_RD.new_empty(rows, chosen, gate.size)
        self._latest = self._grouped(choice_RC, len(gates))
        x = x_RD.data_ptr(), _ITEM * x_RD.stride(0) // _VECTOR, chosen
        self._run(h_RCI, x, self._latest, gate, biases, up)
        return h_RCI

    def down(self, h_RCI: Tensor, downs: Projection, choice_RC: Tensor, to_RD: Tensor | None = None) -> Tensor | None:
        """Return the weighted sum of the chosen experts' outputs, ``[R, D]``; None if other kernels are to compute it.

        Args:
            h_RCI: intermediate activations of the experts; copied if not contiguous.
            downs: down projections of all experts.
            choice_RC: choices of the rows.
            to_RD: rows to which to add the sum in place before it is rounded; they are returned then.
        """
        latest, self._latest = self._latest, None
        rows, chosen, width = h_RCI.shape
        if not _is_of_choices(choice_RC) or not self._is_faster(rows, chosen, downs):
            return None
        found = self._down(downs)
        if found is None or h_RCI.dtype is not self._dtype:
            return None
        down, biases = found
        if to_RD is not None and not is_vectors(to_RD, self._dtype):
            return None
        if h_RCI.is_contiguous() and h_RCI.data_ptr() % _VECTOR:
            return None
        out_RD = h_RCI.new_empty(rows, down.size) if to_RD is None else to_RD
        # The outputs, or copies of the activations, may take as much memory as the activations themselves.
        room = max(_FREE, rows * (chosen * width + down.size))
        most = max(1, room // (chosen * (down.size + (0 if h_RCI.is_contiguous() else width))))
        for start in range(0, rows, most):
            some = slice(start, start + most)
            if most >= rows and latest is not None and latest.choices is choice_RC:  # as for the up projections
                groups = latest
            else:
                groups = self._grouped(choice_RC[some], len(downs))
            self._add_up(out_RD[some], h_RCI[some].contiguous(), down, biases, groups, is_added=to_RD is not None)
        return out_RD

    def _add_up(
        self,
        out_RD: Tensor,
        h_RCI: Tensor,
        down: Readable,
        biases: tuple[int, ...],
        groups: _Groups,
        *,
        is_added: bool,
    ) -> None:
        rows, chosen, width = h_RCI.shape
        y_RCD = h_RCI.new_empty(rows, chosen, down.size)
        self._run(y_RCD, (h_RCI.data_ptr(), _ITEM * width // _VECTOR, 1), groups, down, biases)
        units, out = down.size // _COLUMNS, (out_RD.data_ptr(), _ITEM * out_RD.stride(0))
        self._sum(
            (-(-units // _THREADS), rows, 1), _THREADS, y_RCD.data_ptr(), _ITEM * down.size,
            groups.choices.data_ptr(), chosen, *out, *(out if is_added else (0, 0)), units,
        )  # fmt: skip

    def _grouped(self, choice_RC: Tensor, experts: int) -> _Groups:
        """Return rows grouped by their experts."""
        pairs, place = choice_RC.numel() // 2, choice_RC.device
        rows = next(rows for rows, least in self._sizes if pairs >= least * experts)
        count = most_tiles(pairs, experts, rows)
        tiles = torch.empty(count, TILE_BYTES // _INT, dtype=torch.int32, device=place)
        order = torch.empty(pairs, dtype=torch.int32, device=place)
        self._tiles(
            1, GROUPING_THREADS, choice_RC.data_ptr(), choice_RC.shape[1] // 2, pairs, rows, tiles.data_ptr(), count,
            order.data_ptr(),
        )  # fmt: skip
        return _Groups(choice_RC, rows, tiles, order)

    def _run(  # noqa: PLR0917
        self,
        y_RCN: Tensor,
        x: tuple[int, int, int],
        groups: _Groups,
        matrix: Readable,
        biases: tuple[int, ...],
        up: Readable | None = None,
    ) -> None:
        """Multiply by matrices of experts; if ``up`` is given, ``matrix`` has their gates."""
        before, more = matrix.words(up)
        address, units, many = x
        strips = -(-matrix.size // (STRIP // 2 if up else STRIP))
        kind = matrix.kind or WHOLE
        self._products[kind][groups.rows](
            (-(-strips // WARPS[groups.rows]), len(groups.tiles), 1), 32 * WARPS[groups.rows],
            y_RCN.data_ptr(), _ITEM * y_RCN.stride(1), address, units, *before, groups.tiles.data_ptr(),
            groups.order.data_ptr(), many, matrix.size, matrix.width, *biases, self._mode if up else 0, *more,
            shared=shared_bytes(groups.rows, self._bits[kind]),
        )  # fmt: skip

    def _readable(self, projection: Projection) -> Readable | None:
        """Return the layout of experts' matrices, or None if kernels do not support them."""
        matrix_EOI, bias = projection.matrix, projection.bias
        if bias is not None and bias.dtype is not self._dtype:
            return None
        if matrix_EOI.shape[1] % OWN or len(matrix_EOI) > MOST_EXPERTS:
            return None
        if isinstance(matrix_EOI, Tensor):
            return readable(matrix_EOI, ()) if is_vectors(matrix_EOI, self._dtype) else None
        found = readable(matrix_EOI, self._products)
        if found and self._dtype is torch.float16 and found.scaling[0] != F16:  # others may be too small
            return None
        return found

    def _pair(self, gates: Projection, ups: Projection) -> tuple[Readable, Readable, tuple[int, ...]] | None:
        """Return the layouts of gate and up projections and the parameters of their biases; None if not supported."""
        gate, up, biases = self._readable(gates), self._readable(ups), words_of_biases(gates.bias, ups.bias)
        return None if gate is None or up is None or gate != up or biases is None else (gate, up, biases)

    def _down(self, downs: Projection) -> tuple[Readable, tuple[int, ...]] | None:
        """Return the layout of down projections and the parameters of their biases; None if not supported."""
        down, biases = self._readable(downs), words_of_biases(downs.bias)
        if down is None or biases is None or down.size % _COLUMNS:
            return None
        return down, biases

    @staticmethod
    def _is_faster(rows: int, chosen: int, projection: Projection) -> bool:
        """Tell whether the rows fit into a grid, and neither other kernels nor torch are faster."""
        pairs, (experts, size, width) = rows * chosen, projection.matrix.shape
        if pairs <= _FEW * experts:
            return False
        if isinstance(projection.matrix, Tensor) and pairs // experts * size * width >= _LARGE:
            return False
        return rows <= _MOST_IN_GRID and most_tiles(pairs, experts, min(WARPS)) <= _MOST_IN_GRID


def _is_of_choices(choice_RC: Tensor) -> bool:
    """Tell whether kernels can read choices of this dtype and layout."""
    return choice_RC.dtype is torch.float32 and choice_RC.is_contiguous()
