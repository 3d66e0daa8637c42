"""plan(): split a model over devices within every memory budget, or explain why this is not possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import fields

from tpplan.core.plan import Cache, Request, Reserve, SplitPlan
from tpplan.planfile.verify import verify
from tpplan.planner.attempt import attempt, nearest_attempt
from tpplan.planner.request import check_devices, check_kinds, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.core.device import Device
    from tpplan.core.model import ModelSpec


DEFAULT_MAX_ROWS = 2048


def plan(
    model: ModelSpec,
    devices: Iterable[Device],
    *,
    cache: Cache | None = None,
    layout: str = "",
    strategy: str = "balanced",
    batch: int = 1,
    max_rows: int = DEFAULT_MAX_ROWS,
    kv: str = "idle",
    context: int = 0,
    full_window: bool = False,
    beyond: bool = False,
    reserve: Iterable[Reserve] | Reserve = (),
) -> SplitPlan:
    """Split ``model`` over ``devices``, within every device's budget.

    The same arguments give the same plan, byte for byte, on every machine.

    Args:
        model: from :func:`tpplan.read_model`.
        devices: from :func:`tpplan.parse_devices`; their order is the order of the plan's device indices.
        cache: kind and tokens of the key/value cache; by default ``fp16`` for the model's maximum context.
        layout: ``reduce`` (matrices cut by columns, then by rows, with an all-reduce) or ``gather`` (all by output
            columns). By default ``reduce``, or ``gather`` where the weights' rows cannot be cut.
        strategy: ``balanced`` minimises the largest fraction of a budget in use, ``latency`` the longest time that a
            device takes to read its bytes of one token, ``exllamav2`` cuts as ExLlamaV2 does.
        batch: number of sequences that share the cache.
        max_rows: tokens in the largest forward pass.
        kv: use of devices in excess of the KV heads: ``idle`` gives them no attention, ``replicate`` replicates heads.
        context: tokens of the longest sequence; where they are more than an equal part of the cache's tokens, the
            sequences share these as a pool. By default each sequence has an equal part.
        full_window: keep all tokens in layers with a sliding window, too, as some servers do.
        beyond: accept a context longer than the model's.
        reserve: memory to leave to something else.

    Raises:
        InfeasibleError: no plan fits, or ExLlamaV2's does not; it says how many bytes are missing and what would help.
        RequestError: the request is not valid for this model or these devices.
    """
    devices, cache = tuple(devices), cache or Cache()
    reserve = (reserve,) if isinstance(reserve, Reserve) else reserve
    check_kinds(model, devices, cache)
    asked = Request(layout, strategy, cache, batch, max_rows, kv, context, full_window, beyond, tuple(reserve))
    request = resolve(model, asked)
    check_devices(devices, request)
    found = attempt(model, devices, request)
    if found is None or found.lacking:
        from tpplan.planner.infeasible import explain  # noqa: PLC0415 (explaining plans again)

        raise explain(found or nearest_attempt(model, devices, request))
    result = found.plan()
    verify(result, "the new plan")
    return result


def replan(model: ModelSpec, old: SplitPlan) -> SplitPlan:
    """Plan again with the request and the devices of an old plan; see :func:`plan` for errors."""
    request = old.request
    return plan(model, old.devices, **{field.name: getattr(request, field.name) for field in fields(Request)})
