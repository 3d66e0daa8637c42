"""ExLlamaV2's cut points, recorded from the original."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.planning_cases import spec
from tpplan.core.axes import Axis
from tpplan.core.device import Device
from tpplan.core.plan import CACHE_KINDS, Cache, Request
from tpplan.planner.attempt import attempt
from tpplan.planner.exllamav2 import integer_split, left_after_attention
from tpplan.planner.request import resolve

CASES = json.loads(Path(__file__).parents[1].joinpath("data", "exllamav2_splits.json").read_text())
AXES = {"kv": Axis.KV_HEADS, "id": Axis.INTERMEDIATE, "vc": Axis.VOCAB, "rs": Axis.RESIDUAL, "q": Axis.Q_HEADS}


def _kind(name: str) -> str:
    return {"8bit": "fp8"}.get(name, name)


def _slices(counts: list[int], unit: int) -> list[list[int]]:
    """The original's form of a split: device, start, end of each part."""
    slices, start = [], 0
    for device, count in enumerate(counts):
        if count:
            slices.append([device, start * unit, (start + count) * unit])
        start += count
    return slices


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_every_recorded_cut_point_is_reproduced(case: dict[str, Any]) -> None:
    """All 60 recordings of the original, made with its own attention weights, give the same five splits."""
    given, expected = case["input"], case["output"]
    budgets = [gb * 1024 for gb in given["gpu_split_gb"]]
    tokens = given["expect_cache_tokens"] or given["max_seq_len"] * given["max_batch_size"]
    kv = integer_split(given["kv_heads"], budgets)
    elements = 2 * given["kv_heads"] * given["head_dim"] * given["layers"] * tokens
    cache = elements * CACHE_KINDS[_kind(given["cache"])] // 16
    left = left_after_attention(budgets, kv, cache, [given["attention_bytes_per_layer"]] * given["layers"])
    assert _slices(kv, 1) == expected["kv"]
    assert _slices(kv, given["q_heads"] // given["kv_heads"]) == expected["q"]
    assert _slices(integer_split(given["intermediate_size"] // 128, left, 2), 128) == expected["id"]
    assert _slices(integer_split(-(-given["vocab_size"] // 32), left, 16), 32) == expected["vc"]
    assert _slices(integer_split(given["hidden_size"] // 32, left, 8), 32) == expected["rs"]


def _attention_bytes(given: dict[str, Any]) -> int:
    heads = given["q_heads"] * 2 + given["kv_heads"] * 2
    return int(given["hidden_size"] * given["head_dim"] * heads * 2)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["input"]["attention_bytes_per_layer"] == _attention_bytes(c["input"])]
)
def test_the_strategy_cuts_as_the_original_does(case: dict[str, Any]) -> None:
    """The strategy ``exllamav2``, from a model's config to bounds, gives the recorded splits of 16-bit models."""
    given, expected = case["input"], case["output"]
    model = spec(
        hidden_size=given["hidden_size"],
        intermediate_size=given["intermediate_size"],
        vocab_size=given["vocab_size"],
        num_attention_heads=given["q_heads"],
        num_key_value_heads=given["kv_heads"],
        head_dim=given["head_dim"],
        num_hidden_layers=given["layers"],
    )
    tokens = given["expect_cache_tokens"] or given["max_seq_len"] * given["max_batch_size"]
    cache = Cache(_kind(given["cache"]), tokens)
    request = resolve(model, Request("gather", "exllamav2", cache, 1, 1, "idle"))
    devices = tuple(Device(name=str(gb), budget_bytes=int(gb * 2**30)) for gb in given["gpu_split_gb"])
    found = attempt(model, devices, request)
    assert found is not None
    plan = found.plan()
    for name, axis in AXES.items():
        assert [[s.device, s.start, s.end] for s in plan.slices(axis)] == expected[name], axis


def test_a_split_that_attention_fills_completely_is_no_split() -> None:
    """Where the original divides by zero, there is no attempt, and no exception of arithmetic either."""
    model = spec(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8)
    request = resolve(model, Request("", "exllamav2", Cache("fp16", 4096), 1, 1, "idle"))
    devices = (Device(name="small", budget_bytes=2**30),) * 2
    assert attempt(model, devices, request) is None
