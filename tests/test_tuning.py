"""Thresholds: chosen from times, kept on disk, obeyed by operations, and told by ``explain()`` and the command."""

from __future__ import annotations

import json
from math import inf
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from schemas import generate
from tests.command import command
from tests.contexts import UNEVEN, little_room  # noqa: F401 (for every test here)
from tpplan import codec
from tpplan.errors import RequestError
from tpplan.exec import Tuning, kernel_cache, operation, selftest, survey, transports, tuning_cache
from tpplan.exec import compile as compile_plan
from tpplan.exec.compiler import build
from tpplan.exec.cpu import VirtualDevices
from tpplan.exec.link_report import Link, LinkReport, Verdict, routes
from tpplan.exec.lower import Limits, Route, route
from tpplan.exec.survey_report import Thresholds
from tpplan.exec.tuning import (
    COPIES,
    DEFAULT,
    EXCHANGES,
    FANS,
    KIB,
    KINDS,
    LARGEST,
    MIB,
    PARTS,
    PASSED_ON,
    SLOTS,
    STRAIGHT,
    SUMS,
    tune,
)
from tpplan.exec.tuning_timer import synthetic_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tpplan.exec.context import TPContext

CPU = torch.device("cpu")
THREE = ("broadcast", "allgather", "all_reduce")
ROOM = {"peer": 2 * MIB, "host": 64 * KIB}


@frozen
class Machine:
    """GPUs whose times are straight lines: so many µs, and so many per KiB, by each way.

    Attributes:
        slots: through slots, of any transport.
        straight: by kernels that write straight, or in parts through host memory.
        copies: by copy engines.
        fans: by copy engines, if one device sends.
        passed: by kernels that pass on what others want too.
        bad: a size that seems to take many times as long through slots.
    """

    slots: tuple[float, float] = (2, 0.02)
    straight: tuple[float, float] = (6, 0.01)
    copies: tuple[float, float] = (20, 0.008)
    fans: tuple[float, float] = (20, 0.008)
    passed: tuple[float, float] = (70, 0.004)
    bad: int = 0

    def time(self, transport: str, kind: str, size: int, ways: tuple[str, ...]) -> Sequence[float]:
        """Return the time by each way."""
        assert size <= ROOM[transport] or SLOTS not in ways
        lines = {SLOTS: self.slots, COPIES: self.fans if kind == FANS else self.copies, PASSED_ON: self.passed}
        times = []
        for way in ways:
            start, each = lines.get(way, self.straight)
            times.append((start + each * size / KIB) * (1.5 if (way, size) == (SLOTS, self.bad) else 1))
        return times


def test_thresholds_are_where_the_ways_cross() -> None:
    """The largest measured size at which slots are fastest, and the smallest at which copy engines are, by kind."""
    machine = Machine(fans=(10, 0.008))  # slots until 400 KiB, copies from 7,000 KiB on, and of fans from 2,000 KiB on
    assert tune(machine.time, ROOM, 2, straight=True) == Tuning(
        peer_fans_bytes=256 * KIB, peer_exchanges_bytes=256 * KIB, peer_sums_bytes=256 * KIB,
        host_fans_bytes=64 * KIB, host_exchanges_bytes=64 * KIB, host_sums_bytes=64 * KIB,
        copies_fans_bytes=2 * MIB, copies_exchanges_bytes=8 * MIB,
    )  # fmt: skip


def test_one_bad_measurement_does_not_decide() -> None:
    """A size far from where the ways cross that once took longer changes nothing."""
    assert tune(Machine(bad=64 * KIB).time, ROOM, 2, straight=True).peer_fans_bytes == 256 * KIB


