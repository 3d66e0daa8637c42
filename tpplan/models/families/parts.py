"""Tables of language models that exist only as part of a model of text and images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.models.families.corrected import CORRECTED
from tpplan.models.families.dense import DENSE
from tpplan.models.families.rows import (
    ALWAYS,
    BIASED_ATTENTION,
    FUSED_MLP,
    NORMS,
    ROUTER,
    attention,
    gated,
    head_norms,
    norm,
    outside,
)
from tpplan.models.families.shape import from_max_window_layers, windows
from tpplan.models.families.sparse import sparse_steps
from tpplan.models.families.table import Family, Row

if TYPE_CHECKING:
    from collections.abc import Mapping


def _defaults(*sizes: int, head_dim: int = 0) -> Mapping[str, int]:
    """Return the defaults of all sizes, as in transformers' configuration classes."""
    keys = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    )
    return {**dict(zip(keys, sizes, strict=True)), **({"head_dim": head_dim} if head_dim else {})}


_QWEN2_VL = evolve(
    DENSE["qwen2"],
    defaults=_defaults(152_064, 8192, 29_568, 80, 64, 8, 32_768),
    window=windows(4096, from_max_window_layers(80), switch="use_sliding_window"),
    fixed_head=True,
)

PARTS: Final[dict[str, Family]] = {
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": evolve(
        DENSE["qwen3"], defaults=_defaults(151_936, 4096, 22_016, 32, 32, 32, 128_000, head_dim=128), window=None
    ),
    "glm4v_text": Family(
        architectures=(),
        outside=outside(),
        layer=(
            *NORMS,
            *norm("post_self_attn_layernorm"),
            *norm("post_mlp_layernorm"),
            *attention(ALWAYS),
        ),
        dense=FUSED_MLP,
        defaults=_defaults(151_552, 4096, 13_696, 40, 32, 2, 32_768),
        fixed_head=True,
    ),
    "glm4v_moe_text": evolve(
        CORRECTED["glm4_moe"],
        architectures=(),
        layer=(*NORMS, *attention("attention_bias")),
        extra_layers=False,
        defaults={
            **_defaults(151_424, 4096, 10_944, 46, 96, 8, 65_536),
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
}
