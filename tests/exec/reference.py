"""What operations do, said with plain torch: operands as callers may have them, and the results that are right."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from random import Random
from typing import TYPE_CHECKING

import torch
from attrs import Factory, define
from torch import Tensor

from tests.exec.caller import noise, total
from tpplan.core.axes import Axis
from tpplan.exec.context import TPContext

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: One or more of each size.
DTYPES = (
    torch.bfloat16,
    torch.int8,
    torch.float32,
    torch.complex64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.int64,
    torch.float16,
    torch.uint8,
    torch.float64,
    torch.uint16,
    torch.float8_e5m2,
    torch.int32,
)
ADDABLE = (torch.bfloat16, torch.float32, torch.float16)

#: All dimensions of a tensor but the last; 0 to 12 rows.
LEADS = ((1,), (3,), (), (2, 2), (12,), (0,), (2, 1, 3), (0, 4), (5,))


def _framed(x: Tensor) -> Tensor:
    frame = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
    frame[..., 2:-1] = x
    return frame[..., 2:-1]


def _spread(x: Tensor) -> Tensor:
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def _differentiable(x: Tensor) -> Tensor:
    return x.clone().requires_grad_(x.is_floating_point() or x.is_complex())


#: The same values, in other places of memory or under other rules of autograd.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": torch.clone,
    "columns of a wider tensor": _framed,
    "every second column": _spread,
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2] if x.dim() > 1 else x.clone(),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "conjugated": lambda x: x.conj().resolve_conj().conj(),
    "with gradient": _differentiable,
    "of inference mode": _inference,
}


def values(lead: Sequence[int], columns: int, dtype: torch.dtype, random: Random) -> Tensor:
    """Return random bytes; numbers, if the dtype is added up."""
    rows = prod(lead)
    found = noise(rows, columns, dtype, random) if rows else torch.empty(0, columns, dtype=dtype)
    return found.reshape(*lead, columns)


def columns(x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Return views of so many columns each."""
    return [x[..., end - width : end] for width, end in zip(widths, accumulate(widths), strict=True)]


def same(found: Tensor, truth: Tensor) -> bool:
    """Tell whether two tensors have the same shape, dtype and bits."""
    if found.shape != truth.shape or found.dtype != truth.dtype:
        return False
    dense = (x.detach().resolve_conj().clone(memory_format=torch.contiguous_format) for x in (found, truth))
    return torch.equal(*(x.view(-1).view(torch.uint8) for x in dense))


