"""How long things live: host memory that is being written, programs that were made, and contexts that fail."""

from __future__ import annotations

from contextlib import suppress
from unittest.mock import Mock

import pytest
import torch

from tests.contexts import UNEVEN, context, little_room  # noqa: F401
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec import HOST
from tpplan.exec.backends import engine
from tpplan.exec.backends.cpu import VirtualDevices
from tpplan.exec.calls import resolve
from tpplan.exec.context import TPContext

SEEDS = range(12)


@pytest.fixture(params=SEEDS)
def ctx(request: pytest.FixtureRequest) -> TPContext:
    """A context on devices that take the worst order."""
    return context(UNEVEN, "events", request.param)


def test_a_second_gather_into_the_same_memory_comes_second(ctx: TPContext) -> None:
    """Also where the memory is only partly the same, and nobody has waited for the first."""
    first, second, host = torch.randn(3, 40), torch.randn(3, 70), torch.zeros(3, 70)
    parts = ctx.scatter(first, Axis.RESIDUAL), ctx.scatter(second, Axis.INTERMEDIATE)
    ctx.gather(parts[0], Axis.RESIDUAL, out=host[:, :40])
    assert torch.equal(ctx.gather(parts[1], Axis.INTERMEDIATE, out=host).tensor, second)
    ctx.synchronize()
    assert torch.equal(host, second)


@pytest.mark.parametrize("name", ["broadcast", "scatter"])
def test_what_a_gather_writes_is_read_when_it_is_there(ctx: TPContext, name: str) -> None:
    """An operation from host memory waits for a gather into it."""
    x, host = torch.randn(3, 40), torch.zeros(3, 40)
    ctx.gather(ctx.scatter(x, Axis.RESIDUAL), Axis.RESIDUAL, out=host)
    results = getattr(ctx, name)(host, Axis.RESIDUAL, source=HOST)
    ctx.synchronize()
    slices = [x[:, s.start : s.end] if name == "scatter" else x for s in ctx.split(Axis.RESIDUAL)]
    assert all(torch.equal(result, part) for result, part in zip(results, slices, strict=True))


def test_host_buffers_wait_for_gathers(ctx: TPContext) -> None:
    """What is copied into a buffer is not overwritten by a gather from before."""
    x, later = torch.randn(3, 40).bfloat16(), torch.randn(3, 40).bfloat16()
    ctx.gather(ctx.scatter(x, Axis.RESIDUAL), Axis.RESIDUAL, out=ctx.get_pinned(0, 3, 40))
    view = ctx.copy_pinned(0, later)
    ctx.synchronize()
    assert torch.equal(view, later)


def test_an_unwanted_result_is_kept_until_it_is_written() -> None:
    """Host memory of a gather whose handle was dropped is nobody else's before the copies are done."""
    ctx = context(UNEVEN, "events", 1)
    parts = ctx.scatter(torch.randn(3, 40), Axis.RESIDUAL)
    kept = []
    for _ in range(3):
        ctx.gather(parts, Axis.RESIDUAL)
        kept.append([tensor.data_ptr() for tensor, _ in ctx._inflight._writes])
    assert [len(each) for each in kept] == [1, 2, 3]
    ctx.synchronize()
    ctx.gather(parts, Axis.RESIDUAL)
    assert len(ctx._inflight._writes) == 1


def test_widths_that_never_come_again_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls and programs are forgotten, the oldest first, and made again where they come back."""
    monkeypatch.setattr(engine, "_KEPT", 4)
    monkeypatch.setattr(resolve, "_KEPT", 4)
    ctx = context(UNEVEN, "peer", None)
    for turn in range(2):
        for columns in range(1, 10):
            for rows in range(1, 8):
                x = torch.randn(rows, columns)
                assert all(torch.equal(y, x) for y in ctx.broadcast(x)), (turn, rows, columns)
    assert len(ctx._engine._programs) <= 4
    assert ctx._runner._resolvers[False, False]._broadcasts.cache_info().currsize <= 4


def test_a_close_from_inside_an_operation_is_refused() -> None:
    """A signal handler that closes the context gets an error, where it would wait for itself; later it may."""
    ctx = context(UNEVEN, "peer", None)
    with ctx._guard:
        with pytest.raises(ExecutionError, match="this thread is in an operation"):
            ctx.close()
        with pytest.raises(ExecutionError, match="this thread is in an operation"):
            ctx.synchronize()
    ctx.close()


def test_a_context_that_fails_to_be_made_closes_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or others would take it for one that works on the same GPUs."""
    closed = []
    monkeypatch.setattr(VirtualDevices, "close", lambda _: closed.append(True))
    monkeypatch.setattr(TPContext, "__init__", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        context(UNEVEN, "peer", None)
    assert closed == [True]


def test_a_close_that_fails_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that do not answer any more take neither arenas nor host memory with them."""
    ctx = context(UNEVEN, "peer", None)

    def fail() -> None:
        raise ExecutionError("a device waited for a message that never came")

    monkeypatch.setattr(ctx._engine.backend, "synchronize", fail)
    with pytest.raises(ExecutionError, match="never came"):
        ctx.close()
    assert all(device.arena._block is None for device in ctx.devices.values())
    assert ctx._host._arena._block is None
    ctx.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_close_waits_before_anything_is_released(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """What was issued last, such as a decode step ahead of its text, may still read and write; a failure does not."""
    ctx, calls = context(UNEVEN, "peer", None), list[str]()

    def note(owner: object, name: str, what: str) -> None:
        original = getattr(owner, name)

        def noted() -> None:
            calls.append(what)
            original()

        monkeypatch.setattr(owner, name, noted)

    note(ctx._engine.backend, "synchronize", "wait")
    note(ctx._engine.backend, "close", "backend")
    note(ctx._host, "close", "host")
    for device in ctx.devices.values():
        note(device, "close", "device")
    with suppress(KeyboardInterrupt), ctx:
        ctx.broadcast(torch.ones(2, 8))
        if fails:
            raise KeyboardInterrupt
    assert calls == ["wait", "backend", "host", *["device"] * len(ctx.devices)]
