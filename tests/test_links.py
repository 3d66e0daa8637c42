"""The link report: every lie of a link is found, and nothing else is forbidden."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import fake_gpus
from tests.fake_gpus import GPUS, FakeDriver
from tpplan import codec
from tpplan.exec import kernel_cache, link_cache, link_child, link_driver, link_probe, links
from tpplan.exec.link_probe import probe
from tpplan.exec.link_report import Link, LinkReport, Mechanism, Verdict, routes
from tpplan.exec.links import link_report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fake_gpus import Move
    from tpplan.exec.link_report import Route

COPY, STORE, FLAG, LOAD = Mechanism
WORKS, BROKEN, UNTESTED = Verdict

#: Long enough for an honest step on a busy machine.
DEADLINE_S = 3.0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the cache of each test to itself; return its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(links, "_UNKEPT", {})
    return tmp_path / "tpplan"


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Probe in this process, with small moves; return the list of drivers that were probed."""
    used: list[str] = []

    def stand_in(driver: str, _gpus: object, wanted: list[Route], _deadline: object) -> tuple[Link, ...]:
        used.append(driver.rpartition(":")[2])
        events = probe(link_child.load_driver(driver), wanted)
        found = {event.route: event for event in events if isinstance(event, Link)}
        return tuple(found[route] for route in wanted)

    monkeypatch.setattr("tpplan.exec.links.probe_in_child", stand_in)
    monkeypatch.setattr(link_probe, "ALONE", (16,))
    monkeypatch.setattr(link_probe, "TOGETHER", (16,))
    return used


def _probed(driver: FakeDriver) -> dict[Route, Link]:
    """Return the verdicts of a probe in this process."""
    found = [event for event in probe(driver, routes(len(driver.names))) if isinstance(event, Link)]
    assert len(found) == len({link.route for link in found}) == len(routes(len(driver.names)))
    return {link.route: link for link in found}


def _report(name: str, **options: bool) -> LinkReport:
    return link_report(driver=f"tests.fake_gpus:{name}", deadline_s=DEADLINE_S, **options)


def _not_working(report: LinkReport) -> dict[Route, Verdict]:
    return {link.route: link.verdict for link in report.links if link.verdict != WORKS}


def _broken(report: LinkReport) -> dict[Route, str]:
    """Return the reasons of broken links."""
    return {link.route: link.reason for link in report.links if link.verdict == BROKEN}


