"""Measuring a whole model: the same logic as on GPUs, with a tiny one on virtual devices."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

import tpplan
from benchmarks.common import random_checkpoint
from benchmarks.decode import run
from benchmarks.decode.checkpoint import MODEL
from benchmarks.decode.order import CUTS, Order
from benchmarks.decode.random_codes import quantised
from benchmarks.decode.rows import Part, Row, cells, compared
from benchmarks.decode.run import Buckets
from tests.bench_decode_cases import CONFIG, TOKENS, generated, order
from tests.weight_plans import fine_units

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fine_units", "order"]  # fixtures


@pytest.mark.parametrize("cut", CUTS)
def test_a_run_measures_all_parts_and_makes_the_right_tokens(order: Order, cut: str) -> None:
    """Every part has a figure, and the tokens are those that the decoder makes of the same plan."""
    order = evolve(order, cut=cut)
    rows: list[Row] = []
    run.measure(order, rows.append)
    found = {row.what: row for row in rows}
    plan = order.plan()
    assert len(found) == len(rows)
    assert list(found) == [
        "plan and compile",
        "first token, after loading",
        "first token, after the process started",
        "load",
        *(f"device {memory.device}, memory bandwidth" for memory in plan.memory if memory.used_bytes),
        "decode, batch 1",
        "decode, batch 3",
        "prefill of 40 tokens",
        "prefill of 3 prompts of 32 tokens",
    ]
    assert all(row.value is not None and row.value > 0 for row in rows)
    start = found["first token, after the process started"]
    parts = dict(re.findall(r"(plan|compile|weights|decoder|first token|Python and torch) ([0-9.]+)", start.note))
    assert len(parts) == 6
    assert sum(map(float, parts.values())) == pytest.approx(start.value, abs=0.05)
    assert {row.what for row in rows if row.limit} == {"load", "decode, batch 1", "decode, batch 3"}
    expected = generated(order, plan)
    assert list(found["decode, batch 1"].tokens) == list(found["decode, batch 3"].tokens) == expected


def test_prompts_are_not_read_again_where_there_are_no_graphs(order: Order) -> None:
    """What is asked for is what there is already."""
    rows: list[Row] = []
    run.measure(evolve(order, eager=True, batches=(1,)), rows.append)
    assert [row.who for row in rows if row.what.startswith("prefill")] == ["tpplan"]


def test_cuts_are_what_their_names_say() -> None:
    """An uneven plan has more on its first device, an even one as much on both; and layouts differ."""
    order = Order(directory=str(MODEL.parent), gpus=2, backend="cpu")
    plans = {cut: evolve(order, cut=cut).plan() for cut in CUTS}
    weights = {cut: [memory.weights_bytes for memory in plan.memory] for cut, plan in plans.items()}
    assert weights["even"][0] == pytest.approx(weights["even"][1], rel=0.1)
    assert weights["uneven"][0] == pytest.approx(weights["uneven"][1] * 1.5, rel=0.2)
    assert {cut: plan.request.layout for cut, plan in plans.items()} == {
        "even": "reduce",
        "uneven": "reduce",
        "gather": "gather",
    }


def test_the_limit_is_the_slowest_devices_weights(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the embedding, a step reads single rows: it does not count."""
    monkeypatch.setattr(run, "_bandwidth", lambda _: 1e6)
    rows: list[Row] = []
    order = evolve(order, batches=(3,))
    run.measure(order, rows.append)
    (limit,) = (row.limit for row in rows if row.what == "decode, batch 3")
    plan = order.plan()
    rows_of = {part.device: part.end - part.start for part in plan.slices("vocab")}
    read = [memory.weights_bytes - rows_of[memory.device] * 64 * 4 for memory in plan.memory]
    assert len(read) == 2
    assert limit == pytest.approx(3 * 1e6 / max(read))


def test_a_step_of_a_quantised_model_reads_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit is their bytes and those of scales and zeros, and everything is measured as of another model."""
    random_checkpoint.write(tmp_path, quantised(CONFIG, "awq"))
    monkeypatch.setattr(run, "_bandwidth", lambda _: 1e6)
    rows: list[Row] = []
    order = Order(directory=str(tmp_path), gpus=1, backend="cpu", batches=(2,), tokens=TOKENS, prefill=40)
    run.measure(order, rows.append)
    assert all(row.value for row in rows)
    (decoded,) = (row for row in rows if row.what == "decode, batch 2")
    assert decoded.limit == pytest.approx(2 * 1e6 / (tpplan.read_model(tmp_path).weight_bytes - 203 * 64 * 4))
    assert list(decoded.tokens) == generated(order, order.plan())


def test_a_step_reads_the_experts_that_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows with two of four experts each leave one in eight out, if all are equally likely."""
    mixture = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    random_checkpoint.write(tmp_path, {**CONFIG, **mixture, "num_experts_per_tok": 2})
    monkeypatch.setattr(run, "_bandwidth", lambda _: 1e6)
    rows: list[Row] = []
    order = Order(directory=str(tmp_path), gpus=1, backend="cpu", batches=(1, 3), tokens=TOKENS, prefill=40)
    run.measure(order, rows.append)
    experts = CONFIG["num_hidden_layers"] * 4 * 3 * CONFIG["hidden_size"] * CONFIG["intermediate_size"] * 4
    others = tpplan.read_model(tmp_path).weight_bytes - experts - CONFIG["vocab_size"] * CONFIG["hidden_size"] * 4
    limits = {row.what: row.limit for row in rows}
    assert limits["decode, batch 1"] == pytest.approx(1e6 / (others + experts / 2))
    assert limits["decode, batch 3"] == pytest.approx(3e6 / (others + experts * 7 / 8))
    (note,) = (row.note for row in rows if "memory bandwidth" in row.what)
    assert "of experts those that are chosen" in note


