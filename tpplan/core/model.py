"""A model as the planner sees it: its layers, their parameters, and what each layer caches."""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.core.axes import Axis
from tpplan.core.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bits per element of the dtypes of the safetensors format (``Dtype::bitsize`` of the safetensors library).
DTYPE_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


#: What plans call layers that predict further tokens.
PREDICTION = "prediction layers"

#: What the formats of weights begin with that GGUF files store.
GGUF = "GGUF "


@frozen
class Segment:
    """A run of elements along one dimension of a tensor.

    Attributes:
        axis: the axis that the run is cut with, in proportion; None if it is never cut.
        length: number of elements as stored (a packed dimension is shorter than its axis).
        block: number of stored elements that a cut may not separate.
        shared: number of equal parts that each serve as many elements of the axis: a device that holds any of these
            elements holds the whole part; 0 if the run is cut in proportion.
    """

    axis: Axis | None
    length: int
    block: int = 1
    shared: int = 0

    def unit(self, size: int) -> int:
        """Return the fewest elements of its axis, which has ``size``, that span a whole number of blocks."""
        return size * self.block // gcd(size * self.block, self.length)


@frozen
class Parameter:
    """A tensor of the checkpoint, or the equally shaped tensors of several experts.

    Attributes:
        name: name in the checkpoint, with ``{layer}`` and ``{expert}`` in place of the numbers.
        dtype: dtype in safetensors notation, such as ``BF16``.
        dims: segments of each dimension; a fused ``qkv_proj`` has three in its first.
        out: the dimension of the layer's outputs, which the layout ``gather`` cuts; None if there is none.
        home: the axis whose devices need this parameter where it is not cut; None for every device in use.
        copies: number of tensors that the name stands for (experts), else 1.
        lookup: whether a token reads single rows of it (an embedding that is not also the output matrix).
    """

    name: str
    dtype: str
    dims: tuple[tuple[Segment, ...], ...]
    out: int | None = None
    home: Axis | None = None
    copies: int = 1
    lookup: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(sum(s.length for s in dim) for dim in self.dims)

    @property
    def elements(self) -> int:
        """Elements of all copies."""
        return prod(self.shape) * self.copies

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        return -(-prod(self.shape) * DTYPE_BITS[self.dtype] // 8) * self.copies

    def cut_dim(self, layout: str) -> int | None:
        """Return the dimension that ``layout`` cuts, or None if every device that needs the tensor holds all of it.

        ``gather`` cuts the output dimension. ``reduce`` cuts the first dimension with an axis other than the residual
        stream, be it input or output.
        """
        if layout == "gather":
            cut = self.out is not None and any(s.axis for s in self.dims[self.out])
            return self.out if cut else None
        for i, dim in enumerate(self.dims):
            if any(s.axis not in {None, Axis.RESIDUAL} for s in dim):
                return i
        return None


@frozen
class Attention:
    """The attention of one layer.

    Attributes:
        q_heads: number of query heads.
        kv_heads: number of key/value heads; with a latent cache, of the heads that are cut, each on its own.
        head_dim: elements of one query or key head.
        v_head_dim: elements of one value head.
        window: size of the sliding window in tokens per sequence; 0 for full attention.
        latent_dim: elements cached per token for all heads together (MLA: latent + rotary part + an indexer's key); 0
            caches K and V per head.
        shared: whether it attends to keys and values that an earlier layer has cached, and caches none of its own;
            ``latent_dim`` is then what it caches beside them.
        compressed_dim: elements cached for every ``ratio`` tokens, for all heads together and beyond any window.
        ratio: tokens that are compressed into one, 0 without compression.
        buffer_dim: most elements, in the dtype of the activations, of what a sequence keeps until it is compressed.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int = 0
    latent_dim: int = 0
    shared: bool = False
    compressed_dim: int = 0
    ratio: int = 0
    buffer_dim: int = 0


@frozen
class LinearAttention:
    """What a layer has that keeps a state of each sequence instead of its tokens.

    This is linear attention (gated DeltaNet, Kimi Delta Attention) and its dual, the state space models: Mamba-2's B
    and C, one for each group of heads, are keys and queries, and its x are the values (arXiv:2405.21060). A short
    convolution has values alone.

    Attributes:
        key_heads: number of query heads, and of key heads (Mamba: groups).
        value_heads: number of value heads, a multiple of the key heads (Mamba: heads; channels where it has none).
        key_head_dim: elements of one query or key head (Mamba: the state of a channel); 0 if there are none.
        value_head_dim: elements of one value head.
        kernel: number of tokens that the convolution spans, 0 without one.
        shared_keys: whether value heads are cut, so that devices share the key head of those that they both have; else
            key heads are cut, each with all of its value heads.
        plain_keys: whether queries and keys are not convolved (Mamba-1).
        rounded: whether the state is kept in the dtype of the activations (lightning attention), else in 32 bits.
    """

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel: int
    shared_keys: bool = False
    plain_keys: bool = False
    rounded: bool = False

    @property
    def group(self) -> int:
        """Number of value heads that belong to a key head."""
        return self.value_heads // self.key_heads

    @property
    def heads(self) -> int:
        """Number of the heads that are cut."""
        return self.value_heads if self.shared_keys else self.key_heads


@frozen
class Block:
    """Layers that are identical for the planner.

    Attributes:
        layers: layer numbers, ascending.
        attention: attention of each of these layers, None if they have none.
        intermediate: width of the dense MLP, 0 without one.
        expert_intermediate: width of one routed expert, 0 without experts.
        shared_intermediate: width of all shared experts together, 0 without them.
        experts: number of routed experts.
        experts_per_token: number of experts that a token is routed to.
        parameters: tensors of each of these layers.
        linear: linear attention of each of these layers, or what else keeps a state, None if they have none.
    """

    layers: tuple[int, ...]
    attention: Attention | None
    parameters: tuple[Parameter, ...]
    intermediate: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    experts: int = 0
    experts_per_token: int = 0
    linear: LinearAttention | None = None

    def sizes(self) -> Iterator[tuple[Axis, int]]:
        """Yield the axes that this block's layers have, with their sizes in elements."""
        if self.attention:
            yield Axis.KV_HEADS, self.attention.kv_heads
            yield Axis.Q_HEADS, self.attention.q_heads
        if self.linear:
            yield Axis.LINEAR_HEADS, self.linear.heads
        for axis, size in (
            (Axis.INTERMEDIATE, self.intermediate),
            (Axis.EXPERT_INTERMEDIATE, self.expert_intermediate),
            (Axis.SHARED_INTERMEDIATE, self.shared_intermediate),
        ):
            if size:
                yield axis, size


@frozen
class NotPlanned:
    """A part of a model's files that a plan does not count.

    Attributes:
        what: what it is: ``vision tower``, ``prediction layers``, …
        bytes: its size in the files; 0 if no file says.
    """

    what: str
    bytes: int = 0

    @property
    def text(self) -> str:
        """What it is and how large, for people: ``vision tower, 1.07 GiB``."""
        return f"{self.what}, {format_bytes(self.bytes) if self.bytes else 'of unknown size'}"


@frozen
class ModelSpec:
    """An immutable, normalised description of a model, the same whichever file format it was read from.

    Attributes:
        name: display name, from the directory or the config; not part of the fingerprint.
        architecture: the first entry of the config's ``architectures``, or the family's default.
        model_type: the config's ``model_type``.
        hidden_size: width of the residual stream.
        vocab_size: rows of the output matrix, as stored.
        max_context: maximum tokens per sequence.
        tied_embeddings: whether the embedding is also the output matrix.
        dtype: dtype of the activations: ``float32``, ``float16`` or ``bfloat16``.
        weight_format: storage format of the weights: ``BF16``, ``GPTQ 4-bit g128``, …
        parameter_count: number of parameters of the unquantised model.
        blocks: groups of identical layers, in order of their first layer.
        parameters: the tensors outside the layers.
        gather_only: why the weights' input dimension cannot be cut, so that only ``gather`` works; else empty.
        context_basis: the RoPE scaling that decides the maximum, such as ``32768 × 4 by yarn``, empty if none does; not
            part of the fingerprint.
        not_planned: parts of the files that are not counted; not part of the fingerprint.
        assumed: what is assumed of the weights because no file says, in words, empty if nothing is; not part of the
            fingerprint.
        notes: what else a reader of the model should know, a sentence each; not part of the fingerprint.
    """

    name: str
    architecture: str
    model_type: str
    hidden_size: int
    vocab_size: int
    max_context: int
    tied_embeddings: bool
    dtype: str
    weight_format: str
    parameter_count: int
    blocks: tuple[Block, ...]
    parameters: tuple[Parameter, ...]
    gather_only: str = ""
    context_basis: str = ""
    not_planned: tuple[NotPlanned, ...] = ()
    assumed: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether weights are numbers of 16 or 32 bits, in no format of blocks or codes."""
        return self.weight_format in {"BF16", "F16", "F32"}

    @property
    def by_layer(self) -> dict[int, Block]:
        """The block of each layer, in the order of layers."""
        found = {layer: block for block in self.blocks for layer in block.layers}
        return {layer: found[layer] for layer in sorted(found)}

    def tensors(self) -> Iterator[tuple[str, Parameter, int | None]]:
        """Yield every tensor by its full name, the parameter that it is a copy of, and its layer, None outside."""
        for parameter in self.parameters:
            yield parameter.name, parameter, None
        for block in self.blocks:
            for parameter in block.parameters:
                for layer in block.layers:
                    name = parameter.name.replace("{layer}", str(layer))
                    for expert in range(parameter.copies):
                        yield name.replace("{expert}", str(expert)), parameter, layer

    @property
    def layer_count(self) -> int:
        """Number of layers in all blocks."""
        return sum(len(block.layers) for block in self.blocks)

    @property
    def weight_bytes(self) -> int:
        """Total bytes of all tensors, each counted once."""
        layers = sum(p.bytes * len(block.layers) for block in self.blocks for p in block.parameters)
        return layers + sum(p.bytes for p in self.parameters)
