"""The link report: asked of the cache or of the probe, and worth nothing under other circumstances."""

from __future__ import annotations

import logging
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from tests.exec.machine.cases import BROKEN, COPY, FLAG, LOAD, STORE, UNTESTED, WORKS, not_working, own_cache, report_of  # noqa: F401 (for every test here)
from tpplan.exec.cuda import probe_driver as link_driver
from tpplan.exec.machine import gpu_cache, links
from tpplan.exec.machine import probe as link_probe
from tpplan.exec.machine import probe_child as link_child
from tpplan.exec.machine.link_report import Link, LinkReport, Mechanism, routes
from tpplan.exec.machine.links import link_report, refute
from tpplan.exec.machine.probe import probe
from tpplan.exec.toolchain import kernel_cache
from tpplan.files.codec import dumps, structure
from tpplan.files.text import parse_json

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable
    from pathlib import Path

    from tpplan.exec.machine.link_report import Route


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return the folder of the cache."""
    return tmp_path / "tpplan"


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[Route]]]:
    """Probe in this process, with small moves; return the list of drivers that were probed, and what was tested."""
    used: list[tuple[str, set[Route]]] = []

    def stand_in(
        driver: str, _gpus: object, wanted: list[Route], verified: list[Route], _deadline: object, **_: object
    ) -> tuple[Link, ...]:
        used.append((driver.rpartition(":")[2], {*wanted}))
        events = probe(link_child.load_driver(driver), wanted, verified)
        return tuple(event for event in events if isinstance(event, Link))

    monkeypatch.setattr("tpplan.exec.machine.links.probe_in_child", stand_in)
    monkeypatch.setattr(link_probe, "ALONE", (16,))
    monkeypatch.setattr(link_probe, "TOGETHER", (16,))
    return used


@pytest.fixture
def probes(tested: list[tuple[str, set[Route]]]) -> Callable[[], list[str]]:
    """Return a function that returns the drivers that were probed."""
    return lambda: [name for name, _ in tested]


def files(cache: Path) -> list[Path]:
    """Return the files with verdicts."""
    return sorted(cache.glob("links-*.json"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken_driver", "the probe died with exit code 1: OSError: no such driver"),
        ("stuck", "the probe hung for 3 s"),
        ("changing", "the probe died with exit code 1: it sees other GPUs than it is asked about: GPU-c, GPU-b, GPU-a"),
    ],
)
def test_a_child_that_cannot_start_leaves_all_untested(name: str, reason: str, cache: Path) -> None:
    """Where no probe runs, or a GPU fails by itself, no link is verified or blamed, and nothing is cached."""
    assert {(link.verdict, link.reason) for link in report_of(name).links} == {(UNTESTED, reason)}
    assert not cache.exists()


@pytest.mark.usefixtures("tested")
def test_mechanisms_without_a_test_are_untested(cache: Path) -> None:
    """A mechanism that the driver cannot test is never allowed; what it can test is cached all the same."""
    report = report_of("copies_only")
    assert not_working(report) == {route: UNTESTED for route in routes(3) if route[0] != COPY}
    assert {link.reason for link in report.links if link.mechanism == FLAG} == {"no kernel"}
    assert report.pairs(FLAG) == frozenset()
    assert len(files(cache)) == 3


@pytest.mark.usefixtures("tested")
def test_a_report_answers_by_direction_and_mechanism() -> None:
    """``works`` and ``pairs`` tell directions and mechanisms apart, and deny what the report does not have."""
    report = report_of("one_way")
    assert report.works(0, 1, COPY)
    assert not report.works(1, 0, COPY)
    assert report.works(1, 0, STORE)
    assert not report.works(0, 3, COPY)
    assert report.pairs(COPY) == {(a, b) for _, a, b in routes(3)} - {(1, 0)}


def test_one_gpu_or_none_needs_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no two GPUs the report is empty, without a child process; also for torch without any GPU."""
    monkeypatch.delattr(subprocess, "Popen")
    assert report_of("single") == LinkReport(("GPU-a",), ())
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.device_count", lambda: 0)
        assert link_report() == LinkReport((), ())


