"""The transport of CUDA devices: what makes another one do, and what a person is told of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

import tpplan
from tpplan.errors import ExecutionError
from tpplan.exec import Tuning, compiler
from tpplan.exec.cuda import probe_driver as link_driver
from tpplan.exec.machine import transports
from tpplan.exec.machine.environment import serialised, unreachable
from tpplan.exec.machine.link_report import Link, LinkReport, Mechanism, Verdict, routes
from tpplan.exec.machine.look import FoundDevice
from tpplan.exec.machine.transports import Choice, choose
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.toolchain import kernel_cache

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[3]
PLACES = [torch.device("cuda", i) for i in range(3)]
COPY, STORE, FLAG, LOAD = Mechanism

#: Variables that tools set for the programs that they run, and what is said of them.
SERIAL = {
    "CUDA_LAUNCH_BLOCKING": "CUDA_LAUNCH_BLOCKING is set",
    "NV_SANITIZER_INJECTION_PORT_BASE": "compute-sanitizer runs kernels one by one",
    "NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN": "compute-sanitizer runs kernels one by one",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR": "Nsight Compute runs kernels one by one",
    "NV_NSIGHT_INJECTION_PORT_BASE": "Nsight Compute runs kernels one by one",
    "CUDA_INJECTION64_PATH": "CUDA_INJECTION64_PATH names a tool that may run kernels one by one",
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process GPUs that run kernels and have links that work, and an environment without any tool."""
    others = ("NSYS_PROFILING_SESSION_ID", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "EXLLAMA_NO_P2P_COPY")
    for name in (*SERIAL, *others):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(kernel_cache, "lacks", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, __: True)
    _break(monkeypatch, ())


def _break(monkeypatch: pytest.MonkeyPatch, broken: Iterable[tuple[Mechanism, int, int]]) -> None:
    bad = set(broken)
    links = tuple(
        Link(*r, Verdict.BROKEN, "zeros arrived") if r in bad else Link(*r, Verdict.WORKS, "fine") for r in routes(3)
    )
    monkeypatch.setattr(transports, "link_report", lambda _: LinkReport(("a", "b", "c"), links))


def test_the_environment_rules_peer_copies_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With EXLLAMA_NO_P2P_COPY the data goes through host memory, without a probe; what was asked for is refused."""
    monkeypatch.setenv("EXLLAMA_NO_P2P_COPY", "1")
    monkeypatch.setattr(transports, "link_report", lambda: pytest.fail("probed"))
    why = "is out: EXLLAMA_NO_P2P_COPY is set"
    assert choose(PLACES, "auto") == (Choice("host", notes=(f"peer {why}", f"events {why}")), [])
    assert choose(PLACES, "host") == (Choice("host"), [])
    for transport in ("peer", "events"):
        assert choose(PLACES, transport)[1] == [f"transport: {transport} {why}"]
    assert choose(PLACES[:1], "auto") == (Choice("peer"), [])


def test_the_fastest_needs_no_words() -> None:
    """Where everything works, it is ``peer``, and there is nothing to say."""
    assert choose(PLACES, "auto") == (Choice("peer"), [])


@pytest.mark.parametrize("transport", ["peer", "events", "host"])
def test_what_is_asked_for_is_taken(transport: str) -> None:
    """Any transport may be asked for where everything works."""
    assert choose(PLACES, transport) == (Choice(transport), [])


@pytest.mark.parametrize(
    ("broken", "transport"), [((FLAG, 0, 2), "events"), ((STORE, 2, 1), "events"), ((COPY, 1, 0), "host")]
)
def test_one_bad_pair_decides_for_all(
    broken: tuple[Mechanism, int, int], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One direction of one pair that lacks a mechanism makes the next transport do; the pair and why are told."""
    _break(monkeypatch, [broken])
    choice, problems = choose(PLACES, "auto")
    assert (choice.transport, problems) == (transport, [])
    mechanism, a, b = broken
    reason = f"is not verified: {mechanism} {a} to {b} (zeros arrived); see tpplan devices --links"
    passed = ["peer"] if transport == "events" else ["peer", "events"]
    assert choice.notes == tuple(f"{name} {reason}" for name in passed)
    _, problems = choose(PLACES, "peer")
    assert problems == [f"transport: peer {reason}"]


def test_other_pairs_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad pair of which one GPU is not in use changes nothing."""
    _break(monkeypatch, [(COPY, 0, 2), (FLAG, 2, 1), (LOAD, 0, 2)])
    assert choose(PLACES[:2], "auto") == (Choice("peer"), [])


def test_links_between_gpus_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found by UUID, whatever the order; only this process's own GPU has to be one that it sees."""
    _break(monkeypatch, [(FLAG, 2, 0)])
    assert choose(PLACES[:1], "auto", ["c", "b"]) == (Choice("peer"), [])
    choice, problems = choose(PLACES[:1], "auto", ["a", "c"])
    assert (choice.transport, problems) == ("events", [])
    assert choice.notes[0].startswith("peer is not verified: flag 2 to 0")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert not choose(PLACES[:1], "auto", ["b", "c"])[0].waits


