"""Comparing two plans, device by device and layer by layer."""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from tpplan.core.axes import Axis, format_layers, parse_layers
from tpplan.core.device import MEASURED, bandwidths_unknown
from tpplan.core.plan import AUTO, Draft, SplitPlan, reserves_told, rooms_told
from tpplan.core.sizes import format_bytes
from tpplan.errors import RequestError
from tpplan.files.codec import document
from tpplan.planner.request import asked_strategy
from tpplan.planner.speed import bandwidth_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from tpplan.core.device import Device
    from tpplan.core.model import NotPlanned
    from tpplan.core.plan import DeviceMemory, Split
    from tpplan.core.speed import Pass, Speed


class Reason(StrEnum):
    """Why two plans differ."""

    FORMAT = "format"  # versions of the file format
    MODEL = "model"
    REQUEST = "request"
    DEVICES = "devices"
    PLANNING = "planning"  # the same inputs, another result: edited by hand, or by another tpplan


class Change(StrEnum):
    """What happened to a device or a split."""

    ADDED = "added"
    REMOVED = "removed"
    MOVED = "moved"  # the same device at another index
    CHANGED = "changed"


class Bucket(StrEnum):
    """A category of a device's memory."""

    WEIGHTS = "weights"
    CACHE = "cache"
    WORKSPACE = "workspace"
    OVERHEAD = "overhead"
    RESERVED = "reserved"  # only in plans with a reserve
    DRAFT = "draft"  # only in plans with room for what drafts
    FREE = "free"


#: Buckets of what is left to others.
_LEFT = (Bucket.RESERVED, Bucket.DRAFT)


@frozen
class FieldChange:
    """One value that differs.

    Attributes:
        path: path of the value, such as ``request.cache.tokens``, or its name within a device or a split.
        before: value in the first plan; left out if it is a device's that is not known.
        after: value in the second plan; left out if it is a device's that is not known.
    """

    path: str
    before: int | str | None = None
    after: int | str | None = None


@frozen
class DevicePair:
    """A device, and its index in each plan.

    Attributes:
        name: name in the second plan if the device is in it, else in the first.
        before: index in the first plan, left out if the device is not in it.
        after: index in the second plan, left out if the device is not in it.
    """

    name: str
    before: int | None = None
    after: int | None = None

    @property
    def change(self) -> Change | None:
        """Whether the device was added, removed or moved; None if it was not."""
        if self.before is None or self.after is None:
            return Change.ADDED if self.before is None else Change.REMOVED
        return Change.MOVED if self.before != self.after else None


@frozen
class DeviceChange:
    """A device that differs between the plans.

    Attributes:
        change: what happened to the device.
        device: the device.
        fields: values that differ, if the device is changed.
    """

    change: Change
    device: DevicePair
    fields: tuple[FieldChange, ...]


@frozen
class Share:
    """A device's share of an axis.

    Attributes:
        device: the device.
        before_elements: elements in the first plan.
        after_elements: elements in the second plan.
        delta_elements: elements gained, or lost if negative.
    """

    device: DevicePair
    before_elements: int
    after_elements: int
    delta_elements: int


