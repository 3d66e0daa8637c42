"""What a context of one of several processes refuses."""

from __future__ import annotations

import pytest
import torch

from tests.contexts import UNEVEN, little_room
from tests.exec.cluster.threads import OWN, Together, gathered
from tests.exec.operand_cases import RS, Call, Tensors, untyped
from tests.exec.reference import same
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec import HOST

__all__ = ["little_room"]  # a fixture

#: For each mistake: the process that makes it, its call, and the error.
MISTAKES: dict[str, tuple[int, Call, str]] = {
    "a broadcast from somewhere": (
        0,
        lambda c, t: c.broadcast(t(2, 40)),
        "broadcast: x is on cpu, which each process may take for another device\nhint: pass source=, the same in all",
    ),
    "a scatter from somewhere": (
        1,
        lambda c, t: c.scatter(t(2, 40, device="meta"), RS),
        "scatter: x is on meta, which each process may take for another device\nhint: pass source=",
    ),
    "from a device that is not in use": (
        0,
        lambda c, t: c.broadcast(t(2, 40), source=1),
        "broadcast: source is 1, expected one of 0, 2, 3, -1",
    ),
    "values for another process's device": (
        0,
        lambda c, t: c.broadcast(t(2, 40), source=2),
        r"broadcast: x is on cpu, expected meta\nhint: another process has it: pass its shape and dtype, as torch",
    ),
    "no values for a device of its own": (
        1,
        lambda c, t: c.scatter(t(2, 40, device="meta"), RS, source=2),
        "scatter: x is on meta, expected cpu",
    ),
    "no values for the host": (
        0,
        lambda c, t: c.broadcast(t(2, 40, device="meta"), source=HOST),
        "broadcast: x is on meta, expected cpu",
    ),
    "another width without values": (
        0,
        lambda c, t: c.scatter(t(2, 41, device="meta"), RS, source=2),
        r"scatter: x has shape \[2, 41\], expected \[2, 40\]",
    ),
    "parts for all devices": (
        0,
        lambda c, t: c.gather(t.parts(), RS),
        "gather: parts: 3 tensors, expected one for each of the devices 0, 3",
    ),
    "parts without values for others' devices": (
        1,
        lambda c, t: c.allgather([t(2, 11, device="meta"), t(2, 18), t(2, 11, device="meta")], RS),
        "allgather: parts: 3 tensors, expected one for each of the devices 2",
    ),
    "a part of an axis of which it has none": (
        1,
        lambda c, t: c.gather([t(2, 3)], Axis.KV_HEADS),
        "gather: parts: 1 tensors, expected none in this process",
    ),
    "a part where it has nothing at all": (
        1,
        lambda c, t: c.allgather([t(2, 3)], Axis.KV_HEADS, Axis.KV_HEADS),
        "allgather: parts: 1 tensors, expected none in this process",
    ),
    "an output where it has nothing at all": (
        1,
        lambda c, t: c.allgather([], Axis.KV_HEADS, Axis.KV_HEADS, out=[t(2, 5)]),
        "allgather: out: 1 tensors, expected none in this process",
    ),
    "addends of all devices": (
        1,
        lambda c, t: c.all_reduce(t.wholes()),
        "all_reduce: parts: 3 tensors, expected one for each of the devices 2",
    ),
    "residuals of all devices": (
        0,
        lambda c, t: c.all_reduce(t.wholes(count=2), t.wholes()),
        "all_reduce: residual: 3 tensors, expected one for each of the devices 0, 3",
    ),
    "outputs for all devices": (
        0,
        lambda c, t: c.broadcast(t(2, 40), source=HOST, out=t.wholes()),
        "broadcast: out: 3 tensors, expected one for each of the devices 0, 3",
    ),
    "targets of all devices": (
        0,
        lambda c, t: c.add_residual(t.parts(), t.parts(), RS),
        "add_residual: target: 3 tensors, expected one for each of the devices 0, 3",
    ),
    "sources of all devices": (
        1,
        lambda c, t: c.add_residual([t(2, 18)], t.parts(), RS),
        "add_residual: source: 3 tensors, expected one for each of the devices 2",
    ),
    "a sum where it has nothing at all": (
        1,
        lambda c, t: c.add_residual([t(2, 3)], [t(2, 3)], Axis.KV_HEADS),
        "add_residual: target: 1 tensors, expected none in this process",
    ),
    "a tensor for parts": (
        0,
        lambda c, t: c.allgather(untyped(t(2, 40)), RS),
        "allgather: parts: Tensor, expected one for each of the devices 0, 3",
    ),
    "a tensor for parts that it has none of": (
        1,
        lambda c, t: c.allgather(untyped(t(2, 40)), Axis.KV_HEADS, Axis.KV_HEADS),
        "allgather: parts: Tensor, expected none in this process",
    ),
    "a tensor for outputs that tell the rows": (
        1,
        lambda c, t: c.allgather([], Axis.KV_HEADS, out=untyped(t(2, 5))),
        "allgather: out: Tensor, expected",
    ),
    "a tensor for residuals that tell the rows": (
        1,
        lambda c, t: c.all_reduce([], untyped(t(2, 40)), axis=Axis.KV_HEADS),
        "all_reduce: residual: Tensor, expected",
    ),
    "a residual that is no tensor": (
        1,
        lambda c, _: c.all_reduce([], untyped([[1.0]]), axis=Axis.KV_HEADS),
        r"all_reduce: residual\[0\].* is list, expected a tensor",
    ),
    "outputs of integers for a sum": (
        1,
        lambda c, t: c.all_reduce([], axis=Axis.KV_HEADS, out=[t(2, 40, dtype=torch.int32)]),
        "has dtype int32, which is not added up",
    ),
    "scratch of another process's device": (
        0,
        lambda c, _: c.reserve_scratch({0: 64, 2: 64}),
        "reserve_scratch: device 2 is of another process\nhint: devices in use: 0, 3",
    ),
    "scratch of a device that is not in use": (
        1,
        lambda c, _: c.reserve_scratch({2: 64, 1: 64}),
        "reserve_scratch: device 1 is not in use\nhint: devices in use: 2",
    ),
    "a graph": (
        0,
        lambda c, _: c.capture(),
        "devices of several processes have no common CUDA graph\nhint: a process with one GPU may capture its own",
    ),
}


@pytest.mark.parametrize(("process", "call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_before_anything_is_sent(process: int, call: Call, message: str) -> None:
    """The error says what and how much, with a hint; operands are as before, and all contexts go on."""
    tensors = Tensors()
    with Together(UNEVEN, OWN) as together:
        with pytest.raises(ExecutionError, match=message) as error:
            call(together.contexts[process], tensors)
        assert error.value.hint
        assert together.mail.count == 0
        assert all(same(tensor, copy) for tensor, copy in tensors.known)
        assert together.run(gathered) == [True, True]
