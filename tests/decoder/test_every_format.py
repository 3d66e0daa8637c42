"""Plans of every format, run with checkpoints of every format: tokens, or one clear error before weights are read."""

from __future__ import annotations

import json
import shutil
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

import tpplan
from tests.checkpoints import LLAMA, Tensors, llama_layers, llama_outside, write_checkpoint
from tests.command import command
from tests.decoder.quantised_checkpoints import base, halve, mxfp4, stored
from tests.format_cases import CASES
from tests.format_cases import make as make_case
from tpplan.errors import TpplanError
from tpplan.weights import load

if TYPE_CHECKING:
    from collections.abc import Callable

_KEPT: list[TemporaryDirectory[str]] = []


def _directory() -> Path:
    _KEPT.append(TemporaryDirectory())
    return Path(_KEPT[-1].name) / "small"


def _halved(source: Path, dtype: torch.dtype, said: str = "") -> Path:
    """Return a copy of a checkpoint whose unquantised tensors have 16 bits; its config may name another dtype."""
    directory = shutil.copytree(source, _directory())
    halve(directory, directory, dtype)
    if said:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"dtype": said}), encoding="utf-8")
    return directory


def _headers(quantization: dict[str, Any], matrix: Callable[[int, int, int], Tensors]) -> Path:
    """Return a checkpoint of headers alone, with holes for weights."""
    tensors = llama_outside() | llama_layers(matrix)
    return write_checkpoint(_directory(), LLAMA | {"quantization_config": quantization}, tensors)