@pytest.mark.parametrize(("machine", "largest"), [(Machine(slots=(99, 9)), 0), (Machine(slots=(0.1, 0)), 2 * MIB)])
def test_slots_that_never_or_always_win(machine: Machine, largest: int) -> None:
    """Slots that are never faster are not used, and those that always are, for all that fits one."""
    found = tune(machine.time, ROOM, 2, straight=True)
    assert [found.slots("peer", kind) for kind in KINDS] == [largest] * 3
    assert [found.slots("host", kind) for kind in KINDS] == [min(largest, 64 * KIB)] * 3


def test_copy_engines_that_never_or_always_win() -> None:
    """Copy engines that are never faster never take over; those that are so at the largest size only, do there."""
    found = tune(Machine(copies=(99, 9), fans=(22, 0.0099)).time, ROOM, 2, straight=True)  # from 160,000 KiB on
    assert (found.copies_fans_bytes, found.copies_exchanges_bytes) == (0, 0)
    found = tune(Machine(fans=(10, 0.0099)).time, ROOM, 2, straight=True)  # from 40,000 KiB on
    assert found.copies_fans_bytes == LARGEST == 64 * MIB
    found = tune(Machine(copies=(1, 0.0001)).time, ROOM, 2, straight=True)
    assert (found.copies_exchanges_bytes, found.peer_exchanges_bytes) == (1, 0)
    assert found.peer_sums_bytes == 256 * KIB  # sums have no copy engines


def test_nothing_between_two_sizes_goes_a_way_that_is_never_the_fastest() -> None:
    """Where copy engines follow slots at once, they take all that slots do not."""
    found = tune(Machine(fans=(5, 0.008)).time, ROOM, 2, straight=True)  # slots until 250 KiB
    assert (found.peer_fans_bytes, found.copies_fans_bytes) == (128 * KIB, 128 * KIB)


@pytest.mark.parametrize(
    ("machine", "devices", "copies", "passed"),
    [
        (Machine(), 2, 8 * MIB, DEFAULT.passed_on_bytes),  # nobody to pass on to, nothing measured
        (Machine(passed=(10, 0.004)), 3, 8 * MIB, MIB),  # from 667 KiB on
        (Machine(), 8, 8 * MIB, 6 * 16 * MIB),  # from 12,500 KiB on, which is spared that often
        (Machine(passed=(10, 0.004)), 4, 8 * MIB, 2 * MIB),  # from 667 KiB on, whatever copy engines could do
        (Machine(passed=(1, 0.0001)), 4, 8 * MIB, 2 * 256 * KIB),  # right after slots
        (Machine(passed=(99, 9)), 4, 8 * MIB, 0),
        (Machine(passed=(22, 0.009)), 4, 8 * MIB, 0),  # faster than straight, but never than copy engines
        (Machine(slots=(99, 9), passed=(1, 0.0001)), 4, 8 * MIB, 2),
    ],
)
def test_passing_on_has_a_threshold(machine: Machine, devices: int, copies: int, passed: int) -> None:
    """Devices pass on what is faster than by slots, straight and copy engines, which are chosen without it."""
    found = tune(machine.time, ROOM, devices, straight=True)
    assert (found.copies_fans_bytes, found.passed_on_bytes) == (copies, passed)


#: Of two H200: µs by bytes of a message, through slots, straight, and by copy engines.
H200: dict[str, dict[int, tuple[float, float, float]]] = {
    FANS: {
        8: (2.5, 6.1, 3.7), 64: (2.8, 6.2, 4.8), 256: (3.8, 6.6, 4.6), 512: (5.5, 7.5, 6.0), 1024: (8.4, 9.1, 7.2),
        4096: (0, 17.9, 14.8), 16384: (0, 52.1, 47.6),
    },
    EXCHANGES: {
        4: (3.6, 5.9, 16), 128: (4.8, 6.4, 16), 256: (5.5, 6.8, 16), 512: (7.6, 7.4, 22), 2048: (0, 12.2, 27),
        8192: (0, 30.1, 54),
    },
    SUMS: {
        8: (3.5, 6.7, 29), 256: (5.3, 7.4, 30), 512: (8.2, 8.0, 31), 1024: (13.2, 9.6, 33),
        4096: (0, 19.4, 43), 16384: (0, 57.5, 84),
    },
}  # fmt: skip


