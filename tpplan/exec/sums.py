"""Sums on CUDA devices, by kernels that are prepared so that each costs the host little more than the driver."""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import TYPE_CHECKING, Any

import torch
from cuda.bindings import driver

from tpplan.errors import ExecutionError
from tpplan.exec import kernel_cache
from tpplan.exec.binding import finder
from tpplan.exec.kernel_cache import MOST_SOURCES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tpplan.exec.binding import Memory
    from tpplan.exec.program import Buffer, Sum

_NAMES = {torch.bfloat16: "sum_bf16", torch.float16: "sum_f16", torch.float32: "sum_f32"}
#: What a thread of a kernel reads at once.
_VECTOR_BYTES = 16
_THREADS = 256
_MOST_BLOCKS = 264
#: Arguments of a kernel: target, pitch, rows, width, whether vectors, sources, and address and pitch of each source.
_ARGUMENTS = Struct(f"<{6 + 2 * MOST_SOURCES}Q")


class Sums:
    """Prepares sums.

    Attributes:
        kernels: by dtype and device; one is loaded when a device first adds up a dtype.
    """

    def __init__(self) -> None:
        self.kernels: dict[tuple[torch.dtype, torch.device], Any] = {}

    def prepare(self, step: Sum, memory: Memory, dtype: torch.dtype, device: torch.device) -> Addition:
        """Return a sum, ready to be issued.

        Args:
            step: of a program.
            memory: of the context.
            dtype: of the operands.
            device: that adds up.
        """
        key = (dtype, device)
        if key not in self.kernels:
            self.kernels[key] = kernel_cache.load(_NAMES[dtype], torch.cuda.get_device_capability(device))
        return Addition(self.kernels[key], step, memory, dtype)


class Addition:
    """A kernel that adds up in float32, in order, and rounds once."""

    def __init__(self, kernel: Any, step: Sum, memory: Memory, dtype: torch.dtype) -> None:
        """Work out what is the same for all calls.

        Args:
            kernel: loaded by cuda.core.
            step: of a program.
            memory: of the context.
            dtype: of the operands.
        """
        self._device = step.stream.device
        self._kernel = driver.CUfunction(int(kernel.handle))
        self._itemsize = dtype.itemsize
        self._target, *self._sources = (finder(view, memory, dtype.itemsize) for view in (step.target, *step.sources))
        self._width = (step.target.stop - step.target.start) * dtype.itemsize
        self._unused = (0,) * (2 * (MOST_SOURCES - len(step.sources)))
        self._words = ctypes.create_string_buffer(_ARGUMENTS.size)
        first = ctypes.addressof(self._words)
        self._parameters = (ctypes.c_void_p * (_ARGUMENTS.size // 8))(*range(first, first + _ARGUMENTS.size, 8))
        self._pointers = ctypes.addressof(self._parameters)

    def issue(self, stream: int, operands: Mapping[Buffer, Tensor], rows: int) -> None:
        """Launch the kernel.

        Args:
            stream: handle of the one to launch on; if it is a default stream, its device has to be current.
            operands: the caller's tensors, ``[rows, columns]`` each, with columns that are contiguous.
            rows: of each.

        Raises:
            ExecutionError: the driver refuses.
        """
        width = self._width
        address, step, count = self._target(operands, rows)
        if not count * width:
            return
        numbers = [number for find in self._sources for number in find(operands, rows)[:2]]
        aligned = not any(number % _VECTOR_BYTES for number in (width, address, step, *numbers))
        threads = count * width // (_VECTOR_BYTES if aligned else self._itemsize)
        sources = len(self._sources)
        _ARGUMENTS.pack_into(self._words, 0, address, step, count, width, aligned, sources, *numbers, *self._unused)
        blocks = min(_MOST_BLOCKS, -(-threads // _THREADS))
        (result,) = driver.cuLaunchKernel(self._kernel, blocks, 1, 1, _THREADS, 1, 1, 0, stream, self._pointers, 0)
        if result != driver.CUresult.CUDA_SUCCESS:
            message = f"a sum of device {self._device} was not launched: {result.name}"
            raise ExecutionError(message, "earlier work on this device may have failed")
