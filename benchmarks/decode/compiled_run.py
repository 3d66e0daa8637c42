"""A Llama decoder written plainly in torch and compiled, in one process for each GPU; the first prints the figures.

Matrices of the same input are one, the cache is static, and a step is one CUDA graph. Between them, the processes sum
by NCCL or by torch's symmetric memory, outside of what is compiled: nothing fuses over a sum.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from torch import distributed
from torch.distributed import _symmetric_memory as symm_mem
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.decode.order import PROMPT, WARM, Order, long_prompt, prompts, synchronize
from benchmarks.decode.rows import Part

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.decode.rows import Row

#: Returns the sum of a tensor over all processes.
Sum = Callable[["Tensor"], "Tensor"]

_PREFILLS, _WARM_PREFILLS = 3, 2
#: Up to which size torch's symmetric memory sums in one shot, in bytes.
_ONE_SHOT_BYTES = 2**19
#: Masks of the kernels for attention begin at multiples of so many elements.
_ALIGNED = 8
#: How long a process waits for another one that still compiles.
_TIMEOUT = timedelta(minutes=5)
#: After which it says where it is, and ends.
_SECONDS = 560


class Layer(NamedTuple):
    """A process's part of a layer's weights: of heads, and of intermediate columns."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    second_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Heads(NamedTuple):
    """What attention needs to know: a process's key-value heads, the size of a head, and the norms' epsilon."""

    kv: int
    size: int
    epsilon: float


class Place(NamedTuple):
    """Which process of how many this is."""

    rank: int
    world: int


