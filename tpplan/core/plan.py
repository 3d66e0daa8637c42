"""The plan: how a model is split over devices, and the memory that each device needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from tpplan.core.axes import Axis, Slice, format_layers, parse_layers, slices_of
from tpplan.core.device import MEASURED, Device
from tpplan.core.model import NotPlanned
from tpplan.core.sizes import exact_bytes, format_bytes, listed
from tpplan.core.speed import Speed
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

#: The latest version of the format; a plan is written in the oldest one that has all of its keys.
FORMAT_VERSION = "1.4"
FIRST_VERSION = "1.0"
SCHEMA_URN = "urn:tpplan:split-plan:1"

LAYOUTS = ("reduce", "gather")
STRATEGIES = ("balanced", "latency", "exllamav2")
#: Asks the planner for the faster one of the first two; a plan has the one that it took.
AUTO = "auto"
KV_MODES = ("idle", "replicate")

#: Sixteenths of a byte per cached element (ExLlamaV2's cache classes: 16, 8, 8.5, 6.5 and 4.5 bits).
CACHE_KINDS = {"fp16": 32, "fp8": 16, "q8": 17, "q6": 13, "q4": 9}

#: Kinds of heads, which draft for a model by its hidden states; their names are a ``model_type`` of families.
HEADS = ("eagle", "eagle3", "peagle", "dflash", "medusa", "mlp_speculator")


@frozen
class Cache:
    """The key/value cache that a plan reserves memory for.

    Attributes:
        kind: ``fp16``, ``fp8``, ``q8``, ``q6`` or ``q4``.
        tokens: total tokens of all sequences; 0 for the model's maximum context for each sequence.
    """

    kind: str = "fp16"
    tokens: int = 0


@frozen
class Reserve:
    """Memory of a device that a plan leaves to something else, such as a vision tower.

    Attributes:
        bytes: bytes to leave.
        device: index of the device; -1 for every device that no other reserve names.
    """

    bytes: int
    device: int = -1

    @property
    def text(self) -> str:
        """The reserve as ``--reserve`` takes it: ``1GiB``, or ``1GiB@0`` for one device."""
        return exact_bytes(self.bytes) + (f"@{self.device}" if self.device >= 0 else "")


@frozen
class Draft:
    """What drafts beside a plan's model, a draft model or the model's own prediction layers, and the room left to it.

    Attributes:
        name: display name.
        room_bytes: its weights, cache and workspace on each device, without the overhead, which both models share.
        split: whether each device has a part of it, as a plan of its own says; else each has all of it.
        head: its kind, one of :data:`HEADS`, if it is a head; empty for a model that can run alone, and for prediction
            layers.
    """

    name: str
    room_bytes: tuple[int, ...]
    split: bool = False
    head: str = ""

    def on(self, count: int) -> Draft:
        """Return what is left to it on so many devices, if that is the same on each; else it is for its own devices."""
        return self if self.split else evolve(self, room_bytes=self.room_bytes[:1] * count)


def reserves_told(*sides: tuple[Reserve, ...]) -> tuple[str, ...]:
    """Return in words what each of several plans reserves, to the byte only where they would look alike."""
    return _apart([({each.device: each.bytes for each in side}, 0) for side in sides])


def rooms_told(*sides: tuple[int, ...]) -> tuple[str, ...]:
    """Return in words the room on each device in several plans, to the byte only where they would look alike."""
    return _apart([({i: size for i, size in enumerate(side) if size}, len(side)) for side in sides])


def _apart(sides: list[tuple[dict[int, int], int]]) -> tuple[str, ...]:
    texts = tuple(_told(*side, format_bytes) for side in sides)
    alike = len(set(texts)) < len({tuple(sizes.items()) for sizes, _ in sides})
    return tuple(_told(*side, lambda size: f"{size} bytes") for side in sides) if alike else texts


def _told(sizes: dict[int, int], count: int, told: Callable[[int], str]) -> str:
    """Return bytes by device in words, devices with the same together.

    Args:
        sizes: by device; -1 stands for every device that is not named.
        count: how many devices there are, if that is known, else 0.
        told: how to write bytes.
    """
    rest = "all others" if len(sizes) > 1 else "every device"
    places: dict[str, list[int]] = {}
    for device, size in sizes.items():
        places.setdefault(told(size), []).append(device)
    words = []
    for text, devices in places.items():
        named = [device for device in devices if device >= 0]
        where = "every device" if len(named) == count > 1 else devices_told(named) if named else ""
        words.append(f"{text} on {listed([*filter(None, [where]), *[rest] * (-1 in devices)])}")
    return ", ".join(words) or "nothing"


def devices_told(devices: Sequence[int]) -> str:
    """Return indices of devices in words: ``device 3``, ``devices 0 and 1``, ``devices 0-3 and 7``."""
    words: list[str] = []
    for run in format_layers(devices).split(","):
        first, _, last = run.partition("-")
        words += [first, last] if last and int(last) == int(first) + 1 else [run]
    return f"device{'s' * (len(devices) > 1)} {listed(words)}"


@frozen
class Request:
    """A request to the planner; planning again from it gives the same plan.

    Attributes:
        layout: ``reduce`` or ``gather``.
        strategy: ``balanced``, ``latency`` or ``exllamav2``.
        cache: kind and tokens of the cache, with the default of 0 tokens resolved.
        batch: number of sequences that share the cache.
        max_rows: tokens in the largest forward pass (batch × query length).
        kv: use of devices in excess of the KV heads: ``idle`` gives them no attention, ``replicate`` replicates heads.
        context: tokens of the longest sequence where sequences share the cache's tokens as a pool; 0 where each has an
            equal part of them.
        full_window: whether layers with a sliding window keep all tokens, as some servers do.
        beyond: whether a context longer than the model's is accepted.
        reserve: memory left to something else on the devices.
        draft: what drafts beside the model, and its room; left out for nothing.
        mtp: whether that is the model's own prediction layers.
        drafts_for: name of the model that this one drafts for, whose plan pays the overhead of the devices that both
            are on; empty if it drafts for none.
    """

    layout: str
    strategy: str
    cache: Cache
    batch: int
    max_rows: int
    kv: str
    context: int = 0
    full_window: bool = False
    beyond: bool = False
    reserve: tuple[Reserve, ...] = ()
    draft: Draft | None = None
    mtp: bool = False
    drafts_for: str = ""

    def reserved(self, device: int) -> int:
        """Return the bytes that the request leaves to something else on a device."""
        own = {reserve.device: reserve.bytes for reserve in self.reserve}
        return own.get(device, own.get(-1, 0))

    def room(self, device: int) -> int:
        """Return the bytes that the request leaves on a device to what drafts beside the model."""
        if self.draft is None:
            return 0
        room = self.draft.on(device + 1).room_bytes
        return room[device] if device < len(room) else 0

    def left(self, device: int) -> int:
        """Return the bytes that the request leaves on a device to all that is beside the model."""
        return self.reserved(device) + self.room(device)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.context or -(-self.cache.tokens // self.batch)


@frozen
class PlanModel:
    """The model that a plan is for.

    Attributes:
        name: display name.
        architecture: architecture name in the model's config.
        fingerprint: ``sha256:`` and the hash of the normalised ModelSpec.
        dtype: dtype of the activations: ``float32``, ``float16`` or ``bfloat16``.
        layers: number of layers.
        not_planned: parts of the model's files that the plan does not count.
        assumed: what is assumed of the weights because no file says, in words; empty if their bytes are exact.
        weight_format: how most weights are stored if that is in GGUF, such as ``GGUF Q4_K``; empty for other files.
    """

    name: str
    architecture: str
    fingerprint: str
    dtype: str
    layers: int
    not_planned: tuple[NotPlanned, ...] = ()
    assumed: str = ""
    weight_format: str = ""


@frozen(kw_only=True)
class Split:
    """How one axis is cut, in the layers that share the cut.

    Attributes:
        axis: the axis that is cut.
        layers: inclusive ranges of layers such as ``0-31`` or ``0,3-5``; empty for axes outside the layers.
        size: elements of the axis; every replica of a KV head counts.
        unit: elements that a cut may not separate; only the last unit of an axis may be shorter.
        width: tensor elements per element of the axis (the head size, the experts per token, of linear attention the
            larger of a key head and its value heads), else 1.
        replicas: number of copies of each KV head, else 1.
        bounds: cut points from 0 to ``size``, one more than there are devices.
    """

    axis: Axis
    layers: str = ""
    size: int
    unit: int
    width: int = 1
    replicas: int = 1
    bounds: tuple[int, ...]


@frozen
class DeviceMemory:
    """The memory ledger of one device, in bytes: buckets, what is left to others and what is free are its budget.

    Attributes:
        device: index of the device in the plan.
        weights_bytes: tensors and slices of tensors, exact.
        cache_bytes: key/value cache and the state of linear attention, exact.
        workspace_bytes: memory that the executor allocates, exact.
        overhead_bytes: CUDA context and libraries, a calibrated constant of the device; 0 on an idle device, and where
            the plan is that of a draft model, for the model's plan has it.
        free_bytes: remainder of the budget.
        reads_bytes: bytes of weights and cache that one token reads (of experts, only those it is routed to); given for
            the strategy ``latency``, which distributes these reads by bandwidth, 0 for others.
        reserved_bytes: bytes left to something else, as the request asks.
        draft_bytes: bytes left to what drafts beside the model, with the device's overhead where only that is on it.
    """

    device: int
    weights_bytes: int
    cache_bytes: int
    workspace_bytes: int
    overhead_bytes: int
    free_bytes: int
    reads_bytes: int = 0
    reserved_bytes: int = 0
    draft_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """Sum of the four buckets."""
        return self.weights_bytes + self.cache_bytes + self.workspace_bytes + self.overhead_bytes

    @property
    def left_bytes(self) -> int:
        """Sum of what is left to something else and to what drafts."""
        return self.reserved_bytes + self.draft_bytes


@frozen(kw_only=True)
class SplitPlan:
    """An immutable plan: which device holds which slice of every axis of a model.

    Attributes:
        format_version: version of the file format, see :func:`least_version`.
        model: the model that the plan is for.
        request: the request that the plan answers.
        devices: the devices, in the order that indices refer to.
        splits: one entry for each way that an axis is cut.
        memory: one ledger per device.
        speed: what the plan predicts of tpplan's decoder; None if it predicts nothing.
    """

    format_version: str = FIRST_VERSION
    model: PlanModel
    request: Request
    devices: tuple[Device, ...]
    splits: tuple[Split, ...]
    memory: tuple[DeviceMemory, ...]
    speed: Speed | None = None

    def split(self, axis: Axis | str, layer: int | None = None) -> Split:
        """Return the split of ``axis``; ``layer`` is needed only where layers differ.

        Raises:
            RequestError: the plan lacks the axis, or lacks it in that layer, or layers differ and none was given.
        """
        cuts = [s for s in self.splits if s.axis == axis]
        found = [s for s in cuts if layer is None or not s.layers or layer in parse_layers(s.layers)]
        if len(found) == 1:
            return found[0]
        where = "" if layer is None else f" in layer {layer}"
        if found:
            choices = " and ".join(f"layers {s.layers}" for s in found)
            raise RequestError(f"axis {axis} is split in {len(found)} ways: {choices}", "name a layer")
        known = ", ".join(dict.fromkeys(s.axis for s in self.splits))
        hint = f"layers {' and '.join(s.layers for s in cuts)} have it" if cuts else f"its axes are {known}"
        raise RequestError(f"the plan for {self.model.name} has no axis {axis}{where}", hint)

    def bounds(self, axis: Axis | str, layer: int | None = None) -> tuple[int, ...]:
        """Return the cut points of ``axis`` in elements, one more than devices; see :meth:`split` for errors."""
        return self.split(axis, layer).bounds

    def slices(self, axis: Axis | str, layer: int | None = None) -> tuple[Slice, ...]:
        """Return the slice of each device that holds a part of ``axis``; see :meth:`split` for errors."""
        return slices_of(self.bounds(axis, layer))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file, atomically; a file that already has the same bytes is not touched.

        Raises:
            TpplanError: the file cannot be written.
        """
        from tpplan.planfile.codec import save  # noqa: PLC0415 (the codec needs this module)

        save(self, path)


def least_version(plan: SplitPlan) -> str:
    """Return the oldest version of the format that has all keys of a plan."""
    model, request = plan.model, plan.request
    if request.draft or request.mtp or request.drafts_for:
        return "1.4"
    if model.weight_format:
        return "1.3"
    if plan.speed or any(getattr(device, key) for device in plan.devices for key in MEASURED):
        return "1.2"
    newer = (
        *(model.not_planned, model.assumed),
        *(request.context, request.full_window, request.beyond, request.reserve),
        *(entry.reserved_bytes for entry in plan.memory),
    )
    return "1.1" if any(newer) else FIRST_VERSION