def test_defaults_are_those_of_two_h200() -> None:
    """What such GPUs need at some sizes, and as much at others as at the next larger one, gives the defaults."""

    def time(_: str, kind: str, size: int, ways: tuple[str, ...]) -> Sequence[float]:
        near = min((kib for kib in H200[kind] if kib * KIB >= size), default=max(H200[kind]))
        by_way = dict(zip((SLOTS, STRAIGHT, COPIES), H200[kind][near], strict=True))
        return [by_way[way] or inf for way in ways]

    assert tune(time, {"peer": MIB}, 2, straight=True) == DEFAULT


def test_what_is_not_measured_keeps_its_default() -> None:
    """Without peer access nothing is timed by ``peer``; where kernels do not write straight, nothing goes straight."""
    asked = set()

    def time(transport: str, kind: str, size: int, ways: tuple[str, ...]) -> Sequence[float]:
        asked.add((transport, kind, ways))
        assert size <= ROOM[transport]
        return Machine(slots=(99, 9)).time(transport, kind, size, ways)

    found = tune(time, {"host": ROOM["host"]}, 2, straight=True)
    assert found == evolve(DEFAULT, host_fans_bytes=0, host_exchanges_bytes=0, host_sums_bytes=0)
    assert asked == {("host", kind, (SLOTS, PARTS)) for kind in KINDS}
    asked.clear()
    found = tune(time, {"peer": ROOM["peer"]}, 2, straight=False)
    assert found == evolve(DEFAULT, peer_fans_bytes=0, peer_exchanges_bytes=0, peer_sums_bytes=0)
    assert asked == {("peer", kind, (SLOTS, COPIES)) for kind in KINDS}


@given(st.lists(st.tuples(*[st.floats(1, 100)] * 3), min_size=15, max_size=15))
def test_no_other_thresholds_take_less(times: list[tuple[float, float, float]]) -> None:
    """Whatever was measured, no other thresholds have a smaller product of times."""
    sizes = [2**i * KIB for i in range(2, 17)]
    by_size = dict(zip(sizes, times, strict=True))
    room = ROOM["peer"]

    def time(_: str, __: str, size: int, ways: tuple[str, ...]) -> Sequence[float]:
        return list(by_size[size])[-len(ways) :]

    def product(slots: int, copies: int) -> float:
        result = 1.0
        for size, (small, straight, copied) in by_size.items():
            result *= small if size <= slots else copied if 0 < copies <= size else straight
        return result

    found = tune(time, {"peer": room}, 2, straight=True)
    every = [(slots, copies) for slots in (0, *(s for s in sizes if s <= room)) for copies in (0, *sizes)]
    assert product(found.peer_fans_bytes, found.copies_fans_bytes) <= min(product(*one) for one in every) * (1 + 1e-9)


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
    """Up to its threshold, and to the room in a slot, a message goes through slots; the largest go by copy engines."""
    assert route(asked, transport, rows, 2, LIMITS) == way


def test_thresholds_beyond_a_slot_change_nothing() -> None:
    """No threshold makes a message fit a slot that is smaller; 0 is never for copy engines."""
    limits = evolve(LIMITS, slot_bytes=1024, tuning=Tuning(peer_fans_bytes=MIB, copies_fans_bytes=0))
    assert route(BROADCAST, "peer", 1, 2, limits).small
    assert route(BROADCAST, "peer", 2, 2, limits) == route(BROADCAST, "peer", 2**20, 2, limits) == Route("peer")


#: Slots of 256 bytes and more, of which 200 are used, or none; copy engines soon take over.
TUNED = Tuning(
    peer_fans_bytes=200, peer_exchanges_bytes=100, peer_sums_bytes=0,
    host_fans_bytes=0, host_exchanges_bytes=150, host_sums_bytes=100,
    copies_fans_bytes=500, copies_exchanges_bytes=300,
)  # fmt: skip


