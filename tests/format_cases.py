"""What the tests of quantised weights share: configs and checkpoints in every format."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from tests.checkpoints import LLAMA, Tensors, llama_layers, llama_outside, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tpplan.core.model import ModelSpec, Parameter

    Matrix = Callable[[int, int, int], Tensors]


def gptq(bits: int = 4, group: int = 128, *, g_idx: bool = True, bias: bool = False) -> Matrix:
    """Return GPTQ's tensors, as AutoGPTQ writes them."""

    def matrix(inputs: int, outputs: int, _layer: int) -> Tensors:
        groups = 1 if group == -1 else ceil(inputs / group)
        return {
            ".qweight": ("I32", (inputs * bits // 32, outputs)),
            ".qzeros": ("I32", (groups, outputs * bits // 32)),
            ".scales": ("F16", (groups, outputs)),
            **({".g_idx": ("I32", (inputs,))} if g_idx else {}),
            **({".bias": ("F16", (outputs,))} if bias else {}),
        }

    return matrix


def awq(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return AWQ's tensors in groups of 64, as AutoAWQ's GEMM version writes them."""
    return {
        ".qweight": ("I32", (inputs, outputs // 8)),
        ".qzeros": ("I32", (inputs // 64, outputs // 8)),
        ".scales": ("F16", (inputs // 64, outputs)),
    }


def fp8_block(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return DeepSeek's 8-bit floats with a scale for each 128 × 128 block."""
    return {
        ".weight": ("F8_E4M3", (outputs, inputs)),
        ".weight_scale_inv": ("F32", (ceil(outputs / 128), ceil(inputs / 128))),
    }


def fp8_channel(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return compressed-tensors' 8-bit floats with a scale for each output."""
    return {".weight": ("F8_E4M3", (outputs, inputs)), ".weight_scale": ("F16", (outputs, 1))}


def fp8_tensor(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return 8-bit floats with a scale for the matrix and one for its inputs."""
    return {
        ".weight": ("F8_E4M3", (outputs, inputs)),
        ".weight_scale": ("F32", ()),
        ".input_scale": ("F32", ()),
    }


def exl2(inputs: int, outputs: int, layer: int) -> Tensors:
    """Return EXL2's tensors: groups of 32 rows, at 5 and 4 bits in the first layer, at 4 bits in the others."""
    groups = inputs // 32
    wide = 2 if layer == 0 else 0
    return {
        ".q_weight": ("I32", (groups * 4 + wide, outputs)),
        ".q_scale": ("I32", (groups, outputs // 8)),
        ".q_scale_max": ("F16", (groups,)),
        ".q_groups": ("I16", (groups * 2,)),
        ".q_invperm": ("I32", (inputs,)),
    }


def exl3(inputs: int, outputs: int, layer: int) -> Tensors:
    """Return EXL3's tensors at 3 bits, 4 in the last layer."""
    return {
        ".trellis": ("I16", (inputs // 16, outputs // 16, 16 * (4 if layer == 2 else 3))),
        ".suh": ("F16", (inputs,)),
        ".svh": ("F16", (outputs,)),
        ".mul1": ("I32", ()),
    }


def nf4(inputs: int, outputs: int, layer: int) -> Tensors:
    """Return bitsandbytes' NF4 with nested scales; the length of the state's text differs between matrices."""
    blocks = inputs * outputs // 64
    return {
        ".weight": ("U8", (inputs * outputs // 2, 1)),
        ".weight.absmax": ("U8", (blocks,)),
        ".weight.quant_map": ("F32", (16,)),
        ".weight.nested_absmax": ("F32", (ceil(blocks / 256),)),
        ".weight.nested_quant_map": ("F32", (256,)),
        ".weight.quant_state.bitsandbytes__nf4": ("U8", (80 + layer,)),
    }


def int8(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return bitsandbytes' 8-bit integers."""
    return {".weight": ("I8", (outputs, inputs)), ".SCB": ("F32", (outputs,)), ".weight_format": ("U8", ())}


def int_packed(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return compressed-tensors' packed integers of 4 bits in groups of 64."""
    return {
        ".weight_packed": ("I32", (outputs, inputs // 8)),
        ".weight_scale": ("BF16", (outputs, inputs // 64)),
        ".weight_shape": ("I64", (2,)),
    }


def awq_gemv(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return the tensors of AutoAWQ's version gemv in groups of 128, padded to 8 groups."""
    width = ceil(inputs / 128 / 8)
    return {
        ".qweight": ("I32", (outputs, inputs // 8)),
        ".qzeros": ("I32", (outputs, width)),
        ".scales": ("F16", (outputs, width * 8)),
    }


def awq_gemv_fast(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return the tensors of AutoAWQ's version gemv_fast in groups of 128, padded to 8 groups."""
    groups = ceil(inputs / 128 / 8) * 8
    return {
        ".qweight": ("I16", (outputs // 4, inputs)),
        ".scales": ("F16", (groups, outputs)),
        ".qzeros": ("F16", (groups, outputs)),
    }


def awq_marlin(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return the tensors of AutoAWQ's version marlin in groups of 128."""
    return {".qweight": ("I32", (inputs // 16, outputs * 2)), ".scales": ("F16", (inputs // 128, outputs))}


def gptq_marlin(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return Marlin's own tensors in groups of 128, as AutoGPTQ saved them."""
    return {
        ".B": ("I32", (inputs // 16, outputs * 2)),
        ".s": ("F16", (inputs // 128, outputs)),
        ".workspace": ("I32", (outputs // 128 * 16,)),
    }


def aqlm(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return AQLM's tensors: two codebooks of 256 runs of 8 inputs."""
    return {
        ".codes": ("I8", (outputs, inputs // 8, 2)),
        ".codebooks": ("F16", (2, 256, 1, 8)),
        ".scales": ("F16", (outputs, 1, 1, 1)),
    }


def bitnet(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return BitNet's tensors: four rows in a byte, a quarter of the matrix apart."""
    return {".weight": ("U8", (outputs // 4, inputs)), ".weight_scale": ("BF16", (1,))}


_HQQ_SCALARS: dict[str, tuple[str, tuple[int, ...]]] = {
    **dict.fromkeys((".nbits", ".group_size", ".axis"), ("I32", ())),
    ".shape": ("I64", (2,)),
    ".packing": ("U8", (7,)),
    ".unpack_view_dtype": ("U8", (11,)),
    ".compute_dtype": ("U8", (14,)),
    **dict.fromkeys((".view_as_float", ".quant_scale", ".quant_zero", ".offload_meta"), ("U8", ())),
    **dict.fromkeys((".encoded_state_dict", ".stores_quant_config", ".channel_wise", ".optimize"), ("U8", ())),
    ".round_zero": ("U8", ()),
}


def hqq(bits: int) -> Matrix:
    """Return HQQ's tensors in groups of 64 along the inputs."""

    def matrix(inputs: int, outputs: int, _layer: int) -> Tensors:
        groups = inputs * outputs // 64
        codes = ("I32", (ceil(groups / 10), 64)) if bits == 3 else ("U8", (groups * bits // 8, 64))
        scales = ("BF16", (groups, 1))
        return {".W_q": codes, ".scale": scales, ".zero": scales} | _HQQ_SCALARS

    return matrix


def torchao_int8(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return torchao's Int8Tensor with a scale for each row."""
    return {
        "._weight_qdata": ("I8", (outputs, inputs)),
        "._weight_scale": ("F32", (outputs, 1)),
        "._weight_zero_point": ("I8", (outputs, 1)),
    }


def torchao_unpacked(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return torchao's IntxUnpackedToInt8Tensor in groups of 32."""
    return {
        "._weight_qdata": ("I8", (outputs, inputs)),
        "._weight_scale": ("BF16", (outputs, inputs // 32)),
        "._weight_zero_point": ("I8", (outputs, inputs // 32)),
    }


def torchao_int4(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return torchao's Int4Tensor in groups of 128."""
    return {
        "._weight_qdata": ("I8", (outputs, inputs // 2)),
        "._weight_scale": ("BF16", (inputs // 128, outputs)),
        "._weight_zero_point": ("BF16", (inputs // 128, outputs)),
    }


def torchao_fp8(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return torchao's Float8Tensor with a scale for each row."""
    return {"._weight_qdata": ("F8_E4M3", (outputs, inputs)), "._weight_scale": ("F32", (outputs, 1))}


def torchao_nvfp4(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return torchao's NVFP4Tensor with scales in tiles of 128 rows and 4 groups."""
    return {
        "._weight_qdata": ("U8", (outputs, inputs // 2)),
        "._weight_scale": ("F8_E4M3", (ceil(outputs / 128) * 32, ceil(inputs / 64) * 16)),
        "._weight_per_tensor_scale": ("F32", ()),
    }


def torchao_mxfp8(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return torchao's MXTensor with scales in tiles of 128 rows and 4 groups."""
    return {
        "._weight_qdata": ("F8_E4M3", (outputs, inputs)),
        "._weight_scale": ("F8_E8M0", (ceil(outputs / 128) * 32, ceil(inputs / 128) * 16)),
    }


def gptq_config(**extra: Any) -> dict[str, Any]:
    """Return a quantization_config of GPTQ."""
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True} | extra


CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

#: name: config's quantization, tensors of a matrix, format, whether the config alone suffices
CASES: dict[str, tuple[dict[str, Any] | None, Matrix, str, bool]] = {
    "gptq": (gptq_config(), gptq(), "GPTQ 4-bit g128", True),
    "gptq 2 bits": (gptq_config(bits=2, group_size=64), gptq(2, 64), "GPTQ 2-bit g64", True),
    "gptq 3 bits": (gptq_config(bits=3, group_size=32), gptq(3, 32), "GPTQ 3-bit g32", True),
    "gptq 8 bits": (gptq_config(bits=8, group_size=-1), gptq(8, -1), "GPTQ 8-bit", True),
    "gptq, no config": (None, gptq(), "GPTQ 4-bit g128", False),
    "gptq, no g_idx": (gptq_config(), gptq(g_idx=False), "GPTQ 4-bit g128", False),
    "gptq, empty biases": (gptq_config(), gptq(bias=True), "GPTQ 4-bit g128", False),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq, "AWQ 4-bit g64", True),
    "awq, no config": (None, awq, "AWQ 4-bit g64", False),
    "fp8 block": (BLOCK, fp8_block, "FP8 block 128x128", True),
    "fp8 channel": (CHANNEL, fp8_channel, "FP8 per channel", True),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor, "FP8 per tensor", True),
    "exl2": ({"quant_method": "exl2", "bits": 4.15, "head_bits": 6}, exl2, "EXL2", False),
    "exl3": ({"quant_method": "exl3", "bits": 3.3}, exl3, "EXL3", False),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4, "NF4", False),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8, "LLM.int8", False),
    "int packed": ({"quant_method": "compressed-tensors"}, int_packed, "INT4 g64", False),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, awq_gemv, "AWQ 4-bit", False),
    "awq gemv fast": ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, awq_gemv_fast, "AWQ 4-bit", False),
    "awq marlin": ({"quant_method": "awq", "bits": 4, "version": "marlin"}, awq_marlin, "Marlin 4-bit g128", False),
    "marlin": (gptq_config(checkpoint_format="marlin"), gptq_marlin, "Marlin 4-bit g128", False),
    "aqlm": ({"quant_method": "aqlm"}, aqlm, "AQLM", False),
    "bitnet": ({"quant_method": "bitnet"}, bitnet, "BitNet", False),
    "hqq 8 bits": ({"quant_method": "hqq"}, hqq(8), "HQQ 8-bit g64", False),
    "hqq 4 bits": ({"quant_method": "hqq"}, hqq(4), "HQQ 4.5", False),
    "hqq 3 bits": ({"quant_method": "hqq"}, hqq(3), "HQQ 3.7", False),
    "torchao int8": ({"quant_method": "torchao"}, torchao_int8, "INT8 per channel", False),
    "torchao unpacked": ({"quant_method": "torchao"}, torchao_unpacked, "INT8 g32", False),
    "torchao int4": ({"quant_method": "torchao"}, torchao_int4, "INT4 g128", False),
    "torchao fp8": ({"quant_method": "torchao"}, torchao_fp8, "FP8 per channel", False),
    "torchao nvfp4": ({"quant_method": "torchao"}, torchao_nvfp4, "NVFP4", False),
    "torchao mxfp8": ({"quant_method": "torchao"}, torchao_mxfp8, "MXFP8", False),
}


def make(directory: Path, case: str) -> tuple[Path, Tensors]:
    """Write the checkpoint of a case."""
    quantization, matrix, _, _ = CASES[case]
    config = LLAMA | ({"quantization_config": quantization} if quantization else {})
    tensors = llama_outside() | llama_layers(matrix)
    return write_checkpoint(directory / "small", config, tensors), tensors


def stored(spec: ModelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of a model by name."""
    found = {p.name: (p.dtype, p.shape) for p in spec.parameters}
    for block in spec.blocks:
        for layer in block.layers:
            for p in block.parameters:
                found[p.name.replace("{layer}", str(layer))] = (p.dtype, p.shape)
    return found


def parameter(spec: ModelSpec, end: str) -> Parameter:
    """Return the first layer's parameter whose name ends so."""
    return next(p for p in spec.blocks[0].parameters if p.name.endswith(end))
