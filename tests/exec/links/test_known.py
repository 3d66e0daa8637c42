"""The link report: asked of the cache or of the probe, and worth nothing under other circumstances."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.exec.links.cases import BROKEN, COPY, FLAG, STORE, UNTESTED, WORKS, not_working, own_cache, report_of  # noqa: F401 (for every test here)
from tpplan import codec
from tpplan.exec.gpu import kernel_cache
from tpplan.exec.links import cache as link_cache
from tpplan.exec.links import child as link_child
from tpplan.exec.links import driver as link_driver
from tpplan.exec.links import probe as link_probe
from tpplan.exec.links.known import link_report
from tpplan.exec.links.probe import probe
from tpplan.exec.links.report import Link, LinkReport, routes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tpplan.exec.links.report import Route


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return the folder of the cache."""
    return tmp_path / "tpplan"


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Probe in this process, with small moves; return the list of drivers that were probed."""
    used: list[str] = []

    def stand_in(driver: str, _gpus: object, wanted: list[Route], *_: object) -> tuple[Link, ...]:
        used.append(driver.rpartition(":")[2])
        events = probe(link_child.load_driver(driver), wanted)
        found = {event.route: event for event in events if isinstance(event, Link)}
        return tuple(found[route] for route in wanted)

    monkeypatch.setattr("tpplan.exec.links.known.probe_in_child", stand_in)
    monkeypatch.setattr(link_probe, "ALONE", (16,))
    monkeypatch.setattr(link_probe, "TOGETHER", (16,))
    return used


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


@pytest.mark.usefixtures("probes")
def test_mechanisms_without_a_test_are_untested(cache: Path) -> None:
    """A mechanism that the driver cannot test is never allowed; what it can test is cached all the same."""
    report = report_of("copies_only")
    assert not_working(report) == {route: UNTESTED for route in routes(3) if route[0] != COPY}
    assert {link.reason for link in report.links if link.mechanism == FLAG} == {"no kernel"}
    assert report.pairs(FLAG) == frozenset()
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("probes")
def test_a_report_answers_by_direction_and_mechanism() -> None:
    """``works`` and ``pairs`` tell directions and mechanisms apart, and deny what the report does not have."""
    report = report_of("one_way")
    assert report.works(0, 1, COPY)
    assert not report.works(1, 0, COPY)
    assert report.works(1, 0, STORE)
    assert not report.works(0, 3, COPY)
    assert report.pairs(COPY) == {(a, b) for _, a, b in routes(3)} - {(1, 0)}
    assert report.reordered(report.gpus[::-1]).pairs(COPY) == {(a, b) for _, a, b in routes(3)} - {(1, 2)}


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
    report = report_of("visible", gpus=("b", "c"))
    assert (report.gpus, not_working(report)) == (("b", "c"), {(COPY, 0, 1): BROKEN})
    assert len([*cache.iterdir()]) == 1
    monkeypatch.setattr(subprocess, "Popen", None)  # from now on, all is known
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    again = report_of("visible", gpus=("c", "b"))
    assert (again.gpus, not_working(again)) == (("c", "b"), {(COPY, 1, 0): BROKEN})
    assert report_of("visible") == report_of("visible", gpus=("b",)) == LinkReport(("b",), ())


def test_a_process_that_sees_more_reports_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one report for whatever GPUs of it are asked about; an invisible GPU leaves links untested."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert report_of("visible", gpus=("c", "b")).gpus == ("a", "b", "c")
    report = report_of("visible", gpus=("b", "d"))  # there is none
    assert {link.verdict for link in report.links} == {UNTESTED}
    assert "it sees other GPUs than it is asked about: b" in report.links[0].reason


def test_a_report_is_cached_for_other_orders_of_the_gpus(probes: list[str]) -> None:
    """A later process takes the verdicts from disk, and the same GPUs in another order get their own ones."""
    report = report_of("one_way")
    assert not_working(report) == {(COPY, 1, 0): BROKEN}  # from GPU-b to GPU-a
    assert report_of("one_way") == report
    again = report_of("reordered")  # GPU-c, GPU-a, GPU-b
    assert not_working(again) == {(COPY, 2, 1): BROKEN}
    assert again.gpus == ("GPU-c", "GPU-a", "GPU-b")
    assert tuple(link.route for link in again.links) == routes(3)
    assert probes == ["one_way"]


def test_the_cache_can_be_forced(probes: list[str]) -> None:
    """With ``use_cache=False`` the GPUs are probed anew, and later processes get the new verdicts."""
    report_of("one_way")
    assert not_working(report_of("honest", use_cache=False)) == {}
    assert not_working(report_of("one_way")) == {}
    assert probes == ["one_way", "honest"]


@pytest.mark.parametrize("what", ["driver", "boot", "probe", "GPUs", "mechanisms"])
def test_other_circumstances_are_probed_anew(
    what: str, probes: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Verdicts are not used under another driver, after a boot, by another probe, for other GPUs or more mechanisms."""
    report_of("copies_only")
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
        report_of(name)
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
    report = report_of("one_way")
    (file,) = cache.iterdir()
    text = file.read_text()
    file.write_bytes(damage(text))
    assert file.read_bytes() != text.encode()
    assert report_of("one_way") == report
    assert probes == ["one_way", "one_way"]
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
    monkeypatch.setattr(kernel_cache, "__file__", str(sources / "gpu/kernel_cache.py"))
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
    report = report_of(name)
    assert report_of(name) is report
    assert probes == [name]
    again = report_of(name, use_cache=False)
    assert probes == [name, name]
    assert report_of(name) is again
    monkeypatch.setenv("FAKE_SOFTWARE", "another driver")
    report_of(name)
    assert probes == [name] * 3


def test_what_is_remembered_gives_way_to_what_is_kept(
    probes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a report can be written, it is the file that counts, for this process as for others."""
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        report_of("one_way")
    report_of("one_way", use_cache=False)
    assert not_working(report_of("honest", use_cache=False)) == {}
    assert not_working(report_of("one_way")) == {}
    assert probes == ["one_way", "one_way", "honest"]


@pytest.mark.parametrize("name", ["nameless", "twins", "full"])
def test_what_cannot_be_told_apart_or_tested_is_not_cached(name: str, probes: list[str], cache: Path) -> None:
    """GPUs without a UUID or with the same one, and probes that had no room, leave nothing on disk."""
    report_of(name)
    assert not cache.exists()
    assert probes == [name]


def test_an_unknown_driver_or_boot_is_not_cached(
    probes: list[str], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where driver or boot cannot be told, no old verdict can be trusted and none is kept."""
    monkeypatch.setenv("FAKE_SOFTWARE", "")
    report_of("honest")
    monkeypatch.delenv("FAKE_SOFTWARE")
    monkeypatch.setattr(link_cache, "_BOOT_ID", tmp_path / "none")
    report_of("honest")
    assert not cache.exists()
    assert len(probes) == 2


@pytest.mark.usefixtures("probes")
def test_the_cache_is_where_the_desktop_standard_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an absolute ``XDG_CACHE_HOME`` the cache is in the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    report_of("honest")
    (file,) = (tmp_path / ".cache" / "tpplan").iterdir()
    assert file.name.startswith("links-")


@pytest.mark.usefixtures("probes")
def test_a_report_has_a_json_form() -> None:
    """The canonical JSON of a report has everything in it."""
    report = report_of("one_way")
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
