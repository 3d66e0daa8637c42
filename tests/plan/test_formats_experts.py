"""Experts of which each is stored in its own way, and routers that are left alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import Tensors, tensor_bytes, write_checkpoint
from tests.format_cases import exl2, gptq_config, parameter, stored
from tpplan.axes import Axis
from tpplan.errors import ModelError
from tpplan.model import Segment
from tpplan.reader import read_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Matrix = Callable[[int, int, int], Tensors]


MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


def mixtral(matrix: Callable[[int, int, int, int], Tensors]) -> Tensors:
    """Return the tensors of a small Mixtral; ``matrix(inputs, outputs, layer, expert)`` stores an expert's matrix."""
    tensors: Tensors = {
        "model.embed_tokens.weight": ("F16", (64, 128)),
        "model.norm.weight": ("F16", (128,)),
        "lm_head.weight": ("F16", (64, 128)),
    }
    for layer in range(2):
        start = f"model.layers.{layer}."
        tensors |= {f"{start}{n}.weight": ("F16", (128,)) for n in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64), ("o_proj", 128)):
            tensors[f"{start}self_attn.{name}.weight"] = ("F16", (rows, 128))
        tensors[f"{start}block_sparse_moe.gate.weight"] = ("F16", (4, 128))
        for expert in range(4):
            for name, inputs, outputs in (("w1", 128, 256), ("w2", 256, 128), ("w3", 128, 256)):
                stem = f"{start}block_sparse_moe.experts.{expert}.{name}"
                tensors |= {stem + s: t for s, t in matrix(inputs, outputs, layer, expert).items()}
    return tensors


def test_experts_that_differ_are_counted_exactly(tmp_path: Path) -> None:
    """Experts of one layer at different bit rates are parameters of their own, and their copies add up."""
    tensors = mixtral(lambda i, o, layer, expert: exl2(i, o, 0 if (layer, expert) == (1, 2) else 1))
    spec = read_model(write_checkpoint(tmp_path / "m", MIXTRAL, tensors))
    assert spec.weight_bytes == tensor_bytes(tensors)
    assert [block.layers for block in spec.blocks] == [(0,), (1,)]
    first, second = ([p for p in block.parameters if p.name.endswith("w1.q_weight")] for block in spec.blocks)
    assert [(p.copies, p.shape) for p in first] == [(4, (16, 256))]
    assert sorted((p.copies, p.shape) for p in second) == [(1, (18, 256)), (3, (16, 256))]


def test_routers_are_never_quantised(tmp_path: Path) -> None:
    """By formula, experts are quantised and their router is not."""
    config = MIXTRAL | {"quantization_config": gptq_config()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = {p.name for p in read_model(tmp_path / "config.json").blocks[0].parameters}
    assert "model.layers.{layer}.block_sparse_moe.gate.weight" in names
    assert "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.qweight" in names


GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}


def test_gpt_oss_20b_has_the_bytes_of_its_published_index(tmp_path: Path) -> None:
    """MXFP4 by formula gives the total_size that the model's index on the hub states, 13,761,264,768 bytes."""
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    spec = read_model(tmp_path / "config.json")
    assert spec.weight_bytes == 13_761_264_768
    assert spec.weight_format == "MXFP4"
    gate = parameter(spec, "gate_up_proj_blocks")
    assert gate.dims == ((Segment(None, 32),), (Segment(Axis.EX, 5760),), (Segment(Axis.RS, 90),), (Segment(None, 16),))
    assert gate.out == 1
    down = parameter(spec, "down_proj_scales")
    assert down.dims == ((Segment(None, 32),), (Segment(Axis.RS, 2880),), (Segment(Axis.EX, 90),))


@pytest.mark.parametrize(
    ("entry", "in_16_bits"),
    [
        ("mlp.experts", 24),
        ("model.layers.*.mlp.experts", 24),
        ("model.layers.*.mlp", 24),
        ("model.layers.3.mlp.experts", 1),
        ("model.layers.*", 24),
        ("layers.*.experts", 0),  # one part at a time
        ("model.layers.*.mlp.router", 0),
        ("mlp.expert", 0),
        ("model.layers.*.mlp.experts.*.*", 0),  # longer than any name
    ],
)
def test_experts_that_are_not_converted_are_planned_in_16_bits(entry: str, in_16_bits: int, tmp_path: Path) -> None:
    """Of the layers that the config names; sizes would be a quarter of what is stored otherwise."""
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", entry]}
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B | {"quantization_config": quantised}))
    spec = read_model(tmp_path / "config.json")
    elements = 32 * 2880 * (5760 + 2880)  # of a layer's experts: 16 bits instead of 4.25
    assert spec.weight_bytes == 13_761_264_768 + in_16_bits * (2 * elements - elements * 17 // 32)


_STACKED = {
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size": 256,
    "head_dim": 128,
    "intermediate_size_mlp": 256,
}


@pytest.mark.parametrize("model_type", ["gpt_oss", "granitemoe", "llama4_text"])
@pytest.mark.parametrize(
    "quantised",
    [
        gptq_config(),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "mxfp4"},
    ],
    ids=lambda each: str(each["quant_method"]),
)
def test_experts_in_one_tensor_are_not_guessed(quantised: dict[str, Any], model_type: str, tmp_path: Path) -> None:
    """A config does not say how codes of these are stored, except those of gpt_oss; they are not counted in 16 bits."""
    config = _STACKED | {"model_type": model_type, "quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if (model_type, quantised["quant_method"]) == ("gpt_oss", "mxfp4"):
        assert read_model(tmp_path / "config.json").weight_format == "MXFP4"
        return
    with pytest.raises(ModelError, match="do not follow from the config alone"):
        read_model(tmp_path / "config.json")


def test_experts_in_one_tensor_that_are_skipped_are_counted_in_16_bits(tmp_path: Path) -> None:
    """The config says that they are not quantised, and other matrices are."""
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["experts"]}
    config = _STACKED | {"model_type": "llama4_text", "quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model(tmp_path / "config.json")
    experts = [p for block in spec.blocks for p in block.parameters if ".experts." in p.name]
    assert {p.dtype for p in experts} == {"BF16"}
    assert spec.weight_format.startswith("FP8")


def test_mxfp4_of_linear_attention_is_not_guessed(tmp_path: Path) -> None:
    """Its convolution has three dimensions and no experts."""
    config = {"model_type": "qwen3_5_text", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="do not follow from the config alone"):
        read_model(tmp_path / "config.json")


def test_mxfp4_headers_agree_with_the_formula(tmp_path: Path) -> None:
    """The stored blocks and scales of gpt-oss are found under their names."""
    config = GPT_OSS_20B | {"num_hidden_layers": 2, "vocab_size": 640, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    computed = read_model(tmp_path / "config.json")
    path = write_checkpoint(tmp_path / "m", config, stored(computed))
    spec = read_model(path)
    assert stored(spec) == stored(computed)
    assert (spec.blocks, spec.parameters, spec.weight_format) == (computed.blocks, computed.parameters, "MXFP4")
