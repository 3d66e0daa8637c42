"""The committed examples are what the planner makes today."""

from __future__ import annotations

from pathlib import Path

import pytest

import tpplan
from tests.command import command
from tpplan.planner.manifest import load
from tpplan.reports.manifest import Inputs

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = ("Llama-3.1-8B", "Llama-3.1-70B", "Qwen2.5-7B", "Mixtral-8x7B", "gpt-oss-20b", "DeepSeek-V3")


def test_the_committed_plans_are_current() -> None:
    """Every file is byte for byte what the manifest makes, and there is no other file."""
    manifest = load(str(EXAMPLES / "tpplan.toml"))
    assert sorted(entry.file for entry in manifest.plans) == sorted(map(str, (EXAMPLES / "plans").rglob("*.json")))
    for entry in manifest.plans:
        plan = Inputs(tpplan.read_model(entry.model), tpplan.parse_devices(entry.gpus)).plan(entry.options)
        assert Path(entry.file).read_text(encoding="utf-8") == tpplan.dumps(plan), entry.file


def test_check_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments the command checks the manifest of the folder, and finds every plan current."""
    monkeypatch.chdir(EXAMPLES)
    done = command("check")
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("\n21 of 21 plans current\n")


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_three_sets_of_gpus(model: str) -> None:
    """Each of the seven models has plans for at least three different sets of devices."""
    plans = [tpplan.load(path) for path in (EXAMPLES / "plans" / model).iterdir()]
    assert len({plan.devices for plan in plans}) >= 3
    assert {plan.model.name for plan in plans} == {model}
