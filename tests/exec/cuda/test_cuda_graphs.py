"""Graphs of what a context does, on real GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.exec.cuda.cuda_cases import GPUS, ctx, parts_of, plan_for
from tpplan import exec as tpx
from tpplan.errors import ExecutionError

__all__ = ["ctx"]  # a fixture


@pytest.mark.multi_gpu
@pytest.mark.parametrize("rows", [1, 512])
def test_what_is_called_often_stays_right(ctx: tpx.TPContext, rows: int) -> None:
    """When its kernels have become graphs too, on whatever streams, and where it is captured all the same."""
    places = [ctx.devices[d].device for d in ctx.all_devices]
    parts, out = ([torch.empty(rows, 4096, device=p).bfloat16() for p in places] for _ in range(2))
    own = [torch.cuda.Stream(p) for p in places]  # type: ignore[no-untyped-call]
    default = [torch.cuda.default_stream(p) for p in places]
    for turn in range(60):
        fresh, total = parts_of(ctx, rows)
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
@pytest.mark.parametrize("rows", [512, 2048])
def test_what_is_large_is_right_in_graphs(ctx: tpx.TPContext, rows: int) -> None:
    """Where it goes another way than called, too, and had been called often; or in more parts than rings have slots."""
    x = torch.empty(rows, 4096, device=ctx.devices[0].device).bfloat16()

    def step() -> tuple[torch.Tensor, ...]:
        copies, slices = ctx.broadcast(x), ctx.scatter(x, "residual")
        return *copies, *slices, *ctx.allgather(slices, "residual"), *ctx.all_reduce(copies)

    for _ in range(20):
        step()
    with ctx.capture() as graph:
        kept = step()
    for _ in range(2):
        x.normal_()
        graph.replay()
        whole = x.cpu()
        for found in (kept, step()):
            copies, slices, gathered, sums = (found[i : i + 2] for i in range(0, 8, 2))
            assert all(torch.equal(each.cpu(), whole) for each in (*copies, *gathered))
            assert torch.equal(torch.cat([each.cpu() for each in slices], 1), whole)
            assert all(torch.equal(each.cpu(), whole * 2) for each in sums)


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
    parts, total = parts_of(ctx, 2)
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
def test_what_was_never_run_is_not_captured(ctx: tpx.TPContext) -> None:
    """A graph cannot compile or allocate; the error says what to do, and the context still works."""
    parts, total = parts_of(ctx, 3)
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
@pytest.mark.parametrize("current", [0, 1])
def test_a_capture_of_one_device_is_refused(ctx: tpx.TPContext, current: int) -> None:
    """By whoever made it, and whichever device is current; nothing is issued, and calls go on."""
    (parts, total), out = parts_of(ctx, 2), parts_of(ctx, 2)[0]
    ctx.all_reduce(parts, out=out)
    own, graph = torch.cuda.Stream(parts[0].device), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=own, capture_error_mode="relaxed"):
        parts[0].add_(0)
        with torch.cuda.device(current), pytest.raises(ExecutionError, match="cuda:0 is being captured, but not by"):
            ctx.all_reduce(parts, out=out)
    for part in out:
        part.zero_()
    graph.replay()
    ctx.all_reduce(parts, out=out)
    assert all(torch.equal(result.cpu(), total) for result in out)


@pytest.mark.gpu
def test_a_single_gpu_is_captured_by_torch_too() -> None:
    """A server's whole step, after calls from other streams; replays and calls follow each other in any order."""
    if not GPUS:
        pytest.skip("needs a GPU, found none")
    with tpx.compile(plan_for(1), backend="cuda", devices=[0]) as context:
        (x,), _ = parts_of(context, 3)

        def step() -> torch.Tensor:
            (copy,) = context.broadcast(x)
            return context.all_reduce([torch.relu(copy)], [copy])[0]

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(0), torch.cuda.graph(graph):
            kept = step()
        for _ in range(3):
            x.normal_()
            graph.replay()
            assert torch.equal(kept, step())
