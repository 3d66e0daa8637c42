"""The command that tests a compiled plan: its screen, its document, and transports that this machine refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests.command import Done, command
from tests.contexts import UNEVEN, little_room  # noqa: F401 (for every test here)
from tests.exec.selftest_cases import SCHEMA, compiler_of, flip
from tpplan.core.missing import install_command
from tpplan.errors import ExecutionError
from tpplan.exec.backends.cpu import VirtualDevices
from tpplan.exec.compiler import compiler
from tpplan.exec.machine import transports
from tpplan.exec.machine.link_report import LinkReport
from tpplan.exec.programs.program import OUTPUT, Buffer, Program
from tpplan.exec.toolchain import kernel_cache
from tpplan.exec.tools.selftest import run as selftest
from tpplan.exec.tools.selftest.references import KINDS
from tpplan.files.codec import unstructure
from tpplan.files.jsontext import render
from tpplan.render.selftest import selftest as view

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.backends.cpu import Pending
    from tpplan.exec.context import TPContext
    from tpplan.reports.selftest import SelftestReport


@pytest.fixture(scope="module")
def plan() -> SplitPlan:
    """Return a plan for uneven devices, one of which is idle."""
    return UNEVEN


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a plan for uneven devices, one of which is idle."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    UNEVEN.save(path)
    return path


@pytest.fixture
def gpus(plan: SplitPlan, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Make this machine look as if it had the plan's GPUs, with no memory left and no link that works.

    Returns:
        How much memory each has, in ``free``.
    """
    memory = {"free": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(plan.devices))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (memory["free"], 2**40))
    monkeypatch.setattr(kernel_cache, "lacks", lambda: "")
    monkeypatch.setattr(transports, "link_report", lambda _: LinkReport((), ()))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, __: True)
    return memory


def _only_events(plan: SplitPlan, error: ExecutionError) -> Callable[[str], TPContext]:
    """Return what compiles for nothing but ``events``."""

    def make(transport: str) -> TPContext:
        if transport != "events":
            raise error
        return compiler_of(plan)(transport)

    return make


def test_a_transport_that_is_not_verified(plan: SplitPlan, gpus: dict[str, int]) -> None:
    """What is refused for its links alone is left out, every one of them is told, and the others decide."""
    gpus["free"] = 2**40
    real = compiler(plan, "cuda", print)
    with pytest.raises(ExecutionError, match="peer is not verified") as refused:
        real("peer")
    report = selftest.selftest(plan, _only_events(plan, refused.value), ["peer", "host", "events"])
    assert report.ok
    assert {one.transport for one in report.tested} == {"events"}
    assert [(one.transport, one.unverified) for one in report.refused] == [("peer", True), ("host", True)]
    assert "copy 0 to 2" in report.refused[0].message
    shown = _shown(report)
    assert "peer was not tested: the plan for Tiny cannot run here: transport: peer is not verified" in shown
    assert "host was not tested: " in shown
    SCHEMA.validate(json.loads(render(unstructure(report))))
    gpus["free"] = 0
    with pytest.raises(ExecutionError, match="devices") as refused:
        real("peer")
    report = selftest.selftest(plan, _only_events(plan, refused.value), ["peer", "events"])
    assert [one.unverified for one in report.refused] == [False]  # for its links, and for its memory


def test_a_transport_that_fails(plan: SplitPlan) -> None:
    """A transport whose context ends with another error makes the test fail; if no other works, that is the error."""
    error = ExecutionError("a kernel waited in vain on device 1")
    report = selftest.selftest(plan, _only_events(plan, error), ["events", "peer"])
    assert not report.ok
    assert not report.wrong
    assert [(one.transport, one.unverified) for one in report.refused] == [("peer", False)]
    shown = _shown(report)
    assert "peer ended with an error: a kernel waited in vain on device 1" in shown
    assert shown.endswith("compared: peer ended with an error")
    with pytest.raises(ExecutionError, match="waited in vain"):
        selftest.selftest(plan, _only_events(plan, error), ["peer", "host"])


def _shown(report: SelftestReport) -> str:
    return " ".join("".join(text for text, _ in one) for one in view(unstructure(report)))


def _without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _selftest(path: Path, *options: str, terminal: bool = False) -> Done:
    return command("selftest", path, "--transport", "events", *options, terminal=terminal)


