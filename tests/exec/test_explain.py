"""What ``explain()`` says of a context is what the context does."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

import tpplan
from tests.contexts import MAX_ROWS, PLANS, UNEVEN, context, heads, little_room, plan_of  # noqa: F401 (for every test here)
from tests.exec.selftest_cases import on
from tpplan.core.axes import Axis, parse_layers
from tpplan.core.plan import Split
from tpplan.errors import ExecutionError
from tpplan.exec import compile as compile_plan
from tpplan.exec.backends.cpu import Pending, VirtualDevices
from tpplan.exec.backends.engine import Engine
from tpplan.exec.build import build
from tpplan.exec.explain import ALL, ASIDE, IN_GRAPH, Explanation, Way, called, cuts, explain, in_graphs
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.programs.lower import Limits
from tpplan.exec.programs.program import EXCHANGE, HOST, SLOT, STAGE, Buffer, Program, flat, reads, writes
from tpplan.exec.tools.selftest.references import KINDS
from tpplan.exec.tools.selftest.trial import FORMS, Noise, Scene
from tpplan.exec.tuning import Tuning

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tpplan.core.plan import SplitPlan

#: The plans of the examples.
EXAMPLES = Path(__file__).parents[2] / "examples/plans"

#: What a program's name says of the way that it goes.
NAMES = {
    ("peer", "slots"): "by slots of peers",
    ("peer", "straight"): "straight",
    ("peer", "passed on"): "passed on",
    ("host", "slots"): "by slots on the host",
    ("host", "frames"): "by frames on the host",
    ("host", "shared frames"): "by shared frames on the host",
    ("host", "parts"): "through host memory",
    ("events", "parts"): "by events",
}
#: By which buffers a program goes.
ROLES = {EXCHANGE: "exchange buffer", STAGE: "host rings", SLOT: "slots"}


class Recorder(VirtualDevices):
    """Virtual devices that only remember the last program."""

    last: Program | None = None
    captures = False

    def is_capturing(self) -> bool:
        """Tell what a test has set."""
        return self.captures

    def run(self, program: Program, operands: Mapping[Buffer, torch.Tensor]) -> Pending:
        """Remember a program."""
        assert operands
        Recorder.last = program
        return Pending()


def _wide(plan: SplitPlan, axis: str, *, cuts_axis: bool) -> int:
    """Return the columns per element that the explanation is about, or the columns."""
    split = cuts(plan)[axis]
    return split.width if split and cuts_axis else plan.split("residual").size


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", PLANS)
def test_calls_go_as_explained(name: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of a call with the fewest and with the most rows of a way has its name, parts, buffers and bytes.

    So has one that is captured, or aside, where it goes another way: large moves do.
    """
    plan = PLANS[name]
    places = (torch.device("cpu"),) * len(plan.devices)
    made = partial(build, plan, places, Recorder, transport=transport, max_rows=MAX_ROWS, dtype=torch.bfloat16)
    tested = made(tuning=Tuning(copies_fans_bytes=500, copies_exchanges_bytes=300))
    noise = Noise(Random(0))
    for way in tested.explain().ways:
        kind = KINDS[called(way.operation)]
        monkeypatch.setattr(Recorder, "captures", way.operation.endswith(IN_GRAPH))
        monkeypatch.setattr(Recorder, "asides", int(way.operation.endswith(ASIDE)))
        for axis in way.axes:
            split = cuts(plan)[axis]
            for rows in {way.first, way.last}:
                scene = Scene(
                    context=tested,
                    axis=split.axis if split else None,
                    layer=min(parse_layers(split.layers)) if split and split.layers else None,
                    source=tested.all_devices[0],
                    lead=(rows,),
                    dim=_wide(plan, axis, cuts_axis=kind.cuts),
                    dtype=torch.bfloat16,
                    form=FORMS[1],
                    aside=False,
                    noise=noise,
                    numbers=kind.adds,
                )
                trial = kind.make(scene)
                trial.call([t.clone() for t in trial.before] or None)
                _agree(way, Recorder.last, rows)


