"""The test of a compiled plan: what it covers, and that it finds what is wrong."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from attrs import evolve

import tpplan
from tests.contexts import PLANS, UNEVEN, little_room  # noqa: F401 (for every test here)
from tests.exec.selftest_cases import COLUMN, EXAMPLES, compiler_of, flip, on
from tpplan.core.axes import Axis
from tpplan.errors import InternalError
from tpplan.exec.backends import engine
from tpplan.exec.backends.cpu import VirtualDevices
from tpplan.exec.context import TPContext
from tpplan.exec.explain import ALL, cuts
from tpplan.exec.programs import lower_events
from tpplan.exec.programs.fence import own
from tpplan.exec.programs.program import HOST, INPUT, OUTPUT, Await, Buffer, Exchange, Flag, Program, Queue, Wait
from tpplan.exec.tools.selftest import run as selftest
from tpplan.exec.tools.selftest.attempts import Attempts
from tpplan.exec.tools.selftest.references import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.backends.cpu import Pending
    from tpplan.exec.programs.operation import Moves, Reduction
    from tpplan.exec.tools.selftest.references import Kind
    from tpplan.reports.selftest import SelftestReport


@pytest.fixture(scope="module")
def plan() -> SplitPlan:
    """Return a plan for uneven devices, one of which is idle."""
    return UNEVEN


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_odd_sizes(plan: SplitPlan, kind: Kind) -> None:
    """Every shape of rows is tried with both widths, and every dtype with both, on every axis; of one byte to eight."""
    with compiler_of(plan)("peer") as context:
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
    stream = plan.split(Axis.RESIDUAL).size
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
    report = selftest.selftest(plan, compiler_of(plan), [transport])
    found = {one.operation.removesuffix(" from the host") for one in report.tested if one.wrong}
    assert found == set(WIDE)
    assert hit == {(name, axis) for name in WIDE for axis in cuts(plan) if axis != ALL or not KINDS[name].cuts}
    for one in report.tested:
        if one.schedule == "plain":
            assert all(max(axis.rows) > 1 for axis in one.axes)
            if one.operation in WIDE:  # but for what is large: in parts, and moves that are left to copy engines
                assert all("part" in way for axis in one.axes for way in axis.skipped)


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
    "a sum": _Harm("all_reduce", Buffer(OUTPUT, 2), flip, 2, "the result of device 2 has"),
    "a copy": _Harm("broadcast", Buffer(OUTPUT, 2), flip, 2, "the result of device 2 has"),
    "an addition": _Harm("add_residual", Buffer(OUTPUT, 0), flip, 0, "the result of device 0 has"),
    "what the host gets": _Harm("gather", Buffer(OUTPUT, HOST), flip, HOST, "the result in host memory has"),
    "an input": _Harm("allgather", Buffer(INPUT, 2), flip, 2, "an input, afterwards, of device 2 has"),
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

    return selftest.selftest(plan, on(plan, Broken), ["events"])


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_wrong_byte_is_found(plan: SplitPlan, harm: _Harm) -> None:
    """A single wrong bit is found, wherever it is, and nothing else is said to be wrong."""

    def after(program: Program, operands: Mapping[Buffer, Tensor]) -> None:
        if program.name.startswith(harm.program) and harm.buffer in operands:
            harm.harm(operands[harm.buffer])

    report = _tested(plan, after)
    assert not report.ok
    assert report.wrong == sum(one.wrong for one in report.tested)
    found = {(one.operation.split()[0], one.schedule) for one in report.tested if one.wrong}
    assert found == {(harm.program, "plain"), (harm.program, "aside")}
    for fault in report.faults:
        assert fault.operation.startswith(harm.program)
        assert fault.device == harm.device
        assert fault.message.startswith(harm.what)
        if harm.harm is flip and fault.operands.removesuffix(", aside") != "columns apart":
            assert fault.byte == COLUMN * getattr(torch, fault.elements).itemsize


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
    report = selftest.selftest(plan, compiler_of(plan), ["events"])
    assert {(one.operation, one.schedule) for one in report.tested if one.wrong} == {("all_reduce", "adversarial")}


def test_a_deadlock_is_found(plan: SplitPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that wait for each other for ever are a fault that says what they wait for."""

    def stuck(_: Moves) -> Program:
        flag = Flag("full", Queue(HOST, 0, (1,)))
        return Program("stuck", (Exchange(own(1), (Await(own(1), flag),)),))

    monkeypatch.setattr(lower_events, "moves", stuck)
    monkeypatch.setattr(engine, "verify", lambda program, **_: program)
    report = selftest.selftest(plan, compiler_of(plan), ["events"])
    told = {fault.schedule: fault.message for fault in report.faults}
    assert told["plain"] == "stuck never ends: own1: await full(0→1)"
    assert told["adversarial"].startswith("deadlock: ")
    assert "own1 at own1: await full(0→1)" in told["adversarial"]


def test_threads_and_device_are_as_before(plan: SplitPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Testing leaves torch with the threads and the CUDA device that it had; memory is free for each transport."""
    current = [1]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("emptied"))
    monkeypatch.setattr(selftest, "give_back", lambda: seen.append("given back"))
    seen: list[object] = []

    def make(transport: str) -> TPContext:
        torch.cuda.set_device(0)
        seen.append(torch.get_num_threads())
        return compiler_of(plan)(transport)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        selftest.selftest(PLANS["alone"], make, ["events", "host"])
        assert (torch.get_num_threads(), current) == (2, [1])
        assert seen == ["given back", "emptied", 1] * 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        ("Qwen2.5-7B/6xRTX3060", "peer"),
        ("Mixtral-8x7B/A100-40GB+3xRTX3090", "events"),
        ("Qwen3-Next-80B-A3B/2xH200", "events"),
    ],
)
def test_examples(name: str, transport: str) -> None:
    """Real plans pass, with replicated heads, the layout gather, experts and linear attention."""
    found = tpplan.load(EXAMPLES / f"{name}.json")
    assert selftest.selftest(found, compiler_of(found), [transport]).ok
