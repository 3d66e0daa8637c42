"""Experts of which each is stored in its own way, and routers that are left alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.checkpoints import Tensors, tensor_bytes, write_checkpoint
from tests.format_cases import exl2, gptq_config, parameter, stored
from tests.later import transformers
from tests.published import MODELS, example, shape
from tpplan.core.axes import Axis
from tpplan.core.model import Segment
from tpplan.errors import ModelError
from tpplan.models.reader import read_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Matrix = Callable[[int, int, int], Tensors]


MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    **shape(vocab=64, hidden=128, dense=256, layers=2, q=2, kv=1, top=2, context=128),
    "num_local_experts": 4,
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


GPT_OSS_20B = example("gpt-oss-20b") | {
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
}


#: DeepSeek-V4-Flash as on the hub; and with fewer and narrower layers, one of each kind.
DEEPSEEK_V4 = MODELS["DeepSeek-V4-Flash"] | {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
SMALL_V4 = DEEPSEEK_V4 | {
    **shape(vocab=320, hidden=256, expert=128, layers=4, q=8, head_dim=128, top=2, routed=3, context=1_048_576),
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "index_n_heads": 2,
    "index_head_dim": 128,
    "compress_ratios": [0, 0, 4, 128, 0],
}


def deepseek_v4(config: dict[str, Any], norm: str, bits: int = 4) -> Tensors:
    """Return the tensors of a DeepSeek-V4 as its published files name, type and shape them; ``bits`` of experts."""
    h, vocab, rank, out = (config[key] for key in ("hidden_size", "vocab_size", "q_lora_rank", "o_lora_rank"))
    heads, dim, groups, mlp = (
        config[key] for key in ("num_attention_heads", "head_dim", "o_groups", "moe_intermediate_size")
    )
    tensors: Tensors = dict.fromkeys(("embed.weight", "head.weight"), ("BF16", (vocab, h)))
    tensors |= {"norm.weight": ("BF16", (h,)), "hc_head_fn": ("F32", (4, 4 * h))}
    tensors |= {"hc_head_base": ("F32", (4,)), "hc_head_scale": ("F32", (1,))}

    def coded(name: str, rows: int, columns: int, bits: int = 8) -> None:
        packed = columns * bits // 8
        block = (rows // 128, columns // 128) if bits == 8 else (rows, columns // 32)
        tensors[f"{name}.weight"] = ("F8_E4M3" if bits == 8 else "I8", (rows, packed))
        tensors[f"{name}.scale"] = ("F8_E8M0", block)

    def compressor(at: str, ratio: int, size: int) -> None:
        width = 2 * size if ratio == 4 else size
        tensors.update({f"{at}.{name}.weight": ("BF16", (width, h)) for name in ("wkv", "wgate")})
        tensors.update({f"{at}.ape": ("F32", (ratio, width)), f"{at}.norm.weight": ("BF16", (size,))})

    for layer in range(config["num_hidden_layers"]):
        start, ratio = f"layers.{layer}.", config["compress_ratios"][layer]
        sizes = {"fn": (24, 4 * h), "base": (24,), "scale": (3,)}
        tensors |= {f"{start}hc_{part}_{n}": ("F32", sizes[n]) for part in ("attn", "ffn") for n in sizes}
        tensors |= {f"{start}{part}_norm.weight": ("BF16", (h,)) for part in ("attn", "ffn")}
        attention = f"{start}attn."
        tensors |= {
            f"{attention}q_norm.weight": ("BF16", (rank,)),
            f"{attention}{norm}.weight": ("BF16", (dim,)),
            f"{attention}attn_sink": ("F32", (heads,)),
        }
        for name, rows, columns in (
            *(("wq_a", rank, h), ("wq_b", heads * dim, rank), ("wkv", dim, h)),
            *(("wo_a", groups * out, heads * dim // groups), ("wo_b", h, groups * out)),
        ):
            coded(attention + name, rows, columns)
        if ratio:
            compressor(f"{attention}compressor", ratio, dim)
        if ratio == 4:
            index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
            compressor(f"{attention}indexer.compressor", ratio, index_dim)
            coded(f"{attention}indexer.wq_b", index_heads * index_dim, rank)
            tensors[f"{attention}indexer.weights_proj.weight"] = ("BF16", (index_heads, h))
        router, count = f"{start}ffn.gate.", config["n_routed_experts"]
        tensors[f"{router}weight"] = ("BF16", (count, h))
        if layer < config["num_hash_layers"]:
            tensors[f"{router}tid2eid"] = ("I64", (vocab, config["num_experts_per_tok"]))
        else:
            tensors[f"{router}bias"] = ("F32", (count,))
        for name, rows, columns in (("w1", mlp, h), ("w2", h, mlp), ("w3", mlp, h)):
            coded(f"{start}ffn.shared_experts.{name}", rows, columns)
            for expert in range(count):
                coded(f"{start}ffn.experts.{expert}.{name}", rows, columns, bits)
    return tensors


@pytest.mark.parametrize("moved", [False, True], ids=["V4", "V4.1"])
def test_deepseek_v4_flash_has_the_bytes_of_its_published_index(moved: bool, tmp_path: Path) -> None:
    """With 4-bit experts by formula: the total_size, 166,878,536,440 bytes, less the three stages that draft tokens."""
    config = DEEPSEEK_V4 | {"quantization_config": {**DEEPSEEK_V4["quantization_config"], "expert_dtype": "fp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"expert_dtype": None} if moved else DEEPSEEK_V4))
    spec = read_model(tmp_path / "config.json")
    # Each is a layer without a compressor; the first joins three states, the last has a norm, streams and two heads.
    one_layer = DEEPSEEK_V4 | {"num_hidden_layers": 1, "num_hash_layers": 0}
    tensors = deepseek_v4(one_layer, "kv_norm")
    layer = tensor_bytes({name: tensor for name, tensor in tensors.items() if name.startswith("layers.")})
    first = 4096 * 3 * 4096 + 32 * 3 * 32 + 2 * 4096
    last = 2 * 4096 + 4 * (4 * 4 * 4096 + 4 + 1) + 2 * 2 * 129280 * 256 + 2 * (4096 + 256)
    assert spec.weight_bytes == 166_878_536_440 - 3 * layer - first - last
    assert spec.weight_format == "MXFP4"


@pytest.mark.parametrize("norm", ["norm", "kv_norm"])
@pytest.mark.parametrize("bits", [4, 8])
def test_files_of_deepseek_v4_are_read_to_the_byte(bits: int, norm: str, tmp_path: Path) -> None:
    """As published, and with the name that transformers gives the norm of keys; so is their config alone."""
    tensors = deepseek_v4(SMALL_V4, norm, bits)
    path = write_checkpoint(tmp_path / "m", SMALL_V4 | {"expert_dtype": f"fp{bits}"}, tensors)
    spec = read_model(path)
    assert spec.weight_bytes == tensor_bytes(tensors)
    assert read_model(path / "config.json") == spec
    start = "model.layers.{layer}."
    (gate,) = [p for p in spec.blocks[0].parameters if p.name == f"{start}ffn.experts.{{expert}}.w1.weight"]
    assert gate.copies == 3
    assert (gate.dtype, gate.shape) == tensors["layers.0.ffn.experts.0.w1.weight"]
    assert gate.dims[0] == (Segment(Axis.EXPERT_INTERMEDIATE, 128),)


def test_other_dtypes_of_experts_are_refused(tmp_path: Path) -> None:
    """A config alone says too little of them."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL_V4 | {"expert_dtype": "fp6"}))
    with pytest.raises(ModelError, match="expert_dtype is 'fp6'"):
        read_model(tmp_path / "config.json")


