"""A gather's handle, and who may use a context when: futures, threads, and what is left after a close."""

from __future__ import annotations

import asyncio
import gc
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import define
from torch.multiprocessing import reductions

from tests.contexts import ALONE, MAX_ROWS, UNEVEN, context, little_room
from tests.exec.reference import columns, same, values
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec import Gathered
from tpplan.exec.backends.cpu import VirtualDevices
from tpplan.exec.options import TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.exec.backends.cpu import Pending
    from tpplan.exec.programs.program import Buffer, Program

__all__ = ["little_room"]  # a fixture


@define
class Clock:
    """A program that takes some questions to end.

    Attributes:
        left: questions until it has ended.
        waited: the timeouts of every wait.
    """

    left: int
    waited: list[float | None]

    def done(self) -> bool:
        """Let time pass."""
        self.left -= 1
        return self.left <= 0

    def wait(self, timeout: float | None = None) -> None:
        """Take no time, if there is no limit to it."""
        self.waited.append(timeout)
        if timeout is not None and self.left > 0:
            raise TimeoutError
        self.left = 0


def test_a_handle_waits_as_long_as_it_may() -> None:
    """A result that is late is a TimeoutError and may be asked for again; afterwards nothing is waited for."""
    tensor, clock = torch.ones(2), Clock(9, [])
    handle = Gathered(tensor, clock)
    assert not handle.done()
    with pytest.raises(TimeoutError):
        handle.result(0.5)
    with pytest.raises(TimeoutError):
        handle.wait(0)
    assert "pending" in repr(handle)
    assert handle.result() is tensor
    assert handle.tensor is tensor
    assert handle.result(0.1) is tensor
    assert handle.done()
    assert "done" in repr(handle)
    assert clock.waited == [0.5, 0, None]


def test_awaiting_lets_others_work() -> None:
    """A coroutine that awaits a handle gives way between questions, and gets the tensor."""
    ticks = []

    async def count() -> None:
        for i in range(5):
            ticks.append(i)
            await asyncio.sleep(0)

    async def both() -> torch.Tensor:
        counting = asyncio.ensure_future(count())
        result = await Gathered(torch.ones(3), Clock(50, []))
        assert ticks == [0, 1, 2, 3, 4]
        await counting
        return result

    assert asyncio.run(both()).tolist() == [1, 1, 1]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rows", [1, MAX_ROWS])
def test_nothing_is_seen_before_it_is_complete(rows: int, transport: str) -> None:
    """On devices that take their time, done() is first false, and once it is true the tensor is right."""
    late = 0
    for seed in range(20):
        with context(UNEVEN, transport, seed) as ctx:
            x = values((rows,), 40, torch.bfloat16, Random(seed))
            handle = ctx.gather(columns(x, (11, 18, 11)), Axis.RESIDUAL)
            while not handle.done():
                late += 1
            assert same(handle.tensor, x)
    assert late > 20


def test_handles_complete_in_any_order() -> None:
    """Handles of one context are awaited together, waited for last first, or after the close."""
    random = Random(1)
    with context(UNEVEN, "host", 2) as ctx:
        xs = [values((rows,), 40, torch.float16, random) for rows in (1, 5, MAX_ROWS)]

        def handles() -> list[Gathered]:
            return [ctx.gather(columns(x, (11, 18, 11)), Axis.RESIDUAL) for x in xs]

        async def together() -> list[torch.Tensor]:
            return await asyncio.gather(*handles())

        assert all(same(found, x) for found, x in zip(asyncio.run(together()), xs, strict=True))
        late = handles()
        assert all(same(handle.result(9), x) for handle, x in zip(reversed(late), reversed(xs), strict=True))
        pending = handles()
        assert not all(handle.done() for handle in pending)
    assert all(handle.done() for handle in pending)
    assert all(same(handle.tensor, x) for handle, x in zip(pending, xs, strict=True))


