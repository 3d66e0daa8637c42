"""CUDA devices: what virtual ones do, on real GPUs, with streams, interrupts and deadlines."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.exec.cuda.cuda_cases import GPUS, ctx, parts_of, plan_for
from tpplan import exec as tpx
from tpplan.errors import ExecutionError
from tpplan.exec.cuda.launch import Launch
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.tools.selftest.run import selftest

__all__ = ["ctx"]  # a fixture


@pytest.mark.gpu
def test_one_gpu_passes_the_selftest() -> None:
    """All operations of a plan for a single device are right on it."""
    if not GPUS:
        pytest.skip("needs a GPU, found none")
    plan = plan_for(1)
    report = selftest(plan, lambda way: tpx.compile(plan, backend="cuda", devices=[0], transport=way), TRANSPORTS)
    assert report.ok, report.faults


@pytest.mark.multi_gpu
@pytest.mark.parametrize("count", [2, 3, 4])
def test_several_gpus_pass_the_selftest(count: int) -> None:
    """All operations by all transports are right to the byte."""
    if count > GPUS:
        pytest.skip(f"needs {count} GPUs, found {GPUS}")
    plan = plan_for(count)
    places = list(range(count))
    report = selftest(plan, lambda way: tpx.compile(plan, backend="cuda", devices=places, transport=way), TRANSPORTS)
    assert report.ok, report.faults


@pytest.mark.multi_gpu
@pytest.mark.parametrize("rows", [1, 512])
def test_callers_streams_are_waited_for_and_stay_current(ctx: tpx.TPContext, rows: int) -> None:
    """Work on streams of the caller's own is in order with operations, also when the streams change in between."""
    for turn in range(6):
        parts, total = parts_of(ctx, rows)
        late = [torch.empty_like(part) for part in parts]
        streams = [torch.cuda.Stream(part.device) for part in parts]  # type: ignore[no-untyped-call]
        torch.cuda.set_device(turn % 2)
        for part in parts:
            torch.cuda.synchronize(part.device)
        results: list[torch.Tensor] = []
        with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
            for target, part in zip(late, parts, strict=True):
                torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
                target.copy_(part)
            before = [torch.cuda.current_stream(part.device) for part in parts]
            results += ctx.all_reduce(late)
            assert [torch.cuda.current_stream(part.device) for part in parts] == before
            for target in late:
                target.zero_()
        assert torch.cuda.current_device() == turn % 2
        for stream in streams:
            stream.synchronize()
        assert all(torch.equal(result.cpu(), total) for result in results)


@pytest.mark.multi_gpu
def test_an_interrupted_operation_is_the_last(ctx: tpx.TPContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an exception comes between the kernels of a program, nobody gets a message that is one behind."""
    if "slots" not in str(ctx.explain()):
        pytest.skip("no kernels exchange messages by this transport")
    x = torch.randn(1, 4096, device=ctx.devices[0].device).bfloat16()
    ctx.broadcast(x)
    bind = Launch.bind

    def interrupted(self: Launch, *operands: Any) -> Any:
        return Mock(side_effect=KeyboardInterrupt) if self.stream.device else bind(self, *operands)

    ctx._runner.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "bind", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ctx.broadcast(x)
    with pytest.raises(ExecutionError, match="interrupted"):
        ctx.broadcast(x)
    with pytest.raises(ExecutionError, match="interrupted"):
        ctx.close()


@pytest.mark.multi_gpu
def test_a_close_gives_memory_back(ctx: tpx.TPContext) -> None:
    """Also while the context and a graph of it are still referenced; a replay is refused then."""
    parts, _ = parts_of(ctx, 2)
    ctx.all_reduce(parts)
    with ctx.capture() as graph:
        ctx.all_reduce(parts)
    before = torch.cuda.memory_allocated(0)
    size = ctx.devices[0].arena.size_bytes
    ctx.close()
    assert before - torch.cuda.memory_allocated(0) >= size
    with pytest.raises(ExecutionError, match="closed"):
        graph.replay()


@pytest.mark.multi_gpu
def test_a_device_that_never_comes_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that waits in vain gives up at its deadline, and the context says so from then on."""
    if GPUS < 2:
        pytest.skip(f"needs 2 GPUs, found {GPUS}")
    with tpx.compile(plan_for(2), backend="cuda", devices=[0, 1], transport="peer", timeout=0.2) as ctx:
        parts, _ = parts_of(ctx, 1)
        ctx.all_reduce(parts)
        bind = Launch.bind
        ctx._runner.clear()
        monkeypatch.setattr(Launch, "bind", lambda self, *given: bind(self, *given) if self.stream.device else Mock())
        ctx.all_reduce(parts)
        with pytest.raises(ExecutionError, match="never came"):
            ctx.synchronize()
        with pytest.raises(ExecutionError, match="never came"):
            ctx.all_reduce(parts)
        with pytest.raises(ExecutionError, match="never came"):
            ctx.close()
