"""The language of the family tables: one row per tensor, its dimensions written as short words.

A dimension is one word, or several joined by ``+`` where a tensor is fused; ``e*EX`` is one EX for each of e, behind
each other. The words, and what cuts them:

====== ========================================= ====== =========================================
VC     vocabulary                       (VC)     RS     residual stream                  (RS)
Q      query heads × head size          (Q)      O      query heads × value head size    (Q)
K      key heads × head size            (KV)     V      value heads × head size          (KV)
QKV    query, key, value of each KV head (KV)    q, k   query heads, KV heads            (Q, KV)
ID     dense MLP                        (ID)     KUP    unrotated key and value heads of MLA (KV)
EX     one routed expert                (EX)     EX2    its gate and up, interleaved     (EX)
SX     shared experts                   (SX)     d      head size                        (uncut)
h      hidden size                      (uncut)  e      routed experts                   (uncut)
p      positions                        (uncut)  p2     positions, and two more          (uncut)
1      one                              (uncut)  qr     rank of the queries in MLA       (uncut)
kr     rank of keys and values in MLA   (uncut)  krr    the same with the rotary part    (uncut)
ih     heads of MLA's indexer           (uncut)  ik     key of the indexer               (uncut)
iq     all queries of the indexer       (uncut)  ck     tokens of a convolution          (uncut)
LK     key heads of linear attention × size (LH) LV     its value heads × their size     (LH)
LQKVZ  query, key, its values and gates  (LH)    lh lh2 one and two for each value head  (LH)
lv     size of its value heads          (uncut)  Q2     query and gate of each query head (Q)
HQ     hidden size, as query heads      (Q)      kn     unrotated key of a head in MLA   (uncut)
v      value head size                  (uncut)  ER     what experts read and give        (RS)
lk     size of its key heads            (uncut)  lr     rank of Mamba's dt               (uncut)
====== ========================================= ====== =========================================

LH are the key heads of linear attention with their value heads. Of Mamba-2 they are its heads: LV are their channels,
lh is one number for each, and LK is B or C of its groups, of which a device holds those that its heads are of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Final

from attrs import evolve, field, frozen

from tpplan.core.axes import Axis
from tpplan.core.model import Attention, Block, LinearAttention, Parameter, Segment
from tpplan.models.config import Config

#: The flag of layers that attend to what an earlier layer has cached of keys and values.
SHARED_KV: Final = "shared_kv"

#: The flag of layers without attention.
NO_ATTENTION: Final = "no_attention"

_NO_LINEAR = LinearAttention(0, 0, 0, 0, 0)


@frozen(kw_only=True)
class Shape:
    """The numbers of a config.json that tables refer to, checked against each other.

    Attributes:
        hidden: width of the residual stream.
        vocab: rows of the embedding.
        context: tokens per sequence that the model was made for, before any scaling of RoPE.
        q_heads: query heads.
        kv_heads: key/value heads.
        head_dim: elements of a query or key head.
        v_head_dim: elements of a value head.
        intermediate: width of a dense MLP, 0 if no layer has one.
        experts: routed experts, 0 if no layer has them.
        experts_per_token: experts that a token is routed to.
        expert_intermediate: width of a routed expert.
        shared_intermediate: width of all shared experts together.
        expert_rank: what routed experts read and give if that is a latent, 0 if it is the residual stream.
        q_rank: MLA's rank of the queries, 0 without.
        kv_rank: MLA's rank of keys and values, 0 without MLA.
        rope_dim: MLA's rotary part of a head.
        dt_rank: rank of the time steps of Mamba-1, 0 without it.
        index_heads: heads of the indexer that chooses MLA's tokens, 0 without.
        index_dim: elements of a query or key head of the indexer.
        windows: for each layer the tokens of its sliding window, 0 without.
        sparse: for each layer whether its MLP is made of experts.
        linear: for each layer its linear attention, which has the same sizes in all layers that have it.
        alone: for each layer its only part, ``mixer`` (attention of any kind) or ``mlp``, empty if it has both; nothing
            if all layers have both.
        flags: the names that a row's ``when`` may test, if they are true.
        compressed_dim: elements that a layer caches for every ``ratio`` tokens, 0 without compression.
        ratio: tokens that are compressed into one.
        buffer_dim: most elements of what is not compressed yet.
        further: further words.
        layers: the shape of each layer, where layers differ in more than windows, experts and linear attention.
    """

    hidden: int
    vocab: int
    context: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    intermediate: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    expert_rank: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    dt_rank: int = 0
    index_heads: int = 0
    index_dim: int = 0
    windows: tuple[int, ...]
    sparse: tuple[bool, ...]
    linear: tuple[LinearAttention | None, ...]
    alone: tuple[str, ...] = ()
    flags: frozenset[str]
    compressed_dim: int = 0
    ratio: int = 0
    buffer_dim: int = 0
    further: tuple[tuple[str, Segment], ...] = ()
    layers: tuple[Shape, ...] = ()

    def having(self, *flags: str, **words: int | Segment) -> Shape:
        """Return the shape with further flags, and further words; of those that nothing cuts their lengths."""
        segments = ((word, Segment(None, each) if isinstance(each, int) else each) for word, each in words.items())
        return evolve(self, flags=self.flags | {*flags}, further=(*self.further, *segments))

    @cached_property
    def words(self) -> Mapping[str, Segment]:
        """What each word of a table stands for in this model."""
        kv, q, d, v = self.kv_heads, self.q_heads, self.head_dim, self.v_head_dim
        linear = next(filter(None, self.linear), _NO_LINEAR)
        keys, values = linear.key_heads * linear.key_head_dim, linear.value_heads * linear.value_head_dim
        return {
            "VC": Segment(Axis.VOCAB, self.vocab),
            "RS": Segment(Axis.RESIDUAL, self.hidden),
            "Q": Segment(Axis.Q_HEADS, q * d),
            "O": Segment(Axis.Q_HEADS, q * v),
            "K": Segment(Axis.KV_HEADS, kv * d),
            "V": Segment(Axis.KV_HEADS, kv * v),
            "QKV": Segment(Axis.KV_HEADS, q * d + kv * (d + v)),
            "KUP": Segment(Axis.KV_HEADS, kv * (d - self.rope_dim + v)),
            "q": Segment(Axis.Q_HEADS, q),
            "k": Segment(Axis.KV_HEADS, kv),
            "ID": Segment(Axis.INTERMEDIATE, self.intermediate),
            "EX": Segment(Axis.EXPERT_INTERMEDIATE, self.expert_intermediate),
            "EX2": Segment(Axis.EXPERT_INTERMEDIATE, 2 * self.expert_intermediate),
            "ER": Segment(Axis.RESIDUAL, self.expert_rank or self.hidden),
            "SX": Segment(Axis.SHARED_INTERMEDIATE, self.shared_intermediate),
            "d": Segment(None, d),
            "h": Segment(None, self.hidden),
            "e": Segment(None, self.experts),
            "p": Segment(None, self.context),
            "p2": Segment(None, self.context + 2),
            "1": Segment(None, 1),
            "qr": Segment(None, self.q_rank),
            "kr": Segment(None, self.kv_rank),
            "krr": Segment(None, self.kv_rank + self.rope_dim),
            "HQ": Segment(Axis.Q_HEADS, self.hidden),
            "kn": Segment(None, d - self.rope_dim),
            "v": Segment(None, v),
            "Q2": Segment(Axis.Q_HEADS, 2 * q * d),
            "LK": Segment(Axis.LINEAR_HEADS, keys, shared=linear.key_heads * linear.shared_keys),
            "LV": Segment(Axis.LINEAR_HEADS, values),
            "LQKVZ": Segment(Axis.LINEAR_HEADS, 2 * (keys + values)),
            "lh": Segment(Axis.LINEAR_HEADS, linear.value_heads),
            "lh2": Segment(Axis.LINEAR_HEADS, 2 * linear.value_heads),
            "lk": Segment(None, linear.key_head_dim),
            "lr": Segment(None, self.dt_rank),
            "lv": Segment(None, linear.value_head_dim),
            "ck": Segment(None, linear.kernel),
            "ih": Segment(None, self.index_heads),
            "ik": Segment(None, self.index_dim),
            "iq": Segment(None, self.index_heads * self.index_dim),
            **dict(self.further),
        }


@frozen
class Row:
    """One tensor, or the tensors of all experts, or (``{head}`` in the name) one for each head.

    Attributes:
        name: in the checkpoint, after the family's prefix.
        dims: its dimensions, separated by blanks; empty for a single number.
        when: flags, separated by blanks, that must all be true (with a leading ``!``: false) for the tensor to exist.
        home: see :class:`~tpplan.core.model.Parameter`.
        out: the dimension of the outputs, for tensors that are cut at all.
        heads: how many tensors ``{head}`` stands for, as a word.
        first: the number of the first of these, as a word; empty for 0.
        step: by how much their numbers grow, as a word; empty for 1.
        lookup: when a token reads single rows of it, as flags like those of ``when``; None for never.
        dtype: as safetensors writes it, empty for the model's.
    """

    name: str
    dims: str
    when: str = ""
    home: Axis | None = None
    out: int = 0
    heads: str = ""
    first: str = ""
    step: str = ""
    lookup: str | None = None
    dtype: str = ""

    def parameters(self, shape: Shape, dtype: str, prefix: str) -> Iterator[Parameter]:
        """Yield what the row stands for in a model of this shape, if it has it."""
        if not _hold(self.when, shape.flags):
            return
        words = shape.words
        dims = tuple(tuple(_segments(words, dim)) for dim in self.dims.split())
        out = self.out if any(segment.axis for dim in dims for segment in dim) else None
        lookup = self.lookup is not None and _hold(self.lookup, shape.flags)
        copies = shape.experts if "{expert}" in self.name else 1
        first = words[self.first].length if self.first else 0
        step = words[self.step].length if self.step else 1
        for head in range(words[self.heads].length if self.heads else 1):
            name = prefix + self.name.replace("{head}", str(first + head * step))
            yield Parameter(name, self.dtype or dtype, dims, out, self.home, copies, lookup)


def _segments(words: Mapping[str, Segment], dim: str) -> Iterator[Segment]:
    """Yield what a dimension is made of."""
    for part in dim.split("+"):
        times, _, word = part.rpartition("*")
        yield from (words[word],) * (words[times].length if times else 1)


def _hold(when: str, flags: frozenset[str]) -> bool:
    """Whether all that ``when`` names are among the flags, and none that it names with a leading ``!``."""
    return all((flag.removeprefix("!") in flags) != flag.startswith("!") for flag in when.split())


@frozen(kw_only=True)
class Family:
    """What an architecture's checkpoints hold, and what a key that its config.json leaves out means.

    Attributes:
        architectures: the classes of transformers that these tables describe; the first is the default.
        outside: rows of the tensors outside the layers.
        layer: rows of every layer, without its MLP.
        linear_layer: the same of layers with linear attention.
        dense: rows of a dense MLP.
        sparse: rows of an MLP made of experts.
        layers: how the names of a layer's tensors start.
        root: how all names start.
        prefix: the start of names that some checkpoints leave out.
        renamed: starts of names (with a dot: parts) that some checkpoints have, and what the tables have there.
        ignored: patterns (fnmatch) of names in checkpoints that no plan needs, such as buffers and vision towers.
        extra_layers: whether checkpoints may hold layers beyond ``num_hidden_layers`` (multi-token prediction).
        extra_experts: whether checkpoints may hold matrices of experts beyond those that compute anything.
        defaults: values of keys that a config.json may leave out, as in transformers' configuration classes.
        flags: keys that rows test, with their defaults; all families test ``tie_word_embeddings`` too.
        tied: the default of ``tie_word_embeddings``.
        ties: whether that has a meaning; else the output matrix is never the embedding.
        uniform: keys that may list a number for each layer, which must be the same for all.
        mlp_ratio: the intermediate size over the hidden size where the config does not say, 0 for no such rule.
        refused: keys that must be absent, null or false.
        fixed_head: whether the head size is always the hidden size over the query heads.
        window: the sliding windows: which layers have one, from the config and the number of layers; None if the family
            has no sliding windows.
        moe: which layers have experts, from the config and the number of layers; None if none ever has.
        linear: the linear attention of each layer, from the config and the number of layers; None if none ever has.
        parallel: whether layers with linear attention have attention beside it.
        alone: the only part of each layer, see :class:`Shape`, from the config and the number of layers; None if all
            layers have both.
        usual: gives the config with the keys that tables and these functions read, where the family has others.
        expert_key: the key with the width of a routed expert.
        own: for each layer the keys of which it has values of its own, from the config and the number of layers; None
            if layers differ in windows, experts and linear attention only.
        adapt: changes the shape where the family reads its config in its own way.
        note: what a plan says of every model of the family, a sentence; empty for nothing.
    """

    architectures: tuple[str, ...]
    outside: tuple[Row, ...]
    layer: tuple[Row, ...]
    linear_layer: tuple[Row, ...] = ()
    dense: tuple[Row, ...] = ()
    sparse: tuple[Row, ...] = ()
    layers: str = "model.layers.{layer}."
    root: str = ""
    prefix: str = "model."
    renamed: Mapping[str, str] = field(factory=dict)
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    extra_layers: bool = False
    extra_experts: bool = False
    defaults: Mapping[str, int] = field(factory=dict)
    flags: Mapping[str, bool] = field(factory=dict)
    tied: bool = False
    ties: bool = True
    uniform: tuple[str, ...] = ()
    mlp_ratio: int = 0
    refused: tuple[str, ...] = ("is_encoder_decoder",)
    fixed_head: bool = False
    window: Callable[[Config, int], tuple[int, ...]] | None = None
    moe: Callable[[Config, int], tuple[bool, ...]] | None = None
    linear: Callable[[Config, int], tuple[LinearAttention | None, ...]] | None = None
    parallel: bool = False
    alone: Callable[[Config, int], tuple[str, ...]] | None = None
    usual: Callable[[Config], Config] | None = None
    expert_key: str = "moe_intermediate_size"
    own: Callable[[Config, int], tuple[Mapping[str, object], ...]] | None = None
    adapt: Callable[[Config, Shape], Shape] | None = None
    note: str = ""

    def block(self, shape: Shape, layers: tuple[int, ...], dtype: str) -> Block:
        """Return the block of ``layers``, which must be equal in window, linear attention, MLP, parts and shape."""
        sparse, linear, window = shape.sparse[layers[0]], shape.linear[layers[0]], shape.windows[layers[0]]
        alone = shape.alone[layers[0]] if shape.alone else ""
        shape = shape.layers[layers[0]] if shape.layers else shape
        mixer = () if alone == "mlp" else self.linear_layer if linear else self.layer
        mlp = () if alone == "mixer" else self.sparse if sparse else self.dense
        sparse = sparse and bool(mlp)
        has_attention = bool(mixer) and (self.parallel or not linear) and NO_ATTENTION not in shape.flags
        shared = SHARED_KV in shape.flags
        latent = shape.index_dim + (0 if shared else shape.kv_rank + shape.rope_dim)
        attention = Attention(
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.v_head_dim,
            window=window,
            latent_dim=latent if shape.kv_rank else 0,
            shared=shared,
            compressed_dim=shape.compressed_dim,
            ratio=shape.ratio,
            buffer_dim=shape.buffer_dim,
        )
        return Block(
            layers=layers,
            attention=attention if has_attention else None,
            parameters=tuple(
                p for row in (*mixer, *mlp) for p in row.parameters(shape, dtype, self.root + self.layers)
            ),
            intermediate=shape.intermediate if mlp and not sparse else 0,
            expert_intermediate=shape.expert_intermediate if sparse else 0,
            shared_intermediate=shape.shared_intermediate if sparse else 0,
            experts=shape.experts if sparse else 0,
            experts_per_token=shape.experts_per_token if sparse else 0,
            linear=linear,
        )


def sizes(*numbers: int, head_dim: int = 0) -> Mapping[str, int]:
    """Return the defaults of all sizes, as in transformers' configuration classes."""
    keys = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    )
    return {**dict(zip(keys, numbers, strict=True)), **({"head_dim": head_dim} if head_dim else {})}
