"""Whether a plan may run: what its model decides, and the ledger of its own cuts, are counted again and compared.

``tpplan check`` asks whether planning again gives the same plan. A plan that was cut by hand, or by an older planner,
does not pass that; but it may run if its ledger is right for its cuts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, fields

from tpplan.core.axes import parse_layers
from tpplan.errors import PlanError, RequestError
from tpplan.planner.attempt import described, splits_of
from tpplan.planner.ledger import demands, ledger, stated
from tpplan.planner.request import resolve

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tpplan.core.axes import Axis
    from tpplan.core.model import Block, ModelSpec
    from tpplan.core.plan import DeviceMemory, PlanModel, Split, SplitPlan

#: Fields of a plan's model that decide nothing: a directory may have another name, and what is not planned may go.
_TOLD = frozenset({"name", "not_planned", "assumed", "weight_format"})
#: Differences that an error lists.
_LISTED = 20

#: Advice for a plan that is not right for its model.
HINT = "tpplan check compares a plan with its model, and tpplan plan makes it again"


def differences(plan: SplitPlan, model: ModelSpec) -> list[str]:
    """Return where a plan differs from what its model, its request and its own cuts decide, in words.

    If the plan is for another model, nothing else is compared; and the ledger only if the axes are right.

    Args:
        plan: a plan that breaks no rule.
        model: the model to run it with.
    """
    if found := [*_unequal("model", plan.model, described(model, plan.request), _TOLD)]:
        return found
    try:
        resolve(model, plan.request)
    except RequestError as error:
        return [f"request: {error.message}"]
    entries = {(axis, layer): i for i, split in enumerate(plan.splits) for axis, layer in _places(split)}
    parted = evolve(model, blocks=tuple(part for block in model.blocks for part in _parts(block, entries)))
    count = len(plan.devices)
    wanted = demands(parted, plan.request, count, lambda axis, layer: entries.get((axis, layer)))
    planned = {(split.axis, split.layers): split for split in plan.splits}
    keys = [(demand.axis, demand.layers) for demand in wanted.axes]
    bounds = [planned[key].bounds if key in planned else (0,) * (count + 1) for key in keys]
    right = {(split.axis, split.layers): split for split in splits_of(wanted.axes, bounds)}
    for i, (key, split) in enumerate(planned.items()):
        name = f"{split.axis} of layers {split.layers}" if split.layers else split.axis
        if key in right:
            found += _unequal(f"splits[{i}]", split, right[key], {"bounds"})
        else:
            found.append(f"splits[{i}] cuts {name}, which the model does not have")
    found += [f"splits has no {axis} of layers {layers}" for axis, layers in right.keys() - planned.keys()]
    if found:
        return found
    counted = stated(ledger(bounds, wanted, plan.devices, plan.request), plan.request)
    rows = enumerate(zip(plan.memory, counted, strict=True))
    return [text for i, (entry, other) in rows for text in _unequal(f"memory[{i}]", entry, other)]


def check_ledger(plan: SplitPlan, model: ModelSpec, source: object) -> None:
    """Check that a plan differs in nothing from what its model decides, see :func:`differences`.

    Args:
        plan: a plan that breaks no rule.
        model: the model to run it with.
        source: name of the model in the error.

    Raises:
        PlanError: it does; the error lists the values, and what they should be.
    """
    if found := differences(plan, model):
        more = [f"and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
        lines = "".join(f"\n  {text}" for text in [*found[:_LISTED], *more])
        raise PlanError(f"the plan for {plan.model.name} is not right for {source}:{lines}", HINT)


def _places(split: Split) -> Iterator[tuple[Axis, int]]:
    """Yield the axis and each layer of a split."""
    return ((split.axis, layer) for layer in (parse_layers(split.layers) if split.layers else ()))


def _parts(block: Block, entries: dict[tuple[Axis, int], int]) -> Iterator[Block]:
    """Yield the parts of a block whose layers share all their cuts in a plan; as a rule, the block itself."""
    axes = [axis for axis, _ in block.sizes()]
    layers: dict[tuple[int | None, ...], list[int]] = {}
    for layer in block.layers:
        layers.setdefault(tuple(entries.get((axis, layer)) for axis in axes), []).append(layer)
    return (evolve(block, layers=tuple(some)) for some in layers.values())


def _unequal(
    path: str,
    planned: PlanModel | Split | DeviceMemory,
    right: PlanModel | Split | DeviceMemory,
    besides: Collection[str] = (),
) -> Iterator[str]:
    """Yield each field that differs, but for some."""
    for field in fields(type(planned)):
        if field.name not in besides and (value := getattr(planned, field.name)) != getattr(right, field.name):
            yield f"{path}.{field.name} is {value}, expected {getattr(right, field.name)}"
