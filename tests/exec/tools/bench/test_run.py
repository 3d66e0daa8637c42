"""The times of a plan's operations: who is timed, that wrong results and errors are told, and how."""

from __future__ import annotations

import os
import statistics
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings

from tests.contexts import ALONE, UNEVEN, budgeted, little_room, plans  # noqa: F401 (for every test here)
from tests.examples import examples
from tests.exec.tools.bench.cases import OPERATIONS, short_turns  # noqa: F401 (for every test here)
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec import compile as compile_plan
from tpplan.exec.backends.cpu import VirtualDevices
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.programs.program import OUTPUT, Buffer
from tpplan.exec.tools.bench import case as bench_case
from tpplan.exec.tools.bench import peers as bench_peers
from tpplan.exec.tools.bench import run as bench
from tpplan.exec.tools.bench import run as bench_limits
from tpplan.exec.tools.bench.clock import Clock, Run, spread
from tpplan.exec.tools.bench.peers import Contender
from tpplan.exec.tools.bench.run import even_plan
from tpplan.exec.tuning import Tuning
from tpplan.planfile.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.backends.cpu import Pending
    from tpplan.exec.context import TPContext
    from tpplan.exec.programs.program import Program
    from tpplan.exec.tools.bench.case import Case
    from tpplan.reports.bench import BenchReport, Limit, Timed


#: Of the uneven plan: 40 columns in bfloat16.
ROW_BYTES = 80
COUNT = 3


def _compiler(plan: SplitPlan = UNEVEN, tuning: Tuning | None = None) -> Callable[[str], TPContext]:
    return lambda transport: compile_plan(plan, backend="cpu", transport=transport, tuning=tuning)


def _times(report: BenchReport, operation: str) -> dict[str, Timed]:
    """Return who did an operation of the first size."""
    return {timed.by: timed for timed in next(m for m in report.measured if m.operation == operation).timed}


def test_what_nccl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told by the environment, unless that says otherwise; every report says so from then on.

    No report says that it obeys: who has used NCCL before in this process has it as it was.
    """
    variables = {"NCCL_P2P_DISABLE": ("links between GPUs", "1"), "NCCL_NVLS_ENABLE": ("NVLS", "0")}
    notes = [
        f"NCCL was told to go without {what}, which it heeds if it was not used before: {name}={value}"
        for name, (what, value) in variables.items()
    ]
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert list(bench._told_nccl("host")) == []
    for name in variables:
        monkeypatch.delenv(name)
    assert list(bench._told_nccl("peer")) == notes[1:]
    assert list(bench._told_nccl("host")) == list(bench._told_nccl("peer")) == notes
    assert {name: os.environ[name] for name in variables} == {name: value for name, (_, value) in variables.items()}


def test_another_way_in_graphs_is_told() -> None:
    """Beside that of calls; nothing is where it is the same."""
    tuning = Tuning(peer_fans_bytes=0, peer_exchanges_bytes=0, copies_fans_bytes=200)
    report = bench.bench(_compiler(tuning=tuning), "peer", sizes=(ROW_BYTES, 12 * ROW_BYTES), rounds=2)
    ways = {(m.operation, m.rows): (m.way, m.graph_way) for m in report.measured}
    assert ways["broadcast", 1] == ways["allgather", 12] == ("peer straight", "")
    assert ways["broadcast", 12] == ("peer straight", "events 1 part")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_operation_of_every_size_is_timed(transport: str) -> None:
    """Each has a time by tpplan and by torch, and the way that ``explain()`` tells for so many rows."""
    report = bench.bench(_compiler(), transport, sizes=(ROW_BYTES, 12 * ROW_BYTES), rounds=2)
    assert [(m.operation, m.rows) for m in report.measured] == [(name, rows) for name in OPERATIONS for rows in (1, 12)]
    with _compiler()(transport) as compiled:
        ways = compiled.explain().ways
    for one in report.measured:
        assert one.payload_bytes == one.rows * ROW_BYTES
        others = ("even", "torch") if one.operation in {"allgather", "scatter", "gather"} else ("torch",)
        assert [(timed.by, timed.graph, timed.failed) for timed in one.timed] == [
            (who, False, "") for who in ("tpplan", *others)
        ]
        assert all(t.time and 0 < t.time.low_ns <= t.time.median_ns <= t.time.high_ns for t in one.timed)
        name = one.operation.split(" ", maxsplit=1)[0]
        axis = "all devices" if name in {"broadcast", "all_reduce"} else "residual"
        (way,) = [w for w in ways if w.operation == name and axis in w.axes and w.first <= one.rows <= w.last]
        assert (one.way, one.link_bytes) == (f"{way.transport} {way.how}", way.row_bytes * one.rows)
    assert (report.transport, report.devices) == (transport, ("GPU 0", "GPU 2", "GPU 3"))
    assert (report.slice_columns, report.even_columns) == ((11, 18, 11), (13, 13, 14))
    assert report.limits == ()


def test_graphs_have_the_operations_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the embedding and two for each layer, by whomever; fewer of what is large, which the report tells."""
    monkeypatch.setattr(bench_case, "_MOST_BYTES", 5 * 2 * ROW_BYTES)
    report = bench.bench(_compiler(), "events", sizes=(ROW_BYTES, 2 * ROW_BYTES, 12 * ROW_BYTES), rounds=2)
    assert report.in_a_graph == 2 * 4 + 1
    assert {(m.rows, m.in_a_graph) for m in report.measured} == {(1, None), (2, 5), (12, 1)}