class Weights:
    """A process's part of a checkpoint, on its device.

    Attributes:
        config: the model's config, as transformers reads it.
        embedding: the embeddings of all tokens.
        layers: the weights of each layer.
        norm: the weight of the norm after the last layer.
        head: the head's rows for this process's part of the vocabulary.
        heads: the sizes of this process's heads.
    """

    def __init__(self, directory: str, place: Place, device: torch.device) -> None:
        """Load the weights.

        Raises:
            ValueError: the model is another one than a plain Llama, or cannot be cut evenly.
        """
        self.config = config = transformers.AutoConfig.from_pretrained(directory)
        self._place = place
        if config.model_type != "llama" or config.num_key_value_heads % place.world:
            message = f"this is for Llama with a multiple of {place.world} key-value heads"
            raise ValueError(message)
        files: list[Any] = [safe_open(path, "pt", str(device)) for path in Path(directory).glob("*.safetensors")]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (a file is no mapping)
        self.embedding = self._whole("model.embed_tokens.weight")
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        self.norm = self._whole("model.norm.weight")
        self.head = self._part("model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight", 0)
        self.heads = Heads(config.num_key_value_heads // place.world, config.head_dim, config.rms_norm_eps)
        unread = self._files.keys() - self._read - {"lm_head.weight"}
        if unread:
            message = f"a plain Llama has no {min(unread)}"
            raise ValueError(message)

    _read: frozenset[str] = frozenset()

    def _layer(self, prefix: str) -> Layer:
        qkv = [self._part(f"{prefix}self_attn.{name}_proj.weight", 0) for name in "qkv"]
        gate_up = [self._part(f"{prefix}mlp.{name}_proj.weight", 0) for name in ("gate", "up")]
        return Layer(
            self._whole(f"{prefix}input_layernorm.weight"),
            torch.cat(qkv),
            self._part(f"{prefix}self_attn.o_proj.weight", 1),
            self._whole(f"{prefix}post_attention_layernorm.weight"),
            torch.cat(gate_up),
            self._part(f"{prefix}mlp.down_proj.weight", 1),
        )

    def _slice(self, name: str) -> Any:
        self._read |= {name}
        return self._files[name].get_slice(name)

    def _whole(self, name: str) -> Tensor:
        return self._slice(name)[:]  # type: ignore[no-any-return]

    def _part(self, name: str, dim: int) -> Tensor:
        stored = self._slice(name)
        size, rest = divmod(stored.get_shape()[dim], self._place.world)
        if rest:
            message = f"{name} is not divisible by {self._place.world}"
            raise ValueError(message)
        mine = slice(self._place.rank * size, (self._place.rank + 1) * size)
        return (stored[mine] if dim == 0 else stored[:, mine]).contiguous()  # type: ignore[no-any-return]


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm of rows."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads with rotary position embeddings: ``(sequences, heads, tokens, size)``."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def enter(embedding: Tensor, tokens: Tensor, at: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Begin a pass.

    Args:
        embedding: the embeddings of all tokens.
        tokens: the tokens to read, ``(sequences, tokens)``.
        at: their places in the cache.
        cos: cosines of all places, ``(places, size)``.
        sin: sines of all places.

    Returns:
        The residual stream, what comes to it, cosines and sines of the tokens, and the mask of :func:`attention`.
    """
    x = embedding[tokens]
    beyond = torch.arange(len(cos), device=x.device) > at[-1]
    mask = torch.zeros(len(cos), dtype=x.dtype, device=x.device).masked_fill(beyond, float("-inf"))
    return x, torch.zeros_like(x), cos[at], sin[at], mask


def attention(  # noqa: PLR0917
    heads: Heads,
    x: Tensor,
    more: Tensor,
    norm: Tensor,
    qkv: Tensor,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    at: Tensor,
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend by a process's heads, in a prompt from its first token on, or in a step.

    Args:
        heads: the sizes of the process's heads.
        x: the residual stream, ``(sequences, tokens, hidden)``.
        more: the output of the part before, to be added to the stream.
        norm: the weight of the norm before attention.
        qkv: the matrix of queries, keys and values.
        out: the matrix of the output.
        keys: keys in the cache, ``(sequences, heads, places, size)``.
        values: values in the cache, of the same shape.
        cos: cosines of the tokens' positions.
        sin: sines of the tokens' positions.
        at: the tokens' places in the cache.
        mask: added to a step's scores of all places.

    Returns:
        The residual stream, and the process's part of what comes to it.
    """
    x = x + more
    sequences, tokens, _ = x.shape
    product = functional.linear(normed(x, norm, heads.epsilon), qkv)
    split = product.view(sequences, tokens, -1, heads.size).transpose(1, 2)
    q, k, v = torch.split(split, [split.shape[1] - 2 * heads.kv, heads.kv, heads.kv], 1)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    keys[:, :, at], values[:, :, at] = k, v
    if tokens > 1:
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:  # the queries of a head of keys are like tokens that see the same
        grouped = q.reshape(sequences, heads.kv, -1, heads.size)
        places = mask.expand(sequences, heads.kv, grouped.shape[2], -1)
        found = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=places)
        found = found.reshape(sequences, -1, 1, heads.size)
    return x, functional.linear(found.transpose(1, 2).reshape(sequences, tokens, -1), out)


def mlp(  # noqa: PLR0917
    epsilon: float, x: Tensor, more: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a process's part of the MLP; arguments and results are like those of :func:`attention`."""
    x = x + more
    gate, up = functional.linear(normed(x, norm, epsilon), gate_up).chunk(2, -1)
    return x, functional.linear(functional.silu(gate) * up, down)


def last(  # noqa: PLR0917
    epsilon: float, place: Place, x: Tensor, more: Tensor, norm: Tensor, head: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logits of a process's part of the vocabulary behind each sequence's last token, and the likeliest.

    Returns:
        The logits, ``(sequences, tokens of the part)``, and the largest beside the token's number, zeros where other
        processes put theirs: ``(processes, 2, sequences)``.
    """
    logits = functional.linear(normed((x + more)[:, -1], norm, epsilon), head)
    best, where = logits.float().max(-1)
    mine = torch.stack((best, (where + place.rank * len(head)).float()))
    others = mine.new_zeros(1, *mine.shape)
    return logits, torch.cat([others] * place.rank + [mine[None]] + [others] * (place.world - 1 - place.rank))


def chosen(best: Tensor) -> Tensor:
    """Return the likeliest token of each sequence, ``(sequences, 1)``, of what all processes have told."""
    return best[:, 1].gather(0, best[:, 0].argmax(0, keepdim=True)).long().T


class Parts(NamedTuple):
    """The functions that a pass consists of, compiled or not."""

    enter: Callable[..., tuple[Tensor, ...]] = enter
    attention: Callable[..., tuple[Tensor, Tensor]] = attention
    mlp: Callable[..., tuple[Tensor, Tensor]] = mlp
    last: Callable[..., tuple[Tensor, Tensor]] = last
    chosen: Callable[..., Tensor] = chosen


@cache
def compiled(mode: str) -> Parts:
    """Return them compiled: once for each shape, for all layers."""
    parts: list[Any] = [torch.compile(part, fullgraph=True, dynamic=False, mode=mode) for part in Parts()]
    return Parts(*parts)


class Decoder:
    """A process's part of the model, with a cache of its own.

    Attributes:
        tokens: that are read next, and, after a pass, those that follow, ``(sequences, tokens)``.
        logits: logits of the last pass for this process's part of the vocabulary.
    """

    def __init__(self, weights: Weights, place: Place, sequences: int, places: int) -> None:
        """Allocate a cache of so many places for each of some sequences."""
        self._weights, self._place = weights, place
        device, dtype = weights.embedding.device, weights.embedding.dtype
        places = -(-places // _ALIGNED) * _ALIGNED
        shape = (len(weights.layers), sequences, weights.heads.kv, places, weights.heads.size)
        self._keys, self._values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        positions = torch.arange(places, device=device)[None]
        tables = LlamaRotaryEmbedding(weights.config).to(device)(weights.embedding, positions)
        self._cos, self._sin = (table[0] for table in tables)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(sequences, 1, dtype=torch.int64, device=device)
        self.logits = torch.zeros(0)

    def start(self, at: int, tokens: Tensor) -> None:
        """Let the next step be of these tokens, in this place."""
        self._at.fill_(at)
        self.tokens.copy_(tokens)

    def step(self, parts: Parts, sum_: Sum) -> None:
        """Read a token of each sequence, and find those that follow."""
        self.tokens.copy_(self._pass(self.tokens, self._at, parts, sum_))
        self._at += 1

    def read(self, prompt: Tensor, parts: Parts, sum_: Sum) -> Tensor:
        """Read prompts from their first tokens on, and return the tokens that follow, ``(sequences, 1)``."""
        return self._pass(prompt, torch.arange(prompt.shape[1], device=prompt.device), parts, sum_)

    def _pass(self, tokens: Tensor, at: Tensor, parts: Parts, sum_: Sum) -> Tensor:
        weights, epsilon = self._weights, self._weights.heads.epsilon
        x, more, cos, sin, mask = parts.enter(weights.embedding, tokens, at, self._cos, self._sin)
        for layer, keys, values in zip(weights.layers, self._keys, self._values, strict=True):
            x, more = parts.attention(
                weights.heads, x, more, layer.norm, layer.qkv, layer.out, keys, values, cos, sin, at, mask
            )
            x, more = parts.mlp(epsilon, x, sum_(more), layer.second_norm, layer.gate_up, layer.down)
            more = sum_(more)
        self.logits, best = parts.last(epsilon, self._place, x, more, weights.norm, weights.head)
        return parts.chosen(sum_(best))


def by_nccl(x: Tensor) -> Tensor:
    """Return a sum by the default group."""
    distributed.all_reduce(x)
    return x


class Symmetric:
    """Sums by torch's symmetric memory: in one shot, or in two in a buffer."""

    def __init__(self, place: torch.device, size: int) -> None:
        """Allocate a buffer of so many bytes."""
        if symm_mem.get_backend(place) != "CUDA":  # which may be none that can be set, but is the one by default
            symm_mem.set_backend("CUDA")
        self._group = distributed.distributed_c10d._get_default_group().group_name  # noqa: SLF001
        self._buffer = symm_mem.empty(size, dtype=torch.uint8, device=place)
        symm_mem.rendezvous(self._buffer, self._group)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum."""
        ops, buffer = torch.ops.symm_mem, self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        if x.nbytes <= _ONE_SHOT_BYTES:
            return ops.one_shot_all_reduce_copy(buffer, x, "sum", self._group)  # type: ignore[no-any-return]
        return ops.two_shot_all_reduce_(buffer.copy_(x), "sum", self._group)  # type: ignore[no-any-return]


def captured(work: Callable[[], object], place: torch.device) -> Callable[[], object]:
    """Run work, so that everything is compiled, and return what replays a CUDA graph of it; on the CPU, the work."""
    work()
    if place.type == "cpu":
        return work
    work()
    synchronize([place])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@torch.no_grad()
def measure(order: Order, rank: int, tell: Callable[[Row], None]) -> None:
    """Load the checkpoint, and measure decoding and the long prompt as of tpplan, by each way to sum."""
    place, device = Place(rank, order.gpus), order.places()[rank]
    who = "torch"
    part = Part(tell, gpus=order.gpus, cut="even", who=who)
    began = time.perf_counter()
    weights = Weights(order.directory, place, device)
    synchronize([device])
    part.row("load", time.perf_counter() - began, "s", note=f"torch {torch.__version__}")
    sums: dict[str, Sum] = {who: lambda x: x} if order.gpus == 1 else {f"{who}, NCCL": by_nccl}
    if order.gpus > 1:
        with part.guarded("symmetric memory"):
            rows = max(order.prefill, PROMPT * max(order.batches))
            sums[f"{who}, symm_mem"] = Symmetric(device, rows * weights.embedding[0].nbytes)
    for batch in order.batches:
        for who, sum_ in sums.items():
            part = Part(tell, gpus=order.gpus, cut="even", who=who)
            with part.guarded(f"decode, batch {batch}"):
                _decode(part, order, weights, place, batch, sum_)
    for who, sum_ in sums.items():
        part = Part(tell, gpus=order.gpus, cut="even", who=who)
        with part.guarded(f"prefill of {order.prefill} tokens"):
            _prefill(part, order, weights, place, sum_)


def _decode(part: Part, order: Order, weights: Weights, place: Place, batch: int, sum_: Sum) -> None:  # noqa: PLR0917
    device = weights.embedding.device
    given = torch.tensor(prompts(batch, len(weights.embedding)), device=device)
    decoder = Decoder(weights, place, batch, PROMPT + WARM + order.tokens + 1)
    first = decoder.read(given, Parts(), sum_)
    decoder.start(PROMPT, first)
    began = time.perf_counter()
    parts = _parts(device, "max-autotune-no-cudagraphs")
    step = captured(lambda: decoder.step(parts, sum_), device)
    took = time.perf_counter() - began
    decoder.start(PROMPT, first)
    tokens, seconds = [int(first[0])], []
    for _ in range(WARM + order.tokens):
        start = time.perf_counter()
        step()
        found = decoder.tokens.tolist()
        seconds.append(time.perf_counter() - start)
        tokens.append(found[0][0])
    median = statistics.median(seconds[WARM:])
    note = f"{median * 1e3:.2f} ms a step; compiled and captured in {took:.0f} s"
    part.row(f"decode, batch {batch}", batch / median, "tokens/s", note=note, tokens=tokens)


def _prefill(part: Part, order: Order, weights: Weights, place: Place, sum_: Sum) -> None:
    device = weights.embedding.device
    prompt = torch.tensor([long_prompt(order.prefill, len(weights.embedding))], device=device)
    decoder = Decoder(weights, place, 1, order.prefill)
    began = time.perf_counter()
    parts = _parts(device, "default")
    read = captured(lambda: decoder.tokens.copy_(decoder.read(prompt, parts, sum_)), device)
    took, seconds = time.perf_counter() - began, []
    for _ in range(_WARM_PREFILLS + _PREFILLS):
        start = time.perf_counter()
        read()
        decoder.tokens.tolist()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[_WARM_PREFILLS:])
    note = f"{median * 1e3:.1f} ms; compiled and captured in {took:.0f} s"
    part.row(f"prefill of {order.prefill} tokens", order.prefill / median, "tokens/s", note=note)


def _parts(device: torch.device, mode: str) -> Parts:
    """Return what a pass consists of, compiled for a GPU."""
    return Parts() if device.type == "cpu" else compiled(mode)


def main(order: Order, rank: int) -> None:
    """Measure as one of the processes; the first prints."""
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
    if order.backend == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group("nccl" if order.backend == "cuda" else "gloo", timeout=_TIMEOUT)
    measure(order, rank, lambda row: print(row.line(), flush=True) if rank == 0 else None)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Order.load(sys.argv[1]), int(os.environ["RANK"]))
