"""Scratch and buffers in host memory, as the original's layers use them."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from tests.exllamav2.models import (
    HALF,
    LLAMA,
    SHAPES,
    finalized,
    noise,
    overlap,
    parts_of,
    shapes,
    size_of,
    small_model,
)
from tpplan.core.workspace import align, areas
from tpplan.errors import ExecutionError
from tpplan.exllamav2 import (
    BROADCAST_ID,
    BROADCAST_KV,
    BROADCAST_Q,
    BROADCAST_RS,
    TPContext,
    pinned,
)


@shapes
@pytest.mark.parametrize("layer", ["attention", "mlp"])
def test_the_scratch_of_a_layer(gpu_split: tuple[float, ...], keys: dict[str, Any], layer: str) -> None:
    """The slices of the original's layers, all rows at once, fit on every device, apart and after what is reserved."""
    tp = finalized(gpu_split, 1_000_000, **keys)
    rows, dim = 40, tp.model.config.head_dim
    for _ in range(2):
        tp.begin_scratch_alloc_tp()
        tp.reserve_scratch([1_000_000 if device in tp.all_devs else 0 for device in range(tp.num_devices)])
        full = [(BROADCAST_RS, 1), (BROADCAST_RS, 1), (BROADCAST_Q, dim) if layer == "attention" else (BROADCAST_ID, 1)]
        part = [(BROADCAST_ID, 1), (BROADCAST_ID, 1)]
        if layer == "attention":
            part = [(BROADCAST_Q, dim), (BROADCAST_KV, dim), (BROADCAST_KV, dim)]
        part.append((BROADCAST_RS, 1))
        slices = [tp.get_scratch_slice_tp_bc(rows, HALF, kind, dim=times) for kind, times in full]
        slices += [tp.get_scratch_slice_tp(rows, HALF, kind, dim=times) for kind, times in part]
    for (kind, times), tensors in zip(full, slices, strict=False):
        assert [tuple(t.shape) for t in tensors] == [(rows, size_of(tp, kind) * times)] * len(tp.get_devs(kind))
    for (kind, times), tensors in zip(part, slices[len(full) :], strict=True):
        assert [tuple(t.shape) for t in tensors] == [(rows, (b - a) * times) for _, a, b in tp.get_split(kind)]
    everything = [tensor for tensors in slices for tensor in tensors]
    assert all(tensor.dtype == HALF and tensor.data_ptr() % 64 == 0 for tensor in everything)
    assert not any(overlap(a, b) for a, b in combinations(everything, 2))
    tp.unload()


def _dequantised(tp: TPContext, layer: str) -> list[int]:
    """The bytes that the original's layer reserves on each device (``scratch_space_tp``, ``tp_dq_size``)."""
    config = tp.model.config
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.head_dim
    queries = size_of(tp, BROADCAST_Q) * heads
    matrices = {
        "attention": [
            (hidden, BROADCAST_Q, heads),
            (hidden, BROADCAST_KV, heads),
            (queries, BROADCAST_Q, heads),
        ],
        "mlp": [(hidden, BROADCAST_ID, 1), (inner, BROADCAST_RS, 1)],
    }
    sizes = [0] * tp.num_devices
    for inputs, kind, dim in matrices[layer]:
        for device, a, b in tp.get_split(kind):
            sizes[device] = max(sizes[device], 2 * min(inputs * (b - a) * dim, getattr(config, "max_dq_size", 2**29)))
    return sizes


def _slices(tp: TPContext, layer: str, rows: int) -> list[Tensor]:
    """What the original's layer slices, in its order."""
    dim = tp.model.config.head_dim
    queries, keys = (BROADCAST_Q, dim), (BROADCAST_KV, dim)
    full, part = [queries] * 3, [queries, keys, keys, queries]
    if layer == "mlp":
        full = [(BROADCAST_RS, 1), (BROADCAST_RS, 1), (BROADCAST_ID, 1)]
        part = [(BROADCAST_ID, 1), (BROADCAST_ID, 1), (BROADCAST_RS, 1)]
    slices = [tp.get_scratch_slice_tp_bc(rows, HALF, kind, dim=times) for kind, times in full]
    slices += [tp.get_scratch_slice_tp(rows, HALF, kind, dim=times) for kind, times in part]
    return [tensor for tensors in slices for tensor in tensors]


