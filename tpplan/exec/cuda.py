"""CUDA devices: programs run on streams; copies by the copy engines, sums and exchanges by kernels.

Streams and events are torch's, so that a caller's torch work and tpplan's wait for each other. Nothing here changes the
current device or stream.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from cuda.bindings import runtime
from cuda.core import LaunchConfig, launch
from cuda.core import Stream as LaunchStream

from tpplan.errors import ExecutionError
from tpplan.exec import kernel_cache
from tpplan.exec.binding import resolve
from tpplan.exec.fence import HOST_STREAM
from tpplan.exec.kernel_cache import MOST_SOURCES
from tpplan.exec.program import CALLER, LOAD, OWN, Copy, Event, Exchange, Record, Stream, Wait
from tpplan.exec.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tpplan.exec.binding import Memory
    from tpplan.exec.program import Buffer, Program

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
    """Runs programs of copies and sums on CUDA devices. Not safe for two threads at once."""

    def __init__(self, memory: Memory, places: Mapping[int, torch.device]) -> None:
        """Make streams on every device, and load the kernels there.

        Args:
            memory: of the context, on these devices.
            places: torch's device for each of the plan's in use.
        """
        self._memory = memory
        self._places = places
        self._streams = {
            Stream(kind, index): torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
            for kind in (OWN, LOAD)
            for index, place in places.items()
        }
        self._launches = {stream: LaunchStream.from_handle(s.cuda_stream) for stream, s in self._streams.items()}
        self._recorded: dict[Event, torch.cuda.Event] = {}
        self._events: dict[tuple[Event, int], torch.cuda.Event] = {}
        self._kernels: dict[tuple[torch.dtype, tuple[int, int]], Any] = {}
        self._capability = {d: torch.cuda.get_device_capability(p) for d, p in places.items()}
        self._slots = Slots(memory, places, self._launches)
        for source in places.values():  # torch lets devices see each other when it first copies between them
            for target in places.values():
                torch.empty(1, device=target).copy_(torch.empty(1, device=source))

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program.

        Args:
            program: whose exchanges, if there are any, go through slots.
            operands: the caller's tensors, ``[rows, columns]`` each.
        """
        some = next(iter(operands.values()))
        rows, dtype = some.shape[0], some.dtype
        for step in program.commands:
            if isinstance(step, Record):
                self._record(step)
            elif isinstance(step, Wait):
                self._wait(step)
            elif isinstance(step, Exchange):
                self._slots.launch(program, step, operands, self._launches[step.stream])
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
        """Return when everything that was issued is complete."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Let go of streams, events and kernels; closing again does nothing."""
        for held in (self._streams, self._launches, self._recorded, self._events, self._kernels):
            held.clear()

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        return (
            torch.cuda.current_stream(self._places[stream.device]) if stream.kind == CALLER else self._streams[stream]
        )

    def _record(self, step: Record) -> None:
        """Record an event of the stream's device: each has its own, for any device may record some events."""
        key = (step.event, step.stream.device)
        if key not in self._events:
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
        (result,) = runtime.cudaMemcpy2DAsync(
            target.data_ptr(),
            _pitch(target),
            source.data_ptr(),
            _pitch(source),
            columns * item,
            rows,
            runtime.cudaMemcpyKind.cudaMemcpyDefault,
            self._streams[stream].cuda_stream,
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
        launch(self._launches[stream], config, kernel, address, pitch, rows, width, vectors * 1, len(rest), *arguments)

    def _kernel(self, dtype: torch.dtype, device: int) -> Any:
        key = (dtype, self._capability[device])
        if key not in self._kernels:
            self._kernels[key] = kernel_cache.load(_SUMS[dtype], key[1])
        return self._kernels[key]


def _pitch(tensor: Tensor) -> int:
    """Return the bytes from one row to the next; of a single row, its bytes."""
    rows, columns = tensor.shape
    return (columns if rows == 1 else tensor.stride(0)) * tensor.element_size()
