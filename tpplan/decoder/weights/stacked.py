"""Matrices stacked along their rows: those of a layer's experts, and projections with the same input.

Shapes: E experts, O rows (outputs) and K columns (inputs) of each expert's matrix.
"""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, Self

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from tpplan.decoder.weights.quantised import Float4Matrix, Float8Matrix, IntMatrix, NestedScales, Quantised, TableMatrix
from tpplan.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Join = Callable[[Sequence[Tensor]], Tensor | None]


@frozen(eq=False)
class Stacked:
    """The quantised matrices of a layer's experts, stacked along their rows.

    Attributes:
        matrix: the rows of all experts.
        count: number of experts.
        columns: index of the input of each column of each expert's matrix, ``[E, K]``; None if they are in order.
    """

    matrix: Quantised
    count: int
    columns: Tensor | None = None
    _each: list[Quantised] = field(factory=list, init=False)

    @classmethod
    def of(cls, matrices: Sequence[Quantised], join: Join) -> Self:
        """Stack matrices, see :func:`stack_rows`; they are copied if ``join`` cannot join them.

        Raises:
            ModelError: the matrices are quantised in different ways.
        """
        ints = [each for each in matrices if isinstance(each, IntMatrix)]
        columns: list[Tensor] = []
        if any(each.columns is not None for each in ints):  # each expert has its own order
            order = torch.arange(ints[0].shape[1], dtype=torch.int32, device=ints[0].codes.device)
            columns = [order if each.columns is None else each.columns for each in ints]
            matrices = [evolve(each, columns=None) for each in ints]
        one = stack_rows(matrices, join) or stack_rows(matrices, lambda tensors: torch.cat(list(tensors)))
        if one is None:
            raise ModelError("experts of a layer are quantised in several ways", "convert all of them alike")
        return cls(one, len(matrices), _joined(columns, join).view(len(matrices), -1) if columns else None)

    def __len__(self) -> int:
        return self.count

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of experts, and rows and columns of each expert's matrix."""
        rows, columns = self.matrix.shape
        return self.count, rows // self.count, columns

    def __getitem__(self, expert: int) -> Quantised:
        if not self._each:  # made once: prompts ask for all of them again and again
            self._each.extend(map(self._part, range(self.count)))
        return self._each[expert]

    def part(self, some: slice) -> Self:
        """Return a slice of the experts; all of them, the usual case, are the same."""
        count, rows, _ = self.shape
        if some == slice(0, count):
            return self
        matrix = self.matrix.part(some.start * rows, some.stop * rows)
        return type(self)(matrix, some.stop - some.start, None if self.columns is None else self.columns[some])

    def _part(self, expert: int) -> Quantised:
        rows = self.shape[1]
        found = self.matrix.part(expert * rows, (expert + 1) * rows)
        if self.columns is None or not isinstance(found, IntMatrix):
            return found
        return evolve(found, columns=self.columns[expert])

    def ordered(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return inputs ``[..., K]`` reordered to match the columns of experts, given by number, ``[...]``."""
        return x if self.columns is None else x.expand(*experts.shape, -1).gather(-1, self.columns[experts].long())

    def chosen(self, experts: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return dequantised rows of experts' matrices, ``[..., end - start, K]``, with columns in stored order."""
        rows = experts[..., None] * self.shape[1] + torch.arange(start, end, device=experts.device)
        return self.matrix.chosen(rows, dtype)


@frozen(eq=False)
class Projection:
    """A projection of all experts of a layer.

    Attributes:
        matrix: matrices, ``[E, O, K]``; rows may be apart.
        bias: biases, ``[E, O]``, with elements that may be apart; None if there are none.
    """

    matrix: Tensor | Stacked
    bias: Tensor | None = None

    def __len__(self) -> int:
        return len(self.matrix)

    def __getitem__(self, some: slice) -> Self:
        matrix = self.matrix[some] if isinstance(self.matrix, Tensor) else self.matrix.part(some)
        return type(self)(matrix, None if self.bias is None else self.bias[some])

    @property
    def outputs(self) -> int:
        """Rows of each matrix."""
        return self.matrix.shape[1]

    def bias_of(self, expert: int) -> Tensor | None:
        """Return the bias of an expert, or None if it has none."""
        return None if self.bias is None else self.bias[expert]

    def plus_bias(self, y: Tensor, experts: Tensor | None = None) -> Tensor:
        """Add biases to products in place, and return these.

        Args:
            y: products ``[..., O]`` of experts, or ``[R, E, O]`` of all.
            experts: numbers of the experts, ``[...]``; None for all.
        """
        if self.bias is None:
            return y
        return y.add_(self.bias if experts is None else self.bias[experts])


def stack_rows(matrices: Sequence[Quantised], join: Join) -> Quantised | None:
    """Return matrices stacked along their rows as one matrix; None if they cannot be.

    Args:
        matrices: matrices with the same number of columns.
        join: joins tensors along the first dimension, or returns None if it cannot.
    """
    if all(isinstance(each, IntMatrix) for each in matrices):
        return _stack_ints([each for each in matrices if isinstance(each, IntMatrix)], join)
    if all(isinstance(each, Float8Matrix) for each in matrices):
        return _stack_floats([each for each in matrices if isinstance(each, Float8Matrix)], join)
    if all(isinstance(each, Float4Matrix) for each in matrices):
        return _stack_float4([each for each in matrices if isinstance(each, Float4Matrix)], join)
    if all(isinstance(each, TableMatrix) for each in matrices):
        return _stack_tables([each for each in matrices if isinstance(each, TableMatrix)], join)
    return None


def _stack_ints(matrices: Sequence[IntMatrix], join: Join) -> IntMatrix | None:
    for a, b in pairwise(matrices):
        if (a.bits, a.group, a.plus, a.codes.shape[1]) != (b.bits, b.group, b.plus, b.codes.shape[1]):
            return None
        if (a.columns is None) != (b.columns is None) or (a.zeros is None) != (b.zeros is None):
            return None
        if a.columns is not None and b.columns is not None and not torch.equal(a.columns, b.columns):
            return None
    codes, zero_points = (
        join([each.codes for each in matrices]),
        [each.zeros for each in matrices if each.zeros is not None],
    )
    if codes is None or len({each.dtype for each in zero_points}) > 1:
        return None
    scales, zeros = (
        _joined([each.scales for each in matrices], join),
        _joined(zero_points, join) if zero_points else None,
    )
    return evolve(matrices[0], codes=codes, scales=scales, zeros=zeros)


def _joined(tensors: Sequence[Tensor], join: Join) -> Tensor:
    """Join tensors that are small enough to be copied if necessary."""
    found = join(tensors)
    return torch.cat(list(tensors)) if found is None else found


def _stack_floats(matrices: Sequence[Float8Matrix], join: Join) -> Float8Matrix | None:
    if any(
        (a.columns, a.codes.shape[1], a.codes.dtype) != (b.columns, b.codes.shape[1], b.codes.dtype)
        for a, b in pairwise(matrices)
    ):
        return None
    codes = join([each.codes for each in matrices])
    if codes is None:
        return None
    rows = {each.rows for each in matrices}
    height = rows.pop() if len(rows) == 1 else 0
    if height.bit_count() == 1 and not any(len(each) % height for each in matrices[:-1]):
        scales = _joined([each.scales for each in matrices], join)
    else:  # blocks of several matrices differ, or kernels cannot index them: use a scale for each row
        scales = torch.cat([_by_row(each) for each in matrices])
        height = 1
    return evolve(matrices[0], codes=codes, scales=scales, rows=height)


def _by_row(matrix: Float8Matrix) -> Tensor:
    return matrix.scales.repeat_interleave(matrix.rows, dim=0)[: len(matrix)]


def _stack_float4(matrices: Sequence[Float4Matrix], join: Join) -> Float4Matrix | None:
    first = matrices[0]
    kind = first.group, first.codes.shape[1], first.scales.dtype, first.factors is None
    if any((each.group, each.codes.shape[1], each.scales.dtype, each.factors is None) != kind for each in matrices):
        return None
    codes = join([each.codes for each in matrices])
    if codes is None:
        return None
    scales, factors = _joined([each.scales for each in matrices], join), None
    each_has = [
        (one.factors, one.rows if len(one.factors) > 1 else len(one)) for one in matrices if one.factors is not None
    ]
    rows = gcd(*(rows for _, rows in each_has))
    if each_has:
        factors = torch.cat([one.repeat_interleave(own // rows) for one, own in each_has])
        factors = factors[:1] if (factors == factors[0]).all() else factors
    return evolve(first, codes=codes, scales=scales, factors=factors, rows=max(1, rows))


def _stack_tables(matrices: Sequence[TableMatrix], join: Join) -> TableMatrix | None:
    first = matrices[0]
    kind = first.group, first.codes.shape[1], first.scales.dtype
    if any((each.group, each.codes.shape[1], each.scales.dtype) != kind for each in matrices):
        return None
    if any(not torch.equal(first.table, each.table) for each in matrices):
        return None
    nested = [(each.nested, len(each)) for each in matrices if each.nested]
    if nested and not _are_alike([one for one, _ in nested]):
        return None
    codes = join([each.codes for each in matrices])
    if codes is None:
        return None
    scales = _joined([each.scales for each in matrices], join)
    return evolve(first, codes=codes, scales=scales, nested=_stack_nested(nested) if nested else None)


def _are_alike(nested: Sequence[NestedScales]) -> bool:
    first = nested[0]
    return all((one.size, one.before) == (first.size, 0) and torch.equal(one.table, first.table) for one in nested)


def _stack_nested(nested: Sequence[tuple[NestedScales, int]]) -> NestedScales:
    """Return the scales of matrices, given those of each and its rows, stacked along the rows."""
    starts, firsts, row, block = [], [], 0, 0
    for one, size in nested:
        starts.append(one.starts + row)
        firsts.append(one.firsts + block * one.size)
        row, block = row + size, block + len(one.scales)
    each = [one for one, _ in nested]
    return evolve(
        each[0],
        scales=torch.cat([one.scales for one in each]),
        starts=torch.cat(starts),
        firsts=torch.cat(firsts),
        offsets=torch.cat([one.offsets for one in each]),
    )
