"""The axes of a model that are split over devices, and the integer arithmetic of cutting them."""

from __future__ import annotations

from enum import StrEnum
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Axis(StrEnum):
    """A dimension of a model that is split over devices.

    Attributes:
        KV_HEADS: key/value heads.
        Q_HEADS: query heads, which follow the key/value heads.
        INTERMEDIATE: the intermediate size of dense MLPs.
        VOCAB: the vocabulary.
        RESIDUAL: the residual stream, as wide as the hidden size.
        EXPERT_INTERMEDIATE: the intermediate size of each expert.
        SHARED_INTERMEDIATE: the intermediate size of the shared experts.
        LINEAR_HEADS: key heads of linear attention, with the value heads that belong to each.
    """

    KV_HEADS = "kv_heads"
    Q_HEADS = "q_heads"
    INTERMEDIATE = "intermediate"
    VOCAB = "vocab"
    RESIDUAL = "residual"
    EXPERT_INTERMEDIATE = "expert_intermediate"
    SHARED_INTERMEDIATE = "shared_intermediate"
    LINEAR_HEADS = "linear_heads"


#: Default units: elements that a cut may not separate, before a model's sizes and weight format are considered
#: (ExLlamaV2, ``TPContext.define_split``, which has no experts; these are narrow and so have finer units. Nor has it
#: linear attention, whose heads are like KV heads).
DEFAULT_UNIT = {
    Axis.KV_HEADS: 1,
    Axis.Q_HEADS: 1,
    Axis.INTERMEDIATE: 128,
    Axis.EXPERT_INTERMEDIATE: 32,
    Axis.SHARED_INTERMEDIATE: 32,
    Axis.LINEAR_HEADS: 1,
    Axis.VOCAB: 32,
    Axis.RESIDUAL: 32,
}

#: Fewest units of an axis on a device that holds any (same source).
MINIMUM_UNITS = {
    Axis.KV_HEADS: 1,
    Axis.Q_HEADS: 1,
    Axis.INTERMEDIATE: 2,
    Axis.EXPERT_INTERMEDIATE: 1,
    Axis.SHARED_INTERMEDIATE: 1,
    Axis.LINEAR_HEADS: 1,
    Axis.VOCAB: 16,
    Axis.RESIDUAL: 8,
}

#: Most layers in a config or a plan; more are a mistake or an attack.
MAX_LAYERS = 10_000


@frozen
class Slice:
    """One device's part of an axis: elements ``start`` (included) to ``end`` (excluded).

    Attributes:
        device: index into the plan's device list.
        start: first element.
        end: one past the last element.
    """

    device: int
    start: int
    end: int


def unit_count(size: int, unit: int) -> int:
    """Return how many units cover ``size`` elements; the last one may be ragged."""
    return -(-size // unit)


def minimum_units(axis: Axis, size: int, unit: int) -> int:
    """Return the fewest units of ``axis`` that a device may hold if it holds any."""
    return min(MINIMUM_UNITS[axis], unit_count(size, unit))


def bounds_of(counts: Iterable[int], unit: int, size: int) -> tuple[int, ...]:
    """Turn units per device into bounds: ``[3, 3, 2]`` of unit 1 and size 8 is ``(0, 3, 6, 8)``.

    Only the last unit of the axis may be shorter.
    """
    return (0, *(min(units * unit, size) for units in accumulate(counts)))


def slices_of(bounds: Sequence[int]) -> tuple[Slice, ...]:
    """Return the non-empty slices, in device order."""
    return tuple(Slice(device, a, b) for device, (a, b) in enumerate(pairwise(bounds)) if b > a)


def queries_per_key(part: Slice, replicas: int, group: int) -> list[int]:
    """Return how many of a device's query heads read each of its KV heads, which it has once if it has replicas.

    Its first and its last KV head may have fewer replicas there.

    Args:
        part: the device's slice of the (replicated) KV heads.
        replicas: number of copies of each KV head.
        group: query heads of each copy.
    """
    heads = range(part.start // replicas, unit_count(part.end, replicas))
    counts = [min(part.end, (head + 1) * replicas) - max(part.start, head * replicas) for head in heads]
    return [group * count for count in counts]


def power_of_two_unit(size: int, largest: int) -> int:
    """Return the largest power of two up to ``largest`` that divides ``size``."""
    return min(size & -size, largest)


def format_layers(layers: Iterable[int]) -> str:
    """Format layer numbers as inclusive ranges: ``[0, 1, 2, 5]`` is ``"0-2,5"``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_layers(text: str) -> frozenset[int]:
    """Parse inclusive ranges of layers: ``"0-2,5"`` is ``{0, 1, 2, 5}``.

    Raises:
        ValueError: the text is not what :func:`format_layers` writes for these layers.
    """
    layers: set[int] = set()
    previous = -2
    for run in text.split(","):
        first, _, last = run.partition("-")
        start, end = int(first), int(last or first)
        shortest = f"{start}-{end}" if start < end else str(start)
        if run != shortest or start <= previous + 1 or end >= MAX_LAYERS:
            raise ValueError(text)
        layers.update(range(start, end + 1))
        previous = end
    return frozenset(layers)
