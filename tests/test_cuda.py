"""CUDA devices: what virtual ones do, on real GPUs, with streams, graphs and deadlines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

import tpplan
from tpplan import exec as tpx
from tpplan.errors import ExecutionError
from tpplan.exec import exchanges
from tpplan.exec.launch import Launch
from tpplan.exec.lower import TRANSPORTS
from tpplan.exec.selftest import selftest

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = Path(__file__).parent.parent / "examples" / "models" / "Llama-3.1-8B" / "config.json"
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def _plan(devices: int) -> tpplan.SplitPlan:
    """An uneven plan for the first GPUs."""
    sizes = ",".join(f"{size}GiB" for size in (40, 20, 30, 25)[:devices])
    return tpplan.plan(tpplan.read_model(MODEL), tpplan.parse_devices(sizes), cache=tpplan.Cache(tokens=4096))


@pytest.fixture(params=TRANSPORTS)
def ctx(request: pytest.FixtureRequest) -> Iterator[tpx.TPContext]:
    """A context on two GPUs, by every transport."""
    if GPUS < 2:
        pytest.skip(f"needs 2 GPUs, found {GPUS}")
    with tpx.compile(_plan(2), backend="cuda", devices=[0, 1], transport=request.param) as context:
        yield context


@pytest.mark.gpu
def test_one_gpu_passes_the_selftest() -> None:
    """All operations of a plan for a single device are right on it."""
    if not GPUS:
        pytest.skip("needs a GPU, found none")
    plan = _plan(1)
    report = selftest(plan, lambda way: tpx.compile(plan, backend="cuda", devices=[0], transport=way), TRANSPORTS)
    assert report.ok, report.faults


@pytest.mark.multi_gpu
@pytest.mark.parametrize("count", [2, 3, 4])
def test_several_gpus_pass_the_selftest(count: int) -> None:
    """All operations by all transports are right to the byte."""
    if count > GPUS:
        pytest.skip(f"needs {count} GPUs, found {GPUS}")
    plan = _plan(count)
    places = list(range(count))
    report = selftest(plan, lambda way: tpx.compile(plan, backend="cuda", devices=places, transport=way), TRANSPORTS)
    assert report.ok, report.faults


def _parts(ctx: tpx.TPContext, rows: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Parts on every device, and their sum."""
    parts = [torch.randn(rows, 4096).bfloat16() for _ in ctx.all_devices]
    total = sum((part.float() for part in parts[1:]), parts[0].float())
    return [part.to(ctx.devices[d].device) for d, part in zip(ctx.all_devices, parts, strict=True)], total.bfloat16()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("rows", [1, 512])
def test_callers_streams_are_waited_for_and_stay_current(ctx: tpx.TPContext, rows: int) -> None:
    """Work on streams of the caller's own is in order with operations, also when the streams change in between."""
    for turn in range(6):
        parts, total = _parts(ctx, rows)
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
@pytest.mark.parametrize("rows", [1, 512])
def test_what_is_called_often_stays_right(ctx: tpx.TPContext, rows: int) -> None:
    """When its kernels have become graphs too, on whatever streams, and where it is captured all the same."""
    places = [ctx.devices[d].device for d in ctx.all_devices]
    parts, out = ([torch.empty(rows, 4096, device=p).bfloat16() for p in places] for _ in range(2))
    own = [torch.cuda.Stream(p) for p in places]  # type: ignore[no-untyped-call]
    default = [torch.cuda.default_stream(p) for p in places]
    for turn in range(60):
        fresh, total = _parts(ctx, rows)
        first, second = default if turn % 3 else own
        with torch.cuda.stream(first), torch.cuda.stream(second):
            for part, contents in zip(parts, fresh, strict=True):
                part.copy_(contents)
            if turn == 40:
                with ctx.capture() as graph:
                    ctx.all_reduce(parts, out=out)
            if turn > 40 and turn % 2:
                graph.replay()
            else:
                ctx.all_reduce(parts, out=out)
            found = [each.cpu() for each in out]
        assert all(torch.equal(each, total) for each in found), turn


@pytest.mark.multi_gpu
def test_a_graph_does_what_calls_do(ctx: tpx.TPContext) -> None:
    """Operations and torch work on all devices replay with new inputs, in any order with calls and other graphs."""
    weights = [torch.randn(4096, 4096, device=ctx.devices[d].device).bfloat16() / 64 for d in ctx.all_devices]
    x = torch.randn(2, 4096, device=ctx.devices[0].device).bfloat16()

    def step() -> tuple[torch.Tensor, ...]:
        copies = ctx.broadcast(x)
        return ctx.all_reduce([torch.relu(copy) @ weight for copy, weight in zip(copies, weights, strict=True)], copies)

    step()
    graphs, kept = [], []
    for _ in range(2):
        with ctx.capture() as graph:
            kept.append(step())
        graphs.append(graph)
    for turn in (0, 0, 1, 0, 1, 1):
        x.normal_()
        graphs[turn].replay()
        expected = step()
        for got, wanted in zip(kept[turn], expected, strict=True):
            assert torch.equal(got.cpu(), wanted.cpu())


@pytest.mark.multi_gpu
def test_large_moves_are_right_in_graphs(ctx: tpx.TPContext) -> None:
    """Where they go another way than called, too, and had been called often."""
    x = torch.empty(512, 4096, device=ctx.devices[0].device).bfloat16()
    for _ in range(20):
        ctx.broadcast(x)
        ctx.scatter(x, "residual")
    with ctx.capture() as graph:
        kept = *ctx.broadcast(x), *ctx.scatter(x, "residual")
    for _ in range(2):
        x.normal_()
        graph.replay()
        for got, wanted in zip(kept, (*ctx.broadcast(x), *ctx.scatter(x, "residual")), strict=True):
            assert torch.equal(got.cpu(), wanted.cpu())