@frozen(kw_only=True)
class SplitChange:
    """An axis that is cut differently in the two plans, in the layers where the difference is the same.

    Attributes:
        change: what happened to the split.
        axis: the axis that is cut.
        layers: inclusive ranges of layers, left out for axes outside the layers.
        fields: values other than the bounds that differ: size, unit, width, replicas.
        before_bounds: bounds in the first plan, empty if it lacks the axis in these layers.
        after_bounds: bounds in the second plan, empty if it lacks the axis in these layers.
        shares: share of every device that holds a part in either plan.
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
    """The bytes of one bucket in both plans.

    Attributes:
        bucket: the bucket.
        before_bytes: bytes in the first plan.
        after_bytes: bytes in the second plan.
        delta_bytes: bytes gained, or lost if negative.
    """

    bucket: Bucket
    before_bytes: int
    after_bytes: int
    delta_bytes: int


@frozen
class MemoryChange:
    """A device whose memory use differs between the plans.

    Attributes:
        device: the device.
        buckets: all buckets of the device; what is left to others only where one of the plans leaves something.
        before_reads_bytes: weights and cache that one token reads in the first plan; left out if the plan does not say.
        after_reads_bytes: the same in the second plan.
        delta_reads_bytes: bytes more that one token reads, or fewer if negative; left out if one of the plans does not
            say.
    """

    device: DevicePair
    buckets: tuple[BucketChange, ...]
    before_reads_bytes: int | None = None
    after_reads_bytes: int | None = None
    delta_reads_bytes: int | None = None


@frozen(kw_only=True)
class SpeedChange:
    """A pass of which the plans predict different times.

    Attributes:
        prefill: whether it is that of a prompt; else it is a decode step.
        rows: tokens of the pass.
        before_tokens_per_second: prediction of the first plan with a full cache; left out if it has none.
        after_tokens_per_second: the same of the second plan.
    """

    prefill: bool
    rows: int
    before_tokens_per_second: int | None = None
    after_tokens_per_second: int | None = None


@document("plan-diff")
@frozen
class PlanDiff:
    """The changes from one plan to another; false if there are none.

    Attributes:
        summary: one line for humans.
        reasons: why the plans differ.
        fields: values of the format, the model and the request that differ.
        chosen: the strategies, if they differ because ``auto`` chose another; left out if they do not.
        devices: devices that differ between the plans.
        splits: splits that differ between the plans.
        split_count: number of splits compared, equal ones included.
        memory: memory of the devices where it differs.
        total: change of every bucket, summed over all devices.
        speed: passes of which the plans predict different times.
        unpredicted: why the plans predict no times, or one of them; left out if both do, if the plans are equal, or if
            neither was made by ``auto`` and all bandwidths are known.
    """

    summary: str
    reasons: tuple[Reason, ...]
    fields: tuple[FieldChange, ...]
    devices: tuple[DeviceChange, ...]
    splits: tuple[SplitChange, ...]
    split_count: int
    memory: tuple[MemoryChange, ...]
    total: tuple[BucketChange, ...]
    speed: tuple[SpeedChange, ...] = ()
    chosen: tuple[FieldChange, ...] = ()
    unpredicted: str = ""

    def __bool__(self) -> bool:
        return bool(self.reasons)


def diff(a: SplitPlan, b: SplitPlan) -> PlanDiff:
    """Compare two valid plans, which may be for different models and devices.

    Devices of the two plans are matched by equal descriptions, preferably at the same index; failing that, by name,
    then by index.

    Raises:
        RequestError: an argument is not a plan.
    """
    for one in (a, b):
        if not isinstance(one, SplitPlan):
            raise RequestError(f"diff takes two plans, this is {type(one).__name__}", "read a file with tpplan.load")
    pairs = tuple(_pairs(a.devices, b.devices))
    # What somebody asked for comes before the version of the format, which follows from that.
    fields = tuple(sorted(_field_changes(a, b, ""), key=lambda change: change.path == "format_version"))
    by_auto = all(asked_strategy(plan) == AUTO for plan in (a, b))
    chosen = tuple(change for change in fields if change.path == _STRATEGY) if by_auto else ()
    fields = tuple(change for change in fields if change not in chosen)
    devices = tuple(_device_changes(a, b, pairs))
    compared = [_split_change(axis, *cut, layers, pairs) for axis in Axis for cut, layers in _aligned(a, b, axis)]
    splits = tuple(change for change in compared if change)
    memory = tuple(_memory_changes(a, b, pairs))
    reasons = {_REASONS[change.path.partition(".")[0]] for change in fields} | ({Reason.DEVICES} if devices else set())
    speed = tuple(_speed_changes(a, b))
    if (splits or memory or chosen or a.speed != b.speed) and not reasons:
        reasons = {Reason.PLANNING}
    told = f"{len(splits)} of {len(compared)} splits change"
    return PlanDiff(
        summary=_summary(_inputs(fields), chosen, devices, told, memory) if reasons else "the plans are equal",
        reasons=tuple(reason for reason in Reason if reason in reasons),
        fields=fields,
        devices=devices,
        splits=splits,
        split_count=len(compared),
        memory=memory,
        total=tuple(_bucket_changes(a.memory, b.memory, _buckets(a, b))),
        speed=speed,
        chosen=chosen,
        unpredicted=_unpredicted(a, b) if reasons else "",
    )


_NOT_BY_AUTO = "no tokens/s, because it was not made with --strategy auto"


def _speed_changes(a: SplitPlan, b: SplitPlan) -> Iterator[SpeedChange]:
    """Yield the passes of which two plans predict different times."""
    before, after = ({(prefill, one.rows): one for prefill, one in _passes(plan.speed)} for plan in (a, b))
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) != after.get(key):
            rates = [side[key].full_tokens_per_second if key in side else None for side in (before, after)]
            yield SpeedChange(
                prefill=key[0], rows=key[1], before_tokens_per_second=rates[0], after_tokens_per_second=rates[1]
            )


def _unpredicted(a: SplitPlan, b: SplitPlan) -> str:
    """Return why two plans predict no times, or one of them; empty if both do, or neither was to do so."""
    found = {which: _why_unpredicted(plan) for which, plan in (("first", a), ("second", b)) if not plan.speed}
    if len(found) > 1 and len({*found.values()}) == 1:
        (why,) = {*found.values()}
        return f"both plans have {why}" if why != _NOT_BY_AUTO else ""
    return "; ".join(f"the {which} plan has {why}" for which, why in found.items())


def _why_unpredicted(plan: SplitPlan) -> str:
    """Return why a plan predicts no times."""
    unknown = {i: device.name for i, device in enumerate(plan.devices) if not bandwidth_of(device)}
    return bandwidths_unknown(unknown) if unknown else _NOT_BY_AUTO


def _passes(speed: Speed | None) -> Iterator[tuple[bool, Pass]]:
    if speed:
        yield from ((False, one) for one in speed.decode)
        yield from ((True, one) for one in speed.prefill)


#: Maximum number of devices that the summary names.
_TOLD = 3

_REASONS = {"format_version": Reason.FORMAT, "model": Reason.MODEL, "request": Reason.REQUEST}

#: What may differ of one model, in words.
_SAME_MODEL = {
    "model.name": "the model's name",
    "model.not_planned": "what is not planned",
    "model.assumed": "what is assumed",
    "model.weight_format": "what is told of the weights",
}

#: Keys by which devices of the two plans are matched, the most specific first.
_SAME: tuple[Callable[[int, Device], Hashable], ...] = (
    lambda index, device: (index, device),
    lambda _, device: device,
    lambda index, device: (index, device.name),
    lambda _, device: device.name,
    lambda index, _: index,
)


def _pairs(a: tuple[Device, ...], b: tuple[Device, ...]) -> Iterator[DevicePair]:
    """Yield each device of both plans once: in the second plan's order, then those that only the first plan has."""
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
    """Yield the values that differ between two objects of a class; of tuples only those that a text can tell."""
    for name in (field.name for field in attrs.fields(type(a))):
        before, after = getattr(a, name), getattr(b, name)
        if name == _SPEED:
            continue
        if name == _DRAFT:
            before, after = _comparable(before, after)
        if attrs.has(type(before)):
            yield from _field_changes(before, after, f"{path}{name}.")
        elif before != after and (name in _TEXTS or not isinstance(before, tuple)):
            yield FieldChange(path + name, *_TEXTS.get(name, _plain)(before, after))