@pytest.mark.parametrize("transport", ["peer", "host"])
def test_every_byte_is_right_by_any_thresholds(transport: str) -> None:
    """A context with thresholds of its own passes the self-test by all the ways that they make."""

    def make(transport: str) -> TPContext:
        return compile_plan(UNEVEN, backend="cpu", transport=transport, tuning=TUNED)

    with make(transport) as context:
        ways = context.explain().ways
    found = {(way.operation, way.transport, way.how) for way in ways if way.operation in THREE}
    if transport == "peer":
        assert found == {
            ("broadcast", "peer", "slots"), ("broadcast", "peer", "straight"), ("broadcast", "events", "1 part"),
            ("allgather", "peer", "slots"), ("allgather", "peer", "straight"), ("allgather", "events", "1 part"),
            ("all_reduce", "peer", "straight"),
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
        for name in ("scatter", "allgather", "all_reduce")
    }
    assert whys["scatter"] == [
        "within peer_fans_bytes, 200 B", "larger than peer_fans_bytes, 200 B",
    ]  # fmt: skip
    assert whys["allgather"] == [
        "within peer_exchanges_bytes, 100 B", "larger than peer_exchanges_bytes, 100 B",
        "from copies_exchanges_bytes, 300 B, on: copies of any size",
    ]  # fmt: skip
    assert whys["all_reduce"][0].startswith("fits a slot of ")
    closed = Tuning(peer_fans_bytes=200, copies_fans_bytes=150)
    with compile_plan(UNEVEN, backend="cpu", transport="peer", tuning=closed) as context:
        ways = context.explain().ways
    assert [w.why for w in ways if w.operation == "scatter" and "residual" in w.axes] == [
        "within peer_fans_bytes, 200 B",
        "larger than peer_fans_bytes, 200 B: copies of any size",
    ]
    assert explanation.limits.tuning == tuning


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


class Gpus:
    """What the driver tells of two GPUs."""

    names = ("GPU-a", "GPU-b")
    driver = "driver 1"

    def gpus(self) -> tuple[str, ...]:
        """Return the UUIDs."""
        return Gpus.names

    def software(self) -> str:
        """Return the driver."""
        return Gpus.driver


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give this process two GPUs, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning_cache, "TorchDriver", Gpus)
    return tmp_path / "tpplan"


def _thresholds(devices: int, size: int) -> Thresholds:
    return Thresholds(devices=devices, transports=("peer", "host"), tuning=Tuning(peer_sums_bytes=size))


@pytest.mark.usefixtures("cache")
def test_thresholds_are_kept() -> None:
    """Those for as many devices are used, else those for a few more; else defaults, and it is said which."""
    assert tuning_cache.stored(2, "peer") == (DEFAULT, "not measured on this machine, tpplan devices --links does that")
    assert not tuning_cache.save((_thresholds(2, 1), _thresholds(4, 2)))
    found = {count: tuning_cache.stored(count, "peer") for count in (2, 3, 4, 5)}
    assert [tuning.peer_sums_bytes for tuning, _ in found.values()] == [1, 2, 2, DEFAULT.peer_sums_bytes]
    assert found[3][1] == "measured on 4 GPUs of this machine"
    assert found[5][1].startswith("not measured")


@pytest.mark.usefixtures("cache")
def test_only_thresholds_of_transports_that_were_measured_count() -> None:
    """Where two devices went by ``host`` only, ``peer`` has the thresholds of more devices, else defaults."""
    host = evolve(_thresholds(2, 1), transports=("host",))
    tuning_cache.save((host, _thresholds(4, 2)))
    assert tuning_cache.stored(2, "host") == (host.tuning, "measured on 2 GPUs of this machine")
    assert tuning_cache.stored(2, "peer")[1] == "measured on 4 GPUs of this machine"
    tuning_cache.save((host,))
    assert tuning_cache.stored(2, "peer")[1].startswith("not measured")
    assert tuning_cache.stored(2, "peer")[0] == DEFAULT