def test_gpt_oss_20b_has_the_bytes_of_its_published_index(tmp_path: Path) -> None:
    """MXFP4 by formula gives the total_size that the model's index on the hub states, 13,761,264,768 bytes."""
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    spec = read_model(tmp_path / "config.json")
    assert spec.weight_bytes == 13_761_264_768
    assert spec.weight_format == "MXFP4"
    gate = parameter(spec, "gate_up_proj_blocks")
    assert gate.dims == (
        (Segment(None, 32),),
        (Segment(Axis.EXPERT_INTERMEDIATE, 5760),),
        (Segment(Axis.RESIDUAL, 90),),
        (Segment(None, 16),),
    )
    assert gate.out == 1
    down = parameter(spec, "down_proj_scales")
    assert down.dims == (
        (Segment(None, 32),),
        (Segment(Axis.RESIDUAL, 2880),),
        (Segment(Axis.EXPERT_INTERMEDIATE, 90),),
    )


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
    **shape(vocab=64, hidden=256, dense=256, layers=1, q=2, kv=1, head_dim=128, top=1, context=64),
    "num_local_experts": 4,
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


def moe(
    model_type: str, experts: Tensors, outside: Tensors | None = None, **keys: Any
) -> tuple[dict[str, Any], Tensors]:
    """Return the config and tensors of one layer of a mixture, experts of a width of 128 in 4 pieces."""
    config = _STACKED | {"model_type": model_type, "intermediate_size": 128, "torch_dtype": "bfloat16"} | keys
    layer: Tensors = {
        "input_layernorm.weight": ("BF16", (256,)),
        "post_attention_layernorm.weight": ("BF16", (256,)),
        "self_attn.q_proj.weight": ("BF16", (256, 256)),
        "self_attn.k_proj.weight": ("BF16", (128, 256)),
        "self_attn.v_proj.weight": ("BF16", (128, 256)),
        "self_attn.o_proj.weight": ("BF16", (256, 256)),
    }
    tensors: Tensors = {
        "model.embed_tokens.weight": ("BF16", (64, 256)),
        "model.norm.weight": ("BF16", (256,)),
        "lm_head.weight": ("BF16", (64, 256)),
    }
    return config, tensors | {f"model.layers.0.{name}": t for name, t in (layer | (outside or {}) | experts).items()}


