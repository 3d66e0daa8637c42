"""The report of ``tpplan show``: a plan, the shares its devices should have and do have, how full and fast they are."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from tpplan.core.plan import SplitPlan
from tpplan.files.codec import document
from tpplan.planner.attempt import attempt
from tpplan.planner.place import Effort
from tpplan.planner.speed import bandwidth_of, predict

if TYPE_CHECKING:
    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import DeviceMemory
    from tpplan.core.speed import LinkSpeed, Pass

PPM = 1_000_000
#: Speeds that differ by less than one part in so many are not told apart.
_APART = 10
#: Most devices of which fewer are tried.
_MOST_TRIED = 8

#: Buckets of the ledger that are exact, and those that rest on a calibrated constant, where nothing is assumed.
EXACT = ("weights", "cache", "workspace")
ESTIMATED = ("overhead",)


class ShareBasis(StrEnum):
    """The quantity that shares refer to."""

    BUDGET = "budget"
    BANDWIDTH = "bandwidth"


@frozen
class DeviceShare:
    """The requested and achieved share of a device in the model, in millionths.

    Attributes:
        device: index of the device in the plan.
        name: display name of the device.
        requested_share_ppm: the device's share of the total budget, or of the total bandwidth.
        achieved_share_ppm: the device's share of all bytes in use or left to others, or of all bytes that a token reads
            if shares refer to bandwidth.
        budget_bytes: bytes that tpplan may use on the device.
        used_bytes: sum of the four buckets.
        free_bytes: remainder of the budget, without what is left to others.
        used_ppm: part of the device's budget that is in use or left to others.
    """

    device: int
    name: str
    requested_share_ppm: int
    achieved_share_ppm: int
    budget_bytes: int
    used_bytes: int
    free_bytes: int
    used_ppm: int


@frozen(kw_only=True)
class PassSpeed:
    """How fast one kind of pass is predicted to be.

    Attributes:
        rows: tokens of the pass.
        tokens_per_second: tokens per second of all sequences together while next to nothing is cached; of prefill, of
            a prompt of that many tokens.
        full_tokens_per_second: the same while the cache is full; of prefill equal to the other.
        limiting_device: index of the device that the others wait for.
    """

    rows: int
    tokens_per_second: int
    full_tokens_per_second: int
    limiting_device: int


@frozen(kw_only=True)
class SpeedReport:
    """How fast a plan is predicted to be by tpplan's decoder.

    Attributes:
        decode: decode steps: of one sequence, and of the plan's batch if that is larger.
        prefill: a prompt; empty if no matrix rate was measured.
        measured: what was measured: ``bandwidth`` of all devices, ``links`` between all of them; the rest is guessed.
    """

    decode: tuple[PassSpeed, ...]
    prefill: tuple[PassSpeed, ...]
    measured: tuple[str, ...]


@document("show-report")
@frozen(kw_only=True)
class ShowReport:
    """A plan, with the shares and memory use of its devices.

    Attributes:
        plan: the plan, as in its file.
        share_basis: quantity that shares refer to: ``bandwidth`` for the strategy latency, else ``budget``.
        devices: shares of each device, in the plan's order.
        fullest_device: index of the device with the largest part of its budget in use or left to others.
        fullest_ppm: that part, in millionths.
        together_ppm: part of the total budget that is in use or left to others, in millionths.
        exact: buckets that are exact to the byte, for all that the plan counts.
        estimated: buckets that rest on a calibrated constant, of those that have something in them, or on what is
            assumed of the weights.
        speed: how fast the plan is predicted to be; left out if it predicts nothing.
        without_bandwidth: indices of the devices whose bandwidth is unknown, for which nothing is predicted; left out
            if all are known.
        notes: what the command noted on standard error beside it; left out for none.
    """

    plan: SplitPlan
    share_basis: ShareBasis
    devices: tuple[DeviceShare, ...]
    fullest_device: int
    fullest_ppm: int
    together_ppm: int
    exact: tuple[str, ...]
    estimated: tuple[str, ...]
    speed: SpeedReport | None = None
    without_bandwidth: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def show_report(plan: SplitPlan) -> ShowReport:
    """Return the report on a valid plan."""
    basis = ShareBasis.BANDWIDTH if plan.request.strategy == "latency" else ShareBasis.BUDGET
    pairs = tuple(zip(plan.devices, plan.memory, strict=True))
    by_bandwidth = basis is ShareBasis.BANDWIDTH
    asked = _shares([bandwidth_of(d) if by_bandwidth else d.budget_bytes for d in plan.devices])
    got = _shares([_load(entry, basis) for _, entry in pairs])
    shares = tuple(
        DeviceShare(
            device=entry.device,
            name=device.name,
            requested_share_ppm=asked[entry.device],
            achieved_share_ppm=got[entry.device],
            budget_bytes=device.budget_bytes,
            used_bytes=entry.used_bytes,
            free_bytes=entry.free_bytes,
            used_ppm=_ppm(_taken(entry), device.budget_bytes),
        )
        for device, entry in pairs
    )
    fullest = max(shares, key=lambda share: share.used_ppm)
    assumed = EXACT[:1] if plan.model.assumed else ()
    return ShowReport(
        plan=plan,
        share_basis=basis,
        devices=shares,
        fullest_device=fullest.device,
        fullest_ppm=fullest.used_ppm,
        together_ppm=_ppm(sum(map(_taken, plan.memory)), sum(s.budget_bytes for s in shares)),
        exact=tuple(bucket for bucket in EXACT if bucket not in assumed),
        estimated=(*assumed, *(ESTIMATED if any(entry.overhead_bytes for entry in plan.memory) else ())),
        speed=speed_report(plan),
        without_bandwidth=tuple(i for i, device in enumerate(plan.devices) if not bandwidth_of(device)),
    )


def speed_report(plan: SplitPlan) -> SpeedReport | None:
    """Return how fast a plan is predicted to be; None if it predicts nothing."""
    if plan.speed is None:
        return None
    used = [i for i, entry in enumerate(plan.memory) if entry.used_bytes]
    measured = ["bandwidth"] * all(plan.devices[i].read_bytes_per_second for i in used)
    measured += ["links"] * (len(plan.speed.links) == len(used) * (len(used) - 1) // 2 > 0)
    return SpeedReport(
        decode=tuple(_pass_speed(one, one.tokens_per_second) for one in plan.speed.decode),
        prefill=tuple(_pass_speed(one, one.full_tokens_per_second) for one in plan.speed.prefill),
        measured=tuple(measured),
    )


def _pass_speed(one: Pass, tokens_per_second: int) -> PassSpeed:
    """Return the speed of a pass that computes so many tokens a second while next to nothing is cached."""
    return PassSpeed(
        rows=one.rows,
        tokens_per_second=tokens_per_second,
        full_tokens_per_second=one.full_tokens_per_second,
        limiting_device=one.slowest.device,
    )


def _load(entry: DeviceMemory, basis: ShareBasis) -> int:
    """Return the bytes that the plan distributes in proportion to capacity."""
    return entry.reads_bytes if basis is ShareBasis.BANDWIDTH else _taken(entry)


def _taken(entry: DeviceMemory) -> int:
    """Return the bytes of a device that are in use or left to others."""
    return entry.used_bytes + entry.left_bytes


def _shares(amounts: list[int]) -> list[int]:
    total = sum(amounts)
    return [_ppm(amount, total) for amount in amounts]


def _ppm(part: int, whole: int) -> int:
    """Return a part in millionths, rounded to the nearest; 0 if the whole is 0."""
    return (2 * PPM * part + whole) // (2 * whole) if whole else 0


def of_other_strategy(
    plan: SplitPlan, model: ModelSpec, links: tuple[LinkSpeed, ...] = ()
) -> tuple[str, tuple[int, int]] | None:
    """Return the other one of ``balanced`` and ``latency``, and the tokens a second by a plan and by that.

    Args:
        plan: the plan.
        model: its model.
        links: links that were measured; those of a plan that predicts are its own.

    Returns:
        None where they differ by less than a tenth, or no bandwidth says so.
    """
    if plan.speed and plan.request.strategy == "balanced":  # the faster one was chosen
        return None
    other = {"balanced": "latency", "latency": "balanced"}.get(plan.request.strategy)
    links = plan.speed.links if plan.speed else links
    now = plan.speed or predict(plan, model, links)
    if other is None or now is None or not all(map(bandwidth_of, plan.devices)):
        return None
    found = attempt(model, plan.devices, evolve(plan.request, strategy=other), effort=Effort.QUICK)
    then = predict(found.plan(), model, links) if found and not found.lacking else None
    if then is None:
        return None
    rates = now.decode[-1].full_tokens_per_second, then.decode[-1].full_tokens_per_second
    apart = abs(rates[0] - rates[1])
    return (other, rates) if apart and _APART * apart >= min(rates) else None


def faster_with_fewer(plan: SplitPlan, model: ModelSpec) -> tuple[tuple[int, ...], tuple[int, int]] | None:
    """Return fewer devices that decode a plan's batch faster than all of those in use, and the tokens a second.

    One device after the other is left out, the slowest memory first.

    Returns:
        The devices, and the tokens a second of the plan and with them; None where no fewer are faster by a tenth.
    """
    used = [i for i, entry in enumerate(plan.memory) if entry.used_bytes]
    if plan.speed is None or len(used) == 1 or len(used) > _MOST_TRIED or plan.request.reserve or plan.request.draft:
        return None
    now = plan.speed.decode[-1].full_tokens_per_second
    best: tuple[tuple[int, ...], tuple[int, int]] | None = None
    for count in range(len(used) - 1, 0, -1):
        kept = sorted(sorted(used, key=lambda i: -bandwidth_of(plan.devices[i]))[:count])
        places = {old: new for new, old in enumerate(kept)}
        links = tuple(
            evolve(link, first=places[link.first], second=places[link.second])
            for link in plan.speed.links
            if link.first in places and link.second in places
        )
        request = evolve(plan.request, strategy="latency")
        found = attempt(model, tuple(plan.devices[i] for i in kept), request, effort=Effort.QUICK)
        speed = predict(found.plan(), model, links) if found and not found.lacking else None
        if speed and (then := speed.decode[-1].full_tokens_per_second) * _APART >= now * (_APART + 1) > 0:
            now_best = best[1][1] if best else 0
            best = (tuple(kept), (now, then)) if then > now_best else best
    return best
