"""Strategy ``latency``: mixtures with several formats, beside all cuts there are and arithmetic by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve, frozen
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.planning_cases import read_config
from tests.published import MODELS, mla
from tpplan.core.axes import Axis, minimum_units
from tpplan.core.device import Device
from tpplan.core.plan import Cache, SplitPlan
from tpplan.hardware.spec import parse_devices
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.plan import plan
from tpplan.planner.speed import predict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.core.model import ModelSpec

GIB = 2**30
FAMILIES = ("qwen2_moe", "deepseek_v3", "glm4_moe", "kimi_k2")
#: Routed experts in 4 bits, everything else in 16.
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_expert.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}
#: All but the output matrix and the router in blocks of 8 bits.
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
#: As on the hub.
KIMI_K2_THINKING = MODELS["Kimi-K2"] | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "max_position_embeddings": 262_144,
    "torch_dtype": "bfloat16",
    "quantization_config": INT4,
}


@frozen
class Mixture:
    """A small model with routed and shared experts.

    Attributes:
        family: its ``model_type``.
        hidden: width of the residual stream.
        experts: number of routed experts.
        chosen: of these, those of a token.
        width: columns of a routed expert.
        shared: columns of the shared experts, in widths of a routed one.
        heads: attention heads.
        vocab: tokens of the vocabulary.
        quantisation: what the config says of it.
    """

    family: str
    hidden: int
    experts: int
    chosen: int
    width: int
    shared: int
    heads: int = 16
    vocab: int = 4096
    quantisation: dict[str, Any] | None = None

    @property
    def model(self) -> ModelSpec:
        """The model: three layers with experts, behind one without in families that have such."""
        config = {
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": 8 * self.width,
            "moe_intermediate_size": self.width,
            "num_hidden_layers": 4,
            "vocab_size": self.vocab,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": 128,
            "num_experts_per_tok": self.chosen,
            "max_position_embeddings": 4096,
            "torch_dtype": "bfloat16",
        }
        if self.family == "qwen2_moe":
            config |= {"num_experts": self.experts, "shared_expert_intermediate_size": self.shared * self.width}
            config |= {"mlp_only_layers": [0]}
        else:
            config |= {"n_routed_experts": self.experts, "n_shared_experts": self.shared, "first_k_dense_replace": 1}
        if self.family in {"deepseek_v3", "kimi_k2"}:
            config |= mla(1536, 128, 128)
        return read_config(config | ({"quantization_config": self.quantisation} if self.quantisation else {}))

    def times(self, routed: int, shared: int) -> float:
        """Return the bytes that a device with so many columns reads in a layer for one token, as long as that takes.

        Kernels take 2.15 times as long as reading for experts in 4 bits, 1.5 times in 8 and 1.03 times in 16, 1.08
        times for other matrices in 8 bits, and 1.01 times in 16. Of 32 weights in 4 bits there is a scale in 16 bits.
        """
        columns = 3 * self.hidden
        each = 2 * 1.03 if self.quantisation is None else 1.5 if self.quantisation is FP8 else 2.15 / 2 + 1.03 / 16
        beside = 1.08 if self.quantisation is FP8 else 2 * 1.01
        router = 2 * 1.01 * self.hidden * self.experts if routed else 0
        return self.chosen * columns * routed * each + columns * shared * beside + router


def cut(made: SplitPlan, axis: Axis) -> list[int]:
    """Return the elements of an axis on each device."""
    return [b - a for a, b in pairwise(made.bounds(axis))]


def alike(count: int, bandwidth: int = 10**12, gib: int = 64) -> list[Device]:
    """Return equal devices."""
    one = Device(name="x", budget_bytes=gib * GIB, overhead_bytes=0, bandwidth_bytes_per_second=bandwidth)
    return [one] * count


def made_for(model: ModelSpec, devices: Sequence[Device], batch: int = 1, tokens: int = 1024) -> SplitPlan:
    """Return the plan by ``latency``."""
    return plan(model, devices, cache=Cache(tokens=tokens * batch), batch=batch, strategy="latency", max_rows=64)


def time_of(made: SplitPlan, model: ModelSpec) -> int:
    """Return the nanoseconds of a step of the plan's batch with a full cache."""
    found = predict(made, model)
    assert found
    return found.decode[-1].total_ns


