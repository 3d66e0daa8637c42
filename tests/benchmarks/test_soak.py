"""The soak: random operations on virtual devices are right, and what is made wrong is found."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

from benchmarks import soak as command
from benchmarks.common.rows import ROOT
from benchmarks.reliability import operations
from benchmarks.reliability.contents import Lane
from benchmarks.reliability.memory import MIB, Growth, compile_measured, is_enough
from benchmarks.reliability.operations import plan_for, soak
from benchmarks.reliability.stress import Stress
from tests.contexts import CPU, UNEVEN, context, little_room  # noqa: F401 (for every test here)
from tests.exec.processes.threads import Together
from tpplan.errors import ExecutionError
from tpplan.exec import TPContext
from tpplan.exec import compile as compile_plan
from tpplan.exec.backends.cpu import Pending, VirtualDevices
from tpplan.exec.build import build
from tpplan.exec.handles import Aside
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.programs.program import OUTPUT
from tpplan.exec.tools.bench.between import children

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.group.transport import Message
    from tpplan.exec.programs.program import Buffer, Program

LARGEST = 2**12


def _flipped(program: Program, operands: Mapping[Buffer, Tensor]) -> None:
    """Change one bit of the last result of a program."""
    result = [tensor for buffer, tensor in operands.items() if buffer.role == OUTPUT][-1]
    result[-1:, -1:].view(-1).view(torch.uint8)[0] ^= 1


class _Faulty(VirtualDevices):
    """Virtual devices that do one kind of operation wrong, every third time."""

    kind = ""
    calls = 0

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Run a program, and spoil it."""
        pending = super().run(program, operands)
        if program.name.split()[0] == self.kind:
            self.calls += 1
            if not self.calls % 3:
                _flipped(program, operands)
        return pending


class _Lazy(VirtualDevices):
    """Virtual devices that leave out every tenth program, so that its results are what was there before."""

    calls = 0

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Run a program, or do not."""
        self.calls += 1
        return super().run(program, operands) if self.calls % 10 else Pending()


def _context(start: Callable[..., VirtualDevices]) -> TPContext:
    places = (CPU,) * len(UNEVEN.devices)
    return build(UNEVEN, places, start, transport="peer", max_rows=UNEVEN.request.max_rows, dtype=torch.bfloat16)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_wrong_on_virtual_devices(transport: str) -> None:
    """Random operations on uneven devices, one of them idle, give what they have to, by every transport."""
    with context(UNEVEN, transport) as ctx:
        outcome = soak(ctx, operations=900, seconds=600, seed=3, largest=LARGEST)
    assert outcome.faults == []
    assert (outcome.operations, outcome.called, outcome.replayed) == (900, 900, 0)


def test_every_kind_of_operation_comes() -> None:
    """All operations come on all axes, with all dtypes, and with results in all places.

    Now and then one goes aside, if its results are given tensors that are no handle's.
    """
    with context(UNEVEN, "peer") as ctx:
        stress = Stress(ctx, 1, largest=LARGEST)
        tasks = [stress.task() for _ in range(2000)]
        on_devices = [stress.task(host=False) for _ in range(200)]
    kinds, aside = {task.kind for task in tasks}, [task for task in tasks if task.aside]
    assert len(kinds) == 8
    assert {task.kind for task in aside} == kinds - {"gather"}
    assert {task.kind for task in aside if task.out == "new"} == {"add_residual"}
    assert 100 < len(aside) < 400
    assert {task.kind for task in on_devices} == {"broadcast", "scatter", "allgather", "all_reduce", "add_residual"}
    assert len({task.axis for task in tasks}) == len(UNEVEN.splits) + 1
    assert {task.dtype.itemsize for task in tasks} == {1, 2, 4, 8}
    assert {task.out for task in tasks} == {"new", "given", "parts", "residual"}
    assert {task.rows for task in tasks} == set(range(1, UNEVEN.request.max_rows + 1))


def test_devices_that_share_a_gpu_have_given_results_and_nothing_aside() -> None:
    """For the streams that their work goes to are not the current ones."""
    with context(UNEVEN, "peer") as ctx:
        stress = Stress(ctx, 1, largest=LARGEST, streams={})
        tasks = [stress.task() for _ in range(500)]
    assert {task.out for task in tasks} == {"given", "parts", "residual"}
    assert not any(task.aside for task in tasks)


def test_a_seed_gives_the_same_operations_again() -> None:
    """What was wrong once can be tried again."""
    with context(UNEVEN, "peer") as ctx:
        first, again, other = ([Stress(ctx, seed, largest=LARGEST).task() for _ in range(5)] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("kind", ["broadcast", "scatter", "gather", "allgather", "all_reduce", "add_residual"])
def test_a_wrong_bit_is_found(kind: str) -> None:
    """Of every kind of operation; the fault names it."""

    class Faulty(_Faulty):
        pass

    Faulty.kind = kind
    with _context(Faulty) as ctx:
        faults = soak(ctx, operations=400, seconds=600, seed=4, largest=LARGEST).faults
    assert len(faults) > 5
    assert all(fault.partition(": ")[2].startswith(kind) for fault in faults)
    assert all(fault.startswith("1 elements wrong") for fault in faults)


class _FaultyAside(VirtualDevices):
    """Virtual devices that do everything wrong that goes aside."""

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Run a program, and spoil it."""
        pending = super().run(program, operands)
        if self.asides:
            _flipped(program, operands)
        return pending


