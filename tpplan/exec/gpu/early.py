"""Launches in graphs that begin before the kernel before them ends, which saves up to a microsecond each.

Their kernels call ``tpplan.exec.kernels.ptx.after_earlier`` before they touch anything that others write or read; what
never changes, such as weights, they may read before. They let the next begin as soon as they have waited: only then, so
that no more than two of a stream are there at a time. It takes what room blocks that have ended leave, and asks for its
first weights. Those that wait for other devices do so only where the context has its GPUs to itself, see
:mod:`tpplan.exec.gpu.alone`. CUDA calls it programmatic dependent launch.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from threading import local
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from tpplan.exec.gpu.kernel_cache import OVERLAPS
from tpplan.exec.gpu.launch import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tpplan.exec.gpu.launch import Ready

_SUCCESS = driver.CUresult.CUDA_SUCCESS
#: CUDA 12.3: graphs of older drivers have no edges that let a kernel begin before the one before it ends.
_OLDEST_DRIVER = 12030


class _Thread(local):
    """What is known of a thread.

    Attributes:
        allows: whether what it captures now may have such launches.
    """

    allows = False


_THREAD = _Thread()


@cache
def is_possible(capability: tuple[int, int]) -> bool:
    """Tell whether graphs may have such launches on GPUs of a compute capability, with the driver that is here."""
    error, version = driver.cuDriverGetVersion()
    return bool(capability >= OVERLAPS and error == _SUCCESS and version >= _OLDEST_DRIVER)


def launch(function: Any, blocks: tuple[int, int, int], threads: int, stream: int, parameters: int) -> Any:
    """Launch a kernel so, and return what the driver says.

    Args:
        function: of the driver.
        blocks: how many.
        threads: of each.
        stream: that is being captured.
        parameters: the address of those of the kernel's parameters.
    """
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.hStream, config.attrs, config.numAttrs = stream, [attribute], 1
    (result,) = driver.cuLaunchKernelEx(config, function, parameters, 0)
    return result


@contextmanager
def allowed(*, early: bool) -> Iterator[None]:
    """Tell kernels of callers, as the decoder's, whether this thread may capture them so; exchanges do not ask."""
    before, _THREAD.allows = _THREAD.allows, early
    try:
        yield
    finally:
        _THREAD.allows = before


def is_captured(stream: int) -> bool:
    """Tell whether a stream is being captured by a graph that allows such launches."""
    if not _THREAD.allows:
        return False
    error, status = driver.cuStreamIsCapturing(stream)
    return bool(error == _SUCCESS and status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE)


def early(ready: Ready) -> Callable[[int], None]:
    """Return what does so with a kernel that is ready, in a graph."""

    def issue(stream: int) -> None:
        blocks, threads = ready.shape
        result = launch(ready.kernel, (blocks, 1, 1), threads, stream, ready.parameters)
        if result != _SUCCESS:
            raise refused(ready.what, result)

    return issue