def test_the_command(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that passes: exit 0, one screen with a line per operation and the verdict, and why on virtual devices."""
    _without_gpus(monkeypatch)
    done = _selftest(path)
    assert done.code == 0
    lines = done.out.splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 100
    assert lines[0].endswith("on 3 virtual devices")
    assert lines[-1].endswith("compared: every byte is right")
    for operation in KINDS:
        assert sum(one.startswith(f"{operation}  ") for one in lines) == 1
    assert any(
        one.startswith("most rows that every operation had at full width: 12 on all devices, 12 on ") for one in lines
    )
    assert any(re.match(r"checks +events +aside +worst order +ways", one) for one in lines)
    for told in ("aside: some sizes, as they go beside other work", "worst order: on virtual devices"):
        assert any(one.startswith(told) for one in lines)
    assert done.err == "note: on virtual devices, because the plan has 4 and this machine 0 CUDA devices\n"


def test_a_machine_that_refuses_the_plan(path: Path, gpus: dict[str, int]) -> None:
    """Where there are GPUs enough and the plan does not fit them, nothing else is tested instead: that is exit 2."""
    for options in ((), ("--backend", "auto"), ("--transport", "host")):
        done = command("selftest", path, *options)
        assert (done.code, done.out) == (2, "")
        assert re.search(r"devices\[0\] \(GPU 0\), here GPU: needs .*, 0 B are free", done.err)
        assert "--backend cpu" in done.err
        assert "backend=" not in done.err
    gpus["free"] = 2**40
    done = command("selftest", path, "--transport", "events")
    assert (done.code, done.out) == (2, "")
    assert "transport: events is not verified" in done.err


def test_the_document(path: Path, plan: SplitPlan) -> None:
    """``--json`` prints the report itself, which conforms to its schema."""
    done = _selftest(path, "--backend", "cpu", "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    SCHEMA.validate(document)
    assert document == json.loads(render(unstructure(selftest.selftest(plan, compiler_of(plan), ["events"]))))


def test_progress(path: Path) -> None:
    """A terminal sees what is being tested, and in the end nothing of it."""
    done = _selftest(path, "--backend", "cpu", terminal=True)
    assert "testing all_reduce by events" in done.err
    assert not done.err.rpartition("\r")[2]


def test_a_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something wrong: exit 1, which operation, axis, device and byte, and how many checks failed."""
    run = VirtualDevices.run

    def broken(self: VirtualDevices, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        pending = run(self, program, operands)
        if program.name.startswith("allgather"):
            flip(operands[Buffer(OUTPUT, 2)])
        return pending

    monkeypatch.setattr(VirtualDevices, "run", broken)
    done = _selftest(path, "--backend", "cpu")
    assert done.code == 1
    text = " ".join(done.out.split())
    told = (
        r"allgather on kv_heads, by events: 1 row of uint8, dim 8, [a-z ]+: the result of device 2 has 0x.. at byte 3, "
    )
    assert re.search(told, text)
    assert re.search(r" \d+ of \d+ wrong ", done.out)
    assert re.search(r"compared: \d+ checks failed$", done.out.rstrip())
    document = json.loads(_selftest(path, "--backend", "cpu", "--json").out)
    SCHEMA.validate(document)
    assert document["ok"] is False
    schedules = [one["schedule"] for one in document["faults"]]
    assert schedules == ["plain"] * 3 + ["aside"] * 3
    assert len(schedules) < document["wrong"]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (
            ("--backend", "metal"),
            "--backend is 'metal', expected auto, cpu or cuda",
            "tpplan selftest --help lists what there is",
        ),
        (("--backend", "cuda"), "this machine has 0 CUDA devices", "or run on virtual devices with --backend cpu"),
        (
            ("--transport", "pigeon"),
            "--transport is 'pigeon', expected peer, host or events",
            "tpplan selftest --help lists what there is",
        ),
    ],
)
def test_no_answer(
    path: Path, options: tuple[str, ...], message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be tested is exit 2 with the reason, and nothing on standard output."""
    _without_gpus(monkeypatch)
    done = command("selftest", path, *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert re.search(f"hint: .*{hint}$", done.err.rstrip())


def test_without_torch(path: Path) -> None:
    """Where torch is missing, the error says what to install; the plan half goes on to work."""
    code = "import sys; sys.modules['torch'] = None; from tpplan.cli.main import main; sys.exit(main())"
    runs = [
        subprocess.run([sys.executable, "-c", code, *words, path], capture_output=True, text=True, check=False)
        for words in (["selftest"], ["show"])
    ]
    assert [done.returncode for done in runs] == [2, 0]
    assert "needs torch, which is not installed" in runs[0].stderr
    assert f"hint: {install_command('exec')}" in runs[0].stderr
    assert "Traceback" not in runs[0].stderr
