"""Passes of prompts as graphs: which models have them, of which sizes, and that nothing is kept for another pass."""

from __future__ import annotations

import gc
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch
from weakref import ref

import pytest
import torch
from attrs import evolve

from tests.decoder import quantised_checkpoints as checkpoints
from tests.decoder import test_memory
from tests.decoder.fused_cases import FakeGrouped
from tests.decoder.pointwise_cases import launches
from tests.decoder_cases import CONFIGS, HYBRIDS, LATENT, LENGTH, MAX_ROWS, model_of, plan_of, request_of
from tests.flash_cases import cudnn_calls, flash_calls
from tests.graph_cases import WAITING, Calls, FakeGraph, mixtures
from tests.weight_plans import fine_units
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache
from tpplan.decoder import Decoder, forward
from tpplan.decoder import math as layers
from tpplan.decoder.cache import layer as layer_cache
from tpplan.decoder.decoding import prefill_graphs as prompt_graphs
from tpplan.decoder.layer import steps as plain
from tpplan.decoder.prompts import NOBODY, Prompt
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from functools import partial
    from pathlib import Path

    from tests.flash_cases import CudnnCalls, FlashCalls
    from tpplan.decoder.weights.stacked import Projection
    from tpplan.exec.context import TPContext

__all__ = ["cudnn_calls", "fine_units", "flash_calls", "launches"]  # fixtures


def made(context: TPContext, model_type: str, kind: str = "fp32", *, graphs: bool = True) -> Decoder:
    """Load a family's model."""
    directory = model_of(model_type).directory
    return Decoder(context, directory, load_weights(context.plan, directory, context), cache=kind, graphs=graphs)


def capturing(decoder: Decoder, events: list[tuple[str, int]]) -> AbstractContextManager[object]:
    """Let a decoder capture passes where there are no graphs, and note what becomes of them, and their rows.

    A replay reads the tensors that the captured pass has read, and writes those that it has written.
    """
    graphs = decoder.prompt_graphs
    assert graphs

    def captured(issue: partial[None], what: str) -> FakeGraph:
        (shape,) = issue.args
        events.append(("capture", shape.rows))
        issue()

        def again() -> None:
            events.append(("replay", shape.rows))
            issue()

        return FakeGraph(again, lambda: captured(issue, what))

    return patch.object(decoder, "captured", captured)


def stores_of(decoder: Decoder) -> list[torch.Tensor]:
    """Return all that its cache has."""
    return [part for layer in decoder.stack.heads for each in layer.values() for part in each.cache._parts]