LIES = {
    "zeros arrive": (fake_gpus.zeros, {(COPY, 0, 1), (COPY, 1, 0)}, "zeros arrived"),
    "private mirror": (fake_gpus.private_mirror, {(COPY, 0, 1)}, "nothing arrived"),
    "kernel stores are lost while copies work": (fake_gpus.lost, {(STORE, 0, 2), (STORE, 2, 0)}, "nothing arrived"),
    "kernel loads come from a stale cache": (fake_gpus.stale, {(LOAD, 1, 2)}, "wrong bytes arrived"),
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
    report = _report("beside_copies")
    assert _not_working(report) == {(COPY, 1, 0): BROKEN, (STORE, 0, 1): BROKEN, (STORE, 1, 0): BROKEN}
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
    driver.move({COPY: [(here, there)]}, slice(0, 20))
    driver.move({COPY: [(there, back)]}, slice(0, 20))
    assert (driver.read(back, 20), driver.read(there, 20)) == (b"five floats, 4 bytes", bytes(20))


@given(
    lies=st.dictionaries(
        st.sampled_from(routes(3)),
        st.sampled_from([fake_gpus.zeros, fake_gpus.lost, fake_gpus.stale, fake_gpus.private_mirror]),
    )
)
@settings(max_examples=50)
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
    report = _report("faulty")
    broken = {link.route: link.reason for link in report.links if link.verdict == BROKEN}
    assert broken == {
        (COPY, 1, 0): "the probe died with exit code 86: driver: hello",
        (STORE, 1, 0): "the probe hung for 3 s",
        (LOAD, 0, 1): "nothing arrived of 16 bytes",
        (FLAG, 0, 1): "the probe died with exit code 1: RuntimeError: illegal access at GPU 1",
    }
    assert set(_not_working(report)) == set(broken)


def test_a_hang_when_concurrent_breaks_all_links_that_were_busy() -> None:
    """If all links of a mechanism at once hang, none of them may be used; those of the other mechanisms still may."""
    report = _report("hanging_together")
    reasons = {(link.mechanism, link.verdict): link.reason for link in report.links}
    assert reasons == {
        (COPY, UNTESTED): "no kernel",
        (STORE, WORKS): "every byte arrived",
        (LOAD, BROKEN): "the probe hung for 3 s with 2 links at once",
        (FLAG, UNTESTED): "no kernel",
    }


def test_the_probe_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every child hangs, what did not finish after a few must not be used; no child is left."""
    started: list[subprocess.Popen[str]] = []
    start = subprocess.Popen.__init__

    def note(process: subprocess.Popen[str], *args: Any, **options: Any) -> None:
        started.append(process)
        start(process, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", note)
    monkeypatch.setattr(link_child, "CHILDREN", 1)
    report = link_report(driver="tests.fake_gpus:hanging_always", deadline_s=1.0)
    assert [process.poll() is None for process in started] == [False]
    assert {link.verdict for link in report.links} == {BROKEN}
    assert [link.reason.partition(",")[0] for link in report.links[:2]] == [
        "the probe hung for 1 s",
        "not finished before too many probes had failed",
    ]


def test_compiling_takes_its_time() -> None:
    """What a child does before it tests anything is not held against the links."""
    report = link_report(driver="tests.fake_gpus:slow_to_start", deadline_s=1.0)
    assert all(link.verdict == Verdict.WORKS for link in report.links)


def test_loads_are_tested_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transport uses the loads of kernels, so where they use up all children, all other verdicts are there."""
    monkeypatch.setattr(link_child, "CHILDREN", 1)
    report = link_report(driver="tests.fake_gpus:hanging_loads", deadline_s=DEADLINE_S)
    assert _not_working(report) == {(LOAD, 0, 1): BROKEN, (LOAD, 1, 0): BROKEN}


def test_an_owner_that_cannot_be_a_witness_stops_the_probe() -> None:
    """A GPU that loses what its host writes tells nothing of links: no route is tested."""
    events = probe(fake_gpus.forgetful(), routes(2))
    assert [next(events), next(events)] == [(), ()]
    with pytest.raises(RuntimeError, match="GPU 1 does not hold what the host wrote to it"):
        next(events)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken_driver", "the probe died with exit code 1: OSError: no such driver"),
        ("stuck", "the probe hung for 3 s"),
        ("changing", "the probe died with exit code 1: it sees other GPUs than its parent: GPU-c, GPU-b, GPU-a"),
    ],
)
def test_a_child_that_cannot_start_leaves_all_untested(name: str, reason: str, cache: Path) -> None:
    """Where no probe runs, or a GPU fails by itself, no link is verified or blamed, and nothing is cached."""
    assert {(link.verdict, link.reason) for link in _report(name).links} == {(UNTESTED, reason)}
    assert not cache.exists()


@pytest.mark.usefixtures("probes")
def test_mechanisms_without_a_test_are_untested(cache: Path) -> None:
    """A mechanism that the driver cannot test is never allowed; what it can test is cached all the same."""
    report = _report("copies_only")
    assert _not_working(report) == {route: UNTESTED for route in routes(3) if route[0] != COPY}
    assert {link.reason for link in report.links if link.mechanism == FLAG} == {"no kernel"}
    assert report.pairs(FLAG) == frozenset()
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("probes")
def test_a_report_answers_by_direction_and_mechanism() -> None:
    """``works`` and ``pairs`` tell directions and mechanisms apart, and deny what the report does not have."""
    report = _report("one_way")
    assert report.works(0, 1, COPY)
    assert not report.works(1, 0, COPY)
    assert report.works(1, 0, STORE)
    assert not report.works(0, 3, COPY)
    assert report.pairs(COPY) == {(a, b) for _, a, b in routes(3)} - {(1, 0)}
    assert report.reordered(report.gpus[::-1]).pairs(COPY) == {(a, b) for _, a, b in routes(3)} - {(1, 2)}


