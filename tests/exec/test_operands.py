"""What a context refuses: operands of other devices, dtypes, shapes and numbers, and any once it is closed."""

from __future__ import annotations

import pytest
import torch

from tests.contexts import MAX_ROWS, UNEVEN, context, little_room
from tests.exec.operand_cases import RS, Call, Tensors, assert_refused, untyped
from tests.exec.reference import same
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError, TpplanError

__all__ = ["little_room"]  # a fixture


#: For each mistake: a call, the error, and what it says.
MISTAKES: dict[str, tuple[Call, type[TpplanError], str]] = {
    "on another device": (
        lambda c, t: c.broadcast(t(2, 40, device="meta")),
        ExecutionError,
        "broadcast: x is on meta, expected one of cpu",
    ),
    "a part on another device": (
        lambda c, t: c.gather([*t.parts()[:2], t(2, 11, device="meta")], RS),
        ExecutionError,
        r"gather: parts\[2\] of device 3 is on meta, expected cpu",
    ),
    "an output on another device": (
        lambda c, t: c.scatter(t(2, 40), RS, out=[t(2, 11, device="meta"), t(2, 18), t(2, 11)]),
        ExecutionError,
        r"scatter: out\[0\] of device 0 is on meta, expected cpu",
    ),
    "from a device that is not in use": (
        lambda c, t: c.broadcast(t(2, 40), source=1),
        ExecutionError,
        "broadcast: source is 1, expected one of 0, 2, 3, -1",
    ),
    "from no device": (
        lambda c, t: c.scatter(t(2, 40), RS, source=untyped("0")),
        ExecutionError,
        "source is '0', expected",
    ),
    "parts of two dtypes": (
        lambda c, t: c.allgather([*t.parts()[:2], t(2, 11, dtype=torch.float16)], RS),
        ExecutionError,
        r"allgather: parts\[2\] of device 3 has dtype float16, expected bfloat16",
    ),
    "an output of another dtype": (
        lambda c, t: c.gather(t.parts(), RS, out=t(2, 40, dtype=torch.int16)),
        ExecutionError,
        r"gather: out\[0\] of device -1 has dtype int16, expected bfloat16",
    ),
    "a residual of another dtype": (
        lambda c, t: c.all_reduce(t.wholes(), t.wholes(dtype=torch.float32)),
        ExecutionError,
        r"all_reduce: residual\[0\] of device 0 has dtype float32, expected bfloat16",
    ),
    "16 bytes": (
        lambda c, t: c.broadcast(t(2, 40, dtype=torch.complex128)),
        ExecutionError,
        "broadcast: x has dtype complex128 of 16 bytes, which is not moved",
    ),
    "elements that torch does not copy": (
        lambda c, _: c.broadcast(torch.empty(2, 40, dtype=untyped(torch).int4)),
        ExecutionError,
        "broadcast: x has dtype int4 of 1 bytes, which is not moved",
    ),
    "a sum of integers": (
        lambda c, t: c.all_reduce(t.wholes(dtype=torch.int32)),
        ExecutionError,
        r"all_reduce: parts\[0\] has dtype int32, which is not added up",
    ),
    "a sum in float64": (
        lambda c, t: c.add_residual(t.parts(dtype=torch.float64), t.parts(dtype=torch.float64), RS),
        ExecutionError,
        r"add_residual: target\[0\] has dtype float64, which is not added up",
    ),
    "a whole of another width": (
        lambda c, t: c.scatter(t(2, 41), RS),
        ExecutionError,
        r"scatter: x has shape \[2, 41\], expected \[2, 40\]",
    ),
    "dim forgotten": (
        lambda c, t: c.scatter(t(2, 40), Axis.KV_HEADS, dim=1),
        ExecutionError,
        r"scatter: x has shape \[2, 40\], expected \[2, 5\]\nhint: .* the head size; these are 8 times as many",
    ),
    "parts in another order": (
        lambda c, t: c.gather([t(2, 18), t(2, 11), t(2, 11)], RS),
        ExecutionError,
        r"gather: parts\[0\] of device 0 has shape \[2, 18\], expected \[2, 11\]",
    ),
    "parts of different rows": (
        lambda c, t: c.gather([t(2, 11), t(3, 18), t(2, 11)], RS),
        ExecutionError,
        r"gather: parts\[1\] of device 2 has shape \[3, 18\], expected \[2, 18\]",
    ),
    "as many rows in another shape": (
        lambda c, t: c.gather([t(4, 11), t(2, 2, 18), t(4, 11)], RS),
        ExecutionError,
        r"gather: parts\[1\] of device 2 has shape \[2, 2, 18\], expected \[4, 18\]",
    ),
    "sums of different widths": (
        lambda c, t: c.all_reduce([t(2, 40), t(2, 39), t(2, 40)]),
        ExecutionError,
        r"all_reduce: parts\[1\] of device 2 has shape \[2, 39\], expected \[2, 40\]",
    ),
    "a residual that is neither slice nor whole": (
        lambda c, t: c.add_residual(t.parts(), [t(2, 11), t(2, 20), t(2, 40)], RS),
        ExecutionError,
        r"add_residual: source\[1\] of device 2 has shape \[2, 20\], expected \[2, 18\]",
    ),
    "an output of another shape": (
        lambda c, t: c.broadcast(t(2, 40), out=[t(2, 40), t(2, 40), t(40, 2)]),
        ExecutionError,
        r"broadcast: out\[2\] of device 3 has shape \[40, 2\], expected \[2, 40\]",
    ),
    "no columns": (
        lambda c, t: c.broadcast(t(2, 0)),
        ExecutionError,
        r"broadcast: x has shape \[2, 0\], which has no columns",
    ),
    "no dimensions": (lambda c, t: c.broadcast(t()), ExecutionError, r"broadcast: x has shape \[\], which has no"),
    "a sum without dimensions": (
        lambda c, t: c.all_reduce([t(), t(), t()]),
        ExecutionError,
        r"all_reduce: parts\[0\] has no dimensions",
    ),
    "a residual without dimensions": (
        lambda c, t: c.add_residual(t.parts(), [t(2, 11), t(), t(2, 11)], RS),
        ExecutionError,
        r"add_residual: source\[1\] has no dimensions",
    ),
    "too few parts": (
        lambda c, t: c.gather(t.parts()[:2], RS),
        ExecutionError,
        "gather: parts: 2 tensors, expected one for each of the devices 0, 2, 3",
    ),
    "a part for an idle device": (
        lambda c, t: c.all_reduce(t.wholes(count=4)),
        ExecutionError,
        "all_reduce: parts: 4 tensors, expected one for each of the devices 0, 2, 3",
    ),
    "parts for devices without heads": (
        lambda c, t: c.all_reduce(t.wholes(), axis=Axis.KV_HEADS),
        ExecutionError,
        "all_reduce: parts: 3 tensors, expected one for each of the devices 0, 3",
    ),
    "too few residuals": (
        lambda c, t: c.all_reduce(t.wholes(count=2), t.wholes(count=2), axis=Axis.KV_HEADS),
        ExecutionError,
        "all_reduce: residual: 2 tensors, expected one for each of the devices 0, 2, 3",
    ),
    "too few sources": (
        lambda c, t: c.add_residual(t.parts(), t.parts()[1:], RS),
        ExecutionError,
        "add_residual: source: 2 tensors, expected",
    ),
    "too many outputs": (
        lambda c, t: c.allgather(t.parts(), RS, Axis.KV_HEADS, out=t.wholes()),
        ExecutionError,
        "allgather: out: 3 tensors, expected one for each of the devices 0, 3",
    ),
    "more rows than compiled for": (
        lambda c, t: c.broadcast(t(2, 7, 40)),
        ExecutionError,
        f"broadcast: x has 14 rows, but the context was compiled for {MAX_ROWS}",
    ),
    "more rows of parts": (
        lambda c, t: c.gather(t.parts(13), RS),
        ExecutionError,
        r"gather: parts\[0\] has 13 rows, but",
    ),
    "more columns than there is room for": (
        lambda c, t: c.all_reduce(t.wholes(4000)),
        ExecutionError,
        r"all_reduce: one row takes .*, but the plan left .* for it",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_before_anything_moves(call: Call, kind: type[TpplanError], message: str) -> None:
    """The error says what and how much, with a hint; operands are as before, and the context goes on."""
    assert_refused(call, kind, message)


CALLS: dict[str, Call] = {
    "broadcast": lambda c, t: c.broadcast(t(2, 40)),
    "scatter": lambda c, t: c.scatter(t(2, 40), RS),
    "gather": lambda c, t: c.gather(t.parts(), RS),
    "allgather": lambda c, t: c.allgather(t.parts(), RS),
    "all_reduce": lambda c, t: c.all_reduce(t.wholes()),
    "add_residual": lambda c, t: c.add_residual(t.parts(), t.parts(), RS),
    "synchronize": lambda c, _: c.synchronize(),
    "copy_pinned": lambda c, t: c.copy_pinned(0, t(2, 40)),
    "get_pinned": lambda c, _: c.get_pinned(0, 2, 40),
    "begin_scratch": lambda c, _: c.begin_scratch(),
    "scratch": lambda c, _: c.scratch(1, RS),
    "reserve_scratch": lambda c, _: c.reserve_scratch({0: 1}),
    "rope_tables": lambda c, _: c.rope_tables(untyped(None)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_use_after_close(call: Call) -> None:
    """A closed context says so, and touches nothing; closing it again is fine."""
    tensors = Tensors()
    ctx = context(UNEVEN, "events")
    ctx.close()
    with pytest.raises(ExecutionError, match="the context is closed"):
        call(ctx, tensors)
    ctx.close()
    assert "closed" in repr(ctx)
    assert ctx.devices_of(RS) == ctx.all_devices  # which takes no memory
    assert all(same(tensor, copy) for tensor, copy in tensors.known)