def _smoothed(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return 8-bit floats whose inputs ModelOpt has scaled, in the dtype of the model."""
    return {
        ".weight": ("F8_E4M3", (outputs, inputs)),
        ".weight_scale": ("F32", ()),
        ".pre_quant_scale": ("F16", (inputs,)),
    }


def _float8_of_two_scales(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return 8-bit floats with blocks in four dimensions, as ModelOpt stores them."""
    return {
        ".weight": ("F8_E4M3", (outputs, inputs)),
        ".weight_scale": ("F32", (outputs // 128, 1, inputs // 128, 1)),
    }


def _mlx(inputs: int, outputs: int, _layer: int) -> Tensors:
    return {
        ".weight": ("U32", (outputs, inputs // 8)),
        ".scales": ("F16", (outputs, inputs // 64)),
        ".biases": ("F16", (outputs, inputs // 64)),
    }


def _case(case: str) -> Path:
    """Return a checkpoint of headers of :data:`tests.format_cases.CASES`."""
    return make_case(_directory().parent, case)[0]


#: Checkpoints that the decoder computes, all of one model but the last three.
COMPUTED: Final[dict[str, Callable[[], Path]]] = {
    "float32": lambda: base("llama", 1),
    "bfloat16": lambda: _halved(base("llama", 1), torch.bfloat16),
    "float16": lambda: _halved(base("llama", 1), torch.float16),
    "gptq": lambda: stored("llama", "gptq 4 g128", 1)[0],
    "gptq in float16": lambda: _halved(stored("llama", "gptq 4 g128", 1)[0], torch.float16),
    "gptq with act order": lambda: stored("llama", "gptq 4 g32 desc_act", 1)[0],
    "gptq_v2 of 8 bits": lambda: stored("llama", "gptq_v2 8 g32 asym", 1)[0],
    "gptq dynamic": lambda: stored("llama", "gptq 4 g32 and 8 g64", 1)[0],
    "awq": lambda: stored("llama", "awq g64", 1)[0],
    "awq in float16, said to be bfloat16": lambda: _halved(stored("llama", "awq g64", 1)[0], torch.float16, "bfloat16"),
    "fp8 block": lambda: stored("llama", "fp8 block", 1)[0],
    "fp8 block, e8m0": lambda: stored("llama", "fp8 block of 64x32, e8m0", 1)[0],
    "fp8 channel": lambda: stored("llama", "fp8 compressed channel", 1)[0],
    "fp8 tensor": lambda: stored("llama", "fp8 tensor", 1)[0],
    "int4 packed": lambda: stored("llama", "int 4 g32", 1)[0],
    "int4 packed in bfloat16": lambda: _halved(stored("llama", "int 4 g32", 1)[0], torch.bfloat16),
    "int4 packed with act order": lambda: stored("llama", "int 4 g32 actorder", 1)[0],
    "fp8 attention, int4 mlp": lambda: stored("llama", "fp8 and int 4 g32", 1)[0],
    "nvfp4 of modelopt": lambda: stored("llama", "nvfp4 modelopt", 1)[0],
    "nvfp4 of compressed-tensors": lambda: stored("llama", "nvfp4 compressed", 1)[0],
    "mxfp4 of compressed-tensors": lambda: stored("llama", "mxfp4 compressed", 1)[0],
    "int8 w8a8": lambda: stored("llama", "int8 channel", 1)[0],
    "mxfp8": lambda: stored("llama", "mxfp8", 1)[0],
    "auto-round": lambda: stored("llama", "gptq of auto-round, asym", 1)[0],
    "exl2": lambda: stored("llama", "exl2", 1)[0],
    "nf4": lambda: stored("llama", "nf4", 1)[0],
    "nf4 nested": lambda: stored("llama", "nf4 nested", 1)[0],
    "experts": lambda: base("qwen3_moe"),
    "fp8 attention, int4 experts": lambda: stored("qwen3_moe", "fp8 and int 4 g32")[0],
    "mxfp4 experts": lambda: mxfp4()[0].directory,
}

#: Checkpoints, of headers alone, that are planned but not computed.
REFUSED: Final[dict[str, Callable[[], Path]]] = {
    **{
        f"{case} of headers": partial(_case, case)
        for case in ("exl3", "gptq 3 bits", "gptq, no config", "awq, no config", "int packed")
    },
    "fp8 smoothed": lambda: _headers({"quant_method": "modelopt", "quant_algo": "FP8"}, _smoothed),
    "fp8 block in four dimensions": lambda: _headers(
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, _float8_of_two_scales
    ),
    "mlx": lambda: _headers({"bits": 4, "group_size": 64}, _mlx),
    "awq gemv": lambda: _headers(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, CASES["awq"][1]
    ),
}


@cache
def checkpoint(name: str) -> Path:
    """Return the directory of a checkpoint, made once."""
    return (COMPUTED | REFUSED)[name]()


@cache
def plan(name: str) -> Path:
    """Return the file of a checkpoint's plan for two devices, made once."""
    made = tpplan.plan(
        tpplan.read_model(checkpoint(name)),
        tpplan.parse_devices("2x1GiB"),
        cache=tpplan.Cache("fp16", 16),
        max_rows=8,
        layout="",
    )
    path = _directory().with_suffix(".json")
    made.save(path)
    return path


def outcome(of: str, run_with: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a plan of one checkpoint with another, and return the tokens, or the error in one line.

    Nothing is read of the weights where there is an error, and an error is one, with a hint.
    """
    begun: list[None] = []
    run = load._run

    def running(*args: Any) -> None:
        begun.append(None)
        run(*args)

    monkeypatch.setattr(load, "_run", running)
    options = ("--backend", "cpu", "--token-ids", "1,2,3", "--max-new-tokens", 2)
    done = command("generate", plan(of), "--model", checkpoint(run_with), *options)
    if done.code == 0:
        assert len(done.out.split(",")) == 2
        return done.out.strip()
    assert (done.code, done.out, begun) == (2, "", [])
    assert done.err.count("error: ") == done.err.count("hint: ") == 1
    assert "has a bug" not in done.err  # names of folders are random
    assert "Traceback" not in done.err
    told = (line for line in done.err.splitlines() if not line.startswith("note: "))
    return " ".join(" ".join(told).split())


@pytest.mark.parametrize("of", COMPUTED)
def test_what_is_computed(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own checkpoint a plan makes tokens, and with any other it is refused: no two have the same bytes."""
    assert outcome(of, of, monkeypatch).replace(",", "").isdigit()
    for other in COMPUTED | REFUSED:
        if other != of:
            assert outcome(of, other, monkeypatch).startswith("error: "), other


@pytest.mark.parametrize("of", REFUSED)
def test_what_is_not_computed(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format is refused with its own plan by what the decoder does not take, with any other as another model."""
    assert "the decoder " in outcome(of, of, monkeypatch)
    for other in COMPUTED | REFUSED:
        if other != of:
            assert outcome(of, other, monkeypatch).startswith("error: "), other


def test_a_plan_of_unquantised_weights_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what the weights are, and what the plan takes them for; no file is called edited."""
    for name, form in (("gptq", "GPTQ 4-bit g128"), ("awq", "AWQ 4-bit g64"), ("int4 packed", "INT4 g32")):
        error = outcome("float32", name, monkeypatch)
        assert f"the weights in {checkpoint(name)} are {form}, those of the plan for " in error
        assert "are not quantised" in error
        back = outcome(name, "float32", monkeypatch)
        assert f"{checkpoint('float32')}, whose weights are F32, is not the model that the plan for " in back
    assert "is BF16 and not F32" in outcome("float32", "bfloat16", monkeypatch)


def test_the_tensor_that_a_known_format_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where floats of 8 bits are refused, the error has what is special about them."""
    odd = outcome("fp8 smoothed", "fp8 smoothed", monkeypatch)
    assert "q_proj (.weight F8_E4M3 [384, 256], .weight_scale F32 [], .pre_quant_scale F16 [256])" in odd
    blocks = outcome("fp8 block in four dimensions", "fp8 block in four dimensions", monkeypatch)
    assert ".weight_scale F32 [3, 1, 2, 1]" in blocks


def test_what_cannot_be_planned() -> None:
    """Every checkpoint here can be planned: what the decoder refuses is not refused before."""
    for name in COMPUTED | REFUSED:
        try:
            plan(name)
        except TpplanError as error:
            pytest.fail(f"{name}: {error}")
