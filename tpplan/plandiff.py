"""The difference between two plans, as records: what changed of the inputs, the cuts, and the bytes per device."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from tpplan.axes import Axis


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
        before_reads_bytes: of weights and cache, what one token reads in the first plan; 0 if that does not state it.
        after_reads_bytes: in the second plan.
        delta_reads_bytes: read more, or less if negative.
    """

    device: DevicePair
    buckets: tuple[BucketChange, ...]
    before_reads_bytes: int
    after_reads_bytes: int
    delta_reads_bytes: int


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
