"""Room for a draft model, which proposes tokens that the model checks: on every device, or split like the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.core.device import Device
from tpplan.core.limits import MOST
from tpplan.core.plan import AUTO, HEADS, Draft
from tpplan.core.sizes import format_bytes, listed
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.plan import plan_request
from tpplan.planner.request import check_devices

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import Request, SplitPlan
    from tpplan.core.speed import LinkSpeed


def reserve_for_draft(request: Request, draft: ModelSpec, model: ModelSpec, devices: Sequence[Device]) -> Request:
    """Leave room for all of a draft model on every device, beside what a request reserves.

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
    needed = entry.used_bytes
    for i, device in enumerate(devices):
        reserved = request.reserved(i)
        if reserved + device.overhead_bytes + needed > device.budget_bytes:
            budget = f"device {i} ({device.name}) has a budget of {format_bytes(device.budget_bytes)}"
            beside = [f"an overhead of {format_bytes(device.overhead_bytes)}"] * (device.overhead_bytes > 0)
            beside += [f"{format_bytes(reserved)} reserved"] * (reserved > 0)
            kept = f" beside {listed(beside)}" if beside else ""
            message = f"{budget}, all of {draft.name} takes {format_bytes(needed)}{kept}"
            raise InfeasibleError(message, "take a smaller draft model", (), ())
    return evolve(request, draft=_drafting(draft, (needed,) * len(devices)))


def split_draft(
    request: Request,
    draft: ModelSpec,
    model: ModelSpec,
    devices: Sequence[Device],
    links: Iterable[LinkSpeed] = (),
) -> tuple[Request, SplitPlan]:
    """Split a draft model over the devices of a model by the same strategy, and leave room for each device's part.

    Args:
        request: for the model, before the planner fills in what depends on it.
        draft: the draft model.
        model: the model.
        devices: the devices.
        links: measured links between them.

    Returns:
        The request with room for the draft model, and the plan of the draft model.

    Raises:
        InfeasibleError: not even the draft model fits; what would help is for who plans both to say.
        RequestError: the request is not valid for the draft model or the devices.
    """
    check_devices(devices, request)
    asked = for_draft(request, model)
    if request.mtp and request.strategy == AUTO:  # nobody asks how fast a layer or two are
        asked = evolve(asked, strategy="balanced")
    plan = plan_request(draft, devices, asked, links, is_advised=False)
    room = tuple(entry.used_bytes for entry in plan.memory)
    return evolve(request, draft=_drafting(draft, room, split=True)), plan


def _drafting(draft: ModelSpec, room: tuple[int, ...], *, split: bool = False) -> Draft:
    return Draft(draft.name, room, split, draft.model_type if draft.model_type in HEADS else "")


def for_draft(request: Request, model: ModelSpec) -> Request:
    """Return the request for a draft model that follows every token of the model, however short its own context is.

    Both are in one process: the overhead of a device is that of the model's plan.
    """
    tokens = request.cache.tokens or (request.context or model.max_context) * request.batch
    return evolve(
        request,
        cache=evolve(request.cache, tokens=tokens),
        layout="",
        beyond=True,
        draft=None,
        mtp=False,
        drafts_for=model.name,
    )
