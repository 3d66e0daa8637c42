"""The times of a plan's operations: who is timed, that wrong results and errors are told, and how."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from jsonschema import Draft202012Validator

import tpplan
from schemas import generate
from tests.command import Done, command
from tests.contexts import ALONE, MAX_ROWS, UNEVEN, budgeted, little_room, plans  # noqa: F401 (for every test here)
from tests.test_selftest import EXAMPLES
from tpplan.axes import Axis
from tpplan.bench_report import BenchReport, Limit, Measured, Spread, Timed
from tpplan.codec import unstructure
from tpplan.errors import ExecutionError
from tpplan.exec import bench, bench_clock, bench_limits, bench_peers
from tpplan.exec import compile as compile_plan
from tpplan.exec.bench_case import Case, Cases
from tpplan.exec.bench_clock import Clock, Run
from tpplan.exec.bench_even import even_plan
from tpplan.exec.cpu import VirtualDevices
from tpplan.exec.lower import TRANSPORTS
from tpplan.exec.program import HOST, OUTPUT, Buffer
from tpplan.render.bench import bench as view
from tpplan.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from tpplan.exec.context import TPContext
    from tpplan.exec.cpu import Pending
    from tpplan.exec.program import Program
    from tpplan.plan import SplitPlan

SCHEMA = Draft202012Validator(generate.schema("bench-report"))
OPERATIONS = ("broadcast", "allgather", "all_reduce", "all_reduce with residual", "scatter", "gather")

#: Of the uneven plan: 40 columns in bfloat16.
ROW_BYTES = 80
COUNT = 3


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a turn be a call: nobody looks at the times."""
    monkeypatch.setattr(bench_clock, "_TURN_SECONDS", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the file of a plan for four devices, one of which is idle."""
    UNEVEN.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture
def context() -> Iterator[TPContext]:
    """Return that plan, compiled."""
    with compile_plan(UNEVEN, backend="cpu") as compiled:
        yield compiled


def _compiler(plan: SplitPlan = UNEVEN) -> Callable[[str], TPContext]:
    return lambda transport: compile_plan(plan, backend="cpu", transport=transport)


def _times(report: BenchReport, operation: str) -> dict[str, Timed]:
    """Return who did an operation of the first size."""
    return {timed.by: timed for timed in next(m for m in report.measured if m.operation == operation).timed}


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


def test_sizes_are_whole_rows() -> None:
    """Sizes are rounded up to rows of the residual stream, and those that come to the same are timed once."""
    report = bench.bench(_compiler(ALONE), "auto", sizes=(1, 32, 33, 5), rounds=2)
    assert [m.payload_bytes for m in report.measured if m.operation == "gather"] == [32, 64]


def test_what_does_not_fit_is_told_in_its_place(path: Path) -> None:
    """More rows than the plan has room for are no end of the rest, nor a failure of the command."""
    done = command("bench", path, "--backend", "cpu", "--rounds", "2", "--sizes", "80B,1MiB", "--json")
    assert done.code == 0
    document = json.loads(done.out)
    SCHEMA.validate(document)
    assert len(document["measured"]) == 2 * len(OPERATIONS)
    for small, large in zip(document["measured"][::2], document["measured"][1::2], strict=True):
        assert "failed" not in small
        assert large["failed"] == f"takes 13108 rows, the plan has room for {MAX_ROWS}"
        assert "timed" not in large
    text = "\n".join("".join(part for part, _ in each) for each in view(document))
    assert text.count("the plan has room for") == len(OPERATIONS)


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
    rs = UNEVEN.split(Axis.RS)
    even = evolve(rs, bounds=(0, 14, 14, 27, 40))
    plan = budgeted(evolve(UNEVEN, splits=tuple(even if each is rs else each for each in UNEVEN.splits)))
    for one in (plan, ALONE):
        assert even_plan(one) is None
        report = bench.bench(_compiler(one), "events", sizes=(ROW_BYTES,), rounds=2)
        assert report.even_columns == ()
        assert all("even" not in _times(report, name) for name in OPERATIONS)


@given(plans())
@settings(max_examples=50)
def test_the_even_plan(plan: SplitPlan) -> None:
    """Who holds columns of the residual stream holds as many units of it as others, or one more; all else is as was."""
    even = even_plan(plan)
    if even is None:
        return
    verify(even)
    before, after = plan.split(Axis.RS), even.split(Axis.RS)
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
    assert report.notes == ("even slices were not timed: RuntimeError: CUDA out of memory",)
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
    assert report.notes == ("no limits were measured: RuntimeError: CUDA error: out of memory",)
    assert all(_times(report, name)["tpplan"].time for name in OPERATIONS)


def test_a_run_that_fails_late() -> None:
    """What raises in a later round is told and timed no more; the others take all their turns."""
    calls: list[str] = []
    told: dict[str, str] = {}

    def late() -> None:
        calls.append("late")
        if calls.count("late") == COUNT:
            raise RuntimeError("enough")

    def early() -> None:
        raise RuntimeError("at once")

    runs = {"late": Run(late), "early": Run(early), "good": Run(lambda: calls.append("good"), 2)}
    clock = Clock([torch.device("cpu")], 5)
    times = clock.times(runs, lambda key, error: told.__setitem__(key, str(error)))
    assert told == {"late": "enough", "early": "at once"}
    assert list(times) == ["good"]
    assert calls == ["late", "good", "late", "good", "late", "good", "good", "good", "good"]


class _Nccl:
    """NCCL, as far as it is needed here, on tensors of the CPU."""

    @staticmethod
    def broadcast(tensors: Sequence[Tensor]) -> None:
        """Copy the first one to all others."""
        for tensor in tensors[1:]:
            tensor.copy_(tensors[0])

    @staticmethod
    def all_reduce(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Add up in the inputs' own dtype, the last one first."""
        total = sum(reversed(inputs[:-1]), inputs[-1])
        for output in outputs:
            output.copy_(total)

    @staticmethod
    def all_gather(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Copy all of the inputs, which are of one size, one after another."""
        assert len({tensor.shape for tensor in inputs}) == 1
        for output in outputs:
            output.copy_(torch.cat(list(inputs)))


@pytest.mark.parametrize("operation", bench_peers._NCCL)
def test_nccl_does_the_same(operation: str, context: TPContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's results pass, rounded in another order and from even slices; a small change of them does not."""
    monkeypatch.setattr(bench_peers, "nccl", _Nccl)
    case = Cases(context).make(operation, 5)
    contender = bench_peers._NCCL[operation](case)
    contender.check(contender.call, lambda: None)

    def wrong() -> None:
        contender.call()
        contender.results[-1].flatten()[-6:-5].add_(0.5)  # no padding

    with pytest.raises(ExecutionError, match=r"result \d has 1 wrong elements of 200"):
        contender.check(wrong, lambda: None)


def test_missing_nccl_is_a_reason(context: TPContext) -> None:
    """Where torch has no NCCL, its contender fails with that when it is called, as any other may."""
    case = Cases(context).make("broadcast", 1)
    with pytest.raises((AttributeError, RuntimeError)):
        bench_peers._NCCL["broadcast"](case).call()


RATES = (
    *(Limit(source=a, target=b, bytes_per_second=100) for a in (0, 1, 2) for b in (0, 1, 2) if a != b and a),
    *(Limit(source=0, target=b, bytes_per_second=50 * b) for b in (1, 2)),
    *(Limit(source=a, target=HOST, bytes_per_second=20) for a in (0, 1, 2)),
    *(Limit(source=HOST, target=a, bytes_per_second=10) for a in (0, 1, 2)),
)
PLACES = {i: torch.device("cuda", i) for i in range(3)}


def _on(device: int, nbytes: int) -> Any:
    return SimpleNamespace(device=PLACES.get(device, torch.device("cpu")), nbytes=nbytes)


def _case(moves: Sequence[tuple[Any, Any]] = (), **more: Any) -> Case:
    outputs = [target for target, _ in moves] or [_on(0, 300)]
    nothing = cast("Callable[[], object]", lambda: None)
    return Case(operation="", call=nothing, inputs=(), outputs=outputs, expected=(), moves=moves, **more)


def test_the_least_time() -> None:
    """It is that of the device with the most to send or receive on its fastest link; copies can be passed on."""
    x, second = _on(0, 1000), 10**9
    moves = [(_on(i, 1000), x) for i in PLACES]
    assert bench_limits.least_ns(_case(moves), RATES, PLACES) == 10 * second
    parts = [_on(0, 100), _on(1, 600), _on(2, 300)]
    assert (
        bench_limits.least_ns(_case([(_on(i, 0), part) for i in PLACES for part in parts]), RATES, PLACES) == 9 * second
    )
    assert (
        bench_limits.least_ns(_case([(_on(HOST, 0), part) for part in parts], captured=False), RATES, PLACES)
        == 30 * second
    )
    assert bench_limits.least_ns(_case(slack=torch.zeros(1)), RATES, PLACES) == 4 * second
    assert bench_limits.least_ns(_case(moves), (), PLACES) is None
    alone = {0: PLACES[0]}
    assert bench_limits.least_ns(_case([(_on(0, 5), _on(0, 5))]), RATES, alone) is None
    assert bench_limits.least_ns(_case(slack=torch.zeros(1)), RATES, alone) is None
    assert (
        bench_limits.least_ns(_case([(_on(HOST, 0), parts[0])], captured=False), RATES, alone) == 5 * second
    )  # a single GPU, too, has a link to the host


def _spread(micros: float) -> Spread:
    return Spread(median_ns=int(micros * 1000), low_ns=int(micros * 990), high_ns=int(micros * 1100))


def _report_of_gpus() -> BenchReport:
    """Return a report as it is on GPUs, with times, ratios, failures and numbers as wide as they get."""
    peers = ("torch", "NCCL", "staged")
    reason = "AttributeError: module 'torch._C' has no attribute '_nccl_all_reduce'"
    long = tuple(
        Timed(by=by, graph=graph, time=_spread(12345 * (i + 1)))
        for graph in (False, True)
        for i, by in enumerate(("tpplan", *peers))
        if not graph or by in {"tpplan", "NCCL"}
    )
    broken = (
        Timed(by="tpplan", graph=False, time=_spread(3.25)),
        *(Timed(by=by, graph=False, failed=reason) for by in peers),
        Timed(by="tpplan", graph=True, failed="it cannot be captured"),
    )
    measured = Measured(
        operation="all_reduce",
        payload_bytes=16 * 2**20,
        rows=1024,
        link_bytes=336 * 2**20,
        way="events 16 parts",
        least_ns=3086250,
        timed=long,
    )
    return BenchReport(
        model="Llama-3.1-8B",
        backend="cuda",
        devices=("NVIDIA H200",) * 7 + ("NVIDIA H100 80GB HBM3",),
        transport="peer",
        dtype="bfloat16",
        columns=4096,
        slice_columns=(512,) * 8,
        rounds=7,
        in_a_graph=50,
        software=("torch 2.11.0", "CUDA 13.0", "NCCL 2.28.9"),
        limits=tuple(evolve(limit, bytes_per_second=limit.bytes_per_second * 4 * 10**9) for limit in RATES),
        measured=(measured, evolve(measured, payload_bytes=2**13, way="peer slots", least_ns=812, timed=broken)),
        notes=("nothing else to say",),
    )


def test_the_screen_of_gpus() -> None:
    """120 columns have room for a row of calls and one of the graph: ratios, shares of the limit, and what failed."""
    document = unstructure(_report_of_gpus())
    SCHEMA.validate(document)
    lines = ["".join(text for text, _ in one) for one in view(document, 120)]
    assert max(map(len, lines)) <= 120
    squeezed = [re.sub(" +", " ", one).strip() for one in lines]
    assert squeezed[0] == "Llama-3.1-8B on 7 × NVIDIA H200, 1 × NVIDIA H100 80GB HBM3"
    at = squeezed.index("all_reduce")
    assert squeezed[at + 1 : at + 6] == [
        "payload moved way tpplan 10 %–90 % limit torch NCCL staged",
        "16 MiB 336 MiB events 16 parts calls 12345 12222–13580 25 % 24690 (2.00) 37035 (3.00) 49380 (4.00)",
        "graph 12345 12222–13580 25 % 37035 (3.00)",
        "8 KiB 336 MiB peer slots calls 3.2 3.2–3.6 25 % failed failed failed",
        "graph failed",
    ]
    text = " ".join(squeezed)
    assert text.count("'_nccl_all_reduce'") == 1
    assert "torch, calls, 8 KiB; NCCL, calls, 8 KiB; staged, calls, 8 KiB: AttributeError" in text
    assert "tpplan, graph, 8 KiB: it cannot be captured" in text
    assert "200–400 GB/s between devices, 80 GB/s to the host, 40 GB/s from the host" in text
    assert "note: nothing else to say" in squeezed[: squeezed.index("all_reduce")]


def _bench(path: Path, *options: str, terminal: bool = False) -> Done:
    return command("bench", path, "--rounds", "2", "--sizes", "80B,900B", *options, terminal=terminal)


def test_the_command(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table for each operation, plain and narrow, with payload, way and ratio; and why on virtual devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_num_threads()
    done = _bench(path)
    assert done.code == 0
    assert torch.get_num_threads() == before
    lines = done.out.splitlines()
    assert lines[0] == "Tiny on 3 virtual devices"
    assert max(map(len, lines)) <= 100
    assert [one for one in lines if one in OPERATIONS] == list(OPERATIONS)
    assert "slices 11+18+11" in done.out
    assert "even: tpplan, too, with slices 13+13+14, which are as many bytes together" in done.out
    row = lines[lines.index("all_reduce") + 2]
    assert re.fullmatch(r" +80 B +\S+ B +events 1 part +calls +[\d.]+ +[\d.]+–[\d.]+ +[\d.]+ \([\d.]+\)", row)
    assert "failed" not in done.out
    assert "limit" not in done.out
    assert done.err == "note: on virtual devices, because the plan has 4 and this machine 0 CUDA devices\n"


def test_progress(path: Path) -> None:
    """A terminal sees what is being timed, and in the end nothing of it."""
    done = _bench(path, "--backend", "cpu", terminal=True)
    assert "timing all_reduce with residual of 80 B" in done.err
    assert not done.err.rpartition("\r")[2]


def test_the_table_grows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation is on the screen before the next one is timed."""
    seen: dict[str, list[str]] = {}
    make = Cases.make

    def spied(self: Cases, name: str, rows: int) -> Case:
        text: str = sys.stdout.buffer.getvalue().decode()  # type: ignore[union-attr]
        seen.setdefault(name, [one for one in text.splitlines() if one in OPERATIONS])
        return make(self, name, rows)

    monkeypatch.setattr(Cases, "make", spied)
    done = _bench(path, "--backend", "cpu")
    assert seen == {name: list(OPERATIONS[:i]) for i, name in enumerate(OPERATIONS)}
    assert [one for one in done.out.splitlines() if one in OPERATIONS] == list(OPERATIONS)


def test_a_report_that_grows_only_has_more_lines() -> None:
    """Whatever is measured later, lines that are on the screen stay right."""
    report = _report_of_gpus()
    more = tuple(evolve(each, operation="scatter", way="peer straight with a long name") for each in report.measured)
    before, after = (view(unstructure(each)) for each in (report, evolve(report, measured=(*report.measured, *more))))
    assert after[: len(before)] == before
    assert len(after) > len(before)


def test_the_transport_that_was_asked_for(path: Path) -> None:
    """``--transport`` decides how operations go, and the table says so."""
    document = json.loads(_bench(path, "--backend", "cpu", "--transport", "host", "--json").out)
    SCHEMA.validate(document)
    assert document["transport"] == "host"
    assert {m["way"].split()[0] for m in document["measured"]} == {"host", "local"}


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (("--backend", "metal"), "unknown backend 'metal'", "choose one of these"),
        (("--backend", "cuda"), "this machine has 0 CUDA devices", "or run on virtual devices with --backend cpu"),
        (("--transport", "pigeon"), "unknown transport 'pigeon', expected auto, peer, host, events", "choose one"),
        (("--rounds", "1"), "--rounds is 1, expected 2 to 1000", "7, the default"),
        (("--sizes", "8KiB,,1MiB"), "--sizes: '' is not a size", "list sizes such as 8KiB,64KiB,1MiB"),
        (("--sizes", "8kb"), "--sizes: size '8kb' has the unknown unit 'kb'", "list sizes such as"),
    ],
)
def test_no_answer(
    path: Path, options: tuple[str, ...], message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be timed at all is exit 2 with the reason, and nothing on standard output."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = command("bench", path, *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert f"hint: {hint}" in done.err or hint in done.err.rpartition("hint: ")[2]


@pytest.mark.multi_gpu
def test_the_command_on_gpus(tmp_path: Path) -> None:
    """On GPUs everybody's results are right, by calls and in graphs, and all links have rates."""
    model = tpplan.read_model(EXAMPLES.parent / "models/Llama-3.1-8B/config.json")
    tpplan.plan(model, tpplan.parse_devices("40GiB,20GiB"), cache=tpplan.Cache(tokens=4096)).save(
        tmp_path / "plan.json"
    )
    done = command("bench", tmp_path / "plan.json", "--rounds", "2", "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    SCHEMA.validate(document)
    assert [t for m in document["measured"] for t in m["timed"] if "failed" in t] == []
    who = {m["operation"]: [(t["by"], t["graph"]) for t in m["timed"]] for m in document["measured"]}
    ours, even = ([(by, graph) for graph in (False, True)] for by in ("tpplan", "even"))
    others = [("torch", False), ("NCCL", False), ("NCCL", True), ("staged", False)]
    assert who == {
        **dict.fromkeys(OPERATIONS, ours + others),
        "allgather": ours + even + others,
        "scatter": ours + even + [one for one in others if one[0] != "NCCL"],
        "gather": [("tpplan", False), ("even", False), ("torch", False), ("ExLlamaV2", False)],
    }
    assert len(document["limits"]) == 6
    assert all(m["least_ns"] > 0 for m in document["measured"])


def test_every_slice_counts(context: TPContext) -> None:
    """Operands are the plan's own slices: uneven, and none for a device that has none."""
    cases = Cases(context)
    assert [part.shape for part in cases.make("allgather", 2).inputs] == [
        (2, s.end - s.start) for s in context.split(Axis.RS)
    ]
