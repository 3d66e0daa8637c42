"""The rules that a plan's splits obey: where they cut, which layers they are for, and how they go together."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from tpplan.core.axes import MAX_LAYERS, Axis, minimum_units, parse_layers, unit_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.core.plan import SplitPlan

    #: Path of a value in the plan, and what is wrong with it.
    Finding = tuple[str, str]

#: No model comes near: every layer cut in its own way is seven splits a layer.
MOST_SPLITS = 4096

_OUTSIDE = frozenset({Axis.VOCAB, Axis.RESIDUAL})
_AXIS_ORDER = {axis: i for i, axis in enumerate(Axis)}


def bounds_length(plan: SplitPlan) -> Iterator[Finding]:
    """Bounds have one number more than there are devices."""
    for i, split in enumerate(plan.splits):
        if plan.devices and len(split.bounds) != len(plan.devices) + 1:
            expected = f"expected {len(plan.devices) + 1} for {len(plan.devices)} devices"
            yield f"splits[{i}].bounds", f"{split.axis} has {len(split.bounds)} numbers, {expected}"


def bounds_start(plan: SplitPlan) -> Iterator[Finding]:
    """Bounds start at 0."""
    for i, split in enumerate(plan.splits):
        if split.bounds and split.bounds[0] != 0:
            yield f"splits[{i}].bounds", f"{split.axis} starts at {split.bounds[0]} on device 0, expected 0"


def bounds_end(plan: SplitPlan) -> Iterator[Finding]:
    """Bounds end at the size of the axis."""
    for i, split in enumerate(plan.splits):
        if split.bounds and split.bounds[-1] != split.size:
            end = f"{split.axis} ends at {split.bounds[-1]} on the last device"
            yield f"splits[{i}].bounds", f"{end}, expected {split.size}"


def bounds_ascend(plan: SplitPlan) -> Iterator[Finding]:
    """Bounds never descend."""
    for i, split in enumerate(plan.splits):
        for j, (a, b) in enumerate(pairwise(split.bounds)):
            if b < a:
                yield f"splits[{i}].bounds[{j + 1}]", f"{split.axis} of device {j} starts at {a}, beyond its end {b}"


def whole_units(plan: SplitPlan) -> Iterator[Finding]:
    """Every cut falls between two units; only the end of the axis may cut one short."""
    for i, split in enumerate(plan.splits):
        for j, cut in enumerate(split.bounds):
            if split.unit > 0 and cut % split.unit and cut != split.size and 0 < j < len(split.bounds) - 1:
                between = f"{split.axis} is cut at {cut}, between devices {j - 1} and {j}"
                yield f"splits[{i}].bounds[{j}]", f"{between}: no multiple of the unit {split.unit}"


def minimum_share(plan: SplitPlan) -> Iterator[Finding]:
    """A device that holds a slice of an axis holds at least the axis's minimum of units."""
    for i, split in enumerate(plan.splits):
        if min(split.size, split.unit) < 1:
            continue
        least = minimum_units(split.axis, split.size, split.unit)
        for device, (a, b) in enumerate(pairwise(split.bounds)):
            units = unit_count(b - a, split.unit)
            if 0 < units < least:
                of = f"{units} of the {least} units of {split.unit} that are the least"
                yield f"splits[{i}].bounds", f"device {device} holds {b - a} elements of {split.axis}, {of}"


def layer_ranges(plan: SplitPlan) -> Iterator[Finding]:
    """Layers are ascending inclusive ranges, written the shortest way, within the model."""
    if plan.model.layers > MAX_LAYERS:
        yield "model.layers", f"is {plan.model.layers}, the most is {MAX_LAYERS}"
    for i, split in enumerate(plan.splits):
        layers = _layers(split.layers)
        if layers is None:
            shown = f"{split.layers[:40]!r} is not a list of layers"
            yield f"splits[{i}].layers", f"{shown} such as 0-31 or 0,3-5, ascending, each run as one range"
        elif layers and 0 < plan.model.layers <= max(layers):
            yield f"splits[{i}].layers", f"reaches layer {max(layers)}, the model has 0-{plan.model.layers - 1}"


def layers_where_due(plan: SplitPlan) -> Iterator[Finding]:
    """The axes inside the layers name their layers; vocab and residual have none."""
    for i, split in enumerate(plan.splits):
        if split.layers and split.axis in _OUTSIDE:
            yield f"splits[{i}].layers", f"is {split.layers[:40]!r}, but {split.axis} is outside the layers"
        elif not split.layers and split.axis not in _OUTSIDE:
            yield f"splits[{i}].layers", f"is missing, {split.axis} is split layer by layer"


def layers_once(plan: SplitPlan) -> Iterator[Finding]:
    """An axis is split once in each layer."""
    taken: dict[Axis, dict[int, int]] = {}
    for i, split in enumerate(plan.splits):
        seen = taken.setdefault(split.axis, {})
        layers = _layers(split.layers) or frozenset()
        twice = min((n for n in layers if n in seen), default=None)
        if twice is None:
            seen.update(dict.fromkeys(layers, i))
        else:
            yield f"splits[{i}].layers", f"splits {split.axis} of layer {twice} again, after splits[{seen[twice]}]"


