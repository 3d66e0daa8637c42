"""Counting a plan again: whatever its cuts, a right ledger passes, and no value that decides anything may be wrong."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.edited_plans import EDITS
from tests.planning_cases import spec, tiny_model
from tests.strategies import bounds
from tpplan.core.axes import Axis
from tpplan.core.device import Device
from tpplan.core.model import ModelSpec, NotPlanned
from tpplan.core.plan import KV_MODES, LAYOUTS, Cache, Request, Reserve, SplitPlan
from tpplan.errors import PlanError, RequestError
from tpplan.planfile.verify import problems
from tpplan.planner.attempt import Attempt
from tpplan.planner.ledger import demands, ledger
from tpplan.planner.plan import plan
from tpplan.planner.recount import check_ledger, differences
from tpplan.reports.check import check


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[ModelSpec, SplitPlan]:
    """A model of a random family, and a plan that cuts it at random for one to four devices."""
    model = tiny_model(random.Random(draw(st.integers(0, 999))))
    layout, kv = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(KV_MODES))
    count, batch = draw(st.integers(1, 4)), draw(st.sampled_from((1, 5)))
    reserve = draw(st.sampled_from(((), (Reserve(2**20, 0),), (Reserve(2**20),))))
    request = Request(layout, "balanced", Cache("q4", 999), batch, 64, kv, reserve=reserve)
    wanted = demands(model, request, count)
    cuts = tuple(draw(bounds(d.axis, d.size, d.unit, count)) for d in wanted.axes)
    devices = (Device(name="x", budget_bytes=2**40),) * count
    return model, Attempt(model, devices, request, wanted, cuts, ledger(cuts, wanted, devices, request)).plan()


@settings(max_examples=100)
@given(cut_models())
def test_any_cuts_with_their_ledger_are_right(case: tuple[ModelSpec, SplitPlan]) -> None:
    """Of any family, layout and cut: what the ledger counts for the cuts is what is counted again."""
    model, made = case
    assert differences(made, model) == []
    renamed = attrs.evolve(model, name="other", not_planned=(NotPlanned("vision tower", 5),), assumed="16 bits")
    assert differences(made, renamed) == []


def _edits(value: Any) -> list[Any]:
    """Return other values for a leaf of a plan."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return []
    if isinstance(value, int):
        return [value + 1, value * 2, max(0, value - 1), 0]
    return ["float16", "bfloat16", "gather", "reduce", "q8", "fp16", "replicate", "sha256:" + "0" * 64, "0", "0-1"]


#: Fields that decide no bytes; bounds are compared by the ledger, and no edit of one alone keeps the rules.
_FREE = {"name", "strategy", "context", "beyond", "full_window", "kv", "not_planned", "assumed", "axis", "bounds"}


@settings(max_examples=150)
@given(st.data(), cut_models())
def test_no_single_value_may_be_wrong(data: st.DataObject, case: tuple[ModelSpec, SplitPlan]) -> None:
    """An edit that breaks no rule is found, whichever value of the model, the request, the splits or memory it is."""
    model, made = case
    kind = data.draw(st.sampled_from(("model", "request", "cache", "splits", "memory")))
    part: Any = made.request.cache if kind == "cache" else getattr(made, kind)
    index = data.draw(st.integers(0, len(part) - 1)) if isinstance(part, tuple) else None
    owner = part if index is None else part[index]
    name = data.draw(st.sampled_from([f.name for f in attrs.fields(type(owner)) if f.name not in _FREE]))
    choices = _edits(getattr(owner, name))
    if not choices:
        return
    edited = attrs.evolve(owner, **{name: data.draw(st.sampled_from(choices))})
    if kind == "memory":  # the budget has to add up
        more = edited.used_bytes + edited.reserved_bytes - owner.used_bytes - owner.reserved_bytes
        edited = attrs.evolve(edited, free_bytes=max(0, owner.free_bytes - more))
    whole: Any = edited if index is None else (*part[:index], edited, *part[index + 1 :])
    changed = attrs.evolve(
        made, **({"request": attrs.evolve(made.request, cache=whole)} if kind == "cache" else {kind: whole})
    )
    if edited == owner or problems(changed):
        return
    wanted = demands(model, changed.request, len(made.devices))
    cuts = [made.split(d.axis, int(d.layers.replace(",", "-").partition("-")[0] or 0)).bounds for d in wanted.axes]
    is_harmless = kind in {"request", "cache"} and ledger(cuts, wanted, made.devices, changed.request) == made.memory
    assert bool(differences(changed, model)) is not is_harmless, (kind, name, changed)


