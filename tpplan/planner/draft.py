"""Room for a draft model, which proposes tokens that the model checks: on every device, or split like the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.core.device import Device
from tpplan.core.limits import MOST
from tpplan.core.plan import AUTO, Reserve
from tpplan.core.sizes import format_bytes
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.place import Effort
from tpplan.planner.plan import plan_request
from tpplan.planner.request import check_devices

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import DeviceMemory, Request, SplitPlan
    from tpplan.core.speed import LinkSpeed


def reserve_for_draft(request: Request, draft: ModelSpec, model: ModelSpec, devices: Sequence[Device]) -> Request:
    """Reserve, beside what a request reserves, room for all of a draft model on every device.

    Counted are its weights, its cache for as many tokens as the model's, and its workspace for as many rows.

    Args:
        request: for the model, before the planner fills in what depends on it.
        draft: the draft model.
        model: the model.
        devices: the devices.

    Raises:
        InfeasibleError: a device cannot hold all of it.
        RequestError: the request is not valid for the draft model or the devices.
    """
    check_devices(devices, request)
    alone = Device(name="alone", budget_bytes=MOST, overhead_bytes=0)
    asked = evolve(for_draft(request, model), strategy="balanced", reserve=())
    (entry,) = plan_request(draft, (alone,), asked).memory
    needed = _bytes_of(entry)
    for i, device in enumerate(devices):
        if request.reserved(i) + needed >= device.budget_bytes:
            budget = f"device {i} ({device.name}) has a budget of {format_bytes(device.budget_bytes)}"
            kept = f" beside {format_bytes(request.reserved(i))} reserved" if request.reserved(i) else ""
            hint = "take a smaller draft model, or split it over the devices: tpplan plan --draft-output FILE"
            raise InfeasibleError(f"{budget}, all of {draft.name} takes {format_bytes(needed)}{kept}", hint, (), ())
    return _with_room(request, draft, [needed] * len(devices))


def split_draft(
    request: Request,
    draft: ModelSpec,
    model: ModelSpec,
    devices: Sequence[Device],
    links: Iterable[LinkSpeed] = (),
) -> tuple[Request, SplitPlan]:
    """Split a draft model over the devices of a model by the same strategy, and reserve room for each device's part.

    Args:
        request: for the model, before the planner fills in what depends on it.
        draft: the draft model.
        model: the model.
        devices: the devices.
        links: measured links between them.

    Returns:
        The request with room for the draft model beside what it reserves, and the plan of the draft model.

    Raises:
        InfeasibleError: not even the draft model fits; what would help is for who plans both to say.
        RequestError: the request is not valid for the draft model or the devices.
    """
    check_devices(devices, request)
    asked, effort = for_draft(request, model), Effort.BEST
    if request.mtp:  # a layer or two, of which nobody sees a plan: to look for better cuts is not worth the time
        asked, effort = evolve(asked, strategy="balanced" if asked.strategy == AUTO else asked.strategy), Effort.QUICK
    plan = plan_request(draft, devices, asked, links, effort=effort, is_advised=False)
    return _with_room(request, draft, [_bytes_of(entry) for entry in plan.memory]), plan


def for_draft(request: Request, model: ModelSpec) -> Request:
    """Return the request for a draft model that follows every token of the model, however short its own context is."""
    tokens = request.cache.tokens or (request.context or model.max_context) * request.batch
    return evolve(request, cache=evolve(request.cache, tokens=tokens), layout="", beyond=True, mtp=False)


def _bytes_of(entry: DeviceMemory) -> int:
    return entry.used_bytes - entry.overhead_bytes


def _with_room(request: Request, draft: ModelSpec, room: Sequence[int]) -> Request:
    """Return a request that reserves so many bytes more for a draft model on each device."""
    request = request if request.mtp else evolve(request, draft=draft.name)
    return evolve(request, reserve=reserves_of([request.reserved(i) + more for i, more in enumerate(room)]))


def reserves_of(sizes: Sequence[int]) -> tuple[Reserve, ...]:
    """Return what reserves so many bytes on each device."""
    if len(set(sizes)) == 1 and sizes[0]:
        return (Reserve(sizes[0]),)
    return tuple(Reserve(size, device) for device, size in enumerate(sizes) if size)
