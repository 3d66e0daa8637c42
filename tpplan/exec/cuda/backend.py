"""The backend for CUDA devices: programs run on streams, copies by copy engines, sums and exchanges by kernels.

Nothing here changes the current device or stream.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import WeakMethod

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.cuda import sums
from tpplan.exec.cuda.channel import Channel
from tpplan.exec.cuda.copies import HostCopy, Transfer
from tpplan.exec.cuda.events import CudaEvents
from tpplan.exec.cuda.exchanges import Exchanges, kernels_for
from tpplan.exec.cuda.exclusive import ISSUING
from tpplan.exec.cuda.graph import Graph
from tpplan.exec.cuda.host_writes import writes_host_memory
from tpplan.exec.cuda.launch import Bound, BoundStep, LaunchGraphs, Ready, ReadyProgram, Step
from tpplan.exec.cuda.programmatic_launch import programmatic
from tpplan.exec.cuda.streams import Streams, StreamsAside, streams_aside
from tpplan.exec.machine.links import refute
from tpplan.exec.memory.binding import no_memory
from tpplan.exec.programs.fence import HOST_STREAM, without_callers
from tpplan.exec.programs.program import HOST, LOAD, Copy, Exchange, Program, Record, Stream, Sum, Wait
from tpplan.exec.toolchain.torch_shims import current_device, switch_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.handles import Pending
    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.programs.program import Buffer

#: Maximum number of cached programs, each for a dtype.
_KEPT = 1024

#: The shortest time-out that says something of links, in seconds: what a device has to do first takes less.
_PROOF_SECONDS = 1.0

#: Placeholder for the handle of the host's stream, which has none.
_NONE = -1


class CudaDevices(Streams):
    """Runs programs on CUDA devices; not thread-safe.

    Attributes:
        captures: whether a graph of the context is being captured.
        asides: number of open ``aside`` blocks, in which programs run concurrently with other work.
        transport: ``peer``, ``host`` or ``events``.
    """

    asides = 0
    _is_closed = False

    def __init__(
        self,
        memory: Memory,
        places: Mapping[int, torch.device],
        *,
        transport: str,
        timeout: float,
        others: Mapping[int, int] = MappingProxyType({}),
        status: Tensor | None = None,
        cause: Callable[[int], str] = lambda _: "",
        reach: Callable[[int, int], int] = lambda address, _: address,
    ) -> None:
        """Load the kernels on every device.

        Args:
            memory: the context's memory on these devices.
            places: torch device, with its ordinal, for each device of the plan in use that this process owns.
            transport: ``peer``, ``host`` or ``events``; with ``host`` no device accesses another's memory.
            timeout: how long a kernel waits for another device, in seconds.
            others: multiprocessors of each device that another process owns; see
                :class:`tpplan.exec.processes.peers.PeerProcesses`.
            status: see :class:`tpplan.exec.cuda.exchanges.Exchanges`.
            cause: see there.
            reach: see there.
        """
        super().__init__(places, len(others))
        self.transport = transport
        self._memory = memory
        self._events = CudaEvents(self._ordinals)
        self._graphs = LaunchGraphs(self._ordinals)
        self._ready: dict[tuple[int, torch.dtype], ReadyProgram] = {}
        self._channels: dict[int, Channel] = {}
        self._streams_aside: tuple[torch.cuda.Stream, ...] = ()
        # Steps that may fail come before the exchanges, which register with other contexts.
        if transport != "host":
            _enable_access([*places.values()])
        with ISSUING:
            kernels = kernels_for(len(places) + len(others), transport)
            is_proof = transport == "peer" and not others and timeout >= _PROOF_SECONDS
            on_timeout = partial(refute, [place.index for place in places.values()] if is_proof else [])
            self._exchanges = Exchanges(
                memory,
                places,
                kernels,
                others,
                status,
                timeout=timeout,
                on_timeout=on_timeout,
                cause=cause,
                reach=reach,
            )
        ask = WeakMethod(self._is_busy)  # or a dropped context would live until garbage collection
        self._exchanges.host_writes.watch(lambda: (is_busy := ask()) is None or is_busy())

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program.

        Args:
            program: the program of an operation.
            operands: the caller's tensors, ``[rows, columns]`` each.

        Raises:
            ExecutionError: a copy failed, a device timed out in an earlier exchange, or a program is captured that did
                not run before or in which the host takes part.
        """
        return self.issue(self._bind(self._ready_for(program, operands), operands))

    def bind(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Callable[[], Pending] | None:
        """Return a callable that issues a program on the same memory again; None if the host copies.

        A program in which the host copies would have to keep the tensors alive.

        Args:
            program: the program of an operation.
            operands: see :meth:`run`; only their addresses are kept.
        """
        ready = self._ready_for(program, operands)
        return None if ready.copies else partial(self.issue, self._bind(ready, operands))

    def issue(self, bound: Bound) -> Pending:
        """Issue a bound program; see :meth:`run`."""
        ready = bound.ready
        with ISSUING:
            self.check()
            self.turn_to_current(ready.devices)
            try:
                self._go_through(bound.quick or self._graphs.steps(bound), ready.loads)
                return ready.pending()
            except BaseException:  # perhaps issued on only some devices
                self._exchanges.interrupt()
                raise

    def _bind(self, ready: ReadyProgram, operands: Mapping[Buffer, Tensor]) -> Bound:
        rows, is_captured = next(iter(operands.values())).shape[0], self.is_capturing()
        if ready.on_host and is_captured:
            message = f"{ready.program.name} cannot be captured: the host takes part"
            raise ExecutionError(message, "call it beside the graph")
        steps = tuple([(step.bind(operands, rows), device, fixed) for step, device, fixed in ready.steps])
        if not is_captured:
            return Bound(ready, steps)
        steps = tuple([(_in_a_graph(issue), device, fixed) for issue, device, fixed in steps])
        return Bound(ready, steps, quick=steps)

    def _ready_for(self, program: Program, operands: Mapping[Buffer, Tensor]) -> ReadyProgram:
        dtype = next(iter(operands.values())).dtype
        ready = self._ready.get((id(program), dtype))
        if ready is None:
            with ISSUING:
                self.check()
                ready = self._prepare(program, dtype)
        return ready

    def _go_through(self, steps: tuple[BoundStep, ...], loads: frozenset[int]) -> None:
        """Issue the steps of a program, switching the current device where a step goes to a default stream."""
        if loads:
            self._loaded |= loads
        before = here = current_device()
        try:
            for issue, device, fixed in steps:
                handle = fixed or self._current[device]
                if not handle and self._ordinals[device] != here:
                    here = self._ordinals[device]
                    switch_device(here)
                issue(handle)
        finally:
            if here != before:
                switch_device(before)

    def channel(self, elements: int) -> Channel | None:
        """Return the channel for sums of at most this many elements, the same one for the same number.

        None unless there are several devices, each a GPU of its own, whose kernels write to each other's memory.

        Raises:
            ExecutionError: a new channel is needed while a graph is being captured.
        """
        places = self._places
        if self.transport != "peer" or not 1 < len(places) == len(set(places.values())):
            return None
        with ISSUING:
            self.check()
            if elements not in self._channels:
                if self.is_capturing():
                    message = f"a channel of {elements} elements was not asked for before"
                    raise ExecutionError(message, "ask for it once before capturing")
                headers = {device: self._exchanges.header(device) for device in places}
                self._channels[elements] = Channel(elements, places, headers, self._issue_all)
            return self._channels[elements]

    def _issue_all(self, launches: Sequence[Callable[[], None]]) -> None:
        """Run one launch for every device, of kernels that wait for each other."""
        with ISSUING:
            self.check()
            self.turn_to_current()
            is_one_issued = False
            try:
                for launch in launches:
                    launch()
                    is_one_issued = True
            except BaseException:
                if is_one_issued:
                    self._exchanges.interrupt()
                raise

    def aside(self) -> StreamsAside:
        """Return a context manager whose block issues work on side streams, concurrently with other work."""
        self._streams_aside = self._streams_aside or streams_aside(self._places.values())
        return StreamsAside(self, self._streams_aside)

    def check(self) -> None:
        """Check, under the lock, that kernels may exchange data: a close may have come while a thread waited for it.

        Raises:
            ExecutionError: the context is closed, a device timed out, or the issue of a program was interrupted, so
                that devices do not agree any more on what they exchange.
        """
        if self._is_closed:
            raise ExecutionError("the context is closed", "compile the plan again")
        self._exchanges.check()

    def synchronize(self) -> None:
        """Block until all issued work is complete.

        Raises:
            ExecutionError: a device timed out.
        """
        for stream in self.streams():
            stream.synchronize()
        self._exchanges.check()

    def capture(self) -> Graph:
        """Return a graph that captures the work that its ``with`` block issues."""
        return Graph(self, self._places)

    def forget(self) -> None:
        """Forget issued work, all of which is complete; called before and after the capture of a graph."""
        super().forget()
        self._events.forget()

    def close(self) -> None:
        """Release streams and events; closing again does nothing."""
        self._is_closed = True
        for held in (self._current, self._streams, self._ready, self._channels, self._events, self._graphs):
            held.clear()
        self._memory = no_memory()
        self._exchanges.close()

    def _prepare(self, program: Program, dtype: torch.dtype) -> ReadyProgram:
        if len(self._ready) >= _KEPT and not self.is_capturing():
            self.synchronize()
            self._ready.clear()
        launches = iter(self._exchanges.prepare(program, dtype, captured=self.is_capturing()))
        commands, writes_host = without_callers(program), writes_host_memory(program)
        here = {*self._ordinals, HOST}
        commands = tuple(each for each in commands if each.stream.device in here)
        if writes_host:  # its kernels signal their completion themselves
            commands = tuple(each for each in commands if isinstance(each, Exchange))
        streams = {command.stream for command in commands}
        fixed = {Stream(LOAD, device): handle for device, handle in self._load_handles.items()} | {HOST_STREAM: _NONE}
        devices = tuple(sorted({stream.device for stream in streams} - {HOST}))
        pending: Callable[[], Pending] = (
            self._exchanges.host_writes.results(devices)
            if writes_host
            else self._events.results(program.results, self._exchanges.check)
        )
        ready = self._ready[id(program), dtype] = ReadyProgram(
            program=program,
            steps=tuple(
                (
                    next(launches) if isinstance(each, Exchange) else self._step(each, program, dtype),
                    each.stream.device,
                    fixed.get(each.stream, 0),
                )
                for each in commands
            ),
            devices=devices,
            loads=frozenset(stream.device for stream in streams if stream.kind == LOAD),
            pending=pending,
            on_host=bool(program.results) or HOST_STREAM in streams,
            copies=any(isinstance(each, Copy) and each.stream == HOST_STREAM for each in commands),
        )
        return ready

    def _step(self, command: Copy | Sum | Record | Wait, program: Program, dtype: torch.dtype) -> Step:
        """Return a prepared command, to be bound to any operands."""
        on_host = command.stream == HOST_STREAM
        if isinstance(command, Record):
            return self._events.recording(command, program.results)
        if isinstance(command, Wait):
            return self._events.waiting(command, on_host=on_host)
        if isinstance(command, Sum):
            return sums.prepare(command, self._memory, dtype, self._places[command.stream.device])
        return (HostCopy if on_host else Transfer)(command, self._memory, dtype)


def _enable_access(places: Sequence[torch.device]) -> None:
    """Let devices access each other's memory: torch does that when it first copies between two of them.

    Raises:
        ExecutionError: the driver refuses.
    """
    for source in places:
        for target in places:
            try:
                torch.empty(1, device=target).copy_(torch.empty(1, device=source))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                message = f"{source} gets no access to {target}: {reason}"
                raise ExecutionError(message, 'compile with transport="host"') from error


def _in_a_graph(issue: Callable[[int], None]) -> Callable[[int], None]:
    """Return the callable that issues a step during a capture."""
    return programmatic(issue) if isinstance(issue, Ready) and issue.programmatic else issue
