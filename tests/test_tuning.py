"""Thresholds: chosen from times, kept on disk, obeyed by operations, and told by ``explain()`` and the command."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import tpplan
from schemas import generate
from tests.command import command
from tests.contexts import UNEVEN, little_room  # noqa: F401 (for every test here)
from tpplan import codec
from tpplan.errors import RequestError
from tpplan.exec import Tuning, kernel_cache, operation, selftest, survey, transports, tuning_cache, tuning_timer
from tpplan.exec import compile as compile_plan
from tpplan.exec.compiler import build
from tpplan.exec.cpu import VirtualDevices
from tpplan.exec.link_report import Link, LinkReport, Verdict, routes
from tpplan.exec.lower import Limits, Route, route
from tpplan.exec.survey_report import Thresholds
from tpplan.exec.tuning import DEFAULT, KIB, LARGEST, MIB, MOVES, SUMS, tune
from tpplan.exec.tuning_timer import GraphTimer, synthetic_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tpplan.exec.context import TPContext

CPU = torch.device("cpu")
SLOTS = {"peer": 2 * MIB, "host": 64 * KIB}


@frozen
class Machine:
    """GPUs whose times are straight lines: so many µs, and so many per KiB, by each way.

    Attributes:
        slots: through slots, of any transport.
        straight: by kernels that write straight, or in parts through host memory.
        copies: by copy engines.
        bad: a size that seems to take many times as long through slots.
    """

    slots: tuple[float, float] = (2, 0.02)
    straight: tuple[float, float] = (6, 0.01)
    copies: tuple[float, float] = (20, 0.008)
    bad: int = 0

    def time(self, transport: str, kind: str, size: int, tunings: tuple[Tuning, ...]) -> Sequence[float]:
        """Return the time by each tuning."""
        times = []
        for tuning in tunings:
            small = size <= tuning.slots(transport, kind)
            copies = transport == "peer" and kind == MOVES and 0 < tuning.copies_bytes <= size
            start, each = self.slots if small else self.copies if copies else self.straight
            times.append((start + each * size / KIB) * (1.5 if small and size == self.bad else 1))
        return times


def test_thresholds_are_where_the_ways_cross() -> None:
    """The largest measured size at which slots are not slower, and the smallest at which copy engines are faster."""
    found = tune(Machine().time, SLOTS, straight=True)  # slots until 400 KiB, copies from 7,000 KiB on
    assert found == Tuning(
        peer_moves_bytes=256 * KIB, peer_sums_bytes=256 * KIB, host_moves_bytes=64 * KIB, host_sums_bytes=64 * KIB,
        copies_bytes=8 * MIB,
    )  # fmt: skip


def test_one_bad_measurement_does_not_decide() -> None:
    """A size far from where the ways cross that once took longer changes nothing."""
    assert tune(Machine(bad=64 * KIB).time, SLOTS, straight=True).peer_moves_bytes == 256 * KIB


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        (Machine(slots=(9, 9)), Tuning(peer_moves_bytes=0, peer_sums_bytes=0, host_moves_bytes=0, host_sums_bytes=0)),
        (Machine(slots=(0.1, 0)), evolve(DEFAULT, peer_moves_bytes=2 * MIB, peer_sums_bytes=2 * MIB)),
    ],
)
def test_a_way_that_always_wins(machine: Machine, found: Tuning) -> None:
    """Slots that are never faster are not used, and those that always are, for all that fits one."""
    assert evolve(tune(machine.time, SLOTS, straight=True), copies_bytes=DEFAULT.copies_bytes) == found


def test_copy_engines_that_never_or_always_win() -> None:
    """Copy engines that are never faster never take over; those that always are do so from the smallest size on."""
    assert tune(Machine(copies=(99, 9)).time, SLOTS, straight=True).copies_bytes == 0
    found = tune(Machine(copies=(1, 0.0001)).time, SLOTS, straight=True)
    assert (found.copies_bytes, found.peer_moves_bytes) == (256 * KIB, 128 * KIB)
    assert found.peer_sums_bytes == 256 * KIB  # sums have no copy engines


def test_what_is_not_measured_keeps_its_default() -> None:
    """Without peer access nothing is timed by ``peer``; where kernels do not write straight, nor are copy engines."""
    asked = set()

    def time(transport: str, kind: str, size: int, tunings: tuple[Tuning, ...]) -> Sequence[float]:
        asked.add((transport, kind, max(t.copies_bytes for t in tunings)))
        assert size <= SLOTS[transport]
        return Machine(slots=(9, 9)).time(transport, kind, size, tunings)

    found = tune(time, {"host": SLOTS["host"]}, straight=True)
    assert found == evolve(DEFAULT, host_moves_bytes=0, host_sums_bytes=0)
    assert asked == {("host", kind, DEFAULT.copies_bytes) for kind in (MOVES, SUMS)}
    assert tune(time, SLOTS, straight=False).copies_bytes == DEFAULT.copies_bytes


@given(st.lists(st.tuples(*[st.floats(1, 100)] * 2), min_size=5, max_size=5))
def test_no_other_threshold_takes_less(times: list[tuple[float, float]]) -> None:
    """Whatever was measured, no other threshold has a smaller product of times."""
    sizes = [2**i * KIB for i in range(2, 7)]
    by_size = dict(zip(sizes, times, strict=True))
    found = tune(lambda _t, _k, size, _: by_size[size], {"host": sizes[-1]}, straight=False).host_moves_bytes

    def product(threshold: int) -> float:
        result = 1.0
        for size, (first, second) in by_size.items():
            result *= first if size <= threshold else second
        return result

    assert product(found) <= min(product(threshold) for threshold in (0, *sizes)) * (1 + 1e-9)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "64KiB", None])
def test_a_threshold_is_a_number_of_bytes(wrong: object) -> None:
    """Anything else is refused by name."""
    with pytest.raises(RequestError, match=r"host_sums_bytes is .*, expected a whole number of bytes from 0"):
        Tuning(host_sums_bytes=wrong)  # type: ignore[arg-type]


BROADCAST = operation.broadcast(0, (0, 1), 512)  # 1 KiB a row in two bytes
ALL_REDUCE = operation.all_reduce(512, (0, 1), (0, 1), residual=False)
LIMITS = Limits(
    slot_bytes=64 * KIB,
    stage_bytes=MIB,
    exchange_bytes=MIB,
    tuning=Tuning(peer_moves_bytes=8 * KIB, peer_sums_bytes=4 * KIB, host_moves_bytes=2 * KIB, copies_bytes=100 * KIB),
)


@pytest.mark.parametrize(
    ("asked", "transport", "rows", "way"),
    [
        (BROADCAST, "peer", 8, Route("peer", small=True)),
        (BROADCAST, "peer", 9, Route("peer")),
        (BROADCAST, "peer", 99, Route("peer")),
        (BROADCAST, "peer", 100, Route("events")),
        (ALL_REDUCE, "peer", 4, Route("peer", small=True)),
        (ALL_REDUCE, "peer", 5, Route("peer")),
        (ALL_REDUCE, "peer", 5000, Route("peer")),
        (BROADCAST, "host", 2, Route("host", small=True)),
        (BROADCAST, "host", 3, Route("host")),
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
    limits = evolve(LIMITS, slot_bytes=1024, tuning=Tuning(peer_moves_bytes=MIB, copies_bytes=0))
    assert route(BROADCAST, "peer", 1, 2, limits).small
    assert route(BROADCAST, "peer", 2, 2, limits) == route(BROADCAST, "peer", 2**20, 2, limits) == Route("peer")


#: Slots of 256 bytes and more, of which 200 are used, or none; copy engines soon take over.
TUNED = Tuning(peer_moves_bytes=200, peer_sums_bytes=0, host_moves_bytes=0, host_sums_bytes=100, copies_bytes=500)


@pytest.mark.parametrize("transport", ["peer", "host"])
def test_every_byte_is_right_by_any_thresholds(transport: str) -> None:
    """A context with thresholds of its own passes the self-test by all the ways that they make."""

    def make(transport: str) -> TPContext:
        return compile_plan(UNEVEN, backend="cpu", transport=transport, tuning=TUNED)

    with make(transport) as context:
        ways = context.explain().ways
    found = {(way.operation, way.transport, way.how) for way in ways if way.operation in {"broadcast", "all_reduce"}}
    if transport == "peer":
        assert found == {
            ("broadcast", "peer", "slots"), ("broadcast", "peer", "straight"), ("broadcast", "events", "1 part"),
            ("all_reduce", "peer", "straight"),
        }  # fmt: skip
    else:
        assert ("all_reduce", "host", "slots") in found
        assert ("broadcast", "host", "slots") not in found
    assert selftest.selftest(UNEVEN, make, [transport]).ok


def test_thresholds_are_explained() -> None:
    """The reason of a way names the threshold that decided, or the slot where that did."""
    tuning = evolve(TUNED, peer_sums_bytes=MIB)
    with compile_plan(UNEVEN, backend="cpu", transport="peer", tuning=tuning) as context:
        explanation = context.explain()
    whys = {
        name: list(dict.fromkeys(way.why for way in explanation.ways if way.operation == name))
        for name in ("broadcast", "all_reduce")
    }
    assert whys["broadcast"] == [
        "within the threshold of 200 B", "larger than the threshold of 200 B", "from 500 B on: copies of any size"
    ]  # fmt: skip
    assert whys["all_reduce"][0].startswith("fits a slot of ")
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
    assert tuning_cache.stored(2) == (DEFAULT, "not measured on this machine, tpplan devices --links does that")
    assert not tuning_cache.save((_thresholds(2, 1), _thresholds(4, 2)))
    found = {count: tuning_cache.stored(count) for count in (2, 3, 4, 5)}
    assert [tuning.peer_sums_bytes for tuning, _ in found.values()] == [1, 2, 2, DEFAULT.peer_sums_bytes]
    assert found[3][1] == "measured on 4 GPUs of this machine"
    assert found[5][1].startswith("not measured")


@pytest.mark.parametrize("change", ["gpus", "driver", "version", "damage"])
def test_thresholds_of_another_machine_are_not_used(change: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other GPUs, another driver or tpplan, or a damaged file: the defaults again."""
    tuning_cache.save((_thresholds(2, 1),))
    monkeypatch.setattr(Gpus, "names", Gpus.names[::-1])
    assert tuning_cache.stored(2)[0].peer_sums_bytes == 1  # the same ones in another order
    (file,) = cache.iterdir()
    changes: dict[str, Callable[[], object]] = {
        "gpus": lambda: monkeypatch.setattr(Gpus, "names", ("GPU-a", "GPU-c")),
        "driver": lambda: monkeypatch.setattr(Gpus, "driver", "driver 2"),
        "version": lambda: monkeypatch.setattr(tuning_cache, "__version__", "9"),
        "damage": lambda: file.write_text(file.read_text().replace('"peer_sums_bytes": 1,', '"peer_sums_bytes": -1,')),
    }
    changes[change]()
    assert tuning_cache.stored(2)[0] == DEFAULT


