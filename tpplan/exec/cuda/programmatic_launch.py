"""Programmatic dependent launch in graphs: a kernel begins before the preceding one ends; saves up to 1 µs each.

Such kernels call ``tpplan.exec.kernels.ptx.after_earlier`` before they access memory that other kernels write or read.
Only after this wait they let the next kernel begin, so at most two kernels of a stream are resident at a time. Before
the wait a kernel may read what the one in front of it does not write: weights, and what earlier kernels have written,
for these have ended. It occupies the room that finished blocks leave, and prefetches its first weights. Kernels that
wait for other devices let the next one begin only if the context has its GPUs to itself, see
:mod:`tpplan.exec.cuda.exclusive`.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from threading import local
from typing import TYPE_CHECKING, Any

from tpplan.exec.cuda.launch import refused
from tpplan.exec.toolchain.bindings import driver
from tpplan.exec.toolchain.kernel_cache import OVERLAPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tpplan.exec.cuda.launch import Ready

_SUCCESS = driver.CUresult.CUDA_SUCCESS
#: CUDA 12.3: older drivers do not support programmatic dependent launch in graphs.
_OLDEST_DRIVER = 12030


class _Thread(local):
    """State of a thread.

    Attributes:
        allows: whether its current capture may have early launches.
    """

    allows = False


_THREAD = _Thread()


@cache
def is_possible(capability: tuple[int, int]) -> bool:
    """Return whether this driver supports early launches in graphs on GPUs of a compute capability."""
    error, version = driver.cuDriverGetVersion()
    return bool(capability >= OVERLAPS and error == _SUCCESS and version >= _OLDEST_DRIVER)


def launch(  # noqa: PLR0917
    function: Any, blocks: tuple[int, int, int], threads: int, stream: int, parameters: int, shared: int = 0
) -> Any:
    """Launch a kernel early, and return the driver's result.

    Args:
        function: the driver's function.
        blocks: number of blocks in x, y and z.
        threads: threads per block.
        stream: a stream that is being captured.
        parameters: address of the array of the parameters' addresses.
        shared: bytes of dynamic shared memory.
    """
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.hStream, config.attrs, config.numAttrs, config.sharedMemBytes = stream, [attribute], 1, shared
    (result,) = driver.cuLaunchKernelEx(config, function, parameters, 0)
    return result


@contextmanager
def allowed(*, programmatic: bool) -> Iterator[None]:
    """Set whether this thread may capture early launches of callers' kernels, such as the decoder's, in the block.

    Exchange kernels do not depend on it.
    """
    before, _THREAD.allows = _THREAD.allows, programmatic
    try:
        yield
    finally:
        _THREAD.allows = before


def is_captured(stream: int) -> bool:
    """Return whether a stream is being captured by a graph that allows early launches."""
    if not _THREAD.allows:
        return False
    error, status = driver.cuStreamIsCapturing(stream)
    return bool(error == _SUCCESS and status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE)


def programmatic(ready: Ready) -> Callable[[int], None]:
    """Return a callable that launches a prepared kernel early, in a graph."""

    def issue(stream: int) -> None:
        blocks, threads = ready.shape
        result = launch(ready.kernel, (blocks, 1, 1), threads, stream, ready.parameters)
        if result != _SUCCESS:
            raise refused(ready.what, result)

    return issue
