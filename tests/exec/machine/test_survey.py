"""The survey of a machine: thresholds are measured, kept on disk, and used from then on."""

from __future__ import annotations

import json
import logging
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from attrs import evolve
from jsonschema import Draft202012Validator

from schemas import generate
from tests.command import command
from tests.contexts import little_room  # noqa: F401 (for every test here)
from tests.exec.machine.tuning_cases import ROOM, Gpus, Machine
from tpplan.errors import DeviceError
from tpplan.exec import Tuning
from tpplan.exec.cuda import tuning_cache
from tpplan.exec.cuda.tuning_cache import Thresholds
from tpplan.exec.machine import transports
from tpplan.exec.machine.link_report import Link, LinkReport, Verdict, routes
from tpplan.exec.programs.lower import Limits
from tpplan.exec.toolchain import kernel_cache
from tpplan.exec.tools.survey import survey
from tpplan.exec.tools.survey.survey import no_gpu
from tpplan.exec.tuning import COPIES, DIRECT, EXCHANGES, FANS, KIB, MIB, ONE_SHOT, RELAYED, SLOTS, SUMS, default, tune
from tpplan.files.codec import unstructure
from tpplan.hardware import probe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give this process two GPUs, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning_cache, "TorchDriver", Gpus)
    return tmp_path / "tpplan"


def _thresholds(devices: int, size: int) -> Thresholds:
    return Thresholds(devices=devices, transports=("peer", "host"), tuning=Tuning(peer_sums_bytes=size))


@pytest.mark.usefixtures("cache")
def test_thresholds_are_kept() -> None:
    """Those for as many devices are used, else those for a few more; else defaults, and it is said which."""
    for count in (2, 4):
        assert tuning_cache.stored(count, "peer") == (
            default(count),
            "not measured on this machine, tpplan devices --links does that",
        )
    assert not tuning_cache.save((_thresholds(2, 1), _thresholds(4, 2)))
    found = {count: tuning_cache.stored(count, "peer") for count in (2, 3, 4, 5)}
    assert [tuning.peer_sums_bytes for tuning, _ in found.values()] == [1, 2, 2, default(5).peer_sums_bytes]
    assert found[3][1] == "measured on 4 GPUs of this machine"
    assert found[5][1].startswith("not measured")


@pytest.mark.usefixtures("cache")
def test_only_thresholds_of_transports_that_were_measured_count() -> None:
    """Where two devices went by ``host`` only, ``peer`` has the thresholds of more devices, else defaults."""
    host = evolve(_thresholds(2, 1), transports=("host",))
    tuning_cache.save((host, _thresholds(4, 2)))
    assert tuning_cache.stored(2, "host") == (host.tuning, "measured on 2 GPUs of this machine")
    assert tuning_cache.stored(2, "peer")[1] == "measured on 4 GPUs of this machine"
    tuning_cache.save((host,))
    assert tuning_cache.stored(2, "peer")[1].startswith("not measured")
    assert tuning_cache.stored(2, "peer")[0] == default(2)


@pytest.mark.parametrize("change", ["gpus", "driver", "version", "edition", "damage"])
def test_thresholds_of_another_machine_are_not_used(change: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other GPUs, another driver or tpplan, other things measured, or a damaged file: the defaults again."""
    tuning_cache.save((_thresholds(2, 1),))
    monkeypatch.setattr(Gpus, "names", Gpus.names[::-1])
    assert tuning_cache.stored(2, "peer")[0].peer_sums_bytes == 1  # the same ones in another order
    (file,) = cache.iterdir()
    changes: dict[str, Callable[[], object]] = {
        "gpus": lambda: monkeypatch.setattr(Gpus, "names", ("GPU-a", "GPU-c")),
        "driver": lambda: monkeypatch.setattr(Gpus, "driver", "driver 2"),
        "version": lambda: monkeypatch.setattr(tuning_cache, "__version__", "9"),
        "edition": lambda: monkeypatch.setattr(tuning_cache, "_EDITION", 1),
        "damage": lambda: file.write_text(file.read_text().replace('"peer_sums_bytes": 1,', '"peer_sums_bytes": -1,')),
    }
    changes[change]()
    assert tuning_cache.stored(2, "peer")[0] == default(2)


def test_what_cannot_be_kept_is_told(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be written, or GPUs cannot be told apart, saving says so, and nothing is found later."""
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert "file" in tuning_cache.save((_thresholds(2, 1),))
    monkeypatch.setattr(Gpus, "names", ("GPU-a", "GPU-a"))
    assert "cannot be told" in tuning_cache.save((_thresholds(2, 1),))
    assert tuning_cache.stored(2, "peer")[0] == default(2)
    assert not cache.exists()


class Stopwatch(Machine):
    """In the place of the timer: knows the times without any GPU."""

    def __init__(self, places: Sequence[torch.device]) -> None:
        super().__init__()
        assert len(places) > 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, *arguments: Any) -> Sequence[float]:
        """Return the time by each tuning."""
        return self.time(*arguments)

    def limits(self, transport: str) -> Limits:
        """Return limits with slots of the transport's size."""
        return Limits(slot_bytes=ROOM[transport], stage_bytes=MIB, exchange_bytes=MIB)


