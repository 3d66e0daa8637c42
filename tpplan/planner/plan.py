"""plan(): split a model over devices within every memory budget, or explain why this is not possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.core.plan import AUTO, Cache, Request, Reserve, SplitPlan, least_version
from tpplan.planfile.verify import verify
from tpplan.planner.attempt import attempt, nearest_attempt
from tpplan.planner.ledger import demands
from tpplan.planner.options import DEFAULT_MAX_ROWS
from tpplan.planner.place import Effort
from tpplan.planner.request import check_devices, check_kinds, resolve
from tpplan.planner.speed import bandwidth_of, predict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.core.device import Device
    from tpplan.core.model import ModelSpec
    from tpplan.core.speed import LinkSpeed, Speed
    from tpplan.planner.infeasible import Room


#: A gain of that many hundredths is none.
_TIE, _WHOLE = 3, 100


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
    links: Iterable[LinkSpeed] = (),
) -> SplitPlan:
    """Split ``model`` over ``devices``, within every device's budget.

    The same arguments give the same plan, byte for byte, on every machine.

    Args:
        model: from :func:`tpplan.read_model`.
        devices: from :func:`tpplan.parse_devices`; their order is the order of the plan's device indices.
        cache: kind and tokens of the key/value cache; by default ``fp16`` for the model's maximum context.
        layout: ``reduce`` (matrices cut by columns, then by rows, with an all-reduce) or ``gather`` (all by output
            columns). By default ``reduce``, or ``gather`` where the weights' rows cannot be cut.
        strategy: ``balanced`` minimises the largest fraction of a budget in use, ``latency`` the predicted time
            of a decode step's weights and full cache, where devices wait for each other after attention, after the MLP
            or the experts, and after the logits; ``exllamav2`` cuts as ExLlamaV2 does. ``auto`` takes the
            faster one of the first two, if all bandwidths are known, and says in the plan how fast it is.
        batch: number of sequences that share the cache.
        max_rows: tokens in the largest forward pass.
        kv: use of devices in excess of the KV heads: ``idle`` gives them no attention, ``replicate`` replicates heads.
        context: tokens of the longest sequence; where they are more than an equal part of the cache's tokens, the
            sequences share these as a pool. By default each sequence has an equal part.
        full_window: keep all tokens in layers with a sliding window, too, as some servers do.
        beyond: accept a context longer than the model's.
        reserve: memory to leave to something else.
        links: measured links between the devices, which ``auto`` predicts exchanges from; others are guessed.

    Raises:
        InfeasibleError: no plan fits, or ExLlamaV2's does not; it says how many bytes are missing and what would help.
        RequestError: the request is not valid for this model or these devices.
    """
    cache = cache or Cache()
    reserve = (reserve,) if isinstance(reserve, Reserve) else tuple(reserve)
    asked = Request(layout, strategy, cache, batch, max_rows, kv, context, full_window, beyond, reserve)
    return plan_request(model, devices, asked, links)


def plan_request(
    model: ModelSpec,
    devices: Iterable[Device],
    request: Request,
    links: Iterable[LinkSpeed] = (),
    room: Room | None = None,
    *,
    is_advised: bool = True,
) -> SplitPlan:
    """Make the plan that a request asks for; see :func:`plan`.

    Args:
        model: the model.
        devices: the devices.
        request: the request, before the planner fills in what depends on the model.
        links: measured links between the devices.
        room: leaves room for a draft model, whose size depends on request and devices, see
            :class:`tpplan.planner.infeasible.Trials`.
        is_advised: whether an error says what would help, which takes many attempts.
    """
    devices = tuple(devices)
    check_kinds(model, devices, request.cache)
    if request.strategy != AUTO:
        return _plan(model, devices, request, room, is_advised=is_advised)
    balanced = _plan(model, devices, evolve(request, strategy="balanced"), room, is_advised=is_advised)
    return faster(balanced, model, tuple(links), effort=_effort(request))


def faster(
    balanced: SplitPlan, model: ModelSpec, links: tuple[LinkSpeed, ...] = (), *, effort: Effort = Effort.BEST
) -> SplitPlan:
    """Return a balanced plan, or the one by ``latency`` if that fits and is faster; with how fast it is, if known.

    The latter is made with all effort only if little effort makes one that is faster.
    """
    known = all(map(bandwidth_of, balanced.devices))
    if not known or not (speed := predict(balanced, model, links)):
        return balanced
    latency, other = evolve(balanced.request, strategy="latency"), balanced
    wanted = demands(model, latency, len(balanced.devices))
    for each in dict.fromkeys((Effort.QUICK, effort)):
        found = attempt(model, balanced.devices, latency, effort=each, wanted=wanted)
        if not found or found.lacking:
            return with_speed(balanced, speed)
        other = found.plan()
        other_speed = predict(other, model, links)
        if not other_speed or not gains(speed, other_speed):
            return with_speed(balanced, speed)
    return with_speed(other, other_speed)


def with_speed(plan: SplitPlan, speed: Speed | None) -> SplitPlan:
    """Return a plan that says how fast it is."""
    said = evolve(plan, speed=speed)
    said = evolve(said, format_version=least_version(said))
    verify(said, "the new plan")
    return said


def gains(balanced: Speed, other: Speed) -> bool:
    """Return whether another plan decodes the plan's batch faster by more than a tie."""
    before, after = (speed.decode[-1].full_tokens_per_second for speed in (balanced, other))
    return after * _WHOLE > before * (_WHOLE + _TIE)


def _plan(
    model: ModelSpec, devices: tuple[Device, ...], asked: Request, room: Room | None, *, is_advised: bool
) -> SplitPlan:
    """Return the plan by one strategy, which predicts nothing."""
    request = resolve(model, _with_room(model, devices, asked, room) if room else asked)
    if request.draft:
        request = evolve(request, draft=request.draft.on(len(devices)))
    check_devices(devices, request)
    tries = (attempt(model, devices, request, effort=each) for each in dict.fromkeys((_effort(request), Effort.BEST)))
    found = next(filter(None, tries), None)
    if found is None or found.lacking:
        from tpplan.planner.infeasible import explain  # noqa: PLC0415 (explaining plans again)

        best = found or nearest_attempt(model, devices, request)
        raise explain(best, room, is_advised=is_advised)
    result = found.plan()
    verify(result, "the new plan")
    return result


def _effort(request: Request) -> Effort:
    """Return how long to look for better cuts: little for what drafts, which advice plans again for every attempt."""
    return Effort.QUICK if request.drafts_for else Effort.BEST


def _with_room(model: ModelSpec, devices: tuple[Device, ...], asked: Request, room: Room) -> Request:
    """Return a request with the room that it needs beside the model; where there is none, advice is for both."""
    from tpplan.planner.infeasible import InfeasibleError, explain_draft  # noqa: PLC0415 (only drafts need room)

    try:
        return room(asked, devices)
    except InfeasibleError as error:
        raise explain_draft(error, model, devices, resolve(model, asked), room) from error


def replan(model: ModelSpec, old: SplitPlan, room: Room | None = None) -> SplitPlan:
    """Plan again with the request and the devices of an old plan, and predict what it predicts; see :func:`plan`.

    What drafts has the room of the old plan, or what ``room`` leaves to it, see :func:`plan_request`.
    """
    asked = evolve(old.request, draft=None) if room else old.request
    again = plan_request(model, old.devices, asked, room=room)
    return with_speed(again, predict(again, model, old.speed.links)) if old.speed else again
