"""Tables of decoders whose checkpoints come with code of their own, under names that transformers does not know.

Sources of names and shapes: how vLLM and SGLang load them (``vllm/model_executor/models/``: ``qwen.py``,
``llama.py``, ``internlm2.py``, ``baichuan.py``, ``chatglm.py``, ``bailing_moe.py``, ``minicpm.py``, ``exaone.py``,
``orion.py``, ``solar.py``, ``deepseek.py``, ``telechat2.py``, ``teleflm.py``, ``minimax_text_01.py``, ``phi4mm.py``;
``sglang/srt/models/bailing_moe.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.model import Segment
from tpplan.models.families.dense import DENSE
from tpplan.models.families.lightning import MINIMAX_TEXT_01
from tpplan.models.families.rows import (
    ALWAYS,
    BIASED_ATTENTION,
    EXPERTS,
    NORMS,
    ROUTER,
    attention,
    correction,
    gated,
    linear,
    norm,
    numbered,
    outside,
)
from tpplan.models.families.shape import MAX_PARTS, renamed
from tpplan.models.families.sparse import SHARED, after_dense, shared_experts
from tpplan.models.families.table import Family, Shape

if TYPE_CHECKING:
    from tpplan.models.config import Config


def _qwen(config: Config) -> Config:
    """Read the padded vocabulary of early configs, and the size of heads."""
    return renamed(config, {"padded_vocab_size": "vocab_size", "kv_channels": "head_dim"})


def _halved(config: Config, shape: Shape) -> Shape:
    """Halve the width, which counts gate and up projection; and tell whether matrices beside QKV have biases.

    Raises:
        ModelError: the width is odd.
    """
    if shape.intermediate % 2:
        raise config.error(f"intermediate_size is {shape.intermediate}, which is not even")
    flags = shape.flags if config.flag("no_bias", default=True) else shape.flags | {"biased"}
    return evolve(shape, intermediate=shape.intermediate // 2, flags=flags)


def _baichuan(config: Config) -> Config:
    """Read the context by its name in configs of models with ALiBi."""
    return config if "max_position_embeddings" in config else renamed(config, {"model_max_length": _CONTEXT})


def _chatglm(config: Config) -> Config:
    """Read keys by their names since ChatGLM2.

    Raises:
        ModelError: it is the first ChatGLM, or has norms with biases.
    """
    if first := next((key for key in ("inner_hidden_size", "position_encoding_2d") if key in config), ""):
        raise config.error(f"{first} is a key of the first ChatGLM, which tpplan does not support")
    if not config.flag("rmsnorm", default=True):
        raise config.error("rmsnorm is false, which tpplan does not support")
    groups = config.count("multi_query_group_num", default=1)  # as in ChatGLMConfig
    if config.flag("multi_query_attention"):
        config = config.having("num_key_value_heads", groups)
    config = config.having("add_qkv_bias", config.flag("add_qkv_bias") or config.flag("add_bias_linear"))
    return renamed(
        config,
        {
            "padded_vocab_size": "vocab_size",
            "num_layers": "num_hidden_layers",
            "kv_channels": "head_dim",
            "seq_length": _CONTEXT,
        },
    )


def _bailing(config: Config, shape: Shape) -> Shape:
    """Add the shared experts, which may have a width of their own."""
    number = config.optional_count("n_shared_experts", default=0, minimum=0, maximum=MAX_PARTS) or 0
    width = config.count("moe_shared_expert_intermediate_size", default=shape.expert_intermediate or 1)
    if not (shape.experts and number):
        return shape
    return evolve(shape, shared_intermediate=number * width, flags=shape.flags | {SHARED})


def _exaone(config: Config) -> Config:
    """Read the number of layers by its name."""
    return renamed(config, {"num_layers": "num_hidden_layers"})


def _minicpm(config: Config, layers: int) -> tuple[bool, ...]:
    """Select all layers of a model with experts."""
    return (bool(config.optional_count("num_experts", default=0, minimum=0, maximum=MAX_PARTS)),) * layers


_CONTEXT: Final = "max_position_embeddings"

REMOTE: Final[dict[str, Family]] = {
    "minimax_text_01": MINIMAX_TEXT_01,
    "minimax_m1": evolve(MINIMAX_TEXT_01, architectures=("MiniMaxM1ForCausalLM",)),
    # Adapters for images and sound, beside each matrix, are loaded as adapters.
    "phi4mm": evolve(
        DENSE["phi4_multimodal"],
        architectures=("Phi4MMForCausalLM",),
        renamed={".base_layer.": "."},
        ignored=(*DENSE["phi4_multimodal"].ignored, "*.lora_A.*", "*.lora_B.*"),
    ),
    "stablelm_epoch": evolve(DENSE["stablelm"], architectures=("StableLMEpochForCausalLM",)),
    "orion": evolve(DENSE["stablelm"], architectures=("OrionForCausalLM",), defaults={}),
    "aquila": evolve(DENSE["llama"], architectures=("AquilaForCausalLM", "AquilaModel")),
    "solar": evolve(DENSE["llama"], architectures=("SolarForCausalLM",)),
    "TeleFLM": evolve(DENSE["llama"], architectures=("TeleFLMForCausalLM",)),
    # Keys and values of each head are side by side.
    "telechat": Family(
        architectures=("TeleChat2ForCausalLM", "TelechatForCausalLM"),
        outside=outside("transformer.word_embeddings", norm("transformer.ln_f")),
        layers="transformer.h.{layer}.",
        layer=(
            *NORMS,
            *linear("self_attention.query", "Q", "RS"),
            *linear("self_attention.key_value", "KV2", "RS"),
            *linear("self_attention.dense", "RS", "O", ALWAYS),
        ),
        dense=(
            *linear("mlp.gate_proj", "ID", "RS"),
            *linear("mlp.up_proj", "ID", "RS"),
            *linear("mlp.down_proj", "RS", "ID", ALWAYS),
        ),
        prefix="transformer.",
        defaults={_CONTEXT: 8192},
        fixed_head=True,
        usual=lambda config: renamed(config, {"seq_length": _CONTEXT}),
        adapt=lambda _, shape: shape.having(KV2=Segment(Axis.KV_HEADS, 2 * shape.kv_heads * shape.head_dim)),
    ),
    "telechat3": evolve(DENSE["llama"], architectures=("TeleChat3ForCausalLM",)),
    "xverse": evolve(DENSE["llama"], architectures=("XverseForCausalLM",)),
    "internlm": Family(
        architectures=("InternLMForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention("bias", "bias")),
        dense=gated(),
        flags={"bias": True},
        fixed_head=True,
    ),
    "minicpm": Family(
        architectures=("MiniCPMForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention()),
        dense=gated(),
        sparse=(*ROUTER, *numbered("mlp.experts.{expert}", "EX")),
        tied=True,
        fixed_head=True,
        moe=_minicpm,
        expert_key="intermediate_size",
    ),
    "exaone": Family(
        architectures=("ExaoneForCausalLM",),
        outside=outside("transformer.wte", norm("transformer.ln_f")),
        layers="transformer.h.{layer}.",
        layer=(
            *norm("ln_1"),
            *norm("ln_2"),
            *attention(name="attn.attention", out="out_proj"),
        ),
        dense=(  # c_fc_0 is the gate
            *linear("mlp.c_fc_0", "ID", "RS"),
            *linear("mlp.c_fc_1", "ID", "RS"),
            *linear("mlp.c_proj", "RS", "ID"),
        ),
        prefix="transformer.",
        mlp_ratio=4,
        tied=True,
        usual=_exaone,
    ),
    "deepseek": Family(
        architectures=("DeepseekForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION),
        dense=gated(),
        sparse=(*ROUTER, *EXPERTS, *gated("mlp.shared_experts", "SX", when=SHARED)),
        flags={"attention_bias": False},
        fixed_head=True,
        moe=after_dense(0),
        adapt=shared_experts(),
    ),
    "qwen": Family(
        architectures=("QWenLMHeadModel",),
        outside=outside("transformer.wte", norm("transformer.ln_f")),
        layers="transformer.h.{layer}.",
        layer=(
            *norm("ln_1"),
            *norm("ln_2"),
            *linear("attn.c_attn", "Q+K+V", "RS", ALWAYS),
            *linear("attn.c_proj", "RS", "O", "biased"),
        ),
        dense=(  # w2 is the gate
            *linear("mlp.w1", "ID", "RS", "biased"),
            *linear("mlp.w2", "ID", "RS", "biased"),
            *linear("mlp.c_proj", "RS", "ID", "biased"),
        ),
        prefix="transformer.",
        ignored=("*.rotary_emb.inv_freq", "transformer.visual.*"),
        defaults={"head_dim": 128, _CONTEXT: 8192},
        usual=_qwen,
        adapt=_halved,
    ),
    "internlm2": Family(
        architectures=("InternLM2ForCausalLM",),
        outside=outside("model.tok_embeddings", head="output"),
        layer=(
            *norm("attention_norm"),
            *norm("ffn_norm"),
            *linear("attention.wqkv", "QKV", "RS", "bias"),
            *linear("attention.wo", "RS", "O", "bias"),
        ),
        dense=numbered("feed_forward", "ID"),
        flags={"bias": True},
        fixed_head=True,
    ),
    "baichuan": Family(
        architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
        outside=outside(),
        layer=(
            *NORMS,
            *linear("self_attn.W_pack", "Q+K+V", "RS"),
            *linear("self_attn.o_proj", "RS", "O"),
        ),
        dense=gated(),
        defaults={_CONTEXT: 4096},
        usual=_baichuan,
        fixed_head=True,
    ),
    "chatglm": Family(
        architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration", "GLM4VForCausalLM"),
        outside=outside(
            "transformer.embedding.word_embeddings",
            norm("transformer.encoder.final_layernorm", when="post_layer_norm"),
            "transformer.output_layer",
        ),
        layers="transformer.encoder.layers.{layer}.",
        layer=(
            *NORMS,
            *linear("self_attention.query_key_value", "Q+K+V", "RS", "add_qkv_bias"),
            *linear("self_attention.dense", "RS", "O", "add_bias_linear"),
        ),
        dense=(
            *linear("mlp.dense_h_to_4h", "ID+ID", "RS", "add_bias_linear"),
            *linear("mlp.dense_4h_to_h", "RS", "ID", "add_bias_linear"),
        ),
        prefix="transformer.",
        ignored=("*.rotary_pos_emb.inv_freq", "transformer.prefix_encoder.*", "transformer.vision.*"),
        defaults={"head_dim": 128, _CONTEXT: 2048},
        flags={"add_qkv_bias": False, "add_bias_linear": False, "post_layer_norm": True},
        usual=_chatglm,
    ),
    "bailing_moe": Family(
        architectures=("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"),
        outside=outside("model.word_embeddings"),
        layer=(
            *NORMS,
            *linear("attention.query_key_value", "Q+K+V", "RS", "use_qkv_bias"),
            *linear("attention.dense", "RS", "O", "use_bias"),
            *norm("attention.query_layernorm", "d", when="use_qk_norm", home=Axis.KV_HEADS),
            *norm("attention.key_layernorm", "d", when="use_qk_norm", home=Axis.KV_HEADS),
        ),
        dense=gated(bias="use_bias"),
        sparse=(
            *ROUTER,
            *correction("mlp.gate.expert_bias", when="moe_router_enable_expert_bias"),
            *EXPERTS,
            *gated("mlp.shared_experts", "SX", "use_bias", when=SHARED),
        ),
        extra_layers=True,
        flags={
            "use_bias": False,
            "use_qkv_bias": False,
            "use_qk_norm": False,
            "moe_router_enable_expert_bias": False,
        },
        usual=lambda config: config.having("use_qkv_bias", config.flag("use_qkv_bias") or config.flag("use_bias")),
        moe=after_dense(0),
        adapt=_bailing,
    ),
}
