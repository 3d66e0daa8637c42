"""Row by row what ExLlamaV2's documentation of TPContext and compat has: names, arguments, defaults, results."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tpplan.exllamav2
from tests.exllamav2.models import HALF, finalized, noise, parts_of, small_model
from tpplan.errors import RequestError
from tpplan.exec import Tuning
from tpplan.exec.machine import move
from tpplan.exllamav2 import (
    BROADCAST_ID,
    BROADCAST_KV,
    BROADCAST_Q,
    BROADCAST_RS,
    BROADCAST_VC,
    TPContext,
    compat,
    splits,
    tensor_p,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CONSTANTS = {"BROADCAST_KV": 0, "BROADCAST_ID": 1, "BROADCAST_VC": 2, "BROADCAST_RS": 3, "BROADCAST_Q": 4}

#: The arguments of the original's methods, with their defaults.
METHODS = {
    "__init__": "self, model, gpu_split, expect_cache_tokens=0, expect_cache_base=None",
    "define_split": "self, gpu_split, expect_cache_tokens, expect_cache_base",
    "finalize": "self",
    "unload": "self",
    "all_devices": "self",
    "get_split": "self, broadcast_type",
    "get_devs": "self, broadcast_type",
    "broadcast": "self, buffer, input_tensor, broadcast_type, dim=1",
    "gather": "self, buffer, inputs, broadcast_type, dim=1",
    "allgather": "self, buffer, inputs, broadcast_type_g, broadcast_type_b, dim=1",
    "add_residual": "self, target, source, broadcast_type, dim=1",
    "wait_streams": "self",
    "get_sin_cos": "self",
    "get_pinned": "self, buffer, batch_size, q_len, dim",
    "copy_pinned": "self, buffer, inputs",
    "begin_scratch_alloc_tp": "self",
    "get_scratch_slice_tp": "self, rows, dtype, broadcast_type, dim=1",
    "get_scratch_slice_tp_bc": "self, rows, dtype, broadcast_type, dim=1",
    "reserve_scratch": "self, scratch",
    "get_temp_tensors": "self, rows, dtype, broadcast_type, dim=1",
    "get_temp_tensors_bc": "self, rows, dtype, broadcast_type, dim=1",
    "get_temp_tensors_s": "self, rows, esize, broadcast_type, dim=1",
    "get_temp_tensors_bc_s": "self, rows, esize, broadcast_type, dim=1",
}

#: Those of its functions.
FUNCTIONS = {
    compat.test_gpu_peer_copy: "device_a, device_b",
    compat.safe_move_tensor: "tensor, device, non_blocking=False",
    compat.gpu_peer_copy: "target, source",
    splits.get_device_stream: "index",
    splits.set_device_streams: "",
}


def _arguments(call: Callable[..., Any], wanted: str) -> str:
    """Return the positional arguments of a call, without defaults where the original has none."""
    bare = {each.partition("=")[0] for each in wanted.split(", ") if "=" not in each}
    return ", ".join(
        each.name if each.default is each.empty or each.name in bare else f"{each.name}={each.default}"
        for each in inspect.signature(call).parameters.values()
        if each.kind is each.POSITIONAL_OR_KEYWORD
    )


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants(name: str) -> None:
    """Each constant has the original's value, in both places that it may be imported from."""
    assert getattr(tensor_p, name) == getattr(tpplan.exllamav2, name) == CONSTANTS[name]


@pytest.mark.parametrize("name", METHODS)
def test_methods(name: str) -> None:
    """Each method takes the original's arguments, by position and by name; what is new is keyword-only."""
    assert _arguments(getattr(TPContext, name), METHODS[name]) == METHODS[name]


@pytest.mark.parametrize("call", FUNCTIONS, ids=lambda call: call.__name__)
def test_functions(call: Callable[..., Any]) -> None:
    """Each function takes the original's arguments, and none that is new."""
    assert _arguments(call, FUNCTIONS[call]) == FUNCTIONS[call]
    assert len(inspect.signature(call).parameters) == len(FUNCTIONS[call].split(", ")) * bool(FUNCTIONS[call])


def _is_split(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, tuple) and [*map(type, each)] == [int] * 3 for each in value
    )


