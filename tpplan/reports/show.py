"""The report of ``tpplan show``: a plan, the requested and achieved shares of its devices, and how full they are.

Memory bandwidths bound how many tokens a second a plan allows: bytes of a step ÷ bandwidth.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from tpplan.core.plan import SplitPlan
from tpplan.planner.attempt import attempt
from tpplan.planner.ledger import demands, ledger
from tpplan.planner.place import Effort

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.core.device import Device
    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import DeviceMemory

PPM = 1_000_000

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
        achieved_share_ppm: the device's share of all bytes in use or reserved, or of all bytes that a token reads if
            shares refer to bandwidth.
        budget_bytes: bytes that tpplan may use on the device.
        used_bytes: sum of the four buckets.
        free_bytes: remainder of the budget, without what is reserved.
        used_ppm: part of the device's budget that is in use or reserved.
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
class ShowReport:
    """A plan, with the shares and memory use of its devices.

    Attributes:
        plan: the plan, as in its file.
        share_basis: quantity that shares refer to: ``bandwidth`` for the strategy latency, else ``budget``.
        devices: shares of each device, in the plan's order.
        fullest_device: index of the device with the largest part of its budget in use or reserved.
        fullest_ppm: that part, in millionths.
        together_ppm: part of the total budget that is in use or reserved, in millionths.
        exact: buckets that are exact to the byte, for all that the plan counts.
        estimated: buckets that rest on a calibrated constant, or on what is assumed of the weights.
    """

    plan: SplitPlan
    share_basis: ShareBasis
    devices: tuple[DeviceShare, ...]
    fullest_device: int
    fullest_ppm: int
    together_ppm: int
    exact: tuple[str, ...]
    estimated: tuple[str, ...]


def show_report(plan: SplitPlan) -> ShowReport:
    """Return the report on a valid plan."""
    basis = ShareBasis.BANDWIDTH if plan.request.strategy == "latency" else ShareBasis.BUDGET
    pairs = tuple(zip(plan.devices, plan.memory, strict=True))
    asked = _shares([_capacity(device, basis) for device, _ in pairs])
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
        estimated=(*assumed, *ESTIMATED),
    )


def _capacity(device: Device, basis: ShareBasis) -> int:
    return device.bandwidth_bytes_per_second if basis is ShareBasis.BANDWIDTH else device.budget_bytes


def _load(entry: DeviceMemory, basis: ShareBasis) -> int:
    """Return the bytes that the plan distributes in proportion to capacity."""
    return entry.reads_bytes if basis is ShareBasis.BANDWIDTH else _taken(entry)


def _taken(entry: DeviceMemory) -> int:
    """Return the bytes of a device that are in use or reserved."""
    return entry.used_bytes + entry.reserved_bytes


def _shares(amounts: list[int]) -> list[int]:
    total = sum(amounts)
    return [_ppm(amount, total) for amount in amounts]


def _ppm(part: int, whole: int) -> int:
    """Return a part in millionths, rounded to the nearest; 0 if the whole is 0."""
    return (2 * PPM * part + whole) // (2 * whole) if whole else 0


def most_tokens_per_second(memory: Sequence[DeviceMemory], devices: Sequence[Device], batch: int = 1) -> int:
    """Return how many tokens a second all devices can read the bytes for, rounded down; each decodes every token.

    Args:
        memory: ledgers with ``reads_bytes``.
        devices: with known bandwidths.
        batch: sequences that decode together, for which ``reads_bytes`` are read once.
    """
    pairs = zip(memory, devices, strict=True)
    rates = [d.bandwidth_bytes_per_second * batch // e.reads_bytes for e, d in pairs if e.reads_bytes]
    return min(rates, default=0)


def faster_by_latency(plan: SplitPlan, model: ModelSpec) -> tuple[int, int] | None:
    """Return the tokens a second that bandwidths allow by a balanced plan, and by the strategy ``latency``.

    Returns:
        None where the other strategy is not at least 20 % faster, or no bandwidth says so.
    """
    if plan.request.strategy != "balanced" or not all(d.bandwidth_bytes_per_second for d in plan.devices):
        return None
    request = evolve(plan.request, strategy="latency")
    wanted = demands(model, request, len(plan.devices))
    cuts = {(split.axis, split.layers): split.bounds for split in plan.splits}
    memory = ledger([cuts[d.axis, d.layers] for d in wanted.axes], wanted, plan.devices, request)
    other = attempt(model, plan.devices, request, effort=Effort.QUICK, wanted=wanted)
    if other is None:
        return None
    now, then = (most_tokens_per_second(m, plan.devices, request.batch) for m in (memory, other.memory))
    return (now, then) if 5 * then >= 6 * now else None
