"""What changes from one plan to another: inputs, cut points, and bytes per device."""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from tpplan.axes import Axis, format_layers, parse_layers
from tpplan.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from tpplan.devices import Device
    from tpplan.plan import DeviceMemory, Split, SplitPlan


class Reason(StrEnum):
    """Why two plans differ."""

    FORMAT = "format"  # versions of the file format
    MODEL = "model"
    REQUEST = "request"
    DEVICES = "devices"
    PLANNING = "planning"  # the same inputs, another decision: edited by hand, or by another tpplan


class Change(StrEnum):
    """What happened to a device or a split."""

    ADDED = "added"
    REMOVED = "removed"
    MOVED = "moved"  # a device that is the same but for its index
    CHANGED = "changed"


class Bucket(StrEnum):
    """Where a device's bytes go."""

    WEIGHTS = "weights"
    CACHE = "cache"
    WORKSPACE = "workspace"
    OVERHEAD = "overhead"
    FREE = "free"


@frozen
class FieldChange:
    """One value that differs.

    Attributes:
        path: of the value, such as ``request.cache.tokens``, or its name within a device or a split.
        before: in the first plan.
        after: in the second plan.
    """

    path: str
    before: int | str
    after: int | str


@frozen
class DevicePair:
    """A device, and where each plan has it.

    Attributes:
        name: in the second plan if it is there, else in the first.
        before: its index in the first plan, left out if that does not have it.
        after: its index in the second plan, left out if that does not have it.
    """

    name: str
    before: int | None = None
    after: int | None = None

    @property
    def change(self) -> Change | None:
        """What happened to its place, None for nothing."""
        if self.before is None or self.after is None:
            return Change.ADDED if self.before is None else Change.REMOVED
        return Change.MOVED if self.before != self.after else None


@frozen
class DeviceChange:
    """A device that is not the same in both plans.

    Attributes:
        change: what happened to it.
        device: which.
        fields: of a changed device, what differs.
    """

    change: Change
    device: DevicePair
    fields: tuple[FieldChange, ...]


@frozen
class Share:
    """What a device holds of an axis.

    Attributes:
        device: which.
        before_elements: in the first plan.
        after_elements: in the second plan.
        delta_elements: gained, or lost if negative.
    """

    device: DevicePair
    before_elements: int
    after_elements: int
    delta_elements: int


@frozen(kw_only=True)
class SplitChange:
    """An axis that is not cut the same in both plans, in the layers where the difference is the same.

    Attributes:
        change: what happened to it.
        axis: which.
        layers: inclusive ranges, left out outside the layers.
        fields: what differs beside the bounds: size, unit, width, replicas.
        before_bounds: the first plan's, empty if it does not have the axis there.
        after_bounds: the second plan's, empty if it does not have the axis there.
        shares: of every device that holds a part in either plan.
    """

    change: Change
    axis: Axis
    layers: str = ""
    fields: tuple[FieldChange, ...]
    before_bounds: tuple[int, ...]
    after_bounds: tuple[int, ...]
    shares: tuple[Share, ...]


@frozen
class BucketChange:
    """Bytes of one bucket.

    Attributes:
        bucket: which.
        before_bytes: in the first plan.
        after_bytes: in the second plan.
        delta_bytes: gained, or lost if negative.
    """

    bucket: Bucket
    before_bytes: int
    after_bytes: int
    delta_bytes: int


@frozen
class MemoryChange:
    """A device whose memory is not used the same in both plans.

    Attributes:
        device: which.
        buckets: all five of it.
    """

    device: DevicePair
    buckets: tuple[BucketChange, ...]


@frozen
class PlanDiff:
    """What changes from one plan to another; false if nothing does.

    Attributes:
        summary: one line for people.
        reasons: which of the inputs differ.
        fields: values of the format, the model and the request that differ.
        devices: that are not the same in both plans.
        splits: that are not the same in both plans.
        split_count: how many splits there are, the same ones and the others.
        memory: of the devices where it is not the same.
        total: of all devices.
    """

    summary: str
    reasons: tuple[Reason, ...]
    fields: tuple[FieldChange, ...]
    devices: tuple[DeviceChange, ...]
    splits: tuple[SplitChange, ...]
    split_count: int
    memory: tuple[MemoryChange, ...]
    total: tuple[BucketChange, ...]

    def __bool__(self) -> bool:
        return bool(self.reasons)


