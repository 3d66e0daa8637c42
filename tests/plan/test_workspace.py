"""The workspace: one function for planner, rules and executor, and its arithmetic by hand."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import strategies
from tests.cut_plans import cut_plans
from tests.planning_cases import spec
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache, Request, Split, SplitPlan
from tpplan.core.workspace import Areas, Pinned, align, areas, pinned_bytes, slot_bytes, workspace_bytes
from tpplan.planner.ledger import demands

MIB = 2**20


@settings(max_examples=200)
@given(cut_plans(5, 64, 2049))
def test_the_ledger_has_what_the_executor_will_allocate(plan: SplitPlan) -> None:
    """From the plan's splits alone, the bytes are those that planning put into the ledger."""
    assert workspace_bytes(plan.splits, plan.model.dtype, plan.request) == tuple(
        entry.workspace_bytes for entry in plan.memory
    )


@given(cut_plans(5, 64, 2049), st.integers(1, 999))
def test_more_rows_never_take_less(plan: SplitPlan, more: int) -> None:
    """Larger passes need as much or more on every device in use, and nothing on an idle one."""
    larger = evolve(plan.request, max_rows=plan.request.max_rows + more)
    before = workspace_bytes(plan.splits, plan.model.dtype, plan.request)
    for now, then in zip(before, workspace_bytes(plan.splits, plan.model.dtype, larger), strict=True):
        assert (now == then == 0) or now < then


def splits(kv: tuple[int, ...], intermediate: tuple[int, ...], vocab: tuple[int, ...]) -> list[Split]:
    """The cuts of a model of Llama-3.1-8B's sizes."""
    return [
        Split(axis=Axis.KV_HEADS, layers="0-31", size=8, unit=1, width=128, bounds=kv),
        Split(axis=Axis.Q_HEADS, layers="0-31", size=32, unit=4, width=128, bounds=tuple(4 * b for b in kv)),
        Split(axis=Axis.INTERMEDIATE, layers="0-31", size=14336, unit=128, bounds=intermediate),
        Split(axis=Axis.VOCAB, size=128256, unit=32, bounds=vocab),
        Split(axis=Axis.RESIDUAL, size=4096, unit=32, bounds=(0, 4096, 4096, 4096)),
    ]


CUTS = splits((0, 6, 8, 8), (0, 9984, 14336, 14336), (0, 96000, 128256, 128256))