@pytest.mark.parametrize("edit", EDITS)
def test_edits_are_told_with_both_values(edit: str) -> None:
    """One error lists all that is wrong, of whatever the plan was edited in."""
    devices = [Device(name="A", budget_bytes=50 * 2**20), Device(name="B", budget_bytes=45 * 2**20)]
    devices = [attrs.evolve(device, overhead_bytes=0) for device in devices]
    made = plan(spec(), devices, cache=Cache("fp16", 2048), max_rows=64)
    changed, starts = EDITS[edit](made)
    assert not problems(changed)
    with pytest.raises(PlanError, match="the plan for tiny is not right for somewhere:\n") as error:
        check_ledger(changed, spec(), "somewhere")
    assert all(f"\n  {start}" in error.value.message for start in starts)
    assert "tpplan check" in error.value.hint
    assert not check({"plan": changed}, spec()).current


def test_layers_may_be_cut_apart_by_hand() -> None:
    """Layers of one kind may have several cuts; each adds what it takes, and a wrong byte of it is found."""
    model, devices = spec(), (Device(name="x", budget_bytes=2**40),) * 2
    request = Request("reduce", "balanced", Cache("fp16", 2048), 1, 64, "idle")
    (block,) = model.blocks
    cut = {0: (0, 1024, 2048), 1: (0, 256, 2048), 2: (0, 1024, 2048), 3: (0, 2048, 2048)}
    parts = tuple(attrs.evolve(block, layers=layers) for layers in ((0, 2), (1,), (3,)))
    parted = attrs.evolve(model, blocks=parts)
    wanted = demands(parted, request, 2, lambda axis, layer: cut[layer] if axis == "intermediate" else None)
    cuts = tuple(
        cut[int(d.layers[0])] if d.axis == "intermediate" else (0, d.unit * (d.units // 2), d.size) for d in wanted.axes
    )
    made = Attempt(model, devices, request, wanted, cuts, ledger(cuts, wanted, devices, request)).plan()
    assert not problems(made)
    assert [s.layers for s in made.splits if s.axis == "intermediate"] == ["0,2", "1", "3"]
    assert differences(made, model) == []
    # Matrices of the MLP have 3 × 512 elements of 2 bytes for each of the intermediate.
    weights = sum(3 * 512 * 2 * (end - start) for layer in range(4) for start, end in [[*pairwise(cut[layer])][1]])
    assert made.memory[1].weights_bytes - weights == made.memory[0].weights_bytes - sum(
        3 * 512 * 2 * cut[layer][1] for layer in range(4)
    )
    first = attrs.evolve(
        made.memory[0], weights_bytes=made.memory[0].weights_bytes - 1, free_bytes=made.memory[0].free_bytes + 1
    )
    found = differences(attrs.evolve(made, memory=(first, made.memory[1])), model)
    assert [each.partition(" is ")[0] for each in found] == ["memory[0].weights_bytes", "memory[0].free_bytes"]


def test_axes_that_the_model_does_not_have() -> None:
    """A split of layers that have no such axis, and one that is missing, are named; the ledger is not counted then."""
    devices = [Device(name="A", budget_bytes=2**30, overhead_bytes=0)] * 2
    made = plan(spec(), devices, cache=Cache("fp16", 2048), max_rows=64)
    splits = tuple(attrs.evolve(s, layers="0-2") if s.axis == "intermediate" else s for s in made.splits)
    assert differences(attrs.evolve(made, splits=splits), spec()) == ["splits has no intermediate of layers 3"]
    without = tuple(s for s in made.splits if s.axis != "intermediate")
    assert differences(attrs.evolve(made, splits=without), spec()) == ["splits has no intermediate of layers 0-3"]
    more = tuple(attrs.evolve(s, axis=Axis.EXPERT_INTERMEDIATE) if s.axis == "intermediate" else s for s in made.splits)
    found = differences(attrs.evolve(made, splits=more), spec())
    assert any("cuts expert_intermediate of layers 0-3, which the model does not have" in each for each in found)


def test_a_request_that_is_not_valid_for_the_model() -> None:
    """A context beyond the model's is told as planning would tell it."""
    model = spec(max_position_embeddings=128)
    made = plan(model, [Device(name="A", budget_bytes=2**30)], cache=Cache("fp16", 128), max_rows=64)
    longer = attrs.evolve(made, request=attrs.evolve(made.request, cache=Cache("fp16", 129)))
    (found,) = differences(longer, model)
    with pytest.raises(RequestError) as error:
        plan(model, made.devices, cache=Cache("fp16", 129), max_rows=64)
    assert found == f"request: {error.value.message}"
