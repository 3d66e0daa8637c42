"""Memory of GPUs that other processes on the same host read and write, by CUDA's inter-process communication."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from attrs import frozen
from torch import Tensor

from tpplan.errors import ExecutionError
from tpplan.exec.toolchain.bindings import driver, runtime

if TYPE_CHECKING:
    from collections.abc import Callable

_SUCCESS = runtime.cudaError_t.cudaSuccess
#: Bytes of the driver's handles. Not every version of the bindings tells them, but all tell where they are.
_HANDLE_BYTES = 64
#: The attribute of an address by which the driver tells allocations apart.
_BUFFER_ID = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID)


class Handle(NamedTuple):
    """What another process needs to open a tensor's memory.

    Attributes:
        allocation: the driver's handle of the allocation that it lies in.
        offset: bytes from the allocation's start.
        nbytes: bytes of the tensor.
    """

    allocation: bytes
    offset: int
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return the handle of a contiguous tensor, which must outlive its use by other processes.

        Raises:
            ExecutionError: its memory cannot be shared.
        """
        with torch.cuda.device(tensor.device):
            error, start, _ = driver.cuMemGetAddressRange(tensor.data_ptr())
            if error != driver.CUresult.CUDA_SUCCESS:
                raise _failed("shared", error)
            error, handle = runtime.cudaIpcGetMemHandle(int(start))
        if error != _SUCCESS:
            raise _failed("shared", error)
        return cls(ctypes.string_at(handle.getPtr(), _HANDLE_BYTES), tensor.data_ptr() - int(start), tensor.nbytes)


class _Array:
    """Memory as torch takes it over from other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


@frozen(eq=False)
class Opened:
    """Memory of another process.

    Attributes:
        place: the GPU that it was opened for.
        tensor: uint8 tensor over it, for kernels on this GPU.
        start: address of its allocation.
    """

    place: torch.device
    tensor: Tensor
    start: Any
    _close = staticmethod(runtime.cudaIpcCloseMemHandle)  # still available when modules are torn down

    @classmethod
    def on(cls, place: torch.device, handle: Handle) -> Self:
        """Open another process's memory for kernels on a GPU.

        Raises:
            ExecutionError: it cannot be opened.
        """
        allocation = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(allocation.getPtr(), handle.allocation, _HANDLE_BYTES)
        with torch.cuda.device(place):  # else the owner's GPU would get a context of this process
            error, start = runtime.cudaIpcOpenMemHandle(allocation, runtime.cudaIpcMemLazyEnablePeerAccess)
            if error != _SUCCESS:
                raise _failed(f"opened on {place}", error)
            tensor = torch.as_tensor(_Array(int(start) + handle.offset, handle.nbytes))
        return cls(place, tensor, start)

    def read(self) -> int:
        """Return the first int32.

        Raises:
            ExecutionError: it cannot be read.
        """
        word = torch.zeros(1, dtype=torch.int32, device="cpu")
        with torch.cuda.device(self.place):
            kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
            (error,) = runtime.cudaMemcpy(word.data_ptr(), self.tensor.data_ptr(), word.nbytes, kind)
        if error != _SUCCESS:
            raise _failed("reached", error)
        return int(word)

    def close(self) -> None:
        """Close it; nothing may use it any more."""
        with torch.cuda.device(self.place):
            self._close(self.start)


def allocation_of(address: int, gpu: torch.device) -> tuple[int, int, bytes]:
    """Return where the allocation that an address is in begins and ends, and its handle; empty if it has none.

    Allocations that a driver maps piece by piece, as those of torch's expandable segments, have none.
    """
    with torch.cuda.device(gpu):
        error, start, nbytes = driver.cuMemGetAddressRange(address)
        if error != driver.CUresult.CUDA_SUCCESS:
            return address, address + 1, b""
        before = allow_while_capturing()
        error, handle = runtime.cudaIpcGetMemHandle(int(start))
        runtime.cudaThreadExchangeStreamCaptureMode(before)
    found = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES) if error == _SUCCESS else b""
    return int(start), int(start) + int(nbytes), found


@cache
def _attribute() -> Callable[..., int]:
    """Return the driver's function for attributes of addresses; calls by cuda-bindings take several times as long."""
    function = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64), ctypes.c_int
    return function


def identity_of(address: int) -> int:
    """Return the driver's number of the allocation that an address is in, which no other has; 0 if there is none."""
    found = ctypes.c_uint64()
    error = _attribute()(ctypes.byref(found), _BUFFER_ID, address)
    return 0 if error else found.value


def enter(gpu: torch.device) -> None:
    """Let this thread ask for a GPU's allocations, and share, open and close memory, also while a graph is captured.

    Without a GPU's context, the driver might know none of them.
    """
    torch.cuda.set_device(gpu)
    allow_while_capturing()


def allow_while_capturing() -> Any:
    """Let this thread share, open and close memory while a graph is captured; return what was so before."""
    _, before = runtime.cudaThreadExchangeStreamCaptureMode(runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
    return before


def _failed(what: str, error: Any) -> ExecutionError:
    hint = 'run the processes in one container, or compile with transport="events"'
    return ExecutionError(f"memory of a GPU cannot be {what} between processes: {error.name}", hint)