def test_a_wrong_bit_aside_is_found() -> None:
    """Of each operation that goes aside, and of no other; the fault says so."""
    with _context(_FaultyAside) as ctx:
        stress = Stress(ctx, 4, largest=LARGEST)
        tasks = [stress.task() for _ in range(400)]
        for task in tasks:
            stress.issue(task)
        faults = stress.faults()
    wrong = [fault.partition(": ")[2] for fault in faults]
    assert sorted(wrong) == sorted(str(task) for task in tasks if task.aside)
    assert all(" aside on " in task for task in wrong)


class _Listing(VirtualDevices):
    """Virtual devices that list what is done.

    Attributes:
        done: all of it.
    """

    done: list[str]

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Run a program."""
        self.done.append("aside" if self.asides else "operation")
        return super().run(program, operands)

    def aside(self) -> Aside:
        """Return what lists when it is waited for."""
        return _ListedAside(self)


class _ListedAside(Aside):
    """Lists when it is waited for."""

    def __init__(self, devices: _Listing) -> None:
        super().__init__(devices)
        self._done = devices.done

    def wait(self) -> None:
        """List it."""
        self._done.append("wait")


def test_delays_come_beside_what_goes_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last delay stands before the wait, and the check behind it."""
    done: list[str] = []
    monkeypatch.setattr(_Listing, "done", done, raising=False)
    for name in ("fill", "compare"):
        monkeypatch.setattr(Lane, name, lambda *_, what=name, **__: done.append(what))
    monkeypatch.setattr(Lane, "delay", lambda *_: done.append("delay"))
    with _context(_Listing) as ctx:
        stress = Stress(ctx, 1, largest=LARGEST)
        tasks = {task.kind: task for task in (stress.task() for _ in range(200)) if task.aside}
        assert len(tasks) == 7
        for task in tasks.values():
            for aside in (True, False):
                done.clear()
                stress.issue(evolve(task, delays=((0, 1),) * 3, aside=aside))
                steps = [step for step, _ in groupby(done)]
                called = ["aside", "delay", "wait"] if aside else ["operation", "delay"]
                assert steps == ["delay", "fill", "delay", *called, "compare"]


