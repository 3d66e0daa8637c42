"""Tables of decoders from before Llama, whose names and fused projections are their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.models.families.rows import (
    ALWAYS,
    BIASED_NORMS,
    attention,
    conv1d,
    head_norms,
    linear,
    norm,
    outside,
    plain,
)
from tpplan.models.families.shape import renamed
from tpplan.models.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from tpplan.models.config import Config

#: Causal masks that old checkpoints hold, and the tables of the rotary embedding.
_BUFFERS = ("*.attn.bias", "*.attn.masked_bias", "*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")


#: What GPT-2 and those after it have outside the layers, and the norms of a layer.
_GPT2_OUTSIDE = (
    Row("transformer.wpe.weight", "p h", lookup=ALWAYS),
    *outside("transformer.wte", norm("transformer.ln_f", bias=True)),
)
_GPT2_NORMS = (*norm("ln_1", bias=True), *norm("ln_2", bias=True))


def _falcon(config: Config, shape: Shape) -> Shape:
    """Find Falcon's KV heads and norms, which depend on three switches.

    ``num_kv_heads`` counts only where neither switch overrides it: falcon-7b's config says 71 and means 1.
    """
    grouped = "new_decoder_architecture" in shape.flags
    single = "multi_query" in shape.flags and not grouped
    norms = config.count("num_ln_in_parallel_attn", default=2 if grouped else 1)
    derived = {"one_kv_head": single, "two_norms": norms == 2 and "parallel_attn" in shape.flags}  # noqa: PLR2004
    return evolve(
        shape,
        kv_heads=1 if single else shape.kv_heads if grouped else shape.q_heads,
        flags=shape.flags | {flag for flag, holds in derived.items() if holds},
    )


def _gpt_bigcode(_config: Config, shape: Shape) -> Shape:
    """Find the KV heads: one, or one for each query head."""
    return evolve(shape, kv_heads=1 if "multi_query" in shape.flags else shape.q_heads)


def _opt(config: Config, shape: Shape) -> Shape:
    """Check that the embedding is as wide as the layers.

    Raises:
        ModelError: it is not.
    """
    width = config.count("word_embed_proj_dim", default=shape.hidden)
    if width != shape.hidden:
        problem = f"word_embed_proj_dim is {width}, but hidden_size is {shape.hidden}"
        raise config.error(problem, "tpplan plans for models of type opt whose embedding is as wide as their layers")
    return shape


#: How much wider an MLP of MPT is than its input.
_MPT_RATIO: Final = 4


def _mpt(config: Config) -> Config:
    """Read all sizes under their usual names.

    Raises:
        ModelError: the MLP is of another width than transformers' class has it.
    """
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")
    config = renamed(config, dict(zip(("d_model", "n_heads", "n_layers", "max_seq_len"), names, strict=True)))
    ratio = config.count("expansion_ratio", default=_MPT_RATIO)
    if ratio != _MPT_RATIO:
        raise config.error(f"expansion_ratio is {ratio}, but MLPs of models of type mpt are {_MPT_RATIO} times as wide")
    return config


def _gpt_neo(config: Config) -> Config:
    """Read layers and heads by their names."""
    return renamed(config, {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"})


CLASSIC: Final[dict[str, Family]] = {
    "gpt2": Family(
        architectures=("GPT2LMHeadModel",),
        outside=_GPT2_OUTSIDE,
        layers="transformer.h.{layer}.",
        layer=(
            *_GPT2_NORMS,
            *conv1d("attn.c_attn", "Q+K+V", "RS"),
            *conv1d("attn.c_proj", "RS", "O"),
        ),
        dense=(*conv1d("mlp.c_fc", "ID", "RS"), *conv1d("mlp.c_proj", "RS", "ID")),
        prefix="transformer.",
        ignored=_BUFFERS,
        refused=("is_encoder_decoder", "add_cross_attention"),
        mlp_ratio=4,
        tied=True,
        fixed_head=True,
    ),
    "gpt_neox": Family(
        architectures=("GPTNeoXForCausalLM",),
        outside=outside("gpt_neox.embed_in", norm("gpt_neox.final_layer_norm", bias=True), "embed_out"),
        layers="gpt_neox.layers.{layer}.",
        layer=(
            *BIASED_NORMS,
            *linear("attention.query_key_value", "QKV", "RS", "attention_bias"),
            *linear("attention.dense", "RS", "O", "attention_bias"),
        ),
        dense=plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", ALWAYS),
        prefix="gpt_neox.",
        ignored=_BUFFERS,
        flags={"attention_bias": True},
        fixed_head=True,
    ),
    "falcon": Family(
        architectures=("FalconForCausalLM", "RWForCausalLM"),
        outside=outside("transformer.word_embeddings", norm("transformer.ln_f", bias=True)),
        layers="transformer.h.{layer}.",
        layer=(
            *norm("ln_attn", bias=True, when="two_norms"),
            *norm("ln_mlp", bias=True, when="two_norms"),
            *norm("input_layernorm", bias=True, when="!two_norms"),
            *norm("post_attention_layernorm", bias=True, when="!parallel_attn"),
            *linear("self_attention.query_key_value", "Q+K+V", "RS", "bias", when="one_kv_head"),
            *linear("self_attention.query_key_value", "QKV", "RS", "bias", when="!one_kv_head"),
            *linear("self_attention.dense", "RS", "O", "bias"),
        ),
        dense=plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "bias"),
        prefix="transformer.",
        ignored=("*.rotary_emb.inv_freq", "*.maybe_rotary.inv_freq"),
        defaults={"max_position_embeddings": 2048},
        flags={"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False},
        mlp_ratio=4,
        tied=True,
        fixed_head=True,
        adapt=_falcon,
    ),
    "gpt_bigcode": Family(
        architectures=("GPTBigCodeForCausalLM",),
        outside=_GPT2_OUTSIDE,
        layers="transformer.h.{layer}.",
        layer=(
            *_GPT2_NORMS,
            *linear("attn.c_attn", "Q+K+V", "RS", ALWAYS, when="multi_query"),
            *linear("attn.c_attn", "QKV", "RS", ALWAYS, when="!multi_query"),
            *linear("attn.c_proj", "RS", "O", ALWAYS),
        ),
        dense=plain("mlp.c_fc", "mlp.c_proj", ALWAYS),
        prefix="transformer.",
        ignored=_BUFFERS,
        flags={"multi_query": True},
        refused=("is_encoder_decoder", "add_cross_attention"),
        mlp_ratio=4,
        tied=True,
        fixed_head=True,
        adapt=_gpt_bigcode,
    ),
    "gptj": Family(
        architectures=("GPTJForCausalLM",),
        outside=(
            *outside("transformer.wte", norm("transformer.ln_f", bias=True)),
            Row("lm_head.bias", "VC"),
        ),
        layers="transformer.h.{layer}.",
        layer=(
            *norm("ln_1", bias=True),
            *attention(name="attn", out="out_proj"),
        ),
        dense=plain("mlp.fc_in", "mlp.fc_out", ALWAYS),
        prefix="transformer.",
        ignored=_BUFFERS,
        mlp_ratio=4,
        fixed_head=True,
    ),
    "bloom": Family(
        architectures=("BloomForCausalLM",),
        outside=(
            *outside("transformer.word_embeddings", norm("transformer.ln_f", bias=True)),
            *norm("transformer.word_embeddings_layernorm", bias=True),
        ),
        layers="transformer.h.{layer}.",
        layer=(
            *BIASED_NORMS,
            *linear("self_attention.query_key_value", "QKV", "RS", ALWAYS),
            *linear("self_attention.dense", "RS", "O", ALWAYS),
        ),
        dense=plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", ALWAYS),
        prefix="transformer.",
        ignored=(),
        defaults={"max_position_embeddings": 2048},  # ALiBi has no limit; this is what the models were trained with
        usual=lambda config: renamed(config, {"seq_length": "max_position_embeddings"}, keep=True),
        mlp_ratio=4,
        tied=True,
        fixed_head=True,
    ),
    "opt": Family(
        architectures=("OPTForCausalLM",),
        outside=(
            Row("model.decoder.embed_positions.weight", "p2 h", lookup=ALWAYS),
            *outside("model.decoder.embed_tokens", ()),
            *norm(
                "model.decoder.final_layer_norm", bias=True, when="do_layer_norm_before layer_norm_elementwise_affine"
            ),
        ),
        layers="model.decoder.layers.{layer}.",
        layer=(
            *attention("enable_bias", "enable_bias", out="out_proj"),
            *norm("self_attn_layer_norm", bias=True, when="layer_norm_elementwise_affine"),
            *norm("final_layer_norm", bias=True, when="layer_norm_elementwise_affine"),
        ),
        dense=plain("fc1", "fc2", "enable_bias"),
        ignored=(),
        flags={"enable_bias": True, "layer_norm_elementwise_affine": True, "do_layer_norm_before": True},
        refused=("is_encoder_decoder", "_remove_final_layer_norm"),
        tied=True,
        fixed_head=True,
        adapt=_opt,
    ),
    # Its local layers cache all tokens in transformers, and are planned so.
    "gpt_neo": Family(
        architectures=("GPTNeoForCausalLM",),
        outside=_GPT2_OUTSIDE,
        layers="transformer.h.{layer}.",
        layer=(
            *_GPT2_NORMS,
            *attention(out_bias=ALWAYS, name="attn.attention", out="out_proj"),
        ),
        dense=plain("mlp.c_fc", "mlp.c_proj", ALWAYS),
        prefix="transformer.",
        ignored=_BUFFERS,
        mlp_ratio=4,
        tied=True,
        fixed_head=True,
        usual=_gpt_neo,
    ),
    "mpt": Family(
        architectures=("MptForCausalLM", "MPTForCausalLM"),
        outside=outside("transformer.wte", norm("transformer.norm_f")),
        layers="transformer.blocks.{layer}.",
        layer=(
            *norm("norm_1"),
            *norm("norm_2"),
            *linear("attn.Wqkv", "Q+K+V", "RS"),
            *linear("attn.out_proj", "RS", "O"),
        ),
        dense=plain("ffn.up_proj", "ffn.down_proj"),
        prefix="transformer.",
        ignored=(),
        defaults={
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
            "vocab_size": 50_368,
        },
        mlp_ratio=_MPT_RATIO,
        tied=True,
        fixed_head=True,
        usual=_mpt,
    ),
    "persimmon": Family(
        architectures=("PersimmonForCausalLM",),
        outside=outside(final=norm("model.final_layernorm", bias=True)),
        layer=(
            *BIASED_NORMS,
            *linear("self_attn.query_key_value", "QKV", "RS", ALWAYS),
            *linear("self_attn.dense", "RS", "O", ALWAYS),
            *head_norms("q_layernorm", "k_layernorm", bias=True, when="qk_layernorm"),
        ),
        dense=plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", ALWAYS),
        flags={"qk_layernorm": True},
        fixed_head=True,
    ),
}
