"""Tables of decoders that follow Llama's names, with a gated MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.models.families.rows import (
    ALWAYS,
    BIASED_ATTENTION,
    FUSED_MLP,
    NORMS,
    POST_NORMS,
    WIDE_NORMS,
    attention,
    gated,
    head_norms,
    linear,
    norm,
    outside,
)
from tpplan.models.families.shape import (
    every_layer,
    except_every,
    except_first_of,
    from_max_window_layers,
    windows,
    without_rope,
)
from tpplan.models.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from tpplan.models.config import Config

_QWEN_WINDOW = windows(4096, from_max_window_layers(28), switch="use_sliding_window")
_QWEN2 = Family(
    architectures=("Qwen2ForCausalLM",),
    outside=outside(),
    layer=(*NORMS, *attention(ALWAYS)),
    dense=gated(),
    defaults={"num_key_value_heads": 32},
    window=_QWEN_WINDOW,
)


def _cohere(config: Config, shape: Shape) -> Shape:
    """Take the context from ``model_max_length``, which Cohere's configs use beside a smaller limit."""
    return evolve(shape, context=config.count("model_max_length", default=shape.context))


def _helium(config: Config, shape: Shape) -> Shape:
    """Check that the hidden size, which the output projection takes whatever the head size is, divides into heads.

    Raises:
        ModelError: it does not.
    """
    if shape.hidden % shape.q_heads:
        heads = f"{shape.q_heads} query heads (num_attention_heads)"
        raise config.error(f"hidden_size {shape.hidden} is not a multiple of {heads}")
    return shape


def _internlm3(config: Config, shape: Shape) -> Shape:
    """Find the biases, which are of all projections or of none; versions of the config call their keys differently.

    Raises:
        ModelError: the keys contradict each other.
    """
    keys = ("qkv_bias", "attention_bias", "bias", "mlp_bias")
    given = {key: config.flag(key) for key in keys if key in config}
    if len(set(given.values())) > 1:
        found = " and ".join(f"{key} {str(value).lower()}" for key, value in given.items())
        raise config.error(f"{found} contradict each other", "internlm3 has all biases or none")
    if len(given) == 1 and any(given.values()):
        raise config.error(f"{next(iter(given))} is true, which does not say whether other projections have biases")
    return evolve(shape, flags=shape.flags | {"biased"}) if any(given.values()) else shape


_PHI3: Final = (*NORMS, *linear("self_attn.qkv_proj", "Q+K+V", "RS"), *linear("self_attn.o_proj", "RS", "O"))

