"""CUDA devices: programs run on streams; copies by the copy engines, sums and exchanges by kernels.

Streams and events are torch's, so that a caller's torch work and tpplan's wait for each other. Nothing here changes the
current device or stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tpplan.errors import ExecutionError
from tpplan.exec.binding import no_memory, resolve
from tpplan.exec.exchanges import Exchanges
from tpplan.exec.fence import HOST_STREAM, without_callers
from tpplan.exec.graph import Graph
from tpplan.exec.issuing import ISSUING, Issuing
from tpplan.exec.launch import Launch
from tpplan.exec.program import HOST, LOAD, Command, Copy, Event, Exchange, Program, Record, Stream, Sum, Wait
from tpplan.exec.sums import Sums, copy
from tpplan.exec.torch_shims import stream_handle, switch_device

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tpplan.exec.binding import Memory
    from tpplan.exec.program import Buffer

#: How many programs are remembered, each for a dtype.
_KEPT = 1024


@frozen(eq=False)
class Pending:
    """A program that was issued.

    Attributes:
        events: that its results in host memory wait for.
        check: refuses results of devices that waited in vain.
    """

    events: tuple[torch.cuda.Event, ...]
    check: Callable[[], None]

    def done(self) -> bool:
        """Return whether the results are complete."""
        return all(event.query() for event in self.events)  # type: ignore[no-untyped-call]

    def wait(self, timeout: float | None = None) -> None:
        """Return when the results are complete.

        Raises:
            TimeoutError: they are not, after ``timeout`` seconds.
            ExecutionError: they never will be, for a device waited in vain.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for event in self.events:
            if end is None:
                event.synchronize()
                continue
            while not event.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > end:
                    raise TimeoutError(f"not complete after {timeout} s")
                time.sleep(0)
        self.check()


@frozen(eq=False)
class _Ready:
    """A program, ready to be issued for a dtype.

    Attributes:
        program: kept, for it is known by its identity.
        commands: without what the caller's streams being tpplan's makes needless.
        devices: that it uses.
        launches: of its exchanges, in order.
        on_host: whether the host takes part in it.
    """

    program: Program
    commands: tuple[Command, ...]
    devices: tuple[int, ...]
    launches: tuple[Launch, ...]
    on_host: bool


