"""Where stored weights are cut: by the axes of their matrices, between stored elements; and which cannot be."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import LLAMA, Tensors, llama_layers, llama_outside, tensor_bytes, write_checkpoint
from tests.format_cases import (
    BLOCK,
    aqlm,
    awq,
    awq_gemv,
    bitnet,
    exl2,
    exl3,
    fp8_block,
    gptq,
    gptq_config,
    hqq,
    int_packed,
    make,
    nf4,
    parameter,
    torchao_int4,
    torchao_nvfp4,
)
from tpplan.core.axes import Axis
from tpplan.core.model import Segment
from tpplan.core.plan import LAYOUTS, Cache, Request
from tpplan.hardware.spec import parse_devices
from tpplan.models.reader import read_model
from tpplan.planner.ledger import demands

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Matrix = Callable[[int, int, int], Tensors]


KV, Q, ID, RS = Axis.KV_HEADS, Axis.Q_HEADS, Axis.INTERMEDIATE, Axis.RESIDUAL
DIMS: dict[str, dict[str, tuple[list[tuple[Axis | None, int]], int | None]]] = {
    "gptq": {
        "k_proj.qweight": ([(RS, 32), (KV, 128)], 1),
        "k_proj.qzeros": ([(RS, 2), (KV, 16)], 1),
        "k_proj.scales": ([(RS, 2), (KV, 128)], 1),
        "down_proj.qweight": ([(ID, 64), (RS, 256)], 1),
        "down_proj.qzeros": ([(ID, 4), (RS, 32)], 1),
        "down_proj.g_idx": ([(ID, 512)], None),
    },
    "gptq 3 bits": {"up_proj.qweight": ([(RS, 24), (ID, 512)], 1), "up_proj.qzeros": ([(RS, 8), (ID, 48)], 1)},
    "gptq 8 bits": {"down_proj.scales": ([(None, 1), (RS, 256)], 1)},
    "awq": {
        "down_proj.qweight": ([(ID, 512), (RS, 32)], 1),
        "down_proj.qzeros": ([(ID, 8), (RS, 32)], 1),
        "q_proj.scales": ([(RS, 4), (Q, 384)], 1),
    },
    "fp8 block": {
        "q_proj.weight_scale_inv": ([(Q, 3), (RS, 2)], 0),
        "o_proj.weight_scale_inv": ([(RS, 2), (Q, 3)], 0),
    },
    "fp8 channel": {"gate_proj.weight_scale": ([(ID, 512), (None, 1)], 0)},
    "fp8 tensor": {"gate_proj.weight_scale": ([], None), "gate_proj.weight": ([(ID, 512), (RS, 256)], 0)},
    "exl2": {
        "gate_proj.q_weight": ([(None, 34), (ID, 512)], 1),
        "gate_proj.q_scale": ([(None, 8), (ID, 64)], 1),
        "gate_proj.q_groups": ([(None, 16)], None),
        "down_proj.q_weight": ([(None, 66), (RS, 256)], 1),
    },
    "exl3": {"down_proj.trellis": ([(ID, 32), (RS, 16), (None, 48)], 1), "down_proj.suh": ([(ID, 512)], None)},
    "nf4": {
        "k_proj.weight": ([(KV, 16384), (None, 1)], 0),
        "k_proj.weight.absmax": ([(KV, 512)], 0),
        "k_proj.weight.nested_absmax": ([(None, 2)], None),
    },
    "int8": {"k_proj.SCB": ([(KV, 128)], 0)},
    "int packed": {
        "down_proj.weight_packed": ([(RS, 256), (ID, 64)], 0),
        "down_proj.weight_scale": ([(RS, 256), (ID, 8)], 0),
    },
    "awq gemv": {"up_proj.qweight": ([(ID, 512), (RS, 32)], 0), "up_proj.scales": ([(ID, 512), (None, 8)], 0)},
    "marlin": {"down_proj.B": ([(ID, 32), (RS, 512)], 1), "down_proj.s": ([(ID, 4), (RS, 256)], 1)},
    "aqlm": {"down_proj.codes": ([(RS, 256), (ID, 64), (None, 2)], 0)},
    "bitnet": {"down_proj.weight": ([(None, 64), (None, 512)], 0)},
    "hqq 8 bits": {"k_proj.W_q": ([(KV, 512), (None, 64)], 0), "k_proj.zero": ([(KV, 512), (None, 1)], 0)},
    "hqq 4 bits": {"k_proj.W_q": ([(None, 256), (None, 64)], None)},
    "torchao int4": {"k_proj._weight_scale": ([(RS, 2), (KV, 128)], 1)},
    "torchao nvfp4": {"gate_proj._weight_scale": ([(ID, 128), (None, 64)], 0)},
}


@pytest.mark.parametrize("case", DIMS)
def test_stored_dimensions_follow_the_axes_of_the_matrix(tmp_path: Path, case: str) -> None:
    """Each stored dimension is cut by the axis of the dimension that it packs, and outputs are known as such."""
    path, _ = make(tmp_path, case)
    spec = read_model(path)
    for name, (dims, out) in DIMS[case].items():
        found = parameter(spec, name)
        assert [(s.axis, s.length) for (s,) in found.dims] == dims, name
        assert found.out == out, name


def test_uncut_parts_live_with_the_outputs(tmp_path: Path) -> None:
    """What cannot be cut is needed by the devices that compute the matrix's outputs; if unsure, by all."""
    exl2_spec = read_model(make(tmp_path / "exl2", "exl2")[0])
    assert parameter(exl2_spec, "gate_proj.q_groups").home is Axis.INTERMEDIATE
    assert parameter(exl2_spec, "down_proj.q_groups").home is Axis.RESIDUAL
    gptq_spec = read_model(make(tmp_path / "gptq", "gptq")[0])
    assert parameter(gptq_spec, "q_proj.g_idx").home is Axis.Q_HEADS
    assert parameter(gptq_spec, "down_proj.g_idx").home is None


