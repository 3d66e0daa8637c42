"""ExLlamaV2's own arithmetic (``TPContext.define_split`` with ``integer_split``), reproduced.

It cuts KV heads by the budgets in MiB, takes the cache and the attention weights off in whole MiB, and cuts everything
else by what is left. It looks at no budget again. The arithmetic is in floating point, as the original's is: where two
remainders are equal, its rounding decides.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING

from tpplan.core.axes import Axis, minimum_units, parse_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.core.device import Device
    from tpplan.core.model import ModelSpec
    from tpplan.planner.costs import Demands

_MIB = 2**20


def integer_split(count: int, shares: Sequence[float], minimum: int = 0) -> list[int]:
    """Cut ``count`` in proportion, by largest remainder; parts below the minimum go to the smallest that are left.

    Raises:
        ZeroDivisionError: all shares are 0.
    """
    total = sum(shares)
    exact = [count * share / total for share in shares]
    parts = [int(part) for part in exact]
    remainders = [(whole - part, i) for i, (part, whole) in enumerate(zip(exact, parts, strict=True))]
    heapify(remainders)
    for _ in range(count - sum(parts)):
        remainder, first = remainders[0]
        parts[first] += 1
        heapreplace(remainders, (remainder + 1, first))
    homeless = sum(part for part in parts if part < minimum)
    parts = [part if part >= minimum else 0 for part in parts]
    smallest = [(part, i) for i, part in enumerate(parts) if part] or [(0, len(parts) - 1)]
    heapify(smallest)
    for _ in range(homeless):
        part, i = smallest[0]
        parts[i] += 1
        heapreplace(smallest, (part + 1, i))
    return parts


def left_after_attention(
    shares: Sequence[float], kv: Sequence[int], cache_bytes: int, attention_bytes: Sequence[int]
) -> list[float]:
    """Return what is left of ``shares`` (MiB) after the cache and each layer's attention weights, in whole MiB each."""
    heads = sum(kv)
    sizes = Counter((cache_bytes, *attention_bytes))
    taken = {part: sum(int(size * (part / heads) / _MIB) * n for size, n in sizes.items()) for part in {*kv}}
    return [max(0, have - taken[part]) for have, part in zip(shares, kv, strict=True)]


def exllamav2_counts(
    model: ModelSpec, wanted: Demands, devices: Sequence[Device]
) -> tuple[tuple[int, ...], ...] | None:
    """Return units of every axis on each device, or None where the original divides by zero: attention fills them all.

    Axes that the original does not know (experts) are cut as the intermediate size is.
    """
    budgets = [device.budget_bytes / _MIB for device in devices]
    left, rows = budgets, {}
    for i, demand in enumerate(wanted.axes):
        if demand.axis is Axis.KV_HEADS:
            rows[i] = integer_split(demand.units, budgets)
            heads = demand.head.cache * demand.size // demand.replicas
            cache = demand.split.cache + demand.kept.cache + heads
            left = left_after_attention(left, rows[i], cache, [*_attention_bytes(model, demand.layers)])
    if not any(left):
        return None
    for i, demand in enumerate(wanted.axes):
        if demand.axis is not Axis.KV_HEADS:
            rows[i] = integer_split(demand.units, left, minimum_units(demand.axis, demand.size, demand.unit))
    return tuple(tuple(rows[i]) for i in sorted(rows))


def _attention_bytes(model: ModelSpec, layers: str) -> Iterator[int]:
    """Yield each layer's bytes of attention weights."""
    wanted = parse_layers(layers)
    for block in model.blocks:
        size = 0
        for parameter in block.parameters:
            axes = {parameter.home, *(segment.axis for dim in parameter.dims for segment in dim)}
            size += parameter.bytes if axes & {Axis.KV_HEADS, Axis.Q_HEADS} else 0
        yield from [size] * len(wanted & {*block.layers})
