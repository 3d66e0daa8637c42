"""Tables of language models that exist only as part of a model that sees or hears."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.models.families.corrected import CORRECTED
from tpplan.models.families.dense import DENSE
from tpplan.models.families.moe import MOE
from tpplan.models.families.remote import REMOTE
from tpplan.models.families.rows import (
    ALWAYS,
    BIASED_ATTENTION,
    EXPERTS,
    FUSED_MLP,
    NORMS,
    ROUTER,
    attention,
    gated,
    head_norms,
    linear,
    norm,
    outside,
)
from tpplan.models.families.shape import from_max_window_layers, last_of_four, windows
from tpplan.models.families.sparse import SHARED, after_dense, mlp_types, shared_experts, sparse_steps
from tpplan.models.families.table import SHARED_KV, Family, Row, Shape, sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.models.config import Config


def _mllama_layers(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell which layers attend to images, whose keys and values are no cache of the text."""
    listed = config.raw("cross_attention_layers") is not None
    across = config.numbers("cross_attention_layers") if listed else _ACROSS
    return tuple({SHARED_KV: layer in across} for layer in range(layers))


def _mllama(_config: Config, shape: Shape) -> Shape:
    """Add the rows that the embedding has for images and the output matrix has not."""
    return shape.having(more=8)


#: The layers of Llama 3.2 that attend to images where its config does not say.
_ACROSS: Final = (3, 8, 13, 18, 23, 28, 33, 38)

_QWEN2_VL = evolve(
    DENSE["qwen2"],
    defaults=sizes(152_064, 8192, 29_568, 80, 64, 8, 32_768),
    window=windows(4096, from_max_window_layers(80), switch="use_sliding_window"),
    fixed_head=True,
)

_GLM4V = Family(
    architectures=(),
    outside=outside(),
    layer=(
        *NORMS,
        *norm("post_self_attn_layernorm"),
        *norm("post_mlp_layernorm"),
        *attention(ALWAYS),
    ),
    dense=FUSED_MLP,
    defaults=sizes(151_552, 4096, 13_696, 40, 32, 2, 32_768),
    fixed_head=True,
)


def _molmo(config: Config, shape: Shape) -> Shape:
    """Add the rows that the embedding has for images, and tell of which heads norms are."""
    more = config.count("additional_vocab_size", default=128, minimum=0)
    kind = config.text("qk_norm_type") or _PER_HEAD
    return shape.having(*("more",) if more else (), *(_PER_HEAD,) if kind == _PER_HEAD else (), more=more)


#: What Molmo 2 calls norms of single heads; others are of all heads together.
_PER_HEAD: Final = "qwen3"

