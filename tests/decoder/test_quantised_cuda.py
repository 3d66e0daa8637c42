"""The decoder of quantised models on real GPUs: what transformers says of their values, and torch of their codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.decoder.quantised_checkpoints import FAMILIES, FORMATS, NEW, halve, mxfp4, quantised
from tests.decoder.test_cuda import GPUS, check_kernels, check_passes
from tests.decoder_cases import check, check_losses, plan_of, request_of
from tests.later import transformers
from tests.weight_plans import fine_units

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fine_units"]  # a fixture

#: Formats that any layout takes, of each kind of codes, zeros and scales.
SOME = [
    "gptq 4 g128",
    "gptq 4 g64 asym",
    "gptq_v2 8 g32 asym",
    "awq g32",
    "int 4 channel asym",
    "int 8 channel",
    "fp8 block",
    "fp8 block of 48x80, ragged",
    "fp8 tensor of e5m2",
    "fp8 compressed channel",
]

#: Families that lose about as much to any rounding.
ROUNDED = ["llama", "qwen2", "phi3", "mixtral"]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
def test_one_gpu(form: str) -> None:
    """Logits of prompts and of a step in 32 bits, and tokens, of every format."""
    model, _ = quantised("llama", form)
    check(model, plan_of(model.directory, 1, request_of("gather"), {}, seed=1), "auto", NEW, backend="cuda")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("layout", ["reduce", "gather"])
@pytest.mark.parametrize("form", SOME)
@pytest.mark.parametrize("family", FAMILIES)
def test_several_gpus(family: str, form: str, layout: str) -> None:
    """The same of every family, cut at random."""
    model, _ = quantised(family, form)
    check(model, plan_of(model.directory, min(GPUS, 4), request_of(layout), {}, seed=4), "auto", NEW, backend="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", SOME)
@pytest.mark.parametrize("family", ROUNDED)
def test_sixteen_bits(family: str, form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """What kernels make of codes is about as near to 32 bits as transformers gets with the values in 16 bits."""
    model, twin = quantised(family, form)
    halve(model.directory, tmp_path, dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=dtype, attn_implementation="eager")
    check_losses(model, loaded, plan_of(tmp_path, min(GPUS, 2), request_of(), {}, seed=3), tmp_path, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["reduce", "gather"])
def test_mxfp4(layout: str, tmp_path: Path) -> None:
    """Experts of gpt_oss, in 32 bits, and in 16 with kernels, about as near as transformers gets with their values."""
    model, twin = mxfp4()
    devices = min(GPUS, 4)
    plan = plan_of(model.directory, devices, request_of(layout), {}, seed=4)
    check(model, plan, "auto", NEW, backend="cuda")
    halve(model.directory, tmp_path, torch.bfloat16)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.bfloat16, attn_implementation="eager")
    check_losses(model, loaded, plan_of(tmp_path, devices, request_of(layout), {}, seed=3), tmp_path, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("form", SOME)
@pytest.mark.parametrize("family", ROUNDED)
def test_kernels_say_what_torch_says(family: str, form: str, tmp_path: Path) -> None:
    """Of few rows and of more, but for rounding."""
    halve(quantised(family, form)[0].directory, tmp_path, torch.float16)
    check_kernels(tmp_path, min(GPUS, 2), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("form", SOME)
def test_passes_are_graphs(form: str, tmp_path: Path) -> None:
    """Of any mixture of prompts, and of steps of several spans, on one GPU."""
    halve(quantised("llama", form)[0].directory, tmp_path, torch.float16)
    check_passes(tmp_path, 1)