GATHER_ONLY: dict[str, tuple[dict[str, Any] | None, Matrix, str]] = {
    "exl2": ({"quant_method": "exl2"}, exl2, "EXL2 permutes"),
    "nf4": ({"quant_method": "bitsandbytes"}, nf4, "bitsandbytes"),
    "gptq, act order": (gptq_config(desc_act=True), gptq(), "desc_act permutes"),
    "gptq, act order, one group": (gptq_config(desc_act=True, group_size=-1), gptq(group=-1), ""),
    "gptq, no act order": (gptq_config(), gptq(), ""),
    "gptq, unknown order": (None, gptq(), "does not say"),
    "gptq, unknown order, no g_idx": (None, gptq(g_idx=False), ""),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, awq, ""),
    "exl3": ({"quant_method": "exl3"}, exl3, ""),
    "int": (None, int_packed, ""),
    "awq gemv": (None, awq_gemv, "gemv pads"),
    "hqq": (None, hqq(4), "each device holds all"),
    "hqq 8 bits": (None, hqq(8), "one run of all rows"),
    "bitnet": (None, bitnet, "each device holds all"),
    "torchao nvfp4": (None, torchao_nvfp4, "in tiles"),
    "torchao int4": (None, torchao_int4, ""),
    "aqlm": (None, aqlm, ""),
    "int, act order": (
        None,
        lambda inputs, outputs, layer: int_packed(inputs, outputs, layer) | {".weight_g_idx": ("I32", (inputs,))},
        "weight_g_idx where inputs are in another order",
    ),
}


@pytest.mark.parametrize("case", GATHER_ONLY)
def test_formats_whose_inputs_cannot_be_cut_say_why(tmp_path: Path, case: str) -> None:
    """Permuted rows and flattened matrices allow the layout gather only; everything else allows both."""
    quantization, matrix, reason = GATHER_ONLY[case]
    config = LLAMA | ({"quantization_config": quantization} if quantization else {})
    spec = read_model(write_checkpoint(tmp_path / "m", config, llama_outside() | llama_layers(matrix)))
    assert reason in spec.gather_only
    assert bool(spec.gather_only) == bool(reason)


def test_formula_knows_the_permutation_too(tmp_path: Path) -> None:
    """The config alone says whether GPTQ permuted the rows."""
    path = write_checkpoint(tmp_path, LLAMA | {"quantization_config": gptq_config(desc_act=True)}, {"x": ("F16", (1,))})
    assert "desc_act" in read_model(path / "config.json").gather_only


def test_ragged_blocks_are_not_cut(tmp_path: Path) -> None:
    """A scale that a cut would share stays whole, on every device that holds a part of the matrix."""
    config = LLAMA | {"intermediate_size": 320, "quantization_config": BLOCK}
    ragged = {"mlp.gate_proj": (256, 320), "mlp.up_proj": (256, 320), "mlp.down_proj": (320, 256)}
    tensors = llama_outside()
    for name, tensor in llama_layers(fp8_block).items():
        module = next((m for m in ragged if m in name), None)
        suffix = "." + name.rpartition(".")[2]
        tensors[name] = fp8_block(*ragged[module], 0)[suffix] if module else tensor
    spec = read_model(write_checkpoint(tmp_path / "m", config, tensors))
    assert spec.weight_bytes == tensor_bytes(tensors)
    gate = parameter(spec, "gate_proj.weight_scale_inv")
    assert gate.dims == ((Segment(None, 3),), (Segment(Axis.RESIDUAL, 2),))
    assert gate.home is Axis.INTERMEDIATE
    assert parameter(spec, "down_proj.weight_scale_inv").dims == ((Segment(Axis.RESIDUAL, 2),), (Segment(None, 3),))
    assert read_model(tmp_path / "m" / "config.json") == spec