def diff(a: SplitPlan, b: SplitPlan) -> PlanDiff:
    """Compare two valid plans; they may be for other models and other devices.

    A device is the same in both plans if it is described the same, preferably at the same index; failing that, if it
    has the same name, or the same index.
    """
    pairs = tuple(_pairs(a.devices, b.devices))
    fields = tuple(_field_changes(a, b, ""))
    devices = tuple(_device_changes(a, b, pairs))
    compared = [_split_change(axis, *cut, layers, pairs) for axis in Axis for cut, layers in _aligned(a, b, axis)]
    splits = tuple(change for change in compared if change)
    memory = tuple(_memory_changes(a, b, pairs))
    reasons = {_REASONS[change.path.partition(".")[0]] for change in fields} | ({Reason.DEVICES} if devices else set())
    if (splits or memory) and not reasons:
        reasons = {Reason.PLANNING}
    return PlanDiff(
        summary=_summary(reasons, devices, f"{len(splits)} of {len(compared)} splits change", memory),
        reasons=tuple(reason for reason in Reason if reason in reasons),
        fields=fields,
        devices=devices,
        splits=splits,
        split_count=len(compared),
        memory=memory,
        total=tuple(_bucket_changes(a.memory, b.memory)),
    )


#: Devices that the summary names.
_TOLD = 3

_REASONS = {"format_version": Reason.FORMAT, "model": Reason.MODEL, "request": Reason.REQUEST}

#: What makes a device of one plan the device of the other, the surest first.
_SAME: tuple[Callable[[int, Device], Hashable], ...] = (
    lambda index, device: (index, device),
    lambda _, device: device,
    lambda index, device: (index, device.name),
    lambda _, device: device.name,
    lambda index, _: index,
)


def _pairs(a: tuple[Device, ...], b: tuple[Device, ...]) -> Iterator[DevicePair]:
    """Yield the devices of both plans, each once: in the second plan's order, then those that it does not have."""
    match: dict[int, int] = {}
    left = dict(enumerate(a))
    for same in _SAME:
        waiting = defaultdict(list)
        for i, device in reversed(left.items()):
            waiting[same(i, device)].append(i)
        for j, device in enumerate(b):
            if j not in match and waiting[same(j, device)]:
                match[j] = waiting[same(j, device)].pop()
                del left[match[j]]
    for j, device in enumerate(b):
        yield DevicePair(device.name, match.get(j), j)
    for i, device in left.items():
        yield DevicePair(device.name, i, None)


def _field_changes(a: attrs.AttrsInstance, b: attrs.AttrsInstance, path: str) -> Iterator[FieldChange]:
    """Yield the numbers and texts that differ between two objects of a class, not looking into tuples."""
    for name in (field.name for field in attrs.fields(type(a))):
        before, after = getattr(a, name), getattr(b, name)
        if attrs.has(type(before)):
            yield from _field_changes(before, after, f"{path}{name}.")
        elif before != after and not isinstance(before, tuple):
            yield FieldChange(path + name, before, after)


def _device_changes(a: SplitPlan, b: SplitPlan, pairs: tuple[DevicePair, ...]) -> Iterator[DeviceChange]:
    """Yield the devices that are not the same in both plans."""
    for pair in pairs:
        fields: tuple[FieldChange, ...] = ()
        if pair.before is not None and pair.after is not None:
            fields = tuple(_field_changes(a.devices[pair.before], b.devices[pair.after], ""))
        if change := Change.CHANGED if fields else pair.change:
            yield DeviceChange(change, pair, fields)


def _aligned(a: SplitPlan, b: SplitPlan, axis: Axis) -> Iterator[tuple[tuple[Split | None, Split | None], str]]:
    """Yield the splits of an axis in both plans, and in which layers the two meet; one is None where it is missing."""
    cuts: list[dict[int, Split]] = []
    for plan in (a, b):
        here = [split for split in plan.splits if split.axis == axis]
        cuts.append({n: s for s in here for n in (parse_layers(s.layers) if s.layers else (-1,))})
    met: dict[tuple[Split | None, Split | None], list[int]] = defaultdict(list)
    for layer in sorted(cuts[0].keys() | cuts[1].keys()):
        met[cuts[0].get(layer), cuts[1].get(layer)].append(layer)
    for cut, layers in met.items():
        yield cut, "" if layers == [-1] else format_layers(layers)