PARTS: Final[dict[str, Family]] = {
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": evolve(
        DENSE["qwen3"], defaults=sizes(151_936, 4096, 22_016, 32, 32, 32, 128_000, head_dim=128), window=None
    ),
    "glm4v_text": _GLM4V,
    "glm_ocr_text": evolve(
        _GLM4V,
        layer=(
            *NORMS,
            *norm("post_self_attn_layernorm"),
            *norm("post_mlp_layernorm"),
            *attention(),
        ),
        defaults=sizes(59_392, 1024, 4096, 16, 16, 8, 131_072),
        fixed_head=False,
    ),
    "glm4v_moe_text": evolve(
        CORRECTED["glm4_moe"],
        architectures=(),
        layer=(*NORMS, *attention("attention_bias")),
        extra_layers=False,
        defaults={
            **sizes(151_424, 4096, 10_944, 46, 96, 8, 65_536),
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
        },
        flags={"attention_bias": True},
    ),
    # Its experts are tensors of the whole layer, [expert, in, out], gate and up behind each other.
    "qwen3_vl_moe_text": Family(
        architectures=(),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, *head_norms()),
        dense=gated(),
        sparse=(
            *ROUTER,
            Row("mlp.experts.gate_up_proj", "e RS EX+EX", out=2),
            Row("mlp.experts.down_proj", "e EX RS", out=2),
        ),
        defaults={"num_key_value_heads": 16, "num_experts_per_tok": 4},
        flags={"attention_bias": False},
        moe=sparse_steps,
    ),
    "deepseek_ocr2_text": evolve(
        REMOTE["deepseek"],
        architectures=(),
        dense=gated(bias="mlp_bias"),
        sparse=(*ROUTER, *EXPERTS, *gated("mlp.shared_experts", "SX", "mlp_bias", when=SHARED)),
        defaults={
            **sizes(102_400, 4096, 11_008, 32, 32, 32, 2048),
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1407,
        },
        flags={"attention_bias": False, "mlp_bias": False},
        moe=mlp_types(after_dense(0)),
        adapt=shared_experts(default=2),
    ),
    "granite_docling_text": evolve(DENSE["granite"], defaults=sizes(133_800, 1024, 2048, 28, 16, 4, 32_768), tied=True),
    "mllama_text_model": Family(
        architectures=(),
        outside=(
            Row("model.embed_tokens.weight", "VC+more RS", lookup=ALWAYS),
            *norm("model.norm"),
            Row("lm_head.weight", "VC RS"),
        ),
        layer=(
            *NORMS,
            *(evolve(row, when=f"!{SHARED_KV}") for row in attention()),
            *(evolve(row, when=SHARED_KV) for row in attention(name="cross_attn")),
            *norm("cross_attn.q_norm", "d", when=SHARED_KV, home=Axis.KV_HEADS),
            *norm("cross_attn.k_norm", "d", when=SHARED_KV, home=Axis.KV_HEADS),
            Row("cross_attn_attn_gate", "1", SHARED_KV),
            Row("cross_attn_mlp_gate", "1", SHARED_KV),
        ),
        dense=gated(),
        defaults=sizes(128_256, 4096, 14_336, 40, 32, 8, 131_072),
        flags={SHARED_KV: False},
        ties=False,
        fixed_head=True,
        own=_mllama_layers,
        adapt=_mllama,
        note="layers that attend to images cache their keys and values too, which are not counted",
    ),
    "granite4_vision_text": evolve(DENSE["granite"], defaults=sizes(32_000, 4096, 11_008, 32, 32, 32, 2048)),
    "hunyuan_vl_text": evolve(
        DENSE["hunyuan_v1_dense"], defaults=sizes(290_943, 4096, 11_008, 32, 32, 32, 2048), tied=True
    ),
    # The embedding of images' own tokens is beside that of the text's.
    "molmo2_text": Family(
        architectures=(),
        outside=(
            Row("model.transformer.wte.embedding", "VC RS", lookup=ALWAYS),
            Row("model.transformer.wte.new_embedding", "more RS", "more", lookup=ALWAYS),
            *norm("model.transformer.ln_f"),
            Row("lm_head.weight", "VC RS"),
        ),
        layers="model.transformer.blocks.{layer}.",
        layer=(
            *norm("attn_norm"),
            *norm("ff_norm"),
            *linear("self_attn.att_proj", "Q+K+V", "RS", "attention_bias"),
            *linear("self_attn.attn_out", "RS", "O"),
            *head_norms(when=_PER_HEAD),
            *norm("self_attn.q_norm", "Q", when=f"!{_PER_HEAD}"),
            *norm("self_attn.k_norm", "K", when=f"!{_PER_HEAD}"),
        ),
        dense=(*linear("mlp.ff_proj", "ID+ID", "RS"), *linear("mlp.ff_out", "RS", "ID")),
        defaults=sizes(151_936, 4096, 12_288, 36, 32, 8, 36_864, head_dim=128),
        flags={"attention_bias": False},
        ties=False,
        adapt=_molmo,
    ),
    "muse_glimmer_text": Family(
        architectures=(),
        outside=outside(),
        layer=(
            *NORMS,
            *norm("pre_feedforward_layernorm"),
            *norm("post_feedforward_layernorm"),
            *BIASED_ATTENTION,
            *linear("self_attn.gate_proj", "O", "RS"),
        ),
        dense=gated(),
        defaults=sizes(202_048, 6656, 19_968, 52, 32, 2, 131_072, head_dim=128),
        flags={"attention_bias": False},
        window=windows(2048, last_of_four),
    ),
    "paddleocr_vl_text": evolve(
        DENSE["ernie4_5"], defaults=sizes(103_424, 1024, 3072, 18, 16, 2, 131_072, head_dim=128)
    ),
    "qwen2_5_omni_text": evolve(
        _QWEN2_VL,
        defaults=sizes(152_064, 3584, 18_944, 28, 28, 4, 32_768),
        window=windows(32_768, from_max_window_layers(28), switch="use_sliding_window"),
    ),
    "qwen3_omni_moe_text": evolve(
        MOE["qwen3_moe"],
        defaults={
            **sizes(3584, 2048, 18_944, 28, 28, 4, 32_768),
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        window=None,
    ),
    # Norms are scaled by how late the text may be, through a rank that is the same in all models.
    "voxtral_realtime_text": evolve(
        DENSE["mistral"],
        layer=(
            *DENSE["mistral"].layer,
            *linear("ada_rms_norm.linear1", "late", "h"),
            *linear("ada_rms_norm.linear2", "h", "late"),
        ),
        defaults=sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072, head_dim=128),
        tied=True,
        adapt=lambda _, shape: shape.having(late=32),
    ),
}
