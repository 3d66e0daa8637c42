"""The config.json of published models: those of the examples, and the sizes in those of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples" / "models"

_NAMES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "dense": "intermediate_size",
    "expert": "moe_intermediate_size",
    "layers": "num_hidden_layers",
    "q": "num_attention_heads",
    "kv": "num_key_value_heads",
    "top": "num_experts_per_tok",
    "first": "first_k_dense_replace",
    "shared": "n_shared_experts",
    "routed": "n_routed_experts",
    "context": "max_position_embeddings",
}


def example(name: str) -> dict[str, Any]:
    """Return the config.json of an example, without its quantisation."""
    config = json.loads((EXAMPLES / name / "config.json").read_text())
    return {key: value for key, value in config.items() if key != "quantization_config"}


def shape(**sizes: int) -> dict[str, Any]:
    """Return the common keys of a config; sizes without a short name go by their own."""
    return {"max_position_embeddings": 131_072, **{_NAMES.get(key, key): value for key, value in sizes.items()}}


def mla(q_rank: int | None, nope: int, value: int) -> dict[str, Any]:
    """Return the keys of latent attention; the rank of keys and values and the rotary part are the same everywhere."""
    ranks = {"kv_lora_rank": 512, "q_lora_rank": q_rank, "qk_rope_head_dim": 64}
    return {**ranks, "qk_nope_head_dim": nope, "v_head_dim": value}


_GLM = shape(vocab=151_552, hidden=4096, dense=10_944, expert=1408, layers=46, q=96, kv=8, head_dim=128, top=8)
_LLAMA4 = shape(vocab=202_048, hidden=5120, dense=8192, layers=48, q=40, kv=8, top=1)
_V3 = shape(vocab=129_280, hidden=7168, dense=18_432, expert=2048, layers=61, q=128, kv=128, top=8, shared=1)

#: Models without layers for further tokens and parts for images.
MODELS: dict[str, dict[str, Any]] = {
    "GLM-4.5-Air": {"model_type": "glm4_moe", **_GLM, "n_routed_experts": 128, "attention_bias": True},
    "GLM-4.6": {
        "model_type": "glm4_moe",
        **(_GLM | shape(hidden=5120, dense=12_288, expert=1536, layers=92, first=3, routed=160)),
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite",
        **shape(vocab=154_880, hidden=2048, dense=10_240, expert=1536, layers=47, q=20, kv=20, top=4),
        **(mla(768, 192, 256) | shape(first=1, shared=1, routed=64, context=202_752)),
    },
    "MiniMax-M2": {
        "model_type": "minimax_m2",
        **shape(vocab=200_064, hidden=3072, dense=1536, layers=62, q=48, kv=8, top=8, context=196_608),
        "num_local_experts": 256,
    },
    "Llama-4-Scout": {"model_type": "llama4_text", **_LLAMA4, "num_local_experts": 16},
    "Llama-4-Maverick": {
        "model_type": "llama4_text",
        **_LLAMA4,
        "num_local_experts": 128,
        "interleave_moe_layer_step": 2,
    },
    "Kimi-K2": {
        "model_type": "kimi_k2",
        **(_V3 | shape(vocab=163_840, q=64, kv=64, first=1, routed=384)),
        **mla(1536, 128, 128),
    },
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2",
        **shape(vocab=102_400, hidden=2048, dense=10_944, expert=1408, layers=27, q=16, kv=16, top=6),
        **(mla(None, 128, 128) | shape(first=1, shared=2, routed=64, context=163_840)),
    },
    "DeepSeek-V3.2": {
        "model_type": "deepseek_v32",
        **(_V3 | shape(routed=256, context=163_840)),
        **mla(1536, 128, 128),
    },
    "DeepSeek-V4-Flash": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        **shape(vocab=129_280, hidden=4096, expert=2048, layers=43, q=64, kv=1, head_dim=512, top=6, context=1_048_576),
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_hash_layers": 3,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "hc_mult": 4,
        "expert_dtype": "fp4",
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
        "tie_word_embeddings": False,
    },
    "Hunyuan-A13B": {
        "model_type": "hunyuan_v1_moe",
        **shape(vocab=128_167, hidden=4096, dense=3072, layers=32, q=32, kv=8, head_dim=128),
        "num_experts": 64,
        "moe_topk": [8] * 32,
        "tie_word_embeddings": True,
    },
    "ERNIE-4.5-21B-A3B": {
        "model_type": "ernie4_5_moe",
        **shape(vocab=103_424, hidden=2560, dense=12_288, expert=1536, layers=28, q=20, kv=4),
        "moe_num_experts": 64,
        "moe_k": 6,
    },
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe",
        **shape(vocab=151_936, hidden=4096, dense=12_288, expert=1536, layers=94, q=64, kv=4, top=8, context=40_960),
        "head_dim": 128,
        "num_experts": 128,
    },
    "Qwen3-VL-30B-A3B": {
        "model_type": "qwen3_vl_moe",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_moe_text",
            **shape(vocab=151_936, hidden=2048, dense=6144, expert=768, layers=48, q=32, kv=4, head_dim=128, top=8),
            "num_experts": 128,
        },
    },
}