UNITS: dict[str, dict[Axis, int]] = {
    "gptq": {Axis.INTERMEDIATE: 128, Axis.KV_HEADS: 1, Axis.Q_HEADS: 2, Axis.RESIDUAL: 128},
    "gptq 8 bits": {Axis.INTERMEDIATE: 4, Axis.KV_HEADS: 1, Axis.Q_HEADS: 1, Axis.RESIDUAL: 4},
    "awq": {Axis.INTERMEDIATE: 64, Axis.KV_HEADS: 1, Axis.Q_HEADS: 1, Axis.RESIDUAL: 64},
    "fp8 block": {Axis.INTERMEDIATE: 128, Axis.KV_HEADS: 1, Axis.Q_HEADS: 2, Axis.RESIDUAL: 128},
    "fp8 channel": {Axis.INTERMEDIATE: 1, Axis.KV_HEADS: 1, Axis.Q_HEADS: 1, Axis.RESIDUAL: 1},
    "exl2": {Axis.INTERMEDIATE: 32, Axis.KV_HEADS: 1, Axis.Q_HEADS: 1, Axis.RESIDUAL: 32},
    "exl3": {Axis.INTERMEDIATE: 128, Axis.KV_HEADS: 2, Axis.Q_HEADS: 2, Axis.RESIDUAL: 128},
    "marlin": {Axis.INTERMEDIATE: 128, Axis.KV_HEADS: 1, Axis.Q_HEADS: 2, Axis.RESIDUAL: 128},
    "torchao nvfp4": {Axis.INTERMEDIATE: 128, Axis.KV_HEADS: 2, Axis.Q_HEADS: 2, Axis.RESIDUAL: 128},
}
SIZES = {Axis.INTERMEDIATE: 512, Axis.KV_HEADS: 2, Axis.Q_HEADS: 6, Axis.RESIDUAL: 256}


@pytest.mark.parametrize("case", UNITS)
def test_cuts_fall_between_stored_elements(tmp_path: Path, case: str) -> None:
    """The smallest part that ends between words, groups and blocks in every tensor is what the format needs."""
    spec = read_model(make(tmp_path, case)[0])
    segments = {s for b in spec.blocks for p in b.parameters for dim in p.dims for s in dim if s.axis}
    for axis, unit in UNITS[case].items():
        size = SIZES[axis]
        assert lcm(*(s.unit(size) for s in segments if s.axis is axis)) == unit, axis


@pytest.mark.parametrize(
    ("head_dim", "kv", "heads"), [(128, "idle", 1), (64, "idle", 2), (64, "replicate", 2), (32, "idle", 4)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_keep_exl3_s_hadamard_blocks_whole(
    tmp_path: Path, head_dim: int, kv: str, heads: int, layout: str
) -> None:
    """EXL3 is cut at multiples of 128 elements only, so narrower heads move together, whole ones where repeated."""
    config = LLAMA | {"head_dim": head_dim, "num_attention_heads": 16, "num_key_value_heads": 8}
    sizes = {"q_proj": (256, 16 * head_dim), "k_proj": (256, 8 * head_dim), "v_proj": (256, 8 * head_dim)}
    sizes |= {"o_proj": (16 * head_dim, 256)}
    tensors = llama_outside() | llama_layers(exl3)
    for layer in range(3):
        for name, (inputs, outputs) in sizes.items():
            start = f"model.layers.{layer}.self_attn.{name}"
            tensors |= {start + suffix: tensor for suffix, tensor in exl3(inputs, outputs, layer).items()}
    spec = read_model(write_checkpoint(tmp_path / "m", config, tensors))
    devices = parse_devices("9x1GiB")
    request = Request(layout, "balanced", Cache("fp16", 128), 1, 128, kv)
    wanted = {demand.axis: demand for demand in demands(spec, request, len(devices)).axes}
    assert wanted[Axis.KV_HEADS].unit == heads * wanted[Axis.KV_HEADS].replicas
    assert wanted[Axis.KV_HEADS].replicas == (2 if kv == "replicate" else 1)
    assert wanted[Axis.INTERMEDIATE].unit == 128
    assert wanted[Axis.RESIDUAL].unit == (128 if layout == "gather" else 32)


def test_padded_outputs_are_counted_but_not_cut(tmp_path: Path) -> None:
    """EXL2 pads outputs to a multiple of 32; the padding is nobody's part of the axis."""
    config = LLAMA | {"vocab_size": 330}
    tensors = llama_outside() | llama_layers(lambda i, o, _layer: {".weight": ("F16", (o, i))})
    tensors["model.embed_tokens.weight"] = ("F16", (330, 256))
    del tensors["lm_head.weight"]
    tensors |= {f"lm_head{suffix}": tensor for suffix, tensor in exl2(256, 352, 1).items()}
    spec = read_model(write_checkpoint(tmp_path / "m", config, tensors))
    assert spec.weight_bytes == tensor_bytes(tensors)
    head = {p.name: p for p in spec.parameters}
    assert head["lm_head.q_weight"].dims == (
        (Segment(None, 32),),
        (Segment(Axis.VOCAB, 330, block=32), Segment(None, 22)),
    )
    assert head["lm_head.q_scale"].dims == ((Segment(None, 8),), (Segment(None, 44),))