def test_a_graph_is_timed_by_its_operations() -> None:
    """As many are captured as one is told to have, and the time of a replay is that of all of them."""
    calls: list[str] = []
    context: Any = SimpleNamespace(capture=lambda: nullcontext(SimpleNamespace(replay=lambda: None)))
    cases: Any = SimpleNamespace(places=(torch.device("cuda"),))
    turns = bench._Turns(cases, None, (), Clock([], 2))
    contender = Contender(call=lambda: calls.append("call"), results=(), expected=(), captured=True)
    turns._prepare("who", lambda: contender, context, 65)
    assert len(calls) == 1 + 65
    runs = [turns._entries["who", graph] for graph in (False, True)]
    assert [run.operations for run in runs if isinstance(run, Run)] == [1, 65]


def test_sizes_are_whole_rows() -> None:
    """Sizes are rounded up to rows of the residual stream, and those that come to the same are timed once."""
    report = bench.bench(_compiler(ALONE), "auto", sizes=(1, 32, 33, 5), rounds=2)
    assert [m.payload_bytes for m in report.measured if m.operation == "gather"] == [32, 64]


def test_a_wrong_result_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are compared before anything is timed: those of tpplan, too."""
    run = VirtualDevices.run

    def broken(self: VirtualDevices, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        pending = run(self, program, operands)
        if program.name.startswith(("allgather", "all_reduce")):
            operands[Buffer(OUTPUT, 2)][0, 3] += 64
        return pending

    monkeypatch.setattr(VirtualDevices, "run", broken)
    report = bench.bench(_compiler(), "events", sizes=(ROW_BYTES,), rounds=2)
    for operation in OPERATIONS:
        ours, *even, theirs = _times(report, operation).values()
        assert all((each.time is None) == (operation == "allgather") for each in even)
        is_wrong = operation.startswith(("allgather", "all_reduce"))
        assert ours.failed == ("result 1 has 1 wrong elements of 40" if is_wrong else "")
        assert (ours.time is None, theirs.time is None) == (is_wrong, False)


@pytest.mark.parametrize("error", [ExecutionError("a\n  b"), RuntimeError("a b"), AttributeError("a b")])
def test_a_peer_that_fails_ends_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who raises, when it is made ready or later, has a reason instead of a time; all others have theirs."""

    def raising(case: Case) -> None:
        if case.operation == "scatter":
            raise error
        case.finish()

    monkeypatch.setattr(bench_peers, "_torch", raising)
    report = bench.bench(_compiler(), "events", sizes=(ROW_BYTES,), rounds=2)
    times = {name: _times(report, name) for name in OPERATIONS}
    assert times["scatter"]["torch"].failed.endswith("a b")
    assert "wrong elements" in times["broadcast"]["torch"].failed
    assert times["all_reduce"]["torch"].time
    assert all(mine["tpplan"].time for mine in times.values())


