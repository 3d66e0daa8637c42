"""Launches that come again as graphs of one kernel: the same kernel with the same words, for half the time."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

pytest.importorskip("cuda.bindings", reason="needs cuda.core: pip install '.[cu13]'")

from cuda.bindings import driver

from tpplan.errors import ExecutionError
from tpplan.exec.cuda import launch
from tpplan.exec.cuda.launch import Bound, LaunchGraphs, Ready, graph_of

if TYPE_CHECKING:
    from tpplan.exec.cuda.launch import BoundStep

_SUCCESS, _REFUSED = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY


class Driver:
    """In the place of the driver: graphs copy the words of their kernel when they are told of it."""

    CUresult, CUkernel, CUcontext = driver.CUresult, driver.CUkernel, driver.CUcontext
    CUDA_KERNEL_NODE_PARAMS = driver.CUDA_KERNEL_NODE_PARAMS

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.device = 7
        self.at: list[int] = []  # the devices that were current when graphs were made
        self.node: tuple[Any, ...] = ()
        self.launched: list[tuple[int, int]] = []
        self.destroyed: list[str] = []

    def switch_device(self, device: int) -> int:
        """Make a device current."""
        before, self.device = self.device, device
        return before

    def _answer(self, name: str, *values: Any) -> tuple[Any, ...]:
        return (_REFUSED if name == self.refuses else _SUCCESS, *values)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:  # noqa: N802 (the driver's names)
        """Return the context of the current device."""
        return self._answer("context", driver.CUcontext(100 + self.device))

    def cuGraphCreate(self, _: int) -> tuple[Any, ...]:  # noqa: N802
        """Make a graph."""
        self.at.append(self.device)
        return self._answer("graph", "graph")

    def cuGraphAddKernelNode(self, graph: str, before: object, count: int, node: Any) -> tuple[Any, ...]:  # noqa: N802
        """Look at a node as the driver does."""
        assert (graph, before, count) == ("graph", None, 0)
        pointers = (ctypes.c_void_p * 2).from_address(int(node.kernelParams))
        words = [ctypes.c_uint64.from_address(pointer or 0).value for pointer in pointers]
        grid = node.gridDimX, node.gridDimY, node.gridDimZ, node.blockDimX, node.blockDimY, node.blockDimZ
        self.node = int(node.kern), int(node.ctx), grid, node.sharedMemBytes, words
        return self._answer("node", "node")

    def cuGraphInstantiate(self, graph: str, _: int) -> tuple[Any, ...]:  # noqa: N802
        """Make it ready."""
        return self._answer("executable", f"executable {graph}")

    def cuGraphLaunch(self, executable: str, stream: int) -> tuple[Any, ...]:  # noqa: N802
        """Launch it."""
        assert executable == "executable graph"
        self.launched.append((len(self.destroyed), stream))
        return self._answer("launch")

    def cuGraphDestroy(self, graph: str) -> tuple[Any, ...]:  # noqa: N802
        """Free what it was made of."""
        self.destroyed.append(graph)
        return self._answer("")

    cuGraphExecDestroy = cuGraphDestroy  # noqa: N815


@pytest.fixture
def ready() -> Ready:
    """Return a kernel of two parameters."""
    return Ready("a kernel of device 3", driver.CUfunction(55), (4, 256), (ctypes.c_uint64 * 5)(8, 9, 10, 11, 12), 2)


def _graph(fake: Driver, ready: Ready, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(launch, "driver", fake)
    monkeypatch.setattr(launch, "switch_device", fake.switch_device)
    monkeypatch.setattr(launch, "current_device", lambda: fake.device)
    monkeypatch.setattr(launch._Executable, "_destroy", fake.cuGraphExecDestroy)
    return graph_of(ready, 3)


def test_a_graph_launches_the_same_kernel(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its device, whichever is current, with all that it was told; the caller's device is current afterwards."""
    launch = _graph(fake := Driver(), ready, monkeypatch)
    assert (fake.at, fake.device) == ([3], 7)
    assert fake.node == (55, 103, (4, 1, 1, 256, 1, 1), 0, [8, 9])
    launch(40)
    launch(50)
    assert fake.launched == [(1, 40), (1, 50)]  # all but what it was made of is there
    del launch
    assert fake.destroyed == ["graph", "executable graph"]


@pytest.mark.parametrize("refuses", ["context", "graph", "node", "executable"])
def test_where_no_graph_can_be_made_there_is_none(refuses: str, ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory is full: launches do without, and nothing is left behind."""
    assert _graph(fake := Driver(refuses), ready, monkeypatch) is None
    assert fake.destroyed == (["graph"] if refuses in {"node", "executable"} else [])
    assert fake.device == 7


def test_a_refused_launch_is_an_error(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the device and what the driver says."""
    launch = _graph(Driver("launch"), ready, monkeypatch)
    with pytest.raises(ExecutionError, match=r"device 3 was not launched: CUDA_ERROR_OUT_OF_MEMORY"):
        launch(1)


def _copy(_: int) -> None:
    """Copy nothing."""


def test_what_comes_often_is_launched_by_graphs(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels only, and from some time on; where no graph can be made, they are launched as before."""
    monkeypatch.setattr(launch, "_OFTEN", 3)
    graph = Mock()
    monkeypatch.setattr(launch, "graph_of", lambda of, ordinal: graph if (of, ordinal) == (ready, 40) else None)
    steps: tuple[BoundStep, ...] = (ready, 0, 0), (_copy, 1, 9), (ready, 1, 0)
    graphs, bound, copies = LaunchGraphs({0: 40, 1: 41}), Bound(Mock(), steps), Bound(Mock(), steps[1:2])
    quick = (graph, 0, 0), *steps[1:]
    assert [graphs.steps(bound) for _ in range(3)] == [steps, steps, quick]
    assert bound.quick == quick
    assert [graphs.steps(copies) for _ in range(3)] == [steps[1:2]] * 3
    assert copies.quick == steps[1:2]
    graphs.clear()
    assert bound.quick == ()
    assert [graphs.steps(bound) for _ in range(3)] == [steps, steps, quick]


def test_graphs_do_not_add_up(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that was made is the first to go, and has to come more often again before it comes back."""
    monkeypatch.setattr(launch, "_OFTEN", 2)
    monkeypatch.setattr(launch, "_AGAIN", 3)
    monkeypatch.setattr(launch, "_KEPT", 2)
    monkeypatch.setattr(launch, "graph_of", Mock())
    graphs = LaunchGraphs({0: 0})
    bounds = [Bound(Mock(), ((ready, 0, 0),)) for _ in range(3)]
    for bound in bounds:
        graphs.steps(bound)
        graphs.steps(bound)
    assert [bool(bound.quick) for bound in bounds] == [False, True, True]
    for _ in range(4):
        graphs.steps(bounds[0])
        assert [bool(bound.quick) for bound in bounds] == [False, True, True]
    graphs.steps(bounds[0])
    assert [bool(bound.quick) for bound in bounds] == [True, False, True]


def test_graphs_that_take_turns_are_seldom_made_anew(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more programs come often than graphs are kept, little is spent on graphs that are never launched."""
    monkeypatch.setattr(launch, "graph_of", make := Mock())
    graphs, rounds = LaunchGraphs({0: 0}), 500
    bounds = [Bound(Mock(), ((ready, 0, 0),)) for _ in range(2 * launch._KEPT)]
    for _ in range(rounds):
        for bound in bounds:
            bound.quick or graphs.steps(bound)
    assert make.call_count <= len(bounds) * rounds / 100