def test_two_threads_on_two_contexts() -> None:
    """Contexts share nothing: each thread's results are right while others work on theirs."""

    def work(seed: int) -> bool:
        random = Random(seed)
        with context(UNEVEN, TRANSPORTS[seed % 3]) as ctx:
            for _ in range(100):
                x = values((random.choice((1, 3, MAX_ROWS)),), 40, torch.float32, random)
                parts = ctx.scatter(x, Axis.RESIDUAL)
                whole = ctx.allgather(parts, Axis.RESIDUAL)
                sums = ctx.all_reduce([x, x, x])
                if not all(same(y, x) for y in whole) or not all(same(y, x + x + x) for y in sums):
                    return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_two_threads_on_one_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is told so at once, the first is not disturbed; afterwards the context works for both."""
    entered, released = threading.Event(), threading.Event()
    run = VirtualDevices.run

    def slow(devices: VirtualDevices, program: Program, operands: Mapping[Buffer, torch.Tensor]) -> Pending:
        entered.set()
        assert released.wait(60)
        return run(devices, program, operands)

    monkeypatch.setattr(VirtualDevices, "run", slow)
    x = torch.randn(2, 40)
    with context(UNEVEN, "peer") as ctx, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ctx.broadcast, x)
        assert entered.wait(60)
        for call in (lambda: ctx.broadcast(x), ctx.synchronize, lambda: ctx.scratch(1, Axis.RESIDUAL)):
            with pytest.raises(ExecutionError, match="another thread is using this context"):
                call()
        closing = pool.submit(ctx.close)
        assert not closing.done()
        released.set()
        assert all(same(y, x) for y in first.result(60))
        closing.result(60)
        with pytest.raises(ExecutionError, match="closed"):
            ctx.broadcast(x)


def test_an_error_leaves_the_context_open_to_others() -> None:
    """Whoever fails inside a context does not lock it."""
    with context(UNEVEN, "peer") as ctx, ThreadPoolExecutor(1) as pool:
        with pytest.raises(ExecutionError, match="is on meta"):
            ctx.broadcast(torch.ones(1, 40, device="meta"))
        assert len(pool.submit(ctx.broadcast, torch.ones(1, 40)).result(60)) == 3


def weak_reference(tensor: torch.Tensor) -> Any:
    """Return what knows whether a tensor's memory is still there; torch's own has no types."""
    return reductions.StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def test_a_closed_context_holds_no_memory() -> None:
    """Its memory is gone with the close, also while somebody still has the context."""
    ctx = context(UNEVEN, "host")
    result, *_ = ctx.broadcast(torch.ones(MAX_ROWS, 40))
    held = [ctx.devices[0].control, ctx.devices[0].exchange, ctx.scratch(1, Axis.RESIDUAL)[0], ctx.get_pinned(0, 1)]
    storages = [weak_reference(tensor) for tensor in held]
    del held
    assert not any(storage.expired() for storage in storages)
    ctx.close()
    assert all(storage.expired() for storage in storages)
    assert (result == 1).all()
    assert "closed" in repr(ctx)


def resident_bytes() -> int:
    """Return the memory of this process that is no file's; of files, the system keeps as much as it likes."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
    return (resident - shared) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the proc file system")
def test_opening_and_closing_leaks_nothing() -> None:
    """After ten thousand contexts, of which every tenth was used, there are as many objects and bytes as before."""
    x = torch.ones(2, 16)

    def cycles(count: int) -> tuple[int, int]:
        for i in range(count):
            with context(ALONE, "events") as ctx:
                if not i % 10:
                    ctx.gather(ctx.broadcast(x), Axis.RESIDUAL).wait()
        gc.collect()
        return resident_bytes(), len(gc.get_objects())

    cycles(500)
    bytes_before, objects_before = cycles(500)
    bytes_after, objects_after = cycles(9000)
    assert objects_after <= objects_before + 20
    assert bytes_after <= bytes_before + 4 * 2**20
