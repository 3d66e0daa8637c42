"""Small random configs of every family, in the form that config.json files have."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tpplan.models.families.wrappers import WRAPPERS

Keys = dict[str, st.SearchStrategy[Any]]


def _types(names: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
    """Draw types for the most layers; as many as there are remain."""
    return st.lists(st.sampled_from(names), min_size=5, max_size=5)


_FLAG = st.booleans()
_SIZE = st.integers(1, 24)
_WINDOW = st.integers(1, 9)
_LAYERS = st.integers(1, 5)
_BIASES: Keys = {"attention_bias": _FLAG, "mlp_bias": _FLAG}
_HEAD: Keys = {"head_dim": st.sampled_from((4, 8, 12))}
_BIASED: Keys = {"attention_bias": _FLAG}
_SLIDING: Keys = {"sliding_window": st.none() | _WINDOW}
_QWEN_SLIDING: Keys = {"use_sliding_window": _FLAG, "sliding_window": _WINDOW, "max_window_layers": st.integers(0, 5)}
_EXPERTS = {"num_experts": st.integers(2, 4), "num_experts_per_tok": st.integers(1, 2), "moe_intermediate_size": _SIZE}
_SPARSE: Keys = {"decoder_sparse_step": st.integers(1, 3), "mlp_only_layers": st.lists(st.integers(0, 4), max_size=2)}
_MLA: Keys = {
    "moe_intermediate_size": _SIZE,
    "n_routed_experts": st.integers(2, 4),
    "n_shared_experts": st.integers(1, 2),
    "num_experts_per_tok": st.integers(1, 2),
    "kv_lora_rank": _SIZE,
    "q_lora_rank": st.none() | _SIZE,
    "qk_nope_head_dim": st.sampled_from((4, 8)),
    "qk_rope_head_dim": st.sampled_from((4, 8)),
    "v_head_dim": st.sampled_from((4, 6)),
    "first_k_dense_replace": st.integers(0, 3),
    "n_group": st.just(1),
    "topk_group": st.just(1),
}

_DENSE_MLA: Keys = {
    key: _MLA[key] for key in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
}
_SHARED_EXPERT: Keys = {"shared_expert_intermediate_size": _SIZE}
_DELTA_NET: Keys = {
    "linear_num_key_heads": st.just(2),
    "linear_num_value_heads": st.sampled_from((2, 4, 6)),
    "linear_key_head_dim": st.sampled_from((4, 8)),
    "linear_value_head_dim": st.sampled_from((3, 8)),
}
_SOME_LINEAR: Keys = {"linear_conv_kernel_dim": st.integers(2, 5), "full_attention_interval": st.integers(1, 4)}
_INDEXER: Keys = {"index_n_heads": _SIZE, "index_head_dim": st.integers(8, 12)}
_MLP_TYPES = ("dense", "sparse")
_SHARED: Keys = {"num_shared_experts": st.integers(1, 2)}
_ROUTED: Keys = {
    "moe_intermediate_size": _SIZE,
    "n_routed_experts": st.integers(2, 4),
    "num_experts_per_tok": st.integers(1, 2),
}
_PACKED: Keys = {"num_local_experts": st.integers(2, 4), "num_experts_per_tok": st.integers(1, 2)}
_OPEN_EXPERTS: Keys = {"num_experts": st.integers(2, 4), "num_experts_per_tok": st.integers(1, 2)}
_GROUPS: Keys = {"n_group": st.just(1), "topk_group": st.just(1)}

_SLIDING_TYPES = ("full_attention", "sliding_attention")
_LEFT_OUT = {"no_op": _FLAG, "replace_with_linear": _FLAG}
_SOME_SLIDING: Keys = {"sliding_window": _WINDOW, "layer_types": _types(_SLIDING_TYPES)}
_SEARCHED_HEADS = st.fixed_dictionaries({**_LEFT_OUT, "n_heads_in_group": st.sampled_from((1, 2, 3, 6))})
_SEARCHED_MLP = st.fixed_dictionaries({**_LEFT_OUT, "ffn_mult": st.sampled_from((0.5, 1.3125, 5.25))})
_GLOBAL: Keys = {
    "attention_bias": _FLAG,
    "sliding_window": _WINDOW,
    "global_head_dim": st.sampled_from((4, 8, 12)),
    "num_global_key_value_heads": st.none() | st.just(1),
    "attention_k_eq_v": _FLAG,
    "use_double_wide_mlp": _FLAG,
    "num_kv_shared_layers": st.integers(0, 4),
}
_CONV: Keys = {"conv_bias": _FLAG, "conv_L_cache": st.integers(2, 5)}
_KINDS = ("full_attention", "linear_attention")
#: Any hidden size that is drawn is that of four or eight heads, in one group or more.
_MAMBA2: Keys = {"mamba_n_heads": st.sampled_from((4, 8)), "mamba_d_state": st.sampled_from((3, 8))}
_SOME_MAMBA2: Keys = {
    "mamba_n_groups": st.sampled_from((1, 2, 4)),
    "mamba_expand": st.integers(1, 2),
    "mamba_d_conv": st.integers(2, 5),
    "mamba_conv_bias": _FLAG,
    "mamba_proj_bias": _FLAG,
    "layer_types": _types(("attention", "mamba")) | _types(_KINDS),
}

#: The smallest parts of Phi-4 that see and hear.
PHI4_PARTS = {
    "vision_config": {"hidden_size": 16, "intermediate_size": 4, "num_hidden_layers": 2, "num_attention_heads": 1}
    | {"image_size": 28, "crop_size": 28},
    "audio_config": {"hidden_size": 16, "num_blocks": 1, "num_attention_heads": 1, "intermediate_size": 4}
    | {"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 4},
}

#: For each model type the keys that its config has besides the common ones: always, and sometimes.
FAMILY_KEYS: dict[str, tuple[Keys, Keys]] = {
    "llama": ({}, {**_BIASES, **_HEAD}),
    "mistral": ({}, {**_SLIDING, **_HEAD}),
    "mixtral": (
        {"num_local_experts": st.integers(2, 4)},
        {"num_experts_per_tok": st.integers(1, 2), **_SLIDING, **_HEAD},
    ),
    "qwen2": ({}, _QWEN_SLIDING),
    "mimo": ({}, _QWEN_SLIDING),
    "qwen2_moe": (
        {**_EXPERTS, **_SHARED_EXPERT},
        {**_QWEN_SLIDING, **_SPARSE, "qkv_bias": _FLAG},
    ),
    "qwen3": (_HEAD, {**_QWEN_SLIDING, "attention_bias": _FLAG}),
    "qwen3_moe": (_EXPERTS, {**_SPARSE, **_HEAD, "attention_bias": _FLAG, "use_sliding_window": _FLAG}),
    "gemma": (_HEAD, {"attention_bias": _FLAG}),
    "gemma2": (_HEAD, {"attention_bias": _FLAG, "sliding_window": _WINDOW}),
    "gemma3_text": (
        _HEAD,
        {"attention_bias": _FLAG, "sliding_window": _WINDOW, "sliding_window_pattern": st.integers(1, 4)},
    ),
    "gemma3n_text": (
        {
            **_HEAD,
            "vocab_size_per_layer_input": st.integers(5, 40),
            "hidden_size_per_layer_input": _SIZE,
            "num_kv_shared_layers": st.integers(0, 4),
            "layer_types": _types(_SLIDING_TYPES),
        },
        {
            "attention_bias": _FLAG,
            "sliding_window": _WINDOW,
            "altup_num_inputs": st.integers(2, 4),
            "laurel_rank": _SIZE,
            "intermediate_size": _SIZE | st.lists(_SIZE, min_size=5, max_size=5),
        },
    ),
    "gemma4_text": (
        {
            **_HEAD,
            "vocab_size_per_layer_input": st.integers(5, 40),
            "hidden_size_per_layer_input": st.integers(0, 8),
            "layer_types": _types(_SLIDING_TYPES),
        },
        {**_GLOBAL, "enable_moe_block": _FLAG},
    ),
    "gemma4_unified_text": ({**_HEAD, "layer_types": _types(_SLIDING_TYPES)}, _GLOBAL),
    "laguna": (
        {**_EXPERTS, **_HEAD, "shared_expert_intermediate_size": _SIZE},
        {
            "attention_bias": _FLAG,
            "sliding_window": _WINDOW,
            "layer_types": _types(_SLIDING_TYPES),
            "mlp_layer_types": _types(_MLP_TYPES),
            "gating": st.sampled_from((True, "per-head", "per-element")),
            "num_attention_heads_per_layer": st.lists(st.sampled_from((6, 12)), min_size=5, max_size=5),
        },
    ),
    "mimo_v2_flash": (
        {**_ROUTED, **_HEAD, "v_head_dim": st.sampled_from((4, 6)), "num_attention_heads": st.just(12)},
        {
            "attention_bias": _FLAG,
            "sliding_window": _WINDOW,
            "sliding_window_size": _WINDOW,
            "layer_types": _types(_SLIDING_TYPES),
            "mlp_layer_types": _types(_MLP_TYPES),
        },
    ),
    "step3p5": (
        {**_HEAD, **_ROUTED, "share_expert_dim": _SIZE, "sliding_window": _WINDOW},
        {
            "attention_bias": _FLAG,
            "layer_types": _types(_SLIDING_TYPES),
            "mlp_layer_types": _types(_MLP_TYPES),
            "moe_layers_enum": st.sampled_from(("", "1, 2", "0,4")) | st.lists(st.integers(0, 4), max_size=3),
            "num_sliding_attention_heads": st.sampled_from((6, 12)),
            "attention_other_setting": st.just({"num_attention_heads": 6, "head_dim": 5}),
        },
    ),
    "deepseek_v4": (
        {
            **_ROUTED,
            "num_attention_heads": st.just(4),
            "num_key_value_heads": st.just(1),
            "head_dim": st.sampled_from((8, 16)),
            "q_lora_rank": _SIZE,
            "o_groups": st.sampled_from((1, 2, 4)),
            "o_lora_rank": _SIZE,
            "index_n_heads": st.integers(1, 3),
            "index_head_dim": st.sampled_from((8, 12)),
            "sliding_window": _WINDOW,
        },
        {
            "hc_mult": st.integers(1, 4),
            "layer_types": _types(("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")),
            "compress_ratios": st.lists(st.sampled_from((0, 4, 128)), min_size=5, max_size=6),
            "compress_rate_csa": st.integers(2, 5),
            "compress_rates": st.just({"compressed_sparse_attention": 3, "heavily_compressed_attention": 7}),
            "mlp_layer_types": _types(("hash_moe", "moe")),
            "num_hash_layers": st.integers(0, 3),
        },
    ),
    "mistral4": (_MLA, _BIASED),
    "nemotron-nas": (
        {
            **_HEAD,
            "hidden_size": st.just(48),
            "num_attention_heads": st.just(6),
            "block_configs": st.lists(
                st.fixed_dictionaries({"attention": _SEARCHED_HEADS, "ffn": _SEARCHED_MLP}), min_size=5, max_size=5
            ),
        },
        _BIASES,
    ),
    "phi": ({}, {"qk_layernorm": _FLAG}),
    **dict.fromkeys(("phi3", "phi4mm"), ({}, _SLIDING)),
    "phi4_multimodal": ({key: st.just(part) for key, part in PHI4_PARTS.items()}, _SLIDING),
    "cohere": ({}, {"attention_bias": _FLAG, "use_qk_norm": _FLAG}),
    "cohere2": (
        {},
        {"attention_bias": _FLAG, "sliding_window": _WINDOW, "sliding_window_pattern": st.integers(1, 4)},
    ),
    "olmo": ({}, {"attention_bias": _FLAG}),
    "olmo2": ({}, {"attention_bias": _FLAG}),
    "granite": ({}, _BIASES),
    "starcoder2": ({}, {"use_bias": _FLAG, **_SLIDING}),
    "stablelm": ({}, {"use_qkv_bias": _FLAG, "qk_layernorm": _FLAG, "use_parallel_residual": _FLAG}),
    "gpt2": ({}, {"n_inner": st.none() | _SIZE}),
    "gpt_neox": ({}, {"attention_bias": _FLAG}),
    "falcon": (
        {},
        {
            "bias": _FLAG,
            "multi_query": _FLAG,
            "new_decoder_architecture": _FLAG,
            "parallel_attn": _FLAG,
            "num_ln_in_parallel_attn": st.sampled_from((None, 1, 2)),
            "ffn_hidden_size": st.none() | _SIZE,
        },
    ),
    "glm4": (_HEAD, {"attention_bias": _FLAG}),
    "smollm3": (
        {},
        {
            **_BIASES,
            "use_sliding_window": _FLAG,
            "sliding_window": _WINDOW,
            "no_rope_layer_interval": st.integers(1, 4),
        },
    ),
    "gpt_oss": (
        {**_HEAD, "num_local_experts": st.integers(2, 4), "num_experts_per_tok": st.integers(1, 2)},
        {"attention_bias": _FLAG, "sliding_window": _WINDOW},
    ),
    "nemotron": ({}, {**_BIASES, **_HEAD}),
    "ministral": (_HEAD, _SLIDING),
    "ministral3": ({}, {**_SLIDING, **_HEAD}),
    "seed_oss": ({}, {**_BIASES, **_HEAD, "attention_out_bias": _FLAG}),
    "olmo3": ({}, {**_BIASED, "sliding_window": _WINDOW}),
    "exaone4": ({}, {**_HEAD, "sliding_window": _WINDOW, "sliding_window_pattern": st.integers(1, 4)}),
    "ernie4_5": ({}, {**_HEAD, "use_bias": _FLAG}),
    "hunyuan_v1_dense": (_HEAD, _BIASED),
    "hyperclovax": ({}, {**_BIASES, **_HEAD, "use_post_norm": _FLAG}),
    "glm": ({}, {**_BIASED, **_HEAD}),
    "cwm": ({}, {**_HEAD, "mlp_bias": _FLAG, "sliding_window": _WINDOW}),
    "granite_swa": ({}, {**_BIASES, "sliding_window": _WINDOW}),
    "helium": ({}, {**_BIASES, **_HEAD}),
    "internlm3": ({}, _HEAD),
    "vaultgemma": (_HEAD, {**_BIASED, "sliding_window": _WINDOW}),
    "arcee": ({}, {**_BIASES, **_HEAD}),
    "apertus": ({}, {**_BIASED, "hidden_act": st.sampled_from(("xielu", "silu"))}),
    "nanochat": ({}, _BIASED),
    "jais2": ({}, {**_BIASES, **_HEAD}),
    "gpt_bigcode": ({}, {"n_inner": st.none() | _SIZE, "multi_query": _FLAG}),
    "gptj": ({}, {"n_inner": st.none() | _SIZE}),
    "bloom": ({}, {}),
    "opt": (
        {"ffn_dim": _SIZE},
        dict.fromkeys(("enable_bias", "layer_norm_elementwise_affine", "do_layer_norm_before"), _FLAG),
    ),
    "qwen2_vl_text": ({}, _QWEN_SLIDING),
    "qwen2_5_vl_text": ({}, _QWEN_SLIDING),
    "qwen3_vl_text": ({}, {**_HEAD, **_BIASED}),
    "glm4v_text": ({}, {}),
    "glm4v_moe_text": (
        {**_ROUTED, **_HEAD, **_GROUPS},
        {"attention_bias": _FLAG, "n_shared_experts": st.integers(1, 2), "first_k_dense_replace": st.integers(0, 3)},
    ),
    "deepseek_v2": (_MLA, _BIASES),
    "deepseek_v3": (_MLA, {"attention_bias": _FLAG}),
    "qwen3_next": (
        {**_HEAD, **_EXPERTS, **_SHARED_EXPERT, **_DELTA_NET},
        {**_SPARSE, **_SOME_LINEAR, "attention_bias": _FLAG},
    ),
    "qwen3_5_text": ({**_HEAD, **_DELTA_NET}, {**_SOME_LINEAR, "attention_bias": _FLAG}),
    "qwen3_5_moe_text": (
        {**_HEAD, **_EXPERTS, **_SHARED_EXPERT, **_DELTA_NET},
        {**_SOME_LINEAR, "attention_bias": _FLAG},
    ),
    "kimi_k2": (_MLA, {"attention_bias": _FLAG}),
    "deepseek_v32": ({**_MLA, **_INDEXER, "q_lora_rank": _SIZE}, {"attention_bias": _FLAG}),
    "glm_moe_dsa": (
        {**_MLA, **_INDEXER, "q_lora_rank": _SIZE},
        {
            "attention_bias": _FLAG,
            "mlp_layer_types": _types(_MLP_TYPES),
            "indexer_types": _types(("full", "shared")).map(lambda types: ["full", *types[1:]]),
            "index_topk_pattern": st.text("FS", min_size=5, max_size=5).map(lambda types: f"F{types[1:]}"),
            "index_topk_freq": st.integers(0, 3),
            "index_skip_topk_offset": st.integers(0, 3),
        },
    ),
    "glm4_moe_lite": (
        {key: drawn for key, drawn in _MLA.items() if key != "first_k_dense_replace"},
        {"attention_bias": _FLAG, "mlp_layer_types": _types(_MLP_TYPES)},
    ),
    "glm4_moe": (
        {**_ROUTED, **_HEAD},
        {
            "attention_bias": _FLAG,
            "use_qk_norm": _FLAG,
            "n_shared_experts": st.integers(1, 2),
            "first_k_dense_replace": st.integers(0, 3),
        },
    ),
    "minimax_m2": (_PACKED, _HEAD),
    "ernie4_5_moe": (
        {
            "moe_num_experts": st.integers(2, 4),
            "moe_k": st.integers(1, 2),
            "moe_intermediate_size": _SIZE,
        },
        {
            **_HEAD,
            "use_bias": _FLAG,
            "moe_num_shared_experts": st.integers(0, 2),
            "moe_layer_start_index": st.integers(0, 3),
            "moe_layer_end_index": st.integers(-1, 4),
            "moe_layer_interval": st.integers(1, 2),
        },
    ),
    "dots1": (
        {**_ROUTED, **_HEAD, **_GROUPS, "n_shared_experts": st.integers(1, 2)},
        {
            "attention_bias": _FLAG,
            "first_k_dense_replace": st.integers(0, 3),
            "sliding_window": st.none() | _WINDOW,
            "max_window_layers": st.integers(0, 5),
        },
    ),
    "exaone_moe": (
        {**_EXPERTS, **_HEAD},
        {
            **_SHARED,
            "sliding_window": _WINDOW,
            "sliding_window_pattern": st.integers(1, 4),
            "first_k_dense_replace": st.integers(0, 3),
            "mlp_layer_types": _types(_MLP_TYPES),
        },
    ),
    "solar_open": (_ROUTED, {**_HEAD, "attention_bias": _FLAG, "n_shared_experts": st.integers(1, 2)}),
    "afmoe": (
        _EXPERTS,
        {
            **_HEAD,
            **_SHARED,
            "attention_bias": _FLAG,
            "num_dense_layers": st.integers(0, 3),
            "sliding_window": _WINDOW,
            "global_attn_every_n_layers": st.integers(1, 4),
        },
    ),
    "hy_v3": (_EXPERTS, {**_HEAD, **_SHARED, **_BIASES, "mlp_layer_types": _types(_MLP_TYPES)}),
    "olmoe": (_OPEN_EXPERTS, {"attention_bias": _FLAG}),
    "flex_olmo": (_OPEN_EXPERTS, {**_HEAD, "attention_bias": _FLAG}),
    "phimoe": (_PACKED, {**_SLIDING, **_HEAD, "attention_bias": _FLAG, "lm_head_bias": _FLAG}),
    "hunyuan_v1_moe": (
        {**_HEAD, "num_experts": st.integers(2, 4), "moe_topk": st.integers(1, 2)},
        {"attention_bias": _FLAG},
    ),
    "cohere2_moe": (
        {**_OPEN_EXPERTS, **_HEAD},
        {
            **_SHARED,
            "attention_bias": _FLAG,
            "sliding_window": _WINDOW,
            "sliding_window_pattern": st.integers(1, 4),
            "prefix_dense_sliding_window_pattern": st.integers(1, 4),
            "first_k_dense_replace": st.integers(0, 1),
            "prefix_dense_intermediate_size": st.none() | _SIZE,
        },
    ),
    "granitemoe": (_PACKED, {"attention_bias": _FLAG}),
    "granitemoeshared": (_PACKED, {"attention_bias": _FLAG, "shared_intermediate_size": st.just(0) | _SIZE}),
    "granitemoehybrid": (
        {**_MAMBA2, **_PACKED, "num_local_experts": st.sampled_from((0, 2, 3))},
        {
            **_SOME_MAMBA2,
            "attention_bias": _FLAG,
            "shared_intermediate_size": _SIZE,
        },
    ),
    "lfm2": (
        {"layer_types": _types(("conv", "full_attention")), "intermediate_size": st.integers(6, 24)},
        {
            **_CONV,
            "block_auto_adjust_ff_dim": _FLAG,
            "block_multiple_of": st.integers(1, 9),
            "block_ffn_dim_multiplier": st.sampled_from((1, 0.7, 1.3)),
        },
    ),
    "lfm2_moe": (
        {**_EXPERTS, "layer_types": _types(("conv", "full_attention"))},
        {**_CONV, "num_dense_layers": st.integers(0, 3), "use_expert_bias": _FLAG},
    ),
    "lfm3": (
        _HEAD,
        {
            **_CONV,
            "attention_bias": _FLAG,
            "sliding_window": _WINDOW,
            "use_sandwich_norm": _FLAG,
            "use_attention_gate": _FLAG,
            "layer_types": _types(("conv", "full_attention", "sliding_attention")),
        },
    ),
    "kimi_linear": (
        {
            **{key: drawn for key, drawn in _MLA.items() if key not in {"n_group", "q_lora_rank", "n_routed_experts"}},
            "num_experts": st.integers(2, 4),
            "linear_num_heads": st.integers(1, 4),
            "linear_head_dim": st.sampled_from((3, 8)),
        },
        {
            "q_lora_rank": st.none() | _SIZE,
            "attention_bias": _FLAG,
            "layer_types": _types(_KINDS),
            "mlp_layer_types": _types(_MLP_TYPES),
            "linear_conv_kernel_dim": st.integers(2, 5),
        },
    ),
    "olmo_hybrid": (
        {"num_hidden_layers": st.integers(2, 5), **_DELTA_NET},
        {"linear_conv_kernel_dim": st.integers(2, 5), "attention_bias": _FLAG},
    ),
    "bamba": (
        _MAMBA2,
        {
            **{key: drawn for key, drawn in _SOME_MAMBA2.items() if key != "layer_types"},
            **_BIASES,
            "attn_layer_indices": st.lists(st.integers(0, 4), max_size=3),
        },
    ),
    "falcon_h1": (
        {**_MAMBA2, "mamba_d_ssm": st.none() | st.sampled_from((8, 24))},
        {
            **{key: drawn for key, drawn in _SOME_MAMBA2.items() if key != "layer_types"},
            **_BIASES,
            "mamba_rms_norm": _FLAG,
            "projectors_bias": _FLAG,
        },
    ),
    "jamba": (
        {"num_experts": st.integers(1, 4), "num_experts_per_tok": st.just(1)},
        {
            "expert_layer_period": st.integers(2, 3),
            "attn_layer_period": st.integers(5, 6),
            "mamba_d_state": st.sampled_from((3, 8)),
            "mamba_d_conv": st.integers(2, 5),
            "mamba_expand": st.integers(1, 2),
            "mamba_dt_rank": st.just("auto") | _SIZE,
            "mamba_conv_bias": _FLAG,
            "mamba_proj_bias": _FLAG,
        },
    ),
    "nemotron_h": (
        {
            **_HEAD,
            **_ROUTED,
            **_GROUPS,
            "mamba_num_heads": st.just(4),
            "mamba_head_dim": st.sampled_from((3, 8)),
            "n_groups": st.sampled_from((1, 2, 4)),
        },
        {
            "layers_block_type": _types(("mamba", "attention", "mlp", "moe")),
            "conv_kernel": st.integers(2, 5),
            "ssm_state_size": st.integers(1, 9),
            "moe_shared_expert_intermediate_size": _SIZE,
            "moe_latent_size": st.none() | st.sampled_from((2, 8)),
            **dict.fromkeys(("use_bias", "use_conv_bias", "mlp_bias"), _FLAG),
        },
    ),
    "llama4_text": (
        {**_PACKED, **_HEAD, "intermediate_size_mlp": _SIZE},
        {
            "attention_bias": _FLAG,
            "attention_chunk_size": _WINDOW,
            "no_rope_layer_interval": st.integers(1, 4),
            "interleave_moe_layer_step": st.integers(1, 3),
            "moe_layers": st.lists(st.integers(0, 4), max_size=3, unique=True),
        },
    ),
    "qwen3_vl_moe_text": (_EXPERTS, {**_SPARSE, **_HEAD, "attention_bias": _FLAG}),
    "deepseek_ocr2_text": (
        {**_ROUTED, "mlp_layer_types": _types(_MLP_TYPES)},
        {**_BIASES, "n_shared_experts": st.integers(1, 2)},
    ),
    "axk1": (
        {key: drawn for key, drawn in _MLA.items() if key != "q_lora_rank"},
        {"attention_bias": _FLAG, "q_lora_rank": _SIZE, "mlp_layer_types": _types(_MLP_TYPES)},
    ),
    "minicpm3": (_DENSE_MLA, _BIASES),
    "youtu": (_DENSE_MLA, _BIASED),
    "bitnet": ({}, _BIASED),
    "iquestcoder": ({}, {**_BIASES, **_HEAD}),
    "mellum": (
        {**_PACKED, **_HEAD, "moe_intermediate_size": _SIZE},
        {
            "attention_bias": _FLAG,
            "sliding_window": _WINDOW,
            "layer_types": _types(_SLIDING_TYPES),
            "mlp_layer_types": _types(_MLP_TYPES),
        },
    ),
    "granitemoe_swa": (
        _PACKED,
        {
            "attention_bias": _FLAG,
            "sliding_window": _WINDOW,
            "layer_types": _types(_SLIDING_TYPES),
            "shared_intermediate_size": st.just(0) | _SIZE,
        },
    ),
    "bailing_hybrid": (
        {
            **{key: drawn for key, drawn in _MLA.items() if key not in {"q_lora_rank", "n_routed_experts", "n_group"}},
            "num_experts": st.integers(2, 4),
            "linear_head_dim": st.sampled_from((3, 8)),
            "n_group": st.just(1),
        },
        {
            "attention_bias": _FLAG,
            "layer_types": _types(_KINDS),
            "mlp_layer_types": _types(_MLP_TYPES),
            "short_conv_kernel_size": st.integers(2, 5),
            "layer_group_size": st.integers(1, 4),
        },
    ),
    "minimax_m3_vl_text": (
        {
            **_PACKED,
            **_HEAD,
            "shared_intermediate_size": _SIZE,
            "dense_intermediate_size": _SIZE,
            "index_n_heads": st.integers(1, 3),
            "index_head_dim": st.sampled_from((8, 12)),
        },
        {"layer_types": _types(("full_attention", "minimax_m3_sparse")), "mlp_layer_types": _types(_MLP_TYPES)},
    ),
    "longcat_flash": (
        {
            **{key: drawn for key, drawn in _DENSE_MLA.items() if key != "q_lora_rank"},
            "q_lora_rank": _SIZE,
            "n_routed_experts": st.integers(2, 4),
            "moe_topk": st.integers(1, 2),
            "expert_ffn_hidden_size": _SIZE,
        },
        {"attention_bias": _FLAG, "zero_expert_num": st.integers(1, 3)},
    ),
    "stablelm_epoch": ({}, {"use_qkv_bias": _FLAG}),
    **dict.fromkeys(("aquila", "solar", "telechat3", "TeleFLM", "xverse"), ({}, {**_BIASES, **_HEAD})),
    **dict.fromkeys(("orion", "telechat"), ({}, {})),
    "internlm": ({}, {"bias": _FLAG}),
    "exaone": ({}, {**_HEAD}),
    "minicpm": ({}, {}),
    "deepseek": (_ROUTED, {"n_shared_experts": st.integers(1, 2), "first_k_dense_replace": st.integers(0, 3)}),
    "qwen": (
        {"intermediate_size": _SIZE.map(lambda width: 2 * width), "kv_channels": st.sampled_from((4, 8, 12))},
        {"no_bias": _FLAG},
    ),
    "internlm2": ({}, {"bias": _FLAG}),
    "baichuan": ({}, {}),
    "chatglm": (
        {"multi_query_attention": st.just(True), "kv_channels": st.sampled_from((4, 8, 12))},
        dict.fromkeys(("add_qkv_bias", "add_bias_linear", "post_layer_norm"), _FLAG),
    ),
    "bailing_moe": (
        _EXPERTS,
        {
            **_HEAD,
            **_SHARED,
            "moe_shared_expert_intermediate_size": _SIZE,
            "first_k_dense_replace": st.integers(0, 3),
            **dict.fromkeys(("use_bias", "use_qkv_bias", "use_qk_norm", "moe_router_enable_expert_bias"), _FLAG),
        },
    ),
    "minimax": (
        _PACKED,
        {**_HEAD, "block_size": st.integers(1, 9), "layer_types": _types(_KINDS)},
    ),
    **dict.fromkeys(
        ("minimax_text_01", "minimax_m1"),
        ({**_PACKED, "attn_type_list": st.lists(st.integers(0, 1), min_size=5, max_size=5)}, _HEAD),
    ),
    "axk2": (
        {**{key: drawn for key, drawn in _MLA.items() if key != "q_lora_rank"}, "q_lora_rank": _SIZE},
        {**_INDEXER, "attention_bias": _FLAG, "gated_norm_rank": _SIZE, "mlp_layer_types": _types(_MLP_TYPES)},
    ),
    "hy_v4": (
        {**{key: drawn for key, drawn in _MLA.items() if key != "q_lora_rank"}, "q_lora_rank": _SIZE},
        {
            **_INDEXER,
            "attention_bias": _FLAG,
            "hc_mult": st.integers(1, 4),
            "mlp_layer_types": _types(_MLP_TYPES),
            "indexer_types": _types(("full", "shared")).map(lambda kinds: ["full", *kinds[1:]]),
        },
    ),
    "glm5_next_text": (
        {
            **{key: drawn for key, drawn in _MLA.items() if key not in {"q_lora_rank", "qk_rope_head_dim"}},
            "q_lora_rank": _SIZE,
            "linear_num_heads": st.integers(1, 4),
            "linear_head_dim": st.sampled_from((3, 8)),
        },
        {
            **_INDEXER,
            "attention_bias": _FLAG,
            "hc_mult": st.integers(1, 4),
            "index_kpool": st.sampled_from((1, 2, 16)),
            "linear_conv_kernel_dim": st.integers(2, 5),
            "layer_types": _types((*_KINDS, "indexed_attention")),
            "mlp_layer_types": _types(_MLP_TYPES),
            "index_topk_pattern": _types(("F", "S")).map(lambda kinds: "".join(["F", *kinds[1:]])),
        },
    ),
    "qwen4_exp_text": (
        {
            **_EXPERTS,
            **_HEAD,
            **_SHARED_EXPERT,
            **_DELTA_NET,
            "indexer_n_heads": st.integers(1, 3),
            "indexer_kv_heads": st.just(1),
            "indexer_head_dim": st.sampled_from((12, 16)),
            "indexer_budget": st.just(8),
            "indexer_compress_ratio": st.sampled_from((2, 4)),
            "eos_token_id": st.just(1),
            "ngram_vocab_size_base": st.just(50),
            "make_ngram_vocab_size_divisible_by": st.just(8),
            "split_ngram_parts": st.just(2),
            "ple_embed_dim": st.just(48),
        },
        {
            "linear_conv_kernel_dim": st.integers(2, 5),
            "full_attention_interval": st.integers(2, 4),
            "attention_bias": _FLAG,
            "hc_count": st.integers(2, 4),
            "hc_lowrank": _SIZE,
            "ple_layer_ids": st.just([1]),
            "ple_conv_kernel_size": st.integers(2, 4),
            "ngram_size": st.sampled_from((2, 3)),
        },
    ),
    "zamba2": (
        {
            "mamba_d_state": st.sampled_from((3, 8)),
            "n_mamba_heads": st.sampled_from((4, 8)),
            "layers_block_type": _types(("mamba", "hybrid")) | _types(("linear_attention", "hybrid")),
        },
        {
            "mamba_ngroups": st.sampled_from((1, 2, 4)),
            "mamba_expand": st.integers(1, 2),
            "mamba_d_conv": st.integers(2, 5),
            "num_mem_blocks": st.integers(1, 3),
            "adapter_rank": _SIZE,
            **dict.fromkeys(("add_bias_linear", "use_shared_attention_adapter", "use_long_context"), _FLAG),
        },
    ),
    "aria_text": (
        {"moe_num_experts": st.integers(2, 4), "moe_topk": st.integers(1, 2)},
        {**_BIASES, "moe_num_shared_experts": st.integers(1, 2)},
    ),
    "dbrx": (
        {
            "attn_config": st.fixed_dictionaries({"kv_n_heads": st.just(1), "rope_theta": st.just(10_000.0)}),
            "ffn_config": st.fixed_dictionaries(
                {"ffn_hidden_size": _SIZE, "moe_num_experts": st.integers(2, 4), "moe_top_k": st.integers(1, 2)}
            ),
        },
        {},
    ),
    "ernie4_5_vl_moe_text": (
        {
            "moe_num_experts": st.integers(2, 4),
            "moe_k": st.integers(1, 2),
            "moe_intermediate_size": st.lists(_SIZE, min_size=2, max_size=2),
        },
        {"use_bias": _FLAG, "moe_num_shared_experts": st.integers(1, 2), "mlp_layer_types": _types(_MLP_TYPES)},
    ),
    "flint": (
        {**_EXPERTS, **_HEAD},
        {
            **_SPARSE,
            "attention_bias": _FLAG,
            "sliding_window": _WINDOW,
            "shared_expert_intermediate_size": _SIZE,
            "layer_types": _types(_SLIDING_TYPES),
        },
    ),
    "gpt_neo": ({"num_layers": st.just(4), "attention_types": st.just([[["global", "local"], 2]])}, {}),
    "granite4_vision_text": ({}, _BIASES),
    "hunyuan_vl_text": (_HEAD, _BIASED),
    "kolibri1": (
        {**_EXPERTS, **_HEAD},
        {
            "sliding_window": _WINDOW,
            "shared_expert_intermediate_size": _SIZE,
            "layer_types": _types(_SLIDING_TYPES),
        },
    ),
    "mistral_large4_text": (
        {key: drawn for key, drawn in _MLA.items() if key not in {"q_lora_rank", "n_group", "topk_group"}},
        {
            **_INDEXER,
            "no_rope_layer_interval": st.integers(1, 4),
            "mlp_layer_types": _types(_MLP_TYPES),
            "indexer_types": _types(("full", "shared")).map(lambda kinds: ["full", *kinds[1:]]),
            "kv_source_layers": st.sampled_from(([0, 1, 2, 3, 4], [0, 1, 0, 1, 4], [0, 0, 0, 3, 3])),
        },
    ),
    "molmo2_text": (
        _HEAD,
        {
            "attention_bias": _FLAG,
            "additional_vocab_size": st.integers(1, 9),
            "qk_norm_type": st.sampled_from(("qwen3", "olmo")),
            "norm_after": _FLAG,
        },
    ),
    "mpt": ({}, {"expansion_ratio": st.just(4)}),
    "muse_glimmer_text": (_HEAD, {"attention_bias": _FLAG, **_SOME_SLIDING}),
    "muse_spark_text": (
        {**_PACKED, **_HEAD, "moe_intermediate_size": _SIZE, "moe_hidden_size": st.sampled_from((2, 8))},
        {"attention_bias": _FLAG, "mlp_layer_types": _types(_MLP_TYPES), **_SOME_SLIDING},
    ),
    "persimmon": ({}, {"qk_layernorm": _FLAG}),
    "glm_ocr_text": ({}, _HEAD),
    "granite_docling_text": ({}, _BIASES),
    "mllama_text_model": ({}, {"cross_attention_layers": st.lists(st.integers(0, 4), max_size=3)}),
    "paddleocr_vl_text": ({}, {**_HEAD, "use_bias": _FLAG}),
    "qwen2_5_omni_text": ({}, _QWEN_SLIDING),
    "qwen3_omni_moe_text": (_EXPERTS, {**_SPARSE, **_HEAD, "attention_bias": _FLAG}),
    "voxtral_realtime_text": ({}, {**_SLIDING, **_HEAD}),
}

#: What families call the common keys if not by the usual names; None for keys that they lack.
_GPT2: dict[str, str | None] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": None,
    "max_position_embeddings": "n_positions",
    "intermediate_size": None,
}
_MPT: dict[str, str | None] = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": None,
    "max_position_embeddings": "max_seq_len",
    "intermediate_size": None,
}
_NAMES: dict[str, dict[str, str | None]] = {
    "dbrx": _MPT,
    "mpt": _MPT,
    "gpt_neo": {
        "num_hidden_layers": None,
        "num_attention_heads": "num_heads",
        "num_key_value_heads": None,
    },
    "persimmon": {"num_key_value_heads": None},
    "zamba2": {"num_key_value_heads": None},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": _GPT2,
    "bloom": {**_GPT2, "hidden_size": "hidden_size", "max_position_embeddings": None},
    "opt": {"num_key_value_heads": None, "intermediate_size": None},
    "gpt_neox": {"num_key_value_heads": None},
    "deepseek_v4": {"num_attention_heads": None, "num_key_value_heads": None, "intermediate_size": None},
    "falcon": {"num_key_value_heads": "num_kv_heads", "intermediate_size": None},
    "longcat_flash": {"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size"},
    "qwen": {"num_key_value_heads": None, "intermediate_size": None},
    "baichuan": {"num_key_value_heads": None},
    "exaone": {"num_hidden_layers": "num_layers"},
    "chatglm": {
        "vocab_size": "padded_vocab_size",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "num_layers",
        "num_key_value_heads": "multi_query_group_num",
        "max_position_embeddings": "seq_length",
    },
}

_TOWER = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
_CLIP = {"model_type": "clip_vision_model", **_TOWER}
_QWEN3 = {"depth": 1, "hidden_size": 4, "intermediate_size": 4, "num_heads": 1, "num_position_embeddings": 4}
_DEEP = {"depth": 1, "hidden_size": 4, "intermediate_size": 4, "num_heads": 1, "out_hidden_size": 4}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER}
_MERGING = {**_TOWER, "image_size": 16, "patch_size": 8, "insert_layer_id": 0}

#: For each model of text and images the smallest part that reads images.
VISION: dict[str, dict[str, Any]] = {
    "aya_vision": _SIGLIP,
    "aria": {"model_type": "idefics3_vision", **_TOWER},
    "cohere2_vision": _SIGLIP,
    "deepseek_vl": _SIGLIP,
    "deepseek_vl_hybrid": _SIGLIP,
    "exaone4_5": {**_DEEP, "num_key_value_heads": 1},
    "gemma3": _SIGLIP,
    "gemma3n": {},
    "gemma4": {"model_type": "gemma4_vision", "head_dim": 4, "num_key_value_heads": 1, **_TOWER},
    "gemma4_unified": {"model_type": "gemma4_unified_vision", "mm_embed_dim": 4, "mm_posemb_size": 4},
    "glm46v": _DEEP,
    "glm4v": _DEEP,
    "glm4v_moe": _DEEP,
    "glm5_next": {**_DEEP, "projection_intermediate_size": 4},
    "qwen4_exp": {"model_type": "qwen4_exp_vision", **_QWEN3},
    "got_ocr2": {**_TOWER, "mlp_dim": 4, "output_channels": 4, "global_attn_indexes": [0]},
    "idefics2": _TOWER,
    "idefics3": _TOWER,
    "internvl": {"model_type": "internvl_vision", **_TOWER},
    "lighton_ocr": {"model_type": "pixtral", "head_dim": 4, **_TOWER},
    "llava": _CLIP,
    "llava_next": _CLIP,
    "llava_next_video": _CLIP,
    "llava_onevision": _SIGLIP,
    "ernie4_5_vl_moe": {"depth": 1, "hidden_size": 16, "intermediate_size": 4, "num_heads": 1},
    "hunyuan_vl": {**_TOWER, "out_hidden_size": 4, "text_hidden_size": 4},
    "mistral3": {"model_type": "pixtral", "head_dim": 4, **_TOWER},
    "mistral_large4": {"model_type": "pixtral", "head_dim": 4, **_TOWER},
    "muse_glimmer": {**_TOWER, "pos_emb_height": 2, "pos_emb_width": 2},
    "ovis2": {**_TOWER, "vocab_size": 12},
    "paligemma": _SIGLIP,
    "qwen3_5": {"model_type": "qwen3_5_vision", **_QWEN3},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_vision", **_QWEN3},
    "qwen2_5_vl": _DEEP,
    "qwen2_vl": {"depth": 1, "embed_dim": 4, "hidden_size": 4, "num_heads": 1},
    "qwen3_vl": _DEEP,
    "step3p7": _TOWER,
    "smolvlm": _TOWER,
    "video_llama_3": _TOWER,
    "video_llava": _CLIP,
    "vipllava": _CLIP,
    "kimi_k25": {**_TOWER, "merge_kernel_size": [1, 1]},
    "llama4": {**_TOWER, "image_size": 4, "patch_size": 2, "vision_output_dim": 4, "projector_input_dim": 4},
    "qwen3_vl_moe": {"depth": 1, "hidden_size": 4, "intermediate_size": 4, "num_heads": 1, "out_hidden_size": 4},
    "fast_vlm": {"model_type": "timm_wrapper", "architecture": "fastvit_mci3", "hidden_size": 4},
    "glm_ocr": _DEEP,
    "glmga": _DEEP,
    "granite_docling": {**_TOWER, "image_size": 16, "patch_size": 8},
    "lfm2_vl": {"model_type": "siglip2_vision_model", **_TOWER},
    "lfm3_vl": {"model_type": "lfm3_vl_vision", **_TOWER, "num_key_value_heads": 1, "layer_types": ["conv"]},
    "minicpm_ocr": _MERGING,
    "minicpmv4_6": _MERGING,
    "minicpmv4_7": _MERGING,
    "minimax_m3_vl": {**_TOWER, "image_size": 16, "patch_size": 8},
    "mllama": {
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "attention_heads": 1,
        "num_global_layers": 1,
        "vision_output_dim": 4,
        "image_size": 8,
        "patch_size": 4,
        "intermediate_layers_indices": [0],
    },
    "nemotron_h_omni": {
        "model_type": "radio",
        **_TOWER,
        "image_size": 32,
        "max_img_size": 32,
        "video_temporal_patch_size": 2,
    },
    "paddleocr_vl": _TOWER,
    "perception_lm": {"model_type": "timm_wrapper", "architecture": "resnet50", "model_args": {"embed_dim": 4}},
    "pp_chart2table": {**_TOWER, "mlp_dim": 4, "output_channels": 4, "global_attn_indexes": [0]},
    "qianfan_ocr": {**_TOWER, "image_size": [8, 8], "patch_size": [4, 4]},
}

_EARS = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "num_mel_bins": 4}
_WHISPER = {
    "d_model": 4,
    "encoder_layers": 1,
    "encoder_attention_heads": 1,
    "encoder_ffn_dim": 4,
    "num_mel_bins": 4,
}
_QFORMER = {**_TOWER, "vocab_size": 4, "encoder_hidden_size": 4, "max_position_embeddings": 4}
_BLIP = {"vision_config": {**_TOWER, "image_size": 8, "patch_size": 4}, "qformer_config": _QFORMER}
_VIBE = {"hidden_size": 4, "num_filters": 2, "depths": [1, 1], "downsampling_ratios": [2]}
_CONFORMER = {
    "input_dim": 4,
    "num_layers": 2,
    "hidden_dim": 4,
    "num_heads": 1,
    "dim_head": 4,
    "output_dim": 4,
    "context_size": 4,
}
_GRANITE_SPEECH = {
    "encoder_config": _CONFORMER,
    "projector_config": {"model_type": "blip_2_qformer", **_QFORMER},
}
_OMNI = {"audio_config": {**_WHISPER, "output_dim": 4}, "vision_config": _DEEP}
_OMNI3 = {
    "audio_config": {**_WHISPER, "output_dim": 4, "downsample_hidden_size": 4},
    "vision_config": {**_DEEP, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
}
#: For other models around a language model the sections of their smallest other parts.
SECTIONS: dict[str, dict[str, Any]] = {
    "audioflamingo3": {"audio_config": _EARS},
    "blip-2": _BLIP,
    "fun_asr_nano": {
        "audio_config": {**_EARS, "num_timestamp_prediction_layers": 1},
        "adaptor_config": {**_TOWER, "projector_hidden_size": 4},
    },
    "glmasr": {"audio_config": {**_EARS, "num_key_value_heads": 1}},
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": _GRANITE_SPEECH,
    "instructblip": _BLIP,
    "instructblipvideo": _BLIP,
    "janus": {
        "vision_config": {**_TOWER, "image_size": 8, "patch_size": 4, "projection_dim": 4, "depth": 1},
        "vq_config": {
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "projection_dim": 4,
            "num_embeddings": 4,
            "num_hidden_layers": 1,
            "image_token_embed_dim": 4,
            "embed_dim": 2,
            "latent_channels": 4,
        },
    },
    "moss_transcribe_diarize": {"audio_config": _EARS},
    "musicflamingo": {"audio_config": {"model_type": "audioflamingo3_encoder", **_EARS}},
    "qwen2_5_omni": _OMNI,
    "qwen2_5_omni_thinker": _OMNI,
    "qwen2_audio": {"audio_config": _WHISPER},
    "qwen3_asr": {"audio_config": {**_WHISPER, "output_dim": 4, "downsample_hidden_size": 4}},
    "qwen3_omni_moe": _OMNI3,
    "qwen3_omni_moe_thinker": _OMNI3,
    "vibevoice": {
        "audio_config": _VIBE,
        "semantic_model_config": _VIBE,
        "diffusion_head_config": {"num_hidden_layers": 1, "intermediate_size": 4, "frequency_embedding_size": 4},
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": _VIBE,
        "semantic_tokenizer_encoder_config": _VIBE,
    },
    "voxtral": {"audio_config": _EARS},
    "voxtral_realtime": {"audio_config": {**_EARS, "num_key_value_heads": 1, "head_dim": 4}},
}
SECTIONS |= {
    "granite4_vision": {
        "vision_config": _CLIP | {"hidden_size": 64},
        "qformer_config": {"model_type": "blip_2_qformer", **_QFORMER},
        "deepstack_layer_map": [[0, 1]],
        "downsample_rate": "1/2",
    },
    "molmo2": {
        "vision_config": {**_TOWER, "head_dim": 4, "num_key_value_heads": 1},
        "adapter_config": {"hidden_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4}
        | {"vision_feature_layer": [0], "intermediate_size": 4},
    },
    "muse_spark": {"vision_config": {**_TOWER, "pos_emb_height": 2, "pos_emb_width": 2}, "audio_config": {}},
}
SECTIONS |= {model_type: {"vision_config": part} for model_type, part in VISION.items()}
SECTIONS["deepseek_ocr2"] = {
    "vision_config": {
        "sam_config": {"hidden_size": 4, "output_channels": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
        | {"mlp_dim": 4, "global_attn_indexes": [0]},
        "encoder_config": {**_TOWER, "num_key_value_heads": 1},
    }
}

#: For sections in which sizes must be parts of the language model's hidden size, by what that is divided.
_MATCHING: dict[str, dict[str, dict[str, int]]] = {
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 1, "intermediate_size": 4}},
    "granite_docling": {"vision_config": {"out_hidden_size": 1}},
    "muse_spark": {"audio_config": {"out_hidden_size": 1}},
}

#: Those whose output matrix is the embedding if the language model's own config says so.
_TIED_WITHIN = {
    *("blip-2", "instructblip", "instructblipvideo"),
    *("voxtral_realtime", "glmasr", "granite_speech", "granite_speech_plus"),
}


def around(model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of a model's smallest other parts, given the language model's config."""
    matching = _MATCHING.get(model_type, {})
    return {
        name: {**section, **{key: text["hidden_size"] // parts for key, parts in matching.get(name, {}).items()}}
        if isinstance(section, dict)
        else section
        for name, section in SECTIONS[model_type].items()
    }


#: Models around a language model that transformers lacks, with the language models that they are known to have.
REMOTE: dict[str, tuple[str, ...]] = {
    "deepseek_vl_v2": ("deepseek_v2", "deepseek"),
    "dots_ocr": ("qwen2",),
    "eagle_2_5_vl": ("qwen2", "llama"),
    "h2ovl_chat": ("mistral",),
    "internvl_chat": ("internlm2", "qwen2", "llama", "qwen3", "qwen3_moe"),
    "interns1": ("qwen3", "qwen3_moe"),
    "Keye": ("qwen3",),
    "KeyeVL1_5": ("qwen3",),
    "kimi_k3": ("kimi_linear",),
    "kimi_vl": ("deepseek_v3",),
    "Llama_Nemotron_Nano_VL": ("llama",),
    "minicpmo": ("qwen2", "qwen3"),
    "minicpmv": ("qwen2", "qwen3", "llama"),
    "NemotronH_Nano_VL_V2": ("nemotron_h",),
    "NVLM_D": ("qwen2",),
    "opencua": ("qwen2",),
    "ovis": ("qwen2", "llama", "gemma2"),
    "ovis2_5": ("qwen3",),
    "phi3_v": ("phi3",),
    "skywork_chat": ("qwen2",),
    "ultravox": ("llama", "gemma3_text", "qwen3"),
}
SECTIONS |= {model_type: {"vision_config": _TOWER} for model_type in REMOTE}
SECTIONS["minicpmo"] |= {"audio_config": _EARS}
SECTIONS["ultravox"] = {"audio_config": _EARS}

#: And the language models that it is known to have.
INNER = {
    **REMOTE,
    "aya_vision": ("cohere2",),
    "cohere2_vision": ("cohere2",),
    "gemma3n": ("gemma3n_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "deepseek_vl": ("llama",),
    "deepseek_vl_hybrid": ("llama",),
    "aria": ("aria_text",),
    "ernie4_5_vl_moe": ("ernie4_5_vl_moe_text",),
    "granite4_vision": ("granite4_vision_text",),
    "hunyuan_vl": ("hunyuan_vl_text",),
    "mistral_large4": ("mistral_large4_text",),
    "molmo2": ("molmo2_text",),
    "muse_glimmer": ("muse_glimmer_text",),
    "muse_spark": ("muse_spark_text",),
    "exaone4_5": ("exaone4",),
    "glm46v": ("glm4v_text",),
    "glm4v": ("glm4v_text",),
    "glm4v_moe": ("glm4v_moe_text",),
    "deepseek_ocr2": ("deepseek_ocr2_text",),
    "glm5_next": ("glm5_next_text",),
    "qwen4_exp": ("qwen4_exp_text",),
    "got_ocr2": ("qwen2",),
    "idefics2": ("mistral",),
    "idefics3": ("llama",),
    "gemma3": ("gemma3_text",),
    "internvl": ("qwen2", "llama", "qwen3", "qwen3_moe"),
    "lighton_ocr": ("qwen3",),
    "llava": ("llama", "mistral"),
    "llava_next": ("llama", "mistral", "qwen2"),
    "llava_next_video": ("llama", "mistral", "qwen2"),
    "llava_onevision": ("qwen2",),
    "mistral3": ("mistral", "ministral3", "mistral4"),
    "ovis2": ("qwen2", "llama"),
    "paligemma": ("gemma", "gemma2"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen2_vl": ("qwen2_vl_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "step3p7": ("step3p5",),
    "smolvlm": ("llama",),
    "video_llama_3": ("qwen2",),
    "video_llava": ("llama",),
    "vipllava": ("llama",),
    "kimi_k25": ("deepseek_v3",),
    "llama4": ("llama4_text",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "audioflamingo3": ("qwen2",),
    "blip-2": ("opt",),
    "fast_vlm": ("qwen2",),
    "fun_asr_nano": ("qwen3",),
    "glm_ocr": ("glm_ocr_text",),
    "glmasr": ("llama",),
    "glmga": ("glm4v_text",),
    "granite_docling": ("granite_docling_text",),
    "granite_speech": ("granite",),
    "granite_speech_plus": ("granite",),
    "instructblip": ("opt", "llama"),
    "instructblipvideo": ("opt", "llama"),
    "janus": ("llama",),
    "lfm2_vl": ("lfm2",),
    "lfm3_vl": ("lfm3",),
    "minicpm_ocr": ("qwen3_5_text",),
    "minicpmv4_6": ("qwen3_5_text",),
    "minicpmv4_7": ("qwen3_5_text",),
    "minimax_m3_vl": ("minimax_m3_vl_text",),
    "mllama": ("mllama_text_model",),
    "moss_transcribe_diarize": ("qwen3",),
    "musicflamingo": ("qwen2",),
    "nemotron_h_omni": ("nemotron_h",),
    "paddleocr_vl": ("paddleocr_vl_text",),
    "perception_lm": ("llama",),
    "pp_chart2table": ("qwen2",),
    "qianfan_ocr": ("qwen3",),
    "qwen2_5_omni": ("qwen2_5_omni_text",),
    "qwen2_5_omni_thinker": ("qwen2_5_omni_text",),
    "qwen2_audio": ("qwen2",),
    "qwen3_asr": ("qwen3",),
    "qwen3_omni_moe": ("qwen3_omni_moe_text",),
    "qwen3_omni_moe_thinker": ("qwen3_omni_moe_text",),
    "vibevoice": ("qwen2",),
    "vibevoice_asr": ("qwen2",),
    "voxtral": ("llama",),
    "voxtral_realtime": ("voxtral_realtime_text",),
}

#: What these language models always have in wrappers, of which transformers writes or ties others in a way of its own.
WITHIN: dict[str, dict[str, Any]] = {
    "hunyuan_vl": {"tie_word_embeddings": True},
    "kimi_k25": {"q_lora_rank": 3},
    "molmo2": {"tie_word_embeddings": False},
    "llama4": {"tie_word_embeddings": False},
    "ovis2": {"tie_word_embeddings": True},
    "paddleocr_vl": {"tie_word_embeddings": True},
    **{
        key: {"tie_word_embeddings": False}
        for key in ("audioflamingo3", "musicflamingo", "qwen2_audio", "vibevoice", "vibevoice_asr", "voxtral")
    },
}

#: Families whose latent attention or old form gives every query head its own keys.
_UNGROUPED = {
    *("gpt2", "gpt_bigcode", "gptj", "gpt_neo", "bloom", "mpt", "opt", "gpt_neox", "persimmon"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2", "kimi_linear", "mistral4"),
    "mistral_large4_text",
    *("axk2", "hy_v4", "glm5_next_text", "zamba2"),
    *("glm4_moe_lite", "qwen", "baichuan", "axk1", "minicpm3", "youtu", "longcat_flash"),
    "bailing_hybrid",
}


def speaking(whole: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model that speaks, without the part that does, around that of its thinker."""
    within = WRAPPERS[whole["model_type"]].within
    if not within:
        return whole
    inside = {key: value for key, value in whole.items() if key != "model_type"}
    return {"model_type": whole["model_type"], "enable_audio_output": False, within: inside}


@st.composite
def configs(draw: st.DrawFn, model_type: str) -> dict[str, Any]:
    """Draw a small config of a family: grouped, multi-query or plain, with and without the keys that it may have."""
    if model_type in WRAPPERS:
        inner = draw(st.sampled_from(INNER[model_type]))
        text = draw(configs(inner)) | WITHIN.get(model_type, {})
        # Where neither config says whether the output matrix is the embedding, versions of transformers differ.
        tied = {"tie_word_embeddings": text.pop("tie_word_embeddings", draw(_FLAG))}
        text |= tied if model_type in _TIED_WITHIN else {}
        whole = {**tied, "model_type": model_type, **around(model_type, text)}
        if versions := WRAPPERS[model_type].versions:
            return {**text, **whole, "version": draw(st.sampled_from([v for v in versions if versions[v] == inner]))}
        if WRAPPERS[model_type].flat and draw(_FLAG):
            return {**text, **whole}
        return speaking({**whole, WRAPPERS[model_type].section: text})
    always, sometimes = FAMILY_KEYS[model_type]
    kv_heads = draw(st.integers(1, 3))
    q_heads = kv_heads * (1 if model_type in _UNGROUPED else draw(st.integers(1, 3)))
    common = {
        "vocab_size": draw(st.integers(5, 40)),
        "hidden_size": q_heads * draw(st.sampled_from((8, 16))),
        "intermediate_size": draw(_SIZE),
        "num_hidden_layers": draw(_LAYERS),
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": draw(st.integers(1, 64)),
        "pad_token_id": 0,  # transformers' defaults lie outside a small vocabulary
    }
    names = _NAMES.get(model_type, {})
    renamed = {name: value for key, value in common.items() if (name := names.get(key, key))}
    own = draw(st.fixed_dictionaries(always, optional={"tie_word_embeddings": _FLAG, **sometimes}))
    if own.get("enable_moe_block"):
        own |= {"num_experts": 3, "moe_intermediate_size": draw(_SIZE), "top_k_experts": draw(st.integers(1, 2))}
    types = {
        key: own[key][: common["num_hidden_layers"]]
        for key in own
        if key.endswith(("layer_types", "block_type", "indexer_types", "topk_pattern"))
        or (isinstance(own[key], list) and key not in {"attention_types", "moe_intermediate_size"})
    }
    if model_type == "ernie4_5_vl_moe_text":  # halves of heads are turned by places in time, height and width
        sides = (common["hidden_size"] // q_heads // 2 - 2) // 2
        own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [sides, sides, 2]}
    if model_type == "dbrx":
        own.pop("tie_word_embeddings", None)  # which transformers refuses
    return _with_indexer_to_share(_with_caches_to_share({"model_type": model_type, **renamed, **own, **types}))


def _with_indexer_to_share(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config in which the first layer with attention, by default the fourth, has an indexer of its own."""
    if config["model_type"] == "glm5_next_text" and (pattern := config.get("index_topk_pattern")):
        kinds = config.get("layer_types", ["linear_attention"] * 3)
        first = next((i for i, kind in enumerate(kinds) if kind != "linear_attention"), len(kinds))
        config["index_topk_pattern"] = (pattern[:first] + "F" + pattern[first + 1 :])[: len(pattern)]
    return config


def _with_caches_to_share(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config in which no more layers share keys and values than find layers of their kind before them."""
    kinds = [kind == "full_attention" for kind in config.get("layer_types", ())]
    if kinds and config["model_type"].startswith("gemma4"):
        kinds[-1] = True
    while config.get("num_kv_shared_layers") and {*kinds} != {*kinds[: -config["num_kv_shared_layers"]]}:
        config["num_kv_shared_layers"] -= 1
    return config