def test_one_gpu_or_none_needs_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no two GPUs the report is empty, without a child process; also for torch without any GPU."""
    monkeypatch.delattr(subprocess, "Popen")
    assert _report("single") == LinkReport(("GPU-a",), ())
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.device_count", lambda: 0)
        assert link_report() == LinkReport((), ())


def test_a_report_is_cached_for_other_orders_of_the_gpus(probes: list[str]) -> None:
    """A later process takes the verdicts from disk, and the same GPUs in another order get their own ones."""
    report = _report("one_way")
    assert _not_working(report) == {(COPY, 1, 0): BROKEN}  # from GPU-b to GPU-a
    assert _report("one_way") == report
    again = _report("reordered")  # GPU-c, GPU-a, GPU-b
    assert _not_working(again) == {(COPY, 2, 1): BROKEN}
    assert again.gpus == ("GPU-c", "GPU-a", "GPU-b")
    assert tuple(link.route for link in again.links) == routes(3)
    assert probes == ["one_way"]


def test_the_cache_can_be_forced(probes: list[str]) -> None:
    """With ``use_cache=False`` the GPUs are probed anew, and later processes get the new verdicts."""
    _report("one_way")
    assert _not_working(_report("honest", use_cache=False)) == {}
    assert _not_working(_report("one_way")) == {}
    assert probes == ["one_way", "honest"]


@pytest.mark.parametrize("what", ["driver", "boot", "probe", "GPUs", "mechanisms"])
def test_other_circumstances_are_probed_anew(
    what: str, probes: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Verdicts are not used under another driver, after a boot, by another probe, for other GPUs or more mechanisms."""
    _report("copies_only")
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    changes: dict[str, Callable[[], None]] = {
        "driver": lambda: monkeypatch.setenv("FAKE_SOFTWARE", "fake driver 2"),
        "boot": lambda: monkeypatch.setattr(link_cache, "_BOOT_ID", boot),
        "probe": lambda: monkeypatch.setattr(link_cache, "PROBE_VERSION", 0),
    }
    changes.get(what, lambda: None)()
    name = {"GPUs": "pair", "mechanisms": "honest"}.get(what, "copies_only")
    for _ in range(2):
        _report(name)
    assert probes == ["copies_only", name]


