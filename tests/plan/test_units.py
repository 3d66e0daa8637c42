"""What a cut is made of: units that are as fine as weights allow, and heads that are repeated."""

from __future__ import annotations

import pytest
from attrs import evolve

from tests.plan.memory_models import model
from tests.planning_cases import spec
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache, Request
from tpplan.planner.ledger import axis_unit, demands


@pytest.mark.parametrize(
    ("axis", "size", "unit"),
    [
        (Axis.INTERMEDIATE, 14336, 128),
        (Axis.INTERMEDIATE, 2880, 64),
        (Axis.INTERMEDIATE, 1856, 64),
        (Axis.INTERMEDIATE, 11, 1),
        (Axis.RESIDUAL, 4096, 32),
        (Axis.RESIDUAL, 4544, 32),
        (Axis.RESIDUAL, 2056, 8),
        (Axis.VOCAB, 202048, 32),
        (Axis.VOCAB, 50257, 32),
        (Axis.VOCAB, 7, 7),
        (Axis.KV_HEADS, 71, 1),
    ],
)
def test_units_relax_where_the_default_does_not_divide(axis: Axis, size: int, unit: int) -> None:
    """128, 32 and 1, or the largest power of two below that divides the size; vocab keeps 32 and has a ragged end."""
    assert axis_unit(axis, size) == unit


@pytest.mark.parametrize(
    ("name", "layout", "expected"),
    [
        ("llama", "reduce", {Axis.KV_HEADS: 1, Axis.INTERMEDIATE: 128, Axis.VOCAB: 32, Axis.RESIDUAL: 32}),
        ("gpt_oss", "reduce", {Axis.KV_HEADS: 1, Axis.EXPERT_INTERMEDIATE: 32, Axis.VOCAB: 32, Axis.RESIDUAL: 32}),
        # Groups of 64 rows, words of 8 outputs.
        ("gptq", "reduce", {Axis.KV_HEADS: 1, Axis.INTERMEDIATE: 128, Axis.VOCAB: 32, Axis.RESIDUAL: 32}),
        ("awq mixtral", "reduce", {Axis.KV_HEADS: 1, Axis.EXPERT_INTERMEDIATE: 64, Axis.VOCAB: 32, Axis.RESIDUAL: 32}),
        # Blocks of 128 × 128: two heads of 64, and only in one layout the residual stream.
        ("fp8", "reduce", {Axis.KV_HEADS: 2, Axis.INTERMEDIATE: 128, Axis.VOCAB: 32, Axis.RESIDUAL: 32}),
        ("fp8", "gather", {Axis.KV_HEADS: 2, Axis.INTERMEDIATE: 128, Axis.VOCAB: 32, Axis.RESIDUAL: 128}),
    ],
)
def test_units_rise_to_what_the_weights_are_stored_in(name: str, layout: str, expected: dict[Axis, int]) -> None:
    """No cut goes through a packed word, a quantisation group or a block."""
    wanted = demands(model(name), Request(layout, "balanced", Cache("fp16", 1), 1, 1, "idle"), 2)
    assert {d.axis: d.unit for d in wanted.axes} == expected


def test_replicated_heads_are_held_once_and_cost_every_device_that_has_one() -> None:
    """Two heads for four devices: each half of a head's query heads, and all of the head's keys, values and cache."""
    chosen = spec(num_key_value_heads=2, num_attention_heads=8, num_hidden_layers=1, head_dim=64)
    request = Request("reduce", "balanced", Cache("fp16", 100), 1, 1, "replicate")
    (kv,) = (d for d in demands(chosen, request, 4).axes if d.axis is Axis.KV_HEADS)
    assert (kv.size, kv.replicas, kv.group) == (4, 2, 2)
    head, queries = 2 * 2 * 64 * 512, 2 * 2 * (64 * 512) * 2
    assert [kv.cost(i, i + 1).weights for i in range(4)] == [head + queries] * 4
    assert [kv.cost(i, i + 1).cache for i in range(4)] == [100 * 2 * 64 * 2] * 4
    assert kv.cost(0, 2).cache == 100 * 2 * 64 * 2  # both replicas of one head
    assert kv.cost(1, 3).cache == 2 * 100 * 2 * 64 * 2  # one of each


@pytest.mark.parametrize("replicas", [2, 3, 4, 6])
def test_every_slice_of_replicated_heads_is_covered_by_what_planning_charges(replicas: int) -> None:
    """Wherever a slice begins and ends among the replicas; for slices that touch the most heads, to the last byte."""
    chosen = spec(num_key_value_heads=3, num_attention_heads=3 * replicas)
    request = Request("reduce", "balanced", Cache("fp16", 96), 1, 1, "replicate")
    (kv,) = (d for d in demands(chosen, request, 3 * replicas).axes if d.axis is Axis.KV_HEADS)
    assert kv.replicas == replicas
    spare = [
        kv.fixed_cost().bytes + (end - start) * kv.unit_cost().bytes - kv.cost(start, end).bytes
        for start in range(kv.size)
        for end in range(start + 1, kv.size + 1)
    ]
    assert 0 <= min(spare) <= 4 * kv.size  # rounding up, once for each unit and bucket


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "devices", "expected"),
    [
        (8, 8, 64, 1),
        (8, 2, 2, 1),
        (8, 2, 3, 2),
        (8, 2, 5, 4),
        (8, 2, 64, 4),
        (12, 2, 6, 3),
        (12, 2, 5, 3),
        (7, 1, 2, 7),
    ],
)
def test_heads_are_repeated_no_more_than_they_must(q_heads: int, kv_heads: int, devices: int, expected: int) -> None:
    """The least factor that gives every device a head, among those that divide the query heads of a group."""
    chosen = spec(num_key_value_heads=kv_heads, num_attention_heads=q_heads)
    request = Request("reduce", "balanced", Cache("fp16", 1), 1, 1, "replicate")
    (kv,) = (d for d in demands(chosen, request, devices).axes if d.axis is Axis.KV_HEADS)
    assert kv.replicas == expected
    (idle,) = (d for d in demands(chosen, evolve(request, kv="idle"), devices).axes if d.axis is Axis.KV_HEADS)
    assert (idle.replicas, idle.size) == (1, kv_heads)
