"""What a context refuses: by which sentence, and before anything moves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import Factory, define
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter, UninitializedParameter

from tests.contexts import MAX_ROWS, REPLICATED, UNEVEN, context, little_room
from tests.exec_reference import columns, same
from tpplan.axes import Axis
from tpplan.errors import ExecutionError, RequestError, TpplanError
from tpplan.exec import TPContext
from tpplan.exec.lower import TRANSPORTS
from tpplan.exec.rope import Rope
from tpplan.exec.rope_scaling import Default

__all__ = ["little_room"]  # a fixture
RS = Axis.RS
ROPE = Rope(10000.0, 8, Default())
COLUMNS = (11, 18, 11)  # of the residual stream, on devices 0, 2 and 3 of UNEVEN


@define(eq=False)
class Tensors:
    """Makes operands, and remembers what they hold.

    Attributes:
        known: tensors with copies of them.
    """

    known: list[tuple[Tensor, Tensor]] = Factory(list)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
        """Return a tensor."""
        tensor = torch.ones(shape, device=device).to(dtype)
        if device == "cpu":
            self.known.append((tensor, tensor.clone()))
        return tensor

    def parts(self, *lead: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """Return parts of the residual stream."""
        return [self(*(lead or (2,)), columns, dtype=dtype) for columns in COLUMNS]

    def wholes(self, columns: int = 40, count: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """Return two rows for each device."""
        return [self(2, columns, dtype=dtype) for _ in range(count)]


Call = Callable[[TPContext, Tensors], object]


def untyped(mistake: object) -> Any:
    """Return an argument that type checkers do not let pass."""
    return mistake


def shrunk(x: Tensor, size: int) -> Tensor:
    """Return a tensor whose storage was resized to so many bytes, as sharded modules do between their uses."""
    x.untyped_storage().resize_(size)
    return x


def fake(*shape: int) -> Tensor:
    """Return a tensor without values that says it is on the CPU."""
    with FakeTensorMode():
        return torch.empty(shape, dtype=torch.bfloat16)


def nested(t: Tensors) -> Tensor:
    """Return a tensor of rows of different lengths, which has no shape."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it may change
        return torch.nested.nested_tensor([t(18), t(9)])


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
        lambda c, t: c.scatter(t(2, 40), Axis.KV, dim=1),
        ExecutionError,
        r"scatter: x has shape \[2, 40\], expected \[2, 5\]",
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
        lambda c, t: c.all_reduce(t.wholes(), axis=Axis.KV),
        ExecutionError,
        "all_reduce: parts: 3 tensors, expected one for each of the devices 0, 3",
    ),
    "too few residuals": (
        lambda c, t: c.all_reduce(t.wholes(count=2), t.wholes(count=2), axis=Axis.KV),
        ExecutionError,
        "all_reduce: residual: 2 tensors, expected one for each of the devices 0, 2, 3",
    ),
    "too few sources": (
        lambda c, t: c.add_residual(t.parts(), t.parts()[1:], RS),
        ExecutionError,
        "add_residual: source: 2 tensors, expected",
    ),
    "too many outputs": (
        lambda c, t: c.allgather(t.parts(), RS, Axis.KV, out=t.wholes()),
        ExecutionError,
        "allgather: out: 3 tensors, expected one for each of the devices 0, 3",
    ),
    "nothing": (lambda c, _: c.broadcast(untyped(None)), ExecutionError, "broadcast: x is NoneType, expected a tensor"),
    "no parts": (
        lambda c, _: c.all_reduce(untyped(None)),
        ExecutionError,
        "all_reduce: parts: NoneType, expected one for each",
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
    "dim of 0": (
        lambda c, t: c.scatter(t(2, 40), RS, dim=0),
        ExecutionError,
        "scatter: dim is 0, expected a whole number from 1",
    ),
    "dim of a half": (
        lambda c, t: c.gather(t.parts(), RS, dim=untyped(0.5)),
        ExecutionError,
        "gather: dim is 0.5, expected",
    ),
    "dim of 1.0": (
        lambda c, t: c.allgather(t.parts(), RS, dim=untyped(1.0)),
        ExecutionError,
        "allgather: dim is 1.0, expected a whole number from 1",
    ),
    "dim of True": (lambda c, _: c.scratch(1, RS, dim=True), ExecutionError, "scratch: dim is True, expected a whole"),
    "an unknown axis": (
        lambda c, t: c.scatter(t(2, 40), "heads"),
        RequestError,
        "the plan for Tiny has no axis heads",
    ),
    "an axis of other models": (
        lambda c, t: c.broadcast(t(2, 40), Axis.EX),
        RequestError,
        "the plan for Tiny has no axis expert_intermediate",
    ),
    "no axis": (lambda c, t: c.scatter(t(2, 40), untyped(None)), RequestError, "the plan for Tiny has no axis None"),
    "two axes": (lambda c, t: c.broadcast(t(2, 40), untyped([RS])), RequestError, "the plan for Tiny has no axis"),
    "a layer that is not there": (
        lambda c, t: c.scatter(t(2, 70), Axis.ID, layer=4),
        RequestError,
        "the plan for Tiny has no layer 4",
    ),
    "a layer that is not there, of an axis outside of layers": (
        lambda c, t: c.broadcast(t(2, 40), RS, layer=99),
        RequestError,
        "the plan for Tiny has no layer 99",
    ),
    "a layer that is not there, of no axis": (
        lambda c, t: c.broadcast(t(2, 40), layer=4),
        RequestError,
        "the plan for Tiny has no layer 4",
    ),
    "a layer before the first": (
        lambda c, t: c.all_reduce(t.wholes(count=2), axis=Axis.KV, layer=-1),
        RequestError,
        "has no layer -1",
    ),
    "a layer of 1.0": (
        lambda c, t: (c.split(RS, 1), c.gather(t.parts(), RS, layer=untyped(1.0))),
        RequestError,
        "has no layer 1.0",
    ),
    "a layer of True": (
        lambda c, t: (c.split(RS, 1), c.allgather(t.parts(), RS, layer=True)),
        RequestError,
        "has no layer True",
    ),
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
    "a freed tensor into a host buffer": (
        lambda c, _: c.copy_pinned(0, shrunk(torch.ones(2, 40), 0)),
        ExecutionError,
        "copy_pinned: x takes bytes 0 to 320 of its storage, which has 0",
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
    "a fake tensor into a host buffer": (
        lambda c, _: c.copy_pinned(0, fake(2, 40)),
        ExecutionError,
        "copy_pinned: x is FakeTensor, expected a plain tensor",
    ),
    "a parameter without a shape": (
        lambda c, _: c.broadcast(UninitializedParameter()),
        ExecutionError,
        "broadcast: x is UninitializedParameter, expected a plain tensor",
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
    "a host buffer that is not there": (
        lambda c, t: c.copy_pinned(2, t(2, 40)),
        ExecutionError,
        "there is no host buffer 2",
    ),
    "a host buffer before the first": (lambda c, _: c.get_pinned(-1, 2, 40), ExecutionError, "no host buffer -1"),
    "more than a host buffer": (
        lambda c, _: c.get_pinned(0, 999, 40),
        ExecutionError,
        r"a host buffer of 1920 bytes has no room for \[999, 40\] in bfloat16",
    ),
    "a host buffer of less than nothing": (
        lambda c, _: c.get_pinned(1, -1, 4),
        ExecutionError,
        r"get_pinned: shape\[0\] is -1, expected a whole number from 0",
    ),
    "half an element of a host buffer": (
        lambda c, _: c.get_pinned(0, untyped(2.5), 2),
        ExecutionError,
        r"get_pinned: shape\[0\] is 2.5, expected a whole number from 0",
    ),
    "a host buffer of a letter": (
        lambda c, _: c.get_pinned(0, untyped("a")),
        ExecutionError,
        r"shape\[0\] is 'a', exp",
    ),
    "a host buffer of two shapes": (
        lambda c, _: c.get_pinned(0, (2, 3), (4,)),
        ExecutionError,
        r"get_pinned: shape\[0\] is \(2, 3\), expected a whole number",
    ),
    "a letter in a shape": (lambda c, _: c.get_pinned(0, (2, untyped("a"))), ExecutionError, r"shape\[1\] is 'a'"),
    "a host buffer of a named dtype": (
        lambda c, _: c.get_pinned(0, 2, dtype=untyped("half")),
        ExecutionError,
        "get_pinned: dtype is 'half', expected a torch.dtype",
    ),
    "a host buffer 0.0": (lambda c, _: c.get_pinned(untyped(0.0), 2), ExecutionError, "there is no host buffer 0.0"),
    "a host buffer False": (lambda c, t: c.copy_pinned(False, t(2)), ExecutionError, "there is no host buffer False"),
    "elements that torch does not copy, into a host buffer": (
        lambda c, _: c.copy_pinned(0, torch.empty(2, 40, dtype=untyped(torch).int4)),
        ExecutionError,
        "copy_pinned: x has dtype int4 of 1 bytes, which is not moved",
    ),
    "nothing into a host buffer": (
        lambda c, _: c.copy_pinned(0, untyped(None)),
        ExecutionError,
        "x is NoneType, expected a tensor",
    ),
    "sparse into a host buffer": (
        lambda c, t: c.copy_pinned(0, t(2, 40).to_sparse()),
        ExecutionError,
        "expected a dense",
    ),
    "no values into a host buffer": (
        lambda c, t: c.copy_pinned(0, t(2, 40, device="meta")),
        ExecutionError,
        "copy_pinned: x is on meta",
    ),
    "more scratch than there is": (
        lambda c, _: c.scratch(10**6, RS),
        ExecutionError,
        r"device 0 \(GPU 0\): 22000000 bytes asked for, \d+ free of \d+ of scratch",
    ),
    "scratch of negative rows": (
        lambda c, _: c.scratch(-1, RS),
        ExecutionError,
        "scratch: rows is -1, expected a whole number",
    ),
    "scratch of half a row": (
        lambda c, _: c.scratch(untyped(2.5), RS),
        ExecutionError,
        "scratch: rows is 2.5, expected",
    ),
    "scratch of named rows": (
        lambda c, _: c.scratch(untyped("2"), RS),
        ExecutionError,
        "scratch: rows is '2', expected",
    ),
    "scratch of a named dtype": (
        lambda c, _: c.scratch(2, RS, dtype=untyped("half")),
        ExecutionError,
        "scratch: dtype is 'half', expected a torch.dtype",
    ),
    "half a column of a device's scratch": (
        lambda c, _: c.devices[0].scratch(2, untyped(0.5), torch.int8),
        ExecutionError,
        "scratch: columns is 0.5, expected a whole number from 0",
    ),
    "scratch of dim 0": (lambda c, _: c.scratch(1, RS, dim=0), ExecutionError, "scratch: dim is 0"),
    "more scratch reserved than there is": (
        lambda c, _: c.reserve_scratch({0: 64, 2: 10**9}),
        ExecutionError,
        r"device 2 \(GPU 2\): 1000000000 bytes asked for, \d+ free",
    ),
    "scratch on an idle device": (
        lambda c, _: c.reserve_scratch({1: 64}),
        ExecutionError,
        "device 1 is not in use",
    ),
    "scratch on device 0.0": (
        lambda c, _: c.reserve_scratch({untyped(0.0): 64}),
        ExecutionError,
        "device 0.0 is not in use",
    ),
    "a list of scratch": (
        lambda c, _: c.reserve_scratch(untyped([1, 2, 3])),
        ExecutionError,
        "reserve_scratch: sizes is list, expected a Mapping",
    ),
    "a letter of scratch": (
        lambda c, _: c.reserve_scratch({0: untyped("x")}),
        ExecutionError,
        r"reserve_scratch: sizes\[0\] is 'x', expected a whole number from 0",
    ),
    "less scratch than nothing": (
        lambda c, _: c.reserve_scratch({0: 64, 2: -5}),
        ExecutionError,
        r"reserve_scratch: sizes\[2\] is -5, expected a whole number from 0",
    ),
    "RoPE tables of nothing": (
        lambda c, _: c.rope_tables(untyped(None)),
        ExecutionError,
        "rope_tables: rope is NoneType, expected a Rope",
    ),
    "RoPE tables of a half": (
        lambda c, _: c.rope_tables(ROPE, untyped(2.5)),
        ExecutionError,
        "rope_tables: positions is 2.5, expected a whole number from 1",
    ),
    "RoPE tables of no positions": (
        lambda c, _: c.rope_tables(ROPE, 0),
        ExecutionError,
        "rope_tables: positions is 0, expected a whole number from 1",
    ),
    "RoPE tables of a named dtype": (
        lambda c, _: c.devices[0].rope_tables(ROPE, 4, untyped("half")),
        ExecutionError,
        "rope_tables: dtype is 'half', expected a torch.dtype",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_before_anything_moves(call: Call, kind: type[TpplanError], message: str) -> None:
    """The error says what and how much, with a hint; operands are as before, and the context goes on."""
    tensors = Tensors()
    with context(UNEVEN, "events") as ctx:
        before = [(device.exchange.clone(), device.arena.free_bytes) for device in ctx.devices.values()]
        with pytest.raises(kind, match=message) as error:
            call(ctx, tensors)
        assert type(error.value) is kind
        assert error.value.hint
        assert all(same(tensor, copy) for tensor, copy in tensors.known)
        for device, (old, free) in zip(ctx.devices.values(), before, strict=True):
            assert torch.equal(device.exchange, old)
            assert device.arena.free_bytes == free
        x = torch.randn(2, 40)
        assert same(ctx.gather(ctx.scatter(x, RS), RS).tensor, x)


def test_an_axis_that_layers_cut_differently_needs_a_layer() -> None:
    """Which cut is meant is never guessed."""
    with context(REPLICATED, "events") as ctx:
        for call in (ctx.split, ctx.devices_of, lambda axis: ctx.scatter(torch.ones(1, 48), axis)):
            with pytest.raises(RequestError, match="axis intermediate is split in 2 ways: layers 0,2 and layers 1,3"):
                call(Axis.ID)


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
