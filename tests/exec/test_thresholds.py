"""Thresholds of a context: obeyed by its operations, and told by ``explain()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

from tests.contexts import UNEVEN, little_room  # noqa: F401 (for every test here)
from tpplan.errors import RequestError
from tpplan.exec import Tuning
from tpplan.exec import compile as compile_plan
from tpplan.exec.backends.cpu import VirtualDevices
from tpplan.exec.backends.engine import Virtual
from tpplan.exec.build import build
from tpplan.exec.programs import operation
from tpplan.exec.programs.lower import Limits, Mode, Route, route
from tpplan.exec.tools.selftest import run as selftest
from tpplan.exec.tuning import KIB, MIB, default

if TYPE_CHECKING:
    from tpplan.exec.context import TPContext


CPU = torch.device("cpu")
THREE = ("broadcast", "allgather", "all_reduce")


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "64KiB", None])
def test_a_threshold_is_a_number_of_bytes(wrong: object) -> None:
    """Anything else is refused by name."""
    with pytest.raises(RequestError, match=r"host_sums_bytes is .*, expected a whole number of bytes from 0"):
        Tuning(host_sums_bytes=wrong)  # type: ignore[arg-type]


BROADCAST = operation.broadcast(0, (0, 1), 512)  # 1 KiB a row in two bytes
ALL_REDUCE = operation.all_reduce(512, (0, 1), (0, 1), residual=False)
ALLGATHER = operation.allgather("allgather", ((0, 0, 512), (1, 512, 1024)), (0, 1))

#: Device 0 has a part, which 1 gets, and device 1 has another, which stays there.
ONE_SENDER = operation.allgather("allgather", ((0, 0, 512), (1, 512, 1024)), (1,))
SCATTER = operation.scatter(0, ((0, 0, 512), (1, 512, 1024)))
LIMITS = Limits(
    slot_bytes=64 * KIB,
    stage_bytes=MIB,
    exchange_bytes=MIB,
    tuning=Tuning(
        peer_fans_bytes=8 * KIB,
        peer_exchanges_bytes=6 * KIB,
        peer_sums_bytes=4 * KIB,
        host_fans_bytes=2 * KIB,
        host_exchanges_bytes=3 * KIB,
        copies_fans_bytes=100 * KIB,
        copies_exchanges_bytes=200 * KIB,
    ),
)


@pytest.mark.parametrize(
    ("asked", "transport", "rows", "way"),
    [
        (BROADCAST, "peer", 8, Route("peer", small=True)),
        (BROADCAST, "peer", 9, Route("peer")),
        (BROADCAST, "peer", 99, Route("peer")),
        (BROADCAST, "peer", 100, Route("events")),
        (SCATTER, "peer", 8, Route("peer", small=True)),
        (SCATTER, "peer", 99, Route("peer")),
        (SCATTER, "peer", 100, Route("events")),
        (ONE_SENDER, "peer", 8, Route("peer", small=True)),
        (ONE_SENDER, "peer", 100, Route("events")),
        (ALLGATHER, "peer", 6, Route("peer", small=True)),
        (ALLGATHER, "peer", 7, Route("peer")),
        (ALLGATHER, "peer", 199, Route("peer")),
        (ALLGATHER, "peer", 200, Route("events")),
        (ALL_REDUCE, "peer", 4, Route("peer", small=True)),
        (ALL_REDUCE, "peer", 5, Route("peer")),
        (ALL_REDUCE, "peer", 5000, Route("peer")),
        (BROADCAST, "host", 2, Route("host", small=True)),
        (BROADCAST, "host", 3, Route("host")),
        (ALLGATHER, "host", 3, Route("host", small=True)),
        (ALLGATHER, "host", 4, Route("host")),
        (ALL_REDUCE, "host", 64, Route("host", small=True)),
        (ALL_REDUCE, "host", 65, Route("host")),
        (BROADCAST, "events", 1, Route("events")),
    ],
)
def test_operations_obey_thresholds(asked: operation.Operation, transport: str, rows: int, way: Route) -> None:
    """Up to its threshold, and to the room in a slot, a message goes through slots; the largest go by copy engines.

    That is in graphs: calls do not wait for copy engines.
    """
    assert route(asked, transport, rows, 2, LIMITS, mode=Mode(captured=True)) == way
    called = Route("peer") if transport == "peer" and not way.small else way
    assert route(asked, transport, rows, 2, LIMITS) == called


def test_thresholds_beyond_a_slot_change_nothing() -> None:
    """No threshold makes a message fit a slot that is smaller; 0 is never for copy engines."""
    limits = evolve(LIMITS, slot_bytes=1024, tuning=Tuning(peer_fans_bytes=MIB, copies_fans_bytes=0))
    assert route(BROADCAST, "peer", 1, 2, limits).small
    assert route(BROADCAST, "peer", 2, 2, limits) == route(BROADCAST, "peer", 2**20, 2, limits) == Route("peer")


#: Slots of 256 bytes and more, of which 200 are used, or none; copy engines soon take over.
TUNED = Tuning(
    peer_fans_bytes=200, peer_exchanges_bytes=100, peer_sums_bytes=0,
    host_fans_bytes=0, host_exchanges_bytes=150, host_sums_bytes=100,
    copies_fans_bytes=500, copies_exchanges_bytes=300, peer_one_shot_bytes=8000,
)  # fmt: skip


@pytest.mark.parametrize(("transport", "captured"), [("peer", False), ("peer", True), ("host", False)])
def test_every_byte_is_right_by_any_thresholds(
    transport: str,
    captured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A context with thresholds of its own passes the self-test by all the ways that they make, in graphs too."""
    monkeypatch.setattr(Virtual, "is_capturing", lambda _: captured)

    def make(transport: str) -> TPContext:
        return compile_plan(UNEVEN, backend="cpu", transport=transport, tuning=TUNED)

    with make(transport) as context:
        ways = context.explain().ways
    found = {(way.operation.removesuffix(" in a graph"), way.transport, way.how) for way in ways}
    found = {way for way in found if way[0] in THREE}
    if transport == "peer":
        assert found == {
            ("broadcast", "peer", "slots"), ("broadcast", "peer", "straight"), ("broadcast", "events", "1 part"),
            ("allgather", "peer", "slots"), ("allgather", "peer", "straight"), ("allgather", "events", "1 part"),
            ("all_reduce", "peer", "one shot"), ("all_reduce", "peer", "straight"),
        }  # fmt: skip
    else:
        assert ("all_reduce", "host", "slots") in found
        assert ("allgather", "host", "slots") in found
        assert ("broadcast", "host", "slots") not in found
    assert selftest.selftest(UNEVEN, make, [transport]).ok


