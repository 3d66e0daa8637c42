"""What a context refuses: operands that are no plain, dense tensors with memory of their own."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import UninitializedParameter

from tests.contexts import little_room
from tests.exec.calls.operand_cases import RS, Call, Tensors, assert_refused, fake, shrunk, untyped
from tpplan.errors import ExecutionError, TpplanError

__all__ = ["little_room"]  # a fixture


def nested(t: Tensors) -> Tensor:
    """Return a tensor of rows of different lengths, which has no shape."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it may change
        return torch.nested.nested_tensor([t(18), t(9)])


#: For each mistake: a call, the error, and what it says.
MISTAKES: dict[str, tuple[Call, type[TpplanError], str]] = {
    "nothing": (lambda c, _: c.broadcast(untyped(None)), ExecutionError, "broadcast: x is NoneType, expected a tensor"),
    "no parts": (
        lambda c, _: c.all_reduce(untyped(None)),
        ExecutionError,
        "all_reduce: parts: NoneType, expected one for each",
    ),
    "no tensors at all": (
        lambda c, _: c.all_reduce([], out=[]),
        ExecutionError,
        "all_reduce: parts: 0 tensors, expected one for each",
    ),
    "one tensor for parts": (
        lambda c, t: c.gather(untyped(t(3, 2, 11)), RS),
        ExecutionError,
        "gather: parts: Tensor, expected one for each",
    ),
    "lists": (
        lambda c, _: c.allgather(untyped([[1.0], [2.0], [3.0]]), RS),
        ExecutionError,
        r"allgather: parts\[0\] is list, expected a tensor",
    ),
    "a list among outputs": (
        lambda c, t: c.broadcast(t(2, 40), out=untyped([t(2, 40), [1.0], t(2, 40)])),
        ExecutionError,
        r"broadcast: out\[1\] of device 2 is list, expected a tensor",
    ),
    "a sparse tensor": (
        lambda c, t: c.broadcast(t(2, 40).to_sparse()),
        ExecutionError,
        "broadcast: x is torch.sparse_coo, expected a dense tensor",
    ),
    "a sparse part": (
        lambda c, t: c.gather([t(2, 11), t(2, 18).to_sparse(), t(2, 11)], RS),
        ExecutionError,
        r"gather: parts\[1\] of device 2 is torch.sparse_coo, expected a dense",
    ),
    "a nested tensor": (
        lambda c, t: c.broadcast(nested(t)),
        ExecutionError,
        "broadcast: x is nested, expected a dense tensor",
    ),
    "a nested part": (
        lambda c, t: c.gather([t(2, 11), nested(t), t(2, 11)], RS),
        ExecutionError,
        r"gather: parts\[1\] of device 2 is nested, expected a dense tensor",
    ),
    "a nested output": (
        lambda c, t: c.broadcast(t(2, 40), out=[t(2, 40), t(2, 40), nested(t)]),
        ExecutionError,
        r"broadcast: out\[2\] of device 3 is nested, expected a dense tensor",
    ),
    "a freed tensor": (
        lambda c, _: c.broadcast(shrunk(torch.ones(2, 40), 0)),
        ExecutionError,
        "broadcast: x takes bytes 0 to 320 of its storage, which has 0",
    ),
    "a freed part": (
        lambda c, t: c.all_reduce([*t.wholes(dtype=torch.float32)[:2], shrunk(torch.ones(2, 40), 0)]),
        ExecutionError,
        r"all_reduce: parts\[2\] of device 3 takes bytes 0 to 320 of its storage, which has 0",
    ),
    "a freed output": (
        lambda c, t: c.gather(t.parts(dtype=torch.float32), RS, out=shrunk(torch.ones(2, 40), 0)),
        ExecutionError,
        r"gather: out\[0\] of device -1 takes bytes 0 to 320 of its storage, which has 0",
    ),
    "a shrunk tensor": (
        lambda c, _: c.broadcast(shrunk(torch.ones(2, 40), 319)),
        ExecutionError,
        "broadcast: x takes bytes 0 to 320 of its storage, which has 319",
    ),
    "the end of a shrunk tensor": (
        lambda c, _: c.broadcast(shrunk(torch.ones(4, 40)[2:], 400)),
        ExecutionError,
        "broadcast: x takes bytes 320 to 640 of its storage, which has 400",
    ),
    "columns of a shrunk tensor": (
        lambda c, _: c.broadcast(shrunk(torch.ones(2, 80)[:, :40], 479)),
        ExecutionError,
        "broadcast: x takes bytes 0 to 480 of its storage, which has 479",
    ),
    "a tensor that torch.func hides": (
        lambda c, _: torch.func.vmap(lambda x: c.broadcast(x)[0])(torch.ones(3, 40)),
        ExecutionError,
        "broadcast: x takes bytes 0 to .* of its storage, which has 0",
    ),
    "a fake tensor": (
        lambda c, _: c.broadcast(fake(2, 40)),
        ExecutionError,
        "broadcast: x is FakeTensor, expected a plain tensor",
    ),
    "a fake part": (
        lambda c, t: c.gather([*t.parts()[:2], fake(2, 11)], RS),
        ExecutionError,
        r"gather: parts\[2\] of device 3 is FakeTensor, expected a plain tensor",
    ),
    "a parameter without a shape": (
        lambda c, _: c.broadcast(UninitializedParameter()),
        ExecutionError,
        "broadcast: x is UninitializedParameter, expected a plain tensor",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_before_anything_moves(call: Call, kind: type[TpplanError], message: str) -> None:
    """The error says what and how much, with a hint; operands are as before, and the context goes on."""
    assert_refused(call, kind, message)
