"""Tables of decoders with a dense MLP that follow Llama's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.families.rows import (
    ALWAYS,
    BIASED_NORMS,
    NORMS,
    attention,
    gated,
    head_norms,
    linear,
    norm,
    outside,
    plain,
)
from tpplan.families.shape import every_layer, except_every, from_max_window_layers, windows, without_rope
from tpplan.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from tpplan.config import Config

_ATTENTION_BIAS = attention("attention_bias", "attention_bias")
_QWEN_WINDOW = windows(4096, from_max_window_layers(28), switch="use_sliding_window")
_FUSED_MLP = (*linear("mlp.gate_up_proj", "ID+ID", "RS"), *linear("mlp.down_proj", "RS", "ID"))
_FEEDFORWARD_NORMS = (*norm("pre_feedforward_layernorm"), *norm("post_feedforward_layernorm"))


def _cohere(config: Config, shape: Shape) -> Shape:
    """Take the context from ``model_max_length``, which Cohere's configs use beside a smaller limit."""
    return evolve(shape, context=config.count("model_max_length", default=shape.context))


DENSE: Final[dict[str, Family]] = {
    "llama": Family(
        architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
        outside=outside(),
        layer=(*NORMS, *_ATTENTION_BIAS),
        dense=gated(bias="mlp_bias"),
        flags={"attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Family(
        architectures=("MistralForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention()),
        dense=gated(),
        defaults={"num_key_value_heads": 8},
        window=windows(4096, every_layer),
    ),
    "qwen2": Family(
        architectures=("Qwen2ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention(ALWAYS)),
        dense=gated(),
        defaults={"num_key_value_heads": 32},
        window=_QWEN_WINDOW,
    ),
    "qwen3": Family(
        architectures=("Qwen3ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_ATTENTION_BIAS, *head_norms()),
        dense=gated(),
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        flags={"attention_bias": False},
        window=_QWEN_WINDOW,
    ),
    "gemma": Family(
        architectures=("GemmaForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_ATTENTION_BIAS),
        dense=gated(),
        defaults={"num_key_value_heads": 16, "head_dim": 256},
        flags={"attention_bias": False},
        tied=True,
    ),
    "gemma2": Family(
        architectures=("Gemma2ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_FEEDFORWARD_NORMS, *_ATTENTION_BIAS),
        dense=gated(),
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        flags={"attention_bias": False},
        tied=True,
        window=windows(4096, except_every(2)),
    ),
    "gemma3_text": Family(
        architectures=("Gemma3ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_FEEDFORWARD_NORMS, *_ATTENTION_BIAS, *head_norms()),
        dense=gated(),
        defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
        },
        flags={"attention_bias": False},
        tied=True,
        window=windows(4096, except_every(6)),
    ),
    "phi": Family(
        architectures=("PhiForCausalLM",),
        outside=(*outside(final=norm("model.final_layernorm", bias=True)), Row("lm_head.bias", "VC")),
        layer=(
            *norm("input_layernorm", bias=True),
            *attention(ALWAYS, ALWAYS, out="dense"),
            *head_norms("q_layernorm", "k_layernorm", bias=True, when="qk_layernorm"),
        ),
        dense=plain("mlp.fc1", "mlp.fc2", ALWAYS),
        flags={"qk_layernorm": False},
    ),
    "phi3": Family(
        architectures=("Phi3ForCausalLM",),
        outside=outside(),
        layer=(
            *NORMS,
            *linear("self_attn.qkv_proj", "Q+K+V", "RS"),
            *linear("self_attn.o_proj", "RS", "O"),
        ),
        dense=_FUSED_MLP,
        window=windows(None, every_layer),
    ),
    "cohere": Family(
        architectures=("CohereForCausalLM",),
        outside=outside(),
        layer=(
            *norm("input_layernorm"),
            *_ATTENTION_BIAS,
            *norm("self_attn.q_norm", "q d", when="use_qk_norm"),
            *norm("self_attn.k_norm", "k d", when="use_qk_norm"),
        ),
        dense=gated(),
        flags={"attention_bias": False, "use_qk_norm": False},
        tied=True,
        adapt=_cohere,
    ),
    "cohere2": Family(
        architectures=("Cohere2ForCausalLM",),
        outside=outside(),
        layer=(*norm("input_layernorm"), *_ATTENTION_BIAS),
        dense=gated(),
        flags={"attention_bias": False},
        tied=True,
        fixed_head=True,
        window=windows(4096, except_every(4)),
        adapt=_cohere,
    ),
    "olmo": Family(  # its norms have no parameters
        architectures=("OlmoForCausalLM",),
        outside=outside(final=()),
        layer=_ATTENTION_BIAS,
        dense=gated(),
        flags={"attention_bias": False},
    ),
    "olmo2": Family(
        architectures=("Olmo2ForCausalLM",),
        outside=outside(),
        layer=(
            *_ATTENTION_BIAS,
            *norm("self_attn.q_norm", "Q"),
            *norm("self_attn.k_norm", "K"),
            *norm("post_attention_layernorm"),
            *norm("post_feedforward_layernorm"),
        ),
        dense=gated(),
        flags={"attention_bias": False},
    ),
    "granite": Family(
        architectures=("GraniteForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_ATTENTION_BIAS),
        dense=gated(bias="mlp_bias"),
        flags={"attention_bias": False, "mlp_bias": False},
    ),
    "starcoder2": Family(
        architectures=("Starcoder2ForCausalLM",),
        outside=outside(final=norm("model.norm", bias=True)),
        layer=(*BIASED_NORMS, *attention("use_bias", "use_bias")),
        dense=plain("mlp.c_fc", "mlp.c_proj", "use_bias"),
        defaults={"num_key_value_heads": 2},
        flags={"use_bias": True},
        tied=True,
        window=windows(None, every_layer),
    ),
    "stablelm": Family(
        architectures=("StableLmForCausalLM",),
        outside=outside(final=norm("model.norm", bias=True)),
        layer=(
            *norm("input_layernorm", bias=True),
            *norm("post_attention_layernorm", bias=True, when="!use_parallel_residual"),
            *attention("use_qkv_bias"),
            # One norm for each head, each a tensor of its own.
            *head_norms("q_layernorm.norms.{head}", "k_layernorm.norms.{head}", when="qk_layernorm", heads=("q", "k")),
        ),
        dense=gated(),
        defaults={"num_key_value_heads": 32},
        flags={"use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False},
        fixed_head=True,
    ),
    "glm4": Family(
        architectures=("Glm4ForCausalLM",),
        outside=outside(),
        layer=(
            *NORMS,
            *norm("post_self_attn_layernorm"),
            *norm("post_mlp_layernorm"),
            *attention("attention_bias"),
        ),
        dense=_FUSED_MLP,
        defaults={"num_key_value_heads": 2, "head_dim": 128},
        flags={"attention_bias": True},
    ),
    "smollm3": Family(
        architectures=("SmolLM3ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_ATTENTION_BIAS),
        dense=gated(bias="mlp_bias"),
        defaults={"num_key_value_heads": 4},
        flags={"attention_bias": False, "mlp_bias": False},
        tied=True,
        window=windows(None, without_rope, switch="use_sliding_window"),
    ),
    "nemotron": Family(
        architectures=("NemotronForCausalLM",),
        outside=outside(final=norm("model.norm", bias=True)),
        layer=(*BIASED_NORMS, *_ATTENTION_BIAS),
        dense=plain("mlp.up_proj", "mlp.down_proj", "mlp_bias"),
        flags={"attention_bias": False, "mlp_bias": False},
    ),
}
