"""The difference between two plans, as records: changes in the inputs, the cuts, and the bytes per device."""

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
    FREE = "free"


@frozen
class FieldChange:
    """One value that differs.

    Attributes:
        path: path of the value, such as ``request.cache.tokens``, or its name within a device or a split.
        before: value in the first plan.
        after: value in the second plan.
    """

    path: str
    before: int | str
    after: int | str


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
        buckets: all buckets of the device; what is reserved only where one of the plans reserves something.
        before_reads_bytes: weights and cache that one token reads in the first plan; 0 if the plan does not say.
        after_reads_bytes: the same in the second plan.
        delta_reads_bytes: bytes more that one token reads, or fewer if negative.
    """

    device: DevicePair
    buckets: tuple[BucketChange, ...]
    before_reads_bytes: int
    after_reads_bytes: int
    delta_reads_bytes: int


@frozen
class PlanDiff:
    """The changes from one plan to another; false if there are none.

    Attributes:
        summary: one line for humans.
        reasons: why the plans differ.
        fields: values of the format, the model and the request that differ.
        devices: devices that differ between the plans.
        splits: splits that differ between the plans.
        split_count: number of splits compared, equal ones included.
        memory: memory of the devices where it differs.
        total: change of every bucket, summed over all devices.
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