DAMAGES: dict[str, Callable[[str], bytes]] = {
    "empty": lambda _: b"",
    "cut off": lambda text: text[: len(text) // 2].encode(),
    "no text": lambda _: b"\xff\xfe\x00",
    "no object": lambda _: b"[]",
    "a link is missing": lambda text: text.replace(
        '{"mechanism": "copy", "source": 0, "target": 1,', '{"x": 1,'
    ).encode(),
    "a link is there twice": lambda text: text.replace('"source": 0, "target": 1', '"source": 1, "target": 0').encode(),
    "a verdict is unknown": lambda text: text.replace('"works"', '"perfect"').encode(),
    "a GPU of the report is another": lambda text: "GPU-z".join(text.rsplit("GPU-a", 1)).encode(),
    "a GPU is another": lambda text: text.replace('"GPU-a"', '"GPU-z"').encode(),
    "deep": lambda _: b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cache_is_probed_anew(damage: Callable[[str], bytes], probes: list[str], cache: Path) -> None:
    """Whatever is in the file, nobody sees an error: the GPUs are probed again and the file is whole again."""
    report = _report("one_way")
    (file,) = cache.iterdir()
    text = file.read_text()
    file.write_bytes(damage(text))
    assert file.read_bytes() != text.encode()
    assert _report("one_way") == report
    assert probes == ["one_way", "one_way"]
    assert file.read_text() == text


@pytest.mark.parametrize("change", ["source", "compiler", "setting"])
def test_what_real_verdicts_depend_on(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real GPUs' verdicts are on the kernels too: another source, compiler or setting makes old ones worthless."""
    for source in kernel_cache._SOURCES:
        (tmp_path / source).write_text("a kernel")
    (tmp_path / "version").write_text("driver 1\nbuilt then\n")
    monkeypatch.setattr(kernel_cache, "__file__", str(tmp_path / "kernel_cache.py"))
    monkeypatch.setattr(link_driver, "_DRIVER_VERSIONS", (str(tmp_path / "version"),))
    before = link_driver.TorchDriver().software()
    assert before == link_driver.TorchDriver().software()
    assert before.startswith("driver 1; torch ")
    changes: dict[str, Callable[[], object]] = {
        "source": lambda: (tmp_path / "slot_kernels.py").write_text("another kernel"),
        "compiler": lambda: monkeypatch.setattr(kernel_cache, "_version", lambda _: "another version"),
        "setting": lambda: monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    }
    changes[change]()
    assert link_driver.TorchDriver().software() not in ("", before)


@pytest.mark.parametrize("obstacle", ["folder", "boot", "driver", "names"])
def test_a_process_probes_once_where_nothing_can_be_kept(
    obstacle: str, probes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it that nothing can be written, or nobody could tell later whether it still holds; unless asked to probe."""
    (tmp_path / "file").touch()
    obstacles: dict[str, Callable[[], None]] = {
        "folder": lambda: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file")),
        "boot": lambda: monkeypatch.setattr(link_cache, "_BOOT_ID", tmp_path / "none"),
        "driver": lambda: monkeypatch.setenv("FAKE_SOFTWARE", ""),
    }
    obstacles.get(obstacle, lambda: None)()
    name = "twins" if obstacle == "names" else "one_way"
    report = _report(name)
    assert _report(name) is report
    assert probes == [name]
    again = _report(name, use_cache=False)
    assert probes == [name, name]
    assert _report(name) is again
    monkeypatch.setenv("FAKE_SOFTWARE", "another driver")
    _report(name)
    assert probes == [name] * 3


def test_what_is_remembered_gives_way_to_what_is_kept(
    probes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a report can be written, it is the file that counts, for this process as for others."""
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        _report("one_way")
    _report("one_way", use_cache=False)
    assert _not_working(_report("honest", use_cache=False)) == {}
    assert _not_working(_report("one_way")) == {}
    assert probes == ["one_way", "one_way", "honest"]


@pytest.mark.parametrize("name", ["nameless", "twins", "full"])
def test_what_cannot_be_told_apart_or_tested_is_not_cached(name: str, probes: list[str], cache: Path) -> None:
    """GPUs without a UUID or with the same one, and probes that had no room, leave nothing on disk."""
    _report(name)
    assert not cache.exists()
    assert probes == [name]


def test_an_unknown_driver_or_boot_is_not_cached(
    probes: list[str], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where driver or boot cannot be told, no old verdict can be trusted and none is kept."""
    monkeypatch.setenv("FAKE_SOFTWARE", "")
    _report("honest")
    monkeypatch.delenv("FAKE_SOFTWARE")
    monkeypatch.setattr(link_cache, "_BOOT_ID", tmp_path / "none")
    _report("honest")
    assert not cache.exists()
    assert len(probes) == 2


@pytest.mark.usefixtures("probes")
def test_the_cache_is_where_the_desktop_standard_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an absolute ``XDG_CACHE_HOME`` the cache is in the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    _report("honest")
    (file,) = (tmp_path / ".cache" / "tpplan").iterdir()
    assert file.name.startswith("links-")


@pytest.mark.usefixtures("probes")
def test_a_report_has_a_json_form() -> None:
    """The canonical JSON of a report has everything in it."""
    report = _report("one_way")
    text = codec.dumps(report)
    assert (
        '{"mechanism": "copy", "source": 1, "target": 0, "verdict": "broken", "reason": "zeros arrived of 16 bytes"}'
        in text
    )
    assert codec.structure(codec.parse_json(text, "it"), LinkReport, "it") == report


@pytest.mark.multi_gpu
def test_real_gpus_are_probed() -> None:
    """Between real GPUs every mechanism gets a verdict, and a second process agrees by the cache."""
    report = link_report(use_cache=False)
    assert len(set(report.gpus)) == len(report.gpus) > 1
    assert {link.verdict for link in report.links} <= {WORKS, BROKEN}
    assert link_report() == report
