"""What one of several processes has for its own devices only, and that it sends nothing after a failure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

from tests.contexts import UNEVEN, context, little_room
from tests.exec.cluster.threads import OWN, Together, gathered
from tests.exec.operand_cases import ROPE, RS
from tests.exec.reference import same
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError, RequestError
from tpplan.exec import HOST

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tpplan.exec import TPContext

__all__ = ["little_room"]  # a fixture

LOST = "another process has gone"


def test_a_context_has_the_slices_and_the_memory_of_its_own_devices() -> None:
    """Cuts, scratch and tables of a process are a selection of those of all devices; unknown axes are none's."""
    axes = [None, *(split.axis for split in UNEVEN.splits)]
    with context(UNEVEN, "events") as alone, Together(UNEVEN, OWN) as together:
        for ctx, own in zip(together.contexts, OWN, strict=True):
            assert tuple(ctx.devices) == own
            assert ctx.all_devices == alone.all_devices == (0, 2, 3)
            for axis in axes:
                assert ctx.devices_of(axis) == tuple(d for d in alone.devices_of(axis) if d in own)
                if axis:
                    assert ctx.split(axis) == tuple(s for s in alone.split(axis) if s.device in own)
                    widths = [s.end - s.start for s in ctx.split(axis)]
                    assert [x.shape for x in ctx.scratch(2, axis)] == [(2, width) for width in widths]
                    assert all(x.shape == (1, alone.split(axis)[-1].end) for x in ctx.scratch(1, axis, full=True))
                    ctx.begin_scratch()
            sizes = {d: device.arena.free_bytes for d, device in alone.devices.items() if d in own}
            ctx.reserve_scratch(sizes)
            tables = [
                alone.devices[d].rope_tables(ROPE, 16, alone.dtype) for d in alone.devices_of(Axis.KV_HEADS) if d in own
            ]
            found = ctx.rope_tables(ROPE)
            assert len(found) == len(tables)
            assert all(same(x, y) for f, t in zip(found, tables, strict=True) for x, y in zip(f, t, strict=True))
            assert ctx.channel(8) is None
            assert [way.operation for way in ctx.explain().ways] == [way.operation for way in alone.explain().ways]
            with pytest.raises(RequestError):
                ctx.split(Axis.EXPERT_INTERMEDIATE)


def test_a_context_that_owns_everything_finds_the_source() -> None:
    """Where one process owns all devices, ``source`` may be left out as without any processes."""
    with Together(UNEVEN, ((0, 2, 3),)) as together:
        x = torch.randn(2, 40)
        (results,) = together.run(lambda ctx: ctx.broadcast(x))
        assert all(same(y, x) for y in results)
        assert together.mail.count == 0


def failed(together: Together, process: int, fault: BaseException) -> list[BaseException | bool]:
    """Let a call fail in a process as it is about to send, and return what all get."""
    assert together.run(gathered) == [True] * len(together.contexts)
    together.carriers[process].fault = fault
    outcomes = together.outcomes(gathered)
    together.carriers[process].fault = None
    return outcomes


@pytest.mark.parametrize("process", [0, 1])
def test_after_a_failure_nothing_is_sent_any_more(process: int) -> None:
    """What failed is said by every later call, in the process where it failed and in those that waited for it."""
    with Together(UNEVEN, OWN) as together:
        outcomes = failed(together, process, RuntimeError("the cable is out\nat frame 1\nat frame 2"))
        before = together.mail.count
        again = together.outcomes(gathered)
        assert together.mail.count == before
        empty = torch.empty(0, 40)
        assert all(len(ctx.broadcast(empty, source=HOST)) == len(ctx.devices) for ctx in together.contexts)
        for ctx in together.contexts:
            ctx.begin_scratch()
            ctx.synchronize()
    for i, (first, second) in enumerate(zip(outcomes, again, strict=True)):
        assert isinstance(first, ExecutionError)
        reason = "the cable is out" if i == process else LOST
        assert re.fullmatch(f"process {i} failed in gather .* of 2 rows of float32: {reason}", first.message)
        assert "call the same operations in the same order with the same shapes" in first.hint
        assert isinstance(first.__cause__, RuntimeError)
        assert isinstance(second, ExecutionError)
        assert second.message == f"the processes no longer agree: {first.message}"
        assert second.hint == "close the context in all processes, and compile the plan again"


def test_ctrl_c_is_passed_on_and_is_a_failure() -> None:
    """An interrupted call may have been done by the other processes: the context is not used again."""
    with Together(UNEVEN, OWN) as together:
        first, _ = failed(together, 0, KeyboardInterrupt())
        assert isinstance(first, KeyboardInterrupt)
        with pytest.raises(ExecutionError, match=r"no longer agree: process 0 was interrupted in gather .*: Key"):
            gathered(together.contexts[0])


def test_a_closed_context_sends_nothing() -> None:
    """Closing works twice, and after a failure; calls after it are refused, and cuts still known."""
    with Together(UNEVEN, OWN) as together:
        failed(together, 1, RuntimeError("out"))
        for ctx in together.contexts:
            before = together.mail.count
            ctx.close()
            ctx.close()
            for call in (gathered, lambda ctx: ctx.scratch(1, RS), lambda ctx: ctx.reserve_scratch({2: 1})):
                with pytest.raises(ExecutionError, match="the context is closed"):
                    call(ctx)
            assert ctx.devices_of(RS)
            assert repr(ctx) == "<TPContext Tiny, closed>"
            assert together.mail.count == before


@pytest.mark.parametrize(
    "call",
    [
        lambda ctx, x: ctx.broadcast(x.view(torch.float32), source=0),
        lambda ctx, x: ctx.broadcast(x.view(2, 80), source=0),
        lambda ctx, x: ctx.broadcast(x, RS, source=3),
        lambda ctx, x: ctx.scatter(x, RS, source=0),
        lambda ctx, x: ctx.all_reduce([x, x]),
    ],
    ids=["dtype", "shape", "source", "operation", "sum"],
)
def test_messages_of_other_calls_are_not_taken(call: Callable[[TPContext, Tensor], object]) -> None:
    """Where processes disagree on what they do, they wait in vain for each other: no result is made of wrong bytes."""
    with Together(UNEVEN, OWN) as together:
        together.mail.timeout_s = 0.1
        out = torch.ones(4, 40, dtype=torch.bfloat16)

        def differ(ctx: TPContext) -> object:
            if 2 in ctx.devices:
                return ctx.broadcast(torch.empty(4, 40, dtype=torch.bfloat16, device="meta"), source=0, out=[out])
            return call(ctx, torch.zeros(4, 40, dtype=torch.bfloat16))

        outcomes = together.outcomes(differ)
        assert all(isinstance(each, ExecutionError) and " failed in " in each.message for each in outcomes[1:])
        assert (out == 1).all()