@define(eq=False)
class Exam:
    """One call of each operation of a context, held against plain torch.

    Attributes:
        ctx: whose operations.
        axis: they are on.
        layer: whose cut.
        random: gives the values.
        lead: all dimensions but the last.
        dtype: of all tensors.
        dim: columns per element.
        form: of the inputs, a name in ``FORMS``.
        given: whether ``out`` is given, whose rows are apart.
        inputs: so far, with what they should still hold in the end.
        outs: so far: the tensors that they are columns of, with what these should hold but for the columns.
    """

    ctx: TPContext
    axis: Axis
    layer: int | None
    random: Random
    lead: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.bfloat16
    dim: int = 1
    form: str = "dense"
    given: bool = False
    inputs: list[tuple[Tensor, Tensor]] = Factory(list)
    outs: list[tuple[Tensor, Tensor]] = Factory(list)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First column and one past the last of every device that holds a part of the axis."""
        return [(s.start * self.dim, s.end * self.dim) for s in self.ctx.split(self.axis, self.layer)]

    @property
    def columns(self) -> int:
        """Of the whole axis."""
        return self.spans[-1][1]

    def new(self, columns: int, truth: Tensor | None = None) -> Tensor:
        """Return an input, of random values if none are given."""
        if truth is None:
            truth = values(self.lead, columns, self.dtype, self.random)
        self.inputs.append((FORMS[self.form](truth), truth))
        return self.inputs[-1][0]

    def out(self, columns: int) -> Tensor:
        """Return a place for an output: columns of a wider tensor."""
        whole = values(self.lead, columns + 3, self.dtype, self.random)
        self.outs.append((whole, whole.clone()))
        return whole[..., 2:-1]

    def truths(self) -> list[Tensor]:
        """Return what the inputs held."""
        return [truth for _, truth in self.inputs]

    def parts(self) -> list[Tensor]:
        """Return a part of the axis for each device."""
        return [self.new(b - a) for a, b in self.spans]

    def wholes(self, count: int) -> tuple[Tensor, ...] | None:
        """Return places for so many outputs of all columns, if they are given."""
        return tuple(self.out(self.columns) for _ in range(count)) if self.given else None

    def broadcast(self) -> None:
        """Every device gets the whole."""
        targets = self.ctx.devices_of(self.axis, self.layer)
        x, outs = self.new(self.columns), self.wholes(len(targets))
        results = self.ctx.broadcast(x, self.axis, layer=self.layer, out=outs)
        self.check(results, self.truths() * len(targets), outs)

    def scatter(self) -> None:
        """Every device gets its slice."""
        x = self.new(self.columns)
        outs = tuple(self.out(b - a) for a, b in self.spans) if self.given else None
        results = self.ctx.scatter(x, self.axis, dim=self.dim, layer=self.layer, out=outs)
        self.check(results, [self.truths()[0][..., a:b] for a, b in self.spans], outs)

    def gather(self) -> None:
        """The host gets the parts side by side."""
        parts, outs = self.parts(), self.wholes(1)
        result = self.ctx.gather(parts, self.axis, dim=self.dim, layer=self.layer, out=outs[0] if outs else None)
        self.check((result.tensor,), [torch.cat(self.truths(), -1)], outs)

    def allgather(self) -> None:
        """Every device in use gets the parts side by side."""
        count = len(self.ctx.all_devices)
        parts, outs = self.parts(), self.wholes(count)
        results = self.ctx.allgather(parts, self.axis, dim=self.dim, layer=self.layer, out=outs)
        self.check(results, [torch.cat(self.truths(), -1)] * count, outs)

    def all_reduce(self, *, residual: bool = True) -> None:
        """Every device in use gets the sum of the parts and its residual."""
        count, columns = len(self.ctx.all_devices), max(s.size for s in self.ctx.plan.splits if s.axis == "residual")
        parts = [self.new(columns) for _ in self.spans]
        same_for_all = values(self.lead, columns, self.dtype, self.random)
        residuals = [self.new(columns, same_for_all) for _ in range(count)] if residual else None
        outs = tuple(self.out(columns) for _ in range(count)) if self.given else None
        results = self.ctx.all_reduce(parts, residuals, axis=self.axis, layer=self.layer, out=outs)
        self.check(results, [total(*self.truths()[: len(parts) + residual])] * count, outs)

    def add_residual(self, *, whole: bool = True) -> None:
        """Every device's part grows by its slice of its residual."""
        targets = [self.out(b - a) for a, b in self.spans]
        before = [x.clone() for x in targets]
        sources = [self.new(self.columns if whole else b - a) for a, b in self.spans]
        self.ctx.add_residual(targets, sources, self.axis, dim=self.dim, layer=self.layer)
        slices = [x[..., a:b] if whole else x for x, (a, b) in zip(self.truths(), self.spans, strict=True)]
        sums = [total(x, y) for x, y in zip(before, slices, strict=True)]
        self.check(tuple(targets), sums, tuple(targets))

    def check(self, results: tuple[Tensor, ...], truths: Sequence[Tensor], outs: tuple[Tensor, ...] | None) -> None:
        """Compare results with what they should be, inputs and the surroundings of outputs with what they were."""
        self.ctx.synchronize()
        assert isinstance(results, tuple)
        assert len(results) == len(truths)
        for i, (result, truth) in enumerate(zip(results, truths, strict=True)):
            assert same(result, truth), f"result {i}"
            assert not result.requires_grad
            if outs is not None:
                assert result is outs[i]
        for i, (x, truth) in enumerate(self.inputs):
            assert same(x, truth), f"input {i} was changed"
        for (whole, before), truth in zip(self.outs, truths, strict=bool(outs)):
            before[..., 2:-1] = truth
            assert same(whole, before), "something next to an output was changed"


OPERATIONS = ("broadcast", "scatter", "gather", "allgather", "all_reduce", "add_residual")
#: Those that add up, and so take few dtypes.
ADDING = ("all_reduce", "add_residual")
