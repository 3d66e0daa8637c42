"""What is publicly known of mixtures of experts, against what their configs are read as."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.family_models import parameters_of, spec_of
from tests.published import MODELS
from tpplan.core.axes import Axis
from tpplan.models.reader import read_model
from tpplan.planner.ledger import cache_bytes_per_token, sequence_cache_bytes

if TYPE_CHECKING:
    from pathlib import Path


#: Thousands of millions of parameters, without layers for further tokens and parts for images.
BILLIONS = {
    "GLM-4.5-Air": 106,
    "GLM-4.6": 352,
    "MiniMax-M2": 228,
    "Llama-4-Scout": 107,
    "Llama-4-Maverick": 400,
    "Kimi-K2": 1026,
    "DeepSeek-V3.2": 671,
    "GLM-4.7-Flash": 29,
    "Hunyuan-A13B": 80,
    "ERNIE-4.5-21B-A3B": 21,
    "Qwen3-VL-30B-A3B": 30,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_well_known_mixtures(name: str) -> None:
    """The parameters of their configs are as many as their model cards say."""
    assert spec_of(MODELS[name]).parameter_count // 10**9 == BILLIONS[name]


def test_chunks_bound_the_cache_as_windows_do() -> None:
    """Llama 4 attends within chunks of 8192 tokens in three of four layers, and to everything in the fourth."""
    spec = spec_of(MODELS["Llama-4-Scout"])
    chunked, full = spec.blocks
    assert full.layers == tuple(range(3, 48, 4))
    assert [block.attention and block.attention.window for block in spec.blocks] == [8192, 0]
    assert chunked.shared_intermediate == chunked.expert_intermediate == 8192
    head = 2 * 128 * 2
    assert sequence_cache_bytes(spec, "fp16", 100_000) == 8 * head * (36 * 8192 + 12 * 100_000)


@pytest.mark.parametrize("name", ["Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"])
def test_both_names_of_kimi_k25_are_known(name: str) -> None:
    """Transformers has one, and published checkpoints the other."""
    config = {"model_type": "kimi_k25", "architectures": [name], "text_config": MODELS["Kimi-K2"]}
    assert spec_of(config).architecture == name


def test_kimi_k25_as_published(tmp_path: Path) -> None:
    """Its experts have 4 bits and a scale of 16 for every 32, and all else 16 bits: 594 GB, as the hub says."""
    left = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}}
    told = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    text = MODELS["Kimi-K2"] | {"torch_dtype": "bfloat16", "quantization_config": told | {"ignore": left}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    model = read_model(tmp_path / "config.json")
    experts = 60 * 384 * 3 * 7168 * 2048
    others = spec_of(MODELS["Kimi-K2"]).parameter_count - experts
    assert abs(model.weight_bytes - (experts * 9 // 16 + 2 * others)) < 2_000_000  # shapes of matrices, biases
    assert 593.5e9 < model.weight_bytes < 594.5e9


def test_dense_layers_of_llama_4_have_a_width_of_their_own() -> None:
    """Every other layer of Maverick is dense, and twice as wide as an expert."""
    sizes = {(block.intermediate, block.expert_intermediate) for block in spec_of(MODELS["Llama-4-Maverick"]).blocks}
    assert sizes == {(16_384, 0), (0, 8192)}


def test_the_indexer_of_deepseek_v32_has_keys_in_the_cache() -> None:
    """Beside the latent of 576 elements a token has a key of 128, which every device with heads needs whole."""
    spec = spec_of(MODELS["DeepSeek-V3.2"])
    assert cache_bytes_per_token(spec, "fp16") == 2 * 61 * (576 + 128)
    indexer = [p for p in parameters_of(spec) if ".indexer." in p.name]
    assert len(indexer) == 2 * 5
    assert all(
        p.home is Axis.KV_HEADS and p.cut_dim(layout) is None for p in indexer for layout in ("reduce", "gather")
    )


def test_quantisation_may_be_stated_by_the_language_model(tmp_path: Path) -> None:
    """Kimi K2.5 says in its text_config how weights are stored; the same outside is read as ever."""
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    text = MODELS["Kimi-K2"]
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
        found = {p.name for p in parameters_of(spec_of(MODELS[name])) if p.dtype == "F32"}
        assert {stored.partition("mlp.")[2] or stored.partition("moe.")[2] for stored in found} == expected
