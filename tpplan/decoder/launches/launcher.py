"""The launch of a kernel that the decoder brings along, on the stream that is torch's current one."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext, suppress
from functools import cache
from struct import pack, unpack
from typing import Final

import torch

from tpplan.exec.gpu import kernel_cache
from tpplan.exec.torch_shims import stream_handle

#: Dtypes that there are kernels for, and what the kernels' names say of them.
DTYPES: Final = {torch.bfloat16: "bf16", torch.float16: "f16"}


class Launcher:
    """A kernel on one CUDA device; all that it takes are 64-bit words.

    In graphs it is launched early, see :mod:`tpplan.exec.gpu.early`.
    """

    def __init__(self, name: str, place: torch.device, *, is_array: bool = False) -> None:
        """Load it at once: what is loaded later would wait for kernels that wait for other devices.

        Args:
            name: of the kernel; its first word tells the module, see :mod:`tpplan.exec.gpu.kernel_cache`.
            place: the device.
            is_array: whether its parameter is one array of :data:`tpplan.exec.gpu.exchange_table.MOST_WORDS` words.
        """
        from cuda.bindings import driver  # noqa: PLC0415 (not installed everywhere)

        from tpplan.exec.gpu import early  # noqa: PLC0415 (needs it)
        from tpplan.exec.gpu.launch import refused  # noqa: PLC0415

        capability = torch.cuda.get_device_capability(place)
        self._name, self._place, self._is_array = name, place, is_array
        self._kernel = kernel_cache.load(name, capability)
        self._start, self._success, self._refused = driver.cuLaunchKernel, driver.CUresult.CUDA_SUCCESS, refused
        torch.empty(1, device=place)  # the driver wants its context, which torch makes when something is first asked
        with torch.cuda.device(place):
            result, self._function = driver.cuKernelGetFunction(driver.CUkernel(int(self._kernel.handle)))
            if result != self._success:
                raise refused(f"{name} of {place}", result)
            with suppress(RuntimeError):  # drivers before CUDA 12.4 cannot
                driver.cuFuncLoad(self._function)
        self._early = early if early.is_possible(capability) else None

    def __call__(self, blocks: int | tuple[int, int, int], threads: int, *words: int) -> None:
        """Launch it.

        Args:
            blocks: how many, in one dimension or three.
            threads: of each.
            words: the kernel's parameters, or all of its array.

        Raises:
            ExecutionError: the driver refuses.
        """
        count = 1 if self._is_array else len(words)
        kept = (ctypes.c_uint64 * len(words))(*words)
        first = ctypes.addressof(kept)
        pointers = ctypes.addressof(of_words := (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8)))
        x, y, z = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        stream = stream_handle(self._place.index)
        if stream and self._early and self._early.is_captured(stream):
            result = self._early.launch(self._function, (x, y, z), threads, stream, pointers)
        else:
            with nullcontext() if stream else torch.cuda.device(self._place):  # whose default stream it is then
                (result,) = self._start(self._function, x, y, z, threads, 1, 1, 0, stream, pointers, 0)
        del of_words
        if result != self._success:
            raise self._refused(f"{self._name} of {self._place}", result)


@cache
def bits_of(number: float) -> int:
    """Return the bits of a float32, as kernels are told numbers."""
    found: int = unpack("I", pack("f", number))[0]
    return found
