"""A captured graph cut into one for each device, of which none waits for another to begin or to end.

CUDA launches a graph of several devices on one of them, which has the others begin, and ends it once these have told
that they are done. Kernels that exchange data wait for each other anyway, so that nothing else has to.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tpplan.exec.cuda.launch import refused
from tpplan.exec.toolchain.bindings import driver, runtime
from tpplan.exec.toolchain.torch_shims import stream_handle

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

_SUCCESS = driver.CUresult.CUDA_SUCCESS
#: What also tells of the edges of programmatic launches, by its names in CUDA 12 and 13.
_CAPTURE_INFO = getattr(driver, "cuStreamGetCaptureInfo_v3", driver.cuStreamGetCaptureInfo)
_EDGES = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)


class DeviceGraphs:
    """The graphs of all devices, to launch together.

    Attributes:
        launches: launches each of them on its device's current stream.
    """

    def __init__(self, clones: Sequence[Any], places: Sequence[torch.device]) -> None:
        """Load them on their devices, so that no launch has to.

        Args:
            clones: the graph of each device, of :func:`cut`.
            places: the devices.

        Raises:
            ExecutionError: the driver refuses one.
        """
        self._loaded: list[Any] = []
        for clone, place in zip(clones, places, strict=True):
            with torch.cuda.device(place):
                self._loaded.append(_checked(driver.cuGraphInstantiate(clone, 0))[0])
                stream = torch.cuda.current_stream(place)
                _checked(driver.cuGraphUpload(self._loaded[-1], stream.cuda_stream))
                stream.synchronize()
        self.launches = tuple(partial(_launch, *each) for each in zip(self._loaded, places, strict=True))

    def __del__(self, destroy: Callable[[Any], Any] = driver.cuGraphExecDestroy) -> None:  # modules may be gone by then
        for loaded in vars(self).get("_loaded", ()):
            destroy(loaded)


def _launch(loaded: Any, place: torch.device) -> None:
    """Launch a graph by the runtime, which makes the device's context current in a thread that has none yet."""
    with torch.cuda.device(place):  # whose default stream is meant
        (result,) = runtime.cudaGraphLaunch(loaded, stream_handle(place.index))
    if result != runtime.cudaError_t.cudaSuccess:
        raise refused(f"the graph of {place}", result)


def cut(streams: Sequence[torch.cuda.Stream]) -> list[Any]:
    """Return a graph for each device of one that is being captured on these streams, one of each device.

    They are empty if some work depends on another device's, or on a stream that no device's waits for.

    Args:
        streams: a stream of each device; those that work was issued to beside them have been waited for.

    Raises:
        ExecutionError: the driver cannot tell.
    """
    found = [_checked(_CAPTURE_INFO(stream.cuda_stream)) for stream in streams]
    graph = found[0][2]
    nodes = _checked(driver.cuGraphGetNodes(graph, _checked(driver.cuGraphGetNodes(graph))[1]))[0]
    edges = _checked(_EDGES(graph, _checked(_EDGES(graph))[-1]))
    of = {int(node): node for node in nodes}
    shares = shares_of(
        of, zip(map(int, edges[0]), map(int, edges[1]), strict=True), [[*map(int, at[3])] for at in found]
    )
    clones: list[Any] = []
    try:
        for share in shares:
            clones.append(clone := _checked(driver.cuGraphClone(graph))[0])
            for number in of.keys() - share:
                _checked(driver.cuGraphDestroyNode(_checked(driver.cuGraphNodeFindInClone(of[number], clone))[0]))
    except BaseException:
        drop(clones)
        raise
    return clones


def drop(clones: list[Any]) -> None:
    """Free what :func:`cut` has returned."""
    while clones:
        driver.cuGraphDestroy(clones.pop())


def shares_of(
    nodes: Collection[int], edges: Iterable[tuple[int, int]], ends: Sequence[Iterable[int]]
) -> list[set[int]]:
    """Return which nodes of a graph each device has; none if a node belongs to several of them, or to no one.

    Args:
        nodes: of the graph.
        edges: nodes, and a node that depends on each.
        ends: for each device the nodes that its last work depends on.
    """
    before: dict[int, list[int]] = {node: [] for node in nodes}
    for node, after in edges:
        before[after].append(node)
    shares = []
    for end in ends:
        share, left = set[int](), [*end]
        while left:
            if (node := left.pop()) not in share:
                share.add(node)
                left += before[node]
        shares.append(share)
    are_disjoint = sum(map(len, shares)) == len(before) == len(set[int]().union(*shares))
    return shares if are_disjoint else []


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what the driver answers."""
    result, *found = answer
    if result != _SUCCESS:
        raise refused("a captured graph", result)
    return tuple(found)
