"""Launching of the decoder's own CUDA kernels, on torch's current stream."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext, suppress
from functools import cache
from struct import pack, unpack
from typing import Final

import torch

from tpplan.exec.toolchain import kernel_cache
from tpplan.exec.toolchain.torch_shims import stream_handle

#: Dtypes that kernels support, and their abbreviations in kernels' names.
DTYPES: Final = {torch.bfloat16: "bf16", torch.float16: "f16"}

#: torch's names for the bytes of shared memory of a block and of a multiprocessor; and what all GPUs from capability
#: 8.0 on have, for versions of torch that do not report them.
_SHARED: Final = {"shared_memory_per_block_optin": 99 << 10, "shared_memory_per_multiprocessor": 100 << 10}


def shared_memory_of(place: torch.device) -> tuple[int, int]:
    """Return the most bytes of shared memory that a block of a CUDA device can have, and those of a multiprocessor."""
    found = torch.cuda.get_device_properties(place)
    of_block, of_processor = (int(getattr(found, name, least)) for name, least in _SHARED.items())
    return of_block, of_processor


class Launcher:
    """A kernel on one CUDA device, whose parameters are 64-bit words.

    In graphs it is a programmatic dependent launch: it starts before the kernel in front of it has ended, see
    :mod:`tpplan.exec.cuda.programmatic_launch`.
    """

    def __init__(self, name: str, place: torch.device, *, is_array: bool = False, most_shared: int = 0) -> None:
        """Load the kernel now: loading it later would wait for kernels that themselves wait for other devices.

        Args:
            name: name of the kernel; its first word names the module, see :mod:`tpplan.exec.toolchain.kernel_cache`.
            place: the device.
            is_array: whether its parameter is one array of ``MOST_WORDS`` of :mod:`tpplan.exec.protocol.words`.
            most_shared: bytes of shared memory that launches may ask for.

        Raises:
            ExecutionError: the driver refuses the kernel.
        """
        from tpplan.exec.cuda import programmatic_launch  # noqa: PLC0415 (needs it)
        from tpplan.exec.cuda.launch import refused  # noqa: PLC0415
        from tpplan.exec.toolchain.bindings import driver  # noqa: PLC0415 (not installed everywhere)

        capability = torch.cuda.get_device_capability(place)
        self._name, self._place, self._is_array = name, place, is_array
        kernel = kernel_cache.load(name, capability)
        self._start, self._success, self._refused = driver.cuLaunchKernel, driver.CUresult.CUDA_SUCCESS, refused
        torch.empty(1, device=place)  # makes torch create the CUDA context that the driver needs
        with torch.cuda.device(place):
            result, self._function = driver.cuKernelGetFunction(kernel)
            if result != self._success:
                raise refused(f"{name} of {place}", result)
            if most_shared:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                (result,) = driver.cuFuncSetAttribute(self._function, attribute, most_shared)
                if result != self._success:
                    raise refused(f"{name} of {place}", result)
            with suppress(RuntimeError):  # not in drivers before CUDA 12.4
                driver.cuFuncLoad(self._function)
        self._programmatic = programmatic_launch if programmatic_launch.is_possible(capability) else None

    def __call__(self, blocks: int | tuple[int, int, int], threads: int, *words: int, shared: int = 0) -> None:
        """Launch the kernel.

        Args:
            blocks: number of blocks, in one dimension or three.
            threads: threads of a block.
            words: the kernel's parameters, or all words of its array.
            shared: bytes of shared memory that the kernel has besides its own arrays.

        Raises:
            ExecutionError: the driver refuses the launch.
        """
        count = 1 if self._is_array else len(words)
        parameters = (ctypes.c_uint64 * len(words))(*words)
        first = ctypes.addressof(parameters)
        pointers = ctypes.addressof(of_words := (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8)))
        x, y, z = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        stream = stream_handle(self._place.index)
        if stream and self._programmatic and self._programmatic.is_captured(stream):
            result = self._programmatic.launch(self._function, (x, y, z), threads, stream, pointers, shared)
        else:
            with nullcontext() if stream else torch.cuda.device(self._place):  # the default stream is the device's
                (result,) = self._start(self._function, x, y, z, threads, 1, 1, shared, stream, pointers, 0)
        del of_words
        if result != self._success:
            raise self._refused(f"{self._name} of {self._place}", result)


@cache
def bits_of(number: float) -> int:
    """Return the bits of a float32, the form in which kernels take floats."""
    found: int = unpack("I", pack("f", number))[0]
    return found
