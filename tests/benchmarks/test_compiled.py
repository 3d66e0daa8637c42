"""The Llama decoder in plain torch that is timed beside tpplan's: right without a compiler, whole and in parts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

from benchmarks.common import random_checkpoint
from benchmarks.decode import compiled_run
from benchmarks.decode.compiled_run import Decoder, Parts, Place, Weights
from benchmarks.decode.order import PROMPT, prompts
from tests.bench_decode_cases import CONFIG, generated, order
from tests.later import transformers
from tests.weight_plans import fine_units

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.decode.order import Order
    from benchmarks.decode.rows import Row

__all__ = ["fine_units", "order"]  # fixtures

CPU = torch.device("cpu")
STEPS = 4


def test_it_measures_what_tpplan_does(order: Order) -> None:
    """From the same prompts, so that figures can be compared, and with the same tokens."""
    rows: list[Row] = []
    compiled_run.measure(evolve(order, gpus=1), 0, rows.append)
    found = {row.what: row for row in rows}
    assert list(found) == ["load", "decode, batch 1", "decode, batch 3", "prefill of 40 tokens"]
    assert all(row.value for row in rows)
    assert "compiled and captured in" in found["decode, batch 1"].note
    expected = generated(order, order.plan())
    assert list(found["decode, batch 1"].tokens) == list(found["decode, batch 3"].tokens) == expected


@pytest.mark.parametrize("world", [1, 2])
def test_logits_are_those_of_transformers(tmp_path: Path, world: int) -> None:
    """Of prompts and of steps, with scaled RoPE, by one process and by two that sum and choose together."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = {**scaling, "original_max_position_embeddings": 16}
    random_checkpoint.write(tmp_path, {**CONFIG, "vocab_size": 204, "rope_scaling": scaled})
    barrier, told = Barrier(world), {}

    def process(rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        def total(x: torch.Tensor) -> torch.Tensor:
            told[rank] = x
            barrier.wait()
            summed = sum(told[i] for i in range(world))
            barrier.wait()
            assert isinstance(summed, torch.Tensor)
            return summed

        place = Place(rank, world)
        with torch.no_grad():
            decoder = Decoder(Weights(str(tmp_path), place, CPU), place, 3, PROMPT + STEPS)
            tokens = [decoder.read(given, Parts(), total)]
            logits = [decoder.logits]
            decoder.start(PROMPT, tokens[0])
            for _ in range(STEPS):
                decoder.step(Parts(), total)
                tokens.append(decoder.tokens.clone())
                logits.append(decoder.logits)
        return logits, torch.cat(tokens, 1)

    given = torch.tensor(prompts(3, 204))
    with ThreadPoolExecutor(world) as threads:
        found = [*threads.map(process, range(world))]
    tokens = found[0][1]
    assert all(torch.equal(each, tokens) for _, each in found)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    with torch.no_grad():
        right = model(torch.cat([given, tokens[:, :-1]], 1)).logits[:, PROMPT - 1 :]
    for i, parts in enumerate(zip(*(logits for logits, _ in found), strict=True)):
        torch.testing.assert_close(torch.cat(parts, -1), right[:, i], atol=1e-5, rtol=1e-4)
    assert torch.equal(tokens, right.argmax(-1))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "this is for Llama"),
        ({"attention_bias": True}, "a plain Llama has no model.layers.0.self_attn"),
        ({}, "lm_head.weight is not divisible by 2"),
    ],
)
def test_what_it_does_not_run(tmp_path: Path, more: dict[str, object], message: str) -> None:
    """Is refused, and not run wrong."""
    random_checkpoint.write(tmp_path, {**CONFIG, **more})
    with pytest.raises(ValueError, match=message):
        Weights(str(tmp_path), Place(0, 2 if not more else 1), CPU)
