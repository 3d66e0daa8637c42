"""The commands with several kinds of measurements: which runs, and what they refuse."""

from __future__ import annotations

import sys

import pytest

from benchmarks import soak
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