@pytest.fixture
def links(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give this process GPUs with the given links: all work but those that are named."""

    def give(count: int, *broken: tuple[str, int, int]) -> None:
        names = tuple(f"GPU-{i}" for i in range(count))
        found = tuple(
            Link(*r, Verdict.BROKEN, "zeros arrived") if r in broken else Link(*r, Verdict.WORKS, "every byte arrived")
            for r in routes(count)
        )
        monkeypatch.setattr(Gpus, "names", names)
        for module in (survey, transports):
            monkeypatch.setattr(module, "link_report", lambda *_, **__: LinkReport(names, found))

    monkeypatch.setattr(kernel_cache, "lacks", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, __: True)
    monkeypatch.setattr(survey, "GraphTimer", Stopwatch)
    return give


def _survey(*options: str) -> dict[str, Any]:
    done = command("devices", "--links", "--json", *options)
    assert done.code == 0
    assert not done.err
    document: dict[str, Any] = json.loads(done.out)
    Draft202012Validator(generate.schema("survey-report")).validate(document)
    return document


def test_the_command_measures_and_keeps(links: Callable[..., None]) -> None:
    """``tpplan devices --links`` measures on two, four and all GPUs, and what it found is used from then on."""
    links(5)
    found = _survey()
    assert [one["devices"] for one in found["thresholds"]] == [2, 4, 5]
    assert found["thresholds"][0]["transports"] == ["peer", "host"]
    assert found["thresholds"][0]["tuning"] == unstructure(tune(Machine().time, ROOM, 2, direct=True))
    assert (len(found["links"]), found["notes"]) == (4 * 20, [])
    timed = {
        (one["kind"], one["way"]): one["time_ns"]
        for one in found["timings"]
        if (one["devices"], one["transport"], one["message_bytes"]) == (4, "peer", 256 * KIB)
    }
    assert timed == {
        **{
            (kind, way): ns
            for kind in (FANS, EXCHANGES)
            for way, ns in ((SLOTS, 7120), (DIRECT, 8560), (COPIES, 22048))
        },
        (FANS, RELAYED): 71024,
        (SUMS, SLOTS): 7120,
        (SUMS, ONE_SHOT): 8560,
        (SUMS, DIRECT): 8560,
    }
    assert len(found["timings"]) == 3 * (3 * (15 * 2 + 10) + 3 * 5 * 2) + 2 * 15 - 2 * (1 + 2 + 3)
    assert tuning_cache.stored(5, "peer") == (
        tune(Machine().time, ROOM, 5, direct=True),
        "measured on 5 GPUs of this machine",
    )
    shown = command("devices", "--links").out
    for words in ("Links between 5 GPUs", "works in all 20 directions", "5 GPUs", "copy engines from", "8.00 MiB"):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_the_command_on_a_machine_without_peer_access(links: Callable[..., None]) -> None:
    """Links that do not work are told one by one, and only ``host`` is measured."""
    links(2, *(route for route in routes(2) if route[1] == 0))
    found = _survey()
    assert [one["transports"] for one in found["thresholds"]] == [["host"]]
    assert found["notes"][0].startswith("not measured: transport: peer is not verified: copy 0 to 1 (zeros arrived)")
    shown = command("devices", "--links").out
    assert "works in 1 of 2 directions" in shown
    assert "  copy 0 to 1: broken, zeros arrived" in shown.splitlines()
    links(8, *routes(8))
    shown = command("devices", "--links").out
    assert "works in 0 of 56 directions" in shown
    assert f"and {4 * 56 - 12} more" in shown


@pytest.mark.parametrize(
    ("is_built", "advice"), [(False, 'python3 -m pip install ".[cu13]"'), (True, "torch.cuda.init()")]
)
def test_gpus_that_only_drivers_see(monkeypatch: pytest.MonkeyPatch, is_built: bool, advice: str) -> None:
    """The advice is for torch, not built for them or lacking something; without a driver it is another machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if is_built else None)
    card = SimpleNamespace(name="RTX 4090")
    monkeypatch.setattr(probe, "probe", lambda: SimpleNamespace(devices=(card, card)))
    seen = no_gpu()
    assert seen.message == "torch sees no GPU on this machine, its driver sees 2 devices (RTX 4090)"
    assert advice in seen.hint

    def nothing() -> None:
        raise DeviceError("no GPU driver answers on this machine: none", "name them: --gpus 2x24GiB")

    monkeypatch.setattr(probe, "probe", nothing)
    assert no_gpu().message == "torch sees no GPU on this machine: no GPU driver answers on this machine: none"
    assert no_gpu().hint == "measure on a machine with GPUs; name them: --gpus 2x24GiB"


