"""Arenas: what is handed out fits, is aligned, and overlaps only where it may."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.exec.arena_cases import DTYPES, arena, offset, raw
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache, Request, Split
from tpplan.core.workspace import areas
from tpplan.errors import ExecutionError
from tpplan.exec.memory.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable


def test_areas_and_slices_by_hand() -> None:
    """Kept areas first, then slices, each at the next multiple of 64; begin() goes back to the first slice."""
    owner = arena(1024)
    assert (owner.size_bytes, owner.free_bytes) == (1024, 1024)
    first, second = owner.keep(100), owner.keep(64)
    assert [(offset(owner, t), t.shape, t.dtype) for t in (first, second)] == [
        (0, (100,), torch.uint8),
        (128, (64,), torch.uint8),
    ]
    assert owner.free_bytes == 1024 - 192
    a, b = owner.slice(3, 5, torch.float16), owner.slice(2, 33, torch.uint8)
    assert [(offset(owner, t), t.shape, t.dtype) for t in (a, b)] == [
        (192, (3, 5), torch.float16),
        (256, (2, 33), torch.uint8),
    ]
    assert owner.free_bytes == 1024 - 256 - 128
    owner.begin()
    assert owner.free_bytes == 1024 - 192
    assert offset(owner, owner.slice(1, 1, torch.int64)) == 192


def test_the_last_byte_can_be_had_and_none_beyond() -> None:
    """What fits exactly is handed out; then there is room for nothing but nothing."""
    owner = arena(256)
    owner.keep(64)
    owner.slice(2, 24, torch.float32)
    assert owner.free_bytes == 0
    assert owner.slice(0, 7, torch.float64).shape == (0, 7)
    with pytest.raises(ExecutionError):
        owner.slice(1, 1, torch.uint8)
    owner.begin()
    with pytest.raises(ExecutionError):
        owner.slice(1, 193, torch.uint8)
    assert owner.free_bytes == 192


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_holds_what_is_written(dtype: torch.dtype) -> None:
    """A slice is an ordinary contiguous tensor; its neighbours, of odd sizes, keep their bytes."""
    owner = arena(4096)
    before, middle, after = owner.slice(1, 3, torch.uint8), owner.slice(5, 7, dtype), owner.slice(1, 3, torch.uint8)
    before.fill_(17)
    after.fill_(18)
    written = torch.arange(35).remainder(2).view(5, 7).to(dtype)
    middle.copy_(written)
    assert middle.is_contiguous()
    assert middle.dtype is dtype
    assert torch.equal(raw(middle), raw(written))
    assert (before.tolist(), after.tolist()) == ([[17] * 3], [[18] * 3])


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex64], ids=str)
def test_empty_slices_keep_their_shape_and_take_no_room(rows: int, columns: int, dtype: torch.dtype) -> None:
    """No rows, or a device without any part of an axis, even where nothing is free, or nothing is there at all."""
    for owner in (arena(64), arena(0)):
        owner.slice(1, owner.size_bytes, torch.uint8)
        assert owner.slice(rows, columns, dtype).shape == (rows, columns)
        assert owner.free_bytes == 0


def test_slices_after_begin_alias_those_before() -> None:
    """It is scratch: the bytes are the same ones, and kept ones are not among them."""
    owner = arena(256)
    kept = owner.keep(64).fill_(1)
    old = owner.slice(1, 192, torch.uint8).fill_(2)
    owner.begin()
    owner.slice(1, 192, torch.uint8).fill_(3)
    assert set(raw(old).tolist()) == {3}
    assert set(kept.tolist()) == {1}


def test_reserving_promises_room_after_begin() -> None:
    """Whatever is sliced now, up to all of the scratch; kept bytes are no scratch."""
    owner = arena(512)
    owner.keep(128)
    owner.slice(1, 300, torch.uint8)
    owner.reserve(384)
    assert owner.free_bytes == 512 - 128 - 320
    owner.begin()
    assert owner.slice(1, 384, torch.uint8).shape == (1, 384)
    with pytest.raises(
        ExecutionError, match=r"^device 0 \(RTX 4090\): 385 bytes asked for, 384 free of 384 of scratch"
    ):
        owner.reserve(385)


def test_exhaustion_tells_numbers_and_what_helps() -> None:
    """What was asked, is free and there in all; begin() is advised only where it could help."""
    owner = arena(512)
    owner.keep(64)
    owner.slice(4, 50, torch.uint8)
    with pytest.raises(ExecutionError) as error:
        owner.slice(100, 2, torch.float16)
    assert error.value.message == "device 0 (RTX 4090): 400 bytes asked for, 192 free of 448 of scratch"
    assert error.value.hint.startswith("call begin() ")
    assert error.value.hint.endswith("plan with more --max-rows")
    with pytest.raises(ExecutionError) as error:
        owner.slice(100, 3, torch.float16)
    assert error.value.hint == "plan with more --max-rows"


def test_nothing_is_kept_behind_a_slice() -> None:
    """A kept area could otherwise be a slice's bytes after begin(); with the slices gone, there is room."""
    owner = arena(512)
    owner.slice(1, 65, torch.uint8)
    with pytest.raises(ExecutionError, match="64 bytes to keep, but 128 bytes behind the kept ones are sliced"):
        owner.keep(64)
    assert owner.free_bytes == 384
    owner.begin()
    assert offset(owner, owner.keep(64)) == 0
    assert offset(owner, owner.slice(1, 1, torch.uint8)) == 64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: arena(100), "an arena of 100 bytes is no multiple of 64"),
        (lambda: arena(2**55), f"cannot allocate {2**55} bytes on cpu"),
        (lambda: arena(64).slice(-1, 8, torch.uint8), "a slice cannot have -1 rows of 8"),
        (lambda: arena(64).slice(-2, -2, torch.uint8), "a slice cannot have -2 rows of -2"),
        (lambda: arena(64).keep(65), "65 bytes asked for, 64 free of 64"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    """An error that names the device, not a traceback of torch."""
    with pytest.raises(ExecutionError) as error:
        make()
    assert error.value.message.startswith(f"device 0 (RTX 4090): {message}")
    assert error.value.hint
    assert "\n" not in error.value.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can pin")
@pytest.mark.parametrize(
    ("device", "pinned", "what"), [("cpu", True, "64 pinned bytes on cpu"), ("cuda:0", False, "64 bytes on cuda:0")]
)
def test_what_needs_a_driver_says_so_without_one(device: str, *, pinned: bool, what: str) -> None:
    """Pinned memory, and memory of a GPU."""
    with pytest.raises(ExecutionError, match=f"^host: cannot allocate {what}: "):
        Arena(64, device, "host", pinned=pinned)


@pytest.mark.parametrize(
    "use",
    [
        lambda closed: closed.keep(0),
        lambda closed: closed.begin(),
        lambda closed: closed.slice(0, 0, torch.uint8),
        lambda closed: closed.reserve(0),
    ],
    ids=["keep", "begin", "slice", "reserve"],
)
def test_use_after_close_is_an_error(use: Callable[[Arena], Any]) -> None:
    """Of every method but close() itself, which does nothing more."""
    owner = arena(128)
    owner.close()
    owner.close()
    assert owner.free_bytes == 0
    with pytest.raises(ExecutionError, match=r"^device 0 \(RTX 4090\): the arena is closed"):
        use(owner)


def test_closing_frees_the_block_with_the_last_slice() -> None:
    """What was handed out stays readable; nothing else holds the memory."""
    owner = arena(128)
    block = weakref.ref(owner._block)
    held = owner.slice(1, 4, torch.uint8).fill_(5)
    owner.close()
    assert held.tolist() == [[5] * 4]
    del held
    assert block() is None


def test_an_arena_serves_in_and_out_of_inference_mode() -> None:
    """Wherever it was made; what is kept is an ordinary tensor even if it was asked for in that mode."""
    with torch.inference_mode():
        inside = arena(128)
        kept = inside.keep(64)
        assert inside.slice(1, 3, torch.float32).fill_(1).mul_(2).tolist() == [[2, 2, 2]]
    inside.begin()
    assert inside.slice(1, 3, torch.float32).fill_(1).mul_(3).tolist() == [[3, 3, 3]]
    assert set(kept.fill_(1).add_(1).tolist()) == {2}


def test_blocks_start_aligned() -> None:
    """Whatever the size, so that a slice's address is aligned too, not its offset alone."""
    assert all(arena(64 * n).keep(64 * n).data_ptr() % 64 == 0 for n in range(1, 300))


def test_a_ledger_s_workspace_is_an_arena() -> None:
    """Control, exchange and tables are kept; the slices that the workspace counts then fit, and take all of it."""
    cuts = [
        Split(axis=Axis.KV_HEADS, layers="0", size=2, unit=1, width=32, bounds=(0, 2)),
        Split(axis=Axis.Q_HEADS, layers="0", size=8, unit=4, width=32, bounds=(0, 8)),
        Split(axis=Axis.INTERMEDIATE, layers="0", size=640, unit=128, bounds=(0, 640)),
        Split(axis=Axis.VOCAB, size=320, unit=32, bounds=(0, 320)),
        Split(axis=Axis.RESIDUAL, size=256, unit=32, bounds=(0, 256)),
    ]
    (area,) = areas(cuts, "float16", Request("gather", "balanced", Cache("fp16", 100), 1, 6, "idle"))
    owner = arena(area.total_bytes)
    for size in (area.control_bytes, area.exchange_bytes, area.rope_bytes):
        owner.keep(size)
    owner.reserve(area.scratch_bytes)
    for columns in (256, 256, 640, 8 * 32, 2 * 32, 2 * 32, 640, 640):
        owner.slice(6, columns, torch.float16)
    owner.slice(1, 320, torch.float32)
    assert owner.free_bytes == 0