def _is_of(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(each, kind) for each in value)


#: Whether an attribute is what it says: before ``finalize``, after it, and after ``unload``.
SPLIT, DEVICES, NUMBER = (_is_split,) * 3, (_is_of(int),) * 3, (lambda value: type(value) is int,) * 3


def _if_finalized(check: Callable[[object], bool]) -> tuple[Callable[[object], bool], ...]:
    return (lambda value: value is None), check, (lambda value: value is None)


ATTRIBUTES: dict[str, tuple[Callable[[object], bool], ...]] = {
    **{f"{axis}_split": SPLIT for axis in ("kv", "id", "vc", "rs", "q")},
    **{f"{axis}_split_devs": DEVICES for axis in ("kv", "id", "vc", "rs", "q")},
    "model": (lambda value: hasattr(value, "config"),) * 3,
    "all_devs": DEVICES,
    "device": NUMBER,
    "num_devices": NUMBER,
    "pinned_temp": _if_finalized(_is_of(torch.Tensor)),
    "streams": _if_finalized(_is_of(int)),
    "ext_tp_context": _if_finalized(lambda value: value is not None),
    "sin": _if_finalized(lambda value: value is None),  # until get_sin_cos
    "cos": _if_finalized(lambda value: value is None),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes(name: str) -> None:
    """Each attribute has the original's type, and is None where the original's is."""
    tp = TPContext(small_model(), [1.0, 0.0, 1.0], backend="cpu")
    steps: list[Callable[[], object]] = [lambda: None, tp.finalize, tp.unload]
    for step, is_right in zip(steps, ATTRIBUTES[name], strict=True):
        step()
        assert is_right(getattr(tp, name)), getattr(tp, name)


def _calls(tp: TPContext) -> dict[str, dict[str, Any]]:
    """Arguments for each method, by the original's names, in an order in which they can be called."""
    x, parts = noise(0, 2, 512), parts_of(tp, noise(0, 2, 2048), BROADCAST_ID)
    target = [x[:, a:b].clone() for _, a, b in tp.get_split(BROADCAST_RS)]
    heads = {"rows": 2, "dtype": HALF, "broadcast_type": BROADCAST_Q, "dim": 32}
    columns = {"rows": 2, "dtype": HALF, "broadcast_type": BROADCAST_ID}
    sizes = {"rows": 2, "esize": 2, "broadcast_type": BROADCAST_ID}
    return {
        "finalize": {},
        "all_devices": {},
        "get_split": {"broadcast_type": BROADCAST_KV},
        "get_devs": {"broadcast_type": BROADCAST_KV},
        "broadcast": {"buffer": 0, "input_tensor": x, "broadcast_type": BROADCAST_ID},
        "gather": {"buffer": 1, "inputs": parts, "broadcast_type": BROADCAST_ID},
        "allgather": {
            "buffer": 0,
            "inputs": parts,
            "broadcast_type_g": BROADCAST_ID,
            "broadcast_type_b": BROADCAST_VC,
        },
        "add_residual": {"target": target, "source": [x, x], "broadcast_type": BROADCAST_RS},
        "wait_streams": {},
        "get_sin_cos": {},
        "get_pinned": {"buffer": 0, "batch_size": 2, "q_len": 3, "dim": 5},
        "copy_pinned": {"buffer": 0, "inputs": x},
        "begin_scratch_alloc_tp": {},
        "get_scratch_slice_tp": heads,
        "get_scratch_slice_tp_bc": heads,
        "reserve_scratch": {"scratch": [64, 64]},
        "get_temp_tensors": columns,
        "get_temp_tensors_bc": columns,
        "get_temp_tensors_s": sizes,
        "get_temp_tensors_bc_s": sizes,
        "define_split": {"gpu_split": [1.0, 1.0], "expect_cache_tokens": 0, "expect_cache_base": None},
        "unload": {},
    }


RESULTS: dict[str, Any] = {
    "all_devices": [0, 1],
    "get_split": [(0, 0, 4), (1, 4, 8)],
    "get_devs": [0, 1],
    "broadcast": [(2, 512), (2, 512)],
    "gather": (2, 2048),
    "allgather": [(2, 2048), (2, 2048)],
    "get_sin_cos": ([(1, 1, 256, 32)] * 2, [(1, 1, 256, 32)] * 2),
    "get_pinned": (2, 3, 5),
    "copy_pinned": (2, 512),
    "get_scratch_slice_tp": [(2, 256), (2, 256)],
    "get_scratch_slice_tp_bc": [(2, 512), (2, 512)],
    "get_temp_tensors": [(2, 1024), (2, 1024)],
    "get_temp_tensors_bc": [(2, 2048), (2, 2048)],
    "get_temp_tensors_s": [4096, 4096],
    "get_temp_tensors_bc_s": [8192, 8192],
}


def _shapes(value: Any) -> Any:
    """Return tensors as their shapes, in lists and tuples too."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return type(value)(_shapes(each) for each in value) if isinstance(value, list | tuple) else value


def test_results() -> None:
    """Each method returns what the original's table says: lists per device, whole tensors in host memory, nothing."""
    tp = finalized((1.0, 1.0))
    calls = _calls(tp)
    assert set(calls) == set(METHODS) - {"__init__"}
    results = {name: getattr(tp, name)(**arguments) for name, arguments in calls.items()}
    assert {name: _shapes(value) for name, value in results.items() if value is not None} == RESULTS
    assert results["gather"].device.type == "cpu"


def test_streams_of_virtual_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is an entry for each device number, and no address, as virtual devices have no streams."""
    monkeypatch.setattr(splits, "global_streams", {})
    tp = finalized((1.0, 0.0, 1.0))
    assert tp.streams == [0, 0, 0]
    assert splits.get_device_stream(0) is None
    splits.set_device_streams()


@pytest.mark.multi_gpu
def test_streams_of_gpus() -> None:
    """``finalize`` takes the current streams, or makes some; ``set_device_streams`` makes them current, and no GPU."""
    own = [torch.cuda.Stream(i) for i in range(2)]  # type: ignore[no-untyped-call]
    splits.global_streams.clear()
    splits.global_streams[1] = own[1]
    with torch.cuda.stream(own[0]), torch.cuda.stream(own[1]):
        tp = TPContext(small_model(), [1.0, 1.0], backend="cuda")
        tp.finalize()
    assert tp.streams == [stream.cuda_stream for stream in own]
    assert [splits.get_device_stream(i) for i in range(3)] == [*own, None]
    torch.cuda.set_device(0)
    before = [torch.cuda.current_stream(i) for i in range(2)]
    splits.set_device_streams()
    assert [torch.cuda.current_stream(i) for i in range(2)] == own
    assert torch.cuda.current_device() == 0
    for stream in before:
        torch.cuda.set_stream(stream)
    torch.cuda.set_device(0)
    tp.unload()
    splits.global_streams.clear()
    tp.finalize()  # with the default streams, whose address would say that there is none
    assert tp.streams is not None
    assert all(tp.streams)
    assert [torch.cuda.current_stream(i) for i in range(2)] == before
    tp.unload()
    splits.global_streams.clear()


def test_tested_peer_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is read anew each time: what is known by then."""
    for known in (None, [[1, -1], [0, 1]]):
        monkeypatch.setattr(compat, "tested_peer_copies", lambda known=known: known)
        assert compat.tested_peer_copy == known
    assert not hasattr(compat, "tested")
    assert move.tested_peer_copies() is None  # nobody has tested a pair here


def test_transport_and_tuning_are_compiled_with() -> None:
    """What the constructor is given counts in ``finalize``; a transport that does not exist is refused at once."""
    tuning = Tuning(host_sums_bytes=2**10)
    tp = TPContext(small_model(), [1.0, 1.0], backend="cpu", transport="host", tuning=tuning)
    tp.finalize()
    assert tp.context is not None
    explained = tp.context.explain()
    assert (explained.transport, explained.limits.tuning) == ("host", tuning)
    default = finalized((1.0, 1.0)).context
    assert default is not None
    assert (default.explain().transport, default.explain().limits.tuning != tuning) == ("events", True)
    with pytest.raises(RequestError, match="transport"):
        TPContext(small_model(), [1.0], transport="pigeon")
    tp = TPContext(small_model(), [1.0, 1.0], backend="cpu", tuning=2**20)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="tuning"):
        tp.finalize()
