"""What is captured before the first text, on real GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from attrs import evolve

from tests.decoder_cases import LENGTH, model_of, plan_of, request_of
from tests.later import transformers
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.axes import Axis
from tpplan.decoder import Decoder, Prompt, Sampling, generate, prepare
from tpplan.decoder.decoding import steps
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from pathlib import Path

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.multi_gpu
def test_nothing_is_captured_after_that(tmp_path: Path) -> None:
    """GPUs have graphs of passes of prompts unless they are told not to; texts are those that others lead to."""
    model = model_of("llama")
    transformers.AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plan = plan_of(tmp_path, min(GPUS, 4), evolve(request_of(), max_rows=16), {}, seed=4)
    sampling = Sampling(temperature=0.8, seed=3)
    prompts, few = [Prompt([7] * 20, 0), Prompt([9] * 12, 1)], [model.prompts[0], model.prompts[0][:3]]
    with compile_plan(plan, backend="cuda", scratch=False) as context, patch.object(steps, "_SHORTEST_SPAN", 16):
        weights = load_weights(plan, tmp_path, context)
        decoder, other, eager = (Decoder(context, tmp_path, weights, graphs=each) for each in (None, None, False))
        assert decoder.prompt_graphs is not None
        assert eager.prompt_graphs is None
        prepare(decoder, 2, sampling=sampling)
        with patch.object(decoder, "captured", side_effect=AssertionError):
            texts = list(generate(decoder, few, LENGTH - 5, sampling=sampling))
            found = context.gather(decoder.read(prompts), Axis.VOCAB).tensor.clone()
            assert decoder.prompt_graphs is not None
        expected = context.gather(eager.read(prompts), Axis.VOCAB).tensor
        assert (found - expected).norm() < 0.03 * expected.norm()
        assert texts == list(generate(other, few, LENGTH - 5, sampling=sampling))


@pytest.mark.multi_gpu
def test_what_cannot_be_captured_is_read_as_it_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A capture that fails half-way leaves a decoder that reads on, and steps as graphs."""
    model = model_of("llama")
    transformers.AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plan = plan_of(tmp_path, min(GPUS, 4), evolve(request_of(), max_rows=16), {}, seed=4)
    prompts = [Prompt([7] * 20, 0), Prompt([9] * 12, 1)]
    with compile_plan(plan, backend="cuda", scratch=False) as context:
        weights = load_weights(plan, tmp_path, context)
        decoder, eager = (Decoder(context, tmp_path, weights, graphs=graphs) for graphs in (None, False))
        expected = context.gather(eager.read(prompts), Axis.VOCAB).tensor.clone()
        run, calls = decoder.forward.prefill, []

        def broken(*words: Any, **more: Any) -> tuple[torch.Tensor, ...]:
            xs = run(*words, **more)
            calls.append(torch.cuda.is_current_stream_capturing())
            if calls[-1]:
                raise RuntimeError("no memory")
            return xs

        with patch.object(decoder.forward, "prefill", broken):
            for _ in range(3):
                found = context.gather(decoder.read(prompts), Axis.VOCAB).tensor
                assert (found - expected).norm() < 0.03 * expected.norm()
        assert calls == [False, True, *[False] * 5]
        assert decoder.prompt_graphs is None
        texts = [list(generate(each, model.prompts, 8)) for each in (decoder, eager)]
    assert texts[0] == texts[1]
    (record,) = caplog.records
    assert "no memory" in record.getMessage()
