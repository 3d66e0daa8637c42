"""A process for each device, which torch.distributed brings together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.common import children
from tests.transformers.cases import model_of
from tpplan.transformers.trial import uneven_plan
from tpplan.weights.source import Source

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "deepseek_v3", "mixtral"])
def test_tokens_are_those_of_one_device(tmp_path: Path, model_type: str) -> None:
    """Three processes, of which the second has no heads, make the tokens of one, by transformers' generate in each."""
    model, path = model_of(model_type), tmp_path / "plan.json"
    uneven_plan(Source.read(model.directory), "reduce", "idle").save(path)
    lines: list[str] = []
    words = [sys.executable, "examples/generate_together.py", str(path), str(model.directory), "5,17,99", "cpu"]
    assert not children.run([*words, "--new", "12", "--engine", "transformers"], 3, 240, lines.append, ROOT)
    wanted = model.whole.generate(torch.tensor([[5, 17, 99]]), max_new_tokens=12, do_sample=False)
    assert [*map(int, lines)] == wanted[0, 3:].tolist()