@pytest.mark.parametrize("change", ["gpus", "driver", "version", "edition", "damage"])
def test_thresholds_of_another_machine_are_not_used(change: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other GPUs, another driver or tpplan, other things measured, or a damaged file: the defaults again."""
    tuning_cache.save((_thresholds(2, 1),))
    monkeypatch.setattr(Gpus, "names", Gpus.names[::-1])
    assert tuning_cache.stored(2, "peer")[0].peer_sums_bytes == 1  # the same ones in another order
    (file,) = cache.iterdir()
    changes: dict[str, Callable[[], object]] = {
        "gpus": lambda: monkeypatch.setattr(Gpus, "names", ("GPU-a", "GPU-c")),
        "driver": lambda: monkeypatch.setattr(Gpus, "driver", "driver 2"),
        "version": lambda: monkeypatch.setattr(tuning_cache, "__version__", "9"),
        "edition": lambda: monkeypatch.setattr(tuning_cache, "_EDITION", 1),
        "damage": lambda: file.write_text(file.read_text().replace('"peer_sums_bytes": 1,', '"peer_sums_bytes": -1,')),
    }
    changes[change]()
    assert tuning_cache.stored(2, "peer")[0] == DEFAULT


def test_what_cannot_be_kept_is_told(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be written, or GPUs cannot be told apart, saving says so, and nothing is found later."""
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert "file" in tuning_cache.save((_thresholds(2, 1),))
    monkeypatch.setattr(Gpus, "names", ("GPU-a", "GPU-a"))
    assert "cannot be told" in tuning_cache.save((_thresholds(2, 1),))
    assert tuning_cache.stored(2, "peer")[0] == DEFAULT
    assert not cache.exists()


class Stopwatch(Machine):
    """In the place of the timer: knows the times without any GPU."""

    def __init__(self, places: Sequence[torch.device]) -> None:
        super().__init__()
        assert len(places) > 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, *arguments: Any) -> Sequence[float]:
        """Return the time by each tuning."""
        return self.time(*arguments)

    def limits(self, transport: str) -> Limits:
        """Return limits with slots of the transport's size."""
        return evolve(LIMITS, slot_bytes=ROOM[transport])


