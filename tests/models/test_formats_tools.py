"""What quantisation tools write: every tensor of a small Llama that they saved follows from what they say of it.

The tables are what compressed-tensors 0.20, ModelOpt 0.47, Quark 0.13 and auto-round 0.16 wrote: tensors of the first
layer's down_proj and k_proj, those of v_proj that k_proj has not, and the output matrix where it is quantised. What
auto-round 0.4 wrote is that and the groups of inputs, which its modules have as buffers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import write_checkpoint
from tests.examples import examples
from tests.format_cases import gptq_config, stored
from tests.published import MODELS, example, shape
from tpplan.errors import ModelError
from tpplan.models.config import read_config
from tpplan.models.formats import read_scheme
from tpplan.models.reader import read_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **shape(vocab=320, hidden=256, dense=768, layers=2, q=8, kv=2, head_dim=64, context=128),
    "tie_word_embeddings": False,
}


def compressed(
    stored_as: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignore: tuple[str, ...] = ("lm_head",)
) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors with one group for all linear layers."""
    group = {"format": stored_as, "targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }


def weights(bits: int, strategy: str, kind: str = "int", *, symmetric: bool = True, **more: object) -> dict[str, Any]:
    """Return what compressed-tensors says of weights."""
    return {"num_bits": bits, "strategy": strategy, "type": kind, "symmetric": symmetric, **more}


def quark(weight: dict[str, Any], layers: dict[str, Any] | None = None, **more: object) -> dict[str, Any]:
    """Return what Quark says of weights, and of more, of all linear layers but the head."""
    return {
        "exclude": ["lm_head"],
        "global_quant_config": {"weight": weight, **more},
        "layer_quant_config": layers or {},
        "quant_method": "quark",
    }


def auto_round(packing: str, kind: str = "int", group_size: int = 128, **more: object) -> dict[str, Any]:
    """Return what auto-round says of 4 bits."""
    return {
        "bits": 4,
        "block_name_to_quantize": "model.layers",
        "data_type": kind,
        "group_size": group_size,
        "packing_format": f"auto_round:{packing}",
        "quant_method": "auto-round",
        "sym": True,
        **more,
    }


_STATIC = {"dynamic": False, "symmetric": True}
_DYNAMIC = {"dynamic": True, "symmetric": True}
_UNQUANTISED = {"exclude_modules": ["lm_head", "model.embed_tokens"]}
_MXFP4 = {"ch_axis": -1, "dtype": "fp4", "group_size": 32, "qscheme": "per_group", "scale_format": "e8m0"}
_FP8 = {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor", "symmetric": True}

#: What the tool said, the bytes of all tensors that it wrote, and some of them.
WRITTEN: dict[str, tuple[dict[str, Any], int, str]] = {
    "pack-quantized": (
        compressed("pack-quantized", weights(4, "group", group_size=128), None),
        1276640,
        """
        down_proj.weight_packed I32 256 96
        down_proj.weight_scale F16 256 6
        down_proj.weight_shape I64 2
        k_proj.weight_packed I32 128 32
        k_proj.weight_scale F16 128 2
        k_proj.weight_shape I64 2
        """,
    ),
    "pack-quantized, zero points": (
        compressed("pack-quantized", weights(4, "group", symmetric=False, group_size=128), None),
        1283808,
        """
        down_proj.weight_packed I32 256 96
        down_proj.weight_scale F16 256 6
        down_proj.weight_shape I64 2
        down_proj.weight_zero_point I32 32 6
        k_proj.weight_packed I32 128 32
        k_proj.weight_scale F16 128 2
        k_proj.weight_shape I64 2
        k_proj.weight_zero_point I32 16 2
        """,
    ),
    "pack-quantized, 8 bits": (
        compressed("pack-quantized", weights(8, "group", group_size=128), None),
        2194144,
        """
        down_proj.weight_packed I32 256 192
        down_proj.weight_scale F16 256 6
        down_proj.weight_shape I64 2
        k_proj.weight_packed I32 128 64
        k_proj.weight_scale F16 128 2
        k_proj.weight_shape I64 2
        """,
    ),
    "pack-quantized, channels": (
        compressed("pack-quantized", weights(4, "channel"), None),
        1259232,
        """
        down_proj.weight_packed I32 256 96
        down_proj.weight_scale F16 256 1
        down_proj.weight_shape I64 2
        k_proj.weight_packed I32 128 32
        k_proj.weight_scale F16 128 1
        k_proj.weight_shape I64 2
        """,
    ),
    "int-quantized": (
        compressed("int-quantized", weights(8, "channel"), _DYNAMIC),
        2176512,
        """
        down_proj.weight I8 256 768
        down_proj.weight_scale F16 256 1
        k_proj.weight I8 128 256
        k_proj.weight_scale F16 128 1
        """,
    ),
    "int-quantized, tensor": (
        compressed("int-quantized", weights(8, "tensor"), {"dynamic": False, "symmetric": False}),
        2165318,
        """
        down_proj.input_scale F16 1
        down_proj.input_zero_point I8 1
        down_proj.weight I8 256 768
        down_proj.weight_scale F16 1
        k_proj.input_scale F16 1
        k_proj.input_zero_point I8 1
        k_proj.weight I8 128 256
        k_proj.weight_scale F16 1
        """,
    ),
    "int-quantized, zero points": (
        compressed("int-quantized", weights(8, "channel", symmetric=False), _DYNAMIC),
        2182144,
        """
        down_proj.weight I8 256 768
        down_proj.weight_scale F16 256 1
        down_proj.weight_zero_point I8 256 1
        k_proj.weight I8 128 256
        k_proj.weight_scale F16 128 1
        k_proj.weight_zero_point I8 128 1
        """,
    ),
    "float-quantized, tensor": (
        compressed("float-quantized", weights(8, "tensor", "float"), _STATIC),
        2165304,
        """
        down_proj.input_scale F16 1
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale F16 1
        k_proj.input_scale F16 1
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale F16 1
        """,
    ),
    "float-quantized, channel": (
        compressed("float-quantized", weights(8, "channel", "float"), _DYNAMIC),
        2176512,
        """
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale F16 256 1
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale F16 128 1
        """,
    ),
    "float-quantized, block": (
        compressed("float-quantized", weights(8, "block", "float", block_structure=[128, 128]), _DYNAMIC),
        2165472,
        """
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale F16 2 6
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale F16 1 2
        """,
    ),
    "naive-quantized": (
        compressed("naive-quantized", weights(8, "tensor", "float"), _STATIC),
        2165304,
        """
        down_proj.input_scale F16 1
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale F16 1
        k_proj.input_scale F16 1
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale F16 1
        """,
    ),
    "nvfp4-pack-quantized": (
        compressed(
            "nvfp4-pack-quantized",
            weights(4, "tensor_group", "float", group_size=16),
            {"dynamic": "local", "symmetric": True},
        ),
        1362544,
        """
        down_proj.input_global_scale F32 1
        down_proj.weight_global_scale F32 1
        down_proj.weight_packed U8 256 384
        down_proj.weight_scale F8_E4M3 256 48
        k_proj.input_global_scale F32 1
        k_proj.weight_global_scale F32 1
        k_proj.weight_packed U8 128 128
        k_proj.weight_scale F8_E4M3 128 16
        """,
    ),
    "nvfp4-pack-quantized, weights only": (
        compressed("nvfp4-pack-quantized", weights(4, "tensor_group", "float", group_size=16), None),
        1362488,
        """
        down_proj.weight_global_scale F32 1
        down_proj.weight_packed U8 256 384
        down_proj.weight_scale F8_E4M3 256 48
        k_proj.weight_global_scale F32 1
        k_proj.weight_packed U8 128 128
        k_proj.weight_scale F8_E4M3 128 16
        """,
    ),
    "mxfp4-pack-quantized": (
        compressed("mxfp4-pack-quantized", weights(4, "group", "float", group_size=32), _DYNAMIC),
        1305088,
        """
        down_proj.weight_packed U8 256 384
        down_proj.weight_scale U8 256 24
        k_proj.weight_packed U8 128 128
        k_proj.weight_scale U8 128 8
        """,
    ),
    "mxfp8-quantized": (
        compressed("mxfp8-quantized", weights(8, "group", "float", group_size=32), _DYNAMIC),
        2222592,
        """
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale U8 256 24
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale U8 128 8
        """,
    ),
    "mixed-precision": (
        {
            "config_groups": {
                "group_0": {
                    "format": "float-quantized",
                    "input_activations": weights(8, "token", "float", dynamic=True),
                    "targets": ["re:.*self_attn.*"],
                    "weights": weights(8, "channel", "float", dynamic=False),
                },
                "group_1": {
                    "format": "pack-quantized",
                    "targets": ["re:.*mlp.*"],
                    "weights": weights(4, "group", dynamic=False, group_size=128),
                },
            },
            "format": "mixed-precision",
            "ignore": ["lm_head"],
            "quant_method": "compressed-tensors",
        },
        1598048,
        """
        down_proj.weight_packed I32 256 96
        down_proj.weight_scale F16 256 6
        down_proj.weight_shape I64 2
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale F16 128 1
        """,
    ),
    "float-quantized, output too": (
        compressed("float-quantized", weights(8, "channel", "float"), _DYNAMIC, ignore=()),
        2095232,
        """
        lm_head.weight F8_E4M3 320 256
        lm_head.weight_scale F16 320 1
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale F16 256 1
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale F16 128 1
        """,
    ),
    "ModelOpt FP8": (
        {"quant_algo": "FP8"} | _UNQUANTISED,
        2165360,
        """
        down_proj.input_scale F32
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale F32
        k_proj.input_scale F32
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale F32
        """,
    ),
    "ModelOpt FP8 and cache": (
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"} | _UNQUANTISED,
        2165376,
        """
        down_proj.input_scale F32
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale F32
        k_proj.input_scale F32
        k_proj.k_scale F32
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale F32
        v_proj.v_scale F32
        """,
    ),
    "ModelOpt NVFP4": (
        {"quant_algo": "NVFP4", "group_size": 16} | _UNQUANTISED,
        1362544,
        """
        down_proj.input_scale F32
        down_proj.weight U8 256 384
        down_proj.weight_scale F8_E4M3 256 48
        down_proj.weight_scale_2 F32
        k_proj.input_scale F32
        k_proj.weight U8 128 128
        k_proj.weight_scale F8_E4M3 128 16
        k_proj.weight_scale_2 F32
        """,
    ),
    "ModelOpt FP8 per channel": (
        {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"} | _UNQUANTISED,
        2187776,
        """
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale F32 256
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale F32 128
        """,
    ),
    "ModelOpt FP8 blocks": (
        {"quant_algo": "fp8_pb_wo"} | _UNQUANTISED,
        2165696,
        """
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale F32 2 1 6 1
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale F32 1 1 2 1
        """,
    ),
    "ModelOpt MXFP8": (
        {"quant_algo": "MXFP8", "group_size": 32} | _UNQUANTISED,
        2222592,
        """
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale U8 256 24
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale U8 128 8
        """,
    ),
    "ModelOpt MXFP4": (
        {"quant_algo": "mxfp4"} | _UNQUANTISED,
        1305088,
        """
        down_proj.weight U8 256 384
        down_proj.weight_scale U8 256 24
        k_proj.weight U8 128 128
        k_proj.weight_scale U8 128 8
        """,
    ),
    "Quark FP8": (
        quark(_FP8, input_tensors=_FP8),
        2165304,
        """
        down_proj.input_scale BF16
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale BF16
        k_proj.input_scale BF16
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale BF16
        """,
    ),
    "Quark FP8 and cache": (
        quark(
            _FP8,
            {name: {"input_tensors": _FP8, "output_tensors": _FP8, "weight": _FP8} for name in ("*k_proj", "*v_proj")},
            input_tensors=_FP8,
        ),
        2165312,
        """
        down_proj.input_scale BF16
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale BF16
        k_proj.input_scale BF16
        k_proj.output_scale BF16
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale BF16
        v_proj.output_scale BF16
        """,
    ),
    "Quark FP8 per channel": (
        quark(_FP8 | {"ch_axis": 0, "qscheme": "per_channel"}),
        2176512,
        """
        down_proj.weight F8_E4M3 256 768
        down_proj.weight_scale BF16 256
        k_proj.weight F8_E4M3 128 256
        k_proj.weight_scale BF16 128
        """,
    ),
    "Quark MXFP4": (
        quark(_MXFP4 | {"is_dynamic": False}, input_tensors=_MXFP4 | {"is_dynamic": True}),
        1305088,
        """
        down_proj.weight U8 256 384
        down_proj.weight_scale U8 256 24
        k_proj.weight U8 128 128
        k_proj.weight_scale U8 128 8
        """,
    ),
    "Quark INT4": (
        quark(
            {
                "ch_axis": -1,
                "dtype": "int4",
                "group_size": 128,
                "is_dynamic": False,
                "qscheme": "per_group",
                "symmetric": True,
            }
        ),
        1283584,
        """
        down_proj.weight I32 768 32
        down_proj.weight_scale BF16 6 256
        down_proj.weight_zero_point I32 6 32
        k_proj.weight I32 256 16
        k_proj.weight_scale BF16 2 128
        k_proj.weight_zero_point I32 2 16
        """,
    ),
    "auto-round, GPTQ": (
        auto_round("auto_gptq"),
        1283584,
        """
        down_proj.qweight I32 96 256
        down_proj.qzeros I32 6 32
        down_proj.scales F16 6 256
        k_proj.qweight I32 32 128
        k_proj.qzeros I32 2 16
        k_proj.scales F16 2 128
        """,
    ),
    "auto-round 0.4": (
        {
            "autoround_version": "0.4.5",
            "backend": "auto_round:exllamav2",
            "bits": 4,
            "data_type": "int",
            "group_size": 128,
            "quant_method": "intel/auto-round",
            "sym": False,
        },
        1283584 + 2 * 4 * (5 * 256 + 512 + 768),
        """
        down_proj.qweight I32 96 256
        down_proj.qzeros I32 6 32
        down_proj.scales F16 6 256
        down_proj.g_idx I32 768
        k_proj.qweight I32 32 128
        k_proj.qzeros I32 2 16
        k_proj.scales F16 2 128
        k_proj.g_idx I32 256
        """,
    ),
    "auto-round, AWQ": (
        auto_round("auto_awq"),
        1283584,
        """
        down_proj.qweight I32 768 32
        down_proj.qzeros I32 6 32
        down_proj.scales F16 6 256
        k_proj.qweight I32 256 16
        k_proj.qzeros I32 2 16
        k_proj.scales F16 2 128
        """,
    ),
    "auto-round, MXFP4": (
        auto_round("llm_compressor", "mx_fp", 32, act_bits=4),
        1305088,
        """
        down_proj.weight_packed U8 256 384
        down_proj.weight_scale U8 256 24
        k_proj.weight_packed U8 128 128
        k_proj.weight_scale U8 128 8
        """,
    ),
}


def described(directory: Path, told: dict[str, Any]) -> Path:
    """Write a config.json with what a tool said; what ModelOpt says goes into a file beside it."""
    beside = "quant_algo" in told
    config = LLAMA | {"torch_dtype": "float16" if told.get("quant_method") == "compressed-tensors" else "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config | ({} if beside else {"quantization_config": told})))
    if beside:
        document = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": told}
        (directory / "hf_quant_config.json").write_text(json.dumps(document))
    return directory


@pytest.mark.parametrize("case", WRITTEN)
def test_what_a_tool_wrote_follows_from_what_it_said(tmp_path: Path, case: str) -> None:
    """The names, dtypes and shapes are those of the tool's file, and their bytes all of its bytes."""
    told, size, lines = WRITTEN[case]
    spec = read_model(described(tmp_path, told))
    tensors = stored(spec)
    for line in lines.split("\n"):
        if words := line.split():
            name, dtype, *shape = words
            module = {"down_proj": "model.layers.0.mlp.", "lm_head": ""}.get(
                name.partition(".")[0], "model.layers.0.self_attn."
            )
            assert tensors.pop(module + name) == (dtype, tuple(map(int, shape)))
    rest = [name for name in tensors if name.startswith(("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.k"))]
    assert not rest
    assert spec.weight_bytes == size


@pytest.mark.parametrize("case", WRITTEN)
def test_headers_give_the_same_model(tmp_path: Path, case: str) -> None:
    """A checkpoint with these tensors is the model that follows from the config alone, and needs no config for it."""
    path = described(tmp_path, WRITTEN[case][0])
    spec = read_model(path)
    write_checkpoint(path, json.loads((path / "config.json").read_text()), stored(spec))
    assert read_model(path) == spec


_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
#: Published checkpoints: config, what hf_quant_config.json says, and GiB of all files.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "Llama-3.1-70B FP8": (
        example("Llama-3.1-70B"),
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        67.7,
    ),
    "DeepSeek-V3.1 NVFP4": (
        example("DeepSeek-V3"),
        {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head", *(f"model.layers.{i}.self_attn.{m}" for i in range(61) for m in _LATENT)],
        },
        359.8,
    ),
    "Qwen3-235B-A22B NVFP4": (
        MODELS["Qwen3-235B-A22B"] | {"torch_dtype": "bfloat16"},
        {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"],
        },
        124.9,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_hf_quant_config_beside_the_config_is_read(tmp_path: Path, name: str) -> None:
    """Models of NVIDIA whose config.json says nothing of the quantisation have the size of their files."""
    config, told, size = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": told}))
    assert round(read_model(tmp_path).weight_bytes / 2**30, 1) == size
    assert read_model(tmp_path / "config.json").weight_format == "BF16"  # then no other file is read


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        # 8,030,261,248 parameters, of which 266,240 are norms; a scale and a bias of 16 bits for each 64.
        ({"group_size": 64, "bits": 4}, (8_030_261_248 - 266_240) * 9 // 16 + 2 * 266_240),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, (8_030_261_248 - 266_240) * 17 // 32 + 2 * 266_240),
        # The output matrix as it is, and the embedding with 8 bits.
        (
            {"group_size": 64, "bits": 4, "lm_head": False, "model.embed_tokens": {"group_size": 64, "bits": 8}},
            (8_030_261_248 - 266_240 - 2 * 128256 * 4096) * 9 // 16
            + 2 * (266_240 + 128256 * 4096)
            + 128256 * 4096 * 17 // 16,
        ),
    ],
)
def test_mlx_quantises_embeddings_too(tmp_path: Path, told: dict[str, Any], expected: int) -> None:
    """What MLX says in config.json is followed, module by module, whether or not it says it twice."""
    for twice in ({}, {"quantization_config": told}):
        (tmp_path / "config.json").write_text(json.dumps(example("Llama-3.1-8B") | {"quantization": told} | twice))
        assert read_model(tmp_path).weight_bytes == expected


def test_descriptions_of_older_tools_are_read_beside_the_config(tmp_path: Path) -> None:
    """AutoGPTQ's quantize_config.json and AWQ's quant_config.json say what a quantization_config says today."""
    old = {
        "quantize_config.json": {"bits": 4, "group_size": 64, "desc_act": False, "damp_percent": 0.01},
        "quant_config.json": {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"},
    }
    new = (gptq_config(group_size=64), {"quant_method": "awq", "bits": 4, "group_size": 64})
    for (name, told), today in zip(old.items(), new, strict=True):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA))
        (folder / name).write_text(json.dumps(told))
        model = read_model(folder)
        (folder / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": today}))
        assert read_model(folder) == model
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / name).write_text('{"method": "of tomorrow"}')
    with pytest.raises(ModelError, match=r"quant_config.json.*do not follow"):
        read_model(folder)


def test_each_module_has_the_form_of_the_first_rule_for_it(tmp_path: Path) -> None:
    """GPTQModel's dynamic and auto-round's extra_config give modules other bits and groups, or leave them out."""
    cases: list[dict[str, Any]] = [
        gptq_config(
            dynamic={
                r"-:.*\.1\.mlp\.down_proj": {},
                r"+:.*mlp\.(gate|up)_proj": {"bits": 8, "group_size": 64},
                r".*self_attn.*": {"bits": 2},
            }
        ),
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 128,
            "extra_config": {
                "model.layers.1.mlp.down_proj": {"bits": 16},
                ".*mlp.(gate|up)_proj": {"bits": 8, "group_size": 64},
                "self_attn.*": {"bits": 2},
            },
        },
    ]
    for told in cases:
        tensors = stored(read_model(described(tmp_path, told)))
        assert tensors["model.layers.1.mlp.down_proj.weight"] == ("BF16", (256, 768))
        assert tensors["model.layers.0.mlp.down_proj.qweight"] == ("I32", (96, 256))
        assert tensors["model.layers.1.mlp.up_proj.qweight"] == ("I32", (64, 768))
        assert tensors["model.layers.1.mlp.up_proj.scales"] == ("F16", (4, 768))
        assert tensors["model.layers.0.self_attn.o_proj.qweight"] == ("I32", (32, 256))
        assert ("model.layers.0.mlp.down_proj.g_idx" in tensors) == (told["quant_method"] == "gptq")


def test_layers_of_mixed_precision_are_those_that_are_named(tmp_path: Path) -> None:
    """ModelOpt lists modules with an algorithm each; all others are not quantised."""
    layers = {"model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    layers |= {f"model.layers.{i}.self_attn.{m}_proj": {"quant_algo": "FP8"} for i in range(2) for m in "qkvo"}
    told = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    tensors = stored(read_model(described(tmp_path, told)))
    assert tensors["model.layers.0.mlp.down_proj.weight"] == ("U8", (256, 384))
    assert tensors["model.layers.1.mlp.down_proj.weight"] == ("BF16", (256, 768))
    assert tensors["model.layers.1.self_attn.o_proj.weight"] == ("F8_E4M3", (256, 512))


def test_each_of_very_many_experts_may_be_named(tmp_path: Path) -> None:
    """NVIDIA's Nemotron-3-Super names 512 experts of 40 layers, of two matrices each, and some more: 41,100 modules."""
    fp4 = {"quant_algo": "NVFP4", "group_size": 16}
    names = [
        f"model.layers.{i}.mixer.experts.{e}.{m}_proj" for i in range(40) for e in range(512) for m in ("up", "down")
    ]
    names += [f"model.layers.{i}.mlp.{m}_proj" for i in range(47) for m in ("up", "down", "gate")][
        : 41_100 - len(names)
    ]
    assert len(names) == 41_100
    told = {"quant_algo": "MIXED_PRECISION", "quantized_layers": dict.fromkeys(names, fp4)}
    tensors = stored(read_model(described(tmp_path, told)))
    assert tensors["model.layers.1.mlp.down_proj.weight"] == ("U8", (256, 384))
    assert tensors["model.layers.1.self_attn.k_proj.weight"] == ("BF16", (128, 256))


def test_fbgemm_has_scales_of_rows(tmp_path: Path) -> None:
    """As in transformers' FbgemmFp8Linear: a 32-bit scale for each row, and no other tensor that is saved."""
    told = {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head", "self_attn"],
    }
    tensors = stored(read_model(described(tmp_path, told)))
    assert tensors["model.layers.1.mlp.down_proj.weight"] == ("F8_E4M3", (256, 768))
    assert tensors["model.layers.1.mlp.down_proj.weight_scale"] == ("F32", (256, 1))
    assert tensors["model.layers.1.self_attn.k_proj.weight"] == ("BF16", (128, 256))


@pytest.mark.parametrize(("strategy", "shape"), [("tensor", (1,)), ("attn_head", (2, 1, 1))])
def test_scales_of_a_cache_are_counted(tmp_path: Path, strategy: str, shape: tuple[int, ...]) -> None:
    """compressed-tensors stores a scale of the keys and one of the values with the attention of each layer."""
    told = WRITTEN["float-quantized, channel"][0] | {
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}
    }
    tensors = stored(read_model(described(tmp_path, told)))
    names = {f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(2) for part in "kv"}
    assert {name: tensors[name] for name in names} == dict.fromkeys(names, ("F16", shape))


def transformed(*places: object) -> dict[str, Any]:
    """Return what compressed-tensors says of weights with a Hadamard transform in these places."""
    apply = [{"targets": ["re:.*down_proj$"], "location": place, "inverse": False, "ignore": []} for place in places]
    groups = {"R4": {"type": "hadamard", "apply": apply, "randomize": False, "requires_grad": False}}
    return WRITTEN["float-quantized, channel"][0] | {"transform_config": {"config_groups": groups}}


@pytest.mark.parametrize("places", [("input", "weight_input"), ("output",), ("q_attn", "k_cache"), (None,), (["x"],)])
def test_transforms_that_are_left_to_whoever_runs_a_model_are_refused(
    tmp_path: Path, places: tuple[object, ...]
) -> None:
    """What enters a matrix is another thing then, though no tensor tells; files are planned, with a note."""
    path = described(tmp_path, transformed(*places))
    config = read_config(path)
    assert "transform 'R4' is applied to" in str(read_scheme(config, path).problem)
    with pytest.raises(ModelError, match="transform 'R4' is applied to"):
        read_model(path)
    (tmp_path / "plain").mkdir()
    plain = read_model(described(tmp_path / "plain", WRITTEN["float-quantized, channel"][0]))
    spec = read_model(write_checkpoint(tmp_path, json.loads((path / "config.json").read_text()), stored(plain)))
    assert spec.weight_bytes == plain.weight_bytes
    assert any("transform 'R4'" in note for note in spec.notes)


@pytest.mark.parametrize("transforms", [transformed("weight_input", "weight_output"), {"transform_config": {}}])
def test_transforms_of_weights_are_in_the_weights(tmp_path: Path, transforms: dict[str, Any]) -> None:
    """Nothing is left to compute; an empty description says as little as none."""
    told = WRITTEN["float-quantized, channel"][0]
    (tmp_path / "plain").mkdir()
    spec = read_model(described(tmp_path, told | transforms))
    assert stored(spec) == stored(read_model(described(tmp_path / "plain", told)))


KIMI = r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"


def test_expressions_are_followed_or_not_needed(tmp_path: Path) -> None:
    """Kimi K2's list leaves out dense layers and shared experts; with headers no list is looked at."""
    told = WRITTEN["pack-quantized"][0]
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", KIMI]
    config = example("DeepSeek-V3") | {"quantization_config": told | {"ignore": ignored}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = {p.name.removeprefix("model.layers.{layer}.") for b in read_model(tmp_path).blocks for p in b.parameters}
    assert "mlp.experts.{expert}.up_proj.weight_packed" in names
    assert {"mlp.up_proj.weight", "mlp.shared_experts.up_proj.weight", "self_attn.o_proj.weight"} <= names
    path = described(tmp_path, told)
    tensors = stored(read_model(path))
    unread: list[Any] = [told | {"ignore": 4}, told | {"config_groups": "none"}, 4]
    for odd in (told | {"ignore": [r"re:(a)\1"]}, {"bits": {}}, *unread):
        write_checkpoint(path, LLAMA | {"torch_dtype": "float16", "quantization_config": odd}, tensors)
        spec = read_model(path)
        assert stored(spec) == tensors
        assert bool(spec.notes) == (odd in unread)


def test_lists_may_name_single_experts(tmp_path: Path) -> None:
    """Thousands of names of experts split the copies of a tensor, and only in layers that they name."""
    names = [f"model.layers.{layer}.mlp.experts.{i}.up_proj" for layer in range(20) for i in range(150)]
    told = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": names}
    (tmp_path / "config.json").write_text(json.dumps(example("DeepSeek-V3") | {"quantization_config": told}))
    spec = read_model(tmp_path)
    (block,) = [block for block in spec.blocks if 10 in block.layers]
    copies = {p.dtype: p.copies for p in block.parameters if p.name.endswith("experts.{expert}.up_proj.weight")}
    assert copies == {"BF16": 150, "F8_E4M3": 106}
    assert block.layers == tuple(range(3, 20))


def test_files_that_are_not_read_are_told(tmp_path: Path) -> None:
    """Weights of pickles are assumed to be in 16 bits, also beside a copy in GGUF."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "bfloat16"}))
    assert not read_model(tmp_path).assumed
    (tmp_path / "training_args.bin").touch()
    assert not read_model(tmp_path).assumed
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    assert read_model(tmp_path).assumed == "weights in BF16: pytorch_model-00001-of-00002.bin is not read"
    (tmp_path / "small.Q4_K_M.gguf").touch()
    assert read_model(tmp_path).assumed == "weights in BF16: pytorch_model-00001-of-00002.bin is not read"
    assert read_model(tmp_path / "config.json").weight_format == "BF16"


_TOLD = [
    *(told for told, *_ in WRITTEN.values()),
    gptq_config(dynamic={"-:.*x": {}, "+:.*y": {"bits": 8}}),
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
    {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "NVFP4", "group_size": 16}}},
]
_VALUES = st.sampled_from(
    [None, 0, -1, 3, 16, 2**40, True, 1.5, "", "x", "group", "re:[", [], [0], [1, 2, 3], {}, {"x": 1}]
)


def changed(value: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """Return a document in which one value is another one, or is gone."""
    if not isinstance(value, dict) or not value or draw(st.integers(0, 4)) == 0:
        return draw(_VALUES)
    key = draw(st.sampled_from(sorted(value)))
    rest = {name: other for name, other in value.items() if name != key}
    return rest if draw(st.integers(0, 5)) == 0 else rest | {key: changed(value[key], draw)}


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_description_is_followed_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever a tool's description says in place of what tools say, the result is a model or an error of tpplan's."""
    told = changed(data.draw(st.sampled_from(_TOLD)), data.draw)
    mlx = data.draw(st.booleans())
    told = {"bits": 4, "group_size": told} if mlx and not isinstance(told, dict) else told
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization" if mlx else "quantization_config": told}))
    (tmp_path / "hf_quant_config.json").unlink(missing_ok=True)
    if isinstance(told, dict) and "quant_algo" in told:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": told}))
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    try:
        assert read_model(tmp_path).weight_bytes > 0
    except ModelError as error:
        assert error.hint  # noqa: PT017 (both outcomes are right)


#: What tools are told to leave, by names of the language model alone.
LEFT = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
        },
        "ignore": ["lm_head", "model.layers.0.self_attn.q_proj", "re:model\\.layers\\.1\\.mlp.*"],
    },
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.q_proj"],
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "exclude_modules": ["lm_head", "model.layers.0.self_attn.q_proj"],
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "lm_head": True,
        "dynamic": {"-:^lm_head": {}, "-:^model\\.layers\\.0\\.self_attn\\.q_proj": {}},
    },
}


@pytest.mark.parametrize("tool", LEFT)
@pytest.mark.parametrize("within", ["llava", "gemma3-like", "text"])
def test_names_of_a_language_model_alone_count_in_a_wrapper(tool: str, within: str, tmp_path: Path) -> None:
    """What was quantised as a language model stays what it is in a model of text and images around it."""
    text = LLAMA | {"torch_dtype": "float16"}
    quantisation = {"quantization_config": LEFT[tool]}
    wrapper: dict[str, Any] = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    config = {
        "llava": wrapper | {"text_config": text} | quantisation,
        "gemma3-like": wrapper | {"model_type": "mistral3", "architectures": [], "text_config": text} | quantisation,
        "text": wrapper | {"text_config": text | quantisation},
    }[within]
    found = []
    for name, written in (("alone", text | quantisation), ("inside", config)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(written))
        model = read_model(tmp_path / name / "config.json")
        found.append({name.replace("language_model.", ""): p.dtype for name, p, _ in model.tensors()})
    alone, inside = found
    assert inside == alone
    assert alone["lm_head.weight"] == "F16"
    assert alone["model.layers.0.self_attn.q_proj.weight"] == "F16"
    assert alone.get("model.layers.1.self_attn.q_proj.weight") != "F16"
