"""What is publicly known of mixtures of experts, against what their configs are read as."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.family_models import parameters_of, spec_of
from tpplan.core.axes import Axis
from tpplan.models.reader import read_model
from tpplan.planner.ledger import cache_bytes_per_token, sequence_cache_bytes

if TYPE_CHECKING:
    from pathlib import Path


def _shape(**sizes: int) -> dict[str, Any]:
    """Return the common keys of a config."""
    names = {
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
    }
    return {"max_position_embeddings": 131_072, **{names.get(key, key): value for key, value in sizes.items()}}


def _mla(q_rank: int, nope: int, value: int) -> dict[str, int]:
    """Return the keys of latent attention; the rank of keys and values and the rotary part are the same everywhere."""
    ranks = {"kv_lora_rank": 512, "q_lora_rank": q_rank, "qk_rope_head_dim": 64}
    return {**ranks, "qk_nope_head_dim": nope, "v_head_dim": value}


_GLM = _shape(vocab=151_552, hidden=4096, dense=10_944, expert=1408, layers=46, q=96, kv=8, head_dim=128, top=8)
_LLAMA4 = _shape(vocab=202_048, hidden=5120, dense=8192, layers=48, q=40, kv=8, top=1)
_V3 = _shape(vocab=129_280, hidden=7168, dense=18_432, expert=2048, layers=61, q=128, kv=128, top=8, shared=1)

#: Models with their parameters in thousands of millions, without layers for further tokens and parts for images.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "GLM-4.5-Air": (
        {"model_type": "glm4_moe", **_GLM, "n_routed_experts": 128, "attention_bias": True},
        106,
    ),
    "GLM-4.6": (
        {
            "model_type": "glm4_moe",
            **(_GLM | _shape(hidden=5120, dense=12_288, expert=1536, layers=92, first=3)),
            "n_routed_experts": 160,
            "attention_bias": True,
            "use_qk_norm": True,
        },
        352,
    ),
    "MiniMax-M2": (
        {
            "model_type": "minimax_m2",
            **_shape(vocab=200_064, hidden=3072, dense=1536, layers=62, q=48, kv=8, top=8),
            "num_local_experts": 256,
        },
        228,
    ),
    "Llama-4-Scout": ({"model_type": "llama4_text", **_LLAMA4, "num_local_experts": 16}, 107),
    "Llama-4-Maverick": (
        {"model_type": "llama4_text", **_LLAMA4, "num_local_experts": 128, "interleave_moe_layer_step": 2},
        400,
    ),
    "Kimi-K2": (
        {
            "model_type": "kimi_k2",
            **(_V3 | _shape(vocab=163_840, q=64, kv=64, first=1)),
            **_mla(1536, 128, 128),
            "n_routed_experts": 384,
        },
        1026,
    ),
    "DeepSeek-V3.2": (
        {"model_type": "deepseek_v32", **_V3, **_mla(1536, 128, 128), "n_routed_experts": 256},
        671,
    ),
    "GLM-4.7-Flash": (
        {
            "model_type": "glm4_moe_lite",
            **_shape(vocab=154_880, hidden=2048, dense=10_240, expert=1536, layers=47, q=20, kv=20, first=1),
            **_mla(768, 192, 256),
            "n_routed_experts": 64,
        },
        29,
    ),
    "Hunyuan-A13B": (
        {
            "model_type": "hunyuan_v1_moe",
            **_shape(vocab=128_167, hidden=4096, dense=3072, layers=32, q=32, kv=8, head_dim=128),
            "num_experts": 64,
            "moe_topk": [8] * 32,
            "tie_word_embeddings": True,
        },
        80,
    ),
    "ERNIE-4.5-21B-A3B": (
        {
            "model_type": "ernie4_5_moe",
            **_shape(vocab=103_424, hidden=2560, dense=12_288, expert=1536, layers=28, q=20, kv=4),
            "moe_num_experts": 64,
            "moe_k": 6,
        },
        21,
    ),
    "Qwen3-VL-30B-A3B": (
        {
            "model_type": "qwen3_vl_moe",
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_moe_text",
                **_shape(
                    vocab=151_936, hidden=2048, dense=6144, expert=768, layers=48, q=32, kv=4, head_dim=128, top=8
                ),
                "num_experts": 128,
            },
        },
        30,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_well_known_mixtures(name: str) -> None:
    """The parameters of their configs are as many as their model cards say."""
    config, billions = MODELS[name]
    assert spec_of(config).parameter_count // 10**9 == billions


def test_chunks_bound_the_cache_as_windows_do() -> None:
    """Llama 4 attends within chunks of 8192 tokens in three of four layers, and to everything in the fourth."""
    spec = spec_of(MODELS["Llama-4-Scout"][0])
    chunked, full = spec.blocks
    assert full.layers == tuple(range(3, 48, 4))
    assert [block.attention and block.attention.window for block in spec.blocks] == [8192, 0]
    assert chunked.shared_intermediate == chunked.expert_intermediate == 8192
    head = 2 * 128 * 2
    assert sequence_cache_bytes(spec, "fp16", 100_000) == 8 * head * (36 * 8192 + 12 * 100_000)


@pytest.mark.parametrize("name", ["Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"])
def test_both_names_of_kimi_k25_are_known(name: str) -> None:
    """Transformers has one, and published checkpoints the other."""
    config = {"model_type": "kimi_k25", "architectures": [name], "text_config": MODELS["Kimi-K2"][0]}
    assert spec_of(config).architecture == name


def test_kimi_k25_as_published(tmp_path: Path) -> None:
    """Its experts have 4 bits and a scale of 16 for every 32, and all else 16 bits: 594 GB, as the hub says."""
    left = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}}
    told = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    text = MODELS["Kimi-K2"][0] | {"torch_dtype": "bfloat16", "quantization_config": told | {"ignore": left}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    model = read_model(tmp_path / "config.json")
    experts = 60 * 384 * 3 * 7168 * 2048
    others = spec_of(MODELS["Kimi-K2"][0]).parameter_count - experts
    assert abs(model.weight_bytes - (experts * 9 // 16 + 2 * others)) < 2_000_000  # shapes of matrices, biases
    assert 593.5e9 < model.weight_bytes < 594.5e9


def test_dense_layers_of_llama_4_have_a_width_of_their_own() -> None:
    """Every other layer of Maverick is dense, and twice as wide as an expert."""
    sizes = {(block.intermediate, block.expert_intermediate) for block in spec_of(MODELS["Llama-4-Maverick"][0]).blocks}
    assert sizes == {(16_384, 0), (0, 8192)}


def test_the_indexer_of_deepseek_v32_has_keys_in_the_cache() -> None:
    """Beside the latent of 576 elements a token has a key of 128, which every device with heads needs whole."""
    spec = spec_of(MODELS["DeepSeek-V3.2"][0])
    assert cache_bytes_per_token(spec, "fp16") == 2 * 61 * (576 + 128)
    indexer = [p for p in parameters_of(spec) if ".indexer." in p.name]
    assert len(indexer) == 2 * 5
    assert all(
        p.home is Axis.KV_HEADS and p.cut_dim(layout) is None for p in indexer for layout in ("reduce", "gather")
    )


def test_quantisation_may_be_stated_by_the_language_model(tmp_path: Path) -> None:
    """Kimi K2.5 says in its text_config how weights are stored; the same outside is read as ever."""
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    text = MODELS["Kimi-K2"][0]
    formats = []
    for inner, outer in ((quantised, {}), ({}, quantised), ({}, {})):
        config = {"model_type": "kimi_k25", "text_config": text | inner, **outer}
        (tmp_path / "config.json").write_text(json.dumps(config))
        formats.append(read_model(tmp_path / "config.json").weight_format)
    assert formats == ["FP8 block 128x128", "FP8 block 128x128", "BF16"]


def test_routers_and_corrections_in_32_bits() -> None:
    """ERNIE's and Hunyuan's routers are F32 in models of BF16, as are the biases that correct scores."""
    for name, expected in (
        ("ERNIE-4.5-21B-A3B", {"gate.weight", "moe_statics.e_score_correction_bias"}),
        ("Hunyuan-A13B", {"gate.wg.weight"}),
        ("MiniMax-M2", {"e_score_correction_bias"}),
    ):
        found = {p.name for p in parameters_of(spec_of(MODELS[name][0])) if p.dtype == "F32"}
        assert {stored.partition("mlp.")[2] or stored.partition("moe.")[2] for stored in found} == expected
