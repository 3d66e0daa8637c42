"""Parts of every layer that one device of a plan computes alone, and what divides them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from tpplan.core.axes import Axis, slices_of
from tpplan.planner.attempt import attempt
from tpplan.planner.place import Effort
from tpplan.planner.speed import bandwidth_of

if TYPE_CHECKING:
    from tpplan.core.device import Device
    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import Request, SplitPlan

#: What the axes of a layer compute, between the sums at which devices wait for each other.
_PARTS = {
    "attention": {Axis.KV_HEADS, Axis.LINEAR_HEADS},
    "MLPs": {Axis.INTERMEDIATE, Axis.SHARED_INTERMEDIATE, Axis.EXPERT_INTERMEDIATE},
}
_EXPERTS = "experts"


@frozen
class Instead:
    """What a user may do about a part that is on one device.

    Attributes:
        device: index of a device on which the whole model fits; None if it fits on none of those.
        replicates: whether replicated KV heads divide the part.
        may_divide: whether, where those do not, the strategy ``latency`` may divide it, which needs bandwidths.
    """

    device: int | None
    replicates: bool = False
    may_divide: bool = False


def exclusive_parts(plan: SplitPlan) -> dict[str, int]:
    """Return the parts of layers that one of several devices in use has all of, each with the device."""
    found = {}
    for part, axes in _PARTS.items():
        splits = [split for split in plan.splits if split.axis in axes]
        holders = {piece.device for split in splits for piece in slices_of(split.bounds)}
        if len(holders) == 1 < len(_used(plan)):
            has_experts = any(split.axis is Axis.EXPERT_INTERMEDIATE for split in splits)
            found[_EXPERTS if has_experts else part] = holders.pop()
    return found


def instead(plan: SplitPlan, model: ModelSpec) -> Instead:
    """Return what may be done about parts that are on one device; what needs nothing beside was planned."""
    request, parts = plan.request, exclusive_parts(plan)
    if request.draft or request.drafts_for:
        return Instead(None)
    one = None
    if not request.reserve:  # which is of devices by their number
        one = next((i for i in parts.values() if _planned(model, request, (plan.devices[i],))), None)
    # Bandwidths in proportion to memory, where they are unknown, show whether any would divide the part.
    known = tuple(evolve(d, bandwidth_bytes_per_second=bandwidth_of(d) or d.budget_bytes) for d in plan.devices)
    if _divides(_planned(model, evolve(request, kv="replicate"), plan.devices)):
        return Instead(one, replicates=True)
    return Instead(one, may_divide=_divides(_planned(model, evolve(request, strategy="latency"), known)))


def _divides(found: SplitPlan | None) -> bool:
    """Tell whether several devices compute every part of a plan."""
    return found is not None and len(_used(found)) > 1 and not exclusive_parts(found)


def _planned(model: ModelSpec, request: Request, devices: tuple[Device, ...]) -> SplitPlan | None:
    """Return a plan, soon found; None if that does not fit."""
    found = attempt(model, devices, request, effort=Effort.QUICK)
    return found.plan() if found and not found.lacking else None


def _used(plan: SplitPlan) -> list[int]:
    return [entry.device for entry in plan.memory if entry.used_bytes]
