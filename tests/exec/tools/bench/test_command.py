"""The command that times a plan's operations: its screen, its document, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve

from tests.command import Done, command
from tests.contexts import MAX_ROWS, UNEVEN, little_room  # noqa: F401 (for every test here)
from tests.exec.tools.bench.cases import OPERATIONS, RATES, SCHEMA, short_turns  # noqa: F401 (for every test here)
from tpplan.exec.tools.bench import run as bench
from tpplan.exec.tools.bench.case import Case, Cases
from tpplan.files.codec import unstructure
from tpplan.render.bench import bench as view
from tpplan.reports.bench import BenchReport, Measured, Spread, Timed

ROOT = Path(__file__).parents[4]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the file of a plan for four devices, one of which is idle."""
    UNEVEN.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


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


def test_sizes_none_of_which_fits_are_refused(path: Path) -> None:
    """Once, with the smallest and what the plan has room for, and before anything is measured."""
    done = command("bench", path, "--backend", "cpu", "--sizes", "2MiB,1MiB")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"error: none of --sizes fits: 1.00 MiB takes 13108 rows, the plan has room for {MAX_ROWS}, 960 B\n"
        "hint: leave out --sizes for those that fit, or plan with more --max-rows\n"
    )


def test_where_nothing_has_a_time_there_is_no_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 2 behind a report of reasons; one time of anybody is an answer."""
    make = Cases.make

    def full(self: Cases, name: str, rows: int) -> Case:
        if name not in working:
            raise RuntimeError("out of memory")
        return make(self, name, rows)

    monkeypatch.setattr(Cases, "make", full)
    for working, code in ((), 2), (("gather",), 0):
        done = _bench(path, "--backend", "cpu")
        assert done.code == code
        assert done.out.count("80 B; 960 B: RuntimeError: out of memory") == len(OPERATIONS) - len(working)


def test_usual_sizes_are_taken_as_far_as_there_is_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody asked for is left out with one note, and where nothing is left all rows of the plan are taken."""
    for usual, rows in (((80, 160, 2**20), [1, 2]), ((2**20, 2**24), [MAX_ROWS])):
        monkeypatch.setattr(bench, "USUAL", usual)
        done = command("bench", path, "--backend", "cpu", "--rounds", "2", "--json")
        document = json.loads(done.out)
        assert [one["rows"] for one in document["measured"]] == rows * len(OPERATIONS)
        assert not any("failed" in one for one in document["measured"])
        where, note = document["notes"]
        assert where == "virtual devices are parts of this machine's host memory: their times say nothing about GPUs"
        assert note.startswith("1.00 MiB")
        assert note.endswith(f" left out: the plan has room for {MAX_ROWS} rows, 960 B")


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
        in_a_graph=65,
        software=("torch 2.11.0", "CUDA 13.0", "NCCL 2.28.9"),
        limits=tuple(evolve(limit, bytes_per_second=limit.bytes_per_second * 4 * 10**9) for limit in RATES),
        measured=(
            measured,
            evolve(measured, payload_bytes=2**13, way="peer slots", graph_way="local", least_ns=812, timed=broken),
            evolve(measured, payload_bytes=2**30, link_bytes=21 * 2**30, in_a_graph=16),
        ),
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
    assert squeezed[at + 1 : at + 8] == [
        "payload moved way tpplan least–most limit torch NCCL staged",
        "16 MiB 336 MiB events 16 parts calls 12345 12222–13580 25 % 24690 (2.00) 37035 (3.00) 49380 (4.00)",
        "graph 12345 12222–13580 25 % 37035 (3.00)",
        "8 KiB 336 MiB peer slots calls 3.2 3.2–3.6 25 % failed failed failed",
        "local graph failed",
        "1 GiB 21 GiB events 16 parts calls 12345 12222–13580 25 % 24690 (2.00) 37035 (3.00) 49380 (4.00)",
        "graph of 16 12345 12222–13580 25 % 37035 (3.00)",
    ]
    text = " ".join(squeezed)
    assert "graph: 65 are in one CUDA graph, as many as in a decoding step" in text
    assert text.count("'_nccl_all_reduce'") == 1
    assert "torch, calls, 8 KiB; NCCL, calls, 8 KiB; staged, calls, 8 KiB: AttributeError" in text
    assert "tpplan, graph, 8 KiB: it cannot be captured" in text
    assert "200–400 GB/s between devices, 80 GB/s to the host, 40 GB/s from the host" in text
    assert "note: nothing else to say" in squeezed[: squeezed.index("all_reduce")]
    assert "torch: the same operation by Tensor.copy_" in text
    assert "added up in float32 on every device, then rounded to bfloat16" in text
    assert "least–most: the fastest and the slowest round" in text
    many = view(unstructure(evolve(_report_of_gpus(), rounds=10)), 120)
    lines = [re.sub(" +", " ", "".join(part for part, _ in one)).strip() for one in many]
    assert "10 %–90 %: a tenth of the rounds was faster" in " ".join(lines)
    assert "payload moved way tpplan 10 %–90 % limit torch NCCL staged" in lines


def test_what_a_way_is_has_a_page() -> None:
    """The section of the page that the screen names is there, and torch is explained only where it takes turns."""
    (page, section) = re.search("names of ([^ ]+), “(.*?)”", _said(_report_of_gpus())).groups()  # type: ignore[union-attr]
    assert f"\n## {section}\n" in (ROOT / page).read_text(encoding="utf-8")
    alone = evolve(_report_of_gpus(), measured=())
    assert "torch: " not in _said(alone)


def _said(report: BenchReport) -> str:
    lines = ("".join(text for text, _ in one).strip() for one in view(unstructure(report), 120))
    return re.sub(" +", " ", " ".join(lines))


def test_who_fails_at_everything_is_told_once() -> None:
    """Without a column of failures at each operation; a failure at one size is told with the size."""
    report = _report_of_gpus()
    (first, *_) = report.measured
    lost = Timed(by="NCCL window", graph=False, failed="no allocator")
    sizes = [evolve(first, payload_bytes=size, timed=(*first.timed, lost)) for size in (2**10, 2**20)]
    report = evolve(report, measured=(*sizes, *(evolve(one, operation="broadcast") for one in sizes)))
    text = "\n".join("".join(part for part, _ in one) for one in view(unstructure(report), 120))
    assert text.count("no allocator") == 1
    assert "  NCCL window: no allocator" in text.splitlines()
    assert "failed" not in text


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
    assert lines[0] == "Tiny on 3 virtual devices of this machine's CPU"
    said = " ".join(lines[: lines.index("broadcast")])
    assert "note: virtual devices are parts of this machine's host memory: their times say nothing about GPUs" in said
    assert "in brackets: an implementation's time divided by tpplan's; above 1, tpplan is faster" in said
    assert "graph:" not in said
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
        (("--backend", "metal"), "--backend is 'metal', expected auto, cpu or cuda", "tpplan bench --help"),
        (("--backend", "cuda"), "this machine has 0 CUDA devices", "or run on virtual devices with --backend cpu"),
        (
            ("--transport", "pigeon"),
            "--transport is 'pigeon', expected auto, peer, host or events",
            "tpplan bench --help",
        ),
        (("--rounds", "1"), "--rounds is 1, expected 2 to 1000", "7, the default"),
        (("--sizes", "8KiB,,1MiB"), "--sizes: '' is not a size", "list sizes such as 8KiB,64KiB,1MiB"),
        (("--sizes", "8kx"), "--sizes: size '8kx' has the unknown unit 'kx'", "list sizes such as"),
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
