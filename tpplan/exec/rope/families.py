"""What families have in common of their RoPE, and what their configs may leave out."""

from __future__ import annotations

from typing import Final

from tpplan.models.families.contexts import ORIGINAL, SCALED

#: Families with GPT-J style; ``rope_interleave`` overrides it.
GPTJ: Final = frozenset(
    {
        *("cohere", "cohere2", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5"),
        *("ernie4_5_moe", "glm", "glm4", "glm4_moe_lite", "glm4v_text", "glm_moe_dsa", "gptj", "helium", "kimi_k2"),
        "llama4_text",
    }
)

#: Families with a separate base for sliding-window layers.
LOCAL: Final = frozenset({"gemma3_text", "olmo3"})

#: Families whose dynamic scaling has a fixed weight where the config has ``alpha``.
ALPHA: Final = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe"})

#: Families whose old configs call RoPE of places in images mrope; the three positions of a place in a text are equal.
MROPE: Final = frozenset(
    {"glm4v_moe_text", "glm4v_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text"}
)

#: What families with Llama 3's scaling have in common.
_LLAMA3: Final = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}

#: Defaults of transformers' configuration classes, where they differ from a base of 10,000 and fully rotated heads.
DEFAULTS: Final[dict[str, dict[str, object]]] = {
    "apertus": {"rope_parameters": {**_LLAMA3, "rope_theta": 1.2e7, "factor": 8.0}},
    "cohere": {"rope_theta": 5e5},
    "cwm": {"rope_parameters": {**_LLAMA3, "rope_theta": 1e6, "factor": 16.0}},
    "ernie4_5": {"rope_theta": 5e5},
    "ernie4_5_moe": {"rope_theta": 5e5},
    "flex_olmo": {"rope_theta": 5e5},
    "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"partial_rotary_factor": 0.5},
    "glm4v_moe_text": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt_oss": {
        "rope_theta": 1.5e5,
        "rope_parameters": {**SCALED["gpt_oss"], "truncate": False},
    },
    "gptj": {"rotary_dim": 64},
    "helium": {"rope_theta": 1e5},
    "hy_v3": {"rope_theta": 11_158_840.0},
    "llama4_text": {"rope_theta": 5e5},
    "minimax_m2": {"rope_theta": 5e6},
    "ministral3": {
        "rope_parameters": {
            **SCALED["ministral3"],
            "rope_theta": 1e6,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "mixtral": {"rope_theta": 1e6},
    "nemotron": {"partial_rotary_factor": 0.5},
    "olmo3": {"rope_theta": 5e5, "rope_local_base_freq": 5e5},
    "phi": {"partial_rotary_factor": 0.5},
    "phimoe": {"rope_theta": 1e6},
    "qwen2_5_vl_text": {"rope_theta": 1e6},
    "qwen2_vl_text": {"rope_theta": 1e6},
    **{key: {"partial_rotary_factor": 0.25} for key in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
    "qwen3_vl_moe_text": {"rope_theta": 5e5},
    "qwen3_vl_text": {"rope_theta": 5e5},
    "smollm3": {"rope_theta": 2e6},
    "solar_open": {"rope_theta": 1e6},
    "stablelm": {"partial_rotary_factor": 0.25},
}
