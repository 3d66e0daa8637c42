"""The decoder of quantised models against transformers, which computes with the values that codes stand for."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import tpplan
from tests.checkpoints import LLAMA, llama_layers, llama_outside, saved_values, write_checkpoint
from tests.decoder.quantised_checkpoints import FAMILIES, FORMATS, MIXED, NEW, halve, mxfp4, quantised
from tests.decoder_cases import MAX_ROWS, check, check_losses, plan_of, read_and_stepped, request_of
from tests.examples import examples
from tests.format_cases import CASES, awq
from tests.later import transformers
from tests.weight_plans import fine_units
from tpplan.core.axes import Axis
from tpplan.core.plan import KV_MODES, LAYOUTS
from tpplan.decoder import Decoder
from tpplan.decoder.model.settings import check_model
from tpplan.decoder.weights.fuse import adjacent, alternated
from tpplan.decoder.weights.products import linear, linear_of_all
from tpplan.decoder.weights.quantised import IntMatrix
from tpplan.decoder.weights.stacked import Stacked
from tpplan.errors import ModelError
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from pathlib import Path

    from tests.checkpoints import Tensors
    from tpplan.core.plan import SplitPlan

__all__ = ["fine_units"]  # a fixture

#: Devices, layout and transport of plans that are cut at random.
CUTS = [(1, "reduce", "events"), (3, "reduce", "peer"), (2, "gather", "host")]

#: Rows of a pass that reads both prompts.
ROWS = 18

#: A few formats of each kind, for every family.
SOME = [
    "gptq_v2 4 g32 asym",
    "gptq 8 g64 asym desc_act",
    "awq g32",
    "int 8 channel",
    "fp8 block of 64x32",
    "fp8 compressed channel",
    "fp8 and int 4 g32",
    "nvfp4 modelopt",
    "mxfp4 compressed",
    "int8 channel",
    "nf4",
]


def _plan(directory: Path, devices: int, layout: str, seed: int, *, kv: str = "idle", rows: int = ROWS) -> SplitPlan:
    """Return a plan that cuts a model at random, in the layout gather where groups of inputs are anywhere."""
    if tpplan.read_model(directory).gather_only:
        layout = "gather"
    return plan_of(directory, devices, request_of(layout, kv, rows=rows), {}, seed)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "-".join(map(str, cut)))
@pytest.mark.parametrize("form", FORMATS | MIXED)
def test_formats(form: str, cut: tuple[int, str, str]) -> None:
    """Logits of prompts and of a step, and tokens, of every format, however a plan cuts its groups and blocks."""
    devices, layout, transport = cut
    model, _ = quantised("llama", form, 1)
    check(model, _plan(model.directory, devices, layout, seed=devices), transport, NEW)


#: Every family with each format and each cut, and each format with each cut.
PAIRS = [
    (family, form, CUTS[1 + (i + j) % 2])
    for i, family in enumerate(family for family in FAMILIES if family != "llama")
    for j, form in enumerate(SOME)
]


@pytest.mark.parametrize(("family", "form", "cut"), PAIRS, ids=str)
def test_families(family: str, form: str, cut: tuple[int, str, str]) -> None:
    """Biases, matrices that the checkpoint has fused, and experts, are quantised as other models' matrices are."""
    devices, layout, transport = cut
    model, _ = quantised(family, form)
    check(model, _plan(model.directory, devices, layout, seed=7), transport, NEW)


@pytest.mark.parametrize(
    ("layout", "transport", "bounds"),
    [("reduce", "events", (0, 160)), ("reduce", "peer", (0, 96, 96, 160)), ("gather", "host", (0, 36, 160))],
)
def test_experts_of_mxfp4(layout: str, transport: str, bounds: tuple[int, ...]) -> None:
    """Codes of gpt_oss stand for what transformers makes of them, also where a plan cuts gates and ups between them."""
    model, _ = mxfp4()
    plan = plan_of(
        model.directory, len(bounds) - 1, request_of(layout, rows=ROWS), {Axis.EXPERT_INTERMEDIATE: bounds}, 3
    )
    assert tpplan.read_model(model.directory).weight_format == "MXFP4"
    check(model, plan, transport, NEW)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_whose_descriptions_differ_in_length(family: str, devices: int) -> None:
    """Of double quantisation each expert has its own text, with an offset of any number of digits."""
    model, _ = quantised(family, "nf4 nested")
    lengths = {
        len(text) for name, text in saved_values(model.directory).items() if "experts" in name and "quant_s" in name
    }
    assert len(lengths) > 1
    check(model, _plan(model.directory, devices, "gather", seed=devices), "events", NEW)