class _Failing(VirtualDevices):
    """Virtual devices that fail from the tenth program on."""

    calls = 0

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Run a program, or fail."""
        self.calls += 1
        if self.calls >= 10:
            raise ExecutionError("a device waited in vain", "compile again")
        return super().run(program, operands)


def test_an_error_ends_the_soak() -> None:
    """It is told like a fault, with the operation at which it came."""
    with _context(_Failing) as ctx:
        outcome = soak(ctx, operations=400, seconds=600, seed=4, largest=LARGEST)
    (fault,) = outcome.faults
    assert fault.startswith("a device waited in vain, at or before ")
    assert outcome.called < 10


def test_results_from_before_are_found() -> None:
    """An operation that does nothing leaves what its tensors held, which is no more right."""
    with _context(_Lazy) as ctx:
        stress = Stress(ctx, 5, largest=LARGEST)
        for _ in range(400):
            stress.issue(stress.task())
        faults = stress.faults()
        assert stress.faults() == []
    assert len({fault.partition(": ")[2] for fault in faults}) >= 38


def test_the_command_says_that_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints a line for each transport, and the workspaces, and ends with 0."""
    monkeypatch.setattr(sys, "argv", ["soak", "--backend", "cpu", "--operations", "90"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    lines = capsys.readouterr().out.splitlines()
    assert not ended.value.code
    assert lines[-1] == "nothing wrong"
    for transport in TRANSPORTS:
        assert any(line.startswith(f"| {transport} | 30 |") for line in lines)
        assert f"| {transport} | all | not measured: too few rounds, 1 round of at least 8 |" in lines


def test_virtual_devices_need_none_of_the_packages_of_cuda() -> None:
    """An installation without them runs the command."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('cuda', 'numba', 'pynvml')))\n"
        "from benchmarks import soak\n"
        "soak.main()"
    )
    asked = ["--backend", "cpu", "--operations", "3", "--transport", "events", "--largest-kib", "4"]
    done = subprocess.run([sys.executable, "-c", code, *asked], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\nnothing wrong\n")


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (["--processes", "--transport", "peer"], "'peer' (between processes with --backend cpu there are: events)"),
        (["--processes", "--transport", "host"], "'host' (between processes with --backend cpu there are: events)"),
        (["--operations", "0"], "argument --operations: '0', expected a whole number above 0"),
        (["--operations", "-3"], "argument --operations: '-3', expected a whole number above 0"),
    ],
)
def test_what_the_command_refuses(asked: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Transports that there are not between processes, and no operations at all, before anything starts."""
    with pytest.raises(SystemExit, match="2"):
        operations.main(["--backend", "cpu", *asked])
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[-1].endswith(problem)


def test_the_command_tells_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault is told in words, and the command ends with 1."""
    run = VirtualDevices.run

    def wrong(self: VirtualDevices, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        pending = run(self, program, operands)
        _flipped(program, operands)
        return pending

    monkeypatch.setattr(VirtualDevices, "run", wrong)
    monkeypatch.setattr(sys, "argv", ["soak", "--backend", "cpu", "--operations", "30", "--transport", "host"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1
    assert "host: 1 elements wrong" in capsys.readouterr().out.splitlines()[-1]


def test_processes_do_the_same_and_check_their_own() -> None:
    """What one of them receives wrong it finds; without that, both find nothing."""
    with Together(UNEVEN, ((0, 2), (3,)), seed=1) as together:  # both have parts of all axes

        def faults(ctx: TPContext) -> list[str]:
            outcome = soak(ctx, operations=300, seconds=600, seed=3, largest=LARGEST)
            assert outcome.called == 300
            return outcome.faults

        assert together.run(faults) == [[], []]
        carrier = together.carriers[1]
        carry = carrier.carry

        def carry_wrong(messages: Sequence[Message], mark: str) -> Callable[[], None]:
            wait = carry(messages, mark)

            def spoil() -> None:
                wait()
                for message in messages:
                    if not message.is_sent:
                        message.data[-1] ^= 1

            return spoil

        carrier.carry = carry_wrong  # type: ignore[method-assign]
        others, wrong = together.run(faults)
    assert all(": all_reduce " in fault for fault in others)  # of which the process adds up a share for both
    assert len(wrong) > 2 * len(others)
    assert {fault.partition(": ")[2].split()[0] for fault in wrong} >= {"broadcast", "scatter", "gather", "all_reduce"}
    assert all(" on device 3: " in fault or " in host memory: gather " in fault for fault in wrong)


@pytest.mark.parametrize("failure", ["", "process 1 ended with 1"])
def test_the_command_starts_a_process_for_each_device(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    """They are told the same, and what they failed with is told."""
    asked: list[tuple[list[str], int]] = []

    def run(words: list[str], world: int, *_: object, **__: object) -> str:
        asked.append((words, world))
        return failure

    arguments = ["--backend", "cpu", "--devices", "2", "--processes", "--seed", "5"]
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(children, "run", run)
    monkeypatch.setattr(sys, "argv", ["soak", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == (failure or None)
    assert asked == [([sys.executable, "-m", "benchmarks.soak", "operations", *arguments], 2)]


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_early_when_asked(
    ending: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the round's check, with its row and what it has found; the next signal would end it at once."""
    faults, before = Stress.faults, signal.getsignal(ending)

    def asked(self: Stress) -> list[str]:
        signal.raise_signal(ending)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return [*faults(self), "one element wrong"]

    monkeypatch.setattr(operations, "CALLS", 20)
    monkeypatch.setattr(Stress, "faults", asked)
    monkeypatch.setattr(sys, "argv", ["soak", "--backend", "cpu", "--operations", "9000", "--largest-kib", "4"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" | ")[0].rpartition(" | ")[0] for line in lines if "| 20 |" in line] == [
        "| peer | 20 | 0 | 0"
    ]
    assert lines[-2:] == ["ended early", "peer: one element wrong"]
    assert signal.getsignal(ending) is before


@pytest.mark.parametrize("is_alone", [False, True])
def test_the_first_process_tells_what_the_others_have_found(
    is_alone: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only its output is seen; if it has failed alone, while they go on with operations, there is nothing of theirs."""
    theirs = True if is_alone else (12, ["one element wrong on device 1"], False)

    def tell(_: TPContext, mine: object) -> list[object]:
        return [mine] if isinstance(mine, bool) else [mine, theirs]

    monkeypatch.setattr(TPContext, "tell", tell)
    monkeypatch.setattr(sys, "argv", ["soak", "--backend", "cpu", "--operations", "9", "--transport", "events"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == (not is_alone)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == ("nothing wrong" if is_alone else "events: one element wrong on device 1")
    wrong = 0 if is_alone else 12
    assert any(line.startswith("| events | 9 |") and line.endswith(f"| {wrong} |") for line in lines)


def test_processes_end_in_the_same_round() -> None:
    """Whichever of them is asked to."""
    with Together(UNEVEN, ((0, 2), (3,)), seed=1) as together:
        calls = iter([False, True])

        def called(ctx: TPContext) -> int:
            is_ended = calls.__next__ if 3 in ctx.devices else lambda: False
            return soak(ctx, operations=2000, seconds=600, seed=3, largest=LARGEST, is_ended=is_ended).called

        assert together.run(called) == [operations.CALLS] * 2


def test_the_first_process_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the one that has started them, which is who is asked."""
    told: list[int] = []

    def run(*_: object, started: Callable[[list[SimpleNamespace]], None]) -> str:
        started([SimpleNamespace(send_signal=told.append), SimpleNamespace(send_signal=None)])
        signal.raise_signal(signal.SIGINT)
        return ""

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(children, "run", run)
    with pytest.raises(SystemExit):
        operations.main(["--backend", "cpu", "--processes"])
    assert told == [signal.SIGTERM]


def test_workspaces_are_as_planned() -> None:
    """What a context allocates on each device is what the ledger of its plan says, to the byte."""
    plan = plan_for(3, 8)
    ctx, found = compile_measured(plan, lambda: compile_plan(plan, backend="cpu"))
    ctx.close()
    assert [planned for _, planned, _ in found] == [memory.workspace_bytes for memory in plan.memory]
    assert all(planned == taken > 0 for _, planned, taken in found)


def test_growth_is_told_once_there_are_enough_looks() -> None:
    """Memory that grows in the second half is a problem; what came before, and what comes and goes, is none."""
    grows, steady = Growth(), Growth()
    for look in range(16):
        grows.looks.append({"host": 0, "used on cuda:0": 10 * MIB * look})
        steady.looks.append({"host": 0, "used on cuda:0": 10 * MIB * min(look, 4 + look % 2)})
    assert grows.grown == {"host": 0, "used on cuda:0": 80 * MIB}
    assert grows.problems == ["memory used on cuda:0 grew by 80.0 MiB"]
    assert steady.problems == []
    del grows.looks[7:]
    assert grows.problems == []


def test_an_overhead_may_be_more_by_a_twentieth() -> None:
    """What is less breaks no budget: how much graphs and kernels take depends on how many there are."""
    assert is_enough(1000, 700)
    assert is_enough(1000, 1050)
    assert not is_enough(1000, 1051)