def alike_together(plan: SplitPlan) -> Iterator[Finding]:
    """Layers whose axis is split alike share one entry; KV heads that serve other numbers of query heads do not."""
    queries = {n: s.size for s in plan.splits if s.axis == Axis.Q_HEADS for n in _layers(s.layers) or ()}
    seen: dict[tuple[object, ...], int] = {}
    for i, s in enumerate(plan.splits):
        served = queries.get(min(_layers(s.layers) or (-1,))) if s.axis == Axis.KV_HEADS else None
        first = seen.setdefault((s.axis, s.size, s.unit, s.width, s.replicas, s.bounds, served), i)
        if first != i and s.axis not in _OUTSIDE:
            same = f"the same cut of {s.axis} as in splits[{first}]"
            yield f"splits[{i}]", f"is {same}: layers {plan.splits[first].layers} and {s.layers} belong in one entry"


def outer_axes_once(plan: SplitPlan) -> Iterator[Finding]:
    """Vocab and residual are split exactly once."""
    for axis in (Axis.VOCAB, Axis.RESIDUAL):
        count = sum(split.axis == axis for split in plan.splits)
        if count != 1:
            yield "splits", f"has {count} entries for {axis}, expected 1"


def split_order(plan: SplitPlan) -> Iterator[Finding]:
    """Splits are in the order of the axes, then of their first layer."""
    keys = [(_AXIS_ORDER[s.axis], min(_layers(s.layers) or (0,))) for s in plan.splits]
    for i, (a, b) in enumerate(pairwise(keys)):
        if b < a:
            one, other = (f"{s.axis} {s.layers[:40]}".rstrip() for s in plan.splits[i : i + 2])
            yield f"splits[{i + 1}]", f"{other} comes after {one}; the order is {', '.join(Axis)}, then by layer"


def query_follows_kv(plan: SplitPlan) -> Iterator[Finding]:
    """Query heads are cut where their KV heads are, times the group size."""
    of_layer = {n: i for i, s in enumerate(plan.splits) if s.axis == Axis.KV_HEADS for n in _layers(s.layers) or ()}
    alone = set(of_layer)
    for i, q in enumerate(plan.splits):
        layers = (_layers(q.layers) or frozenset()) if q.axis == Axis.Q_HEADS else frozenset()
        alone -= layers
        if missing := layers - of_layer.keys():
            yield f"splits[{i}].layers", f"splits q_heads of layer {min(missing)}, which has no kv_heads"
        for j in sorted({of_layer[n] for n in layers & of_layer.keys()}):
            kv = plan.splits[j]
            if min(kv.size, q.size) < 1:
                continue
            group, rest = divmod(q.size, kv.size)
            if rest:
                yield f"splits[{i}].size", f"{q.size} query heads are no multiple of {kv.size} KV heads in splits[{j}]"
            elif q.bounds != (expected := tuple(group * bound for bound in kv.bounds)):
                numbers = f"is {_row(q.bounds)}, expected {_row(expected)}"
                yield f"splits[{i}].bounds", f"{numbers}: {group} query heads for each KV head of splits[{j}]"
    if alone:
        yield "splits", f"has kv_heads but no q_heads for layer {min(alone)}"


def replicas_where_asked(plan: SplitPlan) -> Iterator[Finding]:
    """Only KV heads are repeated, only where the request says so, and each equally often."""
    for i, split in enumerate(plan.splits):
        if split.replicas <= 1:
            continue
        if split.axis != Axis.KV_HEADS:
            yield f"splits[{i}].replicas", f"is {split.replicas}, but {split.axis} is never repeated"
        elif plan.request.kv != "replicate":
            yield f"splits[{i}].replicas", f"is {split.replicas}, but the request's kv is {plan.request.kv!r}"
        elif split.size % split.replicas:
            yield f"splits[{i}].replicas", f"{split.replicas} does not divide the {split.size} heads"


def few_splits(plan: SplitPlan) -> Iterator[Finding]:
    """A plan has at most 4096 splits."""
    if len(plan.splits) > MOST_SPLITS:
        yield "splits", f"has {len(plan.splits)} entries, the most is {MOST_SPLITS}"


@lru_cache(maxsize=256)
def _layers(text: str) -> frozenset[int] | None:
    """Return the layers of a text, none for an empty one, None for one that is not well written."""
    try:
        return parse_layers(text) if text else frozenset()
    except ValueError:
        return None


def _row(bounds: tuple[int, ...]) -> str:
    """Write bounds for a message, shortened if there are very many."""
    text = ", ".join(map(str, bounds[:20]))
    return f"[{text}, …]" if len(bounds) > len(bounds[:20]) else f"[{text}]"
