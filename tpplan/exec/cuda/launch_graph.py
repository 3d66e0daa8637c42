"""Launches that recur, as graphs of one kernel each: the driver launches a graph in half the time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from tpplan.exec.cuda.launch import Ready, refused
from tpplan.exec.toolchain.bindings import driver
from tpplan.exec.toolchain.torch_shims import current_device, switch_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.exec.cuda.bound import Bound, BoundStep

_SUCCESS = driver.CUresult.CUDA_SUCCESS

#: Launches before a graph is made, which takes 45 µs and saves 4 each time (two H200).
_OFTEN = 16
#: Further launches if the graph was dropped before: if more programs take turns than are kept, most would go unused.
_AGAIN = 256
#: Maximum number of programs with graphs: each takes 120 KiB of every device (two H200), which no plan counts.
_KEPT = 64


class LaunchGraphs:
    """The graphs of programs that are issued often; the oldest are dropped."""

    def __init__(self, ordinals: Mapping[int, int]) -> None:
        """Take the ordinal of each device of the plan in use."""
        self._ordinals = ordinals
        self._latest: deque[Bound] = deque()

    def steps(self, bound: Bound) -> tuple[BoundStep, ...]:
        """Return the steps of a program that is not captured, of which kernels are graphs if it is issued often."""
        bound.times += 1
        if bound.times < _OFTEN:
            return bound.steps
        if not any(isinstance(issue, Ready) for issue, _, _ in bound.steps):
            bound.quick = bound.steps
            return bound.steps
        if len(self._latest) == _KEPT:
            oldest = self._latest.popleft()
            oldest.times, oldest.quick = -_AGAIN, ()
        self._latest.append(bound)
        bound.quick = tuple(
            (graph_of(issue, self._ordinals[device]) or issue if isinstance(issue, Ready) else issue, device, fixed)
            for issue, device, fixed in bound.steps
        )
        return bound.quick

    def clear(self) -> None:
        """Drop all graphs."""
        for bound in self._latest:
            bound.times, bound.quick = 0, ()
        self._latest.clear()


class _Executable:
    """A graph that can be launched. If it is deleted while it runs, the driver frees it when it is complete."""

    __slots__ = ("handle",)
    _destroy = staticmethod(driver.cuGraphExecDestroy)  # still available when modules are torn down

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __del__(self) -> None:
        self._destroy(self.handle)


def graph_of(ready: Ready, ordinal: int) -> Callable[[int], None] | None:
    """Return a callable that does the same as a launch and needs nothing of it; None if the driver refuses a graph.

    It cannot be captured.

    Args:
        ready: the launch.
        ordinal: ordinal of the device that the kernel is loaded on.
    """
    before = current_device()
    try:  # before the switch: an interrupt comes right behind it
        switch_device(ordinal)
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
