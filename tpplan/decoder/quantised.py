"""Matrices whose elements are codes and scales, as the decoder multiplies by them.

Shapes: N rows of a matrix (outputs), K columns (inputs), G groups of columns that share a scale, W words of 32 bits, E
experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from tpplan.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Join = Callable[[Sequence[Tensor]], Tensor | None]

#: Which of eight columns are in the nibbles of a word, lowest bits first: pairs of neighbours are 16 bits apart.
ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)

#: Bits of a nibble, and nibbles of a word.
_BITS, _WORD = 4, 8
#: Elements that torch makes at a time: each takes up to 29 bytes meanwhile.
_AT_ONCE: Final = 2**19


@frozen(eq=False)
class _Coded(ABC):
    """A matrix of codes, and scales that many of them share.

    Attributes:
        codes: of rows below each other.
        scales: in 16 or 32 bits.
    """

    codes: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.codes)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    def ordered(self, x: Tensor) -> Tensor:
        """Return inputs, along the last dimension, in the order of the columns."""
        return x

    def write(self, start: int, out_RK: Tensor) -> None:
        """Write rows from a number on: computed in float32, rounded once."""
        self._write(torch.arange(start, start + len(out_RK), device=self.codes.device), out_RK)

    def dense(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return some rows ``[end - start, K]``; see :meth:`write`."""
        out_RK = torch.empty(end - start, self.shape[1], dtype=dtype, device=self.codes.device)
        self.write(start, out_RK)
        return out_RK

    def chosen(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of these numbers, ``[..., K]``; see :meth:`write`."""
        out_RK = torch.empty(rows.numel(), self.shape[1], dtype=dtype, device=rows.device)
        self._write(rows.flatten(), out_RK)
        return out_RK.view(*rows.shape, -1)

    def _write(self, rows: Tensor, out_RK: Tensor) -> None:
        """Write the rows of these numbers, so few at a time that it takes little memory beside them."""
        step = max(1, _AT_ONCE // self.shape[1])
        for to, some in zip(torch.split(out_RK, step), torch.split(rows, step), strict=True):
            to.copy_(self._values(some))

    @abstractmethod
    def _values(self, rows: Tensor) -> Tensor:
        """Return rows in float32."""


@frozen(eq=False)
class IntMatrix(_Coded):
    """A matrix of whole numbers of 4 or 8 bits: an element is its code less its group's zero, times its group's scale.

    Attributes:
        codes: of 8 bits ``uint8 [N, K]``; of 4 bits ``int32 [N, W]``, eight of a row in a word, in :data:`ORDER`.
        scales: ``[N, G]``, in 16 or 32 bits.
        zeros: ``uint8 [N, G]``, or all of them as nibbles of ``int32 [W]``, row after row, lowest bits first; None if
            all are in the middle of the codes.
        plus: is added to each of them.
        group: columns that share a scale.
        bits: of a code.
        columns: which of the inputs each column is, ``[K]``; None if they are in order.
    """

    zeros: Tensor | None
    plus: int
    group: int
    bits: int
    columns: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.codes), self.codes.shape[1] * (_WORD if self.bits == _BITS else 1)

    def part(self, start: int, end: int) -> Self:
        """Return some rows, which are copied nowhere; those before them have whole words of zeros."""
        zeros = self.zeros
        if zeros is not None:
            per = 1 if zeros.dtype == torch.uint8 else self.scales.shape[1]
            by = 1 if zeros.dtype == torch.uint8 else _WORD
            zeros = zeros[start * per // by : -(-end * per // by)]
        return evolve(self, codes=self.codes[start:end], scales=self.scales[start:end], zeros=zeros)

    def ordered(self, x: Tensor) -> Tensor:
        """Return inputs, along the last dimension, in the order of the columns."""
        return x if self.columns is None else x.index_select(-1, self.columns)

    def _values(self, rows: Tensor) -> Tensor:
        codes = self.codes[rows]
        if self.bits == _BITS:
            codes = torch.stack([codes >> _BITS * ORDER.index(i) & 15 for i in range(_WORD)], dim=-1).flatten(-2)
        scales, zeros = self._by_column(self.scales[rows].float()), self._by_column(self._zeros(rows))
        return (codes - zeros) * scales

    def _by_column(self, values: Tensor) -> Tensor:
        """Return what groups have for each of their columns."""
        return values.repeat_interleave(self.group, dim=-1)[..., : self.shape[1]]

    def _zeros(self, rows: Tensor) -> Tensor:
        count = self.scales.shape[1]
        if self.zeros is None:
            return torch.full((*rows.shape, count), 1 << (self.bits - 1), device=rows.device)
        if self.zeros.dtype == torch.uint8:
            return self.zeros[rows].int() + self.plus
        at = rows[..., None] * count + torch.arange(count, device=rows.device)
        return (self.zeros[at // _WORD] >> (_BITS * (at % _WORD)).int() & 15) + self.plus


@frozen(eq=False)
class Float8Matrix(_Coded):
    """A matrix of floats of 8 bits: an element is its code times the scale of its block.

    Attributes:
        codes: ``[N, K]``, of torch's dtypes.
        scales: one for each block, rows of blocks after one another; in 16 or 32 bits.
        rows: of a block.
        columns: of a block.
    """

    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.codes), self.codes.shape[1]

    def part(self, start: int, end: int) -> Self:
        """Return some rows, which are copied nowhere; they are whole blocks."""
        return evolve(self, codes=self.codes[start:end], scales=self.scales[start // self.rows : -(-end // self.rows)])

    def _values(self, rows: Tensor) -> Tensor:
        codes = self.codes.view(torch.uint8)[rows].view(self.codes.dtype)  # which torch does not index
        scales = self.scales[rows // self.rows].float().repeat_interleave(self.columns, dim=-1)
        return codes.float() * scales[..., : self.shape[1]]


Quantised = IntMatrix | Float8Matrix
Matrix = Tensor | Quantised


def ordered(x: Tensor, matrix: Matrix) -> Tensor:
    """Return inputs, along the last dimension, in the order of a matrix's columns."""
    return x if isinstance(matrix, Tensor) else matrix.ordered(x)


@frozen(eq=False)
class Stacked:
    """The quantised matrices of a layer's experts, one below the other.

    Attributes:
        matrix: all of them.
        count: of experts.
        columns: which of the inputs each column of an expert's matrix is, ``[E, K]``; None if they are in order.
    """

    matrix: Quantised
    count: int
    columns: Tensor | None = None

    @classmethod
    def of(cls, matrices: Sequence[Quantised], join: Join) -> Self:
        """Put matrices one below the other, see :func:`below`; they are copied where they cannot be joined.

        Raises:
            ModelError: they are of different kinds.
        """
        ints = [each for each in matrices if isinstance(each, IntMatrix)]
        columns: list[Tensor] = []
        if any(each.columns is not None for each in ints):  # other ones for each
            order = torch.arange(ints[0].shape[1], dtype=torch.int32, device=ints[0].codes.device)
            columns = [order if each.columns is None else each.columns for each in ints]
            matrices = [evolve(each, columns=None) for each in ints]
        one = below(matrices, join) or below(matrices, lambda tensors: torch.cat(list(tensors)))
        if one is None:
            raise ModelError("experts of a layer are quantised in several ways", "convert all of them alike")
        return cls(one, len(matrices), torch.stack(columns) if columns else None)

    def __len__(self) -> int:
        return self.count

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, and rows and columns of each."""
        rows, columns = self.matrix.shape
        return self.count, rows // self.count, columns

    def __getitem__(self, expert: int) -> Quantised:
        rows = self.shape[1]
        found = self.matrix.part(expert * rows, (expert + 1) * rows)
        if self.columns is None or not isinstance(found, IntMatrix):
            return found
        return evolve(found, columns=self.columns[expert])

    def ordered(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return inputs ``[..., K]`` of experts, whose numbers are ``[...]``, in the order of their columns."""
        return x if self.columns is None else x.expand(*experts.shape, -1).gather(-1, self.columns[experts].long())

    def chosen(self, experts: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return some rows of the matrices of these experts, ``[..., end - start, K]``, columns as they are."""
        rows = experts[..., None] * self.shape[1] + torch.arange(start, end, device=experts.device)
        return self.matrix.chosen(rows, dtype)


def below(matrices: Sequence[Quantised], join: Join) -> Quantised | None:
    """Return matrices of the same kind one below the other, as one; None if they cannot be.

    Args:
        matrices: with the same columns.
        join: makes one tensor of several along the first dimension, or None if it cannot.
    """
    if all(isinstance(each, IntMatrix) for each in matrices):
        return _ints_below([each for each in matrices if isinstance(each, IntMatrix)], join)
    if all(isinstance(each, Float8Matrix) for each in matrices):
        return _floats_below([each for each in matrices if isinstance(each, Float8Matrix)], join)
    return None


def _ints_below(matrices: Sequence[IntMatrix], join: Join) -> IntMatrix | None:
    for a, b in pairwise(matrices):
        if (a.bits, a.group, a.plus, a.codes.shape[1]) != (b.bits, b.group, b.plus, b.codes.shape[1]):
            return None
        if (a.columns is None) != (b.columns is None) or (a.zeros is None) != (b.zeros is None):
            return None
        if a.columns is not None and b.columns is not None and not torch.equal(a.columns, b.columns):
            return None
    codes, given = join([each.codes for each in matrices]), [each.zeros for each in matrices if each.zeros is not None]
    if codes is None or len({each.dtype for each in given}) > 1:
        return None
    scales, zeros = _joined([each.scales for each in matrices], join), _joined(given, join) if given else None
    return evolve(matrices[0], codes=codes, scales=scales, zeros=zeros)


def _joined(tensors: Sequence[Tensor], join: Join) -> Tensor:
    """Join what is so small that it may be copied."""
    found = join(tensors)
    return torch.cat(list(tensors)) if found is None else found


def _floats_below(matrices: Sequence[Float8Matrix], join: Join) -> Float8Matrix | None:
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
    else:  # blocks do not follow each other, or kernels do not find them: a scale for each row
        scales = torch.cat([_by_row(each) for each in matrices])
        height = 1
    return evolve(matrices[0], codes=codes, scales=scales, rows=height)


def _by_row(matrix: Float8Matrix) -> Tensor:
    return matrix.scales.repeat_interleave(matrix.rows, dim=0)[: len(matrix)]
