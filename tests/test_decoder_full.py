"""Full passes of prompts as a graph: which models have them, and that nothing of a pass is kept for another."""

from __future__ import annotations

import gc
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
from attrs import evolve

from tests.decoder_cases import BATCH, CONFIGS, LENGTH, MAX_ROWS, model_of, plan_of, request_of
from tests.flash_cases import flash_calls
from tests.graph_cases import WAITING, Calls, FakeGraph, mixtures
from tests.weight_plans import fine_units
from tpplan.axes import Axis
from tpplan.decoder import Decoder, full, layers
from tpplan.decoder.prompts import Prompt
from tpplan.exec import compile as compile_plan
from tpplan.plan import Cache
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tests.flash_cases import FlashCalls
    from tpplan.exec.context import TPContext

__all__ = ["fine_units", "flash_calls"]  # fixtures


def made(context: TPContext, model_type: str, kind: str = "fp32", *, graphs: bool = True) -> Decoder:
    """Load a family's model."""
    directory = model_of(model_type).directory
    return Decoder(context, directory, load_weights(context.plan, directory, context), cache=kind, graphs=graphs)


def capturing(decoder: Decoder, events: list[str]) -> AbstractContextManager[object]:
    """Let a decoder capture its full passes where there are no graphs, and note what becomes of them.

    A replay reads the tensors that the captured pass has read, and writes those that it has written.
    """

    def again() -> None:
        events.append("replay")
        assert decoder.full
        for x, new in zip(decoder.full._xs, decoder.run(decoder.full._numbers), strict=True):
            x.copy_(new)

    def capture() -> FakeGraph:
        events.append("capture")
        return FakeGraph(again, capture)

    return patch.object(decoder.context, "capture", capture)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("flash_calls")
def test_one_graph_serves_all_full_passes(seed: int) -> None:
    """Captured with one mixture of prompts, it reads all others as they are read without a graph, on any devices.

    What it leaves is lost before the next.
    """
    random = Random(seed)
    model_type, batch, rows = random.choice(["llama", "qwen3"]), random.randint(2, 5), random.randint(6, 24)
    request = request_of(random.choice(["reduce", "gather"]), random.choice(["idle", "replicate"]), batch=batch)
    request = evolve(request, max_rows=rows)
    plan = plan_of(model_of(model_type).directory, random.randint(1, 5), request, {}, seed=seed)
    events: list[str] = []
    with compile_plan(plan, backend="cpu") as context:
        captured, written = (made(context, model_type, graphs=graphs) for graphs in (True, False))
        with capturing(captured, events), torch.inference_mode():
            for prompts in mixtures(random, batch, rows):
                logits, expected = (
                    context.gather(each.read(prompts), Axis.VC).tensor.clone() for each in (captured, written)
                )
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
                assert captured.full
                for x in captured.full._xs:
                    x.fill_(torch.nan)
    assert events[:2] == ["capture", "replay"]
    assert set(events[2:]) == {"replay"}


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_as_transformers(model_type: str, flash_calls: FlashCalls) -> None:
    """Two prompts that fill three passes, read again and again, have the logits that transformers gives each."""
    model, events = model_of(model_type), list[str]()
    short, long = model.prompts
    with compile_plan(plan_of(model.directory, 3, request_of(), {}, seed=9), backend="cpu") as context:
        decoder = made(context, model_type)
        assert len(long) + len(short) == 3 * MAX_ROWS
        with capturing(decoder, events):
            for _ in range(3):
                logits = context.gather(decoder.read([Prompt(long, 0), Prompt(short, 1)]), Axis.VC).tensor
                torch.testing.assert_close(logits.flip(0), model.logits, atol=1e-4, rtol=1e-4)
            flash_calls.clear()
            decoder.prefill(long[: MAX_ROWS - 1])
        assert not flash_calls  # one stretch that fills no pass, for which there are other kernels
    assert events == ["capture", *["replay"] * 7]


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.usefixtures("flash_calls")
def test_models_whose_passes_differ_have_no_graph(model_type: str) -> None:
    """Neither have those whose scores are capped, whose windows end in a text, or who send rows to experts."""
    directory = model_of(model_type).directory
    with compile_plan(plan_of(directory, 2, request_of(), {}, seed=1), backend="cpu") as context:
        assert (made(context, model_type).full is not None) == (model_type in {"llama", "qwen3"})
    window = CONFIGS[model_type].get("sliding_window") or LENGTH
    request = evolve(request_of(batch=2), cache=Cache("fp16", 2 * window))
    with compile_plan(plan_of(directory, 2, request, {}, seed=1), backend="cpu") as context:
        assert (made(context, model_type).full is not None) == (
            model_type not in {"gemma2", "mixtral", "qwen3_moe"}  # the other windows hide nothing of such short texts
        )