def test_a_pair_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots need no reading from peers, so they stay; what is larger goes by events, on all devices."""
    _break(monkeypatch, [(LOAD, 2, 0)])
    note = (
        "what is larger than a slot goes by events: reading from peers is not verified: load 2 to 0 (zeros arrived); "
        "see tpplan devices --links"
    )
    for wanted in ("auto", "peer"):
        assert choose(PLACES, wanted) == (Choice("peer", direct=False, notes=(note,)), [])
    assert choose(PLACES, "events") == (Choice("events"), [])


def test_without_peer_access_the_host_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver gives no peer access, torch's copies arrive all the same, but slower: ``host``, unprobed."""
    apart = {(0, 2), (2, 0)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in apart)
    assert choose(PLACES[:2], "auto") == (Choice("peer"), [])  # the others have it
    asked: list[object] = []
    monkeypatch.setattr(transports, "link_report", asked.append)
    reason = "is out: the driver gives no peer access from GPU 0 to 2 and 1 more"
    notes = (f"peer {reason}", f"events {reason}")
    assert choose(PLACES, "auto") == (Choice("host", notes=notes), [])
    for transport in ("peer", "events"):
        assert choose(PLACES, transport)[1] == [f"transport: {transport} {reason}"]
    assert choose(PLACES, "host") == (Choice("host"), [])
    apart.discard((2, 0))
    assert choose(PLACES, "auto")[0].notes[0] == "peer is out: the driver gives no peer access from GPU 0 to 2"
    assert asked == []


def test_only_the_plans_gpus_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many the machine has."""
    report = Mock(return_value=LinkReport((), ()))
    monkeypatch.setattr(transports, "link_report", report)
    choose([PLACES[0], PLACES[2]], "auto")
    choose(PLACES[:1], "auto")
    report.assert_called_once_with({0, 2})


def test_no_link_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any link ``host`` does; a few of the faults are named, and how many more there are."""
    _break(monkeypatch, routes(3))
    choice, problems = choose(PLACES, "auto")
    assert (choice.transport, choice.waits, problems) == ("host", True, [])
    assert "copy 0 to 1 (zeros arrived)" in choice.notes[0]
    assert "and 14 more" in choice.notes[0]
    assert "and 2 more" in choice.notes[1]


@pytest.mark.parametrize("name", SERIAL)
def test_kernels_that_cannot_wait_for_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocking launches and tools that run kernels one by one: events, or the host without slots; never ``peer``."""
    assert serialised() == ""
    monkeypatch.setenv(name, "1")
    _break(monkeypatch, [(FLAG, 0, 1)])  # which is then not tested at all
    why = f"{serialised()}, so that kernels cannot wait for each other"
    assert serialised().startswith(SERIAL[name])
    assert choose(PLACES, "auto") == (Choice("events", waits=False, notes=(f"peer is out: {why}",)), [])
    assert choose(PLACES, "peer")[1] == [f"transport: peer is out: {why}"]
    assert choose(PLACES, "host") == (Choice("host", waits=False, notes=(f"host goes without slots: {why}",)), [])
    _break(monkeypatch, [(COPY, 0, 1)])
    assert choose(PLACES, "auto")[0].transport == "host"
    assert link_driver.TorchDriver().lacks(FLAG) == serialised()  # no probe hangs for it
    assert link_driver.TorchDriver().lacks(STORE) == ""


def test_blocking_launches_and_other_settings_leave_verdicts_on_links_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of links is not forgotten because a tool is used once."""
    before = link_driver.TorchDriver().software()
    for name in SERIAL:
        monkeypatch.setenv(name, "1")
    assert link_driver.TorchDriver().software() == before