def _agree(way: Way, program: Program | None, rows: int) -> None:
    """Compare a way with the program of a call."""
    assert program
    views = [view for step in flat(program) for view in (*reads(step), *writes(step))]
    how = "parts" if way.how.endswith(("part", "parts")) else way.how
    assert way.transport == "local" or NAMES[way.transport, how] in program.name
    if how == "parts":
        assert way.how.split()[0] == str(max(view.parts for view in views))
    used = {ROLES[view.buffer.role] for view in views if view.buffer.role in ROLES}
    assert used == {buffer.replace("peer slots", "slots").replace("host slots", "slots") for buffer in way.buffers}
    moved = 0
    for step in flat(program):
        for view in (*reads(step), *writes(step)):
            place = view.buffer.queue.place if view.buffer.queue else view.buffer.device
            if step.stream.device != (HOST if view.buffer.role == STAGE else place):
                height = rows * (view.part + 1) // view.parts - rows * view.part // view.parts
                moved += height * (view.stop - view.start) * 2
    assert moved == way.row_bytes * rows


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", PLANS)
def test_every_size_is_explained(name: str, transport: str) -> None:
    """For every operation and axis the ways cover every number of rows once, and neighbours differ."""
    plan = PLANS[name]
    with context(plan, transport) as tested:
        explanation = tested.explain()
    assert {called(way.operation) for way in explanation.ways} == set(KINDS)
    for operation, kind in KINDS.items():
        for axis in set(cuts(plan)) - ({ALL} if kind.cuts else set()):
            mine = [way for way in explanation.ways if way.operation == operation and axis in way.axes]
            assert [row for way in mine for row in range(way.first, way.last + 1)] == [*range(1, MAX_ROWS + 1)]
            assert all(a.how != b.how for a, b in pairwise(mine))


def _one(explanation: Explanation, operation: str, axis: str, rows: int) -> Way:
    (way,) = (
        w for w in explanation.ways if (w.operation, axis in w.axes) == (operation, True) and w.first <= rows <= w.last
    )
    return way


#: Operation, axis, rows, transport; how, bytes per row, buffers, why. The stream is 40 columns of 2 bytes; devices 0, 2
#: and 3 are in use, of which 0, 2 and 3 hold 11, 18 and 11 of it, and 0 and 3 hold heads.
EXPECTED = {
    ("broadcast", ALL, 1, "peer"): ("slots", 160, ("peer slots",), "fits a slot of "),
    ("broadcast", ALL, 12, "peer"): ("straight", 160, (), "larger than a slot of "),
    ("broadcast", "kv_heads", 12, "events"): ("1 part", 80, (), "copies of any size"),
    ("broadcast", ALL, 1, "host"): ("slots", 240, ("host slots",), "fits a slot of 256 B"),
    ("broadcast from the host", ALL, 1, "peer"): ("1 part", 160 + 80, ("host rings",), "fits a chunk of "),
    ("broadcast from the host", ALL, 12, "events"): ("4 parts", 240, ("host rings",), "parts fit a chunk of "),
    ("scatter", "residual", 1, "events"): ("1 part", 58, (), "copies of any size"),
    ("broadcast aside", ALL, 12, "peer"): ("1 part", 160, (), "larger than a slot of "),
    ("broadcast aside", ALL, 12, "host"): ("4 parts", 240, ("host rings",), "parts fit a chunk of "),
    ("all_reduce aside", ALL, 12, "peer"): ("1 part", 2 * 160, ("exchange buffer",), "larger than a slot of "),
    ("gather", "residual", 12, "host"): ("written", 80, (), "within gathers_bytes, 1.00 MiB"),
    ("all_reduce", ALL, 1, "peer"): ("slots", 3 * 160, ("peer slots",), "fits a slot of "),
    ("all_reduce", ALL, 1, "events"): ("1 part", 2 * 160, ("exchange buffer",), "fits the exchange buffer of "),
    ("add_residual", "residual", 1, "host"): ("on each device", 0, (), "each adds its own"),
}


