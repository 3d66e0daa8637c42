"""When the memory of dead graphs is given back: with something in the place of torch's graphs."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from threading import Event, Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast
from unittest.mock import Mock
from weakref import WeakSet

import pytest
import torch

from tpplan.exec.cuda import graph as graphs
from tpplan.exec.cuda.graph import Graph

if TYPE_CHECKING:
    from tpplan.exec.cuda.backend import CudaDevices


class _Cuda:
    """A graph of torch, as far as somebody holds it."""

    alive: ClassVar[WeakSet[Any]] = WeakSet()

    def __init__(self) -> None:
        _Cuda.alive.add(self)

    def pool(self) -> tuple[int, int]:
        """Return where its memory is."""
        return 0, 1


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put something in the place of a CUDA device and of torch's graphs."""
    monkeypatch.setattr(graphs, "_RETIRED", [])
    monkeypatch.setattr(_Cuda, "alive", WeakSet())
    stream = SimpleNamespace(wait_stream=lambda _: None)
    fakes: dict[str, Any] = {
        "CUDAGraph": _Cuda,
        "Stream": lambda _: stream,
        "graph": lambda *_, **__: nullcontext(),
        "current_stream": lambda _: stream,
        "current_device": lambda: 0,
        **dict.fromkeys(("synchronize", "set_stream", "set_device"), lambda _: None),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def _graph() -> Graph:
    """Return a graph of a single device."""
    backend = SimpleNamespace(transport="peer", forget=lambda: None, streams=lambda: ())
    return Graph(cast("CudaDevices", backend), {0: torch.device("cuda", 0)})


def test_a_graph_that_is_replaced_is_gone_after_the_capture() -> None:
    """Not while the new one is captured, for torch would abort, but as soon as that is done."""
    with _graph() as graph:
        pass
    with _graph() as graph:
        assert len(_Cuda.alive) == 2
    assert list(_Cuda.alive) == [graph._graph]


def test_nothing_is_given_back_inside_another_capture() -> None:
    """Also where two are captured at a time, as of two contexts: the last one to end gives back."""
    with _graph() as old:
        pass
    with _graph() as outer:
        del old
        with _graph():
            pass
        assert len(_Cuda.alive) == 3
    assert list(_Cuda.alive) == [outer._graph]


def test_nothing_is_given_back_while_a_capture_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may end one just then; if beginning fails, there is none."""
    with _graph() as old:
        pass
    held = [old]
    del old

    def begin(*_: Any, **__: Any) -> Any:
        held.clear()
        graphs.give_back()
        assert len(_Cuda.alive) == 2
        raise RuntimeError("no capture")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "graph", begin)
        with pytest.raises(RuntimeError, match="no capture"):
            _graph().__enter__()
    with _graph() as graph:
        pass
    assert list(_Cuda.alive) == [graph._graph]


def test_no_capture_begins_while_something_is_given_back() -> None:
    """Another thread that is about to begin one, and has nothing more to give back, waits for the end of that."""
    ready, given, began = Event(), Event(), Event()

    def forget() -> None:
        ready.set()
        given.wait(60)

    def capture() -> None:
        graph = _graph()
        graph._backend.forget = forget  # type: ignore[method-assign]
        with graph:
            began.set()

    class Slow:
        def __del__(self) -> None:
            given.set()
            seen.append(began.wait(0.1))

    thread = Thread(target=capture)
    seen: list[bool] = []
    with _graph() as old:
        old._graph.slow = Slow()  # type: ignore[attr-defined]
    thread.start()
    assert ready.wait(60)
    del old
    graphs.give_back()
    assert seen == [False]
    assert began.wait(60)
    thread.join()


def test_a_context_knows_when_it_is_captured() -> None:
    """From the beginning of the block to its end, however it ends."""

    def check(graph: Graph, error: type[Exception] | None = None) -> None:
        assert graph._backend.captures
        if error:
            raise error

    with _graph() as graph:
        check(graph)
    assert not graph._backend.captures
    with pytest.raises(KeyError), _graph() as graph:
        check(graph, KeyError)
    assert not graph._backend.captures


def test_a_graph_that_could_not_be_made_is_no_trouble_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is of it is given back with the others."""
    monkeypatch.setattr(torch.cuda, "Stream", Mock(side_effect=lambda _: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        _graph()
    gc.collect()
    graphs.give_back()
    assert not _Cuda.alive


def test_a_capture_that_fails_gives_nothing_back() -> None:
    """What torch makes of it is not known; the next capture that works does."""
    held = [_graph()]

    def fail() -> None:
        held.clear()
        raise RuntimeError("no capture")

    with held[0]:
        pass
    with pytest.raises(RuntimeError, match="no capture"), _graph():
        fail()
    assert len(_Cuda.alive) == 2
    with _graph() as graph:
        pass
    assert list(_Cuda.alive) == [graph._graph]


def test_a_replay_is_on_streams_that_a_close_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context notes the current ones before the work is there, whoever drops the graph, and all else, meanwhile."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(_Cuda, "replay", lambda _: calls.append("replay"), raising=False)
    with _graph() as graph:
        pass
    for name in ("check", "turn_to_current"):
        setattr(graph._backend, name, lambda name=name: calls.append(name))
    graph.replay()
    del graph
    assert calls == ["check", "turn_to_current", "replay"]
    assert len(_Cuda.alive) == 1  # until the devices have been waited for
