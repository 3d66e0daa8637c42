"""The test of a compiled plan beside other work: which ways are gone there, and that what is wrong is found."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.contexts import UNEVEN, little_room  # noqa: F401 (for every test here)
from tests.exec.selftest_cases import compiler_of, flip, on
from tpplan.exec.backends.cpu import VirtualDevices
from tpplan.exec.backends.engine import Engine
from tpplan.exec.handles import Aside
from tpplan.exec.programs.program import OUTPUT
from tpplan.exec.tools.selftest import run as selftest
from tpplan.exec.tools.selftest.attempts import Attempts
from tpplan.exec.tools.selftest.references import KINDS
from tpplan.files.codec import unstructure
from tpplan.render.selftest import selftest as view

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tpplan.exec.backends.cpu import Pending
    from tpplan.exec.programs.lower import Mode, Route
    from tpplan.exec.programs.operation import Operation
    from tpplan.exec.programs.program import Buffer, Program


@pytest.mark.parametrize(
    ("transport", "ways"),
    [
        ("peer", {("peer", True), ("events", False)}),
        ("host", {("host", True), ("host", False)}),
        ("events", {("events", False)}),
    ],
)
def test_every_way_is_gone_aside(transport: str, ways: set[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes through slots and what goes by copies, of every operation between devices; no more than a few sizes."""
    gone: set[tuple[str, str, bool]] = set()
    real = Engine.route

    def noted(self: Engine, operation: Operation, rows: int, item_bytes: int, mode: Mode) -> Route:
        found = real(self, operation, rows, item_bytes, mode)
        if mode.aside:
            gone.add((operation.name, found.transport, found.small))
            assert not found.framed
        return found

    monkeypatch.setattr(Engine, "route", noted)
    report = selftest.selftest(UNEVEN, compiler_of(UNEVEN), [transport])
    for name in ("broadcast", "scatter", "allgather", "all_reduce"):
        assert {(way, small) for operation, way, small in gone if operation.startswith(name)} >= ways, name
    plain, aside = ([one for one in report.tested if one.schedule == name] for name in ("plain", "aside"))
    assert [one.operation for one in aside] == list(KINDS)
    assert 4 * sum(one.checks for one in aside) < sum(one.checks for one in plain)
    assert not any(axis.ways or axis.skipped for one in aside for axis in one.axes)  # for those are of calls


@pytest.mark.parametrize("transport", ["peer", "host"])
def test_a_few_sizes_go_aside(transport: str) -> None:
    """Of every operation a small one on every axis, and of each way that it is called, one axis."""
    with compiler_of(UNEVEN)(transport) as context:
        ways = context.explain().ways
        for name, kind in KINDS.items():
            attempts, mine = Attempts.of(context, kind), [way for way in ways if way.operation == name]
            found = list(attempts.aside(mine, Random(1)))
            assert all(each.aside for each in found)
            assert [each.axis for each in found if not each.how] == list(attempts.dims)
            axes = {(each.how.removesuffix(" in turns"), each.axis) for each in found if each.how}
            assert {how for how, _ in axes} == {way.how for way in mine}
            assert len(axes) <= len(mine)


class _Harmful(VirtualDevices):
    """Virtual devices that do everything wrong that goes aside."""

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Run a program, and change a bit of its results."""
        pending = super().run(program, operands)
        if self.asides:
            _flip_results(operands)
        return pending


class _Late(_Harmful):
    """Virtual devices on which what goes aside is right once it was waited for."""

    def __init__(self, *memory: Any) -> None:
        super().__init__(*memory)
        self.late: list[Mapping[Buffer, Tensor]] = []

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Run a program, and note what is wrong for now."""
        if self.asides:
            self.late.append(operands)
        return super().run(program, operands)

    def aside(self) -> Aside:
        """Return what makes it right."""
        return _Mending(self)


class _Mending(Aside):
    """Makes right what was issued aside when somebody waits for it."""

    def __init__(self, devices: _Late) -> None:
        super().__init__(devices)
        self._late = devices.late

    def wait(self) -> None:
        """Change the bits back."""
        while self._late:
            _flip_results(self._late.pop())


def _flip_results(operands: Mapping[Buffer, Tensor]) -> None:
    for buffer, tensor in operands.items():
        if buffer.role == OUTPUT:
            flip(tensor)


def test_what_is_wrong_aside_is_found() -> None:
    """Of every operation, there and nowhere else; faults say so on the screen."""
    report = selftest.selftest(UNEVEN, on(UNEVEN, _Harmful), ["events"])
    assert {(one.operation, one.schedule) for one in report.tested if one.wrong} == {(name, "aside") for name in KINDS}
    assert all(fault.operands.endswith(", aside") for fault in report.faults)
    shown = " ".join("".join(text for text, _ in one) for one in view(unstructure(report)))
    assert ", aside: the result" in shown


def test_results_are_waited_for() -> None:
    """What is complete only behind the wait is right."""
    assert selftest.selftest(UNEVEN, on(UNEVEN, _Late), ["events"]).ok
