"""CUDA graphs of operations and the caller's own torch work on all devices, captured once and launched as one."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, contextmanager, suppress
from threading import RLock
from typing import TYPE_CHECKING, Protocol, Self

import torch
from attrs import define

from tpplan.errors import ExecutionError
from tpplan.exec.cuda.exclusive import ISSUING
from tpplan.exec.toolchain.torch_shims import make_current

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType


#: Resources of deleted graphs, freed before and after the next capture; and the graphs being captured. They are not
#: freed at once: torch aborts the process if a graph's memory is freed during any capture, even in another thread, and
#: a graph may be deleted at any time, as when `with ctx.capture() as graph` drops an older `graph`.
_RETIRED: list[object] = []
_UNDERWAY: list[object] = []
#: Keeps a capture from starting while resources are freed. Reentrant, as a signal handler may need it too.
_TURN = RLock()


@define
class _Room:
    """The streams and memory pools that several graphs share.

    Attributes:
        streams: a stream of each device to capture on; shared, as libraries keep memory for every stream they used.
        pools: a memory pool for each device but the first.
        graph: the first graph captured, which owns the first device's pool.
    """

    streams: list[torch.cuda.Stream]
    pools: list[torch.cuda.MemPool]
    graph: torch.cuda.CUDAGraph | None = None

    @classmethod
    def on(cls, places: Sequence[torch.device]) -> Self:
        """Create new streams and pools on these devices."""
        streams = [torch.cuda.Stream(place) for place in places]  # type: ignore[no-untyped-call]
        return cls(streams, [_new_pool(place) for place in places[1:]])


class Capturing(Protocol):
    """What a graph needs of the backend whose work it captures.

    Attributes:
        transport: ``peer``, ``host`` or ``events``.
        captures: whether a graph is being captured.
    """

    transport: str
    captures: bool

    def forget(self) -> None:
        """Forget issued work, all of which is complete."""

    def check(self) -> None:
        """Check that the context may issue kernels that exchange data."""

    def turn_to_current(self) -> None:
        """Wait for work that was issued to other streams than the current ones."""

    def streams(self) -> Iterable[torch.cuda.Stream]:
        """Return the streams that work may have been issued to, beside the current ones."""


class Graph:
    """A CUDA graph of the work that a ``with`` block issues on all devices.

    Inside the block, capture streams are current on all devices. Torch work on any device and operations of the context
    are recorded, not run. Tensors created in the block keep their memory as long as the graph lives. The same work must
    have run once before: nothing can be compiled, loaded or looked up during a capture.
    """

    def __init__(self, backend: Capturing, places: Mapping[int, torch.device], room: _Room | None = None) -> None:
        """Prepare to capture on these devices.

        Args:
            backend: the context's backend.
            places: torch devices by index in the plan.
            room: streams and memory to share with another graph; new ones if not given.
        """
        self._backend = backend
        self._places = tuple(places.values())
        self._graph = torch.cuda.CUDAGraph()
        self._room = room or _Room.on(self._places)
        self._stack = ExitStack()
        self._captured = False

    def __enter__(self) -> Self:
        if self._captured:
            raise ExecutionError("this graph is captured already", "capture another one")
        from tpplan.exec.cuda.programmatic_launch import allowed  # noqa: PLC0415 (needs CUDA's bindings; who only calls give_back() does not)

        for place in self._places:
            torch.cuda.synchronize(place)
        give_back()
        self._backend.forget()
        first, *others = self._room.streams
        with ExitStack() as stack:
            stack.callback(_end, self._graph)
            with _TURN:
                _UNDERWAY.append(self._graph)
            stack.enter_context(_streams_restored(self._places))
            shared = self._room.graph.pool() if self._room.graph else None
            stack.enter_context(torch.cuda.graph(self._graph, shared, first, capture_error_mode="relaxed"))
            stack.callback(self._join)
            for stream, place, pool in zip(others, self._places[1:], self._room.pools, strict=True):
                stream.wait_stream(first)
                stack.enter_context(torch.cuda.use_mem_pool(pool, device=place))
            make_current(self._room.streams)
            # With other transports a caller's kernel may follow a copy or another device, which is untested.
            stack.enter_context(allowed(programmatic=self._backend.transport == "peer"))
            self._stack = stack.pop_all()
        self._backend.captures = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with warnings.catch_warnings(action="ignore" if kind else None):  # of an empty graph, if it failed early
                self._stack.__exit__(kind, error, trace)
        finally:
            self._backend.captures = False
            self._backend.forget()
        self._captured = kind is None
        if self._captured and not self._room.graph:
            self._room.graph = self._graph
        if self._captured:
            give_back()

    def __del__(self) -> None:
        held = vars(self)  # incomplete if __init__ failed
        _RETIRED.append([held.get(name) for name in ("_graph", "_room")])

    def replay(self) -> None:
        """Launch the graph after the work queued on the current streams of all devices, which then wait for it.

        Raises:
            ExecutionError: nothing was captured, or the context is closed or has failed.
        """
        self._check_captured()
        with ISSUING:
            self._backend.check()
            self._backend.turn_to_current()  # waits for work issued to other streams
            first, *others = (torch.cuda.current_stream(place) for place in self._places)
            for stream in others:
                first.wait_stream(stream)
            with torch.cuda.stream(first):
                self._graph.replay()
            for stream in others:
                stream.wait_stream(first)

    def beside(self) -> Graph:
        """Return a new graph to capture that shares this one's memory.

        Replaying one of the two overwrites tensors that the other created; tensors from before both captures are safe.

        Raises:
            ExecutionError: nothing was captured.
        """
        self._check_captured()
        return Graph(self._backend, dict(enumerate(self._places)), self._room)

    def _check_captured(self) -> None:
        if not self._captured:
            raise ExecutionError("nothing was captured", "use the graph in a with statement first")

    def _join(self) -> None:
        """Make the first device's stream wait for all others, which is required to end a capture."""
        first, *others = self._room.streams
        for stream in (*self._backend.streams(), *others):
            first.wait_stream(stream)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    """Note that a graph is not being captured any more; perhaps it never was."""
    with suppress(ValueError):
        _UNDERWAY.remove(graph)


def give_back() -> None:
    """Free the resources of deleted graphs unless a capture is running; the devices were synchronised since."""
    with _TURN:
        if not _UNDERWAY:
            _RETIRED.clear()


def _new_pool(place: torch.device) -> torch.cuda.MemPool:
    """Return a memory pool of a device, created while it is the current one, or torch would free its memory early."""
    with torch.cuda.device(place):
        return torch.cuda.MemPool()


@contextmanager
def _streams_restored(places: Sequence[torch.device]) -> Iterator[None]:
    """Restore the current device and the current streams of these devices at the end."""
    before = [torch.cuda.current_stream(place) for place in places]
    try:
        yield
    finally:
        make_current(before)
