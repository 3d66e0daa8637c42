"""CUDA devices: programs run on streams; copies by the copy engines, sums and exchanges by kernels.

Nothing here changes the current device or stream.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakMethod

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.binding import no_memory
from tpplan.exec.gpu.aside import StreamsAside, streams_aside
from tpplan.exec.gpu.bound import Bound, BoundStep, ReadyProgram, Step
from tpplan.exec.gpu.channel import Channel
from tpplan.exec.gpu.copies import HostCopy, Transfer
from tpplan.exec.gpu.early import early
from tpplan.exec.gpu.exchanges import Exchanges, kernels_for
from tpplan.exec.gpu.graph import Graph
from tpplan.exec.gpu.issuing import ISSUING, Issuing
from tpplan.exec.gpu.landing import lands
from tpplan.exec.gpu.launch import Ready
from tpplan.exec.gpu.launch_graph import LaunchGraphs
from tpplan.exec.gpu.marks import Marks
from tpplan.exec.gpu.streams import Streams
from tpplan.exec.gpu.sums import Sums
from tpplan.exec.programs.fence import HOST_STREAM, without_callers
from tpplan.exec.programs.program import HOST, LOAD, Copy, Exchange, Program, Record, Stream, Sum, Wait
from tpplan.exec.torch_shims import current_device, switch_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.binding import Memory
    from tpplan.exec.gathered import Pending
    from tpplan.exec.programs.program import Buffer

#: How many programs are remembered, each for a dtype.
_KEPT = 1024

#: Stands for the handle of a stream where there is none: the host's.
_NONE = -1


class CudaDevices(Streams):
    """Runs programs on CUDA devices. Not safe for two threads at once.

    Attributes:
        captures: whether a graph of the context is being captured.
        asides: how many blocks are open in which programs go beside other work.
        transport: ``peer``, ``host`` or ``events``.
    """

    asides = 0

    def __init__(self, memory: Memory, places: Mapping[int, torch.device], *, transport: str) -> None:
        """Load the kernels on every device.

        Args:
            memory: of the context, on these devices.
            places: torch's device for each of the plan's in use, with its ordinal.
            transport: ``peer``, ``host`` or ``events``; of ``host`` no device reaches into another's memory.
        """
        super().__init__(places)
        self.transport = transport
        self._memory = memory
        self._marks = Marks(self._ordinals)
        self._sums = Sums()
        self._graphs = LaunchGraphs(self._ordinals)
        self._ready: dict[tuple[int, torch.dtype], ReadyProgram] = {}
        self._channels: dict[int, Channel] = {}
        self._streams_aside: tuple[torch.cuda.Stream, ...] = ()
        # Torch gives access when it first copies between two devices. What may fail comes before the exchanges, which
        # other contexts count with from then on.
        for source in places.values() if transport != "host" else ():
            for target in places.values():
                torch.empty(1, device=target).copy_(torch.empty(1, device=source))
        with ISSUING:
            self._exchanges = Exchanges(memory, places, kernels_for(len(places), transport))
        ask = WeakMethod(self._is_busy)  # or nothing of a dropped context would go before a collector comes
        self._exchanges.landings.watch(lambda: (is_busy := ask()) is None or is_busy())
        self._issuing = Issuing(self._exchanges)

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program.

        Args:
            program: of some operation.
            operands: the caller's tensors, ``[rows, columns]`` each.

        Raises:
            ExecutionError: a copy failed, a device waited in vain in an earlier exchange, or something is captured
                that was not run before, or in which the host takes part.
        """
        return self.issue(self._bind(self._ready_for(program, operands), operands))

    def bind(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Callable[[], Pending] | None:
        """Return what issues a program as often as it is called; None if that would keep tensors, for the host copies.

        Args:
            program: of some operation.
            operands: see :meth:`run`; only their addresses are kept.
        """
        ready = self._ready_for(program, operands)
        return None if ready.copies else partial(self.issue, self._bind(ready, operands))

    def issue(self, bound: Bound) -> Pending:
        """Issue a program; see :meth:`run`."""
        ready = bound.ready
        with ISSUING:
            self._issuing.check()
            self._turn_to_current(ready.devices)
            try:
                self._go_through(bound.quick or self._graphs.steps(bound), ready.loads)
                return ready.pending()
            except BaseException:  # between two devices, perhaps
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
            with self._issuing:
                ready = self._prepare(program, dtype)
        return ready

    def _go_through(self, steps: tuple[BoundStep, ...], loads: frozenset[int]) -> None:
        """Issue the steps of a program; where that is to a default stream, its device is made current for it."""
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
        """Return what kernels of callers add up by, for sums of so many elements at most; the same for the same number.

        There is none unless several devices, each a GPU of its own, write to each other's memory.

        Raises:
            ExecutionError: it would have to be made while a graph is being captured.
        """
        places = self._places
        if self.transport != "peer" or not 1 < len(places) == len(set(places.values())):
            return None
        with self._issuing:
            if elements not in self._channels:
                if self.is_capturing():
                    message = f"a channel of {elements} elements was not asked for before"
                    raise ExecutionError(message, "ask for it once before capturing")
                headers = {device: self._exchanges.header(device) for device in places}
                self._channels[elements] = Channel(elements, places, headers, self._issue_all)
            return self._channels[elements]

    def _issue_all(self, launches: Sequence[Callable[[], None]]) -> None:
        """Let something be launched on every device, which wait for each other."""
        with self._issuing:
            self._turn_to_current(self._ordinals)
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
        """Return what lets a ``with`` block issue beside other work."""
        self._streams_aside = self._streams_aside or streams_aside(self._places.values())
        return StreamsAside(self, self._streams_aside)

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

    def kernels(self) -> tuple[object, ...]:
        """Return the kernels that were issued so far; they have to be loaded as long as a graph has them."""
        return (*self._exchanges.kernels.values(), *self._sums.kernels.values())

    def forget(self) -> None:
        """Start anew after everything is complete, as a graph does that is to be captured, or was."""
        super().forget()
        self._marks.forget()

    def close(self) -> None:
        """Let go of streams, events and kernels; closing again does nothing."""
        self._issuing.closed = True
        for held in (self._current, self._streams, self._ready, self._channels, self._marks, self._graphs):
            held.clear()
        self._memory = no_memory()
        self._exchanges.close()

    def _prepare(self, program: Program, dtype: torch.dtype) -> ReadyProgram:
        if len(self._ready) >= _KEPT and not self.is_capturing():
            self.synchronize()
            self._ready.clear()
        launches = iter(self._exchanges.prepare(program, dtype, captured=self.is_capturing()))
        commands, is_landing = without_callers(program), lands(program)
        if is_landing:  # whose kernels say themselves that they are complete
            commands = tuple(each for each in commands if isinstance(each, Exchange))
        streams = {command.stream for command in commands}
        fixed = {Stream(LOAD, device): handle for device, handle in self._load_handles.items()} | {HOST_STREAM: _NONE}
        devices = tuple(sorted({stream.device for stream in streams} - {HOST}))
        pending: Callable[[], Pending] = (
            self._exchanges.landings.results(devices)
            if is_landing
            else self._marks.results(program.results, self._exchanges.check)
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
        """Return a command, ready for all operands."""
        on_host = command.stream == HOST_STREAM
        if isinstance(command, Record):
            return self._marks.recording(command, program.results)
        if isinstance(command, Wait):
            return self._marks.waiting(command, on_host=on_host)
        if isinstance(command, Sum):
            return self._sums.prepare(command, self._memory, dtype, self._places[command.stream.device])
        return (HostCopy if on_host else Transfer)(command, self._memory, dtype)


def _in_a_graph(issue: Callable[[int], None]) -> Callable[[int], None]:
    """Return what issues a step where it is captured."""
    return early(issue) if isinstance(issue, Ready) and issue.early else issue
