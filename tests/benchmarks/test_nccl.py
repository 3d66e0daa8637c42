"""A decoder over NCCL, with something in NCCL's place, and its operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve

import tpplan
from benchmarks.common import random_checkpoint
from benchmarks.decode import run
from benchmarks.decode.nccl_context import NcclContext
from benchmarks.decode.order import WARM, Order
from tests.bench_decode_cases import CONFIG, TOKENS, order
from tests.flash_cases import flash_calls
from tests.graph_cases import FakeGraph
from tests.weight_plans import fine_units
from tpplan.core.axes import Axis
from tpplan.decoder import decoder as model
from tpplan.decoder.decoding.prefill_graphs import PrefillGraphs, graphs_of
from tpplan.exec import compile as compile_plan
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from benchmarks.decode.rows import Row
    from tpplan.decoder import Decoder

__all__ = ["fine_units", "flash_calls", "order"]  # fixtures


def _sum(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    total = torch.stack(list(inputs)).sum(0)
    for output in outputs:
        output.copy_(total)


def _copy(tensors: Sequence[Tensor], root: int) -> None:
    for tensor in tensors:
        tensor.copy_(tensors[root])


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put something in NCCL's place that does the same to tensors in host memory."""
    monkeypatch.setattr("torch.cuda.nccl.all_reduce", _sum)
    monkeypatch.setattr("torch.cuda.nccl.broadcast", _copy)


@pytest.mark.usefixtures("nccl")
def test_the_decoder_over_nccl_makes_the_same_tokens(order: Order) -> None:
    """Only the movement differs, and the rows say whose it was."""
    rows: list[Row] = []
    run.measure(evolve(order, nccl=True, batches=(1,)), rows.append)
    mine, others = ([row for row in rows if row.who == who and row.unit == "tokens/s"] for who in ("tpplan", "NCCL"))
    assert [row.what for row in others] == [row.what for row in mine] == ["decode, batch 1", "prefill of 40 tokens"]
    assert others[0].tokens == mine[0].tokens
    assert len(others[0].tokens) == 1 + WARM + TOKENS


@pytest.mark.usefixtures("nccl", "flash_calls")
def test_prompts_are_read_by_graphs_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are graphs where they can be, over NCCL one of its own; if it is asked for, none is one more."""
    random_checkpoint.write(tmp_path, {**CONFIG, "torch_dtype": "bfloat16"})
    captured: list[str] = []
    read: list[str] = []
    replay = PrefillGraphs.run

    def capture(self: Decoder, issue: Callable[[], None], what: str) -> FakeGraph:
        captured.append(type(self.context).__name__)
        issue()
        return FakeGraph(issue, lambda: capture(self, issue, what))

    def noted(self: PrefillGraphs, *words: Any) -> tuple[Tensor, ...]:
        read.append(type(self._forward.context).__name__)
        return replay(self, *words)

    monkeypatch.setattr(model, "graphs_of", lambda forward, capture, **_: graphs_of(forward, capture, graphs=True))
    monkeypatch.setattr(model.Decoder, "captured", capture)
    monkeypatch.setattr(PrefillGraphs, "run", noted)
    found: list[tuple[str, str, list[str]]] = []

    def tell(row: Row) -> None:
        assert row.value, row.note
        if row.what.startswith("prefill"):
            found.append((row.who, row.what, read[:]))
        read.clear()

    order = Order(directory=str(tmp_path), gpus=2, backend="cpu", batches=(2,), tokens=TOKENS, prefill=96, max_rows=32)
    run.measure(evolve(order, eager=True, nccl=True), tell)
    long, several = "prefill of 96 tokens", "prefill of 2 prompts of 32 tokens"  # three passes and two, each five times
    assert found == [
        ("tpplan", long, ["TPContext"] * 15),
        ("tpplan", several, ["TPContext"] * 10),
        ("tpplan, eager", long, []),
        ("tpplan, eager", several, []),
        ("NCCL", long, ["NcclContext"] * 15),
        ("NCCL", several, ["NcclContext"] * 10),
    ]
    assert captured == ["TPContext", "NcclContext"]


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("source", [HOST, 1])
def test_nccl_operations_give_what_tpplans_give(order: Order, source: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also into tensors that are there, and where a device has no part of an axis."""
    model = tpplan.read_model(order.directory)
    plan = tpplan.plan(model, tpplan.parse_devices("3x8GiB"), cache=tpplan.Cache(tokens=64))
    with compile_plan(plan, backend="cpu") as context:
        other = NcclContext(context)
        x = torch.arange(6.0).view(2, 3)
        outs = [torch.zeros(2, 3) for _ in context.all_devices]
        assert all(torch.equal(copy, x) for copy in other.broadcast(x, source=source, out=outs))
        assert torch.equal(outs[2], x)
        for axis in (Axis.KV_HEADS, Axis.RESIDUAL):
            givers = context.devices_of(axis)
            parts = [x + device for device in givers]
            wanted = context.all_reduce(parts, axis=axis)
            assert all(map(torch.equal, other.all_reduce(parts, axis=axis), wanted))
            residual = [x * 10 for _ in context.all_devices]
            wanted = context.all_reduce(parts, residual, axis=axis)
            assert all(map(torch.equal, other.all_reduce(parts, residual, axis=axis), wanted))
            assert all(map(torch.equal, other.all_reduce(parts, residual, axis=axis, out=residual), wanted))
            assert all(map(torch.equal, residual, wanted))
        with pytest.raises(NotImplementedError, match="allgather"):
            other.allgather(parts, Axis.RESIDUAL)
        monkeypatch.setattr(context, "gather", None)  # it is not tpplan that gathers
        whole = torch.arange(2.0 * 203).view(2, 203)
        logits = context.scatter(whole, Axis.VOCAB)
        assert len({part.shape for part in logits}) > 1
        assert torch.equal(other.gather(logits, Axis.VOCAB).tensor, whole)
