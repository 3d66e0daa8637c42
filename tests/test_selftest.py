"""The test of a compiled plan: what it covers, that it finds what is wrong, and how it says so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from attrs import evolve
from jsonschema import Draft202012Validator

import tpplan
from schemas import generate
from tests.command import Done, command
from tests.contexts import PLANS, UNEVEN, little_room  # noqa: F401 (for every test here)
from tpplan.axes import Axis
from tpplan.codec import render, unstructure
from tpplan.errors import ExecutionError, InternalError
from tpplan.exec import compile as compile_plan
from tpplan.exec import engine, kernel_cache, lower_events, selftest, transports
from tpplan.exec.attempts import Attempts
from tpplan.exec.compiler import build
from tpplan.exec.context import TPContext
from tpplan.exec.cpu import VirtualDevices
from tpplan.exec.explain import ALL, cuts
from tpplan.exec.fence import own
from tpplan.exec.links import LinkReport
from tpplan.exec.lower import TRANSPORTS
from tpplan.exec.program import HOST, INPUT, OUTPUT, Await, Buffer, Exchange, Flag, Program, Queue, Wait
from tpplan.exec.references import KINDS
from tpplan.render.selftest import selftest as view

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.cpu import Pending
    from tpplan.exec.operation import Moves, Reduction
    from tpplan.exec.references import Kind
    from tpplan.plan import SplitPlan
    from tpplan.selftest_report import SelftestReport, Tested

EXAMPLES = Path(__file__).parents[1] / "examples/plans"
SCHEMA = Draft202012Validator(generate.schema("selftest-report"))

#: The element of an operand that is made wrong.
_COLUMN = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a plan for uneven devices, one of which is idle."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    UNEVEN.save(path)
    return path


@pytest.fixture(scope="module")
def plan() -> SplitPlan:
    """Return that plan."""
    return UNEVEN


def _compiler(plan: SplitPlan) -> Callable[[str], TPContext]:
    return lambda transport: compile_plan(plan, backend="cpu", transport=transport)


@pytest.fixture(scope="module")
def report(plan: SplitPlan) -> SelftestReport:
    """Return the report on a plan with which nothing is wrong."""
    return selftest.selftest(plan, _compiler(plan), TRANSPORTS)


def test_everything_is_tested(plan: SplitPlan, report: SelftestReport) -> None:
    """Every operation runs on every axis by every transport, one by one and in the worst order, and is right."""
    assert report.ok
    assert not report.faults
    axes = {str(split.axis) for split in plan.splits}
    operations = {"broadcast", "scatter", "gather", "allgather", "all_reduce", "add_residual"}
    for schedule in ("plain", "adversarial"):
        for transport in TRANSPORTS:
            mine = [t for t in report.tested if (t.schedule, t.transport) == (schedule, transport)]
            assert operations <= {one.operation for one in mine}
            assert all(axes <= set(_axes(one)) and one.checks and one.compared_bytes for one in mine)


def test_every_way_is_gone(report: SelftestReport) -> None:
    """Small and large messages are tried on every axis, and more parts of one than a ring has slots."""
    plain = [one for one in report.tested if one.schedule == "plain"]
    ways = {(t.operation, t.transport): {way for axis in t.axes for way in axis.ways} for t in plain}
    for operation in ("broadcast", "scatter", "allgather", "all_reduce"):
        assert ways[operation, "peer"] == {"slots", "straight"}
        assert {"slots", "1 part", "2 parts"} <= ways[operation, "host"]
    assert "2 parts" in ways["broadcast from the host", "events"]
    assert ways["gather", "host"] == {"on each device"}
    assert all(axis.ways and not axis.skipped for one in plain for axis in one.axes)
    assert all({0, 1, 3} <= {*axis.rows, *axis.narrow_rows} for one in plain for axis in one.axes)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_odd_sizes(plan: SplitPlan, kind: Kind) -> None:
    """Every shape of rows is tried with both widths, and every dtype with both, on every axis; of one byte to eight."""
    with _compiler(plan)("peer") as context:
        attempts = Attempts.of(context, kind)
        odd = list(attempts.all([]))
    for axis, dims in attempts.dims.items():
        mine = [each for each in odd if each.axis == axis]
        assert {(each.lead, each.dim) for each in mine} >= set(product([(), (3, 1), (1,), (0,)], dims))
        assert {(each.dtype, each.dim) for each in mine} == set(product({each.dtype for each in mine}, dims))
        assert {each.dtype.itemsize for each in mine} == ({2, 4} if kind.adds else {1, 2, 4, 8})
        assert {each.dim for each in mine if not each.narrow} == {dims[0]}


#: Operations that are made wrong where operands have several rows of the plan's own width.
WIDE = ("broadcast", "scatter", "allgather", "all_reduce")


@pytest.mark.parametrize("transport", ["peer", "events"])
def test_a_fault_of_wide_rows_is_found(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a real plan, what goes wrong only with several rows of whole heads, or of the stream, is found on any axis."""
    plan = tpplan.load(EXAMPLES / "Llama-3.1-8B/2xRTX3060.json")
    stream = plan.split(Axis.RS).size
    hit: set[tuple[str, str]] = set()

    def wrong(name: str, run: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
        def zeroing(context: TPContext, x: object, *args: Any, **options: Any) -> Sequence[Tensor]:
            results = run(context, x, *args, **options)
            axis = options["axis"] if name == "all_reduce" else args[0]
            wide = options["dim"] == plan.split(axis).width if "dim" in options else results[0].shape[-1] == stream
            if wide and results[0].shape[:-1].numel() > 1:
                hit.add((name, axis or ALL))
                for result in results:
                    result.zero_()
            return results

        return zeroing

    for name in WIDE:
        monkeypatch.setattr(TPContext, name, wrong(name, getattr(TPContext, name)))
    report = selftest.selftest(plan, _compiler(plan), [transport])
    found = {one.operation.removesuffix(" from the host") for one in report.tested if one.wrong}
    assert found == set(WIDE)
    assert hit == {(name, axis) for name in WIDE for axis in cuts(plan) if axis != ALL or not KINDS[name].cuts}
    for one in report.tested:
        if one.schedule == "plain":
            assert all(max(axis.rows) > 1 for axis in one.axes)
            if one.operation in WIDE:  # but for what is large: in parts, and moves that are left to copy engines
                assert all("part" in way for axis in one.axes for way in axis.skipped)


@pytest.mark.parametrize("name", ["alone", "replicated"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_other_plans(name: str, transport: str) -> None:
    """One device alone, and layers that are cut in several ways, each of which is tested."""
    plan = PLANS[name]
    report = selftest.selftest(plan, _compiler(plan), [transport])
    assert report.ok
    kinds = {one.operation: set(_axes(one)) for one in report.tested}
    assert kinds["gather"] == kinds["scatter"] == set(cuts(plan)) - {ALL}
    assert kinds["broadcast"] == kinds["all_reduce"] == set(cuts(plan))
    assert ("kv_heads in layers 1,3" in kinds["gather"]) == (name == "replicated")


def test_the_same_trials_every_time(plan: SplitPlan, report: SelftestReport) -> None:
    """Testing again gives the same report, to the byte."""
    again = selftest.selftest(plan, _compiler(plan), ["events"])
    assert again.tested == tuple(one for one in report.tested if one.transport == "events")


def _axes(one: Tested) -> tuple[str, ...]:
    return tuple(axis.axis for axis in one.axes)


def _flip(tensor: Tensor) -> None:
    """Change a bit in the first row, in the first byte of the fourth element."""
    if tensor.shape[0] and tensor.shape[1] > _COLUMN:
        tensor.untyped_storage()[(tensor.storage_offset() + _COLUMN * tensor.stride(1)) * tensor.itemsize] ^= 1


def _spill(tensor: Tensor) -> None:
    """Change a bit right beside the first row, if there is anything."""
    storage, at = tensor.untyped_storage(), (tensor.storage_offset() + tensor.shape[1]) * tensor.itemsize
    if tensor.stride(0) > tensor.shape[1] and at < len(storage):
        storage[at] ^= 1


class _Harm(NamedTuple):
    """What a broken backend does after programs of a name, and what is found then.

    Attributes:
        program: the begin of its name.
        buffer: of it.
        harm: done to it.
        device: where something wrong is found.
        what: in words.
    """

    program: str
    buffer: Buffer
    harm: Callable[[Tensor], None]
    device: int
    what: str


HARMS = {
    "a sum": _Harm("all_reduce", Buffer(OUTPUT, 2), _flip, 2, "the result of device 2 has"),
    "a copy": _Harm("broadcast", Buffer(OUTPUT, 2), _flip, 2, "the result of device 2 has"),
    "an addition": _Harm("add_residual", Buffer(OUTPUT, 0), _flip, 0, "the result of device 0 has"),
    "what the host gets": _Harm("gather", Buffer(OUTPUT, HOST), _flip, HOST, "the result in host memory has"),
    "an input": _Harm("allgather", Buffer(INPUT, 2), _flip, 2, "an input, afterwards, of device 2 has"),
    "what is beside": _Harm(
        "scatter", Buffer(OUTPUT, 0), _spill, 0, "an output with the columns beside it of device 0"
    ),
}


def _tested(plan: SplitPlan, after: Callable[[Program, Mapping[Buffer, Tensor]], None]) -> SelftestReport:
    """Return the report, by events, on devices that do something after every program."""

    class Broken(VirtualDevices):
        def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
            pending = super().run(program, operands)
            after(program, operands)
            return pending

    def make(transport: str) -> TPContext:
        places = (torch.device("cpu"),) * len(plan.devices)
        return build(plan, places, Broken, transport=transport, max_rows=plan.request.max_rows, dtype=torch.bfloat16)

    return selftest.selftest(plan, make, ["events"])


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_wrong_byte_is_found(plan: SplitPlan, harm: _Harm) -> None:
    """A single wrong bit is found, wherever it is, and nothing else is said to be wrong."""

    def after(program: Program, operands: Mapping[Buffer, Tensor]) -> None:
        if program.name.startswith(harm.program) and harm.buffer in operands:
            harm.harm(operands[harm.buffer])

    report = _tested(plan, after)
    assert not report.ok
    assert report.wrong == sum(one.wrong for one in report.tested)
    assert {(one.operation.split()[0], one.schedule) for one in report.tested if one.wrong} == {(harm.program, "plain")}
    for fault in report.faults:
        assert fault.operation.startswith(harm.program)
        assert fault.device == harm.device
        assert fault.message.startswith(harm.what)
        if harm.harm is _flip and fault.operands != "columns apart":
            assert fault.byte == _COLUMN * getattr(torch, fault.elements).itemsize


def test_an_error_is_a_fault(plan: SplitPlan) -> None:
    """An operation that ends with an error is wrong, and the others are tested all the same."""

    def after(program: Program, _: object) -> None:
        if program.name.startswith("scatter"):
            raise InternalError("the bus is on fire")

    report = _tested(plan, after)
    assert {fault.message for fault in report.faults} == {"the bus is on fire"}
    assert {fault.device for fault in report.faults} == {None}
    checks = {one.operation: (one.checks, one.wrong) for one in report.tested if one.schedule == "plain"}
    assert 0 < checks["scatter"][1] < checks["scatter"][0]  # without rows nothing is to be done
    assert checks["gather"][1] == 0 < checks["gather"][0]


def test_the_worst_order_finds_a_race(plan: SplitPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are fetched before they are complete are wrong in the worst order, and only there."""
    reduction = lower_events.reduction

    def racing(operation: Reduction, parts: int) -> Program:
        program = reduction(operation, parts)
        kept = (c for c in program.commands if not (isinstance(c, Wait) and c.event.name == "sum"))
        return evolve(program, commands=tuple(kept))

    monkeypatch.setattr(lower_events, "reduction", racing)
    monkeypatch.setattr(engine, "verify", lambda program, **_: program)
    report = selftest.selftest(plan, _compiler(plan), ["events"])
    assert {(one.operation, one.schedule) for one in report.tested if one.wrong} == {("all_reduce", "adversarial")}


def test_a_deadlock_is_found(plan: SplitPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that wait for each other for ever are a fault that says what they wait for."""

    def stuck(_: Moves) -> Program:
        flag = Flag("full", Queue(HOST, 0, (1,)))
        return Program("stuck", (Exchange(own(1), (Await(own(1), flag),)),))

    monkeypatch.setattr(lower_events, "moves", stuck)
    monkeypatch.setattr(engine, "verify", lambda program, **_: program)
    report = selftest.selftest(plan, _compiler(plan), ["events"])
    told = {fault.schedule: fault.message for fault in report.faults}
    assert told["plain"] == "stuck never ends: own1: await full(0→1)"
    assert told["adversarial"].startswith("deadlock: ")
    assert "own1 at own1: await full(0→1)" in told["adversarial"]


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
    monkeypatch.setattr(transports, "link_report", lambda: LinkReport((), ()))
    return memory


def _only_events(plan: SplitPlan, error: ExecutionError) -> Callable[[str], TPContext]:
    """Return what compiles for nothing but ``events``."""

    def make(transport: str) -> TPContext:
        if transport != "events":
            raise error
        return _compiler(plan)(transport)

    return make


def test_a_transport_that_is_not_verified(plan: SplitPlan, gpus: dict[str, int]) -> None:
    """What is refused for its links alone is left out, every one of them is told, and the others decide."""
    gpus["free"] = 2**40
    real = selftest.compiler(plan, "cuda", print)
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


def test_threads_and_device_are_as_before(plan: SplitPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Testing leaves torch with the threads and the CUDA device that it had; memory is free for each transport."""
    current = [1]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("emptied"))
    seen: list[object] = []

    def make(transport: str) -> TPContext:
        torch.cuda.set_device(0)
        seen.append(torch.get_num_threads())
        return _compiler(plan)(transport)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        selftest.selftest(PLANS["alone"], make, ["events", "host"])
        assert (torch.get_num_threads(), current) == (2, [1])
        assert seen == ["emptied", 1, "emptied", 1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.multi_gpu
def test_the_command_on_gpus(tmp_path: Path) -> None:
    """On GPUs all transports that are verified pass, and torch's threads and current device stay."""
    sizes = tpplan.parse_devices("40GiB,20GiB")
    model = tpplan.read_model(EXAMPLES.parent / "models/Llama-3.1-8B/config.json")
    tpplan.plan(model, sizes, cache=tpplan.Cache(tokens=4096)).save(tmp_path / "plan.json")
    torch.cuda.set_device(1)
    before = torch.get_num_threads()
    done = command("selftest", tmp_path / "plan.json", "--json")
    assert done.code == 0
    assert done.err == ""
    report = json.loads(done.out)
    assert (report["backend"], report["refused"]) == ("cuda", [])
    assert (torch.get_num_threads(), torch.cuda.current_device()) == (before, 1)


@pytest.mark.parametrize(
    ("name", "transport"),
    [("Qwen2.5-7B/6xRTX3060", "peer"), ("Mixtral-8x7B/A100-40GB+3xRTX3090", "events")],
)
def test_examples(name: str, transport: str) -> None:
    """Real plans pass, with replicated heads, the layout gather and experts."""
    found = tpplan.load(EXAMPLES / f"{name}.json")
    assert selftest.selftest(found, _compiler(found), [transport]).ok


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
    assert any(one.startswith("in the worst order: on virtual devices") for one in lines)
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
    assert document == json.loads(render(unstructure(selftest.selftest(plan, _compiler(plan), ["events"]))))


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
            _flip(operands[Buffer(OUTPUT, 2)])
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
    assert len(document["faults"]) == 3 < document["wrong"]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (("--backend", "metal"), "unknown backend 'metal'", "choose one of these"),
        (("--backend", "cuda"), "this machine has 0 CUDA devices", "or run on virtual devices with --backend cpu"),
        (
            ("--transport", "pigeon"),
            "unknown transport 'pigeon', expected peer, host, events",
            "name one of these, or leave --transport out to test them all",
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
    code = "import sys; sys.modules['torch'] = None; from tpplan.cli import main; sys.exit(main())"
    runs = [
        subprocess.run([sys.executable, "-c", code, *words, path], capture_output=True, text=True, check=False)
        for words in (["selftest"], ["show"])
    ]
    assert [done.returncode for done in runs] == [2, 0]
    assert "needs torch, which is not installed" in runs[0].stderr
    assert "hint: pip install 'tpplan[exec]'" in runs[0].stderr
    assert "Traceback" not in runs[0].stderr
