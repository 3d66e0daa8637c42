"""The life of a ``tpplan.exllamav2`` context, and the examples of its documentation."""

from __future__ import annotations

import ctypes
import operator
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.exllamav2.models import (
    HALF,
    LLAMA,
    finalized,
    noise,
    overlap,
    parts_of,
    small_model,
)
from tpplan.core import workspace
from tpplan.errors import DeviceError, ExecutionError, RequestError
from tpplan.exec import build as building
from tpplan.exec import compiler
from tpplan.exec.backends.cpu import VirtualDevices
from tpplan.exec.machine.transports import Choice
from tpplan.exec.memory.arena import Arena
from tpplan.exec.tuning import Tuning
from tpplan.exllamav2 import (
    BROADCAST_ID,
    BROADCAST_KV,
    BROADCAST_Q,
    BROADCAST_RS,
    TPContext,
    areas,
    compat,
    pairwise,
    safe_move_tensor,
    tensor_p,
    test_gpu_peer_copy,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.core.plan import SplitPlan


def _calls(tp: TPContext) -> dict[str, Any]:
    """Every call that needs a finalized context, with arguments that are right."""
    x, parts = noise(0, 2, 512), parts_of(tp, noise(0, 2, 512), BROADCAST_RS)
    return {
        "broadcast": lambda: tp.broadcast(0, x, BROADCAST_KV),
        "gather": lambda: tp.gather(0, parts, BROADCAST_RS),
        "allgather": lambda: tp.allgather(0, parts, BROADCAST_RS, BROADCAST_RS),
        "add_residual": lambda: tp.add_residual(parts, [x, x], BROADCAST_RS),
        "all_reduce": lambda: tp.all_reduce(0, [x] * 2, [x.clone(), x.clone()]),
        "wait_streams": tp.wait_streams,
        "get_sin_cos": tp.get_sin_cos,
        "get_pinned": lambda: tp.get_pinned(0, 1, 1, 1),
        "copy_pinned": lambda: tp.copy_pinned(0, x),
    }


def _memory_calls(tp: TPContext) -> dict[str, Any]:
    """Every call that needs memory only, with arguments that are right."""
    return {
        "begin_scratch_alloc_tp": tp.begin_scratch_alloc_tp,
        "get_scratch_slice_tp": lambda: tp.get_scratch_slice_tp(1, HALF, BROADCAST_KV),
        "get_scratch_slice_tp_bc": lambda: tp.get_scratch_slice_tp_bc(1, HALF, BROADCAST_KV),
        "reserve_scratch": lambda: tp.reserve_scratch([64, 64]),
        "get_temp_tensors": lambda: tp.get_temp_tensors(1, HALF, BROADCAST_KV),
        "get_temp_tensors_bc": lambda: tp.get_temp_tensors_bc(1, HALF, BROADCAST_KV),
    }


def test_life() -> None:
    """Before ``finalize`` and after ``unload`` there are splits and scratch; what moves data is refused."""
    tp = TPContext(small_model(), [1.0, 1.0], backend="cpu")
    for _ in range(2):
        assert (tp.ext_tp_context, tp.pinned_temp, tp.sin, tp.cos) == (None, None, None, None)
        assert tp.get_split(BROADCAST_KV) == [(0, 0, 4), (1, 4, 8)]
        assert tp.get_devs(BROADCAST_Q) == tp.all_devices() == [0, 1]
        for call in _calls(tp).values():
            with pytest.raises(ExecutionError, match=r"not finalized, or unloaded\nhint: call finalize\(\) first"):
                call()
        for call in _memory_calls(tp).values():
            call()
        assert repr(tp) == f"<TPContext {tp.plan.model.name}, planned for devices 0, 1>"
        tp.finalize()
        assert repr(tp).endswith(", finalized for devices 0, 1>")
        assert tp.ext_tp_context
        for call in (_calls(tp) | _memory_calls(tp)).values():
            call()
        contexts = [tp.context]
        tp.finalize()
        contexts.append(tp.context)
        for _ in range(2):
            tp.unload()
        for context in contexts:
            assert context is not None
            with pytest.raises(ExecutionError, match="the context is closed"):
                context.synchronize()


def test_scratch_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices from before ``finalize`` stay valid, and those after it are in the same memory, until ``unload``."""
    made: list[int] = []

    def counted(size: int, *arguments: Any) -> Arena:
        made.append(size)
        return Arena(size, *arguments)

    monkeypatch.setattr(areas, "Arena", counted)
    tp = TPContext(small_model(), [2.0, 0.0, 1.0], backend="cpu")
    assert made == []
    tp.begin_scratch_alloc_tp()
    tp.reserve_scratch([64, 0, 64])
    slices = tp.get_scratch_slice_tp(3, HALF, BROADCAST_KV)
    for tensor in slices:
        tensor.fill_(7)
    planned = [area.scratch_bytes for area in workspace.areas(tp.plan.splits, "float16", tp.plan.request)]
    assert made == planned
    for _ in range(2):
        tp.finalize()
        assert tp.context is not None
        sizes = {device.arena.size_bytes for device in tp.context.devices.values()}
        assert sizes == {m.workspace_bytes - size for m, size in zip(tp.plan.memory, planned, strict=True)}
        later = tp.get_scratch_slice_tp(3, HALF, BROADCAST_KV)
        assert not any(overlap(a, b) for a, b in zip(slices, later, strict=True))
        assert {float(x) for tensor in slices for x in (tensor.min(), tensor.max())} == {7}
        tp.begin_scratch_alloc_tp()
        tp.reserve_scratch([64, 0, 64])
        again = tp.get_scratch_slice_tp(3, HALF, BROADCAST_KV)
        assert [x.data_ptr() for x in again] == [x.data_ptr() for x in slices]
    assert made == planned
    tp.unload()
    tp.finalize()
    assert made == planned * 2
    tp.define_split([1.0, 2.0])
    tp.get_scratch_slice_tp(3, HALF, BROADCAST_KV)
    assert len(made) == 3 * len(planned)


def test_scratch_that_fails_leaves_nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device has no memory for its scratch, the error says so, no other has any, and nothing is finalized."""
    arenas: list[Arena] = []

    def second_fails(size: int, place: torch.device, name: str) -> Arena:
        if len(arenas) % 2:
            arenas.clear()
            raise ExecutionError(f"{name}: cannot allocate {size} bytes", "free memory there")
        arenas.append(Arena(size, place, name))
        return arenas[-1]

    monkeypatch.setattr(areas, "Arena", second_fails)
    tp = TPContext(small_model(), [1.0, 1.0], backend="cpu")
    for call in (lambda: tp.get_scratch_slice_tp(1, HALF, BROADCAST_KV), tp.finalize):
        with pytest.raises(ExecutionError, match=r"device 1 \(GPU 1\): cannot allocate"):
            call()
        assert (tp.context, tp.ext_tp_context) == (None, None)
    monkeypatch.setattr(areas, "Arena", Arena)
    tp.finalize()
    assert tp.ext_tp_context is not None


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Make this machine look as if it had two GPUs, whose memory is that of the host.

    Returns:
        Bytes on each: ``free``, in tensors of this process (``held``), and kept by torch for others (``kept``).
    """
    memory = {"free": 0, "held": 0, "kept": 0}

    def on_host(plan: SplitPlan, _: Any, __: Any, **keys: Any) -> Any:
        return build(plan, [torch.device("cpu")] * 2, VirtualDevices, **keys)

    build = building.build
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (memory["free"], 2**40))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: memory["held"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: memory["held"] + memory["kept"])
    monkeypatch.setattr(compiler, "choose", lambda *_: (Choice("events"), []))
    monkeypatch.setattr(compiler, "build", on_host)
    monkeypatch.setattr(compiler, "stored", lambda *_: (Tuning(), "as given"))
    monkeypatch.setattr(areas, "Arena", lambda size, _, name: Arena(size, "cpu", name))
    return memory


def test_memory_that_holds_the_weights_is_not_missing(cards: dict[str, int]) -> None:
    """A card that weights, cache and scratch fill has only to have the rest of the workspace free."""
    tp = TPContext(small_model(), [1.0, 1.0])
    entry = tp.plan.memory[0]
    scratch = workspace.areas(tp.plan.splits, "float16", tp.plan.request)[0].scratch_bytes
    rest = entry.workspace_bytes - scratch
    tp.begin_scratch_alloc_tp()
    tp.get_scratch_slice_tp(1, HALF, BROADCAST_KV)
    cards |= {"free": rest - 1, "held": entry.weights_bytes + entry.cache_bytes + scratch}
    with pytest.raises(ExecutionError, match=r"devices\[0\] \(GPU 0\), here GPU: the workspace needs .* are free"):
        tp.finalize()
    for free, kept in ((rest, 0), (0, rest)):
        cards |= {"free": free, "kept": kept}
        for _ in range(2):
            tp.finalize()
            assert tp.ext_tp_context is not None
        tp.unload()


def test_the_handle_is_no_address() -> None:
    """``ext_tp_context`` names the context, keeps it not alive, and nothing makes a number of it."""
    tp = finalized()
    handle = tp.ext_tp_context
    assert handle is not None
    assert (handle.tp_context, handle is tp.ext_tp_context) == (tp, True)
    numbers: list[Callable[[Any], object]] = [int, float, operator.index, ctypes.c_void_p]
    for number in numbers:
        with pytest.raises(TypeError, match=r"Handle|pointer"):
            number(handle)
    tp.unload()
    assert tp.ext_tp_context is None
    with pytest.raises(ExecutionError, match="not finalized, or unloaded"):
        handle.tp_context.wait_streams()
    del tp
    with pytest.raises(ExecutionError, match="the TPContext of this handle no longer exists"):
        _ = handle.tp_context


def test_numbers_of_buffers_and_types() -> None:
    """Buffers are 0 and 1, types 0 to 4; others are errors, not the memory behind the last."""
    tp = finalized()
    x = noise(0, 2, 512)
    for buffer in (-1, 2):
        for call in (
            lambda b: tp.broadcast(b, x, 0),
            lambda b: tp.get_pinned(b, 1, 1, 1),
            lambda b: tp.copy_pinned(b, x),
        ):
            with pytest.raises(ExecutionError, match=f"there is no host buffer {buffer}"):
                call(buffer)
    for kind in (-1, 5):
        for ask in (tp.get_split, tp.get_devs, lambda k: tp.broadcast(0, x, k)):
            with pytest.raises(RequestError, match=f"unknown broadcast type {kind}"):
                ask(kind)


def test_wrong_operands_change_nothing() -> None:
    """Too few parts, wrong widths and mixed dtypes are refused before anything is written."""
    tp = finalized()
    parts = parts_of(tp, noise(0, 2, 2048), BROADCAST_ID)
    assert tp.pinned_temp is not None
    tp.pinned_temp[0].fill_(7)
    for wrong in (parts[:-1], [*parts[:-1], parts[-1][:, 1:]], [parts[0].float(), *parts[1:]], parts[::-1]):
        for call in (lambda p: tp.gather(0, p, BROADCAST_ID), lambda p: tp.allgather(0, p, BROADCAST_ID, BROADCAST_KV)):
            with pytest.raises(ExecutionError):
                call(wrong)
    assert (tp.pinned_temp[0] == 7).all()


# The usage examples of the original's documentation


def test_usage_examples(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """The examples of the original's documentation run as they stand, on virtual devices, with a warning about that."""
    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has the GPUs of the example")
    model = small_model(**LLAMA)
    # Create TP context: 20 GB on GPU 0, 20 GB on GPU 1
    tp_context = TPContext(model, gpu_split=[20.0, 20.0])

    # Inspect the KV head split
    for dev, a, b in tp_context.kv_split or ():
        print(f"GPU {dev}: KV heads [{a}:{b}]")  # noqa: T201

    # Finalize (allocates pinned buffers and native handle)
    tp_context.finalize()
    assert capsys.readouterr().out == "GPU 0: KV heads [0:4]\nGPU 1: KV heads [4:8]\n"
    assert "2 GPUs planned for, 0 here" in caplog.text

    # Suppose hidden_states is on GPU 0 after layernorm
    hidden_states = torch.randn(1, 128, 4096, dtype=torch.half)

    # Broadcast to all devices in the intermediate-dimension split
    split_tensors = tp_context.broadcast(
        buffer=0, input_tensor=hidden_states.view(-1, hidden_states.shape[-1]), broadcast_type=BROADCAST_ID
    )
    # split_tensors is a list with one tensor per GPU
    assert isinstance(split_tensors, list)
    assert [torch.equal(tensor, hidden_states[0]) for tensor in split_tensors] == [True, True]

    # After each GPU computes its portion of the MLP output:
    whole = noise(0, 128, 14336)
    partial_outputs = parts_of(tp_context, whole, BROADCAST_ID)
    gathered = tp_context.gather(
        buffer=1,
        inputs=partial_outputs,  # list of tensors, one per device
        broadcast_type=BROADCAST_ID,
    )
    # gathered is a CPU tensor with the full concatenated result
    assert torch.equal(gathered, torch.cat(partial_outputs, dim=1))
    assert gathered.device.type == "cpu"
    tp_context.unload()


def test_usage_examples_of_compat() -> None:
    """A tensor, and a tuple of them, moved to where they are: the same tensors. ``pairwise`` is the library's."""
    tensor_cpu = torch.randn(4, 4)
    assert safe_move_tensor(tensor_cpu, "cpu") is tensor_cpu
    weight, bias = safe_move_tensor((tensor_cpu, tensor_cpu[0]), torch.device("cpu"), non_blocking=True)
    assert torch.equal(weight, tensor_cpu)
    assert torch.equal(bias, tensor_cpu[0])
    assert list(pairwise("abc")) == [("a", "b"), ("b", "c")]
    assert (compat.safe_move_tensor, tensor_p.TPContext) == (safe_move_tensor, TPContext)
    with pytest.raises(DeviceError, match="'cpu' is no GPU"):
        test_gpu_peer_copy(torch.device("cpu"), torch.device("cpu"))


def test_the_python_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's first example, which needs no ExLlamaV2, runs as it stands and prints what its comment says.

    It leaves no file.
    """
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs/exllamav2.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    exec(code, {})  # noqa: S102 (our own)
    (promised,) = re.findall(r"^print\(.*?\)  # (.*)$", code, re.MULTILINE)
    assert capsys.readouterr().out == f"{promised}\n"
    assert not [*tmp_path.iterdir()]