@pytest.mark.parametrize("tokens", [4096, 131072])
def test_kimi_k2_thinking_is_cut_evenly_over_equal_devices(tokens: int) -> None:
    """Its routed experts have 4 bits, its shared ones 16: what kernels take of each counts, not their bytes alone."""
    model = read_config(KIMI_K2_THINKING)
    made = plan(model, parse_devices("8xH200"), cache=Cache(tokens=tokens), strategy="latency")
    assert cut(made, Axis.EXPERT_INTERMEDIATE) == cut(made, Axis.SHARED_INTERMEDIATE) == [256] * 8
    assert cut(made, Axis.KV_HEADS) == [8] * 8
    assert cut(made, Axis.INTERMEDIATE) == [2304] * 8
    assert cut(made, Axis.VOCAB) == [20480] * 8


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(2, 8),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((2, 4)),
    st.sampled_from((1, 4, 32)),
    st.builds(
        Mixture,
        family=st.sampled_from(FAMILIES),
        hidden=st.sampled_from((1024, 2048, 7168)),
        experts=st.sampled_from((16, 64, 384)),
        chosen=st.sampled_from((2, 8)),
        width=st.just(0),
        shared=st.sampled_from((1, 2, 8)),
        quantisation=st.sampled_from((None, INT4, FP8)),
    ),
)
@example(8, 1, 1, 1, Mixture("kimi_k2", 7168, 384, 2, 0, 8, quantisation=INT4))  # its routers are read for two experts
@example(4, 1, 1, 1, Mixture("qwen2_moe", 2048, 64, 4, 0, 4))
def test_equal_devices_get_equal_parts(devices: int, parts: int, heads: int, batch: int, mixture: Mixture) -> None:
    """Of every axis that can be divided so, whatever its format, the router and the batch."""
    width = (256 if mixture.quantisation is FP8 else 64) * parts * devices
    model = evolve(mixture, width=width, heads=heads * devices, vocab=2048 * devices).model
    made = made_for(model, alike(devices), batch)
    for split in (split for split in made.splits if split.axis is not Axis.RESIDUAL):
        assert split.size % (devices * split.unit) == 0
        least = split.unit * minimum_units(split.axis, split.size, split.unit)
        assert {b - a for a, b in pairwise(split.bounds)} == {split.size // devices} or split.size // devices < least


def divided(units: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to divide units among devices."""
    if devices == 1:
        yield (units,)
        return
    for n in range(units + 1):
        yield from ((n, *others) for others in divided(units - n, devices - 1))


@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(st.sampled_from((2, 3, 5, 9, 18)), min_size=2, max_size=3),
    st.builds(
        Mixture,
        family=st.sampled_from(FAMILIES),
        hidden=st.sampled_from((1024, 2048)),
        experts=st.sampled_from((16, 128, 384)),
        chosen=st.sampled_from((2, 8)),
        width=st.sampled_from((128, 256)),
        shared=st.sampled_from((1, 2)),
        quantisation=st.sampled_from((None, INT4)),
    )
    | st.builds(
        Mixture,
        family=st.sampled_from(FAMILIES),
        hidden=st.just(2048),
        experts=st.sampled_from((16, 384)),
        chosen=st.sampled_from((2, 8)),
        width=st.sampled_from((512, 1024)),
        shared=st.just(1),
        quantisation=st.just(FP8),
    ),
)
def test_no_cut_of_the_experts_is_faster(rates: list[int], mixture: Mixture) -> None:
    """Of all cuts of routed and shared experts over devices of some bandwidths, by arithmetic of their own."""
    assume(len(set(rates)) > 1)
    model = mixture.model
    made = made_for(model, [alike(1, rate * 10**11)[0] for rate in rates])
    axes = Axis.EXPERT_INTERMEDIATE, Axis.SHARED_INTERMEDIATE
    splits = [made.split(axis) for axis in axes]

    def time(routed: Sequence[int], shared: Sequence[int]) -> float:
        return max(mixture.times(a, b) / rate for a, b, rate in zip(routed, shared, rates, strict=True))

    ways = [
        [
            [n * split.unit for n in way]
            for way in divided(split.size // split.unit, len(rates))
            if all(not n or n >= minimum_units(split.axis, split.size, split.unit) for n in way)
        ]
        for split in splits
    ]
    fastest = min(time(routed, shared) for routed in ways[0] for shared in ways[1])
    assert time(cut(made, axes[0]), cut(made, axes[1])) <= 1.0025 * fastest


@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(st.sampled_from(((8, 9), (8, 18), (4, 5), (4, 9), (2, 3))), min_size=2, max_size=5),
    st.sampled_from(FAMILIES),
    st.sampled_from((None, INT4, FP8)),
    st.integers(0, 100),
)
def test_order_and_room(kinds: list[tuple[int, int]], family: str, quantisation: Any, more: int) -> None:
    """Devices in another order get the same parts, but among equal ones; with more memory, no step takes longer."""
    model = Mixture(family, 2048, 64, 4, 2048, 2, quantisation=quantisation).model
    tight = model.weight_bytes // (2 * GIB * len(kinds)) + 1
    devices = [evolve(alike(1, rate * 10**11)[0], budget_bytes=gib * tight * GIB // 4) for gib, rate in kinds]

    def parts(made: SplitPlan) -> list[tuple[int, ...]]:
        costly = [split for split in made.splits if split.axis is not Axis.RESIDUAL]
        rows = zip(*([b - a for a, b in pairwise(split.bounds)] for split in costly), strict=True)
        return sorted(
            (d.budget_bytes, d.bandwidth_bytes_per_second, *row) for d, row in zip(made.devices, rows, strict=True)
        )

    try:
        made = made_for(model, devices)
    except InfeasibleError:
        assume(condition=False)
    assert parts(made_for(model, devices[::-1])) == parts(made)
    i = more % len(devices)
    devices[i] = evolve(devices[i], budget_bytes=devices[i].budget_bytes * (101 + more) // 100)
    assert time_of(made_for(model, devices), model) <= 1.001 * time_of(made, model)
