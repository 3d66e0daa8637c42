"""Whether an engine that cuts evenly can take a plan's model to the plan's devices, and which devices would do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.core.axes import Axis
from tpplan.core.plan import CACHE_KINDS
from tpplan.core.sizes import format_bytes, listed
from tpplan.export.facts import AXIS_WORDS
from tpplan.hardware.spec import spec_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.core.device import Device
    from tpplan.export.facts import Facts

#: Axes that these engines do not cut, or pad before they do.
_PADDED = frozenset({Axis.VOCAB, Axis.RESIDUAL})
#: The most devices that a plan is suggested for.
_MOST = 16


def is_even(facts: Facts) -> bool:
    """Tell whether a plan gives each device as much of every axis that is not padded."""
    return all(len({*facts.parts(split)}) == 1 for split in facts.splits if split.axis not in _PADDED)


def obstacles(facts: Facts, kind: int, *, repeats_heads: bool) -> Iterator[str]:
    """Yield why each device cannot get the same, a clause each.

    Args:
        facts: of the plan.
        kind: sixteenths of a byte for each element of the cache.
        repeats_heads: whether the engine gives a KV head to several devices.
    """
    yield from _indivisible(facts, facts.count, repeats_heads=repeats_heads)
    first = facts.devices[0]
    other = next((i for i, d in enumerate(facts.devices) if _kind(d) != _kind(first)), 0)
    if other and not is_even(facts):
        sizes = [format_bytes(facts.devices[i].budget_bytes) for i in (0, other)]
        names = [facts.name(i) for i in (0, other)]
        axis, parts = next(_uneven(facts))
        yield (
            f"its devices are not alike: {names[0]} has {sizes[0]} and {names[1]} has {sizes[1]}, and the plan gives "
            f"them {listed(parts)} {AXIS_WORDS[axis]}"
        )
        return
    need, cache = even_bytes(facts, facts.count, kind)
    drafting = even_draft_bytes(facts, facts.count)
    for i, device in enumerate(facts.devices):
        have = device.budget_bytes - facts.request.reserved(facts.used[i])
        if (needs := need + device.overhead_bytes + drafting) > have:
            draft = f" and {format_bytes(drafting)} for what drafts" if drafting else ""
            yield (
                f"{facts.name(i)} would need {format_bytes(needs)} of {format_bytes(have)} "
                f"with an equal part, {format_bytes(cache)} of them for the cache{draft}"
            )
            return


def even_bytes(facts: Facts, count: int, kind: int) -> tuple[int, int]:
    """Return no less than each of ``count`` equal devices needs without the overhead, and the cache in it.

    A device's weights are a part of what is cut, and what every device has. If that is ``S / count + R``, a plan's
    devices hold ``S + n R`` together, and the least of them no less than ``R``.
    """
    memory, kind = facts.memory, max(kind, CACHE_KINDS[facts.request.cache.kind])
    weights, spaces = [entry.weights_bytes for entry in memory], [entry.workspace_bytes for entry in memory]
    more = max(0, count - facts.count) * min(weights)
    caches = facts.cache_bytes(kind)
    cache = max(-(-sum(caches) // count), *caches)  # which may as well be a latent one, whole on every device
    return -(-(sum(weights) + more) // count) + cache + max(-(-sum(spaces) // count), *spaces), cache


def even_draft_bytes(facts: Facts, count: int) -> int:
    """Return no less than what drafts beside the model needs on each of ``count`` equal devices."""
    draft = facts.request.draft
    if draft is None:
        return 0
    return max(-(-sum(draft.room_bytes) // count), *draft.room_bytes) if draft.split else draft.room_bytes[0]


def works_with(facts: Facts, kind: int, *, repeats_heads: bool) -> str:
    """Return devices, as ``--gpus`` takes them, of a plan that an engine can run that cuts evenly.

    These are as many as the plan has of a kind, or fewer, and else the least memory that does.

    Args:
        facts: of the plan.
        kind: sixteenths of a byte for each element of the cache.
        repeats_heads: whether the engine gives a KV head to several devices.

    Returns:
        The devices; nothing if none is known to do.
    """
    kinds = dict.fromkeys(facts.devices)
    owned = {device: sum(_kind(device) == _kind(other) for other in facts.devices) for device in kinds}
    choices = [(device, n) for device in kinds for n in range(1, _MOST + 1)]
    # First what is there, most memory first; then what has to be bought, least memory first.
    choices.sort(key=lambda c: (c[1] > owned[c[0]], (-1 if c[1] <= owned[c[0]] else 1) * c[1] * c[0].budget_bytes))
    reserves = {reserve.device: reserve.bytes for reserve in facts.request.reserve}
    for device, count in choices:
        is_there = max(reserves, default=-1) < count
        if not is_there or not _divides(facts, count, repeats_heads=repeats_heads):
            continue
        left = max(reserves.values(), default=0) + even_draft_bytes(facts, count)
        need = even_bytes(facts, count, kind)[0] + device.overhead_bytes + left
        if need <= device.budget_bytes and (spec := spec_of((device,) * count)):
            return spec
    return ""


def _divides(facts: Facts, count: int, *, repeats_heads: bool) -> bool:
    """Tell whether all axes divide, with a KV head for each device: a plan for more leaves some without any."""
    heads = all(total % count == 0 for total, _ in facts.kv_heads())
    return heads and not any(_indivisible(facts, count, repeats_heads=repeats_heads))


def _indivisible(facts: Facts, count: int, *, repeats_heads: bool) -> Iterator[str]:
    """Yield the axes that do not divide by a number of devices."""
    for axis in dict.fromkeys(split.axis for split in facts.splits):
        if axis in _PADDED:
            continue
        sizes = {split.size // split.replicas for split in facts.cuts(axis)}
        for size in sorted(sizes):
            repeated = axis is Axis.KV_HEADS and repeats_heads and count % size == 0
            if size % count and not repeated:
                yield f"{size} {AXIS_WORDS[axis]} do not divide by {count} devices"


def _uneven(facts: Facts) -> Iterator[tuple[Axis, tuple[int, ...]]]:
    """Yield the axes that the plan cuts into unequal parts, with the parts."""
    for split in facts.splits:
        if split.axis not in _PADDED and len({*facts.parts(split)}) > 1:
            yield split.axis, facts.parts(split)


def uneven_parts(facts: Facts) -> Iterator[str]:
    """Yield how a plan's parts differ from equal ones, a sentence for each axis."""
    for axis, parts in dict.fromkeys(_uneven(facts)):
        size = sum(parts) // facts.count
        yield f"it cuts evenly: {size} {AXIS_WORDS[axis]} on each device; the plan has {listed(parts)}"


def _kind(device: Device) -> tuple[str, int]:
    return device.name, device.budget_bytes
