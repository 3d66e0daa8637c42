"""What a decoder's activations take of each device: no more than the plan's ledger has scratch for."""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tpplan
from tests.activations import activations
from tests.decoder_cases import CONFIGS, plan_of
from tests.flash_cases import flash_calls
from tests.weight_plans import fine_units
from tpplan import workspace
from tpplan.axes import bounds_of
from tpplan.decoder import Decoder, Prompt
from tpplan.decoder.sampling import likeliest
from tpplan.exec import compile as compile_plan
from tpplan.memory import demands
from tpplan.plan import Cache, Request
from tpplan.weights import load_weights
from tpplan.workspace import areas

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.flash_cases import FlashCalls
    from tpplan.plan import SplitPlan

__all__ = ["fine_units", "flash_calls"]  # fixtures

#: Shapes of activations that are to each other as those of models are, two or more passes of a prompt, and rows of
#: every expert.
_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
_LENGTH, _BATCH, _ROWS = 128, 8, 64
_SMALLER = {"hidden_size": 256, "head_dim": 32, "moe_intermediate_size": 160, "sliding_window": 24}


def made(model_type: str, directory: Path, **more: Any) -> Path:
    """Make a checkpoint of a family in 16 bits, with more in its config."""
    torch.manual_seed(1)
    special = CONFIGS[model_type]
    smaller = {key: value for key, value in _SMALLER.items() if special.get(key)}
    config = AutoConfig.for_model(**{**_SIZES, "model_type": model_type, **special, **smaller, **more})
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scratch be as little beside what these models take as it is beside what larger ones do."""
    monkeypatch.setattr(workspace, "LEAST_BYTES", 2**16)


def planned(
    directory: Path,
    layout: str,
    shares: tuple[int, ...],
    cache: Cache,
    *,
    rows: int = _ROWS,
    batch: int = _BATCH,
    others: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> SplitPlan:
    """Return a plan that cuts every axis by shares, and some by others."""
    request = Request(layout, "balanced", cache, batch, rows, "idle")
    cut = {}
    for demand in demands(tpplan.read_model(directory), request, len(shares)).axes:
        own = others.get(demand.axis.value, shares)
        ends = [round(demand.units * sum(own[:i]) / sum(own)) for i in range(len(own) + 1)]
        cut[demand.axis] = bounds_of([end - start for start, end in pairwise(ends)], demand.unit, demand.size)
    return plan_of(directory, len(shares), request, cut, seed=0)


def taken(directory: Path, plan: SplitPlan, kinds: int = 1000) -> dict[int, float]:
    """Return the peak of prompts and of a step of all sequences, by device, as a share of the scratch.

    One prompt goes on to the end of the cache, in more than one pass; others are read together.

    Args:
        directory: the model's.
        plan: to run by.
        kinds: of tokens in the prompts.
    """
    room = [area.scratch_bytes for area in areas(plan.splits, plan.model.dtype, plan.request)]
    request = plan.request
    batch, rows, length = request.batch, request.max_rows, request.cache.tokens // request.batch
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        decoder = Decoder(context, directory, load_weights(plan, directory, context))
        used = context.all_devices
        tokens, positions = ([torch.full((batch,), n) for _ in used] for n in (3, length - 1))
        with activations(decoder) as counted:
            count = min(length - 1, rows + rows // 2 + 1)
            decoder.prefill([i % kinds for i in range(count)], batch - 1, length - 1 - count)
            decoder.read([Prompt([i % kinds] * (rows // batch + i % 2), i) for i in range(batch)])
            assert not any(counted.live.values())
            for device, *tensors in zip(used, tokens, positions, strict=True):
                for tensor in tensors:
                    counted.own(tensor, device)
            likeliest(decoder.context, decoder.decode(tokens, positions))
    return {device: counted.peak[device] / room[device] for device in used}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_activations_fit_in_the_scratch_of_the_ledger(model_type: str, tmp_path: Path) -> None:
    """On one device and on uneven ones, in both layouts."""
    directory = made(model_type, tmp_path)
    for layout in ("reduce", "gather"):
        for shares in ((1,), (3, 1)):
            plan = planned(directory, layout, shares, Cache("fp16", _BATCH * _LENGTH))
            found = taken(directory, plan)
            assert all(0.4 < share <= 1 for share in found.values()), (layout, shares, found)


@pytest.mark.parametrize("kind", ["fp8", "q8"])
@pytest.mark.parametrize("shares", [(1,), (1,) * 4])
def test_caches_of_long_texts_do_too(shares: tuple[int, ...], kind: str, tmp_path: Path) -> None:
    """Of which as much is in 16 bits at a time as there is room for: some heads, one, or some tokens of it."""
    directory = made("qwen3", tmp_path)
    found = taken(directory, planned(directory, "reduce", shares, Cache(kind, _BATCH * 8 * _LENGTH)))
    assert all(share <= 1 for share in found.values()), found


@pytest.mark.parametrize("kind", ["fp16", "q8"])
@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_windows_do_too(model_type: str, kind: str, tmp_path: Path) -> None:
    """Which are hidden from as many queries of a pass at a time as there is room for masks."""
    for window in (24, 4 * _LENGTH):
        directory = made(model_type, tmp_path / str(window), sliding_window=window)
        found = taken(directory, planned(directory, "reduce", (3, 1), Cache(kind, _BATCH * 8 * _LENGTH)))
        assert all(share <= 1 for share in found.values()), (window, found)


def test_rows_of_the_same_experts_do_too(tmp_path: Path) -> None:
    """Equal tokens are routed to the same experts, which compute some of them at a time."""
    for model_type in ("mixtral", "qwen3_moe"):
        directory = made(model_type, tmp_path / model_type)
        for shares in ((1,), (3, 1)):
            found = taken(directory, planned(directory, "reduce", shares, Cache("fp16", _BATCH * _LENGTH)), kinds=1)
            assert all(share <= 1 for share in found.values()), (shares, found)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_devices_with_parts_of_some_axes_do_too(model_type: str, tmp_path: Path) -> None:
    """Heads alone, an MLP alone, vocabulary alone and a part of the residual stream alone."""
    directory = made(model_type, tmp_path)
    cuts = {"kv_heads": (1, 0, 0, 0), "vocab": (0, 0, 1, 0), "residual": (0, 0, 0, 1)}
    for layout, kind in (("reduce", "fp8"), ("gather", "fp16")):
        plan = planned(directory, layout, (0, 1, 0, 0), Cache(kind, _BATCH * 2 * _LENGTH), others=cuts)
        found = taken(directory, plan)
        assert all(share <= 1 for share in found.values()), (layout, kind, found)


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("rows", [1, 32])
def test_passes_of_as_many_rows_as_sequences_do_too(
    rows: int, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step is as large as any pass, down to one row: there is the least scratch then."""
    monkeypatch.undo()
    directory = made(model_type, tmp_path)
    plan = planned(directory, "reduce", (3, 1), Cache("q8", rows * 8 * _LENGTH), rows=rows, batch=rows)
    found = taken(directory, plan)
    assert all(share <= 1 for share in found.values()), found


@pytest.mark.parametrize("layout", ["reduce", "gather"])
def test_prompts_that_attend_at_once_do_too(layout: str, tmp_path: Path, flash_calls: FlashCalls) -> None:
    """Wherever they go on, and if a pass of them is to be a graph."""
    directory = made("llama", tmp_path)
    for shares in ((1,), (3, 1)):
        plan = planned(directory, layout, shares, Cache("fp16", _BATCH * _LENGTH))
        room = [area.scratch_bytes for area in areas(plan.splits, plan.model.dtype, plan.request)]
        for graphs in (False, True):
            with compile_plan(plan, backend="cpu", scratch=False) as context:
                decoder = Decoder(context, directory, load_weights(plan, directory, context), graphs=graphs)
                with activations(decoder) as counted:
                    decoder.read([Prompt([*range(_ROWS // _BATCH)], i, 0 if graphs else 9 * i) for i in range(_BATCH)])
            assert all(0.4 < counted.peak[device] / room[device] <= 1 for device in context.all_devices)
    assert flash_calls