def _comparable(before: Draft | None, after: Draft | None) -> tuple[Draft, Draft]:
    """Return what drafts in two plans, on as many devices where each has all of it; without a name for nothing."""
    if before and after and not before.split | after.split:
        before = before.on(len(after.room_bytes))
    return before or _NO_DRAFT, after or _NO_DRAFT


def _plain(*values: int | str) -> Iterator[int | str]:
    """Yield values as documents have them: a flag as a text."""
    yield from (str(value).lower() if isinstance(value, bool) else value for value in values)


def _known(*values: int) -> Iterator[int | None]:
    """Yield values that plans have as 0 where they are not known."""
    yield from (value or None for value in values)


def _parts(*sides: Iterable[NotPlanned]) -> Iterator[str]:
    """Yield what is not planned, to the byte: rounded sizes may look alike."""
    for parts in sides:
        yield ", ".join(f"{part.text} ({part.bytes} bytes)" if part.bytes else part.text for part in parts)


#: What ``auto`` chooses.
_STRATEGY = "request.strategy"

#: A prediction is compared by itself.
_SPEED = "speed"

#: What drafts, which a plan may not have.
_DRAFT, _NO_DRAFT = "draft", Draft("", ())

#: How tuples are told that are values of the model or the request, and values of devices that may not be known.
_TEXTS: dict[str, Callable[..., Iterable[Any]]] = {
    "not_planned": _parts,
    "reserve": reserves_told,
    "room_bytes": rooms_told,
    **dict.fromkeys(("bandwidth_bytes_per_second", *MEASURED), _known),
}


def _device_changes(a: SplitPlan, b: SplitPlan, pairs: tuple[DevicePair, ...]) -> Iterator[DeviceChange]:
    """Yield the devices that differ between the plans."""
    for pair in pairs:
        fields: tuple[FieldChange, ...] = ()
        if pair.before is not None and pair.after is not None:
            fields = tuple(_field_changes(a.devices[pair.before], b.devices[pair.after], ""))
        if change := Change.CHANGED if fields else pair.change:
            yield DeviceChange(change, pair, fields)


def _aligned(a: SplitPlan, b: SplitPlan, axis: Axis) -> Iterator[tuple[tuple[Split | None, Split | None], str]]:
    """Yield pairs of an axis's splits in both plans, None where missing, with the layers in which they coincide."""
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
    """Return the difference between two cuts of an axis, None if there is none."""
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
    """Return a device's share of an axis before and after, None if both are empty."""
    old, new = _elements(before, pair.before), _elements(after, pair.after)
    return Share(pair, old, new, new - old) if old or new else None


