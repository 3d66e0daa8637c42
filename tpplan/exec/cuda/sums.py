"""Sums on CUDA devices, by kernels that are prepared so that each costs the host little more than the driver's call."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from tpplan.exec.cuda.launch import Ready
from tpplan.exec.memory.binding import finder
from tpplan.exec.toolchain import kernel_cache
from tpplan.exec.toolchain.bindings import driver
from tpplan.exec.toolchain.kernel_cache import MOST_SOURCES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.programs.program import Buffer, Sum

#: Names of the kernels that add up a dtype.
NAMES = {torch.bfloat16: "sum_bf16", torch.float16: "sum_f16", torch.float32: "sum_f32"}
#: Bytes that a thread reads at once, if everything is aligned to them.
_VECTOR_BYTES = 16
_THREADS = 256
_MOST_BLOCKS = 264
#: Arguments of a kernel: target, pitch, rows, width, whether vectors, sources, and address and pitch of each source.
_ARGUMENTS = 6 + 2 * MOST_SOURCES


def prepare(step: Sum, memory: Memory, dtype: torch.dtype, device: torch.device) -> Addition:
    """Return a sum, ready for all operands, and load its kernel on first use.

    Args:
        step: the program's sum.
        memory: the context's memory.
        dtype: dtype of the operands.
        device: the device that adds up.
    """
    kernel = kernel_cache.load(NAMES[dtype], torch.cuda.get_device_capability(device))
    return Addition(kernel, step, memory, dtype)


class Addition:
    """A kernel that adds up in float32, in order, and rounds once."""

    def __init__(self, kernel: Any, step: Sum, memory: Memory, dtype: torch.dtype) -> None:
        """Prepare everything that does not depend on the operands.

        Args:
            kernel: the loaded kernel.
            step: the program's sum.
            memory: the context's memory.
            dtype: dtype of the operands.
        """
        self._device = step.stream.device
        self._kernel = driver.CUfunction(int(kernel))
        self._itemsize = dtype.itemsize
        self._target, *self._sources = (finder(view, memory, dtype.itemsize) for view in (step.target, *step.sources))
        self._width = (step.target.stop - step.target.start) * dtype.itemsize

    def bind(self, operands: Mapping[Buffer, Tensor], rows: int) -> Callable[[int], None]:
        """Return a callable that launches the kernel on a given stream any number of times.

        Args:
            operands: the caller's tensors, ``[rows, columns]`` each, with contiguous columns; only their addresses are
                kept.
            rows: rows of each tensor.
        """
        width = self._width
        address, step, count = self._target(operands, rows)
        if not count * width:
            return lambda _: None
        numbers = [number for find in self._sources for number in find(operands, rows)[:2]]
        aligned = not any(number % _VECTOR_BYTES for number in (width, address, step, *numbers))
        threads = count * width // (_VECTOR_BYTES if aligned else self._itemsize)
        words = [address, step, count, width, aligned, len(self._sources), *numbers]
        parameters = (ctypes.c_uint64 * _ARGUMENTS)(*words)
        shape = min(_MOST_BLOCKS, -(-threads // _THREADS)), _THREADS
        return Ready(f"a sum of device {self._device}", self._kernel, shape, parameters, _ARGUMENTS)