WIDE_QUERIES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "vocab_size": 1024}


@pytest.mark.parametrize("layer", ["attention", "mlp"])
@pytest.mark.parametrize(
    ("gpu_split", "keys"),
    [*SHAPES.values(), ((2.0, 1.0), WIDE_QUERIES), ((2.0, 1.0), {"max_dq_size": 10_000}), ((12.0, 12.0), LLAMA)],
    ids=[*SHAPES, "queries wider than anything", "matrices in pieces", "a large model"],
)
def test_a_layer_as_the_original_loads_it(gpu_split: tuple[float, ...], keys: dict[str, Any], layer: str) -> None:
    """What the layers' ``tp_split`` does fits by default: begin, reserve ``tp_dq_size``, slice for all rows."""
    tp = finalized(gpu_split, **keys)
    rows = tp.model.config.max_batch_size * tp.model.config.max_input_len
    for _ in range(2):
        tp.begin_scratch_alloc_tp()
        tp.reserve_scratch(_dequantised(tp, layer))
        slices = _slices(tp, layer, rows)
    assert not any(overlap(a, b) for a, b in combinations(slices, 2))
    tp.unload()


@pytest.mark.parametrize(
    ("scratch_bytes", "keys"), [(None, {}), (None, {"max_dq_size": 500_000}), (0, {}), (3_000_000, {})]
)
def test_a_plan_has_no_more_rows_than_the_layers_need(scratch_bytes: int | None, keys: dict[str, Any]) -> None:
    """With a row less, a layer would not fit; but the config's rows are the least. ``scratch_bytes`` is reserved."""
    tp = finalized((2.0, 1.0), scratch_bytes, **keys)
    layers, used = ("attention", "mlp"), []
    widest = [max(sizes) for sizes in zip(*(_dequantised(tp, layer) for layer in layers), strict=True)]
    for layer in layers:
        tp.begin_scratch_alloc_tp()
        starts = tp.get_scratch_slice_tp(1, HALF, BROADCAST_KV)
        tp.begin_scratch_alloc_tp()
        tp.reserve_scratch(widest if scratch_bytes is None else [scratch_bytes] * 2)
        ends = dict.fromkeys([start.data_ptr() for start in starts], 0)
        for each in _slices(tp, layer, 40):
            block = each.untyped_storage().data_ptr()
            ends[block] = max(ends[block], align(each.data_ptr() + each.nbytes - block))
        used.append([*ends.values()])
    request, fits = tp.plan.request, []
    for rows in (request.max_rows, request.max_rows - 1):
        room = areas(tp.plan.splits, "float16", evolve(request, max_rows=rows))
        fits.append(all(have.scratch_bytes >= max(need) for have, *need in zip(room, *used, strict=True)))
    assert fits == [True, scratch_bytes == 0]
    assert (request.max_rows == 40) is (scratch_bytes == 0)
    tp.unload()


