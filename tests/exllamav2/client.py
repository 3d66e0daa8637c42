"""A client of TPContext that loads a small llama and runs it in ExLlamaV2's order of calls, on virtual devices.

Products are sums in float64, rounded once to float16, so that a column has the same bits wherever it is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from attrs import define, field
from torch import Tensor

from tests.exllamav2.models import HALF, small_model
from tpplan.exllamav2 import BROADCAST_ID, BROADCAST_KV, BROADCAST_Q, BROADCAST_RS, BROADCAST_VC, TPContext

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tpplan.exllamav2.tensor_p import Handle

EPSILON = 1e-5
PAGE = 4
#: No cache; a cache and attention in Python; attention in functions that take the handle, as flash attention has it;
#: the same on pages; and on pages in Python.
FLOWS = ("no cache", "cache", "flash", "paged", "plain")


# Arithmetic of one device


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of float16 rows."""
    wide = x.double()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return (wide * scale * weight.double()).half()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight`` in float16."""
    return (x.double() @ weight.double()).half()


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate, times up."""
    wide = gate.double()
    active: Tensor = (wide * torch.sigmoid(wide)).half()
    return active * up


def rotated(x: Tensor, sin: Tensor, cos: Tensor, first: int) -> Tensor:
    """RoPE (NEOX) of ``[batch, positions, heads, head size]`` from a position on."""
    half = x.shape[-1] // 2
    at = slice(first, first + x.shape[1])
    s, c = (table.view(-1, x.shape[-1])[at, None].double() for table in (sin, cos))
    wide = x.double()
    return (wide * c + torch.cat((-wide[..., half:], wide[..., :half]), -1) * s).half()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last positions, all as ``[batch, positions, heads, head size]``."""
    groups = q.shape[2] // k.shape[2]
    keys, values = (x.double().repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    scores = q.double().transpose(1, 2) @ keys.transpose(2, 3) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1]).logical_not()
    mixed: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    return mixed.transpose(1, 2).half()


def tables(config: Any) -> tuple[Tensor, Tensor]:
    """Sines and cosines ``[1, 1, positions, head size]``."""
    frequencies = 1 / config.rotary_embedding_base ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angles = torch.arange(config.max_seq_len).float()[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)[None, None]
    return angles.sin().half(), angles.cos().half()


def weights_for(config: Any, seed: int = 0) -> dict[str, Tensor]:
    """Random float16 weights, ``[inputs, outputs]``."""
    inner, vocab, hidden = config.intermediate_size, config.vocab_size, config.hidden_size
    kv = config.num_key_value_heads * config.head_dim
    queries = kv * config.num_key_value_groups
    shapes = {"q": (hidden, queries), "k": (hidden, kv), "v": (hidden, kv), "o": (queries, hidden)}
    shapes |= {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
    draw = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=draw) * scale).half()

    found = {"embedding": drawn(vocab, hidden, scale=1), "head": drawn(hidden, vocab, scale=hidden**-0.5)}
    for layer in range(config.num_hidden_layers):
        found |= {f"{layer}.{name}": drawn(*shape, scale=shape[0] ** -0.5) for name, shape in shapes.items()}
        found |= {f"{layer}.{name}": 1 + drawn(hidden, scale=0.1) for name in ("before attention", "before mlp")}
    return found | {"norm": 1 + drawn(hidden, scale=0.1)}


def reference(config: Any, weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Logits of all positions, on one device."""
    batch, length = ids.shape
    sin, cos = tables(config)
    x = weights["embedding"][ids]
    for layer in range(config.num_hidden_layers):
        w = {name.partition(".")[2]: weight for name, weight in weights.items() if name.startswith(f"{layer}.")}
        normed = norm(x, w["before attention"])
        q, k, v = (product(normed, w[name]).view(batch, length, -1, config.head_dim) for name in "qkv")
        mixed = attention(rotated(q, sin, cos, 0), rotated(k, sin, cos, 0), v)
        x = product(mixed.reshape(batch, length, -1), w["o"]) + x
        normed = norm(x, w["before mlp"])
        x = product(gated(product(normed, w["gate"]), product(normed, w["up"])), w["down"]) + x
    return product(norm(x, weights["norm"]), weights["head"])


