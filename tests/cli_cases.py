"""What the tests of commands share: models, a folder to work in, schemas, and how a failure looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator

from tests.command import command
from tpplan.files.jsontext import render

if TYPE_CHECKING:
    from tests.command import Done

ROOT = Path(__file__).parent.parent
LLAMA_8B = ROOT / "examples/models/Llama-3.1-8B"
LLAMA_70B = ROOT / "examples/models/Llama-3.1-70B"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty directory, as nobody's terminal."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "TPPLAN_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return tmp_path


def written_plans() -> tuple[str, str]:
    """Write plans of one model for different GPUs."""
    for name, gpus in (("a.json", "24GiB,12GiB"), ("b.json", "24GiB,24GiB")):
        assert command("plan", LLAMA_8B, "--gpus", gpus, "--context", 4096, "-o", name).code == 0
    return "a.json", "b.json"


def conforms(text: str, schema: str) -> Any:
    """Return the one document that a text is, after checking it against a schema of the project."""
    document = json.loads(text)
    rules = json.loads((ROOT / f"schemas/{schema}.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator(rules).validate(document)
    assert text == render(document)
    return document


def refused(*arguments: object, code: int = 2, stdin: bytes = b"") -> str:
    """Return what standard error says of a command that must fail, after checking how it says it."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    done = command(*arguments, stdin=stdin)
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    return judged(done, code)


def judged(done: Done, code: int) -> str:
    """Check the form of a failure: its code, an error in one paragraph, a hint, nothing on standard output."""
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")
    assert "\nhint: " in done.err
    assert "\n\n" not in done.err
    assert "Traceback" not in done.err
    assert "has a bug" not in done.err
    return done.err
