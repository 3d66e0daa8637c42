"""The probe of links: every lie of a link is found, and nothing else is forbidden."""

from __future__ import annotations

import subprocess
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.exec.machine import fake_gpus
from tests.exec.machine.cases import (  # noqa: F401 (for every test here)
    BROKEN,
    COPY,
    DEADLINE_S,
    FLAG,
    LOAD,
    STORE,
    UNTESTED,
    WORKS,
    not_working,
    own_cache,
    report_of,
)
from tests.exec.machine.fake_gpus import GPUS, FakeDriver
from tpplan.exec.machine import probe as link_probe
from tpplan.exec.machine import probe_child as link_child
from tpplan.exec.machine.link_report import Link, routes
from tpplan.exec.machine.links import link_report
from tpplan.exec.machine.probe import probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.exec.machine.fake_gpus import Move
    from tpplan.exec.machine.link_report import Route


def _probed(driver: FakeDriver) -> dict[Route, Link]:
    """Return the verdicts of a probe in this process."""
    found = [event for event in probe(driver, routes(len(driver.names))) if isinstance(event, Link)]
    assert len(found) == len({link.route for link in found}) == len(routes(len(driver.names)))
    return {link.route: link for link in found}


LIES = {
    "zeros arrive": (fake_gpus.zeros, {(COPY, 0, 1), (COPY, 1, 0)}, "zeros arrived"),
    "private mirror": (fake_gpus.private_mirror, {(COPY, 0, 1)}, "nothing arrived"),
    "kernel stores are lost while copies work": (fake_gpus.lost, {(STORE, 0, 2), (STORE, 2, 0)}, "nothing arrived"),
    "kernel loads come from a stale cache": (fake_gpus.stale, {(LOAD, 1, 2)}, "wrong bytes arrived"),
    "what arrives is there for the host alone": (fake_gpus.too_late, {(COPY, 0, 1), (STORE, 2, 0)}, "nothing arrived"),
    "flags are lost": (fake_gpus.lost, {(FLAG, 2, 1)}, "nothing arrived"),
    "one bad direction": (fake_gpus.zeros, {(COPY, 1, 0)}, "zeros arrived of 16 bytes"),
    "only when concurrent": (fake_gpus.when_concurrent, {(STORE, 1, 2)}, "zeros arrived of 4096 bytes with 12 links"),
    "only beside copies": (fake_gpus.beside_others, {(STORE, 0, 1)}, "zeros arrived of 4096 bytes with 12 links"),
    "more arrives": (fake_gpus.in_pages, {(COPY, 0, 1), (LOAD, 1, 0)}, "bytes changed outside of 16 bytes"),
    "more arrives before": (fake_gpus.from_even_on, {(COPY, 0, 1)}, "bytes changed outside of 13 bytes"),
    "few bytes are lost": (fake_gpus.when_not_small, {(COPY, 0, 1)}, "nothing arrived of 13 bytes"),
    "odd bytes are lost": (fake_gpus.in_pairs, {(COPY, 2, 0)}, "wrong bytes arrived of 13 bytes"),
    "only when large": (fake_gpus.when_large, {(LOAD, 0, 1)}, "wrong bytes arrived of 16777216 bytes"),
}


