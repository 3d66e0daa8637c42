"""Rows that several family tables share."""

from __future__ import annotations

from tpplan.core.axes import Axis
from tpplan.models.families.table import Row

ALWAYS = ""
NEVER = None


def linear(
    name: str, out: str, inputs: str, bias: str | None = NEVER, *, when: str = "", home: Axis | None = None
) -> tuple[Row, ...]:
    """Return the rows of a linear layer, ``[out, in]`` and a bias; ``bias`` is the flag that it depends on."""
    weight = Row(f"{name}.weight", f"{out} {inputs}", when, home)
    return (weight,) if bias is None else (weight, Row(f"{name}.bias", out, f"{when} {bias}", home))


def conv1d(name: str, out: str, inputs: str) -> tuple[Row, ...]:
    """Return the rows of GPT-2's ``Conv1D``, a linear layer stored as ``[in, out]`` with a bias."""
    return Row(f"{name}.weight", f"{inputs} {out}", out=1), Row(f"{name}.bias", out)


def norm(
    name: str, dims: str = "h", *, bias: bool = False, when: str = "", home: Axis | None = None, heads: str = ""
) -> tuple[Row, ...]:
    """Return the rows of a normalisation."""
    return tuple(Row(f"{name}.{part}", dims, when, home, heads=heads) for part in ("weight", "bias")[: 1 + bias])


def attention(
    bias: str | None = NEVER,
    out_bias: str | None = NEVER,
    *,
    q: str = "Q",
    out: str = "o_proj",
    taken: str = "O",
    keys: str = "",
    values: str = "",
    name: str = "self_attn",
) -> tuple[Row, ...]:
    """Return the rows of attention with separate query, key and value projections.

    ``q`` is what the first gives, ``taken`` what the output projection takes, and ``keys`` and ``values`` are the flags
    of layers that project them.
    """
    return (
        *linear(f"{name}.q_proj", q, "RS", bias),
        *linear(f"{name}.k_proj", "K", "RS", bias, when=keys),
        *linear(f"{name}.v_proj", "V", "RS", bias, when=values),
        *linear(f"{name}.{out}", "RS", taken, out_bias),
    )


#: The same with biases that config.json may switch on, in all projections.
BIASED_ATTENTION = attention("attention_bias", "attention_bias")

#: Norms of all query heads together, and of all key heads.
WIDE_NORMS = (*norm("self_attn.q_norm", "Q"), *norm("self_attn.k_norm", "K"))

#: Norms of what attention and MLP give.
POST_NORMS = (*norm("post_attention_layernorm"), *norm("post_feedforward_layernorm"))


def head_norms(
    q: str = "q_norm", k: str = "k_norm", *, bias: bool = False, when: str = "", heads: tuple[str, str] = ("", "")
) -> tuple[Row, ...]:
    """Return the rows of norms over single heads, which live where the KV heads do."""
    return tuple(
        row
        for name, word in zip((q, k), heads, strict=True)
        for row in norm(f"self_attn.{name}", "d", bias=bias, when=when, home=Axis.KV_HEADS, heads=word)
    )


def gated(name: str = "mlp", width: str = "ID", bias: str | None = NEVER, *, when: str = "") -> tuple[Row, ...]:
    """Return the rows of a gated MLP with separate gate and up projections."""
    return (
        *linear(f"{name}.gate_proj", width, "RS", bias, when=when),
        *linear(f"{name}.up_proj", width, "RS", bias, when=when),
        *linear(f"{name}.down_proj", "RS", width, bias, when=when),
    )


def numbered(name: str, width: str, *, when: str = "") -> tuple[Row, ...]:
    """Return the rows of a gated MLP as Llama's first release calls them: ``w1`` is the gate, ``w3`` leads up."""
    return (
        *linear(f"{name}.w1", width, "RS", when=when),
        *linear(f"{name}.w2", "RS", width, when=when),
        *linear(f"{name}.w3", width, "RS", when=when),
    )


#: The same with gate and up projections in one tensor.
FUSED_MLP = (*linear("mlp.gate_up_proj", "ID+ID", "RS"), *linear("mlp.down_proj", "RS", "ID"))


def plain(up: str, down: str, bias: str | None = NEVER) -> tuple[Row, ...]:
    """Return the rows of an MLP without a gate."""
    return *linear(up, "ID", "RS", bias), *linear(down, "RS", "ID", bias)


def outside(
    embedding: str = "model.embed_tokens",
    final: tuple[Row, ...] = norm("model.norm"),
    head: str = "lm_head",
) -> tuple[Row, ...]:
    """Return the rows of embedding, last norm and output matrix."""
    return (
        Row(f"{embedding}.weight", "VC RS", lookup="!tie_word_embeddings"),
        *final,
        Row(f"{head}.weight", "VC RS", "!tie_word_embeddings"),
    )


def correction(name: str, dims: str = "e", when: str = ALWAYS) -> tuple[Row, ...]:
    """Return the row of a bias that corrects a router's scores, F32 whatever the model's dtype."""
    return (Row(name, dims, when, home=Axis.EXPERT_INTERMEDIATE, dtype="F32"),)


#: The two norms of a layer in most decoders.
NORMS = (*norm("input_layernorm"), *norm("post_attention_layernorm"))
BIASED_NORMS = (*norm("input_layernorm", bias=True), *norm("post_attention_layernorm", bias=True))

#: The router of most mixtures of experts.
ROUTER = (*linear("mlp.gate", "e", "h", home=Axis.EXPERT_INTERMEDIATE),)

#: Experts whose gate, up and down projections are tensors of their own.
EXPERTS = gated("mlp.experts.{expert}", "EX")

#: Mixtral's router and experts.
MIXTRAL_EXPERTS = (
    *linear("block_sparse_moe.gate", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
    *numbered("block_sparse_moe.experts.{expert}", "EX"),
)

#: An expert that all tokens are routed to, as far as a gate lets it through.
SHARED_EXPERT = (
    *gated("mlp.shared_expert", "SX"),
    *linear("mlp.shared_expert_gate", "1", "h", home=Axis.SHARED_INTERMEDIATE),
)
