"""The example that starts a model by a committed plan."""

from __future__ import annotations

import io
import runpy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tpplan
from tests.decoder_cases import LENGTH, model_of, plan_of, request_of
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.errors import PlanError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example() -> dict[str, Any]:
    """Return what the script defines."""
    return runpy.run_path(str(ROOT / "examples/serve_start.py"))


def test_a_current_plan_starts(example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of tokens is answered with tokens, or with what is wrong with it."""
    directory = model_of("mistral").directory
    model = tpplan.read_model(directory)
    plan = tpplan.plan(model, tpplan.parse_devices("3x3GiB"), cache=tpplan.Cache("fp16", LENGTH), max_rows=8)
    plan.save(tmp_path / "plan.json")
    with patch("sys.stdin", io.StringIO("5,17,99\n\n99999\nlighthouse\n8, 4\n")):
        example["main"](str(tmp_path / "plan.json"), str(directory), "cpu")
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(1).startswith("error: token 99999, the model's are 0 to ")
    assert lines.pop(1).startswith("error: ")  # the directory has no tokenizer
    assert [len(line.split()) for line in lines] == [example["MOST_NEW_TOKENS"]] * 2


def test_a_stale_plan_is_refused(example: dict[str, Any], tmp_path: Path) -> None:
    """A plan that planning again would not give is not loaded, and the error says why."""
    directory = model_of("mistral").directory
    plan_of(directory, 3, request_of(), {}, seed=1).save(tmp_path / "plan.json")
    with (
        pytest.raises(PlanError, match=r"plan.json is stale: the same inputs give another plan"),
        example["started"](str(tmp_path / "plan.json"), str(directory), "cpu"),
    ):
        pass


def test_without_gpus_the_hint_names_the_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with too few GPUs ends the script with a hint that its own command line understands."""
    directory, path = model_of("mistral").directory, tmp_path / "plan.json"
    devices = tpplan.parse_devices("3x3GiB")
    tpplan.plan(tpplan.read_model(directory), devices, cache=tpplan.Cache("fp16", LENGTH), max_rows=8).save(path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["serve_start.py", str(path), str(directory)])
    with pytest.raises(SystemExit, match=r"or run on virtual devices with cpu as the third argument$"):
        runpy.run_path(str(ROOT / "examples/serve_start.py"), run_name="__main__")


@pytest.mark.parametrize(("heading", "shape"), [("### In Python", (16, 1)), ("**Step by step.**", (15, 2))])
def test_the_python_of_the_page(
    heading: str, shape: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of docs/run-a-model.md run, and give texts of as many tokens as they ask for."""
    text = (ROOT / "docs/run-a-model.md").read_text(encoding="utf-8")
    code = text.partition(heading)[2].partition("```python\n")[2].partition("```")[0]
    directory = model_of("mistral").directory
    (tmp_path / "models").mkdir()
    (tmp_path / "models/llama").symlink_to(directory)
    (tmp_path / "plans").mkdir()
    plan_of(directory, 2, request_of(), {}, seed=1).save(tmp_path / "plans/llama.json")
    monkeypatch.chdir(tmp_path)
    found: list[tuple[int, ...]] = []
    exec(code, {"print": found.append})  # noqa: S102 (our own)
    assert torch.tensor(found).shape == shape