@settings(max_examples=examples(12), deadline=None)
@given(
    family=st.sampled_from(list(FAMILIES)),
    form=st.sampled_from([form for form in FORMATS if not FORMATS[form].head]),
    devices=st.integers(1, 3),
    layout=st.sampled_from(LAYOUTS),
    kv=st.sampled_from(KV_MODES),
    seed=st.integers(0, 2**16),
)
def test_any_plan(*, family: str, form: str, devices: int, layout: str, kv: str, seed: int) -> None:
    """Whatever a plan leaves to its devices, they say what transformers does, of prompts that take several passes.

    Two forms of experts are refused: EXL2, and nested NF4 whose offsets are texts of different length.
    """
    assume(not form.startswith(("exl2", "nf4 nested")) or not any("experts" in key for key in FAMILIES[family]))
    model, _ = quantised(family, form)
    check(model, _plan(model.directory, devices, layout, seed, kv=kv, rows=MAX_ROWS), "events", NEW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "gptq 4 g64 asym"), ("qwen2", "awq g128"), ("mixtral", "int 8 g64 asym"), ("phi3", "fp8 block")],
)
def test_sixteen_bits_lose_what_they_lose_in_transformers(
    family: str, form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Codes become 16 bits as transformers has their values, and all else is computed in these, too."""
    model, twin = quantised(family, form)
    halve(model.directory, tmp_path, dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=dtype, attn_implementation="eager")
    check_losses(model, loaded, _plan(tmp_path, 2, "reduce", seed=3), tmp_path, "cpu")


def _refused(directory: Path) -> ModelError:
    model = tpplan.read_model(directory)
    plan = tpplan.plan(model, tpplan.parse_devices("1GiB"), max_rows=1)
    with pytest.raises(ModelError) as error:
        check_model(directory, model, plan)
    return error.value


_GEMV = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}


def _mxfp4(inputs: int, outputs: int, _layer: int) -> Tensors:
    return {"_blocks": ("U8", (outputs, inputs // 32, 16)), "_scales": ("U8", (outputs, inputs // 32))}


@pytest.mark.parametrize(
    ("quantization", "matrix", "what"),
    [
        *((CASES[case][0], CASES[case][1], name) for case, name in (
            ("exl3", "EXL3"),
            ("gptq 2 bits", "GPTQ 2-bit"), ("gptq 3 bits", "GPTQ 3-bit"),
        )),
        (_GEMV, awq, "AWQ"),
        ({"quant_method": "mxfp4"}, _mxfp4, "MXFP4"),
    ],
)  # fmt: skip
def test_formats_that_are_refused(tmp_path: Path, quantization: dict[str, Any], matrix: Any, what: str) -> None:
    """Before anything is loaded, a tensor is named, the format, and what the decoder takes."""
    config = LLAMA | {"quantization_config": quantization}
    error = _refused(write_checkpoint(tmp_path, config, llama_outside() | llama_layers(matrix)))
    assert "model.layers.0.self_attn.q_proj" in error.message
    assert what in error.message
    for known in ("GPTQ", "AWQ", "gemm", "compressed-tensors", "FP8", "NVFP4", "MXFP4", "NF4"):
        assert known in error.hint


def test_biases_of_other_floats(tmp_path: Path) -> None:
    """GPTQ's packers store biases as float16, whatever the model's dtype is, and zeros where there is none."""
    model, _ = quantised("qwen2", "gptq 4 g64 asym")
    tensors = saved_values(model.directory)
    biases = {name: tensor for name, tensor in tensors.items() if name.endswith(".bias")}
    found = []
    for name, stored in (
        ("float32", {name: bias.half().float() for name, bias in biases.items()}),
        ("float16", {name: bias.half() for name, bias in biases.items()}),
        ("none", {name: bias.half() for name, bias in biases.items() if bias.any()}),
    ):
        directory = shutil.copytree(model.directory, tmp_path / name)
        kept = {key: tensor for key, tensor in tensors.items() if key not in biases}
        save_file(kept | stored, directory / "model.safetensors", metadata={"format": "pt"})
        plan = _plan(directory, 2, "reduce", seed=5)
        with compile_plan(plan, backend="cpu") as ctx:
            decoder = Decoder(ctx, directory, load_weights(plan, directory, ctx))
            assert any(name.endswith("qkv_proj.bias") for name in decoder.weights[0].tensors)
            assert not any(name.endswith("o_proj.bias") for name in decoder.weights[0].tensors)
            found.append(read_and_stepped(decoder, [[1, 2, 3], [4, 5]])[0])
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_experts_of_which_some_are_permuted() -> None:
    """One whose inputs are in order is multiplied as the others are, which have orders of their own."""
    torch.manual_seed(8)
    orders = [None, torch.randperm(64).int()]
    codes = [torch.randint(-(2**31), 2**31 - 1, (8, 8), dtype=torch.int32) for _ in orders]
    each = [
        IntMatrix(code, torch.rand(8, 2), None, 0, 32, 4, columns=order)
        for code, order in zip(codes, orders, strict=True)
    ]
    stacked, x_RK = Stacked.of(each, adjacent), torch.randn(3, 64)
    assert torch.equal(linear_of_all(x_RK, stacked), torch.stack([linear(x_RK, one) for one in each], dim=1))
    chosen = torch.tensor([[1], [0], [1]])
    dense = stacked.chosen(chosen, 0, 8, torch.float32)
    found = (dense @ stacked.ordered(x_RK[:, None], chosen)[..., None]).squeeze(-1)
    expected = torch.stack([linear(x_RK[i : i + 1], each[one]) for i, one in enumerate((1, 0, 1))])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 8, 60, 128])
def test_rows_of_two_stacks_alternate_in_their_memory(count: int) -> None:
    """Rows of both stacks take turns, for any number of experts with three each, where they were."""
    block = torch.arange(2 * count * 3 * 4).view(2 * count * 3, 4)
    gate, up = block.chunk(2)
    right = [row for pair in zip(gate.tolist(), up.tolist(), strict=True) for row in pair]
    found = alternated([gate, up], count)
    assert found.tolist() == right
    assert found.data_ptr() == block.data_ptr()
    apart = alternated([torch.tensor(right[::2]), torch.tensor(right[1::2])], count)
    assert apart.tolist() == right
