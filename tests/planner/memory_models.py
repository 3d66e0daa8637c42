"""Small models with every way that tensors are stored, and that keys and values are cached."""

from __future__ import annotations

import json
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

from tpplan.models.config import parse_config
from tpplan.models.families import spec_from_config
from tpplan.models.formats import read_scheme, stored_by_formula

if TYPE_CHECKING:
    from tpplan.core.model import ModelSpec


#: Bits per cached element (ExLlamaV2's caches).
BITS: dict[str, Fraction | int] = {
    "fp16": 16,
    "fp8": 8,
    "q8": Fraction(17, 2),
    "q6": Fraction(13, 2),
    "q4": Fraction(9, 2),
}

MLA = {
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

#: What each model has beyond the common keys: every way that tensors are stored, and that keys and values are cached.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 5003, "attention_bias": True},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "multi-query": {"num_key_value_heads": 1},
    "gemma2": {"model_type": "gemma2", "sliding_window": 100, "head_dim": 64},
    "mistral": {"model_type": "mistral", "sliding_window": 64},
    "phi3": {"model_type": "phi3", "sliding_window": None},
    "olmo2": {"model_type": "olmo2"},
    "gpt2": {"model_type": "gpt2", "n_embd": 512, "n_layer": 3, "n_head": 8, "n_positions": 4096, "vocab_size": 50257},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 640,
        "decoder_sparse_step": 2,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 2880,
        "sliding_window": 128,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", "num_key_value_heads": 8, **MLA},
    "deepseek_v2": {"model_type": "deepseek_v2", "num_key_value_heads": 8, **MLA, "q_lora_rank": None},
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_key_value_heads": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 640,
        "full_attention_interval": 2,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 18,
        "linear_key_head_dim": 48,
        "linear_value_head_dim": 32,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", "full_attention_interval": 3, "torch_dtype": "float32"},
    "gemma4_text": {
        "model_type": "gemma4_text",
        "global_head_dim": 96,
        "head_dim": 64,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 100,
        "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": 4096,
    },
    "deepseek_v4": {
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": 64,
        "q_lora_rank": 96,
        "o_groups": 4,
        "o_lora_rank": 48,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "index_head_dim": 40,
        "index_n_heads": 3,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 6,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 24,
        "mamba_n_groups": 3,
        "mamba_d_state": 48,
        "mamba_d_head": 32,
        "mamba_expand": 3,
        "hidden_size": 256,
        "num_attention_heads": 4,
    },
    "gptq": {"quantization_config": _GPTQ, "torch_dtype": "float16"},
    "awq": {"quantization_config": _AWQ, "torch_dtype": "float16"},
    "fp8": {"quantization_config": _FP8},
    "awq mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 1536,
        "quantization_config": _AWQ,
    },
}


@cache
def model(name: str) -> ModelSpec:
    """One of the models."""
    common = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "intermediate_size": 1792,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    config = parse_config(json.dumps(common | MODELS[name]).encode(), "config.json")
    return stored_by_formula(spec_from_config(config, name), read_scheme(config))
