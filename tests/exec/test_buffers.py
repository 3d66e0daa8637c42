"""What a context refuses: host buffers, scratch and RoPE tables that it has no room for, or that are none."""

from __future__ import annotations

import pytest
import torch

from tests.contexts import little_room
from tests.exec.calls.operand_cases import ROPE, RS, Call, assert_refused, fake, shrunk, untyped
from tpplan.errors import ExecutionError, TpplanError

__all__ = ["little_room"]  # a fixture


#: For each mistake: a call, the error, and what it says.
MISTAKES: dict[str, tuple[Call, type[TpplanError], str]] = {
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
    "a freed tensor into a host buffer": (
        lambda c, _: c.copy_pinned(0, shrunk(torch.ones(2, 40), 0)),
        ExecutionError,
        "copy_pinned: x takes bytes 0 to 320 of its storage, which has 0",
    ),
    "a fake tensor into a host buffer": (
        lambda c, _: c.copy_pinned(0, fake(2, 40)),
        ExecutionError,
        "copy_pinned: x is FakeTensor, expected a plain tensor",
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
    assert_refused(call, kind, message)
