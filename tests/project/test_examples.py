"""The committed examples are what the planner makes today."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import tpplan

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = ("Llama-3.1-8B", "Llama-3.1-70B", "Qwen2.5-7B", "Mixtral-8x7B", "gpt-oss-20b", "DeepSeek-V3")


@pytest.fixture(scope="module")
def made() -> dict[Path, tpplan.SplitPlan]:
    """Plan all examples again."""
    plans: dict[Path, tpplan.SplitPlan] = runpy.run_path(str(EXAMPLES / "make_plans.py"))["examples"]()
    return plans


def test_the_committed_plans_are_current(made: dict[Path, tpplan.SplitPlan]) -> None:
    """Every file is byte for byte what the script writes, and there is no other file."""
    assert sorted(made) == sorted((EXAMPLES / "plans").rglob("*.json"))
    for path, plan in made.items():
        assert path.read_text(encoding="utf-8") == tpplan.dumps(plan), path.name


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_three_sets_of_gpus(model: str) -> None:
    """Each of the seven models has plans for at least three different sets of devices."""
    plans = [tpplan.load(path) for path in (EXAMPLES / "plans" / model).iterdir()]
    assert len({plan.devices for plan in plans}) >= 3
    assert {plan.model.name for plan in plans} == {model}