@pytest.mark.parametrize(("asked", "told"), EXPECTED.items())
def test_known_answers(asked: tuple[str, str, int, str], told: tuple[str, int, tuple[str, ...], str]) -> None:
    """How, how many bytes, by which buffers and why, for cases that can be counted by hand."""
    operation, axis, rows, transport = asked
    with context(UNEVEN, transport) as tested:
        way = _one(tested.explain(), operation, axis, rows)
    assert (way.how, way.row_bytes, way.buffers) == told[:3]
    assert way.why.startswith(told[3])


def test_one_device_has_nobody_to_talk_to() -> None:
    """On a single device everything but what comes from the host stays on it."""
    with context(PLANS["alone"], "peer") as tested:
        ways = tested.explain().ways
    assert {way.transport for way in ways if "from the host" not in way.operation} == {"local"}
    assert {way.why for way in ways if way.operation in {"broadcast", "all_reduce"}} == {"no other device"}


def _rows(text: str) -> range:
    """Return the rows of a line, such as ``1-12``."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def test_the_table() -> None:
    """As text it is a table: a title, headings, and below the name of each operation its ways; equal axes share one."""
    with context(UNEVEN, "host") as tested:
        explanation = tested.explain()
    title, blank, heads, *lines = str(explanation).split("\n")
    assert title == "Tiny, transport host, 1 to 12 rows of bfloat16"
    assert not blank
    assert heads.split() == ["on", "rows", "way", "per", "row", "why"]
    told: list[tuple[str, str, str, str]] = []
    operation = ""
    for line in lines:
        if not line.startswith(" "):
            operation = line
        elif line[2] != " ":
            assert all(re.match(" [^ ]", line[heads.index(head) - 1 :]) for head in ("way", "why"))
            on, some, way, *_ = re.split("  +", line.strip())
            told.append((operation, on, some, way))
        elif line[4] != " ":  # the axes go on
            *rest, (operation, on, some, way) = told
            told = [*rest, (operation, f"{on} {re.split('  +', line.strip())[0]}", some, way)]
    for way in explanation.ways:
        rows = range(way.first, way.last + 1)
        names = {"every axis", ", ".join(way.axes)}
        (shown,) = [
            shown
            for name, on, some, shown in told
            if name == way.operation and on in names and set(rows) <= set(_rows(some))
        ]
        transport, _, how = shown.partition(" ")
        assert transport == way.transport
        assert how == way.how or re.fullmatch(r"\d+ to \d+ parts", how)
    # The number of parts alone makes no line of its own.
    (shown,) = (way for name, on, _, way in told if (name, on) == ("scatter from the host", "intermediate"))
    several = [
        way.how for way in explanation.ways if (way.operation, *way.axes) == ("scatter from the host", "intermediate")
    ]
    assert len(several) > 1
    assert shown == f"host {several[0].split()[0]} to {several[-1]}"
    assert ("add_residual", "every axis", "1-12", "local on each device") in told
    assert any((name, on) == ("scatter", "kv_heads") for name, on, *_ in told)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/*.json")), ids=lambda path: path.stem)
def test_the_table_has_120_columns(path: Path) -> None:
    """Whatever the plan, and its reasons in full: what does not fit goes on in the next line."""
    with compile_plan(tpplan.load(path), backend="cpu") as compiled:
        explanation = compiled.explain()
    lines = str(explanation).split("\n")
    assert max(map(len, lines)) <= 120
    text = " ".join(" ".join(line.split()) for line in lines)
    long = next(way for way in explanation.ways if way.operation == "gather" and way.how == "copied")
    assert long.why in text
    folded = str(evolve(explanation, ways=(evolve(long, why="one reason or another, " * 9 + "and that is all"),)))
    assert max(map(len, folded.split("\n"))) <= 120
    assert folded.count("reason") == 9
    assert folded.endswith("and that is all")


def test_what_differs_is_told_of_the_axes_where_it_does() -> None:
    """In a graph and aside, of the rows too; the table says ``every axis`` only where that is so."""
    cuts = {Axis.INTERMEDIATE: (0, 16, 70), Axis.VOCAB: (0, 32, 101), Axis.RESIDUAL: (0, 20, 40)}
    splits = [Split(axis=axis, layers="0-3", size=cut[-1], unit=1, bounds=cut) for axis, cut in cuts.items()]
    places, tuning = (torch.device("cpu"),) * 2, Tuning(peer_fans_bytes=100, copies_fans_bytes=200)
    explanation = build(
        plan_of(*heads((0, 5, 5)), *splits),
        places,
        VirtualDevices,
        transport="peer",
        max_rows=MAX_ROWS,
        dtype=torch.bfloat16,
        tuning=tuning,
    ).explain()
    for name, first, behind in (
        ("broadcast in a graph", 3, "broadcast aside"),
        ("broadcast aside", 2, "broadcast from the host"),
    ):
        (way,) = (way for way in explanation.ways if way.operation == name)
        assert (way.first, way.last, way.transport) == (first, MAX_ROWS, "events")
        assert way.axes == (ALL, "intermediate", "vocab", "residual")
        told = " ".join(str(explanation).split(name)[1].split(behind)[0].split())
        for axis in way.axes:
            assert axis in told
        assert "every axis" not in told


@pytest.mark.parametrize("copies", [1, 400, 700])
@pytest.mark.parametrize("name", PLANS)
def test_every_size_has_a_way_in_graphs(name: str, copies: int) -> None:
    """One, which is the one that is told of for graphs wherever there is one, and else that of a call."""
    tuning = Tuning(peer_fans_bytes=200, copies_fans_bytes=copies, copies_exchanges_bytes=copies)
    with on(PLANS[name], VirtualDevices, tuning=tuning)("peer") as tested:
        ways = tested.explain().ways
    assert any(way.operation.endswith(IN_GRAPH) for way in ways) is (name != "alone")
    for operation, kind in KINDS.items():
        found = list(in_graphs(ways, operation))
        for axis in set(cuts(PLANS[name])) - ({ALL} if kind.cuts else set()):
            usual, captured = (_by_rows(ways, name, axis) for name in (operation, operation + IN_GRAPH))
            mine = [*_by_rows(found, operation, axis), *_by_rows(found, operation + IN_GRAPH, axis)]
            assert sorted(mine) == sorted({**dict(usual), **dict(captured)}.items())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", PLANS)
def test_ways_aside_are_told_where_they_differ(name: str, transport: str) -> None:
    """Those of what no slot takes, by copies; what the host sends, or no other device gets, goes as it does alone."""
    with on(PLANS[name], VirtualDevices)(transport) as tested:
        ways = tested.explain().ways
    aside = [way for way in ways if way.operation.endswith(ASIDE)]
    several = {"broadcast", "scatter", "allgather", "all_reduce"}
    assert {called(way.operation) for way in aside} == (several if transport != "events" and name != "alone" else set())
    assert all(way.transport == {"peer": "events"}.get(transport, "host") for way in aside)
    assert all(way.how.endswith(("part", "parts")) for way in aside)
    for operation in several:
        for axis in {axis for way in aside if called(way.operation) == operation for axis in way.axes}:
            alone, beside = (dict(_by_rows(ways, name, axis)) for name in (operation, operation + ASIDE))
            assert {rows for rows, how in alone.items() if how != "slots"} == set(beside)


def test_reasons_aside_are_those_of_slots() -> None:
    """No threshold for graphs decides there; what has no room to be copied goes as it does alone."""
    tuning = Tuning(peer_fans_bytes=200, copies_fans_bytes=500)
    limits = Limits(slot_bytes=256, stage_bytes=4096, exchange_bytes=16, tuning=tuning)
    engine = Engine(VirtualDevices(None), "peer", limits)  # type: ignore[arg-type]
    explanation = explain(UNEVEN, (0, 2, 3), engine, MAX_ROWS, torch.bfloat16)
    assert _one(explanation, "broadcast in a graph", ALL, MAX_ROWS).why.startswith("from copies_fans_bytes, 500 B, on")
    assert _one(explanation, "broadcast aside", ALL, MAX_ROWS).why == (
        "larger than peer_fans_bytes, 200 B: copies of any size"
    )
    assert not any(way.operation == "all_reduce aside" for way in explanation.ways)


def _by_rows(ways: Iterable[Way], operation: str, axis: str) -> list[tuple[int, str]]:
    mine = [way for way in ways if way.operation == operation and axis in way.axes]
    return [(rows, way.how) for way in mine for rows in range(way.first, way.last + 1)]


def test_large_messages_without_kernels_that_write_straight() -> None:
    """Where kernels cannot write to peers, what is larger than a slot goes by events, and that is the reason given."""
    limits = Limits(slot_bytes=256, stage_bytes=4096, exchange_bytes=4096, direct=False)
    engine = Engine(VirtualDevices(None), "peer", limits)  # type: ignore[arg-type]
    explanation = explain(UNEVEN, (0, 2, 3), engine, MAX_ROWS, torch.bfloat16)
    ways = {name: _one(explanation, name, ALL, MAX_ROWS) for name in ("broadcast", "all_reduce")}
    assert {way.transport for way in ways.values()} == {"events"}
    assert ways["broadcast"].why == "larger than a slot of 256 B: copies of any size"
    assert ways["all_reduce"].why == "larger than a slot of 256 B: fits the exchange buffer of 4.00 KiB"


def test_what_devices_pass_on_is_told() -> None:
    """From the size on at which that spares the source enough, with as many bytes in all as straight."""
    limits = Limits(slot_bytes=256, stage_bytes=4096, exchange_bytes=4096, tuning=Tuning(passed_on_bytes=560))
    engine = Engine(VirtualDevices(None), "peer", limits)  # type: ignore[arg-type]
    explanation = explain(UNEVEN, (0, 2, 3), engine, MAX_ROWS, torch.bfloat16)
    ways = [way for way in explanation.ways if way.operation == "broadcast" and ALL in way.axes]
    assert [(way.first, way.last, way.transport, way.how, way.row_bytes) for way in ways] == [
        (1, 3, "peer", "slots", 160), (4, 6, "peer", "straight", 160), (7, MAX_ROWS, "peer", "passed on", 160),
    ]  # fmt: skip
    assert ways[-1].why == "spares its source passed_on_bytes, 560 B, or more"


def test_what_has_no_room_is_refused() -> None:
    """Where not even one row fits, the explanation is the error that a call would raise."""
    engine = Engine(VirtualDevices(None), "events", Limits(slot_bytes=0, stage_bytes=4096, exchange_bytes=16))  # type: ignore[arg-type]
    way = _one(explain(UNEVEN, (0, 2, 3), engine, MAX_ROWS, torch.float32), "all_reduce", ALL, 1)
    assert (way.transport, way.first, way.last, way.row_bytes) == ("refused", 1, MAX_ROWS, 0)
    assert way.why.startswith("all_reduce: one row takes 64 B, but the plan left 0 B for it")


def test_a_closed_context_explains_nothing() -> None:
    """Use after close is an error, here too."""
    tested = context(UNEVEN, "peer")
    tested.close()
    with pytest.raises(ExecutionError, match="closed"):
        tested.explain()
