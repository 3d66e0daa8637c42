"""The workspace: one function for planner, rules and executor, and its arithmetic by hand."""

from __future__ import annotations

import random

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning_cases import spec, tiny_model
from tests.strategies import bounds
from tpplan.axes import Axis
from tpplan.devices import Device
from tpplan.memory import demands, ledger
from tpplan.plan import KV_MODES, LAYOUTS, Cache, Request, Split, SplitPlan
from tpplan.planner import Attempt
from tpplan.workspace import align, workspace_bytes

MIB = 2**20


@st.composite
def plans(draw: st.DrawFn) -> SplitPlan:
    """A model of a random family, cut at random for one to six devices, some of them idle."""
    model = tiny_model(random.Random(draw(st.integers(0, 999))))
    batch = draw(st.sampled_from((1, 5)))
    rows = draw(st.sampled_from((5, 64, 2049)))
    layout, kv = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(KV_MODES))
    request = Request(layout, "balanced", Cache("q4", 999), batch, rows, kv)
    count = draw(st.integers(1, 6))
    wanted = demands(model, request, count)
    cuts = tuple(draw(bounds(d.axis, d.size, d.unit, count)) for d in wanted.axes)
    devices = (Device(name="x", budget_bytes=2**40),) * count
    return Attempt(model, devices, request, wanted, cuts, ledger(cuts, wanted, devices)).plan()


@settings(max_examples=200)
@given(plans())
def test_the_ledger_has_what_the_executor_will_allocate(plan: SplitPlan) -> None:
    """From the plan's splits alone, the bytes are those that planning put into the ledger."""
    assert workspace_bytes(plan.splits, plan.model.dtype, plan.request) == tuple(
        entry.workspace_bytes for entry in plan.memory
    )


@given(plans(), st.integers(1, 999))
def test_more_rows_never_take_less(plan: SplitPlan, more: int) -> None:
    """Larger passes need as much or more on every device in use, and nothing on an idle one."""
    larger = evolve(plan.request, max_rows=plan.request.max_rows + more)
    before = workspace_bytes(plan.splits, plan.model.dtype, plan.request)
    for now, then in zip(before, workspace_bytes(plan.splits, plan.model.dtype, larger), strict=True):
        assert (now == then == 0) or now < then


def splits(kv: tuple[int, ...], intermediate: tuple[int, ...], vocab: tuple[int, ...]) -> list[Split]:
    """The cuts of a model of Llama-3.1-8B's sizes."""
    return [
        Split(axis=Axis.KV, layers="0-31", size=8, unit=1, width=128, bounds=kv),
        Split(axis=Axis.Q, layers="0-31", size=32, unit=4, width=128, bounds=tuple(4 * b for b in kv)),
        Split(axis=Axis.ID, layers="0-31", size=14336, unit=128, bounds=intermediate),
        Split(axis=Axis.VC, size=128256, unit=32, bounds=vocab),
        Split(axis=Axis.RS, size=4096, unit=32, bounds=(0, 4096, 4096, 4096)),
    ]


CUTS = splits((0, 6, 8, 8), (0, 9984, 14336, 14336), (0, 96000, 128256, 128256))


@pytest.mark.parametrize(("layout", "gathered"), [("reduce", 0), ("gather", 2048 * 14336 * 2)])
def test_llama_8b_by_hand(layout: str, gathered: int) -> None:
    """2,048 rows in 16 bits: every buffer of both devices written out; the third is idle and has none."""
    request = Request(layout, "balanced", Cache("fp16", 8192), 4, 2048, "idle")
    common = 8 * MIB + 3 * 2048 * 4096 * 2 + gathered  # control, three of the residual stream, the whole input
    first = 2048 * 2 * (24 * 128 + 2 * 6 * 128 + 2 * 9984) + 4 * 96000 * 4  # queries, keys, values, gate, up, logits
    second = 2048 * 2 * (8 * 128 + 2 * 2 * 128 + 2 * 4352) + 4 * 32256 * 4
    assert workspace_bytes(CUTS, "bfloat16", request) == (common + first, common + second, 0)


def test_a_residual_slice_alone_makes_a_device_used() -> None:
    """Whoever holds any slice has the common buffers, even if that slice needs none of its own."""
    request = Request("reduce", "balanced", Cache("fp16", 8192), 1, 16, "idle")
    cuts = [
        evolve(CUTS[-1], bounds=(0, 2048, 4096, 4096)),
        *splits((0, 8, 8, 8), (0, 14336, 14336, 14336), (0, 128256, 128256, 128256))[:-1],
    ]
    assert workspace_bytes(cuts, "float16", request)[1:] == (8 * MIB + 3 * 16 * 4096 * 2, 0)


def test_activations_of_32_bits_take_twice_the_room_and_logits_the_same() -> None:
    """The dtype is the activations'; logits are always 32 bits wide."""
    request = Request("reduce", "balanced", Cache("fp16", 8192), 4, 2048, "idle")
    narrow, wide = (workspace_bytes(CUTS, dtype, request)[0] for dtype in ("float16", "float32"))
    same = 8 * MIB + 4 * 96000 * 4
    assert wide - same == 2 * (narrow - same)


@pytest.mark.parametrize(
    ("keys", "widest"),
    [
        ({"intermediate_size": 4096}, 4096),
        ({"intermediate_size": 512}, 8 * 64),  # the attention's output
        ({"intermediate_size": 512, "head_dim": 96}, 8 * 96),
        (
            {
                "model_type": "qwen2_moe",
                "architectures": ["Qwen2MoeForCausalLM"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 1536,
                "shared_expert_intermediate_size": 640,
            },
            1536,
        ),
    ],
)
def test_gathering_takes_a_buffer_for_the_widest_input(keys: dict[str, object], widest: int) -> None:
    """Whichever of attention and MLP it is; reducing needs no such buffer."""
    common = [
        demands(spec(**keys), Request(layout, "balanced", Cache("fp16", 1), 1, 32, "idle"), 1).common.workspace
        for layout in ("gather", "reduce")
    ]
    assert common[0] - common[1] == 32 * widest * 2


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_buffers_start_at_multiples_of_64_bytes(size: int, expected: int) -> None:
    """Every buffer takes whole blocks of 64 bytes."""
    assert align(size) == expected


def test_small_buffers_are_rounded_up_each() -> None:
    """One row of one head of 4 elements in 16 bits is 8 bytes, and takes 64, three times; so does a ragged unit."""
    model = spec(head_dim=4, num_attention_heads=1, num_key_value_heads=1, vocab_size=33, intermediate_size=256)
    request = Request("reduce", "balanced", Cache("fp16", 1), 1, 1, "idle")
    (kv, intermediate, vocab, _) = demands(model, request, 1).axes
    assert kv.cost(0, 1).workspace == 3 * 64
    assert intermediate.cost(0, 128).workspace == 2 * 256
    assert [vocab.cost(0, n).workspace for n in (32, 33)] == [128, 256]
