"""Replicated KV heads by ``latency``: beside all cuts that there are, by what the decoder is predicted to take."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.planning_cases import spec
from tpplan.core.axes import Axis
from tpplan.core.device import Device
from tpplan.core.plan import Cache, SplitPlan
from tpplan.hardware.spec import parse_devices
from tpplan.models.config import Config
from tpplan.models.families import spec_from_config
from tpplan.models.reader import read_model
from tpplan.planner.ledger import demands, ledger
from tpplan.planner.plan import plan
from tpplan.planner.speed import predict

if TYPE_CHECKING:
    from tpplan.core.model import ModelSpec

EXAMPLES = Path(__file__).parents[2] / "examples"
GIB = 2**30
BANDWIDTHS = (2, 3, 5, 9, 18)
#: Falcon-H1-0.5B with four layers.
FALCON: dict[str, Any] = {
    "model_type": "falcon_h1",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "vocab_size": 32784,
    "max_position_embeddings": 2**17,
    "torch_dtype": "bfloat16",
}


def time_of(made: SplitPlan, model: ModelSpec) -> int:
    """Return the nanoseconds of a step with a full cache."""
    found = predict(made, model)
    assert found
    return found.decode[0].total_ns


def other_cuts(made: SplitPlan, model: ModelSpec) -> list[SplitPlan]:
    """Return the plans that cut the KV heads otherwise, with one copy on each device at least, and fit."""
    heads, group = made.split(Axis.KV_HEADS), made.split(Axis.Q_HEADS).size // made.split(Axis.KV_HEADS).size
    wanted, found = demands(model, made.request, len(made.devices)), []
    for inner in combinations(range(1, heads.size), len(made.devices) - 1):
        bounds = (0, *inner, heads.size)
        cuts = {Axis.KV_HEADS: bounds, Axis.Q_HEADS: tuple(group * b for b in bounds)}
        splits = tuple(evolve(s, bounds=cuts.get(s.axis, s.bounds)) for s in made.splits)
        rows = {s.axis: s.bounds for s in splits}
        memory = ledger([rows[d.axis] for d in wanted.axes], wanted, made.devices, made.request)
        if all(entry.free_bytes >= 0 for entry in memory):
            found.append(evolve(made, splits=splits, memory=memory))
    return found


@settings(max_examples=examples(20))
@given(
    st.sampled_from(((12, 2), (14, 2), (7, 1), (18, 3))),
    st.lists(st.sampled_from(BANDWIDTHS), min_size=4, max_size=4),
    st.sampled_from((64, 1024, 16384)),
    st.sampled_from((0, 10, 4)),
)
def test_no_other_cut_is_faster(heads: tuple[int, int], rates: list[int], tokens: int, slack: int) -> None:
    """Of all cuts of the heads that fit beside the other axes as planned, none is predicted to be faster."""
    model = spec(num_attention_heads=heads[0], num_key_value_heads=heads[1], max_position_embeddings=2**16)
    asked: dict[str, Any] = {"cache": Cache("fp16", tokens), "max_rows": 1, "strategy": "latency", "kv": "replicate"}
    devices = [
        Device(name="x", budget_bytes=4 * GIB, overhead_bytes=0, bandwidth_bytes_per_second=rate * 10**11)
        for rate in rates
    ]
    made = plan(model, devices, **asked)
    if slack:
        share = sum(entry.used_bytes for entry in made.memory) // 4
        made = plan(model, [evolve(d, budget_bytes=share + share // slack + 2**18) for d in devices], **asked)
    assert made.split(Axis.KV_HEADS).replicas > 1
    others = other_cuts(made, model)
    assert made.splits in [other.splits for other in others]
    assert time_of(made, model) * 1000 <= min(time_of(other, model) for other in others) * 1001


def both_cuts(made: SplitPlan) -> list[SplitPlan]:
    """Return the plans that cut KV heads and Mamba's heads otherwise, with one copy of the former on each device."""
    heads, mamba = made.split(Axis.KV_HEADS), made.split(Axis.LINEAR_HEADS)
    group, devices, found = made.split(Axis.Q_HEADS).size // heads.size, len(made.devices), []
    for inner in combinations(range(1, heads.size), devices - 1):
        bounds = (0, *inner, heads.size)
        for ends in combinations_with_replacement(range(0, mamba.size + 1, mamba.unit), devices - 1):
            cuts = {Axis.KV_HEADS: bounds, Axis.Q_HEADS: tuple(group * bound for bound in bounds)}
            cuts[Axis.LINEAR_HEADS] = (0, *ends, mamba.size)
            found.append(evolve(made, splits=tuple(evolve(s, bounds=cuts.get(s.axis, s.bounds)) for s in made.splits)))
    return found


@settings(max_examples=examples(12), deadline=None)
@given(
    st.sampled_from(((8, 2, 24), (12, 2, 16), (7, 1, 20))),
    st.lists(st.sampled_from(BANDWIDTHS), min_size=3, max_size=3),
    st.sampled_from((1024, 16384, 65536)),
)
@example((8, 2, 24), [5, 5, 18], 16384)
@example((8, 2, 24), [9, 3, 2], 16384)
def test_heads_beside_others_in_a_stage(heads: tuple[int, int, int], rates: list[int], tokens: int) -> None:
    """Where Mamba's heads are computed beside those of attention, no cut of both is predicted to be much faster."""
    config = FALCON | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "mamba_n_heads": heads[2]}
    model = spec_from_config(Config(config | {"mamba_d_ssm": 64 * heads[2]}, "config.json"), "falcon")
    devices = [
        Device(name="x", budget_bytes=8 * GIB, overhead_bytes=0, bandwidth_bytes_per_second=rate * 10**11)
        for rate in rates
    ]
    made = plan(model, devices, cache=Cache("fp16", tokens), max_rows=1, strategy="latency", kv="replicate")
    assert made.split(Axis.KV_HEADS).replicas > 1
    others = both_cuts(made)
    assert made.splits in [other.splits for other in others]
    assert time_of(made, model) * 100 <= min(time_of(other, model) for other in others) * 102


@pytest.mark.parametrize("gpus", ["RTX4090,5xRTX3060", "3xRTX3060,RTX4090,2xRTX3060", "H100,6xRTX4090"])
def test_slow_devices_have_copies_of_one_head(gpus: str) -> None:
    """With a long cache, devices that are alike read one head each, whichever of its copies they hold."""
    model = read_model(EXAMPLES / "models/Qwen2.5-7B")
    made = plan(model, parse_devices(gpus), cache=Cache("fp16", 32768), strategy="latency", kv="replicate")
    heads = made.split(Axis.KV_HEADS)
    read = [len({copy // heads.replicas for copy in range(a, b)}) for a, b in pairwise(heads.bounds)]
    fast = max(range(len(read)), key=lambda i: made.devices[i].bandwidth_bytes_per_second)
    assert {count for i, count in enumerate(read) if i != fast} == {1}
