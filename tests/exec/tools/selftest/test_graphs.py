"""The test of a compiled plan in graphs: what is captured, and that what replays make wrong is found."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tests.contexts import ALONE, UNEVEN, little_room  # noqa: F401 (for every test here)
from tests.exec.selftest_cases import IN_GRAPHS, Capturable, Recorded, captured, compiler_of, on
from tpplan.errors import ExecutionError
from tpplan.exec.backends.cpu import Pending
from tpplan.exec.tools.selftest import run as selftest
from tpplan.exec.tuning import Tuning
from tpplan.files.codec import unstructure
from tpplan.render.selftest import selftest as view

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tpplan.exec.programs.program import Buffer, Program
    from tpplan.reports.selftest import SelftestReport


def test_captured_operations_go_as_they_do_in_graphs() -> None:
    """Where copy engines get large moves, those are tried, and no kernels that write straight in their place."""
    tuning = Tuning(copies_fans_bytes=1, copies_exchanges_bytes=1)
    report = selftest.selftest(UNEVEN, on(UNEVEN, Capturable, tuning=tuning), ["peer"])
    assert report.ok
    ways = {one.operation: {way for axis in one.axes for way in axis.ways} for one in captured(report)}
    for name in ("broadcast", "scatter", "allgather"):
        assert ways[name] == {"slots", "1 part"}
    assert ways["all_reduce"] == {"slots", "straight"}


class _Nothing(Recorded):
    """A graph of nothing."""

    def replay(self) -> None:
        """Leave everything as it is."""


class _Stale(Recorded):
    """A graph that works with what some tensor held when it was captured."""

    def __enter__(self) -> Any:
        self.first = True
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Take a copy of the first that is copied."""
        if self.first and func.overloadpacket.__name__ == "copy_":
            self.first, args = False, (args[0], args[1].clone(), *args[2:])
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Refused(Recorded):
    """A graph that cannot be replayed."""

    def replay(self) -> None:
        """Raise."""
        raise ExecutionError("the bus is on fire")


class _Uncaptured(Recorded):
    """A graph that cannot be captured."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Raise where something is added."""
        if func.overloadpacket.__name__.startswith("add"):
            raise ExecutionError("never run before")
        return super().__torch_dispatch__(func, types, args, kwargs)


def _of(graphs: type[Recorded]) -> SelftestReport:
    class Devices(Capturable):
        graph = graphs

    return selftest.selftest(UNEVEN, on(UNEVEN, Devices), ["events"])


def _wrong(report: SelftestReport) -> dict[str, tuple[int, int]]:
    assert {one.schedule for one in report.tested if one.wrong} == {"captured"}
    assert not report.ok
    return {one.operation: (one.wrong, one.checks) for one in captured(report)}


def test_a_replay_that_does_nothing_is_found() -> None:
    """Of every operation, every time, for the results of the capture are right only for its contents."""
    wrong = _wrong(_of(_Nothing))
    assert set(wrong) == IN_GRAPHS
    assert all(0 < some == every for some, every in wrong.values())


def test_a_replay_of_old_contents_is_found() -> None:
    """Of the one tensor of each operation's that was read when it was captured, and of no other."""
    wrong = _wrong(_of(_Stale))
    assert {name for name, (some, _) in wrong.items() if some} >= {"broadcast", "scatter", "allgather"}
    assert all(some <= 2 for some, _ in wrong.values())


def test_a_replay_that_is_refused_is_a_fault() -> None:
    """Of each operation, told once, in words."""
    report = _of(_Refused)
    assert {wrong for wrong, _ in _wrong(report).values()} == {1}
    assert {fault.message for fault in report.faults} == {"the bus is on fire"}
    shown = " ".join("".join(text for text, _ in one) for one in view(unstructure(report)))
    assert "by events, in a graph: " in shown


def test_what_cannot_be_captured_is_a_fault() -> None:
    """Of that operation only; the others are tested all the same."""
    wrong = _wrong(_of(_Uncaptured))
    assert {name for name, (some, _) in wrong.items() if some} == {"all_reduce", "add_residual"}
    assert all(every > 1 for name, (_, every) in wrong.items() if name not in {"all_reduce", "add_residual"})


class _AloneInGraphs(Capturable):
    """Virtual devices that leave out what goes aside in a graph."""

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Run a program, or do not."""
        return Pending() if self.asides and self.is_capturing() else super().run(program, operands)


def test_asides_are_captured() -> None:
    """Some sizes of every operation, each of which is found wrong if its graph lacks it, and nothing else is."""
    report = selftest.selftest(UNEVEN, on(UNEVEN, _AloneInGraphs), ["events"])
    assert {name for name, (some, every) in _wrong(report).items() if 0 < some < every} == IN_GRAPHS
    assert all(fault.operands.endswith(", aside") for fault in report.faults)


def test_the_screen_tells_of_graphs() -> None:
    """In a column of their own, and what was captured; where there are no graphs it tells of none."""
    lines = [
        "".join(text for text, _ in one)
        for one in view(unstructure(selftest.selftest(ALONE, on(ALONE, Capturable), ["events"])))
    ]
    assert any(re.match(r"checks +events +aside +in a graph +worst order +ways", one) for one in lines)
    assert any(one.startswith("in a graph: captured") for one in lines)
    lines = [
        "".join(text for text, _ in one)
        for one in view(unstructure(selftest.selftest(ALONE, compiler_of(ALONE), ["events"])))
    ]
    assert not any("in a graph" in one for one in lines)
