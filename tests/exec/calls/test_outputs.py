"""Outputs that a context refuses, for they lie over something or cannot be written, and those that it takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.contexts import UNEVEN, context, little_room
from tests.exec.calls.operand_cases import COLUMNS, RS, Call, Tensors, assert_refused
from tests.exec.reference import columns, same
from tpplan.errors import ExecutionError, TpplanError
from tpplan.exec.options import TRANSPORTS

__all__ = ["little_room"]  # a fixture


def swapped(t: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Return parts, and the same tensors in another order."""
    a, b, c = t.wholes()
    return [a, b, c], [b, a, c]


def shared(t: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Return parts two of which are one tensor, and outputs of which the first is that tensor."""
    a, b, c = t.wholes()
    return [a, a, b], [a, c, t(2, 40)]


def shifted(t: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Return parts, and outputs of which the first lies over its part, a column further."""
    wide = t(2, 41)
    return [wide[:, :-1], t(2, 40), t(2, 40)], [wide[:, 1:], t(2, 40), t(2, 40)]


def columns_of_one(t: Tensors) -> list[Tensor]:
    """Return tensors that are columns of one, of which two have a column in common."""
    wide = t(2, 40)
    return [wide[:, :11], wide[:, 10:28], wide[:, 29:]]


#: For each mistake: a call, the error, and what it says.
MISTAKES: dict[str, tuple[Call, type[TpplanError], str]] = {
    "an output over the input": (
        lambda c, t: c.broadcast(x := t(2, 40), out=[t(2, 40), x, t(2, 40)]),
        ExecutionError,
        r"broadcast: out\[1\] shares memory with input 0",
    ),
    "two outputs in one place": (
        lambda c, t: c.broadcast(t(2, 40), out=[t(2, 40), y := t(2, 40), y]),
        ExecutionError,
        r"broadcast: out\[1\] shares memory with out\[2\]",
    ),
    "outputs with a common column": (
        lambda c, t: c.scatter(t(2, 40), RS, out=columns_of_one(t)),
        ExecutionError,
        r"scatter: out\[0\] shares memory with out\[1\]",
    ),
    "a whole over its parts": (
        lambda c, t: c.gather(columns(y := t(2, 40), COLUMNS), RS, out=y),
        ExecutionError,
        r"gather: out\[0\] shares memory with input 0",
    ),
    "sums over other devices' parts": (
        lambda c, t: c.all_reduce((s := swapped(t))[0], out=s[1]),
        ExecutionError,
        r"all_reduce: out\[0\] shares memory with ",
    ),
    "a sum over a part of two devices": (
        lambda c, t: c.all_reduce((s := shared(t))[0], out=s[1]),
        ExecutionError,
        r"all_reduce: out\[0\] shares memory with input 1",
    ),
    "all sums over one part": (
        lambda c, t: c.all_reduce([x := t(2, 40)] * 3, out=[x] * 3),
        ExecutionError,
        r"all_reduce: out\[0\] shares memory with out\[1\]",
    ),
    "a sum next to its part": (
        lambda c, t: c.all_reduce((s := shifted(t))[0], out=s[1]),
        ExecutionError,
        r"all_reduce: out\[0\] shares memory with input 0",
    ),
    "a target that is its source": (
        lambda c, t: c.add_residual(p := t.parts(), p, RS),
        ExecutionError,
        r"add_residual: out\[0\] shares memory with input 0",
    ),
    "outputs with columns apart": (
        lambda c, t: c.broadcast(t(2, 40), out=[t(2, 40), t(2, 80)[:, ::2], t(2, 40)]),
        ExecutionError,
        r"broadcast: out\[1\] has shape \[2, 40\] and strides \(80, 2\), which cannot be written by rows",
    ),
    "an expanded output": (
        lambda c, t: c.gather(t.parts(), RS, out=t(1, 40).expand(2, 40)),
        ExecutionError,
        r"gather: out\[0\] has shape \[2, 40\] and strides \(0, 1\), which cannot be written",
    ),
    "a transposed output": (
        lambda c, t: c.gather(t.parts(2, 3), RS, out=t(3, 2, 40).transpose(0, 1)),
        ExecutionError,
        r"gather: out\[0\] has shape \[2, 3, 40\] and strides \(40, 80, 1\), which cannot be written",
    ),
    "a conjugated output": (
        lambda c, t: c.gather(t.parts(dtype=torch.complex64), RS, out=t(2, 40, dtype=torch.complex64).conj()),
        ExecutionError,
        r"gather: out\[0\] has shape .* which cannot be written",
    ),
    "a parameter as output": (
        lambda c, t: c.broadcast(t(2, 40), out=[t(2, 40), Parameter(t(2, 40)), t(2, 40)]),
        ExecutionError,
        r"broadcast: out\[1\] requires grad",
    ),
    "an output with a history": (
        lambda c, t: c.gather(t.parts(), RS, out=Parameter(t(2, 40)) + 1),
        ExecutionError,
        r"gather: out\[0\] requires grad",
    ),
    "a target that requires grad": (
        lambda c, t: c.add_residual([Parameter(x) for x in t.parts()], t.parts(), RS),
        ExecutionError,
        r"add_residual: out\[0\] requires grad",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_before_anything_moves(call: Call, kind: type[TpplanError], message: str) -> None:
    """The error says what and how much, with a hint; operands are as before, and the context goes on."""
    assert_refused(call, kind, message)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", [None, 3])
def test_operands_may_be_columns_of_one_tensor(seed: int | None, transport: str) -> None:
    """Outputs and inputs may lie next to each other in the same rows, as in a fused projection."""
    whole = torch.randn(4, 120)
    before = whole.clone()
    x, outs = whole[:, :40], columns(whole[:, 40:80], COLUMNS)
    with context(UNEVEN, transport, seed) as ctx:
        ctx.scatter(x, RS, out=outs)
        ctx.synchronize()
        assert same(whole[:, 40:80], before[:, :40])
        ctx.gather(outs, RS, out=whole[:, 80:]).wait()
        ctx.synchronize()
    before[:, 40:80] = before[:, 80:] = before[:, :40]
    assert same(whole, before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_outputs_may_require_grad_where_none_is_recorded(mode: type) -> None:
    """As with torch's own out: a parameter is written under no_grad, and its detach() always."""
    with context(UNEVEN, "events") as ctx:
        x, outs = torch.randn(2, 40), [Parameter(torch.zeros(2, 40)) for _ in ctx.all_devices]
        with mode():
            ctx.broadcast(x, out=outs)
        assert all(same(out, x) and out.requires_grad for out in outs)
        ctx.broadcast(-x, out=[out.detach() for out in outs])
        assert all(same(out, -x) for out in outs)