def test_what_cannot_be_kept_is_told(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be written, or GPUs cannot be told apart, saving says so, and nothing is found later."""
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert "file" in tuning_cache.save((_thresholds(2, 1),))
    monkeypatch.setattr(Gpus, "names", ("GPU-a", "GPU-a"))
    assert "cannot be told" in tuning_cache.save((_thresholds(2, 1),))
    assert tuning_cache.stored(2)[0] == DEFAULT
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
        return evolve(LIMITS, slot_bytes=SLOTS[transport])


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
    assert found["thresholds"][0]["tuning"] == codec.unstructure(tune(Machine().time, SLOTS, straight=True))
    assert (len(found["links"]), found["notes"]) == (4 * 20, [])
    timed = [one for one in found["timings"] if (one["devices"], one["transport"], one["kind"]) == (4, "peer", MOVES)]
    assert {one["way"]: (one["way_ns"], one["other_ns"]) for one in timed if one["message_bytes"] == 256 * KIB} == {
        "straight": (8560, 22048),
        "slots": (7120, 8560),
    }
    assert {one["way"] for one in found["timings"] if one["kind"] == SUMS} == {"slots"}
    assert tuning_cache.stored(5) == (tune(Machine().time, SLOTS, straight=True), "measured on 5 GPUs of this machine")
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


class _Graph:
    """In the place of a CUDA graph: virtual devices have none."""

    replays = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def replay(self) -> None:
        """Count."""
        _Graph.replays += 1


@pytest.mark.parametrize("transport", ["peer", "host"])
def test_the_timer_runs_what_it_is_asked_to(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tuning gets a context of a plan with room enough, and messages of the very size; all are closed again."""
    made: list[TPContext] = []
    ran = set()

    def compiled(plan: tpplan.SplitPlan, *, transport: str, tuning: Tuning, **_: object) -> TPContext:
        made.append(compile_plan(plan, backend="cpu", transport=transport, tuning=tuning))
        return made[-1]

    def observed(asked: operation.Operation, way: str, rows: int, item: int, limits: Limits) -> Route:
        found = route(asked, way, rows, item, limits)
        ran.add((type(asked), rows * asked.columns * item, found.small, limits.tuning))
        return found

    monkeypatch.setattr(tuning_timer, "compile_plan", compiled)
    monkeypatch.setattr("tpplan.exec.engine.route", observed)
    monkeypatch.setattr("tpplan.exec.context.TPContext.capture", lambda _: _Graph())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    always, never = (Tuning(**{f"{transport}_{kind}_bytes": n for kind in (MOVES, SUMS)}) for n in (LARGEST, 0))
    with GraphTimer([CPU] * 2) as timer:
        for kind, asked in ((MOVES, operation.Moves), (SUMS, operation.Reduction)):
            for size in (4 * KIB, 64 * KIB, 128):
                ran.clear()
                _Graph.replays = 0
                times = timer(transport, kind, size, (always, never))
                assert len(times) == 2
                assert min(times) > 0
                assert _Graph.replays % 2 == 0 < _Graph.replays
                small = size <= 256  # as slots are in these tests
                assert ran == {(asked, size, small, always), (asked, size, False, never)}
        assert len(made) == 2
        assert timer.limits(transport).slot_bytes >= 256
    for context in made:
        with pytest.raises(tpplan.TpplanError, match="closed"):
            context.explain()


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_the_plan_of_the_timer(devices: int) -> None:
    """Every device is in use, messages of the largest size fit, and little else is asked of a GPU's memory."""
    plan = synthetic_plan(devices)
    assert all(slices.end > slices.start for slices in plan.slices(tpplan.Axis.RS))
    assert len(plan.slices(tpplan.Axis.RS)) == devices
    assert plan.request.max_rows * 8192 * 2 >= LARGEST
    assert max(memory.used_bytes - memory.overhead_bytes for memory in plan.memory) < 256 * MIB


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