@pytest.mark.parametrize(("lie", "liars", "reason"), LIES.values(), ids=LIES)
def test_a_lie_is_found_and_nothing_else_is_forbidden(
    lie: Callable[[Move], None], liars: set[Route], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly the routes that lie are broken, with a reason that tells what arrived; all others work."""
    if lie is not fake_gpus.when_large:
        monkeypatch.setattr(link_probe, "ALONE", (16, 4096, 4096))
        monkeypatch.setattr(link_probe, "TOGETHER", (4096, 4096))
    found = _probed(FakeDriver(dict.fromkeys(liars, lie), GPUS[:2] if lie is fake_gpus.when_large else GPUS))
    assert {route for route, link in found.items() if link.verdict == BROKEN} == liars
    assert {link.verdict for link in found.values()} == {WORKS, BROKEN}
    assert all(found[route].reason.startswith(reason) for route in liars), found


def test_stores_are_blamed_for_copies_that_fail_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are wrong only while kernels store work, and the stores between the same GPUs are broken."""
    monkeypatch.setattr(link_probe, "ALONE", (16,))
    found = _probed(FakeDriver({(COPY, 1, 0): fake_gpus.beside_others}, GPUS[:2]))
    assert {route: link.reason for route, link in found.items() if link.verdict != WORKS} == {
        (STORE, 1, 0): "zeros arrived of 4096 bytes of copy with 4 links at once"
    }


def test_copies_that_a_former_child_verified_are_beside_stores() -> None:
    """Who tests nothing but stores still finds what is wrong with them beside copies; broken copies are not used."""
    report = report_of("beside_copies")
    assert not_working(report) == {(COPY, 1, 0): BROKEN, (STORE, 0, 1): BROKEN, (STORE, 1, 0): BROKEN}
    reasons = {link.route: link.reason for link in report.links}
    assert reasons[STORE, 0, 1] == "zeros arrived of 4096 bytes with 2 links at once"
    assert reasons[STORE, 1, 0] == "the probe died with exit code 86"


def test_honest_links_all_work() -> None:
    """Of GPUs that do what they are asked every route works."""
    assert {link.verdict for link in _probed(fake_gpus.pair()).values()} == {WORKS}


def test_a_private_mirror_passes_a_round_trip() -> None:
    """The fake mirror is the one that fools a test which copies there and back: the first GPU gets its bytes again."""
    driver = FakeDriver({(COPY, 0, 1): fake_gpus.private_mirror})
    here, there, back = (driver.allocate(gpu, 20) for gpu in (0, 1, 0))
    driver.write(here, memoryview(b"five floats, 4 bytes"))
    driver.move({COPY: [(here, there, driver.allocate(1, 20))]}, slice(0, 20))
    driver.move({COPY: [(there, back, driver.allocate(0, 20))]}, slice(0, 20))
    assert (driver.read(back, 20), driver.read(there, 20)) == (b"five floats, 4 bytes", bytes(20))


@given(
    lies=st.dictionaries(
        st.sampled_from(routes(3)),
        st.sampled_from([fake_gpus.zeros, fake_gpus.lost, fake_gpus.stale, fake_gpus.private_mirror]),
    )
)
@settings(max_examples=examples(50))
def test_any_mixture_of_lies_is_found(lies: dict[Route, Callable[[Move], None]]) -> None:
    """Whichever routes lie in whichever way, exactly they are broken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_probe, "ALONE", (16, 64, 64))
        patch.setattr(link_probe, "TOGETHER", (64, 64))
        found = _probed(FakeDriver(lies))
    assert {route for route, link in found.items() if link.verdict == BROKEN} == set(lies)


def test_full_gpus_are_untested() -> None:
    """Where there is no memory for the test nothing is verified, and nothing is said to be broken."""
    found = _probed(fake_gpus.full()).values()
    assert {(link.verdict, link.reason) for link in found} == {
        (UNTESTED, "no memory for the test: GPU 0 has no 16842752 bytes"),
        (UNTESTED, "no memory for the test: GPU 1 has no 16842752 bytes"),
    }


def test_the_poison_differs_in_every_byte() -> None:
    """No byte of the poison is the byte that is sent there, and contents change from draw to draw."""
    contents = link_probe._Contents(4096)
    (sent, poison), (again, _) = contents.draw(4096), contents.draw(4096)
    assert not any(a == b for a, b in zip(sent, poison, strict=True))
    assert bytes(sent) != bytes(again)


def test_a_crash_or_hang_costs_only_the_links_under_test() -> None:
    """A link whose test hangs, raises or kills the process is broken; verdicts before it stand, other links are tested.

    What the driver prints is not taken for verdicts, but for the reason of the end if it is the last thing said.
    """
    report = report_of("faulty")
    broken = {link.route: link.reason for link in report.links if link.verdict == BROKEN}
    assert broken == {
        (COPY, 1, 0): "the probe died with exit code 86: driver: hello",
        (STORE, 1, 0): "the probe hung for 3 s",
        (LOAD, 0, 1): "nothing arrived of 16 bytes",
        (FLAG, 0, 1): "the probe died with exit code 1: RuntimeError: illegal access at GPU 1",
    }
    assert set(not_working(report)) == set(broken)


def test_a_hang_when_concurrent_breaks_all_links_that_were_busy() -> None:
    """If all links of a mechanism at once hang, none of them may be used; those of the other mechanisms still may."""
    report = report_of("hanging_together")
    reasons = {(link.mechanism, link.verdict): link.reason for link in report.links}
    assert reasons == {
        (COPY, UNTESTED): "no kernel",
        (STORE, WORKS): "every byte arrived",
        (LOAD, BROKEN): "the probe hung for 3 s with 2 links at once",
        (FLAG, UNTESTED): "no kernel",
    }


def test_the_probe_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every child hangs, what did not finish after a few must not be used, nor is it broken; no child is left."""
    started: list[subprocess.Popen[str]] = []
    start = subprocess.Popen.__init__

    def note(process: subprocess.Popen[str], *args: Any, **options: Any) -> None:
        started.append(process)
        start(process, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", note)
    monkeypatch.setattr(link_child, "MOST_HUNG", 1)
    report = link_report(driver="tests.exec.machine.fake_gpus:hanging_always", deadline_s=1.0)
    assert [process.poll() is None for process in started] == [False]
    assert [(link.verdict, link.reason.partition(",")[0]) for link in report.links] == [
        (BROKEN, "the probe hung for 1 s"),
        *[(UNTESTED, "not finished before too many probes had failed")] * 7,
    ]
    report = link_report(driver="tests.exec.machine.fake_gpus:hanging_always", deadline_s=1.0)
    assert [link.verdict for link in report.links] == [BROKEN] * 2 + [UNTESTED] * 6  # the first one is kept


def test_compiling_takes_its_time() -> None:
    """What a child does before it tests anything is not held against the links."""
    report = report_of("slow_to_start")
    assert all(link.verdict == WORKS for link in report.links)


def test_loads_are_tested_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transport uses the loads of kernels, so where they use up all children, all other verdicts are there."""
    monkeypatch.setattr(link_child, "MOST_HUNG", 1)
    report = link_report(driver="tests.exec.machine.fake_gpus:hanging_loads", deadline_s=DEADLINE_S)
    assert not_working(report) == {(LOAD, 0, 1): BROKEN, (LOAD, 1, 0): UNTESTED}


def test_an_owner_that_cannot_be_a_witness_stops_the_probe() -> None:
    """A GPU that loses what its host writes tells nothing of links: no route is tested."""
    events = probe(fake_gpus.forgetful(), routes(2))
    assert [next(events), next(events)] == [(), ()]
    with pytest.raises(RuntimeError, match="GPU 1 does not hold what the host wrote to it"):
        next(events)


def test_ten_gpus_of_a_driver_that_maps_eight_peers() -> None:
    """No child maps more than seven, so all links of all pairs are tested, and work."""
    report = report_of("ten")
    assert (len(report.links), not_working(report)) == (4 * 90, {})


@pytest.mark.parametrize("gpus", [2, 8, 9, 10, 12, 16, 17])
def test_children_have_eight_gpus_at_most(gpus: int) -> None:
    """Any two GPUs are together in a group, and none is larger."""
    groups = link_child._groups([*range(gpus)])
    assert max(map(len, groups)) <= 8
    for pair in permutations(range(gpus), 2):
        assert any({*pair} <= group for group in groups)
    assert len(groups) == 1 or gpus > 8


def test_a_peer_too_many_costs_its_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a driver maps no more is untested, not broken, as its hardware may be fine; all others work."""
    monkeypatch.setattr(link_probe, "ALONE", (16,))
    monkeypatch.setattr(link_probe, "TOGETHER", (16,))
    found = _probed(fake_gpus.ten())
    bad = {(a, b) for _, a, b in (route for route, link in found.items() if link.verdict != WORKS)}
    assert {link.verdict for link in found.values()} == {WORKS, UNTESTED}
    assert all(found[COPY, a, b].reason.startswith("not possible now: GPU ") for a, b in bad)
    assert bad == {(a, b) for _, a, b in routes(10) if 9 in {a, b}}  # the other nine have mapped each other by then


def test_deaths_cost_one_route_each() -> None:
    """Eight routes that end the process leave all others tested."""
    report = report_of("mortal")
    broken = {(m, 0, b) for m in (COPY, STORE, FLAG, LOAD) for b in (1, 2)}
    assert not_working(report) == dict.fromkeys(broken, BROKEN)


def test_a_child_that_is_killed_is_no_verdict() -> None:
    """Who kills a process, such as a system without memory, says nothing of links: they are untested."""
    report = report_of("killed")
    assert not_working(report) == dict.fromkeys(routes(2), UNTESTED)
    assert report.links[0].reason == "the probe died with exit code -9"


def test_verified_links_take_part_when_all_are_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not tested alone again, but get a new verdict where they fail beside the new ones."""
    monkeypatch.setattr(link_probe, "ALONE", (16,))
    driver = FakeDriver({(COPY, 0, 1): fake_gpus.when_concurrent}, GPUS)
    old = [(COPY, 0, 1), (COPY, 1, 0), (STORE, 0, 1)]
    events = [*probe(driver, [(COPY, 0, 2), (COPY, 2, 0)], old)]
    assert ((COPY, 0, 1),) not in events
    assert ((COPY, 0, 2),) in events
    found = {link.route: link.verdict for link in events if isinstance(link, Link)}
    assert found == {(COPY, 0, 1): BROKEN, (COPY, 1, 0): WORKS, (COPY, 0, 2): WORKS, (COPY, 2, 0): WORKS}
