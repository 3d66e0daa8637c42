"""Configs of small models: kinds of layers, ratios of heads, windows and gates stay; sizes, and layers, are few."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

import torch

from tpplan.transformers.classes import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_VOCAB: Final = 256
_HEAD: Final = 16

#: Largest values of keys in the small config; keys that it lacks stay away.
_MOST: Final[Mapping[str, int]] = {
    "head_dim": _HEAD,
    "intermediate_size": 512,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 64,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "o_groups": 4,
    "o_lora_rank": 8,
    "linear_num_key_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "sliding_window": 6,
    "max_position_embeddings": 512,
    "sliding_window_pattern": 2,
    "rotary_dim": 8,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": _VOCAB,
    "laurel_rank": 8,
    "share_expert_dim": 64,
    "shared_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "moe_latent_size": 24,
    "hc_count": 2,
    "hc_lowrank": 8,
    "index_kpool": 2,
    "indexer_n_heads": 4,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "gated_norm_rank": 8,
    "adapter_rank": 8,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_n_groups": 2,
    "n_groups": 2,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "mamba_chunk_size": 4,
    "chunk_size": 4,
}
#: Query heads for each KV head, by family, where layers differ in their heads or heads are in groups of another kind.
_GROUPS: Final = {"deepseek_v4": 8, "mimo_v2_flash": 4, "step3p5": 4}

#: Families whose RoPE has sections for each direction of an image, also where the config has none.
_SECTIONED: Final = frozenset(
    {"glm4v_moe_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text", "qwen2_5_vl_text", "qwen2_vl_text"}
)

#: Columns that the hidden size has beyond those of heads, by family, so that matrices are told from transposed ones.
_WIDER: Final = {"qwen3_vl_moe_text": 16}

#: Keys of which layers may have values of their own.
_HEADS: Final = ("head_dim", "num_key_value_heads", "num_attention_heads", "num_sliding_attention_heads")

#: The key of the numbers of layers whose keys and values layers attend to.
_SOURCES: Final = "kv_source_layers"

#: Keys of tokens, which a small vocabulary may lack.
_TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def small(config: Any) -> Any:
    """Return a config of the same kind whose model is small.

    Args:
        config: a config of transformers that has a language model.
    """
    made = deepcopy(config)
    _shrink(text_of(made))
    made.dtype = torch.float32
    return made


def _shrink(made: Any) -> None:
    """Make a language model's config small."""
    per_layer = getattr(made, "_heterogeneity_spec", None)
    overrides = per_layer.per_layer_overrides if per_layer else {}
    made.per_layer_config = None
    old, chosen = made.num_hidden_layers, _layers(made, overrides)
    whole = {key: getattr(made, key, None) for key in _HEADS}
    for key, value in _sizes(made, len(chosen)).items():
        if isinstance(getattr(made, key, None), int) and not isinstance(getattr(type(made), key, None), property):
            setattr(made, key, value)
    for key, value in vars(made).items():
        if isinstance(value, list) and len(value) == old and not key.startswith("_"):
            setattr(made, key, [_least(key, value[layer]) for layer in chosen])
    if shared := getattr(made, "num_kv_shared_layers", 0):
        made.num_kv_shared_layers = sum(layer >= old - shared for layer in chosen)
    if overrides:
        own = {i: overrides[layer] for i, layer in enumerate(chosen) if layer in overrides}
        made.per_layer_config = {
            i: {key: max(1, getattr(made, key) * value // whole[key]) for key, value in each.items() if key in whole}
            for i, each in own.items()
        }
    for key in _TOKENS:
        if getattr(made, key, None) is not None:
            setattr(made, key, made.vocab_size - 1)
    _shrink_sections(made)
    _shrink_rope(made)
    made.dtype = torch.float32


def _sizes(config: Any, layers: int) -> Mapping[str, int]:
    """Return values of keys, some of which the config may lack."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    few = min(kv_heads, 4)
    group = min(heads // kv_heads, _GROUPS.get(config.model_type, 3 if kv_heads > 1 else 4))
    sliding = getattr(config, "num_sliding_attention_heads", None) or heads
    values = {
        "vocab_size": min(config.vocab_size, _VOCAB),
        "hidden_size": few * group * _HEAD + _WIDER.get(config.model_type, 0),
        "num_attention_heads": few * group,
        "num_key_value_heads": few,
        "num_kv_heads": few,
        "num_sliding_attention_heads": few * group * sliding // heads,
        "num_hidden_layers": layers,
        "max_window_layers": min(getattr(config, "max_window_layers", 0), 1),
        **{key: _least(key, value) for key in _MOST if isinstance(value := getattr(config, key, None), int)},
    }
    ratio = (getattr(config, "linear_num_value_heads", 0) or 1) // (getattr(config, "linear_num_key_heads", 0) or 1)
    values["linear_num_value_heads"] = values.get("linear_num_key_heads", 1) * min(ratio, 2)
    if getattr(config, "head_dim", None) == getattr(config, "qk_rope_head_dim", None):
        values["head_dim"] = values.get("qk_rope_head_dim", _HEAD)
    if getattr(config, "word_embed_proj_dim", None) == config.hidden_size:
        values["word_embed_proj_dim"] = values["hidden_size"]
    if hasattr(config, "attention_hidden_size"):  # of blocks that take the hidden state joined with the embedding
        width = 2 * values["hidden_size"]
        values |= {"attention_hidden_size": width, "attention_head_dim": width // (few * group)}
        values["mamba_headdim"] = config.mamba_expand * values["hidden_size"] // values["n_mamba_heads"]
    mamba = values.get("mamba_n_heads")
    if mamba and getattr(config, "mamba_d_ssm", None):
        values |= {"mamba_d_head": _HEAD, "mamba_d_ssm": mamba * _HEAD}
    elif mamba:
        values["mamba_d_head"] = config.mamba_expand * values["hidden_size"] // mamba
    return values


def _layers(config: Any, overrides: Mapping[int, Any]) -> list[int]:
    """Return the fewest layers, at least two, that have all kinds, and at most six if no list tells the kinds.

    Where the last layers share keys and values of others, these are the last of each kind; else they are the first.
    """
    count: int = config.num_hidden_layers
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    known = {**vars(config), "layers_block_type": getattr(config, "layers_block_type", None)}
    if sources := known.get(_SOURCES):
        known[_SOURCES] = [source == layer for layer, source in enumerate(sources)]
    lists = [v for v in known.values() if isinstance(v, list) and len(v) == count]
    if not lists:
        return [*range(min(count, 6))]
    kinds = [*zip(*(map(str, values) for values in lists), strict=True)]
    if shared:
        last = {(kind, str(overrides.get(i)), i >= count - shared): i for i, kind in enumerate(kinds)}
        return sorted(last.values())
    return [*range(max(2, 1 + max(kinds.index(kind) for kind in set(kinds))))]


def _least(key: str, value: Any) -> Any:
    """Return a value of a layer, smaller if it is a size."""
    return min(_MOST[key], value) if key in _MOST and isinstance(value, int) else value


def _shrink_sections(made: Any) -> None:
    """Make small what a config says in sections of its own."""
    if isinstance(inner := getattr(made, "linear_attn_config", None), dict):
        made.linear_attn_config = inner | {"head_dim": made.linear_head_dim, "num_heads": made.linear_num_heads}
    if hasattr(made, "hybrid_layer_ids"):
        made.hybrid_layer_ids = [i for i, kind in enumerate(made.layers_block_type) if kind == "hybrid"]
    if experts := getattr(made, "ffn_config", None):
        experts.hidden_size, experts.ffn_hidden_size = made.hidden_size, min(experts.ffn_hidden_size, 64)
        made.attn_config.kv_n_heads = made.num_key_value_heads
    if isinstance(rates := getattr(made, "compress_rates", None), dict):
        made.compress_rates = {kind: min(rate, 4) for kind, rate in rates.items()}


def _shrink_rope(config: Any) -> None:
    """Divide sections of RoPE's frequencies as a small head does."""
    rope = getattr(config, "rope_parameters", None) or {}
    half = int(_HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
    for factors in ("short_factor", "long_factor"):
        if factors in rope:
            rope[factors] = rope[factors][:half]
    if rope.get("mrope_section") or config.model_type in _SECTIONED:
        third = half // 3
        rope["mrope_section"] = [half - 2 * third, third, third]
