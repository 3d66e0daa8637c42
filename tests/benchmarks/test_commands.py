"""The commands with several kinds of measurements: which runs, and what they refuse."""

from __future__ import annotations

import sys

import pytest

from benchmarks import bench_exec, soak
from benchmarks.exec.contender import OPERATIONS
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
    """Two processes with virtual devices time every operation on two sizes; peers that need GPUs are left out."""
    monkeypatch.setattr(sys, "argv", ["bench_exec", "--processes", "--gpus", "2", "--cpu"])
    with pytest.raises(SystemExit) as end:
        bench_exec.main()
    assert not end.value.code
    said = capsys.readouterr().out
    tables = [part.splitlines() for part in said.split("\n\n") if part.startswith("| size |")]
    assert len(tables) == len(OPERATIONS)
    for head, _, *rows in tables:
        assert head.startswith("| size | how | tpplan | NCCL | NCCL window | ")
        assert [row.split(" | ")[:2] for row in rows] == [["| 8 KiB", "called"], ["| 64 KiB", "called"]]
        for row in rows:
            ours, nccl, *others, best = row.strip("| ").split(" | ")[2:]
            assert float(ours.split()[0]) > 0 < float(nccl.split()[0])
            assert {*others} == {"-"}
            assert best.endswith(", NCCL")
    assert ["symm_mem two-shot" in head for head, *_ in tables] == [True, True, False, False]
    assert ["symm_mem copies" in head for head, *_ in tables] == [False, False, True, False]
    assert said.count("NVLS is off for all (NCCL_NVLS_ENABLE=0).") == len(tables)
    assert "symm_mem two-shot was left out: RuntimeError: SymmetricMemory does not" in said
