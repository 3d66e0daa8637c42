"""CUDA devices: programs run on streams; copies by the copy engines, sums and exchanges by kernels.

Streams and events are torch's, so that a caller's torch work and tpplan's wait for each other. Nothing here changes the
current device or stream.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from cuda.bindings import runtime
from cuda.core import LaunchConfig, launch
from cuda.core import Stream as LaunchStream

from tpplan.errors import ExecutionError
from tpplan.exec import kernel_cache
from tpplan.exec.binding import resolve
from tpplan.exec.fence import HOST_STREAM, own
from tpplan.exec.graph import Graph
from tpplan.exec.kernel_cache import MOST_SOURCES
from tpplan.exec.program import CALLER, HOST, LOAD, Command, Copy, Event, Exchange, Program, Record, Stream, Wait
from tpplan.exec.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from tpplan.exec.binding import Memory
    from tpplan.exec.program import Buffer

_SUMS = {torch.bfloat16: "sum_bf16", torch.float16: "sum_f16", torch.float32: "sum_f32"}
#: What a thread of a kernel reads at once.
_VECTOR_BYTES = 16
_THREADS = 256
_MOST_BLOCKS = 264


@frozen(eq=False)
class Pending:
    """A program that was issued.

    Attributes:
        events: that its results in host memory wait for.
    """

    events: tuple[torch.cuda.Event, ...]

    def done(self) -> bool:
        """Return whether the results are complete."""
        return all(event.query() for event in self.events)  # type: ignore[no-untyped-call]

    def wait(self, timeout: float | None = None) -> None:
        """Return when the results are complete.

        Raises:
            TimeoutError: they are not, after ``timeout`` seconds.
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


