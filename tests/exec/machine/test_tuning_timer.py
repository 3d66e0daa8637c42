"""The timer of the survey does what it is asked to time, by the way that it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import pytest
import torch

import tpplan
from tpplan.exec import compile as compile_plan
from tpplan.exec.backends.engine import Virtual
from tpplan.exec.programs.lower import Limits, Mode, Route, kind_of, route
from tpplan.exec.tools.bench import clock as bench_clock
from tpplan.exec.tools.survey import timer as survey_timer
from tpplan.exec.tools.survey.timer import HIDDEN, ITEM_BYTES, GraphTimer, synthetic_plan
from tpplan.exec.tuning import (
    COPIES,
    DIRECT,
    EXCHANGES,
    FANS,
    FRAMES,
    KIB,
    KINDS,
    LARGEST,
    MIB,
    RELAYED,
    SLOTS,
    SUMS,
    Tuning,
    largest,
)

if TYPE_CHECKING:
    from tpplan.exec.context import TPContext
    from tpplan.exec.programs.operation import Operation

CPU = torch.device("cpu")

#: How operations are to go, by transport and way.
GONE = {
    ("peer", SLOTS): Route("peer", small=True),
    ("peer", DIRECT): Route("peer"),
    ("peer", COPIES): Route("events"),
    ("peer", RELAYED): Route("peer", relayed=True),
    ("host", SLOTS): Route("host", small=True),
    ("host", FRAMES): Route("host", framed=True),
}


class _Graph:
    """In the place of a CUDA graph: virtual devices have none."""

    replays = 0
    captures = False

    def __enter__(self) -> Self:
        _Graph.captures = True
        return self

    def __exit__(self, *_: object) -> None:
        _Graph.captures = False

    def replay(self) -> None:
        """Count."""
        _Graph.replays += 1


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_messages_have_room(kind: str, devices: int) -> None:
    """The synthetic plan is for as many rows as they have, whatever moves."""
    timer = GraphTimer([torch.device("meta")] * devices)
    given, taken = timer._operands(kind, largest(kind, devices))
    assert {x.shape[0] for x in (*given, *taken)} <= set(range(1, synthetic_plan(devices).request.max_rows + 1))


@pytest.mark.parametrize(("transport", "devices"), [("peer", 2), ("peer", 3), ("host", 2)])
def test_the_timer_runs_what_it_is_asked_to(transport: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way is gone by messages of the very size, in a context of its own; all are closed again."""
    made: list[TPContext] = []
    ran = set()

    def compiled(plan: tpplan.SplitPlan, *, transport: str, tuning: Tuning, **_: object) -> TPContext:
        made.append(compile_plan(plan, backend="cpu", transport=transport, tuning=tuning))
        return made[-1]

    def observed(asked: Operation, way: str, rows: int, item: int, limits: Limits, *, mode: Mode) -> Route:
        found = route(asked, way, rows, item, limits, mode=mode)
        if mode.captured:
            ran.add((kind_of(asked), rows * asked.columns * item, found))
        return found

    monkeypatch.setattr(survey_timer, "compile_plan", compiled)
    monkeypatch.setattr("tpplan.exec.backends.engine.route", observed)
    monkeypatch.setattr("tpplan.exec.context.TPContext.capture", lambda _: _Graph())
    monkeypatch.setattr(Virtual, "is_capturing", lambda _: _Graph.captures)
    monkeypatch.setattr(bench_clock, "_TURN_SECONDS", 0)  # a turn is a replay
    every = [way for each, way in GONE if each == transport and (way, devices) != (RELAYED, 2)]
    with GraphTimer([CPU] * devices) as timer:
        for kind in KINDS:
            never = {FANS: (), EXCHANGES: (RELAYED,), SUMS: (RELAYED, COPIES)}[kind]
            ways = tuple(way for way in every if way not in never)
            for size in (4 * KIB, 64 * KIB):
                ran.clear()
                _Graph.replays = 0
                times = timer(transport, kind, size, ways)
                assert len(times) == len(ways)
                assert min(times) > 0
                assert _Graph.replays % len(ways) == 0 < _Graph.replays
                assert {(one, found) for one, _, found in ran} == {(kind, GONE[transport, way]) for way in ways}
                (message,) = {sent for _, sent, _ in ran}
                even = kind != EXCHANGES or devices == 2
                assert message == size if even else 0.6 * size < message <= size
        assert len(made) == len(every)
        assert timer.limits(transport).slot_bytes >= 64 * KIB
        assert len(made) == len(every)
    for context in made:
        with pytest.raises(tpplan.TpplanError, match="closed"):
            context.explain()


def test_what_takes_longer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times are those of the ways, in their order, in µs of one operation."""
    clock = 0.0

    class Slow(_Graph):
        def __init__(self, tuning: Tuning) -> None:
            self._seconds = 3.0 if tuning.peer_fans_bytes else 5.0

        def replay(self) -> None:
            nonlocal clock
            clock += self._seconds

    monkeypatch.setattr(
        survey_timer, "compile_plan",
        lambda plan, **asked: compile_plan(plan, backend="cpu", transport="peer", tuning=asked["tuning"]),
    )  # fmt: skip
    monkeypatch.setattr("tpplan.exec.context.TPContext.capture", lambda context: Slow(context.explain().limits.tuning))
    monkeypatch.setattr("tpplan.exec.tools.bench.clock.time.perf_counter", lambda: clock)
    with GraphTimer([CPU] * 2) as timer:
        small = timer("peer", FANS, 8 * KIB, (SLOTS, DIRECT))
        large = timer("peer", FANS, 8 * MIB, (DIRECT,))
    assert list(small) == pytest.approx([3e6 / 50, 5e6 / 50])  # 50 operations in a graph
    assert list(large) == pytest.approx([5e6 / 16])  # that move 128 MiB


def test_what_fails_ends_the_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds of which a time is missing would be wrong: the error is the caller's."""

    class Broken(_Graph):
        def replay(self) -> None:
            raise tpplan.TpplanError("a device waited in vain")

    monkeypatch.setattr(
        survey_timer, "compile_plan",
        lambda plan, **asked: compile_plan(plan, backend="cpu", transport="peer", tuning=asked["tuning"]),
    )  # fmt: skip
    monkeypatch.setattr("tpplan.exec.context.TPContext.capture", lambda _: Broken())
    with GraphTimer([CPU] * 2) as timer, pytest.raises(tpplan.TpplanError, match="waited in vain"):
        timer("peer", FANS, 8 * KIB, (SLOTS, DIRECT))


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_the_plan_of_the_timer(devices: int) -> None:
    """Every device is in use, messages of the largest size fit, and little else is asked of a GPU's memory."""
    plan = synthetic_plan(devices)
    widths = [slices.end - slices.start for slices in plan.slices(tpplan.Axis.RESIDUAL)]
    assert len(widths) == devices
    assert min(widths) > 0.8 * max(widths)
    assert plan.request.max_rows * HIDDEN * ITEM_BYTES >= LARGEST
    assert max(memory.used_bytes - memory.overhead_bytes for memory in plan.memory) < 256 * MIB