@torch.inference_mode()
def check_same(decoders: tuple[Decoder, Decoder], random: Random) -> list[tuple[str, int]]:
    """Read mixtures of prompts by graphs and without, and compare logits and caches, where nothing else is written.

    Args:
        decoders: with graphs, and without.
        random: of which mixtures.

    Returns:
        What became of the passes.
    """
    captured, written = decoders
    context, graphs, events = captured.context, captured.prompt_graphs, list[tuple[str, int]]()
    assert graphs
    accuracy = 0.05 if context.dtype is torch.bfloat16 else 1e-4
    for stored in (*stores_of(captured), *stores_of(written)):
        stored.fill_(torch.nan)
    with capturing(captured, events):
        for prompts in mixtures(random, captured.batch, context.max_rows):
            logits, expected = (context.gather(each.read(prompts), Axis.VOCAB).tensor.clone() for each in decoders)
            torch.testing.assert_close(logits, expected, atol=accuracy, rtol=accuracy)
            for x in graphs._last:  # which is lost before the next
                x.fill_(torch.nan)
        for found, right in zip(stores_of(captured), stores_of(written), strict=True):
            assert right.isnan().any() or right.shape[-2] < LENGTH  # windows are full
            torch.testing.assert_close(found, right, atol=accuracy, rtol=accuracy, equal_nan=True)
    return events


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("flash_calls")
def test_a_graph_serves_all_passes_that_it_has_room_for(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured with one mixture of prompts, it reads all others as they are read without, on any devices.

    Of each number of rows there is one.
    """
    random = Random(seed)
    monkeypatch.setattr(prompt_graphs, "_SMALLEST", 4)
    for which in ("up", "down"):
        monkeypatch.setattr(plain.Plain, f"takes_experts_{which}", lambda *_: True)
    model_type = ("llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss")[seed % 6]
    batch, rows = random.randint(2, 5), random.randint(6, 24)
    request = request_of(random.choice(["reduce", "gather"]), random.choice(["idle", "replicate"]), batch=batch)
    request = evolve(request, max_rows=rows)
    plan = plan_of(model_of(model_type).directory, random.randint(1, 5), request, {}, seed=seed)
    with compile_plan(plan, backend="cpu") as context:
        decoders = made(context, model_type), made(context, model_type, graphs=False)
        events = check_same(decoders, random)
        assert decoders[0].prompt_graphs
        sizes = decoders[0].prompt_graphs.sizes
    assert sizes == tuple(size for size in (rows // 4, rows // 2, rows) if size >= 4)
    counts = Counter(events)
    assert set(counts) == {(what, size) for what in ("capture", "replay") for size in sizes}
    assert all(counts["capture", size] == 1 for size in sizes)


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("flash_calls")
def test_passes_of_one_sequence_have_graphs_of_their_own(
    seed: int, in_turns: bool, cudnn_calls: CudnnCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for its first rows and one for rows behind others, of each number of rows but the smallest.

    Models with windows or sinks have none.
    """
    random = Random(seed)
    monkeypatch.setattr(prompt_graphs, "_SMALLEST", 4)
    monkeypatch.setattr(prompt_graphs, "_LEAST_OF_ONE", 8)
    monkeypatch.setattr(forward, "_HALF", 4)
    monkeypatch.setattr(forward, "_EVEN", 1)
    for which in ("up", "down"):
        monkeypatch.setattr(plain.Plain, f"takes_experts_{which}", lambda *_: True)
    monkeypatch.setattr(plain.Plain, "merge_within_room", lambda steps, *_: steps.merge)
    model_type = ("llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss")[seed]
    request = evolve(request_of(random.choice(["reduce", "gather"]), batch=3), max_rows=16)
    plan = plan_of(model_of(model_type).directory, random.randint(1, 4), request, {}, seed=seed)
    with compile_plan(plan, backend="cpu") as context:
        directory = model_of(model_type).directory
        weights = load_weights(plan, directory, context)
        decoders = (
            Decoder(context, directory, weights, cache="fp32", graphs=True, turns=in_turns),
            Decoder(context, directory, weights, cache="fp32", graphs=False),
        )
        events = check_same(decoders, random)
        with capturing(decoders[0], events):
            for prompts in ([Prompt([1] * 16)], [Prompt([2] * 15, 0, 16)], [Prompt([3] * 9), Prompt([4] * 7, 1)]):
                logits = [context.gather(each.read(prompts), Axis.VOCAB).tensor.clone() for each in decoders]
                torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
        assert decoders[0].prompt_graphs
        shapes = decoders[0].prompt_graphs._have_run
    found = {(shape.rows, shape.goes_on) for shape in shapes}
    assert {size for _, size in events} == {4, 8, 16}
    if model_type in {"gemma3_text", "gpt_oss"}:
        assert {goes_on for _, goes_on in found} == {None}
        assert not cudnn_calls
        return
    whole = {(size, goes_on) for size in (8, 16) for goes_on in (None, False, True)} | {(4, None)}
    assert {(16, None), (16, False), (16, True)} <= found <= whole
    half = 8 if in_turns else 16
    assert {(half, False), (half, True)} <= {*cudnn_calls}


@pytest.mark.usefixtures("flash_calls", "cudnn_calls")
def test_padding_of_one_sequence_is_as_finite_as_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a token that it does not have would compute: a weight of 0 times NaN is NaN."""
    monkeypatch.setattr(prompt_graphs, "_SMALLEST", 4)
    monkeypatch.setattr(prompt_graphs, "_LEAST_OF_ONE", 4)
    request = evolve(request_of(), max_rows=16)
    with compile_plan(plan_of(model_of("llama").directory, 1, request, {}, seed=3), backend="cpu") as context:
        decoder = made(context, "llama")
        decoder.weights[0]["model.embed_tokens.weight"][NOBODY[0]] = torch.inf
        with capturing(decoder, []):
            for prompt in 2 * [Prompt([7] * 13), Prompt([5] * 11, start=13)]:
                (logits,) = decoder.read([prompt])
                assert logits[:, 1:].isfinite().all()


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("obstacle", ["room", "window"])
@pytest.mark.usefixtures("flash_calls")
def test_passes_of_one_sequence_have_none_of_their_own(
    obstacle: str, in_turns: bool, tmp_path: Path, cudnn_calls: CudnnCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no room for two attention outputs, or a window shorter than a text, though not than a pass.

    Behind windows, padding is not finite.
    """
    monkeypatch.setattr(prompt_graphs, "_SMALLEST", 4)
    monkeypatch.setattr(prompt_graphs, "_LEAST_OF_ONE", 4)
    monkeypatch.setattr(forward, "_HALF", 4)
    monkeypatch.setattr(forward, "_EVEN", 1)
    directory, kind = model_of("llama").directory, "fp32"
    if obstacle == "room":
        monkeypatch.setattr(plain.Plain, "merge_within_room", lambda *_: None)
    else:
        directory, kind = test_memory.made("gemma3_text", tmp_path, sliding_window=20), "fp16"
    request = evolve(request_of(), max_rows=16)
    with compile_plan(plan_of(directory, 2, request, {}, seed=3), backend="cpu") as context:
        weights = load_weights(context.plan, directory, context)
        decoder, other = (
            Decoder(context, directory, weights, cache=kind, graphs=graphs, turns=graphs and in_turns)
            for graphs in (True, False)
        )
        with capturing(decoder, []):
            for prompt in 3 * [Prompt([7] * 13), Prompt([5] * 13, start=13)]:
                logits, expected = (
                    context.gather(each.read([prompt]), Axis.VOCAB).tensor.clone() for each in (decoder, other)
                )
                assert (logits - expected).norm() < 0.03 * expected.norm()
    assert not cudnn_calls


@pytest.mark.parametrize(("layout", "most", "refused"), [("reduce", 10, 2), ("gather", 20, 0), ("gather", 5, 1)])
@pytest.mark.usefixtures("flash_calls")
def test_sizes_whose_experts_torch_computes_have_no_graph(
    layout: str, most: int, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All projections of all layers that have experts are asked about, on every device that has them."""
    asked = Counter[tuple[int, int, int]]()
    monkeypatch.setattr(prompt_graphs, "_SMALLEST", 5)

    def takes(steps: plain.Plain, rows: int, chosen: int, *projections: Projection) -> bool:
        assert {len(each) for each in projections} == {6}
        assert chosen == 4
        asked[id(steps), rows, len(projections)] += 1
        return rows <= most or len(projections) != refused

    for which in ("up", "down"):
        monkeypatch.setattr(plain.Plain, f"takes_experts_{which}", takes)
    plan = plan_of(model_of("qwen3_moe").directory, 4, evolve(request_of(layout), max_rows=20), {}, seed=2)
    with compile_plan(plan, backend="cpu") as context:
        decoder = made(context, "qwen3_moe")
    sizes = [size for size in (5, 10, 20) if size <= most]
    assert decoder.prompt_graphs
    assert decoder.prompt_graphs.sizes == tuple(sizes)
    expected = Counter[tuple[int, int, int]]()
    for layer in range(len(decoder.stack.heads)):
        if layer == 1:  # which the config says has none
            continue
        devices = context.devices_of(Axis.EXPERT_INTERMEDIATE, layer)
        whose = {2: devices, 1: devices if layout == "reduce" else context.devices_of(Axis.RESIDUAL)}
        steps = [(id(decoder.stack.steps[device]), count) for count in whose for device in whose[count]]
        expected.update((step, rows, count) for rows in sizes for step, count in steps)
    assert Counter({key: count for key, count in asked.items() if key[1] <= most}) == expected


@pytest.mark.parametrize(
    ("layout", "model_type"), [("reduce", "llama"), ("gather", "mistral"), ("reduce", "mixtral"), ("gather", "mixtral")]
)
def test_kernels_leave_rows_of_nobody_out(  # noqa: PLR0917 (fixtures)
    layout: str,
    model_type: str,
    tmp_path: Path,
    flash_calls: FlashCalls,
    launches: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 16 bits, where kernels write keys and values to the cache, on one device and on uneven ones.

    Behind windows, kernels turn them, and torch writes. Experts have kernels, too.
    """
    monkeypatch.setattr(FakeGrouped, "is_on", True)
    directory = test_memory.made(model_type, tmp_path, num_hidden_layers=1)
    monkeypatch.setattr(prompt_graphs, "_SMALLEST", 16)
    monkeypatch.setattr(plain.Plain, "norm_and_rope", Mock(side_effect=AssertionError))
    if model_type != "mistral":
        monkeypatch.setattr(layer_cache.LayerCache, "put", Mock(side_effect=AssertionError))
    for shares in ((1,), (3, 1)):
        plan = test_memory.planned(directory, layout, shares, Cache("fp16", 8 * 128))
        with compile_plan(plan, backend="cpu", scratch=False) as context:
            weights = load_weights(plan, directory, context)
            with_graphs, without = (Decoder(context, directory, weights, graphs=graphs) for graphs in (True, False))
            events = check_same((with_graphs, without), Random(len(shares)))
        assert {size for _, size in events} == {16, 32, 64}
    assert flash_calls
    assert launches["turn"]


def test_the_smallest_graph_is_taken(flash_calls: FlashCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass of a size runs as it is written, the second is captured, others replay that, size by size."""
    model, events = model_of("llama"), list[tuple[str, int]]()
    monkeypatch.setattr(prompt_graphs, "_SMALLEST", 5)
    request = evolve(request_of(), max_rows=20)
    with compile_plan(plan_of(model.directory, 3, request, {}, seed=9), backend="cpu") as context:
        decoder = made(context, "llama")
        with capturing(decoder, events):
            for rows, expected in (
                (5, []),
                (20, []),
                (1, [("capture", 5)]),
                (6, []),
                (4, [("replay", 5)]),
                (11, [("capture", 20)]),
                (10, [("capture", 10)]),
                (20, [("replay", 20)]),
                (33, [("replay", 20), ("replay", 20)]),
            ):
                events.clear()
                flash_calls.clear()
                decoder.prefill([*range(rows)])
                assert events == expected, rows
                last = rows % 20 or 20
                assert flash_calls[-1] == [(last, rows)]


@pytest.mark.parametrize(
    ("max_rows", "room", "most", "expected"),
    [
        (2048, 32768, None, [128, 256, 512, 1024, 2048]),
        (2048, 32768, 512, [128, 256, 512]),
        (1000, 32768, 512, [250, 500]),
        (1000, 32768, None, [250, 500, 1000]),
        (2048, 600, None, [128, 256, 512, 1024]),
        (2048, 50, None, [128]),
        (50, 2048, 512, [50]),
        (300, 100, None, [150]),
    ],
)
def test_sizes(max_rows: int, room: int, most: int | None, expected: list[int]) -> None:
    """Each is half of the next, all that a cache has room for fits, and there are none larger than asked for."""
    assert prompt_graphs.sizes_of(max_rows, room, most) == expected


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.usefixtures("flash_calls")
def test_as_transformers(model_type: str) -> None:
    """Two prompts that fill three passes, read again and again, have the logits that transformers gives each."""
    model, events = model_of(model_type), list[tuple[str, int]]()
    short, long = model.prompts
    with compile_plan(plan_of(model.directory, 3, request_of(), {}, seed=9), backend="cpu") as context:
        decoder = made(context, model_type)
        assert len(long) + len(short) == 3 * MAX_ROWS
        with capturing(decoder, events):
            for _ in range(3):
                logits = context.gather(decoder.read([Prompt(long, 0), Prompt(short, 1)]), Axis.VOCAB).tensor
                torch.testing.assert_close(logits.flip(0), model.logits, atol=1e-4, rtol=1e-4)
            for sequence, prompt in enumerate(model.prompts):
                logits = context.gather(decoder.prefill(prompt, sequence), Axis.VOCAB).tensor
                torch.testing.assert_close(logits[0], model.logits[sequence], atol=1e-4, rtol=1e-4)
    assert events == [("capture", MAX_ROWS), *[("replay", MAX_ROWS)] * 11]


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.usefixtures("flash_calls")
def test_models_whose_passes_differ_have_no_graph(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of capped scores, of latents, of experts that torch computes, or of windows that take too much room."""
    window = CONFIGS[model_type].get("sliding_window") or 0
    with compile_plan(plan_of(model_of(model_type).directory, 2, request_of(), {}, seed=1), backend="cpu") as context:
        decoder = made(context, model_type)
        differing = {"gemma2", "glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "qwen3_moe"}
        is_alike = model_type not in {*differing, *LATENT, *HYBRIDS}
        assert (decoder.prompt_graphs is not None) == is_alike
        head_dim = next(heads for layer in decoder.stack.heads for heads in layer.values()).cache.head_dim
        least = 2 * (decoder.batch * window + MAX_ROWS) * head_dim
        for at_once, has_room in ((least, True), (least - 1, not window)):
            monkeypatch.setattr(layer_cache, "AT_ONCE", at_once)
            assert (made(context, model_type).prompt_graphs is not None) == (is_alike and has_room)


def test_caches_and_devices_without_the_kernel_have_no_graph(
    flash_calls: FlashCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has a decoder that is not told to."""
    model = model_of("qwen3")
    with compile_plan(plan_of(model.directory, 2, request_of(), {}, seed=1), backend="cpu") as context:
        assert made(context, "qwen3").prompt_graphs
        assert not made(context, "qwen3", graphs=False).prompt_graphs
        assert not made(context, "qwen3", "q8").prompt_graphs
        monkeypatch.setattr(layers, "can_use_flash_attention", lambda _: False)
        decoder = made(context, "qwen3")
        logits = context.gather(decoder.prefill(model.prompts[1]), Axis.VOCAB).tensor
        torch.testing.assert_close(logits[0], model.logits[1], atol=1e-4, rtol=1e-4)
    assert not decoder.prompt_graphs
    assert not flash_calls


@pytest.mark.parametrize(
    ("places", "graphs", "quantised", "expected"),
    [
        (["cuda:0", "cuda:1"], None, False, (250, 500, 1000)),
        (["cuda:0", "cuda:1"], False, False, None),
        (["cuda:0"], None, False, (250, 500)),
        (["cuda:0"], None, True, (250, 500, 1000)),
        (["cuda:0"], False, False, None),
        (["cpu", "cpu"], None, False, None),
        (["cpu", "cpu"], True, False, (250, 500, 1000)),
    ],
)
@pytest.mark.usefixtures("flash_calls")
def test_graphs_are_for_gpus(
    places: list[str],
    graphs: bool | None,
    quantised: bool,
    expected: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless a decoder is told that it shall have them, or shall not; a single one has large ones of many pieces."""
    monkeypatch.setattr(prompt_graphs, "PrefillGraphs", lambda _forward, _capture, sizes: tuple(sizes))
    devices: dict[int, Any] = {i: SimpleNamespace(device=torch.device(place)) for i, place in enumerate(places)}
    request = evolve(request_of(batch=6), max_rows=1000)
    model = checkpoints.quantised("llama", "awq g32")[0] if quantised else model_of("llama")
    with compile_plan(plan_of(model.directory, 2, request, {}, seed=1), backend="cpu") as context:
        weights = load_weights(context.plan, model.directory, context)
        decoder = Decoder(context, model.directory, weights, cache="fp32", graphs=False)
        with patch.multiple(context, devices=devices, all_devices=tuple(devices)):
            found: object = prompt_graphs.graphs_of(decoder.forward, decoder.captured, graphs=graphs)
    assert found == expected


@pytest.mark.usefixtures("flash_calls")
def test_what_cannot_be_captured_is_read_as_it_is_written(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried once, and a warning says why: virtual devices have no graphs."""
    model = model_of("llama")
    short, long = model.prompts
    with compile_plan(plan_of(model.directory, 2, request_of(), {}, seed=9), backend="cpu") as context:
        decoder = made(context, "llama")
        for _ in range(3):
            logits = context.gather(decoder.read([Prompt(long, 0), Prompt(short, 1)]), Axis.VOCAB).tensor
            torch.testing.assert_close(logits.flip(0), model.logits, atol=1e-4, rtol=1e-4)
    assert not decoder.prompt_graphs
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "virtual devices have no graphs" in record.getMessage()


@pytest.mark.usefixtures("flash_calls")
def test_a_pass_can_be_a_graph() -> None:
    """Nothing that it issues waits for a device or makes a tensor of numbers of the host's."""
    for batch, layout, model_type in ((1, "reduce", "llama"), (4, "gather", "gemma3_text")):
        plan = plan_of(model_of(model_type).directory, 3, request_of(layout, batch=batch), {}, seed=6)
        with compile_plan(plan, backend="cpu") as context:
            decoder = made(context, model_type)
            rows = torch.arange(MAX_ROWS - 2)[:, None] * torch.tensor([1, 1, 0, 0, 0])
            numbers = [torch.cat((rows, torch.tensor([NOBODY] * 2)))] * len(context.all_devices)
            calls = Calls()
            with torch.inference_mode(), calls:
                decoder.run(numbers)
        assert "_flash_attention_forward" in calls.names
        assert not calls.names & WAITING


@pytest.mark.usefixtures("flash_calls")
def test_a_pass_that_did_not_end_has_not_run() -> None:
    """What comes after it is not captured: not everything may have been loaded."""
    model, events = model_of("llama"), list[tuple[str, int]]()
    short, long = model.prompts
    with compile_plan(plan_of(model.directory, 2, request_of(), {}, seed=9), backend="cpu") as context:
        decoder = made(context, "llama")
        with capturing(decoder, events):
            with patch.object(decoder.stack, "run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                decoder.prefill(long[:MAX_ROWS])
            for expected in ([], [("capture", MAX_ROWS)]):
                decoder.prefill(long[:MAX_ROWS])
                assert events == expected
            logits = context.gather(decoder.read([Prompt(long, 0), Prompt(short, 1)]), Axis.VOCAB).tensor
    torch.testing.assert_close(logits.flip(0), model.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("flash_calls")
def test_a_decoder_with_graphs_gives_its_memory_back() -> None:
    """Without waiting for a collector."""
    plan = plan_of(model_of("llama").directory, 2, request_of(), {}, seed=2)
    gc.disable()
    try:
        with compile_plan(plan, backend="cpu") as context:
            decoder = made(context, "llama")
            decoder.prefill([1] * MAX_ROWS)
            assert decoder.prompt_graphs
            kept = ref(decoder)
            del decoder
            assert kept() is None
    finally:
        gc.enable()
