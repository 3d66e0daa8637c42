"""A captured graph in parts, one for each device, of which none waits for another to begin or to end.

CUDA launches a graph of several devices on one of them, which has the others begin, and ends it once these have told
that they are done. On two H100 that takes 30 to 50 us of every step. Kernels that exchange data wait for each other
anyway, so that nothing else has to.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.cuda.launch import refused
from tpplan.exec.toolchain.bindings import driver
from tpplan.exec.toolchain.torch_shims import stream_handle

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

_SUCCESS = driver.CUresult.CUDA_SUCCESS
#: What also tells of the edges of programmatic launches, by its names in CUDA 12 and 13.
_CAPTURE_INFO = getattr(driver, "cuStreamGetCaptureInfo_v3", driver.cuStreamGetCaptureInfo)
_EDGES = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)


class Parts:
    """The parts of a graph, to launch together."""

    def __init__(self, clones: Sequence[Any], places: Sequence[torch.device]) -> None:
        """Load them on their devices, so that no launch has to.

        Args:
            clones: the part of each device, of :func:`cut`.
            places: the devices.

        Raises:
            ExecutionError: the driver refuses one.
        """
        self._places, self._loaded = tuple(places), []
        for clone, place in zip(clones, places, strict=True):
            with torch.cuda.device(place):
                self._loaded.append(_asked(driver.cuGraphInstantiate(clone, 0))[0])
                stream = torch.cuda.current_stream(place)
                _asked(driver.cuGraphUpload(self._loaded[-1], stream.cuda_stream))
                stream.synchronize()

    def launch(self) -> None:
        """Launch each part on its device's current stream.

        Raises:
            ExecutionError: the driver refuses one.
        """
        for loaded, place in zip(self._loaded, self._places, strict=True):
            stream = stream_handle(place.index)
            with nullcontext() if stream else torch.cuda.device(place):  # the default stream is the current device's
                (result,) = driver.cuGraphLaunch(loaded, stream)
            if result != _SUCCESS:
                raise refused(f"a graph's part of {place}", result)

    def __del__(self, destroy: Callable[[Any], Any] = driver.cuGraphExecDestroy) -> None:  # modules may be gone by then
        for loaded in vars(self).get("_loaded", ()):
            destroy(loaded)


def cut(streams: Sequence[torch.cuda.Stream]) -> list[Any]:
    """Return a graph for each device of one that is being captured on these streams, one of each device.

    They are empty if some work depends on another device's, or on a stream that no device's waits for.

    Args:
        streams: a stream of each device; those that work was issued to beside them have been waited for.

    Raises:
        ExecutionError: the driver cannot tell.
    """
    found = [_asked(_CAPTURE_INFO(stream.cuda_stream)) for stream in streams]
    graph = found[0][2]
    nodes = _asked(driver.cuGraphGetNodes(graph, _asked(driver.cuGraphGetNodes(graph))[1]))[0]
    edges = _asked(_EDGES(graph, _asked(_EDGES(graph))[-1]))
    of = {int(node): node for node in nodes}
    shares = shares_of(
        of, zip(map(int, edges[0]), map(int, edges[1]), strict=True), [[*map(int, at[3])] for at in found]
    )
    clones: list[Any] = []
    try:
        for share in shares:
            clones.append(clone := _asked(driver.cuGraphClone(graph))[0])
            for number in of.keys() - share:
                _asked(driver.cuGraphDestroyNode(_asked(driver.cuGraphNodeFindInClone(of[number], clone))[0]))
    except ExecutionError:
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
    is_apart = sum(map(len, shares)) == len(before) == len(set[int]().union(*shares))
    return shares if is_apart else []


def _asked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what the driver answers."""
    result, *found = answer
    if result != _SUCCESS:
        raise refused("a captured graph", result)
    return tuple(found)