DENSE: Final[dict[str, Family]] = {
    "llama": Family(
        architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION),
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
    "qwen2": _QWEN2,
    "mimo": evolve(  # with layers that predict a second token
        _QWEN2, architectures=("MiMoForCausalLM",), ignored=(*_QWEN2.ignored, "model.mtp_layers.*")
    ),
    "qwen3": Family(
        architectures=("Qwen3ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, *head_norms()),
        dense=gated(),
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        flags={"attention_bias": False},
        window=_QWEN_WINDOW,
    ),
    "phi3": Family(
        architectures=("Phi3ForCausalLM",),
        outside=outside(),
        layer=_PHI3,
        dense=FUSED_MLP,
        window=windows(None, every_layer),
    ),
    "phi4_multimodal": Family(
        architectures=("Phi4MultimodalForCausalLM",),
        outside=outside(),
        layer=_PHI3,
        dense=FUSED_MLP,
        ignored=("*.rotary_emb.inv_freq", "model.embed_tokens_extend.*"),
        defaults={"num_key_value_heads": 8},
        window=windows(None, every_layer),
    ),
    "cohere": Family(
        architectures=("CohereForCausalLM",),
        outside=outside(),
        layer=(
            *norm("input_layernorm"),
            *BIASED_ATTENTION,
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
        layer=(*norm("input_layernorm"), *BIASED_ATTENTION),
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
        layer=BIASED_ATTENTION,
        dense=gated(),
        flags={"attention_bias": False},
    ),
    "olmo2": Family(
        architectures=("Olmo2ForCausalLM",),
        outside=outside(),
        layer=(*BIASED_ATTENTION, *WIDE_NORMS, *POST_NORMS),
        dense=gated(),
        flags={"attention_bias": False},
    ),
    "granite": Family(
        architectures=("GraniteForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION),
        dense=gated(bias="mlp_bias"),
        flags={"attention_bias": False, "mlp_bias": False},
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
        dense=FUSED_MLP,
        defaults={"num_key_value_heads": 2, "head_dim": 128},
        flags={"attention_bias": True},
    ),
    "smollm3": Family(
        architectures=("SmolLM3ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION),
        dense=gated(bias="mlp_bias"),
        defaults={"num_key_value_heads": 4},
        flags={"attention_bias": False, "mlp_bias": False},
        tied=True,
        window=windows(None, without_rope, switch="use_sliding_window"),
    ),
    "ministral": Family(
        architectures=("MinistralForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention()),
        dense=gated(),
        defaults={"num_key_value_heads": 8},
        window=windows(4096, every_layer),
    ),
    "ministral3": Family(
        architectures=("Ministral3ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention()),
        dense=gated(),
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        window=windows(None, every_layer),
    ),
    "seed_oss": Family(
        architectures=("SeedOssForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention("attention_bias", "attention_out_bias")),
        dense=gated(bias="mlp_bias"),
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        flags={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    ),
    "olmo3": Family(
        architectures=("Olmo3ForCausalLM",),
        outside=outside(),
        layer=(*BIASED_ATTENTION, *WIDE_NORMS, *POST_NORMS),
        dense=gated(),
        flags={"attention_bias": False},
        window=windows(4096, except_every(4, key="")),
    ),
    "exaone4": Family(
        architectures=("Exaone4ForCausalLM",),
        outside=outside(),
        layer=(*attention(), *head_norms(), *POST_NORMS),
        dense=gated(),
        defaults={"num_key_value_heads": 32},
        window=windows(4096, except_every(4)),
    ),
    "ernie4_5": Family(
        architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
        outside=outside(),
        layer=(*NORMS, *attention("use_bias", "use_bias")),
        dense=gated(bias="use_bias"),
        defaults={"num_key_value_heads": 2, "head_dim": 128},
        flags={"use_bias": False},
        tied=True,
    ),
    "hunyuan_v1_dense": Family(
        architectures=("HunYuanDenseV1ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, *head_norms("query_layernorm", "key_layernorm")),
        dense=gated(),
        flags={"attention_bias": False},
    ),
    "hyperclovax": Family(
        architectures=("HyperCLOVAXForCausalLM",),
        outside=outside(),
        layer=(
            *NORMS,
            *BIASED_ATTENTION,
            *norm("post_norm1", when="use_post_norm"),
            *norm("post_norm2", when="use_post_norm"),
        ),
        dense=gated(bias="mlp_bias"),
        flags={"attention_bias": False, "mlp_bias": False, "use_post_norm": True},
    ),
    "glm": Family(
        architectures=("GlmForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention("attention_bias")),
        dense=FUSED_MLP,
        defaults={"num_key_value_heads": 2, "head_dim": 128},
        flags={"attention_bias": True},
    ),
    "cwm": Family(
        architectures=("CwmForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention()),
        dense=gated(bias="mlp_bias"),
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        flags={"mlp_bias": False},
        window=windows(8192, except_first_of(4)),
    ),
    "granite_swa": Family(
        architectures=("GraniteSWAForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, Row("self_attn.sinks", "q")),
        dense=gated(bias="mlp_bias"),
        defaults={"num_key_value_heads": 4},
        flags={"attention_bias": False, "mlp_bias": False},
        tied=True,
        window=windows(128, except_first_of(4)),
    ),
    "helium": Family(
        architectures=("HeliumForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention("attention_bias", taken="HQ")),
        dense=gated(bias="mlp_bias"),
        defaults={"num_key_value_heads": 20, "head_dim": 128},
        flags={"attention_bias": False, "mlp_bias": False},
        adapt=_helium,
    ),
    "internlm3": Family(
        architectures=("InternLM3ForCausalLM", "LlamaForCausalLM"),
        outside=outside(),
        layer=(*NORMS, *attention("biased", "biased")),
        dense=gated(bias="biased"),
        defaults={"num_key_value_heads": 2, "head_dim": 128},
        adapt=_internlm3,
    ),
    "bitnet": Family(  # with norms of what the last matrices of attention and MLP take
        architectures=("BitNetForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, *norm("self_attn.attn_sub_norm", "O")),
        dense=(*gated(), *norm("mlp.ffn_sub_norm", "ID")),
        defaults={"num_key_value_heads": 5},
        flags={"attention_bias": False},
    ),
    "iquestcoder": Family(
        architectures=("IQuestCoderForCausalLM", "LlamaForCausalLM"),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION),
        dense=gated(bias="mlp_bias"),
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        flags={"attention_bias": False, "mlp_bias": False},
    ),
}