def test_the_command_where_there_is_nothing_to_measure(
    links: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU has no links; and where kernels cannot wait for each other, no times mean anything."""
    links(1)
    assert (_survey()["links"], _survey()["thresholds"]) == ([], [])
    assert command("devices", "--links").out == "Links between 1 GPU\none GPU has nobody to talk to\n"
    links(0)
    done = command("devices", "--links")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: torch sees no GPU on this machine")
    links(2)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    found = _survey()
    assert found["thresholds"] == []
    assert all("CUDA_LAUNCH_BLOCKING is set" in note for note in found["notes"])
    assert len(found["notes"]) == 2


def test_what_is_not_kept_is_told(links: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in vain: the document says that no later process will know."""
    links(2)
    monkeypatch.setattr(Gpus, "driver", "")
    assert _survey()["notes"] == ["thresholds are not kept: the GPUs or their driver cannot be told from others"]


def test_links_and_a_devices_file_are_two_things() -> None:
    """Asking for both is a mistake in the arguments, and nothing is measured."""
    done = command("devices", "--links", "-o", "devices.json")
    assert done.code == 2
    assert "--links does not go with -o" in done.err
    assert "--links does not go with --measure" in command("devices", "--links", "--measure").err


def test_the_screen_shows_what_is_logged(links: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """That links are tested, and other things that take their time or matter, is on lines beside the document."""
    links(2)
    report: Callable[..., LinkReport] = vars(survey)["link_report"]
    log = logging.getLogger("tpplan.exec.machine.links")

    class Slow(Stopwatch):
        def __init__(self, places: Sequence[torch.device]) -> None:
            super().__init__(places)
            log.warning("this is odd")

    def slow(*, use_cache: bool) -> LinkReport:
        log.info("testing links of %s", "all")
        return report(use_cache=use_cache)

    monkeypatch.setattr(survey, "link_report", slow)
    monkeypatch.setattr(survey, "GraphTimer", Slow)
    for _ in range(2):
        done = command("devices", "--links", "--json")
        assert done.err == "note: testing links of all\nwarning: this is odd\n"
        assert json.loads(done.out)["notes"] == []
    shown = command("devices", "--links", terminal=True).err
    lines = [re.sub("\x1b\\[[0-9;]*m", "", line).rpartition("\r")[2] for line in shown.split("\n")]
    assert lines[:2] == ["note: testing links of all", "warning: this is odd"]
    assert "measuring on 2 GPUs by peer and host …\r" in shown
