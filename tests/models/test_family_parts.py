"""Equal parts of an axis are the same parts of the model in every tensor that the axis cuts.

The proof by computing: put the elements of each axis into another order, in all tensors alike and as the tables say,
and the model must still give the same logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file

from tests.family_configs import PHI4_PARTS
from tests.family_models import (
    NOT_IN_TRANSFORMERS,
    SAME,
    assert_consistent,
    build,
    hub_config,
    named,
    saved_tensors,
    spec_of,
)
from tests.later import transformers
from tpplan.core.axes import Axis
from tpplan.errors import ModelError
from tpplan.models import families
from tpplan.models.reader import read_model

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.core.model import Attention, Block, ModelSpec, Parameter

    Order = dict[Axis | None, torch.Tensor]

VOCAB = 20
_OUTSIDE = {"vocab_size": VOCAB, "max_position_embeddings": 32, "pad_token_id": 0, "num_hidden_layers": 2}
_BIASED = {"attention_bias": True, "mlp_bias": True}
_PLAIN = _OUTSIDE | {"hidden_size": 48, "intermediate_size": 10, "num_attention_heads": 6}
_GROUPED = _PLAIN | {"num_key_value_heads": 3}
_NARROW = _GROUPED | {"head_dim": 4}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 7, "num_experts_per_tok": 2}
_SHARED = {"shared_expert_intermediate_size": 5}
_PACKED = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_inner": 10}
_FALCON = _OUTSIDE | {"hidden_size": 48, "ffn_hidden_size": 10, "num_attention_heads": 6, "bias": True}
_MLA = _PLAIN | {
    "num_key_value_heads": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "attention_bias": True,
}
_HYBRID = _NARROW | {
    "full_attention_interval": 2,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 4,
    "attention_bias": True,
}

#: Six heads in three groups.
_MAMBA2 = {"mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_state": 5, "mamba_proj_bias": True, "mamba_d_head": "auto"}
_CONVOLVED = {"layer_types": ["conv", "full_attention"], "conv_bias": True}

_OPEN = {"num_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 7, "num_experts_per_tok": 2}

_FULL = ["full_attention"] * 2
_PER_LAYER = {"hidden_size_per_layer_input": 5, "vocab_size_per_layer_input": VOCAB}

#: The forms in which families store attention and MLP.
FORMS: dict[str, dict[str, Any]] = {
    "llama": _NARROW | _BIASED,
    "mistral": _GROUPED,
    "mixtral": _GROUPED | _PACKED,
    "qwen2": _GROUPED,
    "qwen2_moe": _GROUPED | _EXPERTS | _SHARED | {"mlp_only_layers": [0]},
    "qwen3": _NARROW | _BIASED,
    "qwen3_moe": _NARROW | _EXPERTS,
    "gemma": _NARROW,
    "gemma2": _NARROW,
    "gemma3_text": _NARROW,
    "phi": _GROUPED | {"qk_layernorm": True},
    "phi3": _GROUPED,
    "cohere": _GROUPED | {"use_qk_norm": True},
    "cohere2": _GROUPED,
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "granite": _GROUPED | _BIASED,
    "starcoder2": _GROUPED,
    "stablelm": _GROUPED | {"use_qkv_bias": True},
    "gpt2": _GPT2,
    "gpt_neox": _PLAIN,
    "falcon": _FALCON,
    "falcon, plain": _FALCON | {"multi_query": False, "parallel_attn": False},
    "falcon, grouped": _FALCON | {"num_kv_heads": 3, "new_decoder_architecture": True},
    "glm4": _NARROW,
    "smollm3": _GROUPED | _BIASED,
    "gpt_oss": _NARROW | _PACKED,
    "nemotron": _NARROW | _BIASED,
    "ministral": _NARROW,
    "ministral3": _NARROW,
    "seed_oss": _NARROW | _BIASED | {"attention_out_bias": True},
    "olmo3": _GROUPED,
    "exaone4": _NARROW,
    "ernie4_5": _NARROW | {"use_bias": True},
    "hunyuan_v1_dense": _NARROW | _BIASED,
    "hyperclovax": _NARROW | _BIASED,
    "glm": _NARROW,
    "cwm": _NARROW,
    "granite_swa": _GROUPED | _BIASED,
    "helium": _GROUPED | {"head_dim": 8},
    "internlm3": _NARROW | _BIASED,
    "gemma3n_text": _NARROW | _PER_LAYER | {"laurel_rank": 7, "num_kv_shared_layers": 1, "layer_types": _FULL},
    "gemma4_text": _NARROW | _PER_LAYER | {"global_head_dim": 8, "layer_types": ["sliding_attention", _FULL[0]]},
    "gemma4_text, sharing": _NARROW
    | _PER_LAYER
    | {"num_kv_shared_layers": 1, "use_double_wide_mlp": True, "layer_types": _FULL},
    "gemma4_text, experts": _NARROW
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 7}
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0},
    "gemma4_unified_text": _NARROW | {"global_head_dim": 8},
    "laguna": _NARROW | _EXPERTS | _SHARED | {"num_attention_heads_per_layer": [6, 12]},
    "laguna, gates of elements": _NARROW | _EXPERTS | _SHARED | {"gating": "per-element"},
    "mimo_v2_flash": _NARROW
    | _ROUTED
    | {"v_head_dim": 6, "num_attention_heads": 12, "layer_types": ["full_attention", "sliding_attention"]},
    "step3p5": _NARROW
    | _ROUTED
    | {"share_expert_dim": 5, "moe_layers_enum": "1", "num_sliding_attention_heads": 12, "sliding_window": 4}
    | {"layer_types": ["full_attention", "sliding_attention"]},
    "deepseek_v4": _PLAIN
    | {"num_key_value_heads": 1, "head_dim": 8, "q_lora_rank": 9, "o_groups": 3, "o_lora_rank": 5, "index_n_heads": 2}
    | {"index_head_dim": 8, "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"]}
    | {"compress_rate_csa": 2, "compress_rate_hca": 3, "moe_intermediate_size": 7, "n_routed_experts": 4}
    | {"intermediate_size": 7, "num_experts_per_tok": 2, "num_hash_layers": 0, "index_topk": 2},
    "mistral4": _MLA | {"q_lora_rank": 9},
    "vaultgemma": _NARROW,
    "arcee": _NARROW | _BIASED,
    "apertus": _GROUPED,
    "nanochat": _GROUPED,
    "jais2": _NARROW,
    "gpt_bigcode": _GPT2,
    "gpt_bigcode, plain": _GPT2 | {"multi_query": False},
    "gptj": _GPT2 | {"rotary_dim": 4},
    "bloom": _OUTSIDE | {"hidden_size": 48, "n_head": 6},
    "opt": _OUTSIDE | {"hidden_size": 48, "num_attention_heads": 6, "ffn_dim": 10, "word_embed_proj_dim": 48},
    "deepseek_v2": _MLA | {"q_lora_rank": None},
    "deepseek_v3": _MLA | {"q_lora_rank": 9},
    "qwen3_next": _HYBRID | _EXPERTS | _SHARED | {"mlp_only_layers": [1]},
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID | _EXPERTS | _SHARED,
    "deepseek_v32": _MLA | {"q_lora_rank": 9, "index_n_heads": 3, "index_head_dim": 12, "index_topk": 4},
    "glm_moe_dsa": _MLA
    | {
        "q_lora_rank": 9,
        "index_n_heads": 3,
        "index_head_dim": 12,
        "index_topk": 4,
        "indexer_types": ["full", "shared"],
    },
    "glm4_moe_lite": _MLA | {"q_lora_rank": None},
    "glm4_moe": _NARROW | _ROUTED | {"attention_bias": True, "use_qk_norm": True},
    "minimax_m2": _NARROW | _PACKED,
    "ernie4_5_moe": _GROUPED | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 7, "use_bias": True},
    "dots1": _NARROW | _ROUTED,
    "exaone_moe": _NARROW | _EXPERTS,
    "solar_open": _NARROW | _ROUTED,
    "afmoe": _NARROW | _EXPERTS | {"attention_bias": True},
    "hy_v3": _NARROW | _EXPERTS | _BIASED,
    "olmoe": _GROUPED | _OPEN,
    "flex_olmo": _GROUPED | _OPEN,
    "phimoe": _GROUPED | _PACKED | {"attention_bias": True, "lm_head_bias": True},
    "hunyuan_v1_moe": _NARROW | {"num_experts": 4, "moe_topk": 2},
    "cohere2_moe": _NARROW | _OPEN | {"num_shared_experts": 2, "first_k_dense_replace": 1},
    "granitemoe": _GROUPED | _PACKED,
    "granitemoeshared": _GROUPED | _PACKED | {"shared_intermediate_size": 5},
    "llama4_text": _NARROW | _PACKED | {"intermediate_size_mlp": 11, "moe_layers": [1]},
    "granitemoehybrid": _GROUPED | _PACKED | _MAMBA2 | {"layer_types": ["mamba", "attention"]},
    "bamba": _GROUPED | _MAMBA2 | _BIASED | {"attn_layer_indices": [1]},
    "falcon_h1": _GROUPED | _MAMBA2 | {"mamba_d_ssm": 36, "mamba_rms_norm": True, "projectors_bias": True},
    "jamba": _GROUPED
    | {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 5},
    "nemotron_h": _NARROW
    | _ROUTED
    | {"hybrid_override_pattern": "M*E-", "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 3}
    | {"ssm_state_size": 5, "n_group": 1, "topk_group": 1, "moe_latent_size": 16}
    | {"moe_shared_expert_intermediate_size": 5, "mlp_bias": True, "use_bias": True},
    "lfm2": _GROUPED | _CONVOLVED | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": _GROUPED | _EXPERTS | _CONVOLVED | {"num_dense_layers": 1},
    "lfm3": _NARROW | _CONVOLVED | {"attention_bias": True},
    "kimi_linear": {key: value for key, value in _MLA.items() if key not in {"n_routed_experts", "n_group"}}
    | {"num_experts": 4, "linear_num_heads": 3, "linear_head_dim": 5}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "bailing_hybrid": {key: value for key, value in _MLA.items() if key not in {"n_routed_experts", "n_group"}}
    | {"num_experts": 4, "n_group": 1, "linear_head_dim": 5, "layer_types": ["linear_attention", "full_attention"]},
    "axk1": _MLA | {"q_lora_rank": 9},
    "minicpm3": _MLA | {"q_lora_rank": 9, "mlp_bias": True},
    "youtu": _MLA | {"q_lora_rank": None, "pad_token_id": None},  # whose row transformers clears
    "bitnet": _GROUPED | {"attention_bias": True},
    "iquestcoder": _NARROW | _BIASED,
    "mellum": _NARROW | _PACKED | {"moe_intermediate_size": 7, "mlp_layer_types": ["dense", "sparse"]},
    "granitemoe_swa": _GROUPED | _PACKED | {"shared_intermediate_size": 5},
    "longcat_flash": {
        key: value for key, value in _MLA.items() if key not in {"num_hidden_layers", "num_experts_per_tok"}
    }
    | {"num_layers": 2, "ffn_hidden_size": 10, "expert_ffn_hidden_size": 7, "q_lora_rank": 9, "moe_topk": 2}
    | {"zero_expert_num": 0, "head_dim": 8},
    "minimax": _NARROW | _PACKED | {"layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "axk2": _MLA | {"q_lora_rank": 9, "index_n_heads": 3, "index_head_dim": 12, "index_topk": 4, "gated_norm_rank": 5},
    "hy_v4": _MLA | {"q_lora_rank": 9, "index_n_heads": 3, "index_head_dim": 12, "index_topk": 4, "hc_mult": 2},
    "qwen4_exp_text": _HYBRID
    | _EXPERTS
    | _SHARED
    | {"hc_count": 2, "hc_lowrank": 5, "indexer_n_heads": 3, "indexer_kv_heads": 1, "indexer_head_dim": 12}
    | {"indexer_budget": 8, "indexer_compress_ratio": 2},
    "zamba2": _PLAIN
    | {"num_hidden_layers": 3, "layers_block_type": ["hybrid", "linear_attention", "hybrid"]}
    | {"n_mamba_heads": 6, "mamba_ngroups": 3, "mamba_d_state": 5, "use_shared_attention_adapter": True}
    | {"adapter_rank": 7, "add_bias_linear": True},
    "phi4_multimodal": _GROUPED | PHI4_PARTS,
    "kolibri1": _NARROW | _EXPERTS | _SHARED,
    "flint": _NARROW | _EXPERTS | _SHARED,
    "dbrx": {"vocab_size": VOCAB, "d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 32}
    | {"attn_config": {"kv_n_heads": 3, "rope_theta": 1e4, "clip_qkv": 8.0}}
    | {"ffn_config": {"ffn_hidden_size": 7, "moe_num_experts": 4, "moe_top_k": 2}},
    "mpt": {"vocab_size": VOCAB, "d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 32},
    "gpt_neo": {key: value for key, value in _OUTSIDE.items() if key != "num_hidden_layers"}
    | {"hidden_size": 48, "intermediate_size": 10, "num_heads": 6, "num_layers": 2, "window_size": 4}
    | {"attention_types": [[["global", "local"], 1]]},
    "persimmon": _PLAIN | {"qk_layernorm": True},
    "olmo_hybrid": _GROUPED | {key: value for key, value in _HYBRID.items() if key.startswith("linear")},
}

#: Plain matrix products, which know 64-bit floats.
EAGER = {"experts_implementation": "eager"}

#: ALiBi gives each head a slope by its number, so heads cannot change places.
NUMBERED_HEADS = {"bloom", "mpt"}

#: Query heads that share a key/value head are stored with it, or their outputs share a matrix, so only whole groups can
#: change places.
FUSED_GROUPS = {"falcon, grouped", "deepseek_v4"}


def new_order(block: Block, known: dict[Attention, Order], *, heads: bool, within_groups: bool) -> Order:
    """Draw an order for the elements of each axis, of heads only if asked for; query heads move with their KV head.

    Heads of layers that share keys and values are in the order of those that cache them, which is one of ``known``.
    """
    order: Order = {axis: torch.randperm(size) for axis, size in block.sizes()}
    alike = block.attention and evolve(block.attention, shared=False)
    if block.linear and block.linear.shared_keys:
        group = block.linear.group
        order[Axis.LINEAR_HEADS] = torch.cat(
            [key * group + torch.randperm(group) for key in torch.randperm(block.linear.key_heads)]
        )
    if alike in known:
        return order | {axis: known[alike][axis] for axis in (Axis.KV_HEADS, Axis.Q_HEADS)}
    if block.attention:
        if not heads:
            order[Axis.KV_HEADS] = torch.arange(block.attention.kv_heads)
        group = block.attention.q_heads // block.attention.kv_heads
        order[Axis.Q_HEADS] = torch.cat(
            [
                kv * group + (torch.randperm(group) if within_groups else torch.arange(group))
                for kv in order[Axis.KV_HEADS]
            ]
        )
        known[block.attention] = order
    return order


def reordered(tensor: torch.Tensor, parameter: Parameter, order: Order) -> torch.Tensor:
    """Return the tensor with the equal parts of each segment in the order of its axis."""
    for dim, segments in enumerate(parameter.dims):
        index = []
        for segment, elements in zip(
            segments, torch.split(torch.arange(tensor.shape[dim]), [s.length for s in segments]), strict=True
        ):
            places = order.get(segment.axis)
            if places is not None and segment.shared:  # the key heads of the value heads, each once
                places = places.view(segment.shared, -1)[:, 0] // (len(places) // segment.shared)
            index.append(elements if places is None else elements.view(len(places), -1)[places].flatten())
        tensor = tensor.index_select(dim, torch.cat(index))
    return tensor.contiguous()


def reorder_all(spec: ModelSpec, tensors: dict[str, torch.Tensor], vocab: torch.Tensor, form: str) -> dict[str, Any]:
    """Return all tensors with every axis in a new order, the same in the layers of a block."""
    heads, within_groups = form not in NUMBERED_HEADS, form not in FUSED_GROUPS
    known: dict[Attention, Order] = {}
    orders = {block: new_order(block, known, heads=heads, within_groups=within_groups) for block in spec.blocks}
    return {
        name: reordered(tensors[name], parameter, orders[block] if block else {Axis.VOCAB: vocab})
        for name, parameter, block in named(spec)
    }


@pytest.mark.parametrize("form", FORMS)
def test_elements_of_an_axis_can_change_places(form: str, tmp_path: Path) -> None:
    """A device with some elements of each axis, and those parts of every tensor, holds what belongs together."""
    torch.manual_seed(20)
    config = hub_config({"model_type": form.partition(",")[0], **FORMS[form]})
    spec = spec_of(config.to_dict())
    assert_consistent(spec)
    model = build(config, **EAGER).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    vocab = torch.randperm(VOCAB)
    model.config.save_pretrained(tmp_path)
    save_file(reorder_all(spec, saved_tensors(model), vocab, form), tmp_path / "model.safetensors", {"format": "pt"})
    other = type(model).from_pretrained(tmp_path, dtype=torch.float64, **EAGER).eval()
    tokens = torch.randint(VOCAB, (2, 7))
    with torch.no_grad():
        expected, found = model(tokens).logits, other(vocab.argsort()[tokens]).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected[..., vocab], rtol=1e-4, atol=1e-4)


def test_every_family_is_computed() -> None:
    """All families take part that are models of their own and not others by another name."""
    assert {form.partition(",")[0] for form in FORMS} == families.FAMILIES.keys() - SAME.keys() - NOT_IN_TRANSFORMERS


def test_longcat_as_transformers_saves_it(tmp_path: Path) -> None:
    """Its files have matrices of experts that do nothing, which are told and not counted; others are refused."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 64}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 32, "head_dim": 8}
    config = transformers.LongcatFlashConfig(**sizes, **ranks, **experts, max_position_embeddings=128)
    model = transformers.LongcatFlashForCausalLM(config)
    model.save_pretrained(tmp_path)
    found = read_model(tmp_path)
    idle = 2 * 2 * (2 * 64 * 32) * 4  # of two layers, two experts' gate and up projections in 32 bits
    assert [(part.what, part.bytes) for part in found.not_planned] == [("matrices of experts that do nothing", idle)]
    assert found.weight_bytes + idle == sum(p.numel() for p in model.state_dict().values()) * 4
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"n_routed_experts": 4', '"n_routed_experts": 5')
    )
    with pytest.raises(ModelError, match=r"router\.classifier"):
        read_model(tmp_path)
