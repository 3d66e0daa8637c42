"""Quantised matrices of codes and scales, in the layout that the decoder computes with.

Shapes: N rows of a matrix (outputs), K columns (inputs), G groups of columns that share a scale, W 32-bit words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import ClassVar, Final, Self

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import functional

#: Order of eight columns in the nibbles of a word, lowest bits first: neighbours 2i and 2i + 1 are 16 bits apart.
ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)

#: Bits of a nibble, and nibbles of a word.
_BITS, _WORD = 4, 8
#: Bits of the mantissa of float32.
_MANTISSA: Final = 23
#: Elements that torch dequantises at a time, at least; and the temporary memory for more, in bytes for each element of
#: the piece that is made: where a plan has room for a larger piece, see ``ProductOptions``, it has room for that.
_AT_ONCE: Final = 2**19
_BESIDE: Final = 3
#: Numbers of 4-bit floats (e2m1), which have a sign bit on top.
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@frozen(eq=False)
class _Coded(ABC):
    """A quantised matrix of codes and shared scales.

    Attributes:
        codes: codes, one row of the matrix after the other.
        scales: what codes are multiplied by, see each kind.
    """

    codes: Tensor
    scales: Tensor

    #: Bytes of temporary memory that an element takes while torch dequantises it, at most.
    _temporary: ClassVar[int] = 17

    def __len__(self) -> int:
        return len(self.codes)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    def ordered(self, x: Tensor) -> Tensor:
        """Return inputs reordered along the last dimension to match the columns."""
        return x

    def in_order(self, rows_RK: Tensor) -> Tensor:
        """Return dequantised rows with their columns in the order of the inputs."""
        return rows_RK

    def write(self, start: int, out_RK: Tensor) -> None:
        """Dequantise rows from row ``start`` on into ``out_RK``: computed in float32, rounded once."""
        self._write(torch.arange(start, start + len(out_RK), device=self.codes.device), out_RK)

    def dense(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return dequantised rows ``start`` to ``end``, ``[end - start, K]``; see :meth:`write`."""
        out_RK = torch.empty(end - start, self.shape[1], dtype=dtype, device=self.codes.device)
        self.write(start, out_RK)
        return out_RK

    def chosen(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dequantised rows, given by number, ``[..., K]``; see :meth:`write`."""
        out_RK = torch.empty(rows.numel(), self.shape[1], dtype=dtype, device=rows.device)
        self._write(rows.flatten(), out_RK)
        return out_RK.view(*rows.shape, -1)

    def _write(self, rows: Tensor, out_RK: Tensor) -> None:
        """Dequantise rows, given by number, into ``out_RK``; few at a time, to take little temporary memory."""
        step = max(1, max(_AT_ONCE, _BESIDE * out_RK.numel() // self._temporary) // self.shape[1])
        for start in range(0, len(rows), step):
            out_RK[start : start + step] = self._values(rows[start : start + step])

    @abstractmethod
    def _values(self, rows: Tensor) -> Tensor:
        """Return dequantised rows, given by number, in float32."""


@frozen(eq=False)
class IntMatrix(_Coded):
    """A matrix of 4-bit or 8-bit integers: an element is (code - zero of its group) × scale of its group.

    Attributes:
        codes: 8-bit codes ``uint8 [N, K]``, or 4-bit codes ``int32 [N, W]`` with eight of a row in a word, in
            :data:`ORDER`.
        scales: ``[N, G]``, in 16 or 32 bits.
        zeros: zero points ``uint8 [N, G]``, or packed as nibbles of ``int32 [W]``, row after row, lowest bits first;
            None if all are the middle of the code range.
        plus: number added to each stored zero point.
        group: columns that share a scale.
        bits: bits of a code.
        columns: index of the input of each column, ``[K]``; None if they are in order.
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
        """Return rows ``start`` to ``end`` without a copy; the zero points of the rows before must fill whole words."""
        zeros = self.zeros
        if zeros is not None:
            per = 1 if zeros.dtype == torch.uint8 else self.scales.shape[1]
            by = 1 if zeros.dtype == torch.uint8 else _WORD
            zeros = zeros[start * per // by : -(-end * per // by)]
        return evolve(self, codes=self.codes[start:end], scales=self.scales[start:end], zeros=zeros)

    def ordered(self, x: Tensor) -> Tensor:
        """Return inputs reordered along the last dimension to match the columns."""
        return x if self.columns is None else x.index_select(-1, self.columns)

    def in_order(self, rows_RK: Tensor) -> Tensor:
        """Return dequantised rows with their columns in the order of the inputs."""
        return (
            rows_RK if self.columns is None else torch.empty_like(rows_RK).index_copy_(1, self.columns.long(), rows_RK)
        )

    def _values(self, rows: Tensor) -> Tensor:
        codes = self.codes[rows]
        if self.bits == _BITS:
            places = torch.arange(0, _BITS * _WORD, _BITS, dtype=torch.int32, device=rows.device)
            places = places.view(2, -1).mT.flatten()  # as in ORDER
            codes = (codes[..., None] >> places & 15).flatten(-2)
        return _scaled(codes, self.group, self.scales[rows], self._zeros(rows))

    def _zeros(self, rows: Tensor) -> Tensor:
        """Return the zero points of rows, given by number, ``[R, G]``, or ``[1, 1]`` if all are the same."""
        if self.zeros is None:
            return torch.full((1, 1), 1 << (self.bits - 1), device=rows.device)
        if self.zeros.dtype == torch.uint8:
            return self.zeros[rows].int() + self.plus
        count = self.scales.shape[1]
        at = rows[..., None] * count + torch.arange(count, device=rows.device)
        return (self.zeros[at // _WORD] >> (_BITS * (at % _WORD)).int() & 15) + self.plus


@frozen(eq=False)
class Float8Matrix(_Coded):
    """A matrix of 8-bit floats: an element is its code times the scale of its block.

    Attributes:
        codes: ``[N, K]``, in one of torch's float8 dtypes.
        scales: one for each block, one row of blocks after the other; in 16 or 32 bits, or exponents plus 127 in uint8.
        rows: rows of a block.
        columns: columns of a block.
    """

    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.codes), self.codes.shape[1]

    def part(self, start: int, end: int) -> Self:
        """Return rows ``start`` to ``end`` without a copy; they must be whole blocks."""
        return evolve(self, codes=self.codes[start:end], scales=self.scales[start // self.rows : -(-end // self.rows)])

    def _values(self, rows: Tensor) -> Tensor:
        codes = self.codes.view(torch.uint8)[rows].view(self.codes.dtype)  # torch cannot index float8
        scales = self.scales[rows // self.rows]
        return _scaled(codes, self.columns, _powers(scales) if scales.dtype == torch.uint8 else scales)


@frozen(eq=False)
class Float4Matrix(_Coded):
    """A matrix of 4-bit floats: an element is its e2m1 code times the scale of its group, times a factor.

    Attributes:
        codes: ``uint8 [N, K / 2]``, two columns in a byte, the first in its low bits; rows may be apart.
        scales: of MXFP4 (Open Compute Project) exponents plus 127, ``uint8 [N, G]``, where 0 stands for 0; of NVFP4
            ``float8_e4m3fn [N, G]``. Rows may be apart.
        group: columns that share a scale.
        factors: what all scales are multiplied by, ``[1]``, or those of each so many rows; None for 1.
        rows: rows that share a factor, if there are several.
    """

    _temporary = 7

    group: int = 32
    factors: Tensor | None = None
    rows: int = 1

    def __attrs_post_init__(self) -> None:
        """Make the table before anything is captured."""
        _e2m1_pairs(self.codes.device)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.codes), 2 * self.codes.shape[1]

    def part(self, start: int, end: int) -> Self:
        """Return rows ``start`` to ``end`` without a copy; they must be all that share their factors."""
        factors = self.factors
        if factors is not None and len(factors) > 1:
            factors = factors[start // self.rows : -(-end // self.rows)]
        return evolve(self, codes=self.codes[start:end], scales=self.scales[start:end], factors=factors)

    def _values(self, rows: Tensor) -> Tensor:
        values = _e2m1_pairs(rows.device)[self.codes[rows].int()].flatten(-2)
        scales = self.scales.view(torch.uint8)[rows]  # torch cannot index float8
        scales = _powers(scales) if self.scales.dtype == torch.uint8 else scales.view(self.scales.dtype).float()
        if self.factors is not None:
            scales *= (self.factors if len(self.factors) == 1 else self.factors[rows // self.rows])[:, None]
        return _scaled(values, self.group, scales)


@frozen(eq=False)
class NestedScales:
    """Scales that are codes of 8 bits themselves (double quantisation of QLoRA, arXiv:2305.14314).

    A scale is its number in the table times the scale of its block, plus an offset. Rows belong to runs: each is a
    range of rows whose blocks follow one another.

    Attributes:
        table: numbers of the codes, ``[256]``.
        scales: of all blocks, float32.
        size: codes of a block.
        starts: first row of each run, ``[S]``, ascending.
        firsts: number of each run's first code, ``[S]``, where the first code of the first block is number 0.
        offsets: of the scales of each run, ``[S]``, float32.
        before: rows that are left out in front of the first one.
    """

    table: Tensor
    scales: Tensor
    size: int
    starts: Tensor
    firsts: Tensor
    offsets: Tensor
    before: int = 0

    def of(self, rows: Tensor, codes_RG: Tensor) -> Tensor:
        """Return the scales of rows, given their numbers and codes, in float32."""
        rows, count = rows + self.before, codes_RG.shape[1]
        run = torch.searchsorted(self.starts, rows, right=True) - 1
        numbers = self.firsts[run] + (rows - self.starts[run]) * count
        blocks = (numbers[:, None] + torch.arange(count, device=rows.device)) // self.size
        return self.table[codes_RG.int()] * self.scales[blocks] + self.offsets[run, None]


@frozen(eq=False)
class TableMatrix(_Coded):
    """A matrix of 4-bit codes of bitsandbytes (NF4, FP4): an element is its number in a table times its block's scale.

    Attributes:
        codes: ``uint8 [N, K / 2]``, two columns in a byte, the first in its high bits.
        scales: ``[N, G]`` in float32, or codes of ``nested``.
        table: numbers of the codes, ``[16]``.
        group: columns that share a scale.
        nested: what codes of scales stand for; None if scales are stored as they are.
    """

    _temporary = 8

    table: Tensor
    group: int
    nested: NestedScales | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.codes), 2 * self.codes.shape[1]

    def part(self, start: int, end: int) -> Self:
        """Return rows ``start`` to ``end`` without a copy."""
        nested = self.nested and evolve(self.nested, before=self.nested.before + start)
        return evolve(self, codes=self.codes[start:end], scales=self.scales[start:end], nested=nested)

    def _values(self, rows: Tensor) -> Tensor:
        scales, high = self.scales[rows], self.table[:, None].expand(-1, len(self.table))
        pairs = torch.stack((high, high.mT), dim=-1).view(-1, 2)  # of the bytes of codes
        values = pairs[self.codes[rows].int()].flatten(-2)
        return _scaled(values, self.group, self.nested.of(rows, scales) if self.nested else scales)


@frozen(eq=False)
class Exl2Matrix(_Coded):
    """A matrix in EXL2, as it is stored: outputs side by side, and groups of sorted inputs, each with bits of its own.

    An element is its code, less half the range of its bits, times the scale of its group and output. That is the
    square of a nibble plus 1, over 256, times the largest scale of the group.

    Attributes:
        codes: ``int32 [W, N]``; down a column, the codes of a group are a run of bits, lowest first.
        scales: nibbles, ``int32 [G, N / 8]``, lowest bits first.
        largest: the largest scale of each group, ``[G]``.
        groups: number of each column's group, ``int32 [K]``.
        places: number of the first byte of each column's codes, in a row of ``codes.T``, ``int32 [K]``.
        shifts: how far left, then right, a column's code of 16 bits from there is to be shifted, ``int8 [2, K]``.
        columns: index of the input of each column, ``[K]``.
    """

    _temporary = 7

    largest: Tensor
    groups: Tensor
    places: Tensor
    shifts: Tensor
    columns: Tensor

    def __len__(self) -> int:
        return self.codes.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self), len(self.columns)

    def part(self, start: int, end: int) -> Self:
        """Return rows ``start`` to ``end`` without a copy; the rows before must fill whole words of scales."""
        scales = self.scales[:, start // _WORD : -(-end // _WORD)]
        return evolve(self, codes=self.codes[:, start:end], scales=scales)

    def ordered(self, x: Tensor) -> Tensor:
        """Return inputs reordered along the last dimension to match the columns."""
        return x.index_select(-1, self.columns)

    def in_order(self, rows_RK: Tensor) -> Tensor:
        """Return dequantised rows with their columns in the order of the inputs."""
        return torch.empty_like(rows_RK).index_copy_(1, self.columns.long(), rows_RK)

    def _values(self, rows: Tensor) -> Tensor:
        words_RW = functional.pad(self.codes.index_select(1, rows).mT, (0, 1))  # the last code has no byte behind it
        bytes_RB = words_RW.contiguous().view(torch.uint8)
        values_RK = bytes_RB[:, 1:].index_select(1, self.places).short() << 2 * _BITS
        values_RK |= bytes_RB.index_select(1, self.places)  # some codes are in two bytes, even of two words
        left_K, right_K = self.shifts
        values_RK <<= left_K
        values_RK ^= -(2**15)  # with its highest bit turned, a code is less half the range
        values_RK >>= right_K
        nibbles_GR = self.scales[:, rows // _WORD] >> (rows % _WORD * _BITS).int() & 15
        scales_GR = (nibbles_GR + 1).square() * (self.largest.float() / 256)[:, None]
        return scales_GR.mT.index_select(1, self.groups).mul_(values_RK)


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """Return the numbers of both codes of each byte, ``[256, 2]``, low bits first; made once for each device."""
    codes = torch.tensor([*_E2M1, *(-number for number in _E2M1)], device=device)
    low = codes.expand(len(codes), -1)
    return torch.stack((low, low.mT), dim=-1).view(-1, 2)


def _powers(exponents: Tensor) -> Tensor:
    """Return powers of two, given exponents plus 127, in float32; 0 stands for 0."""
    return (exponents.int() << _MANTISSA).view(torch.float32)


def _scaled(codes_RK: Tensor, columns: int, scales_RG: Tensor, zeros_RG: Tensor | None = None) -> Tensor:
    """Return codes, less the zero points and times the scales of their groups of so many columns, in float32."""
    size, group = codes_RK.shape[1], min(columns, codes_RK.shape[1])
    values_RK = codes_RK.float()
    if size % group:
        values_RK = functional.pad(values_RK, (0, -size % group))
    values_RGK = torch.unflatten(values_RK, 1, (-1, group))
    if zeros_RG is not None:
        values_RGK -= zeros_RG[..., None]
    values_RGK *= scales_RG[..., None]
    return values_RGK.flatten(1)[:, :size]


Quantised = IntMatrix | Float8Matrix | Float4Matrix | TableMatrix | Exl2Matrix
Matrix = Tensor | Quantised


def ordered(x: Tensor, matrix: Matrix) -> Tensor:
    """Return inputs reordered along the last dimension to match the columns of a matrix."""
    return x if isinstance(matrix, Tensor) else matrix.ordered(x)
