"""The memory ledger: the exact number of bytes that each part of a model takes on the device that holds it.

The cost of a device in use has three parts: its overhead, the tensors and buffers that every device in use holds (such
as norms), and for each axis of which it holds a slice a fixed cost (tensors that are needed whole) and a cost per unit.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from tpplan.core.axes import DEFAULT_UNIT, Axis, format_layers, power_of_two_unit
from tpplan.core.model import Segment
from tpplan.core.plan import CACHE_KINDS, DeviceMemory, Request
from tpplan.core.workspace import ITEM_BYTES, common_workspace, rope_workspace, unit_workspace
from tpplan.planner.costs import Cost, Demand, Demands
from tpplan.planner.kinds import KINDS, at_rows, is_expert, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from tpplan.core.device import Device
    from tpplan.core.model import Attention, Block, LinearAttention, ModelSpec, Parameter

#: Bits of powers that are exact, and those that longer ones are rounded to.
_EXACT_BITS, _POWER_BITS = 2**17, 256

#: Columns of value heads that a cut may not separate, where that many heads share a key head: channels are no heads.
_LEAST_COLUMNS = 32


def cache_bytes(elements: int, kind: str) -> int:
    """Return the bytes of a cache of ``elements`` elements, rounded up once for all of them."""
    return -(-elements * CACHE_KINDS[kind] // 16)


def cache_bytes_per_token(model: ModelSpec, kind: str) -> int:
    """Return the cache bytes of one token, summed over all layers, while no sliding window is full."""
    return _token_bytes(model, kind, 1)


def sequence_cache_bytes(model: ModelSpec, kind: str, tokens: int) -> int:
    """Return the cache bytes of a sequence of ``tokens``, summed over all layers; sliding windows limit it."""
    return _token_bytes(model, kind, tokens) + state_bytes(model)


def state_bytes(model: ModelSpec) -> int:
    """Return the bytes that layers keep of a sequence of any length: states, and what is not compressed yet."""
    linear = sum(
        len(block.layers) * part
        for block in model.blocks
        if block.linear
        for part in _state_bytes(block.linear, model.dtype)
    )
    buffers = sum(len(block.layers) * block.attention.buffer_dim for block in model.blocks if block.attention)
    return linear + buffers * ITEM_BYTES[model.dtype]


def _token_bytes(model: ModelSpec, kind: str, tokens: int) -> int:
    total = 0
    for attention, layers in ((block.attention, len(block.layers)) for block in model.blocks if block.attention):
        each = _latent_bytes(attention, kind) or _head_bytes(attention, kind) * attention.kv_heads
        kept = min(tokens, attention.window or tokens)
        total += layers * (kept * each + _compressed_bytes(attention, kind, tokens))
    return total


def _head_bytes(attention: Attention, kind: str) -> int:
    per_head = not (attention.latent_dim or attention.shared)
    return cache_bytes(attention.head_dim + attention.v_head_dim, kind) if per_head else 0


def _latent_bytes(attention: Attention, kind: str) -> int:
    return cache_bytes(attention.latent_dim, kind)


def _compressed_bytes(attention: Attention, kind: str, tokens: int) -> int:
    return tokens * cache_bytes(attention.compressed_dim, kind) // attention.ratio if attention.ratio else 0


def _state_bytes(linear: LinearAttention, dtype: str) -> tuple[int, int]:
    """Return the bytes of the state of all value heads, and of all key heads, as transformers keeps it.

    The inputs of the convolution are kept in the dtype of the activations, the recurrent state mostly in 32 bits.
    """
    values = linear.value_heads * linear.value_head_dim
    keys = 0 if linear.plain_keys else 2 * linear.key_heads * linear.key_head_dim
    inputs = linear.kernel * ITEM_BYTES[dtype]
    each = ITEM_BYTES[dtype if linear.rounded else "float32"]
    return inputs * values + linear.key_head_dim * values * each, inputs * keys


@define
class _Group:
    """Accumulator for the costs of the layers that share the cut of one axis."""

    axis: Axis
    size: int
    width: int = 1
    group: int = 0
    share: int = 1
    layers: list[int] = field(factory=list)
    units: set[int] = field(factory=set)
    split: Cost = field(factory=Cost)
    kept: Cost = field(factory=Cost)
    head: Cost = field(factory=Cost)

    def add_heads(self, cost: Cost) -> None:
        """Add a cost that is cut by heads; a device stores each head once, however many elements of it it holds."""
        if self.share == 1:
            self.split += cost
        else:
            self.head += cost.part(self.share, self.size)


def demands(
    model: ModelSpec,
    request: Request,
    device_count: int,
    cut_of: Callable[[Axis, int], Hashable] = lambda axis, layer: None,  # noqa: ARG005
    *,
    rows: int = 1,
) -> Demands:
    """Compute the costs of ``model`` for ``request``, per axis.

    Args:
        model: the model.
        request: the request.
        device_count: number of devices. It matters only if KV heads are replicated: they are repeated by the smallest
            factor that gives every device a head, as far as the number of query heads allows.
        cut_of: for an axis and a layer, which of several cuts of this axis is that of the layer; equal for all
            layers of a block. By default, layers in which the axis has the same sizes share a cut.
        rows: tokens of a decode step; what a step reads of the experts are those that it expects them to be routed to.
    """
    shared = {Axis.VOCAB: _Group(Axis.VOCAB, model.vocab_size), Axis.RESIDUAL: _Group(Axis.RESIDUAL, model.hidden_size)}
    groups: dict[tuple[Hashable, ...], _Group] = {(axis,): group for axis, group in shared.items()}
    common = Cost()
    for block in model.blocks:
        own = dict(shared)
        for axis, group in _layer_groups(block, request, device_count):
            key = (axis, group.size, group.width, group.group, group.share, cut_of(axis, block.layers[0]))
            own[axis] = groups.setdefault(key, group)
            own[axis].layers.extend(block.layers)
        if block.attention:
            _add_cache(own[Axis.KV_HEADS], block.attention, len(block.layers), request, ITEM_BYTES[model.dtype])
        if block.linear:
            states = (each * len(block.layers) * request.batch for each in _state_bytes(block.linear, model.dtype))
            values, keys = map(Cost.of_states, states)
            own[Axis.LINEAR_HEADS].split += values
            own[Axis.LINEAR_HEADS].add_heads(keys)
        for parameter in block.parameters:
            common += _charge(own, parameter, model, block, request, rows=rows)
    for parameter in model.parameters:
        common += _charge(shared, parameter, model, None, request, rows=rows)
    gated = any(group.axis is Axis.LINEAR_HEADS for group in groups.values())
    axes = tuple(_demand(g, model.dtype, request, gated=gated) for g in sorted(groups.values(), key=_order))
    sizes = [(d.axis, d.size, d.width) for d in axes]
    sizes += [(Axis.Q_HEADS, d.size * d.group, d.width) for d in axes if d.axis is Axis.KV_HEADS]
    return Demands(axes, common + Cost(workspace=common_workspace(sizes, model.dtype, request)))


def _layer_groups(block: Block, request: Request, devices: int) -> Iterator[tuple[Axis, _Group]]:
    """Yield the axes of a block's layers, each with a new group; the KV heads' group includes the query heads."""
    for axis, size in block.sizes():
        if axis is Axis.KV_HEADS and block.attention:
            heads = block.attention
            repeat = replicas(heads, devices) if request.kv == "replicate" else 1
            width = max(heads.head_dim, heads.v_head_dim)
            yield axis, _Group(axis, size * repeat, width, heads.q_heads // (size * repeat), repeat)
        elif axis is Axis.LINEAR_HEADS and block.linear:
            yield axis, _linear_group(block.linear)
        elif axis is not Axis.Q_HEADS:
            yield axis, _Group(axis, size, block.experts_per_token if axis is Axis.EXPERT_INTERMEDIATE else 1)


def _linear_group(linear: LinearAttention) -> _Group:
    """Return a new group for the heads of linear attention.

    Where devices share key heads, a unit are so many value heads that their columns have room for a key.
    """
    if not linear.shared_keys:
        width = max(linear.key_head_dim, linear.group * linear.value_head_dim)
        return _Group(Axis.LINEAR_HEADS, linear.heads, width)
    columns = max(linear.key_head_dim, _LEAST_COLUMNS)
    wanted = -(-columns // linear.value_head_dim)
    unit = power_of_two_unit(linear.group, 1 << (wanted - 1).bit_length())
    width = max(linear.value_head_dim, -(-linear.key_head_dim // unit))
    return _Group(Axis.LINEAR_HEADS, linear.heads, width, share=linear.group, units={unit})


def replicas(attention: Attention, devices: int) -> int:
    """Return the number of copies of each KV head that gives every device one, as far as query heads allow."""
    group = attention.q_heads // attention.kv_heads
    factors = [f for f in range(1, group + 1) if group % f == 0]
    return next((f for f in factors if attention.kv_heads * f >= devices), group)


def _add_cache(group: _Group, attention: Attention, layers: int, request: Request, item_bytes: int) -> None:
    """Add the cache of layers; sliding windows limit what a sequence keeps, unless the server keeps all of it."""
    tokens = request.cache.tokens
    compressed = _compressed_bytes(attention, request.cache.kind, tokens)
    buffers = layers * request.batch * attention.buffer_dim * item_bytes
    if attention.window and not request.full_window:
        tokens = min(tokens, request.batch * attention.window)
    heads = tokens * layers * _head_bytes(attention, request.cache.kind) * attention.kv_heads
    latent = layers * (tokens * _latent_bytes(attention, request.cache.kind) + compressed)
    group.add_heads(Cost.of_cache(heads))
    group.kept += Cost.of_cache(latent) + Cost.of_states(buffers)


def _charge(
    own: dict[Axis, _Group], parameter: Parameter, model: ModelSpec, block: Block | None, request: Request, *, rows: int
) -> Cost:
    """Charge a parameter to the axes that cut it or that it belongs to; return the rest, common to all devices."""
    dim = parameter.cut_dim(request.layout)
    segments = (Segment(None, 1),) if dim is None else parameter.dims[dim]
    length = sum(segment.length for segment in segments)
    slower = at_rows(KINDS[kind_of(parameter, model, block)].slower, request.batch)
    layers = len(block.layers) if block else 1
    common = Cost()
    for segment in segments:
        size = parameter.bytes * layers * segment.length // length
        reads, batch = (_reads(parameter, size, block, each) for each in (rows, request.batch))
        cost = Cost(weights=size, reads=reads, time=batch * slower)
        payer = segment.axis or parameter.home
        group = own.get(Axis.KV_HEADS if payer is Axis.Q_HEADS else payer) if payer else None
        if group is None:
            common += cost
        elif segment.axis is None:
            group.kept += cost
        elif segment.axis is Axis.KV_HEADS or segment.shared:
            group.add_heads(cost)
            heads = segment.unit(group.size // group.share)
            group.units.add(heads * group.share if heads > 1 else 1)  # any element needs its whole head
        else:
            group.split += cost
            group.units.add(segment.unit(group.size))
    return common


def _reads(parameter: Parameter, size: int, block: Block | None, rows: int) -> int:
    """Return how many of ``size`` bytes of a parameter a step of ``rows`` tokens reads: of experts, those routed to.

    Tokens are expected to be routed independently, to each expert as often.
    """
    if parameter.lookup:
        return 0
    if block and block.experts and is_expert(parameter):
        missed = _power(block.experts - block.experts_per_token, block.experts, rows)
        return -(-size * (missed[1] - missed[0]) // missed[1])
    return size


def _power(part: int, whole: int, exponent: int) -> tuple[int, int]:
    """Return a fraction to a power, exact while that is short, else rounded to :data:`_POWER_BITS` bits, in squares."""
    if exponent * whole.bit_length() <= _EXACT_BITS:
        return part**exponent, whole**exponent
    one = 1 << _POWER_BITS
    power, square = one, (part << _POWER_BITS) // whole
    while exponent:
        if exponent & 1:
            power = power * square >> _POWER_BITS
        square = square * square >> _POWER_BITS
        exponent >>= 1
    return power, one


def _order(group: _Group) -> tuple[int, int, int]:
    return list(Axis).index(group.axis), min(group.layers, default=0), group.size


def _demand(group: _Group, dtype: str, request: Request, *, gated: bool) -> Demand:
    unit = axis_unit(group.axis, group.size, group.units)
    rows = unit_workspace(group.axis, unit, group.width, group.group, dtype, request=request, gated=gated)
    tables = rope_workspace(group.width, dtype, request) if group.axis is Axis.KV_HEADS else 0
    return Demand(
        axis=group.axis,
        layers=format_layers(group.layers) if group.layers else "",
        size=group.size,
        unit=unit,
        width=group.width,
        share=group.share,
        group=group.group,
        split=evolve(group.split, workspace=rows),
        kept=group.kept + Cost(workspace=tables),
        head=group.head,
    )


def axis_unit(axis: Axis, size: int, units: Iterable[int] = ()) -> int:
    """Return the unit of an axis: the number of elements that a cut may not separate.

    The default unit is reduced to the largest power of two that divides the size (the vocabulary keeps the default and
    a ragged last unit). It is then raised to a multiple of every tensor's unit, so that no cut divides a packed word, a
    quantisation group or a block.

    Args:
        axis: the axis.
        size: number of elements of the axis.
        units: units of the tensor dimensions that the axis cuts, see :meth:`~tpplan.core.model.Segment.unit`.
    """
    unit = DEFAULT_UNIT[axis]
    if axis is not Axis.VOCAB:
        unit = power_of_two_unit(size, unit)
    return min(size, lcm(unit, *units))


def ledger(
    bounds: Sequence[Sequence[int]], wanted: Demands, devices: Sequence[Device], request: Request
) -> tuple[DeviceMemory, ...]:
    """Return the memory of each device; ``free_bytes`` is negative where the budget is exceeded.

    Args:
        bounds: the cut points of each axis, in the order of ``wanted.axes``.
        wanted: the axes and their costs.
        devices: one for each slice of the bounds.
        request: says what is left to others; ``reads_bytes`` are filled in for the strategy ``latency``.
    """
    entries = []
    reads = request.strategy == "latency"
    for index, device in enumerate(devices):
        slices = ((demand, row[index], row[index + 1]) for demand, row in zip(wanted.axes, bounds, strict=True))
        costs = [demand.cost(start, end) for demand, start, end in slices if end > start]
        used = bool(costs)
        total = sum(costs, wanted.common) if used else Cost()
        overhead = device.overhead_bytes if used else 0
        reserved, draft = request.reserved(index), request.room(index)
        if draft and not used:
            draft += device.overhead_bytes
        free = device.budget_bytes - total.bytes - overhead - reserved - draft
        # Rounded up, reads must not exceed the bytes held; a device with only lookup tables reads little, but not 0.
        read = min(max(total.reads, 1), total.weights + total.cache) if reads and used else 0
        parts = total.weights, total.cache, total.workspace, overhead, free, read, reserved, draft
        entries.append(DeviceMemory(index, *parts))
    return tuple(entries)


def stated(memory: Sequence[DeviceMemory], request: Request) -> tuple[DeviceMemory, ...]:
    """Return a ledger as a plan has it: where that is a draft model's, the overhead is in the plan of its model."""
    if not request.drafts_for:
        return tuple(memory)
    return tuple(evolve(each, overhead_bytes=0, free_bytes=each.free_bytes + each.overhead_bytes) for each in memory)
