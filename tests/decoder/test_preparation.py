"""What is run and captured before the first text: all that texts then need, with nothing of it in them."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from attrs import evolve

from tests.decoder_cases import LENGTH, MAX_ROWS, decoding, model_of, plan_of, request_of
from tests.flash_cases import cudnn_calls, flash_calls
from tests.graph_cases import FakeGraph
from tests.weight_plans import fine_units
from tpplan.core.plan import Cache
from tpplan.decoder import Prompt, Sampling, generate, prepare
from tpplan.decoder.decoding import prefill_graphs, steps
from tpplan.decoder.generation import warmup
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["cudnn_calls", "fine_units", "flash_calls"]  # fixtures


def _captured(issue: Callable[[], None], what: str) -> FakeGraph:
    """Do some work, and return what does it again: virtual devices have no graphs."""
    issue()
    return FakeGraph(issue, lambda: _captured(issue, what))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [LENGTH, 5])
@pytest.mark.usefixtures("flash_calls", "cudnn_calls")
def test_passes_of_one_sequence_are_captured_too(batch: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they have graphs of their own, also if a sequence is shorter than a pass."""
    monkeypatch.setattr(prefill_graphs, "_LEAST_OF_ONE", 6)
    prompts = [[Prompt([5] * min(6, length))], [Prompt([5] * 4, 0, 1)], [Prompt([5] * 2)]]
    if batch > 1:
        prompts.append([Prompt([5] * 3), Prompt([5] * 3, 1)])
    request = evolve(request_of(batch=batch), cache=Cache("fp16", batch * length))
    with decoding(plan_of(model_of("llama").directory, 3, request, {}, seed=8), "llama", "fp32") as decoder:
        decoder.prompt_graphs = decoder.new_prompt_graphs([3, 6])
        read, before = decoder.read, list[int]()
        with patch.object(decoder, "captured", side_effect=_captured) as captured:

            def recording(each: Sequence[Prompt]) -> tuple[Tensor, ...]:
                before.append(captured.call_count)
                return read(each)

            monkeypatch.setattr(decoder, "read", recording)
            prepare(decoder)
            count = captured.call_count
            assert count == 2 + batch  # of 3 rows, and of one sequence and of several with 6
            assert before == [0] * count + [*range(count)]  # all run as they are written before one is captured
            for each in prompts:
                decoder.read(each)
            assert captured.call_count == count


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["likeliest", "drawn"])
@pytest.mark.usefixtures("flash_calls")
def test_nothing_is_captured_after_that(sampling: Sampling) -> None:
    """Neither passes of any size nor steps of any span; and texts are what they are without."""
    model = model_of("llama")
    plan = plan_of(model.directory, 3, request_of(), {}, seed=8)
    with decoding(plan, "llama", "fp32") as decoder, patch.object(steps, "_SHORTEST_SPAN", 16):
        expected = list(generate(decoder, model.prompts, LENGTH - 13, sampling=sampling))
        decoder.prompt_graphs, decoder._step_graphs = (
            decoder.new_prompt_graphs([3, 6]),
            {2: decoder.new_step_graphs(2, graphs=True)},
        )
        with patch.object(decoder, "captured", side_effect=_captured) as captured:
            prepare(decoder, 2, sampling=sampling)
            assert captured.call_count == 6  # passes of 3 and 6 rows, and steps that look at 16, 32, 64 and 96 places
            found = list(generate(decoder, model.prompts, LENGTH - 13, sampling=sampling))
    assert found == expected
    assert captured.call_count == 6


def test_a_decoder_without_graphs_is_ready_too() -> None:
    """It runs what a text begins with; a text that goes on has lost its cache, and is told so."""
    model = model_of("mistral")
    with decoding(plan_of(model.directory, 2, request_of(), {}, seed=8), "mistral", "fp32") as decoder:
        texts = generate(decoder, model.prompts, 7)
        next(texts)
        prepare(decoder, 2)
        with pytest.raises(RequestError, match=r"these 2 texts cannot go on: prepare\(\) has run since"):
            next(texts)
        found = list(generate(decoder, model.prompts, 7))
    assert [list(tokens) for tokens in zip(*found, strict=True)] == [tokens[:7] for tokens in model.tokens]


@pytest.mark.parametrize("sequences", [-1, 0, 3])
def test_sequences_that_a_plan_has_no_room_for(sequences: int) -> None:
    """They are refused before anything is run, and a text that goes on does."""
    model = model_of("mistral")
    with decoding(plan_of(model.directory, 2, request_of(), {}, seed=8), "mistral") as decoder:
        texts = generate(decoder, model.prompts, 7)
        next(texts)
        with pytest.raises(RequestError, match=f"steps of {sequences} sequences?, the plan has room for 2"):
            prepare(decoder, sequences)
        assert next(texts)


@pytest.mark.parametrize(
    ("on_gpus", "sizes", "expected"),
    [
        (True, [], [MAX_ROWS, MAX_ROWS, 1]),
        # a pass as it is written and as it is captured, and what a text begins with
        (True, [3], [MAX_ROWS, MAX_ROWS, 3, 3, 3]),
        (True, [3, MAX_ROWS], [MAX_ROWS, 3, MAX_ROWS, 3, 3]),
        (False, [], [1]),
    ],
)
@pytest.mark.usefixtures("flash_calls")
def test_full_passes_are_run(on_gpus: bool, sizes: list[int], expected: list[int]) -> None:
    """Two of a text as they are written, on GPUs, where no graph is of as many rows."""
    with decoding(plan_of(model_of("llama").directory, 2, request_of(), {}, seed=8), "llama", "fp32") as decoder:
        decoder.prompt_graphs = decoder.new_prompt_graphs(sizes) if sizes else None
        with (
            patch.object(decoder, "captured", side_effect=_captured),
            patch.object(decoder.forward, "prefill", wraps=decoder.forward.prefill) as run,
            patch.object(warmup, "on_gpus", return_value=on_gpus),
        ):
            prepare(decoder)
    assert [len(call.args[0][0]) for call in run.call_args_list] == expected


def test_steps_that_cannot_be_captured_run_as_they_are_written(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried once, and a warning says why: virtual devices have no graphs."""
    model = model_of("mistral")
    with decoding(plan_of(model.directory, 2, request_of(), {}, seed=8), "mistral", "fp32") as decoder:
        decoder._step_graphs = {2: decoder.new_step_graphs(2, graphs=True)}
        found = list(generate(decoder, model.prompts, 7))
    assert [list(tokens) for tokens in zip(*found, strict=True)] == [tokens[:7] for tokens in model.tokens]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "a step cannot be captured, none is a graph from now on" in record.getMessage()
