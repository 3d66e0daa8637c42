"""What exporters ask of a plan: the devices that it uses, what they hold, and how axes are cut among them."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.core.axes import Axis
from tpplan.core.model import GGUF
from tpplan.core.plan import CACHE_KINDS, SplitPlan
from tpplan.core.sizes import format_apart, format_bytes, listed
from tpplan.hardware import catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.core.device import Device
    from tpplan.core.plan import DeviceMemory, PlanModel, Request, Split

#: The most devices whose bytes a sentence lists.
_LISTED = 4

MIB = 2**20
GIB = 2**30

#: Bytes of an element of the activations, which embeddings mostly have too.
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: What an axis counts, in words.
AXIS_WORDS = {
    Axis.KV_HEADS: "KV heads",
    Axis.Q_HEADS: "query heads",
    Axis.INTERMEDIATE: "intermediate columns",
    Axis.VOCAB: "rows of the vocabulary",
    Axis.RESIDUAL: "residual columns",
    Axis.EXPERT_INTERMEDIATE: "intermediate columns of each expert",
    Axis.SHARED_INTERMEDIATE: "intermediate columns of the shared experts",
    Axis.LINEAR_HEADS: "key heads of linear attention",
}


@frozen
class Facts:
    """A plan without the devices that it does not use; lists have an entry for each other device.

    Attributes:
        plan: the plan.
    """

    plan: SplitPlan

    @property
    def request(self) -> Request:
        """What the plan answers."""
        return self.plan.request

    @property
    def model(self) -> PlanModel:
        """The model that the plan is for."""
        return self.plan.model

    @property
    def is_gguf(self) -> bool:
        """Whether the plan's weights are in GGUF files."""
        return self.model.weight_format.startswith(GGUF)

    @property
    def splits(self) -> tuple[Split, ...]:
        """How axes are cut, on all devices."""
        return self.plan.splits

    @cached_property
    def used(self) -> tuple[int, ...]:
        """The plan's indices of the devices."""
        return tuple(entry.device for entry in self.plan.memory if entry.used_bytes)

    @property
    def count(self) -> int:
        """How many devices there are."""
        return len(self.used)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices."""
        return tuple(self.plan.devices[i] for i in self.used)

    @property
    def memory(self) -> tuple[DeviceMemory, ...]:
        """Their ledgers."""
        return tuple(self.plan.memory[i] for i in self.used)

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """Weights and cache of each device."""
        return tuple(entry.weights_bytes + entry.cache_bytes for entry in self.memory)

    @property
    def ratio(self) -> tuple[int, ...]:
        """Weights and cache of each device in MiB, rounded; all 1 where these are equal."""
        held = [max(1, (size + MIB // 2) // MIB) for size in self.held_bytes]
        return tuple(held) if len({*held}) > 1 else (1,) * self.count

    def cache_bytes(self, kind: int) -> tuple[int, ...]:
        """Return the cache of each device in bytes, if elements were of another kind; rounded up.

        Args:
            kind: sixteenths of a byte for each element.
        """
        planned = CACHE_KINDS[self.request.cache.kind]
        return tuple(-(-entry.cache_bytes * kind // planned) for entry in self.memory)

    @property
    def room_bytes(self) -> tuple[int, ...]:
        """What each device's budget leaves for weights and cache."""
        return tuple(entry.weights_bytes + entry.cache_bytes + entry.free_bytes for entry in self.memory)

    @property
    def whole_bytes(self) -> tuple[int, ...]:
        """All memory that programs are handed out of each device: what the catalogue says, else the budget."""
        return tuple(map(whole_bytes, self.devices))

    @property
    def outside_bytes(self) -> int:
        """Embedding and output matrix, counted as two matrices in the dtype of the activations."""
        vocab, hidden = (sum(split.size for split in self.cuts(axis)) for axis in (Axis.VOCAB, Axis.RESIDUAL))
        return 2 * vocab * hidden * _ELEMENT_BYTES[self.model.dtype]

    def cuts(self, axis: Axis) -> tuple[Split, ...]:
        """Return all splits of an axis, none if the model does not have it."""
        return tuple(split for split in self.splits if split.axis == axis)

    def parts(self, split: Split) -> tuple[int, ...]:
        """Return each device's elements of an axis."""
        sizes = [end - start for start, end in pairwise(split.bounds)]
        return tuple(sizes[i] for i in self.used)

    def kv_heads(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return for each way that KV heads are cut how many the model has, and each device's, copies counted each."""
        return tuple((split.size // split.replicas, self.parts(split)) for split in self.cuts(Axis.KV_HEADS))

    def overfull(self, held: Sequence[int], cache: str) -> Iterator[str]:
        """Yield the devices whose budget weights and cache exceed, a clause each.

        Args:
            held: bytes of weights and cache on each device.
            cache: what kind of cache that is with.
        """
        for i, (size, room) in enumerate(zip(held, self.room_bytes, strict=True)):
            if size > room:
                sizes = " of ".join(format_apart(size, room))
                yield f"{self.name(i)} would hold {sizes} that its budget leaves, with the cache as {cache}"

    def name(self, position: int) -> str:
        """Return what to call a device, by its position among those in use."""
        return f"device {self.used[position]} ({self.devices[position].name})"


def whole_bytes(device: Device) -> int:
    """Return all memory that programs are handed out of a device: what the catalogue says, else its budget."""
    known = [gpu.memory_bytes for gpu in catalogue.lookup(device.name) if gpu.memory_bytes >= device.budget_bytes]
    return min(known, default=device.budget_bytes)


def round_up(multiple: int, number: int) -> int:
    """Return the least multiple that is no less than a number."""
    return -(-number // multiple) * multiple


def gibibytes(size: int, places: int = 2) -> str:
    """Write bytes in GiB with so many decimals, rounded up."""
    scaled = -(-size * 10**places // GIB)
    return f"{scaled // 10**places}.{scaled % 10**places:0{places}}"


def share(part: int, whole: int) -> str:
    """Write a part of a whole with three decimals, rounded up: ``0.873``."""
    ppt = -(-part * 1000 // whole)
    return f"{ppt // 1000}.{ppt % 1000:03}"


def apart(*sizes: int) -> str:
    """Write sizes as ``3.01 GiB instead of 2.82 GiB``."""
    return " instead of ".join(format_apart(*sizes))


def bytes_each(sizes: Sequence[int]) -> str:
    """Write the bytes of each device, once if they are equal, and the least and the most of many."""
    texts = [format_bytes(size) for size in sizes]
    if len({*texts}) == 1:
        return f"{texts[0]} on each device"
    return listed(texts) if len(texts) <= _LISTED else f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
