"""Handles of GPUs' memory: the bytes that a driver gives in one process are those that it gets in another."""

from __future__ import annotations

import ctypes
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="needs cuda.bindings: pip install '.[cu13]'")

from cuda.bindings import driver, runtime

from tpplan.errors import ExecutionError
from tpplan.exec.processes import ipc


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Pretend a driver whose handles are random bytes; return what it was given and says of it."""
    seen = SimpleNamespace(handle=os.urandom(64), opened=b"", closed=None, result=runtime.cudaError_t.cudaSuccess)

    def get(_: int) -> tuple[Any, Any]:
        handle = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), seen.handle, 64)
        return seen.result, handle

    def open_handle(handle: Any, flags: int) -> tuple[Any, int]:
        assert flags == runtime.cudaIpcMemLazyEnablePeerAccess
        seen.opened = ctypes.string_at(handle.getPtr(), 64)
        return seen.result, 2**40

    def close(start: int) -> None:
        seen.closed = start

    found = driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch, "as_tensor", lambda array: array.__cuda_array_interface__)
    monkeypatch.setattr(
        ipc, "driver", SimpleNamespace(**vars(driver) | {"cuMemGetAddressRange": lambda p: (found, p - 24, 4096)})
    )
    names = {"cudaIpcGetMemHandle": get, "cudaIpcOpenMemHandle": open_handle}
    monkeypatch.setattr(ipc, "runtime", SimpleNamespace(**vars(runtime) | names))
    monkeypatch.setattr(ipc.Opened, "_close", staticmethod(close))
    return seen


def test_all_bytes_of_a_handle_arrive(gpu: SimpleNamespace) -> None:
    """In whatever version of the bindings. The tensor is found in the allocation, which is closed whole."""
    tensor = torch.zeros(10, dtype=torch.int32)
    handle = ipc.Handle.of(tensor)
    assert handle == ipc.Handle(gpu.handle, 24, 40)
    opened = ipc.Opened.on(torch.device("cuda", 0), handle)
    assert gpu.opened == gpu.handle
    array: Any = opened.tensor
    assert array["data"] == (2**40 + 24, False)
    assert array["shape"] == (40,)
    opened.close()
    assert gpu.closed == 2**40


def test_what_a_driver_refuses_is_named(gpu: SimpleNamespace) -> None:
    """Both ways, with a hint that leads on."""
    handle = ipc.Handle.of(torch.zeros(1))
    gpu.result = runtime.cudaError_t.cudaErrorPeerAccessUnsupported
    with pytest.raises(ExecutionError, match=r"cannot be shared .*PeerAccessUnsupported\nhint: .*events"):
        ipc.Handle.of(torch.zeros(1))
    with pytest.raises(ExecutionError, match=r"cannot be opened on cuda:0 .*PeerAccessUnsupported\nhint: .*events"):
        ipc.Opened.on(torch.device("cuda", 0), handle)