@pytest.mark.multi_gpu
def test_the_memory_of_a_graph_stays(ctx: tpx.TPContext) -> None:
    """What a graph works with between its operations is kept on all devices, whatever torch gives back elsewhere."""
    parts = [torch.randn(1024, 4096, device=ctx.devices[d].device).bfloat16() for d in ctx.all_devices]

    def step() -> tuple[torch.Tensor, ...]:
        return tuple(x * 2 for x in ctx.all_reduce([torch.relu(part) + 1 for part in parts]))

    step()
    with ctx.capture() as graph:
        kept = step()
    for _ in range(3):
        torch.cuda.empty_cache()
        other = [torch.full((2**28,), 7, dtype=torch.uint8, device=part.device) for part in parts]
        for part in parts:
            part.normal_()
        graph.replay()
        for got, wanted in zip(kept, step(), strict=True):
            assert torch.equal(got.cpu(), wanted.cpu())
        assert all(bool((x == 7).all()) for x in other)


@pytest.mark.multi_gpu
def test_graphs_beside_each_other_share_their_memory(ctx: tpx.TPContext) -> None:
    """Several take no more than one, also on devices that no graph begins on, and each makes what it should."""
    parts = [torch.randn(2048, 4096, device=ctx.devices[d].device).bfloat16() for d in ctx.all_devices]
    found = [torch.empty_like(part) for part in parts]

    def step(factor: float) -> None:
        for to, x in zip(found, ctx.all_reduce([torch.relu(part) * factor for part in parts]), strict=True):
            to.copy_(x)

    step(1)
    with ctx.capture() as graph:
        step(1)
    graphs, taken = [graph], [torch.cuda.memory_reserved(x.device) for x in parts]
    for factor in (2, 3, 4):
        with graphs[-1].beside() as graph:
            step(factor)
        graphs.append(graph)
    assert all(torch.cuda.memory_reserved(x.device) <= size for x, size in zip(parts, taken, strict=True))
    for turn in (3, 0, 2, 1, 1, 3):
        graphs[turn].replay()
        got = [x.cpu() for x in found]
        step(turn + 1)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(got, found, strict=True))
    with pytest.raises(ExecutionError, match="nothing was captured"):
        ctx.capture().beside()


@pytest.mark.multi_gpu
def test_a_gather_may_be_waited_for_after_a_capture(ctx: tpx.TPContext) -> None:
    """What is captured meanwhile does not change what the handle waits for."""
    x = torch.randn(2048, 4096, device=ctx.devices[0].device).bfloat16()
    parts = ctx.scatter(x, "residual")
    for operation in (ctx.broadcast, lambda x: ctx.scatter(x, "residual")):
        operation(x)
        handle = ctx.gather(parts, "residual")
        with ctx.capture() as graph:
            operation(x)
        graph.replay()
        assert torch.equal(handle.tensor, x.cpu())


@pytest.mark.multi_gpu
def test_replays_follow_calls_on_other_streams(ctx: tpx.TPContext) -> None:
    """What was called from streams that are not current any more is done before a replay begins."""
    parts, total = _parts(ctx, 2)
    late = [torch.zeros_like(part) for part in parts]
    ctx.all_reduce(parts)
    with ctx.capture() as graph:
        kept = ctx.all_reduce(parts)
    for _ in range(5):
        streams = [torch.cuda.Stream(part.device) for part in parts]  # type: ignore[no-untyped-call]
        with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
            for target, part in zip(late, parts, strict=True):
                torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
                target.copy_(part)
            results = ctx.all_reduce(late)
        graph.replay()
        ctx.synchronize()
        for found in (*results, *kept):
            torch.cuda.synchronize(found.device)
            assert torch.equal(found.cpu(), total)


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
    parts, _ = _parts(ctx, 2)
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
def test_what_was_never_run_is_not_captured(ctx: tpx.TPContext) -> None:
    """A graph cannot compile or allocate; the error says what to do, and the context still works."""
    parts, total = _parts(ctx, 3)
    if "slots" not in str(ctx.explain()):
        pytest.skip("nothing has to be prepared for this transport")
    with pytest.raises(ExecutionError, match="run everything once"), ctx.capture():
        ctx.all_reduce(parts)
    assert all(torch.equal(result.cpu(), total) for result in ctx.all_reduce(parts))


@pytest.mark.multi_gpu
def test_what_the_host_does_is_not_captured(ctx: tpx.TPContext) -> None:
    """A gather, or an operation on host memory, would happen once and never again; it is refused, and works after."""
    x = torch.randn(3, 4096).bfloat16()
    parts = ctx.scatter(x, "residual")
    for operation in (lambda: ctx.gather(parts, "residual"), lambda: ctx.broadcast(x)):
        operation()
        with pytest.raises(ExecutionError, match="the host takes part"), ctx.capture():
            operation()
    assert torch.equal(ctx.gather(parts, "residual").tensor, x)


@pytest.mark.multi_gpu
def test_a_device_that_never_comes_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that waits in vain gives up at its deadline, and the context says so from then on."""
    if GPUS < 2:
        pytest.skip(f"needs 2 GPUs, found {GPUS}")
    monkeypatch.setattr(exchanges, "_DEADLINE", 200_000_000)
    with tpx.compile(_plan(2), backend="cuda", devices=[0, 1], transport="peer") as ctx:
        parts, _ = _parts(ctx, 1)
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