def _elements(split: Split | None, device: int | None) -> int:
    """Return how many elements of an axis a device holds, 0 if the split or the device is missing."""
    return split.bounds[device + 1] - split.bounds[device] if split and device is not None else 0


def _memory_changes(a: SplitPlan, b: SplitPlan, pairs: tuple[DevicePair, ...]) -> Iterator[MemoryChange]:
    """Yield the devices whose memory use differs between the plans."""
    shown, say = _buckets(a, b), [any(entry.reads_bytes for entry in plan.memory) for plan in (a, b)]
    for pair in pairs:
        before = () if pair.before is None else (a.memory[pair.before],)
        after = () if pair.after is None else (b.memory[pair.after],)
        buckets = tuple(_bucket_changes(before, after, shown))
        reads = [sum(entry.reads_bytes for entry in entries) for entries in (before, after)]
        old, new = (size if says else None for size, says in zip(reads, say, strict=True))
        delta = reads[1] - reads[0] if all(say) else None
        if delta or any(bucket.delta_bytes for bucket in buckets):
            yield MemoryChange(pair, buckets, old, new, delta)


def _buckets(a: SplitPlan, b: SplitPlan) -> tuple[Bucket, ...]:
    """Return the buckets of both plans."""
    entries = (*a.memory, *b.memory)
    empty = {bucket for bucket in _LEFT if not any(getattr(entry, f"{bucket}_bytes") for entry in entries)}
    return tuple(bucket for bucket in Bucket if bucket not in empty)


def _bucket_changes(
    before: tuple[DeviceMemory, ...], after: tuple[DeviceMemory, ...], buckets: tuple[Bucket, ...]
) -> Iterator[BucketChange]:
    """Yield the change of every bucket, summed over devices."""
    for bucket in buckets:
        old, new = (sum(getattr(entry, f"{bucket}_bytes") for entry in entries) for entries in (before, after))
        yield BucketChange(bucket, old, new, new - old)


def _inputs(fields: tuple[FieldChange, ...]) -> list[str]:
    """Return which inputs differ, in words; a model that only has another name or other files is the same model."""
    paths = [change.path for change in fields]
    words = {"model.": "the model", "request.": "the request"}
    if {path for path in paths if path.startswith("model.")} <= _SAME_MODEL.keys():
        del words["model."]
        words |= _SAME_MODEL
    words["format_version"] = "the format"
    return [text for start, text in words.items() if any(path.startswith(start) for path in paths)]


def _summary(
    inputs: list[str],
    chosen: tuple[FieldChange, ...],
    devices: tuple[DeviceChange, ...],
    splits: str,
    memory: tuple[MemoryChange, ...],
) -> str:
    """Return a one-line summary of the most important changes."""
    kinds = [device.change for device in devices]
    moves = sorted(memory, key=lambda change: (-abs(_largest(change).delta_bytes), -abs(change.delta_reads_bytes or 0)))
    moves = [change for change in moves if _largest(change).delta_bytes or change.delta_reads_bytes]
    told = [_told(change) for change in moves[:_TOLD]]
    if len(moves) > _TOLD:
        told.append(f"and {len(moves) - _TOLD} more")
    parts = (
        f"{' and '.join(inputs)} {'differ' if len(inputs) > 1 else 'differs'}" if inputs else "",
        *(f"auto chose {change.after} instead of {change.before}" for change in chosen),
        splits,
        ", ".join(_devices(kinds.count(kind), kind) for kind in Change if kind in kinds),
        ", ".join(told),
    )
    return "; ".join(part for part in parts if part)


def _devices(count: int, what: str) -> str:
    """Format a count of devices: ``1 device removed``, ``2 devices changed``."""
    return f"{count} {'device' if count == 1 else 'devices'} {what}"


def _largest(change: MemoryChange) -> BucketChange:
    """Return a device's bucket that changes most, of those that the model takes."""
    used = [bucket for bucket in change.buckets if bucket.bucket not in {*_LEFT, Bucket.FREE}]
    return max(used, key=lambda bucket: abs(bucket.delta_bytes))


def _told(change: MemoryChange) -> str:
    """Return what memory a device gains or loses, in words, or the change in bytes read per token if that is all."""
    device, bucket, reads = change.device, _largest(change), change.delta_reads_bytes or 0
    where = f"device {device.after}" if device.after is not None else f"removed device {device.before}"
    if not bucket.delta_bytes:
        return f"{where} {device.name} reads {format_bytes(abs(reads))} {'more' if reads > 0 else 'less'} per token"
    verb = "gains" if bucket.delta_bytes > 0 else "loses"
    return f"{where} {device.name} {verb} {format_bytes(abs(bucket.delta_bytes))} of {bucket.bucket}"
