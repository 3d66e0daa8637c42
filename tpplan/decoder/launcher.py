"""The launch of a kernel that the decoder brings along, on the stream that is torch's current one."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from tpplan.exec import kernel_cache
from tpplan.exec.torch_shims import stream_handle

if TYPE_CHECKING:
    from collections.abc import Callable


class Launcher:
    """A kernel on one CUDA device; all that it takes are 64-bit words.

    In a graph it begins before the kernel before it ends, which saves half a microsecond: it has to call
    ``tpplan.exec.ptx.after_earlier`` before it touches anything that others write or read.
    """

    def __init__(self, name: str, place: torch.device) -> None:
        """Load it at once: what is loaded later would wait for kernels that wait for other devices.

        Args:
            name: of the kernel; its first word tells the module, see :mod:`tpplan.exec.kernel_cache`.
            place: the device.
        """
        from cuda.bindings import driver  # noqa: PLC0415 (not installed everywhere)

        from tpplan.exec.launch import refused  # noqa: PLC0415 (needs it)

        capability = torch.cuda.get_device_capability(place)
        self._name, self._place = name, place
        self._kernel = kernel_cache.load(name, capability)
        self._function = driver.CUfunction(int(self._kernel.handle))
        with torch.cuda.device(place), suppress(RuntimeError):  # drivers before CUDA 12.4 cannot
            driver.cuFuncLoad(self._function)
        self._start, self._success, self._refused = driver.cuLaunchKernel, driver.CUresult.CUDA_SUCCESS, refused
        self._overlapping = _overlapping(driver) if capability >= kernel_cache.OVERLAPS else None

    def __call__(self, blocks: int | tuple[int, int, int], threads: int, *words: int) -> None:
        """Launch it.

        Args:
            blocks: how many, in one dimension or three.
            threads: of each.
            words: the kernel's parameters.

        Raises:
            ExecutionError: the driver refuses.
        """
        count = len(words)
        kept = (ctypes.c_uint64 * count)(*words)
        first = ctypes.addressof(kept)
        pointers = ctypes.addressof(of_words := (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8)))
        x, y, z = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        stream = stream_handle(self._place.index)
        if self._overlapping and self._overlapping(self._function, (x, y, z), threads, stream, pointers):
            return
        with nullcontext() if stream else torch.cuda.device(self._place):  # whose default stream it is then
            (result,) = self._start(self._function, x, y, z, threads, 1, 1, 0, stream, pointers, 0)
        del of_words
        if result != self._success:
            raise self._refused(f"{self._name} of {self._place}", result)


def _overlapping(driver: Any) -> Callable[[Any, tuple[int, int, int], int, int, int], bool]:
    """Return what launches a kernel so that it overlaps with the one before, if its stream is captured; it says so."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    success, captured = driver.CUresult.CUDA_SUCCESS, driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE

    def launch(function: Any, blocks: tuple[int, int, int], threads: int, stream: int, pointers: int) -> bool:
        if not stream or driver.cuStreamIsCapturing(stream) != (success, captured):
            return False
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.hStream, config.attrs, config.numAttrs = stream, [attribute], 1
        (result,) = driver.cuLaunchKernelEx(config, function, pointers, 0)
        return bool(result == success)

    return launch
