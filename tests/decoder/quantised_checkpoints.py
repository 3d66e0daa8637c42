"""Tiny quantised checkpoints, and beside each the same model with the values that its codes stand for, in float32.

transformers' logits of the latter are the reference for the former.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import saved_values
from tests.decoder.quantised_formats import (
    FP4,
    AutoRound,
    Awq,
    Exl2,
    Float4,
    Float8,
    Format,
    Gptq,
    Int8,
    IntPacked,
    Mixed,
    Mxfp8,
    Nf4,
)
from tests.decoder_cases import CONFIGS, SIZES, Model, answered, random_model
from tests.later import transformers

#: Tokens that follow each prompt.
NEW: Final = 4

#: So that groups of 32 to 128 can be cut, and blocks of 128 too where a family says how wide its heads are; and so that
#: an output matrix can be packed.
_LARGE: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "vocab_size": 224,
}

#: Heads whose columns blocks divide, one layer of each kind.
_LINEAR: Final[dict[str, Any]] = {
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_only_layers": [1],
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}

#: What tools leave as it is, by the ends of modules' names: routers, and what is small.
_LEFT: Final = (".gate", ".shared_expert_gate", ".conv1d", ".in_proj_a", ".in_proj_b", ".in_proj_ba")

_FEW_EXPERTS: Final[dict[str, Any]] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}

#: What else a family has here.
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {},
    "gemma2": {},
    "gemma3_text": {},
    "granite": {},
    "phi3": {},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 3},  # where no rounding chooses others
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": _LINEAR,
    "qwen3_next": {**_LINEAR, "num_experts": 4, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 128},
    "deepseek_v2": {
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "kv_lora_rank": 128,
        **_FEW_EXPERTS,
    },
    "deepseek_v3": {  # whose longer prompts cost less with keys and values
        "head_dim": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 32,
        "v_head_dim": 16,
        "kv_lora_rank": 256,
        "q_lora_rank": 128,
        **_FEW_EXPERTS,
    },
    "glm4_moe": {"n_routed_experts": 4, "n_group": 2, "topk_group": 2},
    "minimax_m2": {"num_local_experts": 3},
}

FORMATS: Final[dict[str, Format]] = {
    "gptq 4 g128": Gptq(),
    "gptq 4 g64 asym": Gptq(group=64, symmetric=False),
    "gptq 4 asym, one group": Gptq(group=-1, symmetric=False),
    "gptq 4 g96 asym, ragged": Gptq(group=96, symmetric=False),
    "gptq 4 g32, scales of the model": Gptq(group=32, scales=torch.float32),
    "gptq 4 g32, biases of zeros": Gptq(group=32, adds_biases=True),
    "gptq 4 g32 and the head": Gptq(group=32, head=True),
    "gptq_v2 4 g32 asym": Gptq(group=32, symmetric=False, version=2),
    "gptq_v2 4 g128": Gptq(version=2),
    "gptq 8 g128": Gptq(bits=8),
    "gptq 8 asym, one group": Gptq(bits=8, group=-1, symmetric=False),
    "gptq_v2 8 g32 asym": Gptq(bits=8, group=32, symmetric=False, version=2),
    "gptq 4 g32 desc_act": Gptq(group=32, permuted=True),
    "gptq 8 g64 asym desc_act": Gptq(bits=8, group=64, symmetric=False, permuted=True),
    "gptq 4 desc_act, one group": Gptq(group=-1, permuted=True),
    "awq g32": Awq(group=32),
    "awq g64": Awq(group=64),
    "awq g128": Awq(),
    "int 4 g32": IntPacked(group=32),
    "int 4 g128 asym": IntPacked(symmetric=False),
    "int 4 channel asym": IntPacked(group=-1, symmetric=False),
    "int 4 g64, scales in float16": IntPacked(group=64, scales=torch.float16),
    "int 4 g32 actorder": IntPacked(group=32, permuted=True),
    "int 8 channel": IntPacked(bits=8, group=-1),
    "int 8 g64 asym": IntPacked(bits=8, group=64, symmetric=False),
    "fp8 block": Float8(),
    "fp8 block of 64x32": Float8(block=(64, 32)),
    "fp8 block of 48x80, ragged": Float8(block=(48, 80)),
    "fp8 block of 64x32, e8m0": Float8(block=(64, 32), scales=torch.float8_e8m0fnu),
    "fp8 tensor": Float8(block=(0, 0)),
    "fp8 tensor of e5m2": Float8(block=(0, 0), codes=torch.float8_e5m2),
    "fp8 compressed tensor": Float8(block=(0, 0), suffix=".weight_scale"),
    "fp8 compressed channel": Float8(block=(1, 0), suffix=".weight_scale", scales=torch.bfloat16),
    "fp8 compressed block": Float8(suffix=".weight_scale", scales=torch.bfloat16),
    "nvfp4 compressed": Float4(),
    "nvfp4 modelopt": Float4(tool="modelopt"),
    "mxfp4 compressed": Float4(group=32),
    "mxfp4 quark": Float4(tool="quark", group=32),
    "int8 channel": Int8(),
    "int8 tensor": Int8(group=0, scales=torch.float32),
    "int8 g64 asym": Int8(group=64, symmetric=False),
    "int8 channel asym": Int8(symmetric=False),
    "llm.int8": Int8(tool="bitsandbytes"),
    "mxfp8": Mxfp8(),
    "exl2": Exl2(),
    "exl2 of 4 bits": Exl2(bits=(4,)),
    "gptq of auto-round, asym": AutoRound(packed=Gptq(group=64, symmetric=False), packing="auto_round:auto_gptq"),
    "gptq_v2 of auto-round, asym": AutoRound(packed=Gptq(group=64, symmetric=False, version=2), packing="auto_round"),
    "gptq_v2 of auto-round 0.4, asym": AutoRound(
        packed=Gptq(group=64, symmetric=False, version=2), packing="auto_round:exllamav2", key="backend"
    ),
    "awq of auto-round": AutoRound(packed=Awq(group=64), packing="auto_round:auto_awq"),
    "nf4": Nf4(),
    "nf4 nested": Nf4(nested=True),
    "nf4 nested, stored as bfloat16": Nf4(nested=True, storage=torch.bfloat16),
    "fp4": Nf4(numbers=FP4),
}

_CHANNEL: Final = Float8(block=(1, 0), suffix=".weight_scale", scales=torch.bfloat16)

#: Formats of which modules differ.
MIXED: Final[dict[str, Format]] = {
    "fp8 and int 4 g32": Mixed(usual=IntPacked(group=32), others=_CHANNEL, part="self_attn"),
    "fp8 blocks and int 8": Mixed(
        usual=Float8(block=(64, 32), suffix=".weight_scale", scales=torch.bfloat16),
        others=IntPacked(bits=8, group=-1),
        part="mlp",
    ),
    "int 4 g64 asym and 8": Mixed(
        usual=IntPacked(group=64, symmetric=False), others=IntPacked(bits=8, group=128, symmetric=False), part="v_proj"
    ),
    "fp8 and nvfp4": Mixed(usual=Float4(), others=_CHANNEL, part="self_attn"),
    "gptq 4 g32 and 8 g64": Mixed(usual=Gptq(group=32), others=Gptq(bits=8, group=64, symmetric=False), part="down"),
}

#: Ends of the names of tensors that are not part of quantised matrices.
_NOT_QUANTISED: Final = (".weight", ".bias", "_bias", ".sinks")

_KEPT: list[TemporaryDirectory[str]] = []


def _directory() -> Path:
    _KEPT.append(TemporaryDirectory())
    return Path(_KEPT[-1].name)


@cache
def base(family: str, layers: int = 2) -> Path:
    """Save a small random model of a family, once."""
    torch.manual_seed(sum(map(ord, family)))
    directory = _directory()
    config = SIZES | CONFIGS[family] | _LARGE | FAMILIES[family] | {"num_hidden_layers": layers}
    random_model(family, config).save_pretrained(directory)
    return directory


def write(source: Path, form: Format, directory: Path, twin: Path) -> None:
    """Quantise a checkpoint.

    Args:
        source: of a dense model, in float32.
        form: to store its matrices in: those in the layers but :data:`_LEFT`, and the output matrix if it says so.
        directory: gets the quantised model.
        twin: gets the model whose values the former's are, in float32.
    """
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in saved_values(source).items():
        stem, _, kind = name.rpartition(".")
        is_inside = ".layers." in name or (form.head and stem == "lm_head")
        if kind == "weight" and tensor.ndim > 1 and is_inside and not stem.endswith(_LEFT):
            packed, values[name] = form.of(stem).store(tensor)
            stored |= {stem + suffix: part for suffix, part in packed.items()}
            if form.adds_biases:
                stored.setdefault(f"{stem}.bias", torch.zeros(len(tensor)))
        else:
            stored[name] = values[name] = tensor
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for to, tensors, more in ((directory, stored, {"quantization_config": form.config()}), (twin, values, {})):
        (to / "config.json").write_text(json.dumps(config | more), encoding="utf-8")
        save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})


def halve(source: Path, directory: Path, dtype: torch.dtype) -> None:
    """Round what is not quantised of a checkpoint to 16 bits; scales stay as they are."""
    tensors = {
        name: tensor.to(dtype) if tensor.dtype is torch.float32 and name.endswith(_NOT_QUANTISED) else tensor
        for name, tensor in saved_values(source).items()
    }
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(
        json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}), encoding="utf-8"
    )
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@cache
def stored(family: str, form: str, layers: int = 2) -> tuple[Path, Path]:
    """Quantise a family's model, once.

    Args:
        family: of :data:`FAMILIES`.
        form: of :data:`FORMATS` or :data:`MIXED`.
        layers: of the model.

    Returns:
        The directories of the model and of its twin; see :func:`write`.
    """
    directory, twin = _directory(), _directory()
    write(base(family, layers), (FORMATS | MIXED)[form], directory, twin)
    return directory, twin


@cache
def quantised(family: str, form: str, layers: int = 2) -> tuple[Model, Path]:
    """Quantise a family's model, see :func:`stored`, and let transformers compute what is right, once.

    Returns:
        The model, and the directory of its twin.
    """
    directory, twin = stored(family, form, layers)
    model = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(1)
    return answered(model, directory, NEW), twin


@cache
def mxfp4() -> tuple[Model, Path]:
    """Save a small model of gpt_oss whose experts are random codes of MXFP4.

    Returns:
        The model, and the directory of its twin, whose experts transformers has made of the codes.
    """
    torch.manual_seed(4)
    directory, twin = _directory(), _directory()
    config = SIZES | CONFIGS["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 160, "num_local_experts": 4}
    model = random_model("gpt_oss", config)
    model.save_pretrained(twin)
    tensors, values = saved_values(twin), dict[str, Tensor]()
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 127, (experts, outputs, inputs // 32), dtype=torch.uint8)
        packed = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        values[name] = transformers.integrations.mxfp4.convert_moe_packed_tensors(
            *packed, dtype=torch.float32
        ).contiguous()
    model.load_state_dict(values, strict=False)
    model.save_pretrained(twin)
    config = json.loads((twin / "config.json").read_text(encoding="utf-8"))
    config |= {"quantization_config": {"quant_method": "mxfp4"}}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(1)
    return answered(model, directory, NEW), twin