@pytest.mark.parametrize(("layout", "gathered"), [("reduce", 0), ("gather", 2048 * 14336 * 2)])
def test_llama_8b_by_hand(layout: str, gathered: int) -> None:
    """2,048 rows in 16 bits: every buffer of both devices written out; the third is idle and has none."""
    request = Request(layout, "balanced", Cache("fp16", 8192), 4, 2048, "idle")
    common = 8 * MIB + 3 * 2048 * 4096 * 2 + gathered  # control, three of the residual stream, the whole input
    common += 2 * (8192 // 4) * 128 * 2  # sine and cosine of a quarter of the cache's tokens, for a head in 16 bits
    first = 2048 * 2 * (24 * 128 + 2 * 6 * 128 + 2 * 9984) + 4 * 96000 * 4  # queries, keys, values, gate, up, logits
    second = 2048 * 2 * (8 * 128 + 2 * 2 * 128 + 2 * 4352) + 4 * 32256 * 4
    assert workspace_bytes(CUTS, "bfloat16", request) == (common + first, common + second, 0)


def test_experts_take_buffers_for_all_that_a_token_is_routed_to() -> None:
    """Mixtral's MLP instead of Llama's: gate and up of two experts, and the rows of one as wide as the stream."""
    request = Request("reduce", "balanced", Cache("fp16", 8192), 4, 2048, "idle")
    experts = [evolve(s, axis=Axis.EXPERT_INTERMEDIATE, width=2) if s.axis is Axis.INTERMEDIATE else s for s in CUTS]
    dense, sparse = (workspace_bytes(cuts, "bfloat16", request)[0] for cuts in (CUTS, experts))
    assert sparse - dense == 2048 * 2 * (2 * 9984 + 4096)


def test_a_residual_slice_alone_makes_a_device_used() -> None:
    """Whoever holds any slice has the common buffers, even if that slice needs none of its own; no heads, no tables."""
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


def test_the_areas_of_llama_8b_by_hand() -> None:
    """The second device in use: control, one of three wide buffers, two tables of 2,048 positions, and the rest."""
    request = Request("reduce", "balanced", Cache("fp16", 8192), 4, 2048, "idle")
    slices = 2048 * 2 * (8 * 128 + 2 * 2 * 128 + 2 * 4352) + 4 * 32256 * 4
    wide = 2048 * 4096 * 2
    assert areas(CUTS, "bfloat16", request)[1:] == (
        Areas(
            control_bytes=8 * MIB,
            exchange_bytes=wide,
            rope_bytes=2 * 2048 * 128 * 2,
            scratch_bytes=2 * wide + slices,
        ),
        Areas(0, 0, 0, 0),
    )


@given(strategies.plans())
def test_every_area_of_any_valid_plan_starts_aligned(plan: SplitPlan) -> None:
    """All areas are multiples of 64 bytes and add up to the workspace; only devices with KV heads have tables."""
    dtype, request = plan.model.dtype, plan.request
    divided = areas(plan.splits, dtype, request)
    totals = []
    for i, area in enumerate(divided):
        parts = (area.control_bytes, area.exchange_bytes, area.rope_bytes, area.scratch_bytes)
        assert all(part % 64 == 0 for part in parts)
        held = [s for s in plan.splits if s.bounds[i] < s.bounds[i + 1]]
        assert (area.control_bytes == 8 * MIB) == bool(held)
        assert (area.rope_bytes > 0) == any(s.axis is Axis.KV_HEADS for s in held)
        totals.append(sum(parts))
    assert workspace_bytes(plan.splits, dtype, request) == tuple(totals)


@pytest.mark.parametrize(
    ("tokens", "batch", "positions"), [(8192, 1, 8192), (8192, 4, 2048), (8193, 4, 2049), (3, 4, 1)]
)
def test_tables_have_a_row_for_each_position_of_one_sequence(tokens: int, batch: int, positions: int) -> None:
    """The cache's tokens over the batch, rounded up; in the activations' dtype."""
    request = Request("reduce", "balanced", Cache("q4", tokens), batch, 2048, "idle")
    for dtype, item in (("float16", 2), ("float32", 4)):
        assert areas(CUTS, dtype, request)[0].rope_bytes == 2 * positions * 128 * item


def test_every_cut_of_the_kv_heads_has_its_own_tables() -> None:
    """Layers with heads of another size need other tables; a device without any of their heads does not."""
    request = Request("reduce", "balanced", Cache("fp16", 100), 1, 16, "idle")
    kv, q, *rest = splits((0, 6, 8, 8), (0, 9984, 14336, 14336), (0, 96000, 128256, 128256))
    other = [
        evolve(kv, layers="32-39", width=64, bounds=(0, 8, 8, 8)),
        evolve(q, layers="32-39", width=64, bounds=(0, 32, 32, 32)),
    ]
    found = areas([kv, other[0], q, other[1], *rest], "bfloat16", request)
    assert [area.rope_bytes for area in found] == [2 * 100 * (128 + 64) * 2, 2 * 100 * 128 * 2, 0]


@pytest.mark.parametrize("heads", [32, 64])
def test_each_cut_of_the_kv_heads_has_its_own_group_size(heads: int) -> None:
    """8 heads of 4 queries and 4 heads of 8 or 16 take what each would alone, whether or not they share query heads."""
    request = Request("reduce", "balanced", Cache("fp16", 100), 1, 16, "idle")
    kv, q, *rest = CUTS
    few = evolve(kv, layers="32-39", size=4, bounds=(0, 3, 4, 4))
    last = evolve(q, layers="32-39", size=heads, bounds=(0, heads * 3 // 4, heads, heads))
    queries = [evolve(q, layers="0-39")] if last.size == q.size else [q, last]
    both, first, second, outside = (
        workspace_bytes(cuts, "float16", request)[0]
        for cuts in ([kv, few, *queries, *rest], [kv, q, *rest], [few, last, *rest], rest)
    )
    assert both - outside == (first - outside) + (second - outside)
    assert second - outside == 2 * 16 * (3 * heads // 4 * 128 + 2 * 3 * 128) + 2 * 100 * 128 * 2


@pytest.mark.parametrize(("devices", "expected"), [(1, 0), (2, 2_064_384), (3, 1_032_192), (8, 294_912)])
def test_slots_share_the_control_area(devices: int, expected: int) -> None:
    """8 MiB less 128 KiB, for two slots of each other device, of twice the data; alone there is nobody to hear from."""
    assert slot_bytes(devices) == expected


@given(st.integers(2, 1024))
def test_slots_are_as_large_as_fits(devices: int) -> None:
    """Flags and all slots fit in the control area, and with 64 bytes more in each they would not."""
    size = slot_bytes(devices)
    assert size % 64 == 0
    assert 128 * 1024 + (devices - 1) * 2 * 2 * size <= 8 * MIB < 128 * 1024 + (devices - 1) * 2 * 2 * (size + 64)


def test_the_pinned_memory_of_llama_8b_by_hand() -> None:
    """Buffers of 2,048 rows of the MLP; rings of two eighths of them for each sender; queues to both, and to one.

    Each of the queues has four slots of 128 KiB of data, eight of 1 MiB for frames, and its counters and flags.
    """
    request = Request("reduce", "balanced", Cache("fp16", 8192), 4, 2048, "idle")
    found = pinned_bytes(CUTS, "bfloat16", request)
    message = 2048 * 14336 * 2
    assert found == Pinned(buffer_bytes=message, chunk_bytes=message // 8, rings=3, queues=4)
    queue = 4 * 2 * 128 * 1024 + 8 * MIB + 4096 + 64 * 1024
    assert found.total_bytes == 2 * message + 3 * 2 * message // 8 + 4 * queue


def test_few_rows_pin_room_for_logits_and_a_row_in_each_chunk() -> None:
    """With a row of activations, logits are larger, and the widest row sets the chunk."""
    request = Request("reduce", "balanced", Cache("fp16", 8192), 4, 4, "idle")
    cuts = splits((0, 6, 8, 8), (0, 9984, 14336, 14336), (0, 96000, 300_001, 300_001))
    wide = [evolve(split, size=300_001) if split.axis is Axis.VOCAB else split for split in cuts]
    chunk = 300_001 * 8 + 56  # rounded up to 64
    found = pinned_bytes(wide, "float16", request)
    assert (found.buffer_bytes, found.chunk_bytes) == (4 * 300_001 * 4 + 48, chunk)


@pytest.mark.parametrize(
    ("kv", "vocab", "expected"),
    [
        ((0, 3, 6, 8), (0, 32064, 64128, 128256), 6),  # all devices, and the residual stream's one
        ((0, 6, 8, 8), (0, 32064, 64128, 128256), 9),  # heads on two devices: another group
        ((0, 6, 8, 8), (0, 0, 64128, 128256), 12),
        ((0, 8, 8, 8), (0, 128256, 128256, 128256), 6),  # heads, vocabulary and residual stream on the same one
    ],
)
def test_a_queue_for_every_sender_and_group(kv: tuple[int, ...], vocab: tuple[int, ...], expected: int) -> None:
    """Axes on the same devices share queues; every device in use may send to every group."""
    request = Request("reduce", "balanced", Cache("fp16", 8192), 4, 4, "idle")
    assert pinned_bytes(splits(kv, (0, 4096, 9984, 14336), vocab), "float16", request).queues == expected


def test_one_device_sends_nothing_through_host_memory() -> None:
    """No queues; its ring is for the rows that come from the host."""
    request = Request("reduce", "balanced", Cache("fp16", 8192), 4, 4, "idle")
    found = pinned_bytes(splits((0, 8), (0, 14336), (0, 128256)), "float16", request)
    assert (found.queues, found.rings) == (0, 2)


def test_a_row_of_any_axis_fits_in_a_chunk() -> None:
    """Also of the heads, where the vocabulary is small."""
    request = Request("reduce", "balanced", Cache("fp16", 8192), 4, 4, "idle")
    wide = [evolve(split, width=10_000) if split.axis is Axis.Q_HEADS else split for split in CUTS]
    assert pinned_bytes(wide, "float16", request).chunk_bytes == 32 * 10_000 * 8


@pytest.mark.parametrize(
    ("axis", "size", "width"),
    [(Axis.Q_HEADS, 64, 256), (Axis.KV_HEADS, 64, 256), (Axis.INTERMEDIATE, 14400, 1), (Axis.RESIDUAL, 20_000, 1)],
)
def test_the_widest_axis_sets_the_pinned_buffers(axis: Axis, size: int, width: int) -> None:
    """Heads count with their size; a residual stream may be the widest."""
    cuts = [evolve(s, size=size, width=width) if s.axis is axis else s for s in CUTS]
    request = Request("reduce", "balanced", Cache("fp16", 8192), 1, 100, "idle")
    assert pinned_bytes(cuts, "float32", request).buffer_bytes == 100 * size * width * 4


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
            2 * 1536,  # of both experts of a token
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
    """A row of a head of 4 elements in 16 bits is 8 bytes and takes 64, as do both tables; so does a ragged unit."""
    model = spec(head_dim=4, num_attention_heads=1, num_key_value_heads=1, vocab_size=33, intermediate_size=256)
    request = Request("reduce", "balanced", Cache("fp16", 1), 1, 1, "idle")
    (kv, intermediate, vocab, _) = demands(model, request, 1).axes
    assert kv.cost(0, 1).workspace == 3 * 64 + 2 * 64
    assert intermediate.cost(0, 128).workspace == 2 * 256
    assert [vocab.cost(0, n).workspace for n in (32, 33)] == [128, 256]


def test_a_row_of_float32_always_fits_the_exchange_buffer() -> None:
    """Also of a narrow model and a single row, in a piece for each of many devices, aligned."""
    request = Request("reduce", "balanced", Cache("fp16", 8192), 1, 1, "idle")
    narrow = [evolve(split, size=576) if split.axis is Axis.RESIDUAL else split for split in CUTS]
    assert areas(narrow, "bfloat16", request)[0].exchange_bytes == 576 * 4 + 64 * 1024
