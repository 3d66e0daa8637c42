"""What a context refuses: axes, layers and sizes of elements that the plan does not have."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from tests.contexts import REPLICATED, context, little_room
from tests.exec.operand_cases import RS, Call, assert_refused, untyped
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError, RequestError, TpplanError

__all__ = ["little_room"]  # a fixture


#: For each mistake: a call, the error, and what it says.
MISTAKES: dict[str, tuple[Call, type[TpplanError], str]] = {
    "dim of 0": (
        lambda c, t: c.scatter(t(2, 40), RS, dim=0),
        ExecutionError,
        "scatter: dim is 0, expected a whole number from 1",
    ),
    "dim beyond any tensor": (
        lambda c, t: c.scatter(t(2, 40), RS, dim=2**62),
        ExecutionError,
        "scatter: dim is 4611686018427387904, which makes more columns than a tensor can have",
    ),
    "dim beyond any number": (
        lambda c, t: c.gather(t.parts(), RS, dim=10**100),
        ExecutionError,
        "gather: dim is 1000000000000000000000000000000000000000, which makes more columns",
    ),
    "dim of a half": (
        lambda c, t: c.gather(t.parts(), RS, dim=untyped(0.5)),
        ExecutionError,
        "gather: dim is 0.5, expected",
    ),
    "dim of 1.0": (
        lambda c, t: c.allgather(t.parts(), RS, dim=untyped(1.0)),
        ExecutionError,
        "allgather: dim is 1.0, expected a whole number from 1",
    ),
    "dim of True": (lambda c, _: c.scratch(1, RS, dim=True), ExecutionError, "scratch: dim is True, expected a whole"),
    "an unknown axis": (
        lambda c, t: c.scatter(t(2, 40), "heads"),
        RequestError,
        "the plan for Tiny has no axis heads",
    ),
    "an axis of other models": (
        lambda c, t: c.broadcast(t(2, 40), Axis.EXPERT_INTERMEDIATE),
        RequestError,
        "the plan for Tiny has no axis expert_intermediate",
    ),
    "no axis": (lambda c, t: c.scatter(t(2, 40), untyped(None)), RequestError, "the plan for Tiny has no axis None"),
    "two axes": (lambda c, t: c.broadcast(t(2, 40), untyped([RS])), RequestError, "the plan for Tiny has no axis"),
    "a layer that is not there": (
        lambda c, t: c.scatter(t(2, 70), Axis.INTERMEDIATE, layer=4),
        RequestError,
        "the plan for Tiny has no layer 4",
    ),
    "a layer that is not there, of an axis outside of layers": (
        lambda c, t: c.broadcast(t(2, 40), RS, layer=99),
        RequestError,
        "the plan for Tiny has no layer 99",
    ),
    "a layer that is not there, of no axis": (
        lambda c, t: c.broadcast(t(2, 40), layer=4),
        RequestError,
        "the plan for Tiny has no layer 4",
    ),
    "a layer before the first": (
        lambda c, t: c.all_reduce(t.wholes(count=2), axis=Axis.KV_HEADS, layer=-1),
        RequestError,
        "has no layer -1",
    ),
    "a layer of 1.0": (
        lambda c, t: (c.split(RS, 1), c.gather(t.parts(), RS, layer=untyped(1.0))),
        RequestError,
        "has no layer 1.0",
    ),
    "a layer of True": (
        lambda c, t: (c.split(RS, 1), c.allgather(t.parts(), RS, layer=True)),
        RequestError,
        "has no layer True",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_before_anything_moves(call: Call, kind: type[TpplanError], message: str) -> None:
    """The error says what and how much, with a hint; operands are as before, and the context goes on."""
    assert_refused(call, kind, message)


def test_an_axis_that_layers_cut_differently_needs_a_layer() -> None:
    """Which cut is meant is never guessed."""
    with context(REPLICATED, "events") as ctx:
        for call in (ctx.split, ctx.devices_of, lambda axis: ctx.scatter(torch.ones(1, 48), axis)):
            with pytest.raises(RequestError, match="axis intermediate is split in 2 ways: layers 0,2 and layers 1,3"):
                call(Axis.INTERMEDIATE)


def test_an_axis_that_some_layers_lack() -> None:
    """Who asks for it in another layer, as for experts in a dense one, is told which layers have it."""
    plan = evolve(
        REPLICATED, splits=tuple(s for s in REPLICATED.splits if (s.axis, s.layers) != (Axis.INTERMEDIATE, "1,3"))
    )
    assert plan.bounds(Axis.INTERMEDIATE, layer=2) == (0, 16, 32, 48)
    with pytest.raises(RequestError, match="has no axis intermediate in layer 3\nhint: layers 0,2 have it"):
        plan.bounds(Axis.INTERMEDIATE, layer=3)
