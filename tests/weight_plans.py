"""What the tests of weights share: plans that cut small models in many places, and loading by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve
from hypothesis import strategies as st

from tests import strategies
from tpplan.core import axes
from tpplan.core.axes import Axis
from tpplan.core.device import Device
from tpplan.core.plan import KV_MODES, LAYOUTS, Cache, Request
from tpplan.exec import compile as compile_plan
from tpplan.exec.memory.binding import BITS
from tpplan.planner.attempt import Attempt
from tpplan.planner.ledger import demands, ledger
from tpplan.weights import iter_slices, load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import SplitPlan
    from tpplan.weights import Weights


@pytest.fixture(scope="module", autouse=True)
def fine_units() -> Iterator[None]:
    """Let small models be cut in many places, in every module that imports this."""
    with pytest.MonkeyPatch.context() as patch:
        for axis in Axis:
            patch.setitem(axes.DEFAULT_UNIT, axis, min(4, axes.DEFAULT_UNIT[axis]))
            patch.setitem(axes.MINIMUM_UNITS, axis, 1)
        yield


def request_of(layout: str = "reduce", kv: str = "idle") -> Request:
    """Return a request for little room."""
    return Request(layout, "balanced", Cache("fp16", 8), 1, 4, kv)


def plan_of(model: ModelSpec, request: Request, bounds: Sequence[tuple[int, ...]]) -> SplitPlan:
    """Return the plan that cuts the axes of a model so, in the order of the ledger."""
    request = evolve(request, cache=evolve(request.cache, tokens=min(request.cache.tokens, model.max_context)))
    devices = tuple(Device(name=f"GPU {i}", budget_bytes=2**40) for i in range(len(bounds[0]) - 1))
    wanted = demands(model, request, len(devices))
    return Attempt(model, devices, request, wanted, tuple(bounds), ledger(bounds, wanted, devices, request)).plan()


def even_plan(model: ModelSpec, devices: int, layout: str = "reduce") -> SplitPlan:
    """Return a plan that cuts every axis in parts as equal as can be."""
    request = request_of(layout)
    wanted = demands(model, request, devices).axes
    cuts = [[d.units * (i + 1) // devices - d.units * i // devices for i in range(devices)] for d in wanted]
    return plan_of(model, request, [axes.bounds_of(cut, d.unit, d.size) for cut, d in zip(cuts, wanted, strict=True)])


@st.composite
def plans_of(draw: st.DrawFn, model: ModelSpec) -> SplitPlan:
    """Any plan of a model for one to five devices: uneven, some without a part of an axis, some idle."""
    layouts = ("gather",) if model.gather_only else LAYOUTS
    request = request_of(draw(st.sampled_from(layouts)), draw(st.sampled_from(KV_MODES)))
    devices = draw(st.integers(1, 5))
    wanted = demands(model, request, devices).axes
    return plan_of(model, request, [draw(strategies.bounds(d.axis, d.size, d.unit, devices)) for d in wanted])


def loaded(plan: SplitPlan, directory: Path) -> Weights:
    """Load a checkpoint on virtual devices."""
    with compile_plan(plan, backend="cpu") as ctx:
        return load_weights(plan, directory, ctx)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bits as whole numbers, which are equal to themselves even if they mean no number."""
    return tensor.view(BITS[tensor.element_size()])


def together(plan: SplitPlan, model: ModelSpec, weights: Weights) -> dict[str, torch.Tensor]:
    """Put the parts together as bits; where devices hold the same elements these must be equal, and all be held."""
    wholes: dict[str, torch.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    for part in iter_slices(plan, model):
        tensor = bits(weights[part.device][part.name])
        whole = wholes.setdefault(part.name, torch.empty(part.whole, dtype=tensor.dtype))
        seen = held.setdefault(part.name, torch.zeros(part.whole, dtype=torch.bool))
        places: list[tuple[tuple[slice, ...], torch.Tensor]] = [((), tensor)]
        if part.dim is not None:
            pieces = tensor.split([end - start for start, end in part.ranges], part.dim)  # type: ignore[no-untyped-call]
            before = (slice(None),) * part.dim
            places = [((*before, slice(*ends)), piece) for ends, piece in zip(part.ranges, pieces, strict=True)]
        for place, piece in places:
            assert torch.equal(torch.where(seen[place], whole[place], piece), piece), part
            whole[place] = piece
            seen[place] = True
    assert all(bool(seen.all()) for seen in held.values())
    return wholes


def assert_loaded(plan: SplitPlan, model: ModelSpec, weights: Weights, saved: dict[str, torch.Tensor]) -> None:
    """Check that nothing is lost or altered, that devices hold nothing else, and that the ledger has counted it."""
    found = together(plan, model, weights)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], bits(tensor)) for name, tensor in saved.items())
    tensors = {(device, name): tensor for device, own in weights.tensors.items() for name, tensor in own.items()}
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == {
        (part.device, part.name): part.shape for part in iter_slices(plan, model)
    }
    assert all(tensor.dtype == saved[name].dtype for (_, name), tensor in tensors.items())
    sizes = [sum(t.nbytes for t in weights.tensors.get(i, {}).values()) for i in range(len(plan.devices))]
    assert sizes == [entry.weights_bytes for entry in plan.memory]
