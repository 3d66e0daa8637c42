"""The commands with several kinds of measurements: which runs, and what they refuse."""

from __future__ import annotations

import sys

import pytest

from benchmarks import bench_exec, soak
from benchmarks.reliability import interrupts, lost_process, operations


@pytest.mark.parametrize(
    ("given", "module", "arguments"),
    [
        ([], operations, []),
        (["--seed", "3"], operations, ["--seed", "3"]),
        (["operations", "--seed", "3"], operations, ["--seed", "3"]),
        (["interrupts", "--step", "0"], interrupts, ["--step", "0"]),
        (["lost"], lost_process, []),
    ],
)
def test_the_first_word_of_soak(
    given: list[str], module: object, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of its modules runs, and with which arguments."""
    ran = []
    for each in (operations, interrupts, lost_process):
        monkeypatch.setattr(each, "main", lambda said, each=each: ran.append((each, said)))
    monkeypatch.setattr(sys, "argv", ["soak", *given])
    soak.main()
    assert ran == [(module, arguments)]


def test_a_word_that_soak_has_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ends with the words that it has."""
    monkeypatch.setattr(sys, "argv", ["soak", "interrupt"])
    with pytest.raises(SystemExit, match="2"):
        soak.main()
    assert capsys.readouterr().err == "error: soak has no 'interrupt'\nhint: it has operations, interrupts, lost\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--gpus", "2"], "--gpus and --cpu are for --processes"),
        (["--cpu"], "--gpus and --cpu are for --processes"),
        (["--processes", "--rounds", "3"], "not allowed with argument"),
    ],
)
def test_options_of_the_other_kind(
    given: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``bench_exec`` refuses options that what it measures has not."""
    monkeypatch.setattr(sys, "argv", ["bench_exec", *given])
    with pytest.raises(SystemExit, match="2"):
        bench_exec.main()
    assert message in capsys.readouterr().err


def test_operations_between_processes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes with virtual devices time every operation on two sizes."""
    monkeypatch.setattr(sys, "argv", ["bench_exec", "--processes", "--gpus", "2", "--cpu"])
    with pytest.raises(SystemExit) as end:
        bench_exec.main()
    assert not end.value.code
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines() if " KiB eager: " in line]
    kinds = ("all_reduce", "allgather", "broadcast")
    assert rows == [[kind, size, "KiB", "eager:"] for size in ("8", "64") for kind in kinds]
