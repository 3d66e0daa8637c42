"""Hypothesis strategies for valid plans, shared by the tests."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import strategies as st

from tpplan.core.axes import Axis, bounds_of, format_layers, minimum_units, unit_count
from tpplan.core.device import Device
from tpplan.core.limits import DTYPES
from tpplan.core.plan import (
    CACHE_KINDS,
    KV_MODES,
    LAYOUTS,
    STRATEGIES,
    Cache,
    DeviceMemory,
    PlanModel,
    Request,
    Split,
    SplitPlan,
)

#: Names as people choose them, in any script, but nothing that a reviewer would not see, as Hangul fillers.
names = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "P", "S"), exclude_characters="\u115f\u1160\u3164\uffa0"),
    min_size=1,
    max_size=8,
)
_bytes = st.integers(0, 2**40)
_fingerprints = st.integers(0, 2**256 - 1).map(lambda number: f"sha256:{number:064x}")


@st.composite
def bounds(draw: st.DrawFn, axis: Axis, size: int, unit: int, devices: int) -> tuple[int, ...]:
    """Cut points of an axis that give every device none or its minimum."""
    least = minimum_units(axis, size, unit)
    left = unit_count(size, unit)
    counts = []
    for device in range(devices):
        if device == devices - 1:
            counts.append(left)
            continue
        allowed = [n for n in (0, left) if n == 0 or n >= least]
        if left >= 2 * least:
            allowed = [0, left, draw(st.integers(least, left - least))]
        counts.append(draw(st.sampled_from(allowed)))
        left -= counts[-1]
    return bounds_of(counts, unit, size)


@st.composite
def _per_layer(draw: st.DrawFn, devices: int, kv_mode: str) -> tuple[Split, ...]:
    """The splits of one layer, their layers still to be filled in."""
    splits = []
    if draw(st.booleans()):
        replicas = draw(st.sampled_from((1, 1, 2, 3))) if kv_mode == "replicate" else 1
        heads, group = draw(st.integers(1, 9)) * replicas, draw(st.integers(1, 4))
        width = draw(st.sampled_from((64, 128)))
        cut = draw(bounds(Axis.KV_HEADS, heads, 1, devices))
        splits += [
            Split(axis=Axis.KV_HEADS, size=heads, unit=1, width=width, replicas=replicas, bounds=cut),
            Split(axis=Axis.Q_HEADS, size=heads * group, unit=1, width=width, bounds=tuple(group * b for b in cut)),
        ]
    for axis in draw(
        st.sets(
            st.sampled_from((Axis.INTERMEDIATE, Axis.EXPERT_INTERMEDIATE, Axis.SHARED_INTERMEDIATE, Axis.LINEAR_HEADS))
        )
    ):
        unit, size = draw(st.sampled_from((32, 128))), draw(st.integers(1, 2000))
        splits.append(Split(axis=axis, size=size, unit=unit, bounds=draw(bounds(axis, size, unit, devices))))
    return tuple(splits)


@st.composite
def _splits(draw: st.DrawFn, layers: int, devices: int, kv_mode: str) -> tuple[Split, ...]:
    """All splits of a model, layers that are cut alike together, in order."""
    kinds = draw(st.lists(_per_layer(devices, kv_mode), min_size=1, max_size=3))
    where: dict[Split, list[int]] = defaultdict(list)
    for layer in range(layers):
        for split in draw(st.sampled_from(kinds)):
            where[split].append(layer)
    inner = [
        Split(
            axis=s.axis,
            layers=format_layers(n),
            size=s.size,
            unit=s.unit,
            width=s.width,
            replicas=s.replicas,
            bounds=s.bounds,
        )
        for s, n in where.items()
    ]
    first = {format_layers(n): n[0] for n in where.values()}
    for axis in (Axis.VOCAB, Axis.RESIDUAL):
        size = draw(st.integers(1, 5000))
        inner.append(Split(axis=axis, size=size, unit=32, bounds=draw(bounds(axis, size, 32, devices))))
    order = list(Axis)
    return tuple(sorted(inner, key=lambda s: (order.index(s.axis), first.get(s.layers, 0))))


@st.composite
def plans(draw: st.DrawFn) -> SplitPlan:
    """Valid plans: one to six devices, some of them idle, one to twelve layers of up to three kinds."""
    device_count, layers, batch = draw(st.integers(1, 6)), draw(st.integers(1, 12)), draw(st.integers(1, 256))
    kv_mode, strategy = draw(st.sampled_from(KV_MODES)), draw(st.sampled_from(STRATEGIES))
    splits = draw(_splits(layers, device_count, kv_mode))
    used = {i for s in splits for i, (a, b) in enumerate(pairwise(s.bounds)) if b > a}
    devices, memory = [], []
    for i in range(device_count):
        overhead = draw(_bytes)
        buckets = [draw(_bytes) + 1, draw(_bytes), draw(_bytes), overhead] if i in used else [0] * 4
        free = draw(_bytes) + 1
        devices.append(
            Device(
                name=draw(names),
                budget_bytes=sum(buckets) + free,
                overhead_bytes=overhead,
                bandwidth_bytes_per_second=draw(st.sampled_from((0, 936 * 10**9))),
                capability=draw(st.sampled_from(("", "8.6", "12.0"))),
            )
        )
        weights, cache, workspace, used_overhead = buckets
        reads = draw(st.integers(1, weights + cache)) if i in used and strategy == "latency" else 0
        memory.append(DeviceMemory(i, weights, cache, workspace, used_overhead, free, reads))
    return SplitPlan(
        model=PlanModel(draw(names), draw(names), draw(_fingerprints), draw(st.sampled_from(DTYPES)), layers),
        request=Request(
            layout=draw(st.sampled_from(LAYOUTS)),
            strategy=strategy,
            cache=Cache(draw(st.sampled_from(tuple(CACHE_KINDS))), draw(st.integers(batch, 2**40))),
            batch=batch,
            max_rows=draw(st.integers(batch, 2**20)),
            kv=kv_mode,
        ),
        devices=tuple(devices),
        splits=splits,
        memory=tuple(memory),
    )