@pytest.mark.parametrize(
    "settings",
    [
        {"CUDA_LAUNCH_BLOCKING": "0"},
        {"CUDA_LAUNCH_BLOCKING": ""},
        {"NSYS_PROFILING_SESSION_ID": "1", "CUDA_INJECTION64_PATH": "libToolsInjection64.so"},
        {"NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT": "1"},
    ],
)
def test_what_harms_nobody(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nsight Systems only looks on, and containers set variables for tools that nobody has called."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert serialised() == ""
    assert choose(PLACES, "auto") == (Choice("peer"), [])


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("max_split_size_mb:64, expandable_segments:True", "expandable segments"),
        ("backend:cudaMallocAsync", "another backend"),
    ],
)
def test_memory_that_other_devices_do_not_reach(
    name: str, setting: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then everything goes by the host's memory, without a probe; what would reach into tensors is refused."""
    monkeypatch.setenv(name, setting)
    monkeypatch.delattr(transports, "link_report")
    choice, problems = choose(PLACES, "auto")
    assert (choice.transport, choice.waits, problems) == ("host", True, [])
    assert [note.partition(":")[0] for note in choice.notes] == ["peer is out", "events is out"]
    assert all(what in note for note in choice.notes)
    for transport in ("peer", "events"):
        (problem,) = choose(PLACES, transport)[1]
        assert problem.startswith(f"transport: {transport} is out: torch allocates ")
    assert choose(PLACES, "host") == (Choice("host"), [])
    assert choose(PLACES[:1], "auto") == (Choice("peer"), [])  # nobody to reach for


@pytest.mark.parametrize(
    "setting", ["expandable_segments:False", "backend:native", "max_split_size_mb:64", "backend:native,roundup:1"]
)
def test_plain_memory(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other settings of torch's allocator change nothing."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    assert unreachable() == ""


@pytest.mark.parametrize("expandable", [True, False])
def test_settings_at_run_time_count(expandable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once CUDA is used, torch is asked what it does, whatever the environment says."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{not expandable}")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    snapshot = {"allocator_settings": {"expandable_segments": expandable}}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    assert bool(unreachable()) == expandable
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert unreachable()


def test_an_allocator_of_somebody_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's own allocator is replaced at run time, nobody knows where memory is from."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    assert unreachable() == "torch allocates memory by another backend than its own"


@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS])
def test_no_plan_is_compiled_for_a_gpu_that_is_too_old(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing of a context, the decoder's kernels included, ever comes to one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (7, 5) if place.index else (8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(compiler, "look_at", lambda _: FoundDevice("GPU", 2**40, "9.0"))
    monkeypatch.setattr(compiler, "build", Mock(side_effect=AssertionError))
    plan = tpplan.load(ROOT / "examples/plans/Llama-3.1-8B/2xRTX3060.json")
    with pytest.raises(ExecutionError, match=r"run here:\n  kernels: cuda:1 has capability 7.5, they need 8.0\nhint"):
        compiler.compile(plan, backend="cuda", transport=transport)


def test_devices_that_cannot_run_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing compiler, an old GPU and too many of them are each told, whatever the transport."""
    monkeypatch.setattr(kernel_cache, "lacks", lambda: "numba_cuda not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (7 + place.index % 2, 5))
    _, problems = choose([torch.device("cuda", i) for i in range(9)], "host")
    assert problems[0] == "kernels: numba_cuda not installed"
    assert problems[1] == "kernels: cuda:0 has capability 7.5, they need 8.0"
    assert problems[-1] == "devices: 9 in use, CUDA devices add up at most 8"
    assert len(problems) == 7


@pytest.mark.parametrize(
    ("setting", "transport", "waits", "words"),
    [
        ({}, "peer", True, []),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "events", False, ["peer is out: CUDA_LAUNCH_BLOCKING is set"]),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "host", True, ["peer is out", "events is out"]),
    ],
)
def test_compiling_falls_back(
    setting: dict[str, str],
    transport: str,
    waits: bool,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A context is built for the transport that does, with or without slots, and with the reason and the thresholds."""
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    built: dict[str, Any] = {}
    monkeypatch.setattr(compiler, "build", lambda *_, **arguments: built.update(arguments))
    monkeypatch.setattr(compiler, "look_at", lambda _: FoundDevice("GPU", 2**40, "9.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(compiler, "stored", lambda count, name: (Tuning(copies_fans_bytes=count), f"of {name}"))
    plan = tpplan.load(ROOT / "examples/plans/Llama-3.1-8B/2xRTX3060.json")
    compiler.compile(plan, backend="cuda")
    assert (built["transport"], built["waits"]) == (transport, waits)
    assert built["direct"]
    assert built["tuning"] == Tuning(copies_fans_bytes=2)
    expected = [*words, *([] if transport == "events" else [f"thresholds of {transport}"])]  # which has none
    assert [note[: len(start)] for note, start in zip(built["notes"], expected, strict=True)] == expected
    compiler.compile(plan, backend="cuda", transport="host", tuning=Tuning(copies_fans_bytes=5))
    assert built["tuning"] == Tuning(copies_fans_bytes=5)
    assert built["transport"] == "host"
    assert built["notes"][-1] == "thresholds as given"
    if transport == "peer":
        _break(monkeypatch, [(LOAD, 1, 0)])
        compiler.compile(plan, backend="cuda")
        assert not built["direct"]
