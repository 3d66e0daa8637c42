"""The command that times operations between processes: its screen, its document, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tpplan
from tests.command import command
from tests.contexts import UNEVEN
from tests.exec.tools.bench.cases import SCHEMA
from tpplan.exec.tools.bench.between import children, run
from tpplan.exec.tools.bench.between.case import OPERATIONS

MODEL = Path(__file__).parents[5] / "examples/models/Llama-3.1-8B"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the file of a plan for two devices."""
    model = tpplan.read_model(MODEL)
    devices = tpplan.parse_devices("12GiB,9GiB")
    tpplan.plan(model, devices, cache=tpplan.Cache(tokens=512), max_rows=16).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_operations_between_two_processes(path: Path) -> None:
    """Every one on two sizes, beside gloo by its name; a note says whom it stands in for."""
    words = ("--processes", "--backend", "cpu", "--rounds", "2", "--sizes", "8KiB,64KiB", "--json")
    done = command("bench", path, *words)
    assert done.code == 0, done.err
    document = json.loads(done.out)
    SCHEMA.validate(document)
    assert [(one["operation"], one["rows"]) for one in document["measured"]] == [
        (operation, rows) for operation in OPERATIONS for rows in (1, 8)
    ]
    assert len(document["devices"]) == 2
    assert sum(document["slice_columns"]) == 4096
    for one in document["measured"]:
        assert [(timed["by"], "time" in timed) for timed in one["timed"]] == [("tpplan", True), ("gloo", True)]
    assert any(note.startswith("gloo stands in for NCCL") for note in document["notes"])


def test_a_device_without_a_part_is_no_process(tmp_path: Path) -> None:
    """It is named, before a process is started."""
    UNEVEN.save(tmp_path / "plan.json")
    done = command("bench", tmp_path / "plan.json", "--processes", "--backend", "cpu")
    assert (done.code, done.out) == (2, "")
    told = " ".join(done.err.split())
    assert "--processes times operations on slices of the residual stream, and device 1 (" in told
    assert "hint: leave out --processes, which times the plan's operations in one process" in told
    followed = command("bench", tmp_path / "plan.json", "--backend", "cpu", "--rounds", 2, "--sizes", "80B")
    assert followed.code == 0


def test_too_few_gpus_are_told(path: Path) -> None:
    """With how many there are."""
    done = command("bench", path, "--processes", "--backend", "cuda")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: the plan has 2 devices, this machine ")


def test_processes_that_fail_say_why(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last line of what they said."""
    monkeypatch.setattr(run, "_WORKER", "tpplan.nowhere")
    done = command("bench", path, "--processes", "--backend", "cpu", "--sizes", "8KiB")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: process ")
    assert "No module named tpplan.nowhere" in done.err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_what_was_measured_outlives_processes_that_fail_at_their_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    """The report comes first, whole; then why it ended with an error, and that exit code."""
    measured = children.run

    def crashing(*arguments: Any, **options: Any) -> str:
        measured(*arguments, **options)  # in which processes may have failed at their end, too
        return "process 1 was ended by SIGABRT\nFatal Python error: Aborted"

    monkeypatch.setattr(children, "run", crashing)
    done = command("bench", path, "--processes", "--backend", "cpu", "--rounds", 2, "--sizes", "8KiB", *form)
    assert done.code == 2
    why = "process 1 was ended by SIGABRT: Fatal Python error: Aborted"
    assert f"error: {why}\nhint: tpplan selftest says more of what fails\n" in done.err
    if form:
        document = json.loads(done.out)
        SCHEMA.validate(document)
        assert [one["operation"] for one in document["measured"]] == [*OPERATIONS]
        assert document["failed"] == why
    else:
        assert [one for one in done.out.splitlines() if one in OPERATIONS] == [*OPERATIONS]