class CudaDevices:
    """Runs programs on CUDA devices. Not safe for two threads at once.

    tpplan's stream of a device is the one that is current there at the time of the call, so that most programs need no
    events between the caller's stream and tpplan's. A second one loads from host memory.
    """

    def __init__(self, memory: Memory, places: Mapping[int, torch.device]) -> None:
        """Load the kernels on every device.

        Args:
            memory: of the context, on these devices.
            places: torch's device for each of the plan's in use.
        """
        self._memory = memory
        self._places = places
        self._loads = {d: torch.cuda.Stream(place) for d, place in places.items()}  # type: ignore[no-untyped-call]
        self._current: dict[int, torch.cuda.Stream] = {}
        self._loaded: set[int] = set()
        self._handles: dict[tuple[int, int], LaunchStream] = {}
        self._recorded: dict[Event, torch.cuda.Event] = {}
        self._events: dict[tuple[Event, int], torch.cuda.Event] = {}
        self._kernels: dict[tuple[torch.dtype, tuple[int, int]], Any] = {}
        self._programs: dict[int, tuple[Program, tuple[Command, ...], tuple[int, ...]]] = {}
        self._capability = {d: torch.cuda.get_device_capability(p) for d, p in places.items()}
        self._slots = Slots(memory, places)
        for source in places.values():  # torch lets devices see each other when it first copies between them
            for target in places.values():
                torch.empty(1, device=target).copy_(torch.empty(1, device=source))

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program.

        Args:
            program: whose exchanges, if there are any, go through slots.
            operands: the caller's tensors, ``[rows, columns]`` each.

        Raises:
            ExecutionError: a copy failed, or a device waited in vain in an earlier exchange.
        """
        some = next(iter(operands.values()))
        rows, dtype = some.shape[0], some.dtype
        if id(program) not in self._programs:
            commands = without_callers(program)
            used = {command.stream.device for command in commands} - {HOST}
            self._programs[id(program)] = program, commands, tuple(sorted(used))
        _, commands, devices = self._programs[id(program)]
        for device in devices:
            self._turn_to(device)
        for step in commands:
            if isinstance(step, Exchange):
                with self._ready_to_issue(step.stream) as stream:
                    self._slots.launch(program, step, operands, stream)
            elif isinstance(step, Record):
                self._record(step, new=step.event in program.results)
            elif isinstance(step, Wait):
                self._wait(step)
            else:
                views = (step.target, step.source) if isinstance(step, Copy) else (step.target, *step.sources)
                target, *sources = (resolve(view, operands, self._memory, rows, dtype) for view in views)
                if not target.numel():
                    continue
                if isinstance(step, Copy):
                    self._copy(step.stream, target, sources[0])
                else:
                    self._add(step.stream, target, sources)
        return Pending(tuple(self._recorded[event] for event in program.results))

    def synchronize(self) -> None:
        """Return when everything that was issued is complete.

        Raises:
            ExecutionError: a device waited in vain.
        """
        for stream in (*self._current.values(), *self._loads.values()):
            stream.synchronize()
        self._slots.check()

    def forget(self) -> None:
        """Start anew after everything is complete, as a graph does that is to be captured, or was."""
        self._current.clear()
        self._loaded.clear()
        self._recorded.clear()

    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Return the streams on which something was issued since the last :meth:`forget`."""
        return (*self._current.values(), *(self._loads[d] for d in sorted(self._loaded)))

    def capture(self) -> Graph:
        """Return a graph that captures what a ``with`` block issues."""
        return Graph(self, self._places)

    def turn_to_current(self) -> None:
        """Let what is issued from now on follow what the current streams hold."""
        for device in self._places:
            self._turn_to(device)

    def close(self) -> None:
        """Let go of streams, events and kernels; closing again does nothing."""
        for held in (self._current, self._handles, self._recorded, self._events, self._kernels, self._programs):
            held.clear()

    def _turn_to(self, device: int) -> None:
        """Make the current stream of a device tpplan's: it waits for the one that was."""
        current = torch.cuda.current_stream(self._places[device])
        before = self._current.get(device)
        if before is not None and before != current:
            current.wait_stream(before)
        self._current[device] = current

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        if stream.kind == LOAD:
            self._loaded.add(stream.device)
            return self._loads[stream.device]
        return self._current[stream.device]

    @contextmanager
    def _ready_to_issue(self, stream: Stream) -> Iterator[LaunchStream]:
        """Return a stream to launch on; a default stream is the current device's, whichever was meant."""
        real = self._stream(stream)
        key = (stream.device, real.cuda_stream)
        if key not in self._handles:
            self._handles[key] = LaunchStream.from_handle(key[1])
        if key[1]:
            yield self._handles[key]
        else:
            with torch.cuda.device(self._places[stream.device]):
                yield self._handles[key]

    def _record(self, step: Record, *, new: bool) -> None:
        """Record an event of the stream's device: each has its own, for any device may record some events."""
        key = (step.event, step.stream.device)
        if new or key not in self._events:
            self._events[key] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event = self._recorded[step.event] = self._events[key]
        event.record(self._stream(step.stream))

    def _wait(self, step: Wait) -> None:
        event = self._recorded.get(step.event)
        if event is None:
            return
        if step.stream == HOST_STREAM:
            event.synchronize()
        else:
            self._stream(step.stream).wait_event(event)

    def _copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        if stream == HOST_STREAM:
            target.copy_(source)
            return
        item, (rows, columns) = target.element_size(), target.shape
        with self._ready_to_issue(stream):
            (result,) = runtime.cudaMemcpy2DAsync(
                target.data_ptr(),
                _pitch(target),
                source.data_ptr(),
                _pitch(source),
                columns * item,
                rows,
                runtime.cudaMemcpyKind.cudaMemcpyDefault,
                self._stream(stream).cuda_stream,
            )
        if result != runtime.cudaError_t.cudaSuccess:
            raise ExecutionError(
                f"a copy from {source.device} to {target.device} failed: {result.name}", "see the driver"
            )

    def _add(self, stream: Stream, target: Tensor, sources: list[Tensor]) -> None:
        item, (rows, columns) = target.element_size(), target.shape
        width = columns * item
        places = [(tensor.data_ptr(), _pitch(tensor)) for tensor in (target, *sources)]
        vectors = not any(number % _VECTOR_BYTES for number in (width, *(n for place in places for n in place)))
        (address, pitch), *rest = places
        threads = rows * width // (_VECTOR_BYTES if vectors else item)
        config = LaunchConfig(grid=min(_MOST_BLOCKS, -(-threads // _THREADS)), block=_THREADS)
        arguments = [n for place in rest for n in place] + [0] * (2 * (MOST_SOURCES - len(rest)))
        kernel = self._kernel(target.dtype, stream.device)
        with self._ready_to_issue(stream) as ready:
            launch(ready, config, kernel, address, pitch, rows, width, vectors * 1, len(rest), *arguments)

    def _kernel(self, dtype: torch.dtype, device: int) -> Any:
        key = (dtype, self._capability[device])
        if key not in self._kernels:
            self._kernels[key] = kernel_cache.load(_SUMS[dtype], key[1])
        return self._kernels[key]


def without_callers(program: Program) -> tuple[Command, ...]:
    """Return the commands of a program whose callers' streams are tpplan's, without events that order nothing."""
    recorded: dict[Event, Stream] = {}
    waiting: list[Command] = []
    for command in program.commands:
        if isinstance(command, Record | Wait) and command.stream.kind == CALLER:
            command = evolve(command, stream=own(command.stream.device))  # noqa: PLW2901
        if isinstance(command, Record):
            recorded[command.event] = command.stream
        if not (isinstance(command, Wait) and recorded.get(command.event) == command.stream):
            waiting.append(command)
    # Events that any stream may record order programs too; all others order commands of one.
    wanted = {*program.results, *(event for event in recorded if event.stream == HOST_STREAM)}
    kept: list[Command] = []
    for command in reversed(waiting):
        if isinstance(command, Record) and command.event not in wanted:
            continue
        if isinstance(command, Wait):
            wanted.add(command.event)
        kept.append(command)
    return tuple(reversed(kept))


def _pitch(tensor: Tensor) -> int:
    """Return the bytes from one row to the next; of a single row, its bytes."""
    rows, columns = tensor.shape
    return (columns if rows == 1 else tensor.stride(0)) * tensor.element_size()