def test_caches_and_devices_without_the_kernel_have_no_graph(
    flash_calls: FlashCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has a decoder that is not told to."""
    model = model_of("qwen3")
    with compile_plan(plan_of(model.directory, 2, request_of(), {}, seed=1), backend="cpu") as context:
        assert made(context, "qwen3").full
        assert not made(context, "qwen3", graphs=False).full
        assert not made(context, "qwen3", "q8").full
        monkeypatch.setattr(layers, "can_use_flash_attention", lambda _: False)
        decoder = made(context, "qwen3")
        logits = context.gather(decoder.prefill(model.prompts[1]), Axis.VC).tensor
        torch.testing.assert_close(logits[0], model.logits[1], atol=1e-4, rtol=1e-4)
    assert not decoder.full
    assert not flash_calls


@pytest.mark.parametrize(
    ("places", "graphs", "expected"),
    [
        (["cuda:0", "cuda:1"], None, True),
        (["cuda:0", "cuda:1"], False, False),
        (["cuda:0"], None, False),
        (["cuda:0"], True, True),
        (["cpu", "cpu"], None, False),
    ],
)
@pytest.mark.usefixtures("flash_calls")
def test_graphs_are_for_several_gpus(
    places: list[str], graphs: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a decoder is told that it shall have them, or shall not."""
    made_of: list[object] = []
    monkeypatch.setattr(full, "Full", made_of.append)
    devices: dict[int, Any] = {i: SimpleNamespace(device=torch.device(place)) for i, place in enumerate(places)}
    with compile_plan(plan_of(model_of("llama").directory, 2, request_of(), {}, seed=1), backend="cpu") as context:
        decoder = made(context, "llama", graphs=False)
        with patch.object(context, "devices", devices):
            full.full_of(decoder, None, graphs=graphs)
    assert made_of == [decoder] * expected


@pytest.mark.usefixtures("flash_calls")
def test_passes_that_a_cache_cannot_fill_have_no_graph() -> None:
    """However many rows a plan allows."""
    for rows, expected in ((BATCH * LENGTH, True), (BATCH * LENGTH + 1, False)):
        request = evolve(request_of(), max_rows=rows)
        with compile_plan(plan_of(model_of("llama").directory, 2, request, {}, seed=1), backend="cpu") as context:
            assert (made(context, "llama").full is not None) == expected


@pytest.mark.usefixtures("flash_calls")
def test_what_cannot_be_captured_is_read_as_it_is_written(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried once, and a warning says why: virtual devices have no graphs."""
    model = model_of("llama")
    short, long = model.prompts
    with compile_plan(plan_of(model.directory, 2, request_of(), {}, seed=9), backend="cpu") as context:
        decoder = made(context, "llama")
        for _ in range(3):
            logits = context.gather(decoder.read([Prompt(long, 0), Prompt(short, 1)]), Axis.VC).tensor
            torch.testing.assert_close(logits.flip(0), model.logits, atol=1e-4, rtol=1e-4)
    assert not decoder.full
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "virtual devices have no graphs" in record.getMessage()


@pytest.mark.usefixtures("flash_calls")
def test_a_full_pass_can_be_a_graph() -> None:
    """Nothing that it issues waits for a device or makes a tensor of numbers of the host's."""
    for batch, layout in ((1, "reduce"), (4, "gather")):
        plan = plan_of(model_of("llama").directory, 3, request_of(layout, batch=batch), {}, seed=6)
        with compile_plan(plan, backend="cpu") as context:
            decoder = made(context, "llama")
            numbers = [torch.arange(MAX_ROWS)[:, None] * torch.tensor([1, 1, 0, 0])] * len(context.all_devices)
            calls = Calls()
            with torch.inference_mode(), calls:
                decoder.run(numbers)
        assert "_flash_attention_forward" in calls.names
        assert not calls.names & WAITING


@pytest.mark.usefixtures("flash_calls")
def test_a_full_pass_that_did_not_end_has_not_run() -> None:
    """What comes after it is not captured: not everything may have been loaded."""
    model, events = model_of("llama"), list[str]()
    short, long = model.prompts
    with compile_plan(plan_of(model.directory, 2, request_of(), {}, seed=9), backend="cpu") as context:
        decoder = made(context, "llama")
        with capturing(decoder, events):
            with patch.object(decoder.stack, "run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                decoder.prefill(long[:MAX_ROWS])
            for expected in ([], ["capture"]):
                decoder.prefill(long[:MAX_ROWS])
                assert events == expected
            logits = context.gather(decoder.read([Prompt(long, 0), Prompt(short, 1)]), Axis.VC).tensor
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
            assert decoder.full
            kept = ref(decoder)
            del decoder
            assert kept() is None
    finally:
        gc.enable()