@pytest.fixture
def links(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give this process GPUs with the given links: all work but those that are named."""

    def give(count: int, *broken: tuple[str, int, int]) -> None:
        names = tuple(f"GPU-{i}" for i in range(count))
        found = tuple(
            Link(*r, Verdict.BROKEN, "zeros arrived") if r in broken else Link(*r, Verdict.WORKS, "every byte arrived")
            for r in routes(count)
        )
        monkeypatch.setattr(Gpus, "names", names)
        for module in (survey, transports):
            monkeypatch.setattr(module, "link_report", lambda **_: LinkReport(names, found))

    monkeypatch.setattr(kernel_cache, "lacks", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(survey, "GraphTimer", Stopwatch)
    return give


def _survey(*options: str) -> dict[str, Any]:
    done = command("devices", "--links", "--json", *options)
    assert done.code == 0
    assert not done.err
    document: dict[str, Any] = json.loads(done.out)
    Draft202012Validator(generate.schema("survey-report")).validate(document)
    return document


def test_the_command_measures_and_keeps(links: Callable[..., None]) -> None:
    """``tpplan devices --links`` measures on two, four and all GPUs, and what it found is used from then on."""
    links(5)
    found = _survey()
    assert [one["devices"] for one in found["thresholds"]] == [2, 4, 5]
    assert found["thresholds"][0]["transports"] == ["peer", "host"]
    assert found["thresholds"][0]["tuning"] == codec.unstructure(tune(Machine().time, ROOM, 2, straight=True))
    assert (len(found["links"]), found["notes"]) == (4 * 20, [])
    timed = {
        (one["kind"], one["way"]): one["time_ns"]
        for one in found["timings"]
        if (one["devices"], one["transport"], one["message_bytes"]) == (4, "peer", 256 * KIB)
    }
    assert timed == {
        **{
            (kind, way): ns
            for kind in (FANS, EXCHANGES)
            for way, ns in ((SLOTS, 7120), (STRAIGHT, 8560), (COPIES, 22048))
        },
        (FANS, PASSED_ON): 71024,
        (SUMS, SLOTS): 7120,
        (SUMS, STRAIGHT): 8560,
    }
    assert len(found["timings"]) == 3 * (2 * (15 * 2 + 10) + 10 * 2 + 3 * 5 * 2) + 2 * 15 - 2 * (1 + 2 + 3)
    assert tuning_cache.stored(5, "peer") == (
        tune(Machine().time, ROOM, 5, straight=True),
        "measured on 5 GPUs of this machine",
    )
    shown = command("devices", "--links").out
    for words in ("Links between 5 GPUs", "works in all 20 directions", "5 GPUs", "copy engines from", "8.00 MiB"):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_the_command_on_a_machine_without_peer_access(links: Callable[..., None]) -> None:
    """Links that do not work are told one by one, and only ``host`` is measured."""
    links(2, *(route for route in routes(2) if route[1] == 0))
    found = _survey()
    assert [one["transports"] for one in found["thresholds"]] == [["host"]]
    assert found["notes"][0].startswith("not measured: transport: peer is not verified: copy 0 to 1 (zeros arrived)")
    shown = command("devices", "--links").out
    assert "works in 1 of 2 directions" in shown
    assert "  copy 0 to 1: broken, zeros arrived" in shown.splitlines()
    links(8, *routes(8))
    shown = command("devices", "--links").out
    assert "works in 0 of 56 directions" in shown
    assert f"and {4 * 56 - 12} more" in shown


def test_the_command_where_there_is_nothing_to_measure(
    links: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU has no links; and where kernels cannot wait for each other, no times mean anything."""
    links(1)
    assert (_survey()["links"], _survey()["thresholds"]) == ([], [])
    assert command("devices", "--links").out == "Links between 1 GPU\none GPU has nobody to talk to\n"
    links(0)
    done = command("devices", "--links")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: torch sees no GPU on this machine\n")
    links(2)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    found = _survey()
    assert found["thresholds"] == []
    assert all("CUDA_LAUNCH_BLOCKING is set" in note for note in found["notes"])
    assert len(found["notes"]) == 2


def test_what_is_not_kept_is_told(links: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in vain: the document says that no later process will know."""
    links(2)
    monkeypatch.setattr(Gpus, "driver", "")
    assert _survey()["notes"] == ["thresholds are not kept: the GPUs or their driver cannot be told from others"]


def test_links_and_a_devices_file_are_two_things() -> None:
    """Asking for both is a mistake in the arguments, and nothing is measured."""
    done = command("devices", "--links", "-o", "devices.json")
    assert done.code == 2
    assert "--links makes no devices file" in done.err


@pytest.mark.multi_gpu
def test_real_gpus_are_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On real GPUs the survey ends with thresholds that compiling uses, and says so."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    report = survey.survey()
    assert report.thresholds
    assert not report.notes
    count = report.thresholds[0].devices
    with compile_plan(synthetic_plan(count), backend="cuda", devices=range(count)) as context:
        explanation = context.explain()
    assert explanation.limits.tuning == report.thresholds[0].tuning
    assert f"note: thresholds measured on {count} GPUs of this machine" in str(explanation)
    plan = synthetic_plan(count)
    with compile_plan(plan, backend="cuda", devices=range(count), transport="events") as context:
        assert not any(note.startswith("thresholds") for note in context.explain().notes)  # it has none