def test_the_hints_name_what_there_is_here() -> None:
    """Too many rows and too little scratch: the hints name the config's keys and ``scratch_bytes``, no option."""
    tp = finalized()
    wide = noise(0, tp.plan.request.max_rows + 1, 512)
    parts = parts_of(tp, wide, BROADCAST_RS)
    for call in (
        lambda: tp.broadcast(0, wide, BROADCAST_KV),
        lambda: tp.gather(0, parts, BROADCAST_RS),
        lambda: tp.allgather(0, parts, BROADCAST_RS, BROADCAST_ID),
        lambda: tp.add_residual(parts, [wide] * len(parts), BROADCAST_RS),
        lambda: tp.all_reduce(0, [wide] * 3, [wide.clone() for _ in range(3)]),
    ):
        with pytest.raises(ExecutionError, match="rows") as caught:
            call()
        hint = "move fewer rows at a time, or set a larger max_input_len or max_batch_size in the config"
        assert caught.value.hint == hint
    first, *_ = tp.get_scratch_slice_tp(1, HALF, BROADCAST_ID)
    most = first.untyped_storage().nbytes() - align(first.nbytes)
    again = "call begin_scratch_alloc_tp() before slices that may take the place of older ones, or "
    for size, hint in ((10**9, ""), (most + 64, again)):
        with pytest.raises(ExecutionError) as caught:
            tp.reserve_scratch([size, 0, 0])
        assert caught.value.hint == f"{hint}pass TPContext a larger scratch_bytes"
    with pytest.raises(ExecutionError, match="hint: pass TPContext a larger scratch_bytes"):
        tp.get_scratch_slice_tp(10**6, HALF, BROADCAST_RS)


def test_temp_tensors() -> None:
    """New tensors, as wide as a device's part or as the axis; their sizes in bytes need no finalized context."""
    tp = TPContext(small_model(), [1.5, 0.0, 1.0], backend="cpu")
    sizes = tp.get_temp_tensors_s(5, 2, BROADCAST_KV, dim=32), tp.get_temp_tensors_bc_s(5, 4, BROADCAST_KV, dim=32)
    assert sizes == ([5 * 5 * 32 * 2, 0, 5 * 3 * 32 * 2], [5 * 8 * 32 * 4, 0, 5 * 8 * 32 * 4])
    tp.finalize()
    tp.begin_scratch_alloc_tp()
    parts = tp.get_temp_tensors(5, HALF, BROADCAST_KV, dim=32)
    whole = tp.get_temp_tensors_bc(5, torch.float32, BROADCAST_KV, dim=32)
    assert [tuple(tensor.shape) for tensor in (*parts, *whole)] == [(5, 160), (5, 96), (5, 256), (5, 256)]
    assert [tensor.dtype for tensor in (*parts, *whole)] == [HALF, HALF, torch.float32, torch.float32]
    again = tp.get_temp_tensors(5, HALF, BROADCAST_KV, dim=32)
    assert not any(overlap(a, b) for a, b in combinations([*parts, *whole, *again], 2))


def test_scratch_is_handed_out_again() -> None:
    """After ``begin_scratch_alloc_tp`` the same memory comes again; slices of float32 are float32."""
    tp = finalized()
    first = tp.get_scratch_slice_tp(4, torch.float32, BROADCAST_ID)
    second = tp.get_scratch_slice_tp(4, torch.float32, BROADCAST_ID)
    assert {tensor.dtype for tensor in first} == {torch.float32}
    tp.begin_scratch_alloc_tp()
    again = tp.get_scratch_slice_tp(4, torch.float32, BROADCAST_ID)
    assert [a.data_ptr() == b.data_ptr() for a, b in zip(first, again, strict=True)] == [True] * 3
    assert not any(a.data_ptr() == b.data_ptr() for a, b in zip(second, again, strict=True))


def test_reserved_scratch_is_set_aside() -> None:
    """A slice does not touch reserved bytes; more than there is, and a GPU that is not in use, are errors."""
    tp = finalized((1.0, 0.0, 1.0))
    (start, _) = tp.get_scratch_slice_tp(1, HALF, BROADCAST_ID)
    tp.begin_scratch_alloc_tp()
    tp.reserve_scratch([1000, 0, 0])
    first, _ = tp.get_scratch_slice_tp(1, HALF, BROADCAST_ID)
    assert first.data_ptr() - start.data_ptr() == 1024
    with pytest.raises(ExecutionError, match=r"device 0 \(GPU 0\): 1000000000 bytes asked for"):
        tp.reserve_scratch([10**9, 0, 0])
    tp.begin_scratch_alloc_tp()
    with pytest.raises(ExecutionError, match="device 1 is not in use"):
        tp.reserve_scratch([1000, 1, 1000])
    again, _ = tp.get_scratch_slice_tp(1, HALF, BROADCAST_ID)
    assert again.data_ptr() == start.data_ptr()
    with pytest.raises(ExecutionError, match=r"device 1 is not in use\nhint: devices in use: \[0, 2\]"):
        tp.reserve_scratch([0, 1, 0])


