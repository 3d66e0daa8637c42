"""Every operation of a plan's contexts in several processes, against the plan's context in one."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.contexts import MAX_ROWS, PLANS, REPLICATED, UNEVEN, context, little_room, plan_of, plans
from tests.exec.cluster.asked import Asked, calls, cuts
from tests.exec.cluster.threads import Together, shares, used
from tests.exec.reference import ADDABLE, ADDING, DTYPES, FORMS, LEADS, OPERATIONS, same
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache, Request, Split
from tpplan.exec import HOST
from tpplan.exec.programs.lower import CALLED
from tpplan.exec.programs.operation import all_reduce
from tpplan.exec.programs.program import INPUT, RESIDUAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.core.plan import SplitPlan

__all__ = ["little_room"]  # a fixture


def check(plan: SplitPlan, own: Sequence[Sequence[int]], asked: Sequence[Asked], seed: int = 0) -> None:
    """Make calls in one process and in several, and compare what they get."""
    with context(plan, "events") as ctx, Together(plan, own, seed=seed) as together:
        truths = [each(ctx) for each in asked]
        found = together.run(lambda ctx: [each(ctx) for each in asked])
    for devices, results in zip(own, found, strict=True):
        for each, result, truth in zip(asked, results, truths, strict=True):
            assert [*result] == [d for d in truth if d in devices or d == HOST]
            assert all(same(x, truth[d]) for d, x in result.items()), each


@settings(max_examples=100)
@given(st.data())
def test_any_calls_of_any_plan(data: st.DataObject) -> None:
    """Whoever owns which device, each process gets, to the bit, what its devices get in a single process."""
    plan = data.draw(st.one_of(st.sampled_from([*PLANS.values()]), plans()))
    own = data.draw(shares(used(plan)))
    asked = data.draw(st.lists(calls(plan), min_size=1, max_size=3))
    if any(each.name == "all_reduce" for each in asked):  # a narrower model leaves no room for a row of float32
        assume(plan.split(Axis.RESIDUAL).size >= 64 or plan in PLANS.values())
    check(plan, own, asked, data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("own", [((0,), (2,), (3,)), ((0, 3), (2,)), ((3,), (0, 2)), ((0, 2, 3),)], ids=str)
def test_every_operation_on_every_axis(own: Sequence[Sequence[int]]) -> None:
    """Results are those of one process for every number of rows, from every device, and to every axis."""
    leads, sources = cycle(LEADS), cycle((HOST, 0, 2, 3))
    for axis, layer in cuts(UNEVEN):
        for to, _ in (*cuts(UNEVEN), (None, None)):
            lead, source = next(leads), next(sources)
            asked = [
                Asked(name=name, axis=axis, layer=layer, lead=lead, source=source, out=out, to=to, extra=out == "new")
                for name in OPERATIONS
                for out in ("new", "given")
            ]
            check(UNEVEN, own, asked, source)


def test_sums_may_be_written_over_parts_and_residuals() -> None:
    """Where a message is still on its way, nothing is written to the tensor that it is read from."""
    for plan, layer in ((UNEVEN, None), (REPLICATED, 1)):
        for rows in (1, 5, MAX_ROWS):
            asked = [
                Asked(name="all_reduce", axis=axis, layer=layer, lead=(rows,), dtype=dtype, out=out)
                for axis in (Axis.RESIDUAL, Axis.INTERMEDIATE)
                for dtype in ADDABLE
                for out in (INPUT, RESIDUAL)
            ]
            for own in {((used(plan)[0],), used(plan)[1:]), tuple((d,) for d in used(plan))}:
                check(plan, own, asked, rows)


def test_parts_may_have_no_rows() -> None:
    """Where three rows go in four parts, nothing is sent for one of them."""
    bounds = tuple(range(0, 600, 100))
    plan = plan_of(
        Split(axis=Axis.RESIDUAL, size=640, unit=1, bounds=(*bounds, 640)),
        Split(axis=Axis.VOCAB, size=101, unit=2, bounds=(0, 16, 32, 48, 64, 80, 101)),
        request=Request("reduce", "balanced", Cache("fp16", 3), 1, 3, "idle"),
    )
    asked = Asked(name="all_reduce", axis=Axis.RESIDUAL, layer=None, dtype=torch.float32)
    with context(plan, "events") as ctx:
        operation = all_reduce(640, ctx.all_devices, ctx.all_devices, residual=True)
        assert ctx._engine.route(operation, 3, 4, CALLED).parts == 4
    for own in (((0, 1, 2), (3, 4, 5)), tuple((d,) for d in range(6))):
        check(plan, own, [asked])


@pytest.mark.parametrize("form", FORMS)
def test_single_elements_in_any_form(form: str) -> None:
    """A tensor of one element may have any strides, and so may a place for one."""
    for dtype in DTYPES:
        asked = [
            Asked(name=name, axis=Axis.KV_HEADS, layer=0, lead=(1,), dtype=dtype, form=form, source=2, out=out)
            for name in OPERATIONS
            for out in ("new", "given")
            if dtype in ADDABLE or name not in ADDING
        ]
        check(REPLICATED, ((1,), (0, 2)), asked)


def test_a_process_without_tensors_gets_none() -> None:
    """Whose devices neither have nor get anything takes part in a call without waiting for anyone."""
    with Together(UNEVEN, ((0, 3), (2,))) as together:
        _, ctx = together.contexts  # device 2 has no heads
        x = torch.empty(2, 5, device="meta")
        assert ctx.broadcast(x, Axis.KV_HEADS, source=3) == ()
        assert ctx.scatter(x, Axis.KV_HEADS, source=0) == ()
        assert (
            ctx.allgather([], Axis.KV_HEADS, Axis.Q_HEADS)
            == ctx.allgather((), Axis.KV_HEADS, Axis.Q_HEADS, out=())
            == ()
        )
        ctx.add_residual([], [], Axis.KV_HEADS)
        assert not ctx.devices_of(Axis.KV_HEADS)
        assert not ctx.split(Axis.KV_HEADS)
        assert together.mail.count == 0
