"""Every operation of a context, on every axis, against plain torch."""

from __future__ import annotations

from itertools import cycle
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.contexts import BACKENDS, MAX_ROWS, PLANS, REPLICATED, UNEVEN, context, little_room, plans, widest
from tests.examples import examples
from tests.exec.caller import total
from tests.exec.processes.asked import cuts
from tests.exec.reference import ADDABLE, ADDING, DTYPES, FORMS, LEADS, OPERATIONS, Exam, same, values
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec import HOST
from tpplan.exec.options import TRANSPORTS

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan

__all__ = ["little_room"]  # a fixture


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_operation_on_every_axis(plan: SplitPlan, seed: int | None, transport: str) -> None:
    """Results are right to the bit, and nothing else changes, for every number of rows; dtypes and forms take turns."""
    random, dtypes, addable, forms = Random(2), cycle(DTYPES), cycle(ADDABLE), cycle(FORMS)
    with context(plan, transport, seed) as ctx:
        for operation in OPERATIONS:
            for axis, layer in cuts(plan):
                for i, lead in enumerate(LEADS):
                    dtype = next(addable if operation in ADDING else dtypes)
                    dim = min((1, 3, 8)[i % 3], widest(plan) // plan.split(axis, layer).size)
                    exam = Exam(ctx, axis, layer, random, lead, dtype, dim, form=next(forms), given=i % 2 == 1)
                    getattr(exam, operation)()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_input_in_every_dtype(form: str, operation: str) -> None:
    """How a tensor lies in memory, and what autograd thinks of it, changes neither the result nor the tensor."""
    with context(UNEVEN, "events") as ctx:
        for dtype in ADDABLE if operation in ADDING else DTYPES:
            for lead in ((4,), (), (2, 3)):
                exam = Exam(ctx, Axis.INTERMEDIATE, None, Random(3), lead, dtype, form=form)
                getattr(exam, operation)()


@settings(max_examples=examples(60))
@given(st.data())
def test_any_operation_of_any_plan(data: st.DataObject) -> None:
    """Whatever the plan, an operation on any of its axes does what plain torch does, by every transport."""
    plan = data.draw(plans())
    operation = data.draw(st.sampled_from(OPERATIONS))
    axis, layer = data.draw(st.sampled_from(cuts(plan)))
    if operation == "all_reduce":  # a narrower model leaves room for less than a row of float32
        assume(plan.split(Axis.RESIDUAL).size >= 64)
    random = Random(data.draw(st.integers(0, 999)))
    with context(plan, data.draw(st.sampled_from(TRANSPORTS)), data.draw(st.sampled_from((None, 4, 5)))) as ctx:
        exam = Exam(
            ctx,
            axis,
            layer,
            random,
            lead=data.draw(st.sampled_from(LEADS)),
            dtype=data.draw(st.sampled_from(ADDABLE if operation in ADDING else DTYPES)),
            dim=data.draw(st.integers(1, widest(plan) // plan.split(axis, layer).size)),
            form=data.draw(st.sampled_from(tuple(FORMS))),
            given=data.draw(st.booleans()),
        )
        getattr(exam, operation)()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", BACKENDS.values(), ids=BACKENDS)
def test_sums_without_residual_or_of_slices(seed: int | None, transport: str) -> None:
    """all_reduce takes no residual, and add_residual takes sources that are slices already, too."""
    with context(UNEVEN, transport, seed) as ctx:
        for axis, layer in cuts(UNEVEN):
            for dtype in ADDABLE:
                for lead in ((1,), (12,)):
                    Exam(ctx, axis, layer, Random(1), lead, dtype).all_reduce(residual=False)
                    Exam(ctx, axis, layer, Random(1), lead, dtype, dim=2).add_residual(whole=False)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("role", ["parts", "residual"])
def test_all_reduce_in_place(role: str, seed: int | None, transport: str) -> None:
    """The sums may be written over the parts or over the residuals, and are the same as elsewhere."""
    random = Random(6)
    with context(UNEVEN, transport, seed) as ctx:
        for rows in (1, 3, MAX_ROWS):
            for dtype in ADDABLE:
                parts = [values((rows,), 40, dtype, random) for _ in ctx.all_devices]
                residual = values((rows,), 40, dtype, random)
                residuals = [residual.clone() for _ in parts]
                truth = total(*parts, residual)
                given = parts if role == "parts" else residuals
                results = ctx.all_reduce(parts, residuals, out=given)
                ctx.synchronize()
                assert all(result is x and same(x, truth) for result, x in zip(results, given, strict=True))


def test_all_reduce_adds_in_device_order_in_float32() -> None:
    """The sum is rounded once, at the end: neither pairwise adding nor another order gives these bits."""
    parts = [torch.tensor([[x] * 40], dtype=torch.bfloat16) for x in (2.0**30, 1.0, -(2.0**30))]
    residual = torch.full((1, 40), 2.0**-9, dtype=torch.bfloat16)
    for transport in TRANSPORTS:
        with context(UNEVEN, transport) as ctx:
            first, *others = ctx.all_reduce(parts, [residual] * 3)
            assert (first == 2.0**-9).all()  # the 1 is lost in 2^30, the residual, added last, is not
            assert all(same(first, other) for other in others)
            small = [torch.full((1, 40), x, dtype=torch.bfloat16) for x in (1.0, 2.0**-8, 2.0**-8)]
            assert (ctx.all_reduce(small)[0] == 1 + 2.0**-7).all()  # rounding twice gives 1


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", BACKENDS.values(), ids=BACKENDS)
def test_from_any_device_and_from_the_host(seed: int | None, transport: str) -> None:
    """``source`` says where a tensor is; one on the host may be overwritten at once."""
    random = Random(8)
    with context(UNEVEN, transport, seed) as ctx:
        for source in (*ctx.all_devices, HOST):
            for rows in (1, MAX_ROWS):
                x = values((rows,), 40, torch.bfloat16, random)
                truth = x.clone()
                everywhere = ctx.broadcast(x, source=source)
                slices = ctx.scatter(x, Axis.RESIDUAL, source=source)
                if source == HOST:
                    x.zero_()
                ctx.synchronize()
                assert all(same(y, truth) for y in everywhere)
                assert same(torch.cat(slices, -1), truth)


def test_what_torch_has_yet_to_negate() -> None:
    """A contiguous tensor whose bytes are not its values is moved by value, and not written to."""
    with context(UNEVEN, "events") as ctx:
        x = torch.tensor([[1 + 2j]]).conj()
        for part in (x, x.imag):
            assert part.is_contiguous()
            assert all(same(y, part.resolve_conj().resolve_neg()) for y in ctx.broadcast(part))
            with pytest.raises(ExecutionError, match=r"out\[1\] has shape \[1, 1\] .* which cannot be written"):
                ctx.broadcast(part.clone(), out=[torch.empty_like(part).resolve_conj().resolve_neg(), part, part])


def test_the_same_call_again_is_checked_again() -> None:
    """What went well once is refused when a tensor is not what it was."""
    with context(UNEVEN, "events") as ctx:
        x, outs = torch.randn(2, 40), [torch.empty(2, 40) for _ in range(3)]
        for _ in range(2):
            assert all(y is out and same(y, x) for y, out in zip(ctx.broadcast(x, out=outs), outs, strict=True))
        outs[1].untyped_storage().resize_(0)
        with pytest.raises(ExecutionError, match=r"broadcast: out\[1\] of device 2 takes bytes 0 to 320"):
            ctx.broadcast(x, out=outs)
        outs[1] = outs[0]
        with pytest.raises(ExecutionError, match=r"broadcast: out\[0\] shares memory with out\[1\]"):
            ctx.broadcast(x, out=outs)
        outs[1] = torch.empty(2, 40, requires_grad=True)
        with pytest.raises(ExecutionError, match=r"broadcast: out\[1\] requires grad"):
            ctx.broadcast(x, out=outs)


def test_expanded_inputs() -> None:
    """One row in memory may stand for many, and one column for many."""
    with context(UNEVEN, "peer") as ctx:
        row, column = torch.randn(1, 40).expand(6, 40), torch.randn(6, 1).expand(6, 40)
        for x in (row, column, torch.randn(1, 1, 40).expand(2, 3, 40), torch.tensor(1.5).expand(40)):
            assert all(same(y, x) for y in ctx.broadcast(x))
            assert same(ctx.gather(ctx.scatter(x, Axis.RESIDUAL), Axis.RESIDUAL).tensor, x)
            assert same(ctx.all_reduce([x, x, x])[2], total(x, x, x))


def test_layers_have_their_own_cuts() -> None:
    """Where layers are cut in two ways, ``layer`` chooses, also between the devices that take part."""
    with context(REPLICATED, "events") as ctx:
        x = torch.randn(2, 48 * 2)
        assert [part.shape[-1] for part in ctx.scatter(x, Axis.INTERMEDIATE, dim=2, layer=2)] == [32, 32, 32]
        y = torch.randn(2, 40)
        assert [part.shape[-1] for part in ctx.scatter(y, Axis.INTERMEDIATE, layer=1)] == [24, 16]
        assert ctx.devices_of(Axis.INTERMEDIATE, 1) == (0, 2)
        assert ctx.devices_of("kv_heads", 3) == (0, 2)
        assert ctx.devices_of(None) == ctx.all_devices == (0, 1, 2)
        assert (
            ctx.allgather(ctx.scatter(y, Axis.INTERMEDIATE, layer=3), Axis.INTERMEDIATE, Axis.INTERMEDIATE, layer=3)[
                1
            ].tolist()
            == y.tolist()
        )


def test_an_idle_device_takes_no_part() -> None:
    """A device without any slice has no memory, no tensors and no place in the order of devices."""
    with context(UNEVEN, "events") as ctx:
        assert ctx.all_devices == (0, 2, 3)
        assert set(ctx.devices) == {0, 2, 3}
        assert ctx.devices_of(Axis.KV_HEADS) == (0, 3)
        assert len(ctx.broadcast(torch.ones(1, 5))) == 3
        assert [s.device for s in ctx.split(Axis.INTERMEDIATE)] == [0, 2, 3]


def test_axes_may_be_named() -> None:
    """An axis and its name in plan files are the same."""
    with context(UNEVEN, "events") as ctx:
        x = torch.randn(2, 70)
        by_name, by_axis = (ctx.scatter(x, axis) for axis in ("intermediate", Axis.INTERMEDIATE))
        assert all(same(a, b) for a, b in zip(by_name, by_axis, strict=True))


def test_scratch_makes_a_good_out() -> None:
    """Slices of scratch take results, split-sized and whole, and do not overlap what operations use."""
    with context(UNEVEN, "events") as ctx:
        ctx.begin_scratch()
        x = torch.randn(MAX_ROWS, 40).bfloat16()
        out = ctx.scratch(MAX_ROWS, Axis.RESIDUAL)
        whole = ctx.scratch(MAX_ROWS, Axis.RESIDUAL, full=True)
        ctx.scatter(x, Axis.RESIDUAL, out=out)
        ctx.allgather(out, Axis.RESIDUAL, out=whole)
        ctx.all_reduce([torch.randn_like(x)] * 3)
        assert all(same(y, x) for y in whole)
        assert [y.shape[-1] for y in out] == [11, 18, 11]
        assert [y.data_ptr() % 64 for y in (*out, *whole)] == [0] * 6