def test_an_even_cut_has_none_beside_it() -> None:
    """Slices that differ by a unit are even, and those of a single device."""
    rs = UNEVEN.split(Axis.RESIDUAL)
    even = evolve(rs, bounds=(0, 14, 14, 27, 40))
    plan = budgeted(evolve(UNEVEN, splits=tuple(even if each is rs else each for each in UNEVEN.splits)))
    for one in (plan, ALONE):
        assert even_plan(one) is None
        report = bench.bench(_compiler(one), "events", sizes=(ROW_BYTES,), rounds=2)
        assert report.even_columns == ()
        assert all("even" not in _times(report, name) for name in OPERATIONS)


@given(plans())
@settings(max_examples=examples(50))
def test_the_even_plan(plan: SplitPlan) -> None:
    """Who holds columns of the residual stream holds as many units of it as others, or one more; all else is as was."""
    even = even_plan(plan)
    if even is None:
        return
    verify(even)
    before, after = plan.split(Axis.RESIDUAL), even.split(Axis.RESIDUAL)
    widths = [[b - a for a, b in pairwise(split.bounds)] for split in (before, after)]
    assert [width > 0 for width in widths[0]] == [width > 0 for width in widths[1]]
    assert (sum(widths[1]), after.size) == (before.size, before.size)
    units = [-(-width // after.unit) for width in widths[1] if width]
    assert max(units) - min(units) <= 1
    assert all(cut % after.unit == 0 for cut in after.bounds if cut < after.size)
    assert [s for s in even.splits if s is not after] == [s for s in plan.splits if s is not before]


def test_even_slices_without_room_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's own operations are timed all the same."""

    def full(_: TPContext) -> None:
        raise RuntimeError("CUDA out of\nmemory")

    monkeypatch.setattr(bench, "even_context", full)
    report = bench.bench(_compiler(), "events", sizes=(ROW_BYTES,), rounds=2)
    assert report.notes[1:] == ("even slices were not timed: RuntimeError: CUDA out of memory",)
    assert list(_times(report, "allgather")) == ["tpplan", "torch"]


def test_an_error_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends the bench is told, and both contexts are closed; that one says something then is not."""
    closed = []

    def close(self: TPContext) -> None:
        closed.append(self)
        raise ExecutionError("waited in vain")

    def told(_: BenchReport) -> None:
        raise ExecutionError("the reader is gone")

    monkeypatch.setattr("tpplan.exec.context.TPContext.close", close)
    with pytest.raises(ExecutionError, match="is gone"):
        bench.bench(_compiler(), "events", sizes=(ROW_BYTES,), rounds=2, told=told)
    assert len(closed) == 2


def test_links_that_cannot_be_measured_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rates of the links there are no limits, and a note says why; operations are timed all the same."""

    def broken(_: Mapping[int, torch.device]) -> tuple[Limit, ...]:
        raise RuntimeError("CUDA error:\nout of memory")

    monkeypatch.setattr(bench_limits, "measure", broken)
    report = bench.bench(_compiler(), "events", sizes=(ROW_BYTES,), rounds=2)
    assert report.notes[1:] == ("no limits were measured: RuntimeError: CUDA error: out of memory",)
    assert all(_times(report, name)["tpplan"].time for name in OPERATIONS)


def test_a_run_that_fails_late() -> None:
    """What raises in a later round is told and timed no more; the others take all their turns."""
    calls: list[str] = []
    told: dict[str, str] = {}

    def late() -> None:
        calls.append("late")
        if calls.count("late") == COUNT:
            raise RuntimeError("enough")

    def programmatic() -> None:
        raise RuntimeError("at once")

    runs = {"late": Run(late), "early": Run(programmatic), "good": Run(lambda: calls.append("good"), 2)}
    clock = Clock([torch.device("cpu")], 5)
    times = clock.times(runs, lambda key, error: told.__setitem__(key, str(error)))
    assert told == {"late": "enough", "early": "at once"}
    assert list(times) == ["good"]
    assert calls == ["late", "good", "late", "good", "late", "good", "good", "good", "good"]


@pytest.mark.parametrize("rounds", [2, 7, 9, 10, 11, 40])
def test_what_times_spread_over(rounds: int) -> None:
    """From ten rounds on, a tenth of them at least is beyond each end; of fewer these are the extremes."""
    seconds = [1.0 + i for i in range(rounds)]
    found = spread(seconds[::-1])
    faster, slower = (
        sum(each * 10**9 < found.low_ns for each in seconds),
        sum(each * 10**9 > found.high_ns for each in seconds),
    )
    assert faster == slower == rounds // 10
    assert found.median_ns == round(statistics.median(seconds) * 10**9)