# The model over devices


class DeviceContext:
    """What ExLlamaV2 has on a device: scratch, counted in float16, and RoPE tables."""

    def __init__(self, model: Any, scratch_bytes: int) -> None:
        self.model = model
        self.scratch_bytes = scratch_bytes
        self.scratch_idx = 0
        self.scratch: Tensor | None = None
        self.sin: list[Tensor] | None = None
        self.cos: list[Tensor] | None = None
        self.ready = False

    def prepare(self) -> None:
        """Allocate both."""
        sin, cos = tables(self.model.config)
        self.sin, self.cos = [sin], [cos]
        self.scratch = torch.full((self.scratch_bytes // 2,), torch.nan, dtype=HALF)
        self.ready = True

    def begin_scratch_alloc(self) -> None:
        """Start at the front again."""
        self.scratch_idx = 0

    def get_scratch_slice(self, size_bytes: int) -> Tensor:
        """Return the next float16, a multiple of 64 bytes."""
        if self.scratch is None:
            self.prepare()
        assert self.scratch is not None
        count = (size_bytes + 63) // 64 * 32
        self.scratch_idx += count
        return self.scratch.narrow(0, self.scratch_idx - count, count)


@define
class Chunk:
    """Where the tokens of a forward pass are: after ``past`` others, in a cache with pages or without, or in none."""

    flow: str
    batch: int
    length: int
    past: int = 0
    cache: Cache | None = None
    past_by_device: list[Tensor] = field(factory=list)
    pages_by_device: list[Tensor] = field(factory=list)

    def prepare(self, tp: TPContext) -> None:
        """Have what attention needs on each device with KV heads; the first layer to ask makes it."""
        if not self.past_by_device:
            for _ in tp.get_split(BROADCAST_KV):
                self.past_by_device.append(torch.full((self.batch,), self.past, dtype=torch.int))
                if self.cache is not None:
                    self.pages_by_device.append(self.cache.pages.clone())


class Cache:
    """Keys and values of each layer on each device with KV heads; sequences are in pages in a random order."""

    def __init__(self, model: Client, batch: int, tokens: int) -> None:
        config, split = model.config, model.tp.get_split(BROADCAST_KV)
        count = -(-tokens // PAGE)
        self.pages = torch.randperm(batch * count, generator=torch.Generator().manual_seed(1)).view(batch, count)
        self.layers = [
            [torch.full((2, batch, count * PAGE, b - a, config.head_dim), torch.nan, dtype=HALF) for _, a, b in split]
            for _ in range(config.num_hidden_layers)
        ]

    def store(self, layer: int, device: int, new: tuple[Tensor, Tensor], past: int) -> tuple[Tensor, Tensor]:
        """Store what is new on a device, and return all keys and values there."""
        keys, values = self.layers[layer][device]
        end = past + new[0].shape[1]
        keys[:, past:end], values[:, past:end] = new
        return keys[:, :end], values[:, :end]

    def store_pages(self, layer: int, device: int, new: tuple[Tensor, Tensor], chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Likewise, in pages."""
        past, pages = int(chunk.past_by_device[device][0]), chunk.pages_by_device[device]
        positions = torch.arange(past + chunk.length)
        at = pages[:, positions // PAGE] * PAGE + positions % PAGE
        found = []
        for cache, x in zip(self.layers[layer][device], new, strict=True):
            flat = cache.view(-1, *cache.shape[2:])
            flat[at[:, past:]] = x
            found.append(flat[at])
        return found[0], found[1]


class Module(Protocol):
    """A part of the model."""

    def scratch_space_tp(self) -> list[int]:
        """Return the bytes of scratch by device that it needs."""

    def tp_split(self) -> None:
        """Cut the weights, and slice scratch."""

    def forward(self, x: Any, chunk: Chunk) -> Any:
        """Compute."""


class Linear:
    """A matrix, cut by its outputs; it is dequantised into the front of a device's scratch if the model has some."""

    def __init__(self, model: Client, weight: Tensor, kind: int, dim: int = 1) -> None:
        self.model, self.weight, self.kind, self.dim = model, weight, kind, dim
        self.parts: list[Tensor] = []
        self.dequantised: list[Tensor] = []

    def scratch_space_tp(self) -> list[int]:
        """See :class:`Module`."""
        sizes = [0] * self.model.tp.num_devices
        for device, a, b in self.model.tp.get_split(self.kind):
            sizes[device] = 2 * self.weight.shape[0] * (b - a) * self.dim
        return sizes

    def tp_split(self) -> None:
        """See :class:`Module`."""
        split = self.model.tp.get_split(self.kind)
        padded = torch.zeros(self.weight.shape[0], split[-1][2] * self.dim, dtype=HALF)
        padded[:, : self.weight.shape[1]] = self.weight
        self.parts = [padded[:, a * self.dim : b * self.dim].clone() for _, a, b in split]
        if self.model.has_contexts:
            for (device, _, _), part in zip(split, self.parts, strict=True):
                context = self.model.get_device_context(device)
                context.begin_scratch_alloc()
                self.dequantised.append(context.get_scratch_slice(part.nbytes))

    def into(self, xs: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Write each device's columns (``gemm_half_q_half_tp``)."""
        for i, (x, part, to) in enumerate(zip(xs, self.parts, out, strict=True)):
            weight = part
            if self.dequantised:
                weight = self.dequantised[i][: part.numel()].view(part.shape).copy_(part)
            to.copy_(product(x, weight))

    def forward_tp(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return each device's columns."""
        widths = [(b - a) * self.dim for _, a, b in self.model.tp.get_split(self.kind)]
        outputs = [torch.empty(x.shape[0], width, dtype=x.dtype) for x, width in zip(xs, widths, strict=True)]
        self.into(xs, outputs)
        return outputs

    def forward(self, xs: list[Tensor], chunk: Chunk) -> Tensor:
        """Return all columns: the logits."""
        outputs = self.forward_tp([x.view(-1, x.shape[-1]) for x in xs])
        return self.model.tp.gather(0, outputs, self.kind).view(
            chunk.batch, -1, self.model.tp.get_split(self.kind)[-1][2]
        )


class Norm:
    """A norm, whole on every device of a split."""

    def __init__(self, model: Client, weight: Tensor, kind: int) -> None:
        self.model, self.kind, self.weight = model, kind, weight
        self.parts: list[Tensor] = []

    def scratch_space_tp(self) -> list[int]:
        """See :class:`Module`."""
        return [0] * self.model.tp.num_devices

    def tp_split(self) -> None:
        """See :class:`Module`."""
        self.parts = [self.weight.clone() for _ in self.model.tp.get_split(self.kind)]

    def forward_tp(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return the normed rows of each device."""
        return [norm(x, weight) for x, weight in zip(xs, self.parts, strict=True)]

    def forward(self, x: Tensor, chunk: Chunk) -> list[Tensor]:  # noqa: ARG002
        """Return the normed rows on every device of the split."""
        return self.forward_tp(self.model.tp.broadcast(0, x.view(-1, x.shape[-1]), self.kind))


class Layer:
    """What attention and MLP have in common: matrices, a norm before them, and scratch for all rows.

    Attributes:
        full: axis and columns per element of the slices that are as wide as an axis.
        part: likewise of those that are as wide as a device's part.
    """

    full: tuple[tuple[int, int], ...]
    part: tuple[tuple[int, int], ...]

    def __init__(self, model: Client, before: Norm, matrices: dict[str, Linear]) -> None:
        self.model, self.before, self.matrices = model, before, matrices
        self.tp_dq_size: list[int] = []
        self.slices: list[list[Tensor]] = []

    def scratch_space_tp(self) -> list[int]:
        """See :class:`Module`."""
        tp, rows = self.model.tp, self.model.rows
        self.tp_dq_size = [
            max(sizes) for sizes in zip(*(m.scratch_space_tp() for m in self.matrices.values()), strict=True)
        ]
        sizes = [self.tp_dq_size]
        sizes += [tp.get_temp_tensors_bc_s(rows, 2, kind, dim=dim) for kind, dim in self.full]
        sizes += [tp.get_temp_tensors_s(rows, 2, kind, dim=dim) for kind, dim in self.part]
        return [sum(each) for each in zip(*sizes, strict=True)]

    def tp_split(self) -> None:
        """See :class:`Module`."""
        tp, rows = self.model.tp, self.model.rows
        self.before.tp_split()
        for matrix in self.matrices.values():
            matrix.tp_split()
        tp.begin_scratch_alloc_tp()
        tp.reserve_scratch(self.tp_dq_size)
        self.slices = [tp.get_scratch_slice_tp_bc(rows, HALF, kind, dim=dim) for kind, dim in self.full]
        self.slices += [tp.get_scratch_slice_tp(rows, HALF, kind, dim=dim) for kind, dim in self.part]

    def temporaries(self, rows: int) -> Iterator[list[Tensor]]:
        """Yield the rows of each slice that a pass uses."""
        for tensors in self.slices:
            yield [tensor.narrow(0, 0, rows) for tensor in tensors]


class Attention(Layer):
    """Attention, with its cache."""

    def __init__(self, model: Client, layer: int, weights: Mapping[str, Tensor]) -> None:
        dim = model.config.head_dim
        kinds = {"q": BROADCAST_Q, "k": BROADCAST_KV, "v": BROADCAST_KV, "o": BROADCAST_Q}
        matrices = {name: Linear(model, weights[f"{layer}.{name}"], kind, dim) for name, kind in kinds.items()}
        super().__init__(model, Norm(model, weights[f"{layer}.before attention"], BROADCAST_KV), matrices)
        self.layer, self.dim = layer, dim
        self.full = ((BROADCAST_Q, dim),) * 3
        self.part = ((BROADCAST_Q, dim), (BROADCAST_KV, dim), (BROADCAST_KV, dim), (BROADCAST_Q, dim))

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        """See :class:`Module`."""
        tp = self.model.tp
        chunk.prepare(tp)
        x = x.view(-1, x.shape[-1])
        if chunk.flow not in {"flash", "paged"}:
            return self._plain(x, chunk)
        sin, cos = tp.get_sin_cos()
        self._with_handle(tp.ext_tp_context, x, chunk, sin, cos)
        return tp.get_pinned(0, chunk.batch, chunk.length, x.shape[-1])

    def _mixed(self, i: int, chunk: Chunk, states: Sequence[Tensor], sin: Tensor, cos: Tensor) -> Tensor:
        """Rotate on the ``i``-th device with heads, store, and attend; returns rows."""
        past = int(chunk.past_by_device[i][0])
        q, k, v = (state.view(chunk.batch, chunk.length, -1, self.dim) for state in states)
        q, k = rotated(q, sin, cos, past), rotated(k, sin, cos, past)
        if chunk.cache is not None:
            paged = chunk.flow in {"paged", "plain"}
            store = chunk.cache.store_pages if paged else chunk.cache.store
            k, v = store(self.layer, i, (k, v), chunk if paged else past)  # type: ignore[arg-type]
        return attention(q, k, v).reshape(chunk.batch * chunk.length, -1)

    def _plain(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Compute with the context's methods only."""
        tp, m = self.model.tp, self.matrices
        residual = tp.broadcast(0, x, BROADCAST_KV, dim=self.dim)
        normed = self.before.forward_tp(residual)
        states = [m[name].forward_tp(normed) for name in "qkv"]
        mixed = []
        for i, (device, _, _) in enumerate(tp.get_split(BROADCAST_KV)):
            if self.model.has_contexts:
                context = self.model.get_device_context(device)
                assert context.sin is not None
                assert context.cos is not None
                sin, cos = context.sin[0], context.cos[0]
            else:
                sin, cos = (each[device] for each in tp.get_sin_cos())
            mixed.append(self._mixed(i, chunk, [state[i] for state in states], sin, cos))
        whole = tp.allgather(1, mixed, BROADCAST_Q, BROADCAST_Q, dim=self.dim)
        out = m["o"].forward_tp(whole)
        tp.add_residual(out, residual, BROADCAST_Q, dim=self.dim)
        return tp.gather(0, out, BROADCAST_Q, dim=self.dim).view(chunk.batch, chunk.length, -1)

    def _with_handle(
        self, handle: Handle | None, x: Tensor, chunk: Chunk, sin: Sequence[Tensor], cos: Sequence[Tensor]
    ) -> None:
        """Compute in the layer's scratch, as functions in place of ``tp_attn_forward_`` do, into host buffer 0."""
        assert handle is not None
        tp, m = handle.tp_context, self.matrices
        residual, normed, whole, q, k, v, out = self.temporaries(x.shape[0])
        for to, each, weight, done in zip(
            residual, tp.broadcast(0, x, BROADCAST_Q, self.dim), self.before.parts, normed, strict=True
        ):
            to.copy_(each)
            done.copy_(norm(to, weight))
        for name, to_all in (("q", q), ("k", k), ("v", v)):
            m[name].into(normed, to_all)
        for i, (device, _, _) in enumerate(tp.get_split(BROADCAST_KV)):
            out[i].copy_(self._mixed(i, chunk, [q[i], k[i], v[i]], sin[device], cos[device]))
        for to, each in zip(whole, tp.allgather(1, out, BROADCAST_Q, BROADCAST_Q, self.dim), strict=True):
            to.copy_(each)
        m["o"].into(whole, out)
        tp.add_residual(out, residual, BROADCAST_Q, self.dim)
        tp.gather(0, out, BROADCAST_Q, self.dim)


class Mlp(Layer):
    """The MLP."""

    full = ((BROADCAST_RS, 1), (BROADCAST_RS, 1), (BROADCAST_ID, 1))
    part = ((BROADCAST_ID, 1), (BROADCAST_ID, 1), (BROADCAST_RS, 1))

    def __init__(self, model: Client, layer: int, weights: Mapping[str, Tensor]) -> None:
        kinds = {"gate": BROADCAST_ID, "up": BROADCAST_ID, "down": BROADCAST_RS}
        matrices = {name: Linear(model, weights[f"{layer}.{name}"], kind) for name, kind in kinds.items()}
        super().__init__(model, Norm(model, weights[f"{layer}.before mlp"], BROADCAST_RS), matrices)

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        """See :class:`Module`."""
        tp = self.model.tp
        x = x.view(-1, x.shape[-1])
        if chunk.flow == "plain":
            return self._plain(x).view(chunk.batch, chunk.length, -1)
        self._with_handle(tp.ext_tp_context, x)
        return tp.get_pinned(0, chunk.batch, chunk.length, x.shape[-1])

    def _plain(self, x: Tensor) -> Tensor:
        """Compute with the context's methods only."""
        tp, m = self.model.tp, self.matrices
        residual = tp.broadcast(0, x, BROADCAST_ID)
        normed = self.before.forward_tp(residual)
        gates, ups = m["gate"].forward_tp(normed), m["up"].forward_tp(normed)
        inner = [gated(gate, up) for gate, up in zip(gates, ups, strict=True)]
        down = m["down"].forward_tp(tp.allgather(1, inner, BROADCAST_ID, BROADCAST_ID))
        tp.add_residual(down, residual, BROADCAST_RS)
        return tp.gather(0, down, BROADCAST_RS)

    def _with_handle(self, handle: Handle | None, x: Tensor) -> None:
        """Compute in the layer's scratch, as a function in place of ``tp_mlp_forward_`` does, into host buffer 0."""
        assert handle is not None
        tp, m = handle.tp_context, self.matrices
        residual, normed, whole, gate, up, down = self.temporaries(x.shape[0])
        for to, each, weight, done in zip(
            residual, tp.broadcast(0, x, BROADCAST_ID), self.before.parts, normed, strict=True
        ):
            to.copy_(each)
            done.copy_(norm(to, weight))
        m["gate"].into(normed, gate)
        m["up"].into(normed, up)
        for to, other in zip(gate, up, strict=True):
            to.copy_(gated(to, other))
        for to, each in zip(whole, tp.allgather(1, gate, BROADCAST_ID, BROADCAST_ID), strict=True):
            to.copy_(each)
        m["down"].into(whole, down)
        tp.add_residual(down, residual, BROADCAST_RS)
        tp.gather(0, down, BROADCAST_RS)


class Embedding:
    """The embedding, in host memory."""

    def __init__(self, model: Client, weight: Tensor) -> None:
        self.model, self.weight = model, weight

    def scratch_space_tp(self) -> list[int]:
        """See :class:`Module`."""
        return [0] * self.model.tp.num_devices

    def tp_split(self) -> None:
        """See :class:`Module`."""

    def forward(self, ids: Tensor, chunk: Chunk) -> Tensor:  # noqa: ARG002
        """Leave the rows in host buffer 0."""
        return self.model.tp.copy_pinned(0, self.weight[ids])


class Client:
    """A small llama on virtual devices.

    Attributes:
        config: as ExLlamaV2's.
        has_contexts: whether the model gets device contexts of its own, as ExLlamaV2 has, or leaves scratch to tpplan.
        device_context: these, by device.
        modules: the parts, in order.
        tp: the context under test.
    """

    def __init__(self, gpu_split: Sequence[float], *, has_contexts: bool, **keys: Any) -> None:
        """Load the model, as ``load_tp`` does."""
        model = small_model(**({"hidden_size": 1024, "head_dim": 64, "vocab_size": 2048} | keys))
        self.config = model.config
        self.has_contexts = has_contexts
        self.device_context: list[DeviceContext | None] = []
        self.weights = weights_for(self.config)
        self.rows = self.config.max_batch_size * self.config.max_input_len
        self.modules: list[Module] = [Embedding(self, self.weights["embedding"])]
        for layer in range(self.config.num_hidden_layers):
            self.modules += [Attention(self, layer, self.weights), Mlp(self, layer, self.weights)]
        self.modules.append(Norm(self, self.weights["norm"], BROADCAST_VC))
        self.modules.append(Linear(self, self.weights["head"], BROADCAST_VC))
        self.tp = TPContext(self, list(gpu_split), backend="cpu")
        needs = [module.scratch_space_tp() for module in self.modules[1:]]
        if has_contexts:
            sizes = [max(each) for each in zip(*needs, strict=True)]
            self.device_context = [DeviceContext(self, size) if size else None for size in sizes]
        with torch.inference_mode():
            for module in self.modules:
                module.tp_split()
            self.tp.finalize()

    def get_device_context(self, device: int) -> DeviceContext:
        """Return what the model has on a device, with memory."""
        context = self.device_context[device]
        assert context is not None
        if not context.ready:
            context.prepare()
        return context

    @torch.inference_mode()
    def forward(self, ids: Tensor, flow: str, past: int = 0, cache: Cache | None = None) -> Tensor:
        """Return the logits of tokens that follow ``past`` others, as ``forward_chunk`` does."""
        batch, length = ids.shape
        chunk, x = Chunk(flow, batch, length, past, cache), ids
        for module in self.modules:
            x = module.forward(x, chunk)
        self.tp.wait_streams()
        return x[..., : self.config.vocab_size]

    def logits(self, ids: Tensor, flow: str) -> Tensor:
        """Return the logits of all tokens: in one pass without a cache, else in a prompt and single tokens."""
        if flow == "no cache":
            return self.forward(ids, flow)
        cache, most = Cache(self, *ids.shape), ids.shape[1]
        steps = [(0, most - 2), (most - 2, most - 1), (most - 1, most)]
        return torch.cat([self.forward(ids[:, a:b], flow, a, cache) for a, b in steps], dim=1)