def test_too_much_scratch_is_an_error() -> None:
    """Running out of scratch says how much there is; the original's ``narrow`` failed without numbers."""
    tp = finalized()
    with pytest.raises(ExecutionError, match=r"bytes asked for, [0-9]+ free of [0-9]+ of scratch"):
        tp.get_scratch_slice_tp_bc(10**6, HALF, BROADCAST_RS)


def test_pinned_buffers() -> None:
    """The buffers have the original's size and are two; ``get_pinned`` is a view, ``copy_pinned`` a copy in one."""
    tp = finalized()
    assert tp.pinned_temp is not None
    assert [buffer.shape for buffer in tp.pinned_temp] == [(40 * 4096,)] * 2
    assert {buffer.dtype for buffer in tp.pinned_temp} == {HALF}
    given = noise(0, 2, 3, 512)
    assert torch.equal(tp.copy_pinned(1, given), given)
    view = tp.get_pinned(1, 2, 3, 512)
    assert torch.equal(view, given)
    assert view.data_ptr() == tp.pinned_temp[1].data_ptr()
    assert not overlap(*tp.pinned_temp)
    odd = torch.arange(9, dtype=torch.int64)[::2]
    assert torch.equal(tp.copy_pinned(0, odd), odd)
    assert torch.equal(tp.get_pinned(1, 2, 3, 512), given)


@pytest.mark.parametrize("shape", [(1, 40, 5000), (-1, 1, 1)])
def test_pinned_views_stay_inside(shape: tuple[int, int, int]) -> None:
    """A view beyond the buffer is an error with its size."""
    with pytest.raises(ExecutionError, match="a host buffer of 327680 bytes has no room"):
        finalized().get_pinned(0, *shape)


def test_pinned_buffers_are_allocated_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving data allocates neither; the one that is used is, and holds what was gathered last before that."""
    sizes: list[int] = []
    empty = torch.empty

    def counting(size: int, **keys: Any) -> Tensor:
        sizes.append(size)
        return empty(size, **keys)

    tp = finalized()
    monkeypatch.setattr(pinned, "torch", SimpleNamespace(**{**vars(torch), "empty": counting}))
    wholes = [noise(i, 6, 2048) for i in range(3)]
    for whole in wholes:
        tp.gather(1, parts_of(tp, whole, BROADCAST_ID), BROADCAST_ID)
        tp.broadcast(0, whole, BROADCAST_ID)
    assert sizes == []
    assert torch.equal(tp.get_pinned(1, 1, 6, 2048)[0], wholes[-1])
    assert sizes == [40 * 4096]
    tp.gather(1, parts_of(tp, wholes[0], BROADCAST_ID), BROADCAST_ID)
    assert torch.equal(tp.get_pinned(1, 1, 6, 2048)[0], wholes[0])
    assert sizes == [40 * 4096]
    tp.copy_pinned(0, wholes[1])
    tp.unload()
    tp.finalize()
    assert sizes == [40 * 4096] * 2
    assert tp.pinned_temp is not None
    assert sizes == [40 * 4096] * 4


def test_no_room_for_pinned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they cannot be allocated, the error says how large they are, and everything else goes on."""

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with")

    tp = finalized()
    monkeypatch.setattr(pinned, "torch", SimpleNamespace(**{**vars(torch), "empty": full}))
    whole = noise(0, 6, 2048)
    for _ in range(2):
        with pytest.raises(
            ExecutionError, match=r"a host buffer of 163840 float16: CUDA error: out of memory\nhint: .*, or set"
        ):
            tp.get_pinned(0, 1, 1, 1)
        assert torch.equal(tp.gather(0, parts_of(tp, whole, BROADCAST_ID), BROADCAST_ID), whole)
