"""The ledger, derived a second time: by slicing every tensor and counting cached elements."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise
from math import ceil, prod
from typing import TYPE_CHECKING

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.family_configs import configs
from tests.planner.memory_models import BITS, MODELS, model
from tests.strategies import bounds
from tpplan.core.axes import Axis, parse_layers
from tpplan.core.device import Device
from tpplan.core.model import DTYPE_BITS, Block, ModelSpec, Parameter
from tpplan.core.plan import CACHE_KINDS, KV_MODES, LAYOUTS, Cache, Request
from tpplan.models.config import parse_config
from tpplan.models.families import FAMILIES, spec_from_config
from tpplan.planner.costs import Cost, Demand
from tpplan.planner.ledger import cache_bytes_per_token, demands, ledger, sequence_cache_bytes, state_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator


@frozen
class Task:
    """A model that is cut at random."""

    model: ModelSpec
    request: Request
    axes: tuple[Demand, ...]
    bounds: tuple[tuple[int, ...], ...]
    devices: tuple[Device, ...]

    def part(self, axis: Axis | None, layer: int | None, device: int) -> tuple[int, int, Demand] | None:
        """A device's elements of an axis, for query heads those of the KV heads; None if there is no such axis."""
        axis = Axis.KV_HEADS if axis is Axis.Q_HEADS else axis
        for demand, row in zip(self.axes, self.bounds, strict=True):
            here = not demand.layers or (layer is not None and layer in parse_layers(demand.layers))
            if demand.axis is axis and here:
                return row[device], row[device + 1], demand
        return None

    def uses(self, device: int) -> bool:
        """Whether a device holds anything."""
        return any(row[device + 1] > row[device] for row in self.bounds)


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Any of the models and requests, cut at random for one to six devices, some of them idle."""
    chosen = model(draw(st.sampled_from(sorted(MODELS))))
    batch = draw(st.sampled_from((1, 3)))
    layout = "gather" if chosen.gather_only else draw(st.sampled_from(LAYOUTS))
    stored = Cache(draw(st.sampled_from(sorted(CACHE_KINDS))), draw(st.integers(batch, 4096 * batch)))
    request = Request(layout, "balanced", stored, batch, draw(st.integers(batch, 99)), draw(st.sampled_from(KV_MODES)))
    count = draw(st.integers(1, 6))
    axes = demands(chosen, request, count).axes
    cuts = tuple(draw(bounds(d.axis, d.size, d.unit, count)) for d in axes)
    devices = tuple(Device(name="x", budget_bytes=2**40, overhead_bytes=1000 + i) for i in range(count))
    return Task(chosen, request, axes, cuts, devices)


def sliced_bytes(task: Task, parameter: Parameter, layer: int | None, device: int) -> int:
    """Bytes of a tensor on a device: cut it, and multiply what is left."""
    dims = parameter.dims
    if task.request.layout == "gather":
        cut = parameter.out
    else:
        cut = next((i for i, dim in enumerate(dims) if {s.axis for s in dim} - {None, Axis.RESIDUAL}), None)
    if cut is None or all(s.axis is None for s in dims[cut]):
        home = task.part(parameter.home, layer, device)
        held = task.uses(device) if home is None else home[1] > home[0]
        return parameter.bytes if held else 0
    length = 0
    for segment in dims[cut]:
        part = task.part(segment.axis or parameter.home, layer, device)
        if part is None:
            length += segment.length if task.uses(device) else 0
            continue
        start, end, demand = part
        if start == end:
            continue
        size = demand.size
        share = size // segment.shared if segment.shared else demand.replicas if segment.axis is Axis.KV_HEADS else 1
        # Element e is a replica of head e // share, or needs that part; a device stores it once.
        start, end, size = start // share, -(-end // share), size // share
        if segment.axis is None:
            length += segment.length
            continue
        first, last = Fraction(segment.length * start, size), Fraction(segment.length * end, size)
        assert first.denominator == last.denominator == 1, f"{parameter.name} is cut inside a stored element"
        length += int(last - first)
    shape = [*parameter.shape]
    shape[cut] = length
    return prod(shape) * DTYPE_BITS[parameter.dtype] // 8 * parameter.copies


def weights_of(task: Task, device: int) -> int:
    """Bytes of all tensors on a device."""
    tensors: list[tuple[Parameter, int | None]] = [(p, None) for p in task.model.parameters]
    tensors += [(p, n) for block in task.model.blocks for n in block.layers for p in block.parameters]
    return sum(sliced_bytes(task, p, n, device) for p, n in tensors) if task.uses(device) else 0


def attention_layers(spec_: ModelSpec) -> Iterator[tuple[int, Block]]:
    """Yield the layers that cache."""
    yield from ((layer, block) for block in spec_.blocks if block.attention for layer in block.layers)


def cache_of(task: Task, device: int) -> int:
    """Bytes of all cached elements on a device, a token's elements of a head rounded up to whole bytes, and states."""
    total, bits = 0, BITS[task.request.cache.kind]
    for layer, block in attention_layers(task.model):
        a, part = block.attention, task.part(Axis.KV_HEADS, layer, device)
        assert a
        assert part
        start, end, demand = part
        heads = len({element // demand.replicas for element in range(start, end)})
        tokens = task.request.cache.tokens
        if a.window:
            tokens = min(tokens, a.window * task.request.batch)
        if a.ratio and heads:
            total += task.request.cache.tokens * ceil(a.compressed_dim * bits / 8) // a.ratio
            total += task.request.batch * a.buffer_dim * (4 if task.model.dtype == "float32" else 2)
        if a.latent_dim:
            total += tokens * ceil(a.latent_dim * bits / 8) * (heads > 0)
        elif not a.shared:
            total += tokens * heads * ceil((a.head_dim + a.v_head_dim) * bits / 8)
    return total + state_of(task, device)


def state_of(task: Task, device: int) -> int:
    """Bytes of the state of linear attention on a device: a few inputs, and a matrix in 32 bits for each value head."""
    total, item = 0, 4 if task.model.dtype == "float32" else 2
    for layer, one in ((n, block.linear) for block in task.model.blocks if block.linear for n in block.layers):
        part = task.part(Axis.LINEAR_HEADS, layer, device)
        assert part
        each = one.value_heads // one.key_heads
        heads = [
            head for head in range(one.value_heads) if part[0] <= (head if one.shared_keys else head // each) < part[1]
        ]
        values, keys = len(heads), len({head // each for head in heads})
        channels = 2 * keys * one.key_head_dim * (not one.plain_keys) + values * one.value_head_dim
        total += channels * one.kernel * item + values * one.key_head_dim * one.value_head_dim * 4
    return total * task.request.batch


@settings(max_examples=examples(400))
@given(tasks())
def test_the_ledger_is_what_slicing_every_tensor_gives(task: Task) -> None:
    """Weights, cache and overhead of each device, for every model, layout, KV mode and cache kind, to the byte."""
    entries = ledger(task.bounds, demands(task.model, task.request, len(task.devices)), task.devices, task.request)
    for i, (entry, device) in enumerate(zip(entries, task.devices, strict=True)):
        assert entry.device == i
        assert entry.weights_bytes == weights_of(task, i)
        assert entry.cache_bytes == cache_of(task, i)
        assert entry.overhead_bytes == (device.overhead_bytes if task.uses(i) else 0)
        assert entry.free_bytes == device.budget_bytes - entry.used_bytes


@given(tasks())
def test_what_is_cut_is_held_once(task: Task) -> None:
    """Over all devices, the parts of an axis cost what the whole costs; only what must be is held more than once."""
    for demand, row in zip(task.axes, task.bounds, strict=True):
        parts = [demand.cost(a, b) for a, b in pairwise(row) if b > a]
        whole = demand.cost(0, demand.size)
        held = sum(b > a for a, b in pairwise(row))
        heads = sum(-(-b // demand.share) - a // demand.share for a, b in pairwise(row) if b > a)
        again = heads - demand.size // demand.share
        for bucket in ("weights", "cache"):
            kept = getattr(demand.kept, bucket) * (held - 1) + getattr(demand.head, bucket) * again
            assert sum(getattr(part, bucket) for part in parts) == getattr(whole, bucket) + kept


@given(tasks())
def test_planning_never_charges_less_than_a_slice_costs(task: Task) -> None:
    """A fixed price and one per unit, as planning counts, cover every slice; exactly so if no head is repeated."""
    for demand, row in zip(task.axes, task.bounds, strict=True):
        unit, fixed = demand.unit_cost(), demand.fixed_cost()
        for a, b in pairwise(row):
            units, exact = -(-(b - a) // demand.unit), demand.cost(a, b)
            if not units:
                assert exact == Cost()
                continue
            for bucket in ("weights", "cache", "workspace", "reads"):
                charged = getattr(fixed, bucket) + getattr(unit, bucket) * units
                assert charged >= getattr(exact, bucket)
                if demand.share == 1 and (b - a) % demand.unit == 0 and bucket != "reads":
                    assert charged == getattr(exact, bucket)


@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_one_device_holds_the_whole_model_once(name: str, layout: str, kv: str) -> None:
    """Alone, a device's weights are the model's, and its cache is tokens times the bytes per token, and a state."""
    chosen = model(name)
    request = Request(layout, "balanced", Cache("q6", 50), 1, 1, kv)
    wanted = demands(chosen, request, 1)
    (entry,) = ledger([(0, d.size) for d in wanted.axes], wanted, [Device(name="x", budget_bytes=1)], request)
    assert entry.weights_bytes == chosen.weight_bytes
    rounded = 50 * cache_bytes_per_token(chosen, "q6") + state_bytes(chosen)
    assert entry.cache_bytes == sequence_cache_bytes(chosen, "q6", 50)
    # What several tokens are compressed into is rounded down for all of them together, not for each.
    compressing = sum(len(block.layers) for block in chosen.blocks if block.attention and block.attention.ratio)
    assert 0 <= entry.cache_bytes - rounded <= 50 * compressing


@pytest.mark.parametrize("model_type", FAMILIES)
@settings(max_examples=examples(5))
@given(data=st.data())
def test_one_device_holds_the_whole_of_any_family(model_type: str, data: st.DataObject) -> None:
    """The same for small random configs of every family."""
    config = parse_config(json.dumps(data.draw(configs(model_type))).encode(), "config.json")
    chosen = spec_from_config(config, "tiny")
    for layout in LAYOUTS:
        request = Request(layout, "balanced", Cache("q4", 1), 1, 1, "idle")
        wanted = demands(chosen, request, 1)
        (entry,) = ledger([(0, d.size) for d in wanted.axes], wanted, [Device(name="x", budget_bytes=1)], request)
        assert entry.weights_bytes == chosen.weight_bytes
        assert entry.cache_bytes == cache_bytes_per_token(chosen, "q4") + state_bytes(chosen)


def test_a_window_bounds_the_cache_of_its_layers_only() -> None:
    """Gemma 2 slides in every other layer: beyond the window, only the other layers' cache grows."""
    sizes = {}
    for tokens in (60, 100, 1000):
        wanted = demands(model("gemma2"), Request("reduce", "balanced", Cache("fp16", tokens), 1, 1, "idle"), 1)
        (kv,) = (d for d in wanted.axes if d.axis is Axis.KV_HEADS)
        sizes[tokens] = kv.split.cache
    token_and_layer = 4 * 2 * 64 * 2
    sliding, full = 2, 1
    assert sizes == {
        60: 60 * 3 * token_and_layer,
        100: 100 * 3 * token_and_layer,
        1000: (1000 * full + 100 * sliding) * token_and_layer,
    }


def reads(wanted_axes: tuple[Demand, ...], common: Cost) -> int:
    """What one device that holds everything reads for a token."""
    return common.reads + sum(d.cost(0, d.size).reads for d in wanted_axes)


def test_a_token_reads_its_own_experts_and_no_other() -> None:
    """Of 6 experts 2 are read; of the embedding a row, which does not count; everything else once."""
    wanted = demands(model("qwen2_moe"), Request("reduce", "balanced", Cache("fp16", 10), 1, 1, "idle"), 1)
    attention = 2 * 512 * 512 + 2 * 512 * 256 + 512 + 2 * 256 + 2 * 512  # q, o, k, v, their biases, norms
    sparse = 6 * 512 + 512 + 3 * 512 * (2 * 384 + 640)  # routers, two experts, the shared one
    dense = 3 * 512 * 1792
    outside = 512 + 4096 * 512
    cached = 10 * 3 * 2 * 256
    assert reads(wanted.axes, wanted.common) == 2 * (3 * attention + sparse + 2 * dense + outside + cached)
    assert model("qwen2_moe").weight_bytes == 2 * (
        3 * attention + sparse + 4 * 3 * 512 * 384 + 2 * dense + outside + 4096 * 512
    )


def test_a_tied_embedding_is_read_as_the_output_matrix() -> None:
    """One matrix serves both, and a token reads all of it once."""
    wanted = demands(model("tied"), Request("reduce", "balanced", Cache("fp16", 1), 1, 1, "idle"), 1)
    (vocab,) = (d for d in wanted.axes if d.axis is Axis.VOCAB)
    assert vocab.split.reads == vocab.split.weights == 4096 * 512 * 2
