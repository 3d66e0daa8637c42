"""Gathers by kernels, on real GPUs: right to the byte into any memory, beside graphs, and in time or not."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from tests.exec.cuda.cuda_cases import GPUS, parts_of, plan_for
from tpplan import exec as tpx
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec.tuning import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.multi_gpu

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
#: Where the whole is to go: new memory, pinned or not, within wider rows, and the context's own.
TARGETS = ("new", "pinned", "pageable", "wide", "buffer")


@pytest.fixture(params=[2, 4])
def ctx(request: pytest.FixtureRequest) -> Iterator[tpx.TPContext]:
    """A context on several GPUs that gathers everything by kernels."""
    count = request.param
    if count > GPUS:
        pytest.skip(f"needs {count} GPUs, found {GPUS}")
    tuning = tpx.Tuning(gathers_bytes=64 * MIB)
    with tpx.compile(plan_for(count), backend="cuda", devices=[*range(count)], tuning=tuning) as context:
        yield context


def _target(ctx: tpx.TPContext, kind: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return what a gather is to write to."""
    if kind == "new":
        return None
    if kind == "buffer":
        return ctx.get_pinned(0, rows, columns, dtype=dtype)
    if kind == "wide":
        return torch.empty(rows, columns + 7, dtype=dtype, pin_memory=True)[:, 3 : 3 + columns]
    return torch.empty(rows, columns, dtype=dtype, pin_memory=kind == "pinned")


def _parts(
    ctx: tpx.TPContext, whole: torch.Tensor, dim: int, skips: tuple[int, int], streams: list[torch.cuda.Stream]
) -> list[torch.Tensor]:
    """Write each device's columns, within wider rows, late on its stream."""
    parts = []
    for part, stream in zip(ctx.split(Axis.RESIDUAL), streams, strict=True):
        cut = whole[:, part.start * dim : part.end * dim]
        torch.cuda.synchronize(stream.device)
        with torch.cuda.stream(stream):  # whose memory it is: another stream would have it again while this one is late
            held = torch.zeros(len(cut), cut.shape[1] + sum(skips), dtype=whole.dtype, device=stream.device)
            columns = held[:, skips[0] : skips[0] + cut.shape[1]]
            source = cut.contiguous().to(stream.device)
            torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
            columns.copy_(source)
        parts.append(columns)
    return parts


@pytest.mark.parametrize("seed", range(4))
def test_any_gather_is_right(seed: int, ctx: tpx.TPContext) -> None:
    """Of what the callers' streams hold by then, which may overwrite it right away; in any order of waits."""
    random, pending = Random(seed), []
    devices = [ctx.devices[part.device].device for part in ctx.split(Axis.RESIDUAL)]
    side = [torch.cuda.Stream(device) for device in devices]  # type: ignore[no-untyped-call]
    for _ in range(40):
        rows, dim, dtype = random.choice([1, 2, 7, 33, 200]), random.choice([1, 2, 3]), random.choice(DTYPES)
        columns = ctx.split(Axis.RESIDUAL)[-1].end * dim
        whole = torch.randint(0, 255, (rows, columns * dtype.itemsize), dtype=torch.uint8).view(dtype)
        streams = random.choice([side, [torch.cuda.current_stream(device) for device in devices]])
        skips = random.choice([(0, 0), (1, 0), (3, 5), (8, 8)])
        kind = random.choice(TARGETS)
        out = _target(ctx, kind, rows, columns, dtype)
        with ExitStack() as stack:
            parts = _parts(ctx, whole, dim, skips, streams)
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            handle = ctx.gather(parts, Axis.RESIDUAL, dim=dim, out=out)
            for part, stream in zip(parts, streams, strict=True):
                with torch.cuda.stream(stream):
                    part.zero_()
        pending.append((handle, whole))
        while len(pending) > (0 if kind == "buffer" else random.choice([0, 1, 5])):
            found, wanted = pending.pop(random.randrange(len(pending)))
            assert torch.equal(found.result(20.0).view(torch.uint8), wanted.view(torch.uint8))
    assert all(torch.equal(found.tensor.view(torch.uint8), wanted.view(torch.uint8)) for found, wanted in pending)


def test_the_same_memory_has_what_is_new(ctx: tpx.TPContext) -> None:
    """Also once its launches are graphs, and where another tensor, pinned or not, comes in between."""
    cuts = ctx.split(Axis.RESIDUAL)
    parts = [torch.zeros(3, cut.end - cut.start, device=ctx.devices[cut.device].device) for cut in cuts]
    wholes = [torch.zeros(3, cuts[-1].end, pin_memory=True), torch.zeros(3, cuts[-1].end)]
    for i in range(100):
        for j, part in enumerate(parts):
            part.fill_(i + 1000 * j)
        found = ctx.gather(parts, Axis.RESIDUAL, out=wholes[i % 10 == 5]).tensor
        wanted = [torch.full((3, cut.end - cut.start), i + 1000.0 * j) for j, cut in enumerate(cuts)]
        assert torch.equal(found, torch.cat(wanted, dim=1))


def test_a_gather_comes_after_a_replay(ctx: tpx.TPContext) -> None:
    """Of what a graph of the context has added up, and before the next replay overwrites it."""
    parts, _ = parts_of(ctx, 2)
    sums = [torch.empty_like(part) for part in parts]
    ctx.all_reduce(parts, out=sums)
    cuts = ctx.split(Axis.RESIDUAL)
    mine = [sums[i][:, : cut.end - cut.start] for i, cut in enumerate(cuts)]
    ctx.gather(mine, Axis.RESIDUAL).wait()
    ctx.synchronize()
    with ctx.capture() as graph:
        ctx.all_reduce(parts, out=sums)
    whole = torch.empty(2, cuts[-1].end, dtype=torch.bfloat16, pin_memory=True)
    for i in range(30):
        for part in parts:
            part.fill_(i)
        graph.replay()
        handle = ctx.gather(mine, Axis.RESIDUAL, out=whole)
        for part in parts:
            part.fill_(-1)
        graph.replay()
        assert torch.equal(handle.tensor, torch.full_like(whole, i * len(parts)))
    with pytest.raises(ExecutionError, match="cannot be captured"), ctx.capture():
        ctx.gather(mine, Axis.RESIDUAL, out=whole)


def test_a_gather_that_takes_longer_than_its_time(ctx: tpx.TPContext) -> None:
    """It is a TimeoutError, and complete later."""
    cuts = ctx.split(Axis.RESIDUAL)
    parts = [torch.ones(1, cut.end - cut.start, device=ctx.devices[cut.device].device) for cut in cuts]
    ctx.gather(parts, Axis.RESIDUAL).wait()
    with torch.cuda.device(parts[1].device):
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
    late = ctx.gather(parts, Axis.RESIDUAL)
    with pytest.raises(TimeoutError):
        late.wait(0.01)
    assert not late.done()
    assert torch.equal(late.result(20.0), torch.ones(1, cuts[-1].end))