def test_a_part_that_fails_leaves_the_others(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the part says why, and has no figure."""

    def broken(_: Path) -> float:
        raise OSError("the disk | is gone")

    monkeypatch.setattr(run, "read_rate", broken)
    rows: list[Row] = []
    run.measure(order, rows.append)
    assert [(row.what, row.note) for row in rows if row.value is None] == [
        ("load", "failed: OSError: the disk / is gone")
    ]
    assert rows[-1].what == "prefill of 3 prompts of 32 tokens"


def test_transformers_makes_the_same_tokens(order: Order) -> None:
    """It measures the same parts from the same prompts, so that figures can be compared."""
    from benchmarks.decode import transformers_run  # noqa: PLC0415 - transformers takes seconds

    rows: list[Row] = []
    transformers_run.measure(evolve(order, gpus=1), 0, rows.append)
    found = {row.what: row for row in rows}
    assert list(found) == [
        "load",
        "first token, after the process started",
        "decode, batch 1",
        "decode, batch 3",
        "prefill of 40 tokens",
    ]
    expected = generated(order, order.plan())
    assert list(found["decode, batch 1"].tokens) == list(found["decode, batch 3"].tokens) == expected


def test_memory_is_told_by_bucket(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes between two looks belongs to the bucket that is named; all that is used is one of the ledger's."""
    mib = run.MIB
    handed_out = iter([5, 15, 45, 115, 160, 190, 128])
    plan = evolve(order, gpus=1).plan()
    monkeypatch.setattr(run, "requested", lambda *_: next(handed_out) * mib)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 200 * mib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (200 * mib, 1000 * mib))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    buckets = Buckets(plan, [torch.device("cuda", 0)])
    for bucket in ("workspace", "weights", "cache"):
        buckets.look(bucket)
    rows: list[Row] = []
    buckets.tell(Part(rows.append, gpus=1, cut="even", who="tpplan"))
    found = {row.what.removeprefix("device 0, "): row for row in rows}
    assert {what: row.value for what, row in found.items()} == {
        "workspace": 10,
        "weights": 30,
        "cache": 70,
        "activations, for which the plan has scratch": 190 - 32 - 110,
        "overhead": 800 - 110 - 48,
        "all that the driver says is used": 800,
    }
    overhead = found.pop("overhead")
    for piece in ("libraries 600.0 MiB", "in torch's memory 32.0 MiB", "beyond the peak 10.0 MiB"):
        assert piece in overhead.note
    assert "18.0 MiB of them stay" in found["activations, for which the plan has scratch"].note
    everything = found.pop("all that the driver says is used").limit
    ledger = plan.memory[0]
    assert overhead.limit == ledger.overhead_bytes / mib
    assert everything == ledger.used_bytes / mib == sum(row.limit or 0 for row in (*found.values(), overhead))


def test_rows_survive_the_way_between_processes() -> None:
    """Whatever else a library prints is not taken for one."""
    row = Row(gpus=2, cut="even", who="NCCL", what="load", value=1.5, unit="s", limit=3.0, note="é", tokens=(4, 5))
    assert Row.parse(row.line()) == row
    assert Row.parse("Loading weights: 100%") is None
    assert cells(row) == "| 2 | even | NCCL | load | 1.5 | s | 3 | 50% | é |"


def test_tokens_are_compared_with_the_first() -> None:
    """A row says how many of its tokens, from the start, the first of the kind has too."""
    first = Row(gpus=1, cut="even", who="tpplan", what="decode", value=1.0, tokens=(1, 2, 3, 4))
    other = evolve(first, gpus=2, who="NCCL", tokens=(1, 2, 5, 4))
    assert compared(first, []) == first
    assert compared(other, [first]).note == "first 2 of 4 tokens as tpplan on 1"
    assert compared(evolve(other, what="prefill"), [first]).note == ""


def test_a_transport_can_be_asked_for(order: Order) -> None:
    """Machines without links between their GPUs can be measured on any other, and the rows say which way data went."""
    rows: list[Row] = []
    run.measure(evolve(order, transport="host", batches=(1,)), rows.append)
    assert rows[0].note.endswith("transport host")
    assert list(next(row for row in rows if row.what == "decode, batch 1").tokens) == generated(order, order.plan())


def test_predictions_by_a_devices_file(tmp_path: Path) -> None:
    """They are those of a plan for the devices of the file; without one there are none."""
    speeds = {"bandwidth_bytes_per_second": 10**12, "read_bytes_per_second": 9 * 10**11, "boundary_ns": 1000}
    gpu = {"name": "x", "memory_bytes": 2**36, "budget_bytes": 2**36, **speeds}
    link = {"first": 0, "second": 1, "kind": "pcie", "latency_ns": 10**6, "bytes_per_second": 10**10}
    file = {"format_version": "1.1", "devices": [gpu, gpu], "links": [link]}
    (tmp_path / "devices.json").write_text(json.dumps(file))
    order = Order(
        directory=str(MODEL.parent), gpus=2, backend="cpu", batches=(1,), devices=str(tmp_path / "devices.json")
    )
    (rate,) = order.predictions(order.plan()).values()
    sums = 2 * tpplan.read_model(MODEL.parent).layer_count + 1
    assert rate <= 1000 / sums  # a link of a millisecond
    assert rate > 500 / sums
    assert evolve(order, devices="").predictions(order.plan()) == {}