class CudaDevices:
    """Runs programs on CUDA devices. Not safe for two threads at once.

    tpplan's stream of a device is the one that is current there at the time of the call, so that most programs need no
    events between the caller's stream and tpplan's. A second one loads from host memory.
    """

    def __init__(self, memory: Memory, places: Mapping[int, torch.device], *, peers: bool) -> None:
        """Load the kernels on every device.

        Args:
            memory: of the context, on these devices.
            places: torch's device for each of the plan's in use, with its ordinal.
            peers: whether devices reach into each other's memory.
        """
        self._memory = memory
        self._places = places
        self._ordinals = {device: int(place.index) for device, place in places.items()}
        self._loads = {d: torch.cuda.Stream(place) for d, place in places.items()}  # type: ignore[no-untyped-call]
        self._loaded: set[int] = set()
        self._current: dict[int, int] = {}
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        self._recorded: dict[Event, torch.cuda.Event] = {}
        self._events: dict[tuple[Event, int], torch.cuda.Event] = {}
        self._sums = Sums()
        self._ready: dict[tuple[int, torch.dtype], _Ready] = {}
        with ISSUING:
            self._exchanges = Exchanges(memory, places)
        self._issuing = Issuing(self._exchanges)
        self._nothing = Pending((), self._exchanges.check)
        for source in places.values() if peers else ():  # torch gives access when it first copies between two devices
            for target in places.values():
                torch.empty(1, device=target).copy_(torch.empty(1, device=source))

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program.

        Args:
            program: of some operation.
            operands: the caller's tensors, ``[rows, columns]`` each.

        Raises:
            ExecutionError: a copy failed, a device waited in vain in an earlier exchange, or something is captured
                that was not run before, or in which the host takes part.
        """
        with self._issuing:
            return self._run(program, operands)

    def _run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        some = next(iter(operands.values()))
        rows, dtype = some.shape[0], some.dtype
        ready = self._ready.get((id(program), dtype)) or self._prepare(program, dtype)
        if ready.on_host and torch.cuda.is_current_stream_capturing():
            raise ExecutionError(f"{program.name} cannot be captured: the host takes part", "call it beside the graph")
        for device in ready.devices:
            self._turn_to(device, self._handle(device))
        try:
            self._go_through(ready, operands, rows, dtype)
        except BaseException:  # between two devices, perhaps
            self._exchanges.interrupt()
            raise
        if not program.results:
            return self._nothing
        return Pending(tuple(self._recorded[event] for event in program.results), self._exchanges.check)

    def _go_through(self, ready: _Ready, operands: Mapping[Buffer, Tensor], rows: int, dtype: torch.dtype) -> None:
        """Issue the commands of a program."""
        launches = iter(ready.launches)
        for step in ready.commands:
            if isinstance(step, Exchange):  # first, for nothing else is called as often
                self._issue(step.stream, next(launches).issue, operands, rows)
            elif isinstance(step, Record):
                self._record(step, result=step.event in ready.program.results)
            elif isinstance(step, Wait):
                self._wait(step)
            else:
                self._work(step, operands, rows, dtype)

    def _work(self, step: Copy | Sum, operands: Mapping[Buffer, Tensor], rows: int, dtype: torch.dtype) -> None:
        """Issue a copy or a sum."""
        views = (step.target, step.source) if isinstance(step, Copy) else (step.target, *step.sources)
        target, *sources = (resolve(view, operands, self._memory, rows, dtype) for view in views)
        if not target.numel():
            return
        if step.stream == HOST_STREAM:
            target.copy_(sources[0])
        else:
            self._issue(step.stream, copy if isinstance(step, Copy) else self._sums.add, target, sources)

    def issuing(self) -> Issuing:
        """Return what is to be held while kernels are issued that devices exchange by."""
        return self._issuing

    def synchronize(self) -> None:
        """Return when everything that was issued is complete.

        Raises:
            ExecutionError: a device waited in vain.
        """
        for stream in self.streams():
            stream.synchronize()
        self._exchanges.check()

    def capture(self) -> Graph:
        """Return a graph that captures what a ``with`` block issues."""
        return Graph(self, self._places)

    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Return the streams on which something was issued since the last :meth:`forget`."""
        current = [self._streams[each] for each in self._current.items()]
        return (*current, *(self._loads[device] for device in sorted(self._loaded)))

    def kernels(self) -> tuple[object, ...]:
        """Return the kernels that were issued so far; they have to be loaded as long as a graph has them."""
        return (*self._exchanges.kernels.values(), *self._sums.kernels.values())

    def forget(self) -> None:
        """Start anew after everything is complete, as a graph does that is to be captured, or was."""
        self._current.clear()
        self._loaded.clear()
        self._recorded.clear()

    def turn_to_current(self) -> None:
        """Let what is issued from now on follow what the current streams hold."""
        for device in self._ordinals:
            self._turn_to(device, self._handle(device))

    def close(self) -> None:
        """Let go of streams, events and kernels; closing again does nothing."""
        self._issuing.closed = True
        for held in (self._current, self._streams, self._recorded, self._events, self._ready):
            held.clear()
        self._memory = no_memory()
        self._exchanges.close()

    def _prepare(self, program: Program, dtype: torch.dtype) -> _Ready:
        if len(self._ready) >= _KEPT and not torch.cuda.is_current_stream_capturing():
            self.synchronize()
            self._ready.clear()
        launches = self._exchanges.prepare(program, dtype)
        commands = without_callers(program)
        devices = tuple(sorted({command.stream.device for command in commands} - {HOST}))
        on_host = bool(program.results) or any(command.stream == HOST_STREAM for command in commands)
        ready = self._ready[id(program), dtype] = _Ready(program, commands, devices, launches, on_host)
        return ready

    def _handle(self, device: int) -> int:
        """Return the address of a device's current stream; 0 for its default one."""
        return stream_handle(self._ordinals[device])

    def _turn_to(self, device: int, handle: int) -> None:
        """Make the current stream of a device tpplan's: it waits for the one that was, if that was another."""
        before = self._current.get(device)
        if before == handle:
            return
        key = (device, handle)
        if key not in self._streams:
            place = self._places[device]
            stream = torch.cuda.default_stream(place)
            if handle:
                stream = torch.cuda.ExternalStream(handle, place)  # type: ignore[no-untyped-call]
            self._streams[key] = stream
        if before is not None:
            self._streams[key].wait_stream(self._streams[device, before])
        self._current[device] = handle

    def _real(self, stream: Stream) -> torch.cuda.Stream:
        if stream.kind == LOAD:
            self._loaded.add(stream.device)
            return self._loads[stream.device]
        return self._streams[stream.device, self._current[stream.device]]

    def _issue(self, stream: Stream, work: Callable[..., None], *arguments: object) -> None:
        """Issue work to a stream; where that is a default stream, its device has to be current."""
        if stream.kind == LOAD:
            work(self._real(stream).cuda_stream, *arguments)
        elif handle := self._current[stream.device]:
            work(handle, *arguments)
        else:
            before = switch_device(self._ordinals[stream.device])
            try:
                work(handle, *arguments)
            finally:
                switch_device(before)

    def _record(self, step: Record, *, result: bool) -> None:
        """Record an event of the stream's device: each has its own, for any device may record some events.

        Those of results are the caller's, to wait for at any time, and never recorded again.
        """
        key = (step.event, step.stream.device)
        if result or key not in self._events:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            if not result:
                self._events[key] = event
        else:
            event = self._events[key]
        event.record(self._real(step.stream))
        self._recorded[step.event] = event

    def _wait(self, step: Wait) -> None:
        event = self._recorded.get(step.event)
        if event is None:
            return
        if step.stream == HOST_STREAM:
            event.synchronize()
        else:
            self._real(step.stream).wait_event(event)
