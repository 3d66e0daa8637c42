"""The checker on the sequences of ExLlamaV2, which are not in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.exec.programs import exllamav2_programs as exllamav2
from tests.exec.programs.ordering_cases import kinds
from tpplan.exec.programs.ordering import RACE, Call, check

if TYPE_CHECKING:
    from tpplan.exec.programs.program import Program


def pinned_races(*programs: Program) -> list[str]:
    """What is found in programs of the original, all of which is about its pinned buffer."""
    found = check([Call(each) for each in programs])
    assert all("stage@host" in finding.message for finding in found)
    return [finding.message for finding in found if finding.kind == RACE]


def test_exllamav2_broadcasts_before_it_has_downloaded() -> None:
    """Nothing orders the download from the source before the uploads to the other devices."""
    races = pinned_races(exllamav2.broadcast(0, (0, 1, 2)))
    download = '"own0: stage@host[0:12] = input@0[0:12]" of program 1'
    assert [download in race for race in races] == [True, True]
    assert '"own1: output@1[0:12] = stage@host[0:12]" of program 1' in races[0]
    assert '"own2: output@2[0:12] = stage@host[0:12]" of program 1' in races[1]


def test_exllamav2_overwrites_what_the_last_allgather_has_not_uploaded() -> None:
    """One alone is in order; the next one's download races with the uploads of the one before."""
    gather = exllamav2.allgather((0, 4, 8, 12))
    assert pinned_races(gather) == []
    races = pinned_races(gather, gather)
    assert any(
        '"own0: stage@host[0:4] = input@0[0:4]" of program 2' in race
        and '"own1: output@1[0:12] = stage@host[0:12]" of program 1' in race
        for race in races
    )


def test_exllamav2_returns_what_it_is_still_gathering() -> None:
    """The caller reads the pinned buffer with nothing to wait for; with an event to wait for it would be in order."""
    assert kinds(exllamav2.gather((0, 4, 12), waited_for=True)) == []
    found = check([Call(exllamav2.gather((0, 4, 12), waited_for=False))])
    assert [finding.kind for finding in found] == [RACE, RACE]
    assert all("the caller reads and overwrites output@host" in finding.message for finding in found)


def test_exllamav2_sums_over_what_a_third_device_has_not_fetched() -> None:
    """Two in a row are in order on two devices; on three the second one's first sum races with the last uploads."""
    assert pinned_races(*[exllamav2.all_reduce(2)] * 3) == []
    assert pinned_races(exllamav2.all_reduce(3)) == []
    (race,) = pinned_races(*[exllamav2.all_reduce(3)] * 2)
    assert '"own0: stage@host[0:12] = output@0[0:12]" of program 2' in race
    assert '"own1: output@1[0:12] = stage@host[0:12]" of program 1' in race