def each(names: dict[str, tuple[int, ...]], matrix: Callable[[tuple[int, ...]], Tensors]) -> Tensors:
    """Return the tensors of matrices for each of 4 experts."""
    return {
        name.replace("#", str(expert)) + suffix: tensor
        for expert in range(4)
        for name, shape in names.items()
        for suffix, tensor in matrix(shape).items()
    }


def plain(shape: tuple[int, ...]) -> Tensors:
    """Return a matrix in 16 bits."""
    return {".weight": ("BF16", shape)}


def nvfp4(shape: tuple[int, ...]) -> Tensors:
    """Return a matrix as ModelOpt stores it in NVFP4."""
    outputs, inputs = shape
    return {
        ".weight": ("U8", (outputs, inputs // 2)),
        ".weight_scale": ("F8_E4M3", (outputs, inputs // 16)),
        ".weight_scale_2": ("F32", ()),
        ".input_scale": ("F32", ()),
    }


_WIDE, _LONG = (128, 256), (256, 128)
_GATED = {"gate_proj": _WIDE, "up_proj": _WIDE, "down_proj": _LONG}
_SHARED = {f"feed_forward.shared_expert.{name}.weight": ("BF16", shape) for name, shape in _GATED.items()}
_LLAMA4 = _SHARED | {"feed_forward.router.weight": ("BF16", (4, 256))}
_GPT_OSS: Tensors = {
    "mlp.router.weight": ("BF16", (4, 256)),
    "mlp.router.bias": ("BF16", (4,)),
    "self_attn.sinks": ("BF16", (2,)),
    **{f"self_attn.{name}_proj.bias": ("BF16", (n,)) for name, n in zip("qkvo", (256, 128, 128, 256), strict=True)},
}
_MIXTRAL: dict[str, Any] = {"num_experts_per_tok": 2}


def _biased(matrix: Callable[[tuple[int, ...]], Tensors]) -> Callable[[tuple[int, ...]], Tensors]:
    return lambda shape: matrix(shape) | {".bias": ("BF16", shape[:1])}


#: Forms in which tools store experts, other than the family's own: the model type, keys, and a layer's tensors.
FORMS: dict[str, tuple[str, dict[str, Any], Tensors]] = {
    "llama4, one by one": (
        "llama4_text",
        {},
        _LLAMA4 | each({f"feed_forward.experts.#.{name}": shape for name, shape in _GATED.items()}, plain),
    ),
    "llama4, one by one in NVFP4": (
        "llama4_text",
        {},
        _LLAMA4 | each({f"feed_forward.experts.#.{name}": shape for name, shape in _GATED.items()}, nvfp4),
    ),
    "llama4, in one tensor in NVFP4": (
        "llama4_text",
        {},
        _LLAMA4
        | {
            f"feed_forward.experts.{name}{suffix}": tensor
            for name, inputs, outputs in (("gate_up_proj", 256, 256), ("down_proj", 128, 256))
            for suffix, tensor in {
                "": ("U8", (4, inputs // 2, outputs)),
                "_weight_scale": ("F8_E4M3", (4, inputs // 16, outputs)),
                "_weight_scale_2": ("F32", ()),
                "_input_scale": ("F32", ()),
            }.items()
        },
    ),
    "llama4, FBGEMM": (
        "llama4_text",
        {},
        _LLAMA4
        | {
            "feed_forward.experts.gate_up_proj": ("F8_E4M3", (4, 256, 256)),
            "feed_forward.experts.gate_up_proj_scale": ("F32", (4, 1, 256)),
            "feed_forward.experts.down_proj": ("F8_E4M3", (4, 128, 256)),
            "feed_forward.experts.down_proj_scale": ("F32", (4, 256, 1)),
        },
    ),
    # One scale of each expert, and one of what enters it, as the hub has Mistral Small 4's.
    "llama4, FP8 per tensor": (
        "llama4_text",
        {},
        _LLAMA4
        | {
            f"feed_forward.experts.{name}{suffix}": tensor
            for name, inputs in (("gate_up_proj", 256), ("down_proj", 128))
            for suffix, tensor in {
                "": ("F8_E4M3", (4, 256, inputs)),
                "_scale_inv": ("BF16", (4, 1, 1)),
                "_activation_scale": ("BF16", (4,)),
            }.items()
        },
    ),
    "gpt_oss, one by one": (
        "gpt_oss",
        {},
        _GPT_OSS | each({"mlp.experts.gate_up_projs.#": (256, 256), "mlp.experts.down_projs.#": _LONG}, _biased(plain)),
    ),
    "gpt_oss, one by one in NVFP4": (
        "gpt_oss",
        {},
        _GPT_OSS | each({"mlp.experts.gate_up_projs.#": (256, 256), "mlp.experts.down_projs.#": _LONG}, _biased(nvfp4)),
    ),
    "gpt_oss, gate and up apart": (
        "gpt_oss",
        {},
        _GPT_OSS | each({f"mlp.experts.#.{name}": shape for name, shape in _GATED.items()}, _biased(plain)),
    ),
    "gpt_oss, MLX": (
        "gpt_oss",
        {},
        _GPT_OSS
        | {
            f"mlp.experts.{name}.{part}": tensor
            for name, (outputs, inputs) in _GATED.items()
            for part, tensor in {
                "weight": ("U32", (4, outputs, inputs // 8)),
                "scales": ("U8", (4, outputs, inputs // 32)),
                "bias": ("BF16", (4, outputs)),
            }.items()
        },
    ),
    "mixtral, renamed": (
        "mixtral",
        _MIXTRAL,
        {"mlp.gate.weight": ("BF16", (4, 256))}
        | each({f"mlp.experts.#.{name}": shape for name, shape in _GATED.items()}, plain),
    ),
    "mixtral, in one tensor": (
        "mixtral",
        _MIXTRAL,
        {
            "mlp.gate.weight": ("BF16", (4, 256)),
            "mlp.experts.gate_up_proj": ("BF16", (4, 256, 256)),
            "mlp.experts.down_proj": ("BF16", (4, 256, 128)),
        },
    ),
    "mixtral, MLX": (
        "mixtral",
        _MIXTRAL,
        {"block_sparse_moe.gate.weight": ("BF16", (4, 256))}
        | {
            f"block_sparse_moe.switch_mlp.{name}.{part}": tensor
            for name, (outputs, inputs) in _GATED.items()
            for part, tensor in {
                "weight": ("U32", (4, outputs, inputs // 8)),
                "scales": ("BF16", (4, outputs, inputs // 64)),
                "biases": ("BF16", (4, outputs, inputs // 64)),
            }.items()
        },
    ),
}


@pytest.mark.parametrize("case", FORMS)
def test_experts_in_other_forms_are_counted_and_cut(case: str, tmp_path: Path) -> None:
    """Whichever of its forms a tool stores experts in, each byte is counted, and each expert's own axis cuts it."""
    config, tensors = moe(FORMS[case][0], FORMS[case][2], **FORMS[case][1])
    spec = read_model(write_checkpoint(tmp_path / "m", config, tensors))
    assert spec.weight_bytes == tensor_bytes(tensors)
    assert not spec.not_planned
    matrices = [p for p in spec.blocks[0].parameters if ".experts." in p.name or "switch_mlp" in p.name]
    cut = [p for p in matrices if p.cut_dim("reduce") is not None]
    assert all({s.axis for dim in p.dims for s in dim} & {Axis.EXPERT_INTERMEDIATE, Axis.RESIDUAL} for p in cut)
    assert sum(p.bytes for p in cut) > 0.97 * sum(p.bytes for p in matrices)
    assert all(p.cut_dim("gather") is not None for p in cut if len(p.dims) > 2)


def test_experts_saved_with_inputs_and_outputs_exchanged(tmp_path: Path) -> None:
    """As transformers 5 saves Qwen3-VL's, [expert, out, in], where the hub has [expert, in, out]."""
    config, tensors = moe("llama4_text", _LLAMA4 | {
        "feed_forward.experts.gate_up_proj": ("BF16", (4, 256, 256)),
        "feed_forward.experts.down_proj": ("BF16", (4, 256, 128)),
    })  # fmt: skip
    spec = read_model(write_checkpoint(tmp_path / "m", config, tensors))
    assert spec.weight_bytes == tensor_bytes(tensors)
    down = parameter(spec, "experts.down_proj")
    assert down.dims[1:] == ((Segment(Axis.RESIDUAL, 256),), (Segment(Axis.EXPERT_INTERMEDIATE, 128),))
    assert down.out == 1


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_experts_in_fp8_are_read_as_transformers_keeps_them(scheme: str, tmp_path: Path) -> None:
    """In one tensor, with scales of blocks, and of what enters each expert where that is not measured anew."""
    config = transformers.LlamaConfig(hidden_size=256)
    config.num_local_experts, config.moe_intermediate_size = 4, 128
    kept = transformers.integrations.finegrained_fp8.FP8Experts(config, block_size=(128, 128), activation_scheme=scheme)
    dtypes = {torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
    experts: Tensors = {
        f"feed_forward.experts.{n}": (dtypes[p.dtype], tuple(p.shape)) for n, p in kept.named_parameters()
    }
    assert len(experts) == (6 if scheme == "static" else 4)
    data, tensors = moe("llama4_text", _LLAMA4 | experts)
    spec = read_model(write_checkpoint(tmp_path / "m", data, tensors))
    assert spec.weight_bytes == tensor_bytes(tensors)
    assert spec.weight_format == "FP8 block 128x128"
    assert parameter(spec, "down_proj_scale_inv").dims[1] == (Segment(Axis.RESIDUAL, 2),)


def step_fp8(shape: tuple[int, ...]) -> Tensors:
    """Return a matrix, or those of all experts, in blocks of FP8."""
    *lead, rows, columns = shape
    return {
        ".weight": ("F8_E4M3", shape),
        ".weight_scale_inv": ("F32", (*lead, rows // 128, columns // 128)),
    }


def step_nvfp4(shape: tuple[int, ...]) -> Tensors:
    """Return a matrix, or those of all experts, in ModelOpt's NVFP4: each expert has two scales of its own."""
    *lead, rows, columns = shape
    return {
        ".weight": ("U8", (*lead, rows, columns // 2)),
        ".weight_scale": ("F8_E4M3", (*lead, rows, columns // 16)),
        ".weight_scale_2": ("F32", (*lead,)),
        ".input_scale": ("F32", (*lead,)),
    }


@pytest.mark.parametrize(("matrix", "text"), [(step_fp8, "FP8 block 128x128"), (step_nvfp4, "NVFP4")])
def test_step_s_quantised_experts_are_in_one_tensor(
    matrix: Callable[[tuple[int, ...]], Tensors], text: str, tmp_path: Path
) -> None:
    """As published of Step 3.5 (FP8) and 3.7 (NVFP4): tensors of three dimensions, with scales of as many."""
    config: dict[str, Any] = {"model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"], "moe_layers_enum": "1"}
    config |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "head_dim": 128, "vocab_size": 64, "num_experts": 6, "num_experts_per_tok": 2}
    config |= {"moe_intermediate_size": 256, "share_expert_dim": 128, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors: Tensors = {}
    for name, tensor in stored(read_model(tmp_path / "config.json")).items():
        if name.endswith("_proj.weight") and ".g_proj" not in name:
            tensors |= {name.removesuffix(".weight") + suffix: each for suffix, each in matrix(tensor[1]).items()}
        else:
            tensors[name] = tensor
    assert len(tensors["model.layers.1.moe.down_proj.weight"][1]) == 3
    spec = read_model(write_checkpoint(tmp_path / "m", config, tensors))
    assert stored(spec) == tensors
    assert spec.weight_format == text
    for name in ("weight", "weight_scale_inv" if text != "NVFP4" else "weight_scale"):
        (gate,) = [p for p in spec.blocks[1].parameters if p.name.endswith(f"moe.gate_proj.{name}")]
        assert gate.out == 1
        assert gate.cut_dim("gather") == 1