def test_gpus_that_this_process_does_not_see(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The probe, a process of its own, sees those of all processes, in the order asked for; each finds its report."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c")
    report = report_of("visible", "b", "c")
    assert (report.gpus, not_working(report)) == (("b", "c"), {(COPY, 0, 1): BROKEN})
    assert len(files(cache)) == 1
    monkeypatch.setattr(subprocess, "Popen", None)  # from now on, all is known
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    again = report_of("visible", "c", "b")
    assert (again.gpus, not_working(again)) == (("c", "b"), {(COPY, 1, 0): BROKEN})
    assert report_of("visible") == report_of("visible", "b") == LinkReport(("b",), ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    report = report_of("visible", "c", "b")
    assert (report.gpus, not_working(report)) == (("a", "b", "c"), {(COPY, 1, 2): BROKEN})
    assert {frozenset(link.route[1:]) for link in report.links} == {frozenset({1, 2})}


def test_a_gpu_that_no_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves links untested."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    report = report_of("visible", "b", "d")
    assert {link.verdict for link in report.links} == {UNTESTED}
    assert "it sees other GPUs than it is asked about: b" in report.links[0].reason


def test_a_report_is_cached_for_other_orders_of_the_gpus(probes: Callable[[], list[str]]) -> None:
    """A later process takes the verdicts from disk, and the same GPUs in another order get their own ones."""
    report = report_of("one_way")
    assert not_working(report) == {(COPY, 1, 0): BROKEN}  # from GPU-b to GPU-a
    assert report_of("one_way") == report
    again = report_of("reordered")  # GPU-c, GPU-a, GPU-b
    assert not_working(again) == {(COPY, 2, 1): BROKEN}
    assert again.gpus == ("GPU-c", "GPU-a", "GPU-b")
    assert tuple(link.route for link in again.links) == routes(3)
    assert probes() == ["one_way"]


def test_the_cache_can_be_forced(probes: Callable[[], list[str]]) -> None:
    """With ``use_cache=False`` the GPUs are probed anew, and later processes get the new verdicts."""
    report_of("one_way")
    assert not_working(report_of("honest", use_cache=False)) == {}
    assert not_working(report_of("one_way")) == {}
    assert probes() == ["one_way", "honest"]


@pytest.mark.parametrize("what", ["driver", "boot", "probe", "mechanisms"])
def test_other_circumstances_are_probed_anew(
    what: str, probes: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Verdicts are not used under another driver, after a boot, by another probe, or for more mechanisms."""
    report_of("copies_only")
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    changes: dict[str, Callable[[], None]] = {
        "driver": lambda: monkeypatch.setenv("FAKE_SOFTWARE", "fake driver 2"),
        "boot": lambda: monkeypatch.setattr(links, "_BOOT_ID", boot),
        "probe": lambda: monkeypatch.setattr(links, "PROBE_VERSION", 0),
    }
    changes.get(what, lambda: None)()
    name = "honest" if what == "mechanisms" else "copies_only"
    for _ in range(2):
        report_of(name)
    assert probes() == ["copies_only", name]


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
    "a link is of a third GPU": lambda text: text.replace(
        '"source": 0, "target": 1', '"source": 0, "target": 2'
    ).encode(),
    "a GPU is another": lambda text: text.replace('"GPU-a"', '"GPU-z"').encode(),
    "deep": lambda _: b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cache_is_probed_anew(
    damage: Callable[[str], bytes], probes: Callable[[], list[str]], cache: Path
) -> None:
    """Whatever is in the file, nobody sees an error: the GPUs are probed again and the file is whole again."""
    report = report_of("one_way", 0, 1)
    (file,) = files(cache)
    text = file.read_text()
    file.write_bytes(damage(text))
    assert file.read_bytes() != text.encode()
    assert report_of("one_way", 0, 1) == report
    assert probes() == ["one_way", "one_way"]
    assert file.read_text() == text


@pytest.mark.parametrize("change", ["source", "shared source", "compiler", "setting"])
def test_what_real_verdicts_depend_on(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real GPUs' verdicts are on the kernels too: another source, compiler or setting makes old ones worthless."""
    sources = tmp_path / "tpplan/exec"
    for module in (*kernel_cache._OWN, kernel_cache.__name__):
        source = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("from tpplan.exec.kernels import rounding")
    (sources / "kernels/rounding.py").write_text("shared by kernels")
    (tmp_path / "version").write_text("driver 1\nbuilt then\n")
    monkeypatch.setattr(kernel_cache, "__file__", str(sources / "toolchain/kernel_cache.py"))
    monkeypatch.setattr(link_driver, "_DRIVER_VERSIONS", (str(tmp_path / "version"),))
    before = link_driver.TorchDriver().software()
    assert before == link_driver.TorchDriver().software()
    assert before.startswith("driver 1; torch ")
    changes: dict[str, Callable[[], object]] = {
        "source": lambda: (sources / "kernels/slot.py").write_text("another kernel"),
        "shared source": lambda: (sources / "kernels/rounding.py").write_text("another function"),
        "compiler": lambda: monkeypatch.setattr(kernel_cache, "_version", lambda _: "another version"),
        "setting": lambda: monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    }
    changes[change]()
    kernel_cache._source.cache_clear()  # as another process
    assert link_driver.TorchDriver().software() not in ("", before)


@pytest.mark.parametrize("obstacle", ["folder", "boot", "driver", "names"])
def test_a_process_probes_once_where_nothing_can_be_kept(
    obstacle: str, probes: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it that nothing can be written, or nobody could tell later whether it still holds; unless asked to probe."""
    (tmp_path / "file").touch()
    obstacles: dict[str, Callable[[], None]] = {
        "folder": lambda: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file")),
        "boot": lambda: monkeypatch.setattr(links, "_boot", lambda: ""),
        "driver": lambda: monkeypatch.setenv("FAKE_SOFTWARE", ""),
    }
    obstacles.get(obstacle, lambda: None)()
    name = "twins" if obstacle == "names" else "one_way"
    report = report_of(name)
    assert report_of(name) == report
    assert probes() == [name]
    assert report_of(name, use_cache=False) == report_of(name) == report
    assert probes() == [name, name]
    monkeypatch.setenv("FAKE_SOFTWARE", "another driver")
    report_of(name)
    assert probes() == [name] * 3


def test_what_is_remembered_gives_way_to_what_is_kept(
    probes: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a report can be written, it is the file that counts, for this process as for others."""
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        report_of("one_way")
    report_of("one_way", use_cache=False)
    assert not_working(report_of("honest", use_cache=False)) == {}
    assert not_working(report_of("one_way")) == {}
    assert probes() == ["one_way", "one_way", "honest"]


@pytest.mark.parametrize("name", ["nameless", "twins", "full"])
def test_what_cannot_be_told_apart_or_tested_is_not_cached(
    name: str, probes: Callable[[], list[str]], cache: Path
) -> None:
    """GPUs without a UUID or with the same one, and probes that had no room, leave nothing on disk."""
    report_of(name)
    assert not cache.exists()
    assert probes() == [name]


def test_an_unknown_driver_or_boot_is_not_cached(
    probes: Callable[[], list[str]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where driver or boot cannot be told, no old verdict can be trusted and none is kept."""
    monkeypatch.setenv("FAKE_SOFTWARE", "")
    report_of("honest")
    monkeypatch.delenv("FAKE_SOFTWARE")
    monkeypatch.setattr(links, "_boot", lambda: "")
    report_of("honest")
    assert not cache.exists()
    assert len(probes()) == 2


@pytest.mark.usefixtures("tested")
def test_the_cache_is_where_the_desktop_standard_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an absolute ``XDG_CACHE_HOME`` the cache is in the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    report_of("honest")
    assert len(files(tmp_path / ".cache" / "tpplan")) == 3


@pytest.mark.usefixtures("tested")
def test_a_report_has_a_json_form() -> None:
    """The canonical JSON of a report has everything in it."""
    report = report_of("one_way")
    text = dumps(report)
    assert (
        '{"mechanism": "copy", "source": 1, "target": 0, "verdict": "broken", "reason": "zeros arrived of 16 bytes"}'
        in text
    )
    assert structure(parse_json(text, "it"), LinkReport, "it") == report


def test_only_the_gpus_that_are_asked_for_are_probed(tested: list[tuple[str, set[Route]]], cache: Path) -> None:
    """Another plan adds its pairs to what is known, and none is probed twice."""
    ten = "ten"
    first = report_of(ten, 3, 7)
    assert {link.route for link in first.links} == {route for route in routes(10) if {*route[1:]} == {3, 7}}
    assert len(first.gpus) == 10
    assert len(files(cache)) == 1
    report_of(ten, 3, 7, 0)
    report_of(ten, 0, 7)
    assert [{frozenset(route[1:]) for route in routes} for _, routes in tested] == [
        {frozenset({3, 7})},
        {frozenset({0, 3}), frozenset({0, 7})},
    ]
    assert len(files(cache)) == 3


def test_a_pair_known_from_other_gpus_is_used(tested: list[tuple[str, set[Route]]]) -> None:
    """Verdicts are of two GPUs, whichever others a process sees, by whatever numbers."""
    report_of("one_way")  # GPU-b to GPU-a
    assert report_of("swapped").works(0, 1, STORE)
    assert not_working(report_of("swapped")) == {(COPY, 0, 1): BROKEN}
    assert len(tested) == 1


def test_what_was_not_tested_is_tested_next_time(tested: list[tuple[str, set[Route]]], cache: Path) -> None:
    """What lacked memory or a peer's place leaves no verdict, while what was tested beside it is kept."""
    report = report_of("crowded")
    assert not_working(report) == {(STORE, 0, 1): UNTESTED}
    assert report_of("pair") == report_of("pair")
    assert [routes for _, routes in tested] == [{*routes(2)}, {(STORE, 0, 1)}]
    assert len(files(cache)) == 1


def test_without_peer_access_only_copies_are_tested(tested: list[tuple[str, set[Route]]]) -> None:
    """A kernel that reached for the memory of such a GPU would be killed; what the driver stages still arrives."""
    report = report_of("apart")
    assert {link.route: link.reason for link in report.links if {*link.route[1:]} == {0, 2}} == {
        (m, a, b): "every byte arrived" if m == COPY else "the driver gives no peer access"
        for m in Mechanism
        for a, b in ((0, 2), (2, 0))
    }
    assert set(not_working(report).values()) == {BROKEN}
    assert not [route for route in tested[0][1] if {*route[1:]} == {0, 2} and route[0] != COPY]
    assert report_of("honest").works(0, 2, LOAD)  # once the driver gives access


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_link_that_failed_in_use_is_probed_anew(
    is_kept: bool, tested: list[tuple[str, set[Route]]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPUs' pairs alone lose their verdicts, on disk or in this process."""
    if not is_kept:
        monkeypatch.setattr(links, "_boot", lambda: "")
    report = report_of("one_way")
    driver = "tests.exec.machine.fake_gpus:one_way"
    refute([1, 0], driver=driver)
    assert len(files(cache)) == (2 if is_kept else 0)
    assert report_of("one_way") == report
    assert tested[1][1] == {route for route in routes(3) if {*route[1:]} == {0, 1}}
    refute([0, 1, 2], driver=driver)
    report_of("one_way")
    assert tested[2][1] == {*routes(3)}


@pytest.mark.parametrize("gpus", [[], [1], [0, 0], [0, 9], [0, 1]])
def test_refuting_never_fails(gpus: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who calls it has an error to tell already: nothing kept, no such GPU, no driver, or nowhere to write."""
    refute(gpus, driver="tests.exec.machine.fake_gpus:honest")
    refute(gpus, driver="tests.exec.machine.fake_gpus:missing")
    cache.parent.joinpath("file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent / "file"))
    refute(gpus, driver="tests.exec.machine.fake_gpus:honest")


def test_two_processes_that_add_to_a_pair_lose_nothing(cache: Path) -> None:
    """Each adds its verdicts to what is in the file when it writes, and a pair that was refuted does not come back."""
    pair = links.pair_of(("GPU-b", "GPU-a"), 0, 1, "driver")
    assert pair is not None
    found = [Link(*route, WORKS, "") for route in routes(2)]
    with ThreadPoolExecutor(8) as pool:
        assert {*pool.map(lambda link: pair.add([link]), found)} == {""}
    assert {link.route for link in pair.load()} == {*routes(2)}
    pair.remove()
    pair.add(found[:1])
    assert pair.load() == found[:1]
    with gpu_cache.locked("links"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_cache, "_LOCK_SECONDS", 0.05)
        assert not pair.add(found)  # whoever has the lock, a stopped process for instance, blocks nobody for long
    assert len(pair.load()) == 8
    assert len(files(cache)) == 1


@pytest.mark.usefixtures("tested")
def test_a_probe_says_that_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    """One line before it and one behind it; a report from the cache is silent."""
    with caplog.at_level(logging.INFO, logger="tpplan"):
        report_of("one_way", 2, 0)
        report_of("one_way")
        lines = [record.message for record in caplog.records]
        report_of("one_way")
    assert [record.message for record in caplog.records] == lines
    first, done, second, also_done = lines
    assert first.startswith("testing the links between GPUs 0, 2, which takes some seconds, or 3 s for each that hangs")
    assert second.startswith("testing the links between GPUs 0, 1, 2, which")
    assert re.fullmatch(
        r"tested the links in \d\.\d s: copy works in 2 of 2 directions, store works in 2 of 2 directions, .*", done
    )
    assert also_done.endswith("copy 1 to 0 is broken, zeros arrived of 16 bytes")


@pytest.mark.parametrize("has_file", [True, False])
def test_a_boot_without_an_identity_is_known_by_its_time(
    has_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may hide the identity of the boot, but not when it was; without either nothing is kept."""
    monkeypatch.setattr(links, "_BOOT_ID", tmp_path / "none")
    statistics = tmp_path / "stat"
    monkeypatch.setattr(links, "_STATISTICS", statistics)
    if has_file:
        statistics.write_text("cpu  1 2 3\nctxt 7\nbtime 1764130000\nprocesses 9\n")
    pair = links.pair_of(("a", "b"), 0, 1, "driver")
    assert (pair is not None) == has_file
    if pair:
        assert pair.origin.edition.endswith("boot btime 1764130000")


class _Nvml:
    """NVIDIA's library, on a machine with a driver or without."""

    def __init__(self, name: str, *, status: int = 0) -> None:
        assert name == "libnvidia-ml.so.1"
        self.nvmlInit_v2 = lambda: status
        self.nvmlShutdown = lambda: 0

    def nvmlSystemGetDriverVersion(self, text: ctypes.Array[ctypes.c_char], size: int) -> int:  # noqa: N802
        """Write the version as the library does."""
        assert size == len(text) == 80
        text.value = b"581.42"
        return 0


@pytest.mark.parametrize(
    ("nvml", "torchs", "expected"),
    [
        (_Nvml, "CUDA 13010", "NVIDIA 581.42; torch "),
        (partial(_Nvml, status=9), "CUDA 13010", "CUDA 13010; torch "),
        (Mock(side_effect=OSError("no such library")), "CUDA 13010", "CUDA 13010; torch "),
        (lambda _: object(), "", ""),
    ],
)
def test_the_drivers_version_without_its_files(
    nvml: object, torchs: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WSL2 and some containers have none: NVIDIA's library tells it, else torch; else nothing is kept."""
    monkeypatch.setattr(link_driver, "_DRIVER_VERSIONS", ())
    monkeypatch.setattr(link_driver, "CDLL", nvml)
    monkeypatch.setattr(link_driver, "driver_version", lambda: torchs)
    software = link_driver.TorchDriver().software()
    assert software.startswith(expected)
    assert bool(software) == bool(expected)


@pytest.mark.multi_gpu
def test_real_gpus_are_probed() -> None:
    """Between real GPUs every mechanism gets a verdict, and a second process agrees by the cache."""
    report = link_report(use_cache=False)
    assert len(set(report.gpus)) == len(report.gpus) > 1
    assert {link.verdict for link in report.links} <= {WORKS, BROKEN}
    assert link_report() == report


@pytest.mark.multi_gpu
def test_two_real_gpus_are_probed_alone(tmp_path: Path) -> None:
    """Peer access is what the driver says; links of two GPUs are tested, kept, refuted, and tested again."""
    one = link_report([0, 1])
    assert {frozenset(link.route[1:]) for link in one.links} == {frozenset({0, 1})}
    has_access = link_driver.TorchDriver().peers(0, 1)
    assert {one.works(0, 1, m) for m in Mechanism} == {True} if has_access else one.works(0, 1, COPY)
    (file,) = files(tmp_path / "tpplan")
    refute([0, 1])
    assert not file.exists()
    assert link_report([0, 1]) == one
    assert file.exists()
