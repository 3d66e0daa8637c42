"""Linear attention: its heads are an axis, and its state is a part of the cache that no token makes larger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve

import tpplan
from tests.family_models import hub_config, spec_of
from tests.later import transformers
from tests.published import sizes
from tpplan.core.axes import Axis
from tpplan.core.device import Device
from tpplan.core.plan import CACHE_KINDS, Cache, Request
from tpplan.files.codec import dumps
from tpplan.planfile import codec
from tpplan.planfile.verify import problems
from tpplan.planner.attempt import Attempt
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.ledger import cache_bytes_per_token, demands, ledger, sequence_cache_bytes, state_bytes
from tpplan.reports.inspect import inspect

if TYPE_CHECKING:
    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import SplitPlan

MIB = 2**20

#: Two layers of four key heads of 8 elements, with two value heads of 6 to each; behind each, a layer of attention.
SMALL: dict[str, Any] = {
    **sizes(vocab=640, hidden=64, dense=512, layers=4, q=4, kv=2, head_dim=16, context=4096),
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "pad_token_id": 0,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
#: Bytes of the state of one key head: the convolution's inputs in 16 bits, and two matrices in 32.
STATE = 3 * (8 + 8 + 2 * 6) * 2 + 2 * 8 * 6 * 4


def small(model_type: str = "qwen3_5_text", **keys: Any) -> ModelSpec:
    """Return a small model in bfloat16."""
    return spec_of({"model_type": model_type, **SMALL, **keys})


def planned(batch: int = 1, **keys: Any) -> SplitPlan:
    """Return a plan that gives one device three of the key heads and another one, cut by hand."""
    model = small(**keys)
    request = Request("reduce", "balanced", Cache("q4", 100 * batch), batch, 8, "idle")
    wanted = demands(model, request, 2)
    cuts = {
        Axis.KV_HEADS: (0, 1, 2),
        Axis.INTERMEDIATE: (0, 512, 512),
        Axis.VOCAB: (0, 640, 640),
        Axis.RESIDUAL: (0, 64, 64),
    }
    bounds = tuple({**cuts, Axis.LINEAR_HEADS: (0, 3, 4)}[demand.axis] for demand in wanted.axes)
    devices = (Device(name="x", budget_bytes=2**30),) * 2
    return Attempt(model, devices, request, wanted, bounds, ledger(bounds, wanted, devices, request)).plan()


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_the_state_is_what_transformers_keeps(model_type: str, dtype: str, tokens: int) -> None:
    """After a prompt of any length, and after another token; layers with attention keep what a token takes."""
    config = hub_config({"model_type": model_type, **SMALL, **(_EXPERTS if model_type == "qwen3_next" else {})})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    spec = spec_of({**config.to_dict(), "torch_dtype": dtype})
    item = {"bfloat16": 1, "float32": 2}[dtype]  # times the 16 bits of the cache fp16
    with torch.no_grad():
        cache = model(torch.randint(640, (3, tokens)), use_cache=True).past_key_values
        for length in (tokens, tokens + 1):
            linear = cache.layers[::2]
            states = [*(s for x in linear for kept in (x.conv_states, x.recurrent_states) for s in kept.values())]
            assert len(states) == 4
            assert sum(state.nbytes for state in states) == 3 * state_bytes(spec)
            kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers[1::2])
            assert kept == 3 * length * item * cache_bytes_per_token(spec, "fp16")
            model(torch.randint(640, (3, 1)), use_cache=True, past_key_values=cache)


def test_the_ledger_of_an_uneven_plan_by_hand() -> None:
    """Three of four key heads on one device: their columns, their states for each of five sequences, their buffers."""
    first, second = planned(5).memory
    heads = 2 * 5 * STATE  # two layers
    cached = 2 * 500 * 2 * 16 * 9 // 16  # a KV head in each of two layers, at 4.5 bits
    assert (first.cache_bytes, second.cache_bytes) == (3 * heads + cached, heads + cached)
    # Queries, keys, values and gates, two numbers for each value head, the output; kernels, dt_bias and A_log.
    columns = (2 * 8 + 3 * 2 * 6 + 2 * 2) * 64 + 3 * (2 * 8 + 2 * 6) + 2 * 2
    queries, heads_of_16 = 2 * 2 * 16 * 64 + 2 * 16 * 64, 2 * 16 * 64
    attention = 2 * (queries + heads_of_16 + 2 * 16)  # q with gates, o, k and v; norms of heads
    alike = 2 * (columns * 1 + 6) + attention + (4 * 2 + 1) * 64
    assert second.weights_bytes == 2 * alike
    dense = 4 * 3 * 512 * 64 + 2 * 640 * 64
    assert first.weights_bytes == 2 * (alike + 2 * 2 * columns + dense)


@pytest.mark.parametrize(("value_head_dim", "width"), [(6, 12), (3, 8)])
def test_each_key_head_takes_five_buffers(value_head_dim: int, width: int) -> None:
    """As wide as the wider of a key head and its two value heads, which is also what the plan says of the axis."""
    request = Request("reduce", "balanced", Cache("fp16", 1), 1, 100, "idle")
    (heads,) = (
        d for d in demands(small(linear_value_head_dim=value_head_dim), request, 1).axes if d.axis is Axis.LINEAR_HEADS
    )
    assert heads.width == width
    assert heads.cost(1, 4).workspace == 3 * 5 * -(-100 * width * 2 // 64) * 64


def test_attention_beside_linear_attention_has_room_for_its_gate() -> None:
    """Queries, their gates, keys and values of a KV head with two query heads; without linear attention no gates."""
    request = Request("reduce", "balanced", Cache("fp16", 1), 1, 100, "idle")
    for kind, buffers in (("linear_attention", 2 * 2 + 2), ("full_attention", 2 + 2)):
        model = small(layer_types=[kind, *["full_attention"] * 3])
        (heads,) = (d for d in demands(model, request, 1).axes if d.axis is Axis.KV_HEADS)
        assert heads.cost(0, 1).workspace == buffers * 100 * 16 * 2 + 2 * 64


def test_a_layer_of_linear_attention_needs_the_whole_output_to_gather() -> None:
    """In the layout gather, the matrix that leads back to the residual stream has the values of all heads as inputs."""
    model = small(linear_num_value_heads=64, intermediate_size=32)
    gather, reduce = (
        demands(model, Request(layout, "balanced", Cache("fp16", 1), 1, 32, "idle"), 1).common.workspace
        for layout in ("gather", "reduce")
    )
    assert gather - reduce == 32 * 64 * 6 * 2


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_tokens_take_nothing_in_layers_with_linear_attention(kind: str) -> None:
    """Whatever the kind of the cache, only the layers with attention grow; the state is the same for all."""
    model = small()
    both = inspect(model)
    assert state_bytes(model) == both.state_bytes_per_sequence == 2 * 4 * STATE
    each = cache_bytes_per_token(model, kind)
    assert each == 2 * 2 * (2 * 16 * CACHE_KINDS[kind] // 16)
    assert sequence_cache_bytes(model, kind, 999) == 999 * each + 2 * 4 * STATE
    assert getattr(both.max_context_cache_bytes, kind) == 4096 * each + 2 * 4 * STATE
    assert (both.linear_key_heads, both.linear_value_heads, both.kv_heads) == (4, 8, 2)


def test_a_model_without_attention_has_a_state_and_no_cache() -> None:
    """If no layer has full attention, there are no KV heads to cut, and tokens take nothing."""
    model = small(layer_types=["linear_attention"] * 4)
    assert cache_bytes_per_token(model, "fp16") == 0
    plan = tpplan.plan(model, tpplan.parse_devices("1GiB"), batch=3, max_rows=3)
    assert {split.axis for split in plan.splits} == {Axis.LINEAR_HEADS, Axis.INTERMEDIATE, Axis.VOCAB, Axis.RESIDUAL}
    assert plan.memory[0].cache_bytes == 3 * 4 * 4 * STATE


def test_the_longest_context_that_fits_leaves_room_for_the_state() -> None:
    """Of what remains beside everything else, the state of each sequence is taken off before tokens are counted."""
    model = small(linear_key_head_dim=512, linear_value_head_dim=512, max_position_embeddings=2**18)
    batch, state = 4, state_bytes(model)
    assert state > 16 * MIB
    needed = tpplan.plan(
        model, [Device(name="x", budget_bytes=2**30, overhead_bytes=0)], cache=Cache("fp16", 4), batch=batch, max_rows=4
    ).memory[0]
    room = needed.used_bytes + 40 * MIB
    device = Device(name="x", budget_bytes=room, overhead_bytes=0)
    with pytest.raises(InfeasibleError) as caught:
        tpplan.plan(model, [device], batch=batch, max_rows=4)
    context = int(next(s.value for s in caught.value.suggestions if s.kind == "context"))
    # A token takes its keys and values, and for each sequence a row in both RoPE tables.
    each = batch * cache_bytes_per_token(model, "fp16") + 2 * 16 * 2
    assert context == 40 * MIB // each // 256 * 256
    fits = tpplan.plan(model, [device], cache=Cache("fp16", batch * context), batch=batch, max_rows=4)
    assert fits.memory[0].cache_bytes == batch * (state + context * cache_bytes_per_token(model, "fp16"))


def test_a_plan_with_the_axis_is_saved_and_loaded() -> None:
    """The axis has its place behind all others, its layers, and the size of its heads."""
    plan = planned()
    assert codec.loads(dumps(plan)) == plan
    split = plan.splits[-1]
    assert (split.axis, split.layers, split.size, split.unit, split.width) == ("linear_heads", "0,2", 4, 1, 12)
    assert plan.bounds("linear_heads", layer=2) == (0, 3, 4)
    with pytest.raises(tpplan.TpplanError, match="has no axis linear_heads in layer 1"):
        plan.bounds(Axis.LINEAR_HEADS, layer=1)


@pytest.mark.parametrize(
    ("rule", "change", "words"),
    [
        ("TP004", {"size": 5}, "linear_heads ends at 4 on the last device, expected 5"),
        ("TP011", {"layers": ""}, "linear_heads is split layer by layer"),
        ("TP017", {"replicas": 2}, "is 2, but linear_heads is never repeated"),
    ],
)
def test_rules_hold_for_the_axis(rule: str, change: dict[str, Any], words: str) -> None:
    """What is wrong with a cut of the heads is found as for any other axis."""
    plan = planned()
    broken = evolve(plan, splits=(*plan.splits[:-1], evolve(plan.splits[-1], **change)))
    assert [(p.rule, words in p.message) for p in problems(broken) if p.rule == rule] == [(rule, True)]


def test_the_axis_comes_last() -> None:
    """TP015 knows its place."""
    plan = planned()
    broken = evolve(plan, splits=(plan.splits[-1], *plan.splits[:-1]))
    assert any(p.rule == "TP015" and "kv_heads 1,3 comes after linear_heads 0,2" in p.message for p in problems(broken))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"linear_num_value_heads": 9}, "9 value heads (linear_num_value_heads) are not a multiple of 4 key heads"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
        ({"linear_num_key_heads": 2**17}, "linear_num_key_heads is 131072"),
        ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim is '4'"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entry for 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "known are full_attention and linear_attention"),
    ],
)
def test_bad_configs_are_named(change: dict[str, Any], words: str) -> None:
    """An error names the key and what is wrong with it."""
    with pytest.raises(tpplan.ModelError) as caught:
        small(**change)
    assert words in caught.value.message
    assert caught.value.hint


def test_published_sizes_of_qwen3_5() -> None:
    """A nested config that leaves everything out is Qwen3.5-9B or 35B-A3B, as in the classes of transformers."""
    for inner, parameters in (("qwen3_5_text", 8_953_803_264), ("qwen3_5_moe_text", 34_660_610_688)):
        spec = spec_of({"model_type": inner.removesuffix("_text"), "text_config": {"model_type": inner}})
        assert spec.parameter_count == parameters
        assert spec == spec_of(hub_config({"model_type": spec.model_type}).to_dict())