def test_thresholds_are_explained() -> None:
    """The reason of a way names the threshold that decided, or the slot where that did."""
    tuning = evolve(TUNED, peer_sums_bytes=MIB)
    with compile_plan(UNEVEN, backend="cpu", transport="peer", tuning=tuning) as context:
        explanation = context.explain()
    whys = {
        name: list(dict.fromkeys(w.why for w in explanation.ways if w.operation == name and "residual" in w.axes))
        for name in ("scatter", "allgather", "allgather in a graph", "all_reduce")
    }
    assert whys["scatter"] == [
        "within peer_fans_bytes, 200 B", "larger than peer_fans_bytes, 200 B",
    ]  # fmt: skip
    assert whys["allgather"] == ["within peer_exchanges_bytes, 100 B", "larger than peer_exchanges_bytes, 100 B"]
    assert whys["allgather in a graph"] == ["from copies_exchanges_bytes, 300 B, on: copies of any size"]
    assert whys["all_reduce"][0].startswith("fits a slot of ")
    closed = Tuning(peer_fans_bytes=200, copies_fans_bytes=150)
    with compile_plan(UNEVEN, backend="cpu", transport="peer", tuning=closed) as context:
        ways = context.explain().ways
    last = {way.operation: way.why for way in ways if "residual" in way.axes}  # of the most rows
    assert last["scatter"] == "larger than peer_fans_bytes, 200 B"
    assert last["scatter in a graph"] == "larger than peer_fans_bytes, 200 B: copies of any size"
    assert explanation.limits.tuning == tuning


def test_defaults_are_those_for_as_many_devices_as_are_in_use() -> None:
    """A plan for four that leaves one idle has those of three."""
    with compile_plan(UNEVEN, backend="cpu", transport="peer") as context:
        assert context.explain().limits.tuning == default(3) != default(2)


def test_only_a_tuning_tunes() -> None:
    """Anything else is refused, with what to pass."""
    with pytest.raises(RequestError, match="tuning is 4096, expected a Tuning"):
        compile_plan(UNEVEN, backend="cpu", tuning=4096)  # type: ignore[arg-type]


def test_notes_are_told() -> None:
    """What a person should know of a context is in its explanation, below the title."""
    context = build(
        UNEVEN, (CPU,) * 4, VirtualDevices, transport="host", max_rows=12, dtype=torch.bfloat16,
        waits=False, notes=("peer is out", "no slots"),
    )  # fmt: skip
    with context:
        text = str(context.explain()).split("\n")
        assert text[1:4] == ["note: peer is out", "note: no slots", ""]
        assert "slots" not in {way.how for way in context.explain().ways}  # kernels cannot wait for each other
        assert {way.transport for way in context.explain().ways} >= {"host"}
