"""The test of a compiled plan with which nothing is wrong, on devices that have graphs: all that it covers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.contexts import PLANS, UNEVEN, little_room  # noqa: F401 (for every test here)
from tests.exec.selftest_cases import IN_GRAPHS, Capturable, captured, compiler_of, on
from tpplan.exec.explain import ALL, cuts
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.tools.selftest import run as selftest
from tpplan.exec.tools.selftest.references import KINDS

if TYPE_CHECKING:
    from tpplan.reports.selftest import SelftestReport, Tested

#: Of the plan for uneven devices, one of which is idle.
of_uneven_devices = pytest.mark.parametrize("report", ["uneven"], indirect=True)


@pytest.fixture(scope="module", params=PLANS)
def report(request: pytest.FixtureRequest) -> SelftestReport:
    """Return the report on a plan."""
    plan = PLANS[request.param]
    return selftest.selftest(plan, on(plan, Capturable), TRANSPORTS)


@of_uneven_devices
def test_everything_is_tested(report: SelftestReport) -> None:
    """Every operation runs on every axis by every transport, one by one, aside and in the worst order, and is right."""
    assert report.ok
    assert not report.faults
    axes = {str(split.axis) for split in UNEVEN.splits}
    operations = {"broadcast", "scatter", "gather", "allgather", "all_reduce", "add_residual"}
    for schedule in ("plain", "aside", "adversarial"):
        for transport in TRANSPORTS:
            mine = [t for t in report.tested if (t.schedule, t.transport) == (schedule, transport)]
            assert operations <= {one.operation for one in mine}
            assert all(axes <= set(_axes(one)) and one.checks and one.compared_bytes for one in mine)


@of_uneven_devices
def test_every_way_is_gone(report: SelftestReport) -> None:
    """Small and large messages are tried on every axis, and longer ones than a ring has slots for."""
    plain = [one for one in report.tested if one.schedule == "plain"]
    ways = {(t.operation, t.transport): {way for axis in t.axes for way in axis.ways} for t in plain}
    for operation in ("broadcast", "scatter", "allgather", "all_reduce"):
        assert ways[operation, "peer"] == {"slots", "straight"}
        assert {"slots", "frames"} <= ways[operation, "host"]
    assert all("frames in turns" in ways[operation, "host"] for operation in ("broadcast", "all_reduce"))
    assert {"1 part", "2 parts"} <= ways["broadcast from the host", "host"]
    assert "2 parts" in ways["broadcast from the host", "events"]
    assert ways["gather", "host"] == {"written"}
    assert all(axis.ways and not axis.skipped for one in plain for axis in one.axes)
    assert all({0, 1, 3} <= {*axis.rows, *axis.narrow_rows} for one in plain for axis in one.axes)


def test_the_same_trials_every_time(report: SelftestReport, request: pytest.FixtureRequest) -> None:
    """Testing again, without graphs, gives the same report of all else, to the byte."""
    plan = PLANS[request.node.callspec.params["report"]]
    again = selftest.selftest(plan, compiler_of(plan), ["events"])
    graphs = captured(report)
    assert again.tested == tuple(one for one in report.tested if one.transport == "events" and one not in graphs)


@pytest.mark.parametrize("report", ["alone", "replicated"], indirect=True)
def test_other_plans(report: SelftestReport, request: pytest.FixtureRequest) -> None:
    """One device alone, and layers that are cut in several ways, each of which is tested by every transport."""
    name = request.node.callspec.params["report"]
    plan = PLANS[name]
    assert report.ok
    for transport in TRANSPORTS:
        kinds = {one.operation: set(_axes(one)) for one in report.tested if one.transport == transport}
        assert kinds["gather"] == kinds["scatter"] == set(cuts(plan)) - {ALL}
        assert kinds["broadcast"] == kinds["all_reduce"] == set(cuts(plan))
        assert ("kv_heads in layers 1,3" in kinds["gather"]) == (name == "replicated")


def test_everything_is_captured(report: SelftestReport) -> None:
    """Every operation without the host, on every axis by every transport, in sizes that go every way."""
    assert report.ok
    found = captured(report)
    assert [(one.operation, one.transport) for one in found] == [
        (name, transport) for transport in TRANSPORTS for name in KINDS if name in IN_GRAPHS
    ]
    plain = {(one.operation, one.transport): one for one in report.tested if one.schedule == "plain"}
    for one in found:
        called = plain[one.operation, one.transport]
        assert {axis.axis for axis in one.axes} == {axis.axis for axis in called.axes}
        assert one.checks
        assert one.compared_bytes
        assert not any(axis.skipped for axis in one.axes)
        assert all(max(axis.rows) > 1 for axis in one.axes)


def _axes(one: Tested) -> tuple[str, ...]:
    return tuple(axis.axis for axis in one.axes)
