"""Operations beside other work, on real GPUs."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from tests.exec.cuda.cuda_cases import GPUS, ctx, parts_of, plan_for
from tpplan import exec as tpx
from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ctx"]  # a fixture

sleep: Callable[[int], None] = torch.cuda._sleep

#: Cycles that take a GPU some 25 milliseconds.
_LONG = 50_000_000


@pytest.mark.multi_gpu
@pytest.mark.parametrize("rows", [1, 40, 512])
def test_the_current_streams_do_not_wait_until_they_are_told_to(ctx: tpx.TPContext, rows: int) -> None:
    """The block begins behind what they hold, and what they get next runs beside it."""
    places = [ctx.devices[d].device for d in ctx.all_devices]
    parts, total = parts_of(ctx, rows)
    written, sums = ([torch.zeros_like(part) for part in parts] for _ in range(2))
    with ctx.aside() as aside:  # what is new to the context takes the host some time
        ctx.all_reduce(written, out=sums)
    aside.wait()
    for to, part in zip(written, parts, strict=True):
        torch.cuda.synchronize(to.device)
        with torch.cuda.device(to.device):
            sleep(_LONG)
        to.copy_(part)
    with ctx.aside() as aside:
        for place in places:
            with torch.cuda.device(place):
                sleep(_LONG)
        ctx.all_reduce(written, out=sums)
        late = [torch.cuda.current_stream(place).record_event() for place in places]
    soon = [torch.cuda.current_stream(place).record_event() for place in places]
    for event in soon:
        event.synchronize()
    assert not any(event.query() for event in late)
    aside.wait()
    for event, found in zip(late, sums, strict=True):
        assert torch.equal(found.cpu(), total)  # behind the block, by the current stream
        assert event.query()


class Halves:
    """Two pieces of work that take turns: each is halved while the other one is added up over all devices."""

    def __init__(self, ctx: tpx.TPContext) -> None:
        self._ctx = ctx
        self._places = [ctx.devices[d].device for d in ctx.all_devices]
        self.halves = [
            [torch.empty(rows, 4096, dtype=torch.bfloat16, device=place) for place in self._places]
            for rows in (16, 640)  # one through slots
        ]

    def fill(self) -> list[torch.Tensor]:
        """Take new contents, and return what each half has on every device after any number of turns of two."""
        found = []
        for half in self.halves:
            parts, _ = parts_of(self._ctx, len(half[0]))
            for x, part in zip(half, parts, strict=True):
                x.copy_(part)
            found.append(sum((part.cpu().float() for part in parts[1:]), parts[0].cpu().float()).mul(0.5).bfloat16())
        return found

    def step(self, delays: list[int]) -> None:
        """Let them take turns, with so many cycles before each multiplication on each device."""
        adding: list[tpx.Aside | None] = [None, None]
        for _ in range(6):
            for i, half in enumerate(self.halves):
                if before := adding[i]:
                    before.wait()
                for x, delay in zip(half, delays, strict=True):
                    with torch.cuda.device(x.device):
                        sleep(delay)
                    x.mul_(0.5)
                with self._ctx.aside() as adding[i]:
                    self._ctx.all_reduce(half, out=half)
        for each in adding:
            if each:
                each.wait()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("captured", [False, True])
def test_two_halves_take_turns(ctx: tpx.TPContext, captured: bool) -> None:
    """With delays anywhere, called and in graphs."""
    random, work = Random(3), Halves(ctx)
    delays = [[random.choice([0, 0, 200_000]) for _ in ctx.all_devices] for _ in range(5)]
    work.fill()
    work.step([0] * len(ctx.all_devices))
    graph = None
    if captured:
        with ctx.capture() as graph:
            work.step(delays[0])
    for each in delays:
        expected = work.fill()
        if graph:
            graph.replay()
        else:
            work.step(each)
        for half, right in zip(work.halves, expected, strict=True):
            assert all(torch.equal(x.cpu(), right) for x in half)


@pytest.mark.multi_gpu
def test_an_error_leaves_streams_as_they_were(ctx: tpx.TPContext) -> None:
    """And the context works on."""
    places = [ctx.devices[d].device for d in ctx.all_devices]
    before = torch.cuda.current_device(), [torch.cuda.current_stream(place) for place in places]
    with pytest.raises(ExecutionError, match="rows"), ctx.aside():
        ctx.broadcast(torch.empty(ctx.max_rows + 1, 4096, device=places[0]))
    assert (torch.cuda.current_device(), [torch.cuda.current_stream(place) for place in places]) == before
    parts, total = parts_of(ctx, 3)
    assert all(torch.equal(found.cpu(), total) for found in ctx.all_reduce(parts))


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_a_single_gpu_has_a_second_stream_too() -> None:
    """Results are there behind wait()."""
    with tpx.compile(plan_for(1), backend="cuda", devices=[0]) as ctx:
        x = torch.randn(64, 4096, device="cuda:0").bfloat16()
        out = [torch.zeros_like(x)]
        torch.cuda.synchronize()
        with ctx.aside() as aside:
            sleep(_LONG)
            ctx.broadcast(x, out=out)
        aside.wait()
        assert torch.equal(out[0], x)
