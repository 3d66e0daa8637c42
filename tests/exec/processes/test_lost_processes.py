"""Three processes in network namespaces of their own, of which one is lost, late or cut off while they generate."""

from __future__ import annotations

import pytest

from benchmarks.reliability import lost_process

#: Short enough for a test, and longer than TCP takes to send again what was lost in a cut of two seconds.
_TIMEOUT_S, _LATE_S, _CUT_S = 9, 3, 2
#: Seconds in which processes have to end: the machine may be busy with other tests.
_MOST_S = _TIMEOUT_S + 4 * lost_process.GRACE_S


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, lost_process.Outcome], list[int]]:
    """Return how the processes of each case that is run ended, all side by side, and the tokens of one process alone.

    Dozens of processes at once may be too much for a slow machine: what goes wrong then has to go right alone.
    """
    if reason := lost_process.why_not():
        pytest.skip(reason)
    chosen = {item.name for item in request.session.items if item.path == request.path}
    cases = [case for case in lost_process.cases(_LATE_S, _CUT_S) if f"test_all_end_alike[{case.name}]" in chosen]
    outcomes, expected = lost_process.run(cases, _TIMEOUT_S, tmp_path_factory.mktemp("lost"))
    found = {outcome.case.name: outcome for outcome in outcomes}
    for name, outcome in found.items():
        if outcome.problems(expected, _MOST_S):
            (found[name],), _ = lost_process.run([outcome.case], _TIMEOUT_S, tmp_path_factory.mktemp("again"))
    return found, expected


@pytest.mark.parametrize("name", [case.name for case in lost_process.cases(_LATE_S, _CUT_S)])
def test_all_end_alike(name: str, ends: tuple[dict[str, lost_process.Outcome], list[int]]) -> None:
    """All have the tokens of one process, or all that are left end in time with an error that names the lost one."""
    outcomes, expected = ends
    assert len(set(expected)) > 1
    assert not outcomes[name].problems(expected, _MOST_S), outcomes[name].ends


def _ends(*causes: str) -> list[lost_process.End]:
    return [lost_process.End(rank, 1 if cause else -9, 7, [1], cause) for rank, cause in enumerate(causes)]


@pytest.mark.parametrize(
    ("fault", "rank", "causes", "problem"),
    [
        ("kill", 1, ("process 1 is lost: x", "", "process 1 is lost: y"), ""),
        ("kill", 1, ("process 1 is lost: x", "", "process 0 is lost: x"), "process 2 does not name process 1"),
        ("gone", 0, ("process 1 is lost: x",) + 2 * ("process 0 is lost: x",), ""),
        ("never", 2, (*2 * ("process 2 of 3 did not come",), ""), ""),
        ("stop", 0, ("", "Traceback", "process 0 is lost"), "process 1 ended with a traceback"),
        ("late", 1, ("", "", ""), "process 0 ended with -9: "),
    ],
)
def test_what_is_wrong_is_noticed(fault: str, rank: int, causes: tuple[str, ...], problem: str) -> None:
    """A process that ends otherwise, late, or with other tokens is a problem of the case."""
    outcome = lost_process.Outcome(lost_process.Case(fault, rank), _ends(*causes))
    found = outcome.problems([1, 2], 8)
    assert problem in found if problem else not found
    assert any("has other tokens" in each for each in outcome.problems([2], 8))
    late = [each for each in outcome.problems([1, 2], 6) if "ended after 7.0 s" in each]
    assert bool(late) == outcome.case.is_fatal
