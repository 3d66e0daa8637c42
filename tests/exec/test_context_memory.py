"""The memory of a context that callers use: scratch, and buffers in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contexts import UNEVEN, context, little_room  # noqa: F401 (for every test here)
from tests.exec.calls.operand_cases import ROPE, RS
from tests.exec.reference import same
from tpplan.errors import ExecutionError


def test_scratch_ends_and_begins_again() -> None:
    """What was reserved can be sliced to the last byte, and not one more; a new round hands out the same memory."""
    with context(UNEVEN, "events") as ctx:
        device = ctx.devices[2]
        size = device.arena.free_bytes
        ctx.reserve_scratch({2: size})
        with pytest.raises(ExecutionError, match=f"{size + 1} bytes asked for, {size} free of {size} of scratch"):
            ctx.reserve_scratch({2: size + 1})
        first = device.scratch(1, size, torch.uint8)
        with pytest.raises(ExecutionError, match=f"1 bytes asked for, 0 free of {size} of scratch"):
            device.scratch(1, 1, torch.uint8)
        ctx.begin_scratch()
        assert device.scratch(1, size, torch.uint8).data_ptr() == first.data_ptr()


def test_scratch_is_given_by_all_devices_or_by_none() -> None:
    """If one device has too little room, no other has given any of its own away."""
    with context(UNEVEN, "events") as ctx:
        first, full, last = ctx.devices.values()
        full.scratch(1, full.arena.free_bytes, torch.uint8)
        before = first.arena.free_bytes, last.arena.free_bytes
        with pytest.raises(ExecutionError, match=r"device 2 \(GPU 2\): 72 bytes asked for, 0 free"):
            ctx.scratch(2, RS)
        assert (first.arena.free_bytes, last.arena.free_bytes) == before


def test_a_closed_device_says_so() -> None:
    """Neither tables nor scratch are said to be too large for a device that has given its memory back."""
    ctx = context(UNEVEN, "events")
    device = ctx.devices[0]
    ctx.close()
    for call in (lambda: device.rope_tables(ROPE, 1, ctx.dtype), lambda: device.scratch(0, 0, ctx.dtype)):
        with pytest.raises(ExecutionError, match=r"device 0 \(GPU 0\): the .* is closed"):
            call()


@pytest.mark.parametrize("index", [(), slice(1, None), slice(2, 2), (slice(None), slice(3, None)), (slice(None), 5)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_host_buffer_can_be_copied_within_itself(index: Any, turned: bool) -> None:
    """What lies in a buffer, shifted or turned, arrives as it was before the copy."""
    with context(UNEVEN, "events") as ctx:
        whole = ctx.copy_pinned(0, torch.randn(6, 20))
        x = (whole.t() if turned else whole)[index]
        truth = x.clone()
        assert same(ctx.copy_pinned(0, x), truth)


def test_the_shape_of_a_host_buffer_may_be_one_argument() -> None:
    """A tuple, a list and a torch.Size are as good as their numbers."""
    with context(UNEVEN, "events") as ctx:
        plain = ctx.get_pinned(1, 2, 3)
        for shape in ((2, 3), [2, 3], torch.Size([2, 3])):
            found = ctx.get_pinned(1, shape)
            assert (found.shape, found.data_ptr()) == ((2, 3), plain.data_ptr())
        assert ctx.get_pinned(1, ()).shape == ctx.get_pinned(1).shape == ()


def test_host_buffers_are_two_and_stay_where_they_are() -> None:
    """Each buffer is one place, whatever shape it is asked for in; the two are apart, and copies arrive at once."""
    with context(UNEVEN, "host", 5) as ctx:
        x, y = torch.randn(3, 4, 10), torch.randn(2, 40).t()
        first, second = ctx.copy_pinned(0, x), ctx.copy_pinned(1, y)
        assert same(first, x)
        assert same(second, y)
        assert ctx.get_pinned(0, 5, dtype=torch.int64).data_ptr() == first.data_ptr()
        assert same(ctx.get_pinned(1, 40, 2, dtype=torch.float32), y)
        assert ctx.get_pinned(0, 3).dtype == torch.bfloat16
        handle = ctx.gather(ctx.scatter(torch.ones(1, 40), RS), RS, out=ctx.get_pinned(0, 1, 40, dtype=torch.float32))
        assert (handle.tensor == 1).all()
        assert handle.tensor.data_ptr() == first.data_ptr()
