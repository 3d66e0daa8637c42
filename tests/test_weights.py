"""Weights by a plan: the parts of small checkpoints of every family, put together again, are what was saved."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tpplan
from tests import strategies
from tests.checkpoints import save_random, saved_values
from tests.family_configs import configs
from tpplan import axes, families
from tpplan.axes import Axis
from tpplan.devices import Device
from tpplan.exec import compile as compile_plan
from tpplan.memory import demands, ledger
from tpplan.plan import KV_MODES, LAYOUTS, Cache, Request
from tpplan.planner import Attempt
from tpplan.weights import iter_slices, load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.model import ModelSpec
    from tpplan.plan import SplitPlan
    from tpplan.weights import Weights


@pytest.fixture(scope="module", autouse=True)
def fine_units() -> Iterator[None]:
    """Let small models be cut in many places."""
    with pytest.MonkeyPatch.context() as patch:
        for axis in Axis:
            patch.setitem(axes.DEFAULT_UNIT, axis, min(4, axes.DEFAULT_UNIT[axis]))
            patch.setitem(axes.MINIMUM_UNITS, axis, 1)
        yield


def plan_of(model: ModelSpec, request: Request, bounds: Sequence[tuple[int, ...]]) -> SplitPlan:
    """Return the plan that cuts the axes of a model, in the order of the ledger, so."""
    devices = tuple(Device(name=f"GPU {i}", budget_bytes=2**40) for i in range(len(bounds[0]) - 1))
    wanted = demands(model, request, len(devices))
    return Attempt(model, devices, request, wanted, tuple(bounds), ledger(bounds, wanted, devices)).plan()


def request_of(layout: str = "reduce", kv: str = "idle") -> Request:
    """Return a request for little room."""
    return Request(layout, "balanced", Cache("fp16", 8), 1, 4, kv)


@st.composite
def plans_of(draw: st.DrawFn, model: ModelSpec) -> SplitPlan:
    """Any plan of a model for one to five devices: uneven, some without a part of an axis, some idle."""
    request = request_of(draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(KV_MODES)))
    devices = draw(st.integers(1, 5))
    wanted = demands(model, request, devices).axes
    return plan_of(model, request, [draw(strategies.bounds(d.axis, d.size, d.unit, devices)) for d in wanted])


def loaded(plan: SplitPlan, directory: Path) -> Weights:
    """Load a checkpoint on virtual devices."""
    with compile_plan(plan, backend="cpu", model=directory) as ctx:
        return load_weights(plan, directory, ctx)


def together(plan: SplitPlan, model: ModelSpec, weights: Weights) -> dict[str, torch.Tensor]:
    """Put the parts together; where devices hold the same elements, these must be equal, and every one be held."""
    wholes: dict[str, torch.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    for part in iter_slices(plan, model):
        tensor = weights[part.device][part.name]
        whole = wholes.setdefault(part.name, torch.empty(part.whole, dtype=tensor.dtype))
        seen = held.setdefault(part.name, torch.zeros(part.whole, dtype=torch.bool))
        at = 0
        for start, end in part.ranges or ((0, 0),):
            place = (slice(None),) * len(part.whole)
            if part.dim is not None:
                place = (*place[: part.dim], slice(start, end), *place[part.dim + 1 :])
                own = tensor.narrow(part.dim, at, end - start)
            else:
                own = tensor
            assert torch.equal(torch.where(seen[place], whole[place], own), own), part
            whole[place] = own
            seen[place] = True
            at += end - start
    assert all(bool(seen.all()) for seen in held.values())
    return wholes


@pytest.mark.parametrize("model_type", families.supported())
@settings(max_examples=4)
@given(data=st.data())
def test_parts_together_are_the_checkpoint(model_type: str, data: st.DataObject) -> None:
    """Whatever the plan, nothing is lost or altered, no device holds anything else, and the ledger has counted it."""
    config = data.draw(configs(model_type))
    with TemporaryDirectory() as folder:
        dtype = data.draw(st.sampled_from(("float32", "bfloat16", "float16")))
        directory = save_random(Path(folder), config, dtype, data.draw(st.sampled_from((2**12, 2**30))))
        model = tpplan.read_model(directory)
        plan = data.draw(plans_of(model))
        weights = loaded(plan, directory)
        saved = saved_values(directory)
    ignored = families.tolerated(model_type).ignored
    expected = {n: t for n, t in saved.items() if not any(fnmatch(n, pattern) for pattern in ignored)}
    found = together(plan, model, weights)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in expected.items())
    parts = {(part.device, part.name): part.shape for part in iter_slices(plan, model)}
    assert {(d, n): tuple(t.shape) for d, own in weights.tensors.items() for n, t in own.items()} == parts
    sizes = [sum(t.nbytes for t in weights.tensors.get(i, {}).values()) for i in range(len(plan.devices))]
    assert sizes == [entry.weights_bytes for entry in plan.memory]
