"""Graphs: operations and the caller's own torch work on all devices, captured once and launched as one."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Self

import torch
from attrs import define

from tpplan.errors import ExecutionError
from tpplan.exec.torch_shims import make_current, switch_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from tpplan.exec.gpu.cuda import CudaDevices

#: What dead graphs have left, given back before and after the next one is captured; and what is being captured. Not at
#: once: torch aborts the process if a graph's memory is given back during any capture, of another thread too, and a
#: graph may die at any time, as when `with ctx.capture() as graph` drops an older `graph`.
_RETIRED: list[object] = []
_UNDERWAY: list[object] = []
#: No capture begins while something is given back.
_TURN = Lock()


@define
class _Room:
    """What graphs that share memory have in common.

    Attributes:
        streams: to capture on, of every device. Libraries keep memory for each stream that they have worked on.
        pools: memory of every device but the first.
        graph: the first that was captured, which has the first device's.
    """

    streams: list[torch.cuda.Stream]
    pools: list[torch.cuda.MemPool]
    graph: torch.cuda.CUDAGraph | None = None

    @classmethod
    def on(cls, places: Sequence[torch.device]) -> Self:
        """Return a new one."""
        streams = [torch.cuda.Stream(place) for place in places]  # type: ignore[no-untyped-call]
        return cls(streams, [_new_pool(place) for place in places[1:]])


class Graph:
    """What a ``with`` block issues on all devices, as one CUDA graph.

    Inside the block, new streams are current on all devices; torch work on any device and operations of the context are
    recorded, not run. Tensors that it makes keep their memory as long as the graph lives. Everything has to have run
    once before: nothing can be compiled, loaded or looked up while a graph is captured.
    """

    def __init__(self, backend: CudaDevices, places: Mapping[int, torch.device], room: _Room | None = None) -> None:
        """Get ready to capture on these devices.

        Args:
            backend: of the context.
            places: the devices.
            room: that another graph works in; a new one if not given.
        """
        self._backend = backend
        self._places = tuple(places.values())
        self._graph = torch.cuda.CUDAGraph()
        self._room = room or _Room.on(self._places)
        self._stack = ExitStack()
        self._captured = False
        self._used: tuple[object, ...] = ()

    def __enter__(self) -> Self:
        if self._captured:
            raise ExecutionError("this graph is captured already", "capture another one")
        from tpplan.exec.gpu.early import allowed  # noqa: PLC0415 (needs CUDA's bindings; who only calls give_back() does not)

        for place in self._places:
            torch.cuda.synchronize(place)
        give_back()
        self._backend.forget()
        first, *others = self._room.streams
        with ExitStack() as stack:
            with _TURN:
                _UNDERWAY.append(self._graph)
            stack.callback(_UNDERWAY.remove, self._graph)
            stack.enter_context(_streams_restored(self._places))
            shared = self._room.graph.pool() if self._room.graph else None
            stack.enter_context(torch.cuda.graph(self._graph, shared, first, capture_error_mode="relaxed"))
            stack.callback(self._join)
            for stream, place, pool in zip(others, self._places[1:], self._room.pools, strict=True):
                stream.wait_stream(first)
                stack.enter_context(torch.cuda.use_mem_pool(pool, device=place))
            make_current(self._room.streams)
            # By other transports a caller's kernel may follow a copy or another device, which was not tried.
            stack.enter_context(allowed(early=self._backend.transport == "peer"))
            self._stack = stack.pop_all()
        self._backend.captures = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with warnings.catch_warnings(action="ignore" if kind else None):  # that what failed at once has no commands
                self._stack.__exit__(kind, error, trace)
        finally:
            self._backend.captures = False
            self._backend.forget()
        self._captured = kind is None
        if self._captured and not self._room.graph:
            self._room.graph = self._graph
        self._used = self._backend.kernels()
        if self._captured:
            give_back()

    def __del__(self) -> None:
        held = vars(self)  # not all of it, where an error has left it half made
        _RETIRED.append([held.get(name) for name in ("_graph", "_room", "_used")])

    def replay(self) -> None:
        """Run what was captured: after what the current streams of all devices hold, which then wait for it.

        Raises:
            ExecutionError: nothing was captured, the context is closed, or it has failed.
        """
        self._check_captured()
        with self._backend.issuing():
            self._backend.turn_to_current()  # which waits for what was issued to other streams
            first, *others = (torch.cuda.current_stream(place) for place in self._places)
            for stream in others:
                first.wait_stream(stream)
            with torch.cuda.stream(first):
                self._graph.replay()
            for stream in others:
                stream.wait_stream(first)

    def beside(self) -> Graph:
        """Return another one to capture, that works in this one's memory.

        What one of the two has made is lost when the other one is replayed, unless it was there before both.

        Raises:
            ExecutionError: nothing was captured.
        """
        self._check_captured()
        return Graph(self._backend, dict(enumerate(self._places)), self._room)

    def _check_captured(self) -> None:
        if not self._captured:
            raise ExecutionError("nothing was captured", "use the graph in a with statement first")

    def _join(self) -> None:
        """Let the first device's stream wait for all others, as the end of a capture demands."""
        first, *others = self._room.streams
        for stream in (*self._backend.streams(), *others):
            first.wait_stream(stream)


def give_back() -> None:
    """Let go of what dead graphs have left, which is idle since the devices were waited for, unless one is captured."""
    with _TURN:
        if not _UNDERWAY:
            _RETIRED.clear()


def _new_pool(place: torch.device) -> torch.cuda.MemPool:
    """Return a pool that keeps memory of a device: the one that is current when it is made, or torch frees it early."""
    before = switch_device(place.index)
    try:
        return torch.cuda.MemPool()
    finally:
        switch_device(before)


@contextmanager
def _streams_restored(places: Sequence[torch.device]) -> Iterator[None]:
    """Set the streams of some devices back at the end, and the current device."""
    before = [torch.cuda.current_stream(place) for place in places]
    try:
        yield
    finally:
        make_current(before)