def _split_change(
    axis: Axis, before: Split | None, after: Split | None, layers: str, pairs: tuple[DevicePair, ...]
) -> SplitChange | None:
    """Return what differs between the two cuts of an axis, None if nothing does."""
    fields: tuple[FieldChange, ...] = ()
    if before and after:
        fields = tuple(_field_changes(attrs.evolve(before, layers=after.layers), after, ""))
    shares = tuple(share for share in (_share(before, after, pair) for pair in pairs) if share)
    if before and after and not fields and before.bounds == after.bounds and not any(s.delta_elements for s in shares):
        return None
    return SplitChange(
        change=Change.CHANGED if before and after else Change.REMOVED if before else Change.ADDED,
        axis=axis,
        layers=layers,
        fields=fields,
        before_bounds=before.bounds if before else (),
        after_bounds=after.bounds if after else (),
        shares=shares,
    )


def _share(before: Split | None, after: Split | None, pair: DevicePair) -> Share | None:
    """Return what a device holds before and after, None if it is nothing both times."""
    old, new = _elements(before, pair.before), _elements(after, pair.after)
    return Share(pair, old, new, new - old) if old or new else None


def _elements(split: Split | None, device: int | None) -> int:
    """Return what a device holds of an axis, nothing where one of them is missing."""
    return split.bounds[device + 1] - split.bounds[device] if split and device is not None else 0


def _memory_changes(a: SplitPlan, b: SplitPlan, pairs: tuple[DevicePair, ...]) -> Iterator[MemoryChange]:
    """Yield the devices whose memory is not used the same in both plans."""
    for pair in pairs:
        before = () if pair.before is None else (a.memory[pair.before],)
        after = () if pair.after is None else (b.memory[pair.after],)
        buckets = tuple(_bucket_changes(before, after))
        if any(bucket.delta_bytes for bucket in buckets):
            yield MemoryChange(pair, buckets)


def _bucket_changes(before: tuple[DeviceMemory, ...], after: tuple[DeviceMemory, ...]) -> Iterator[BucketChange]:
    """Yield every bucket, summed over devices."""
    for bucket in Bucket:
        old, new = (sum(getattr(entry, f"{bucket}_bytes") for entry in entries) for entries in (before, after))
        yield BucketChange(bucket, old, new, new - old)


def _summary(
    reasons: set[Reason], devices: tuple[DeviceChange, ...], splits: str, memory: tuple[MemoryChange, ...]
) -> str:
    """Say the most important in one line."""
    if not reasons:
        return "the plans are equal"
    inputs = [f"the {reason}" for reason in (Reason.FORMAT, Reason.MODEL, Reason.REQUEST) if reason in reasons]
    kinds = [device.change for device in devices]
    moves = sorted((_largest(change) for change in memory), key=lambda move: -abs(move[1].delta_bytes))
    moves = [move for move in moves if move[1].delta_bytes]
    told = [_told(*move) for move in moves[:_TOLD]]
    if len(moves) > _TOLD:
        told.append(f"and {len(moves) - _TOLD} more")
    parts = (
        f"{' and '.join(inputs)} {'differ' if len(inputs) > 1 else 'differs'}" if inputs else "",
        splits,
        ", ".join(_devices(kinds.count(kind), kind) for kind in Change if kind in kinds),
        ", ".join(told),
    )
    return "; ".join(part for part in parts if part)


def _devices(count: int, what: str) -> str:
    """Count devices: ``1 device removed``, ``2 devices changed``."""
    return f"{count} {'device' if count == 1 else 'devices'} {what}"


def _largest(change: MemoryChange) -> tuple[DevicePair, BucketChange]:
    """Return a device and the bucket, other than what is free, that changes most."""
    used = [bucket for bucket in change.buckets if bucket.bucket != Bucket.FREE]
    return change.device, max(used, key=lambda bucket: abs(bucket.delta_bytes))


def _told(device: DevicePair, bucket: BucketChange) -> str:
    """Say what a device gains or loses."""
    where = f"device {device.after}" if device.after is not None else f"removed device {device.before}"
    verb = "gains" if bucket.delta_bytes > 0 else "loses"
    return f"{where} {device.name} {verb} {format_bytes(abs(bucket.delta_bytes))} of {bucket.bucket}"
