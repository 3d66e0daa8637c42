"""A launch that comes again and again as a graph of one kernel: the driver issues it in half the time of a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from tpplan.exec.launch import refused
from tpplan.exec.torch_shims import switch_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.exec.launch import Ready

_SUCCESS = driver.CUresult.CUDA_SUCCESS


class _Executable:
    """A graph that can be launched; one that still runs when it dies is freed by the driver when it is done."""

    __slots__ = ("handle",)
    _destroy = staticmethod(driver.cuGraphExecDestroy)  # which is still there when modules are torn down

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __del__(self) -> None:
        self._destroy(self.handle)


def graph_of(ready: Ready, ordinal: int) -> Callable[[int], None] | None:
    """Return what does the same as a launch, of which nothing has to be kept; None if the driver refuses a graph.

    It cannot be captured.

    Args:
        ready: to be launched.
        ordinal: of torch's device that the kernel is loaded on.
    """
    before = switch_device(ordinal)
    try:
        executable = _instantiate(ready)
    finally:
        switch_device(before)
    if executable is None:
        return None
    start, handle, what = driver.cuGraphLaunch, executable.handle, ready.what

    def launch(stream: int, _: object = executable) -> None:
        (result,) = start(handle, stream)
        if result != _SUCCESS:
            raise refused(what, result)

    return launch


def _instantiate(ready: Ready) -> _Executable | None:
    node = driver.CUDA_KERNEL_NODE_PARAMS()
    error, node.ctx = driver.cuCtxGetCurrent()
    if error != _SUCCESS:
        return None
    node.kern = driver.CUkernel(int(ready.kernel))
    node.gridDimX, node.blockDimX = ready.shape
    node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1
    node.kernelParams = ready.parameters
    error, graph = driver.cuGraphCreate(0)
    if error != _SUCCESS:
        return None
    try:
        error, _ = driver.cuGraphAddKernelNode(graph, None, 0, node)
        if error != _SUCCESS:
            return None
        error, handle = driver.cuGraphInstantiate(graph, 0)
        return _Executable(handle) if error == _SUCCESS else None
    finally:
        driver.cuGraphDestroy(graph)
