"""Calls that several processes make together, each with the tensors of its devices."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import Factory, define, frozen
from hypothesis import strategies as st
from torch import Tensor

from tests.contexts import widest
from tests.exec.cluster.threads import used
from tests.exec.reference import ADDABLE, ADDING, DTYPES, FORMS, LEADS, OPERATIONS, same, values
from tpplan.core.axes import Axis, parse_layers, slices_of
from tpplan.errors import ExecutionError
from tpplan.exec import HOST
from tpplan.exec.programs.program import INPUT, RESIDUAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tpplan.core.plan import SplitPlan
    from tpplan.exec import TPContext

#: What is said where neither parts nor a residual nor ``out`` tell the number of rows.
UNKNOWN = "this process has none, so it cannot know how many rows there are\nhint: pass out=, whose shape and dtype"


@define(eq=False)
class Kept:
    """Tensors that are passed to a call, and what they should hold after it.

    Attributes:
        inputs: with what they hold.
        outs: the tensors that outputs are columns of, with what these hold around them.
    """

    inputs: list[tuple[Tensor, Tensor]] = Factory(list)
    outs: list[tuple[Tensor, Tensor]] = Factory(list)

    def out(self, lead: Sequence[int], columns: int, dtype: torch.dtype) -> Tensor:
        """Return a place for an output."""
        whole = values(lead, columns + 3, dtype, Random(columns))
        self.outs.append((whole, whole.clone()))
        return whole[..., 2:-1]

    def check(self) -> None:
        """Make sure that only outputs were written."""
        assert all(same(x, truth) for x, truth in self.inputs)
        for whole, before in self.outs:
            before[..., 2:-1] = whole[..., 2:-1]
            assert same(whole, before)


@frozen(eq=False, kw_only=True)
class Asked:
    """A call that all processes make, each with the tensors of its devices.

    Attributes:
        name: name of the operation.
        axis: its axis.
        layer: its layer.
        lead: all dimensions of tensors but the last.
        dtype: dtype of all tensors.
        dim: columns per element.
        form: form of the inputs, a name in ``FORMS``.
        seed: gives the values.
        source: the device that sends, or HOST.
        to: the axis whose devices get what is gathered.
        out: whether outputs are ``new``, ``given``, or for sums the ``input`` or the ``residual``.
        extra: whether there is a residual, or whether what is added is as wide as the axis.
        aside: whether it is called beside other work.
    """

    name: str
    axis: Axis
    layer: int | None
    lead: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.bfloat16
    dim: int = 1
    form: str = "dense"
    seed: int = 0
    source: int = HOST
    to: Axis | None = None
    out: str = "new"
    extra: bool = True
    aside: bool = False

    def spans(self, plan: SplitPlan) -> dict[int, tuple[int, int]]:
        """Return the columns of each device that holds a part of the axis."""
        return {s.device: (s.start * self.dim, s.end * self.dim) for s in slices_of(plan.bounds(self.axis, self.layer))}

    def widths(self, plan: SplitPlan) -> tuple[dict[str, dict[int, int]], dict[int, int]]:
        """Return the columns of each input, by role and device, and of each output."""
        spans, everywhere = self.spans(plan), used(plan)
        widths, size = {d: b - a for d, (a, b) in spans.items()}, max(b for _, b in spans.values())
        if self.name in {"broadcast", "scatter"}:
            return {INPUT: {self.source: size}}, widths if self.name == "scatter" else dict.fromkeys(widths, size)
        if self.name == "gather":
            return {INPUT: widths}, {HOST: size}
        if self.name == "allgather":
            to = [s.device for s in slices_of(plan.bounds(self.to, self.layer))] if self.to else everywhere
            return {INPUT: widths}, dict.fromkeys(to, size)
        if self.name == "add_residual":
            return {INPUT: dict.fromkeys(widths, size) if self.extra else widths}, widths
        hidden = plan.split(Axis.RESIDUAL).size
        sums = dict.fromkeys(everywhere, hidden)
        return {INPUT: dict.fromkeys(widths, hidden), **({RESIDUAL: sums} if self.extra else {})}, sums

    def inputs(self, ctx: TPContext, kept: Kept) -> dict[str, dict[int, Tensor]]:
        """Return the inputs that a process passes, by role and device."""
        random, made = Random(self.seed), {}
        for role, widths in self.widths(ctx.plan)[0].items():
            made[role] = {d: values(self.lead, columns, self.dtype, random) for d, columns in widths.items()}
        if RESIDUAL in made:
            made[RESIDUAL] = dict.fromkeys(made[RESIDUAL], next(iter(made[RESIDUAL].values())))
        found: dict[str, dict[int, Tensor]] = {}
        for role, tensors in made.items():
            found[role] = {d: FORMS[self.form](x) for d, x in tensors.items() if d in ctx.devices or d == HOST}
            if self.out != role:
                kept.inputs += [(x, tensors[d]) for d, x in found[role].items()]
        return found

    def __call__(self, ctx: TPContext) -> dict[int, Tensor]:
        """Make the call, and return what each device of a process gets."""
        kept = Kept()
        inputs, widths = self.inputs(ctx, kept), self.widths(ctx.plan)[1]
        targets = [d for d in widths if d in ctx.devices or d == HOST]
        outs = None
        if self.name == "add_residual" or self.out != "new" or self.has_no_rows(ctx):
            own = inputs.get(self.out, {})
            outs = [own[d] if d in own else kept.out(self.lead, widths[d], self.dtype) for d in targets]
        if self.has_no_rows(ctx):
            with pytest.raises(ExecutionError, match=f"{self.name}: parts: {UNKNOWN}"):
                self.call(ctx, inputs, None)
        with ctx.aside() if self.aside else nullcontext():
            results = self.call(ctx, inputs, outs)
        kept.check()
        if outs is not None:
            assert all(result is out for result, out in zip(results, outs, strict=True))
        return dict(zip(targets, results, strict=True))

    def has_no_rows(self, ctx: TPContext) -> bool:
        """Return whether only ``out`` tells a process how many rows there are."""
        inputs, outputs = self.widths(ctx.plan)
        if self.name not in {"gather", "allgather", "all_reduce"} or RESIDUAL in inputs:
            return False
        return not {*inputs[INPUT]} & {*ctx.devices} and bool({*outputs} & {*ctx.devices, HOST})

    def call(
        self, ctx: TPContext, inputs: Mapping[str, Mapping[int, Tensor]], out: list[Tensor] | None
    ) -> Sequence[Tensor]:
        """Call the operation."""
        parts, axis, layer, dim = list(inputs[INPUT].values()), self.axis, self.layer, self.dim
        if self.name in {"broadcast", "scatter"}:
            columns = self.widths(ctx.plan)[0][INPUT][self.source]
            x = parts[0] if parts else torch.empty(*self.lead, columns, dtype=self.dtype, device="meta")
            if self.name == "broadcast":
                return ctx.broadcast(x, axis, layer=layer, source=self.source, out=out)
            return ctx.scatter(x, axis, dim=dim, layer=layer, source=self.source, out=out)
        if self.name == "gather":
            return [ctx.gather(parts, axis, dim=dim, layer=layer, out=out[0] if out else None).tensor]
        if self.name == "allgather":
            return ctx.allgather(parts, axis, self.to, dim=dim, layer=layer, out=out)
        if self.name == "all_reduce":
            residual = list(inputs[RESIDUAL].values()) if RESIDUAL in inputs else None
            return ctx.all_reduce(parts, residual, axis=axis, layer=layer, out=out)
        assert out is not None
        ctx.add_residual(out, parts, axis, dim=dim, layer=layer)
        return out


def cuts(plan: SplitPlan) -> list[tuple[Axis, int | None]]:
    """Return every axis of a plan with a layer for each way that it is cut."""
    return [(s.axis, min(parse_layers(s.layers)) if s.layers else None) for s in plan.splits]


@st.composite
def calls(draw: st.DrawFn, plan: SplitPlan) -> Asked:
    """Any call of a plan's context."""
    name = draw(st.sampled_from(OPERATIONS))
    axis, layer = draw(st.sampled_from(cuts(plan)))
    at = [a for a, other in cuts(plan) if other in {None, layer}]
    out = draw(st.sampled_from(("new", "given", *((INPUT, RESIDUAL) if name == "all_reduce" else ()))))
    return Asked(
        name=name,
        axis=axis,
        layer=layer,
        lead=draw(st.sampled_from(LEADS)),
        dtype=draw(st.sampled_from(ADDABLE if name in ADDING else DTYPES)),
        dim=draw(st.integers(1, widest(plan) // plan.split(axis, layer).size)),
        form="columns of a wider tensor" if out in {INPUT, RESIDUAL} else draw(st.sampled_from(tuple(FORMS))),
        seed=draw(st.integers(0, 999)),
        source=draw(st.sampled_from((*used(plan), HOST))),
        to=draw(st.sampled_from((None, *at))),
        out=out,
        extra=draw(st.booleans()),
        aside=draw(st.booleans()),
    )
