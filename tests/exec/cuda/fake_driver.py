"""A driver in this process's memory, in the place of ``cuda.bindings.runtime``: its devices copy at once."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import runtime

_SUCCESS, _NOT_READY = runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorNotReady


class Runtime:
    """Copies at once, and keeps what it was asked for. Events are numbers, complete when a test says so."""

    cudaError_t, cudaMemcpyKind = runtime.cudaError_t, runtime.cudaMemcpyKind  # noqa: N815 (the driver's names)
    cudaEventDisableTiming = runtime.cudaEventDisableTiming  # noqa: N815

    def __init__(self, result: Any = _SUCCESS) -> None:
        self.result = result
        self.device = 0
        self.copied: list[tuple[int, int, int]] = []  # bytes of a row, rows, stream
        self.made: list[int] = []  # events: on which device
        self.destroyed: list[int] = []
        self.log: list[tuple[str, int, int]] = []  # what is done with an event, and the stream
        self.complete: set[int] = set()

    def switch_device(self, device: int) -> int:
        """Make a device current."""
        before, self.device = self.device, device
        return before

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: Any, stream: int) -> tuple[Any]:  # noqa: N802
        """Copy bytes."""
        return self.cudaMemcpy2DAsync(target, size, source, size, size, 1, kind, stream)

    def cudaMemcpy2DAsync(self, *given: Any) -> tuple[Any]:  # noqa: N802
        """Copy rows, which must not lie over each other."""
        target, step, source, source_step, width, rows, kind, stream = given
        assert kind == runtime.cudaMemcpyKind.cudaMemcpyDefault
        assert min(step, source_step) >= width > 0
        for i in range(rows):
            ctypes.memmove(target + i * step, source + i * source_step, width)
        self.copied.append((width, rows, stream))
        return (self.result,)

    def cudaEventCreateWithFlags(self, _: int) -> tuple[Any, int]:  # noqa: N802
        """Make one on the current device."""
        self.made.append(self.device)
        return self.result, len(self.made) - 1

    def cudaEventRecord(self, event: int, stream: int) -> tuple[Any]:  # noqa: N802
        """Be incomplete again."""
        self.log.append(("record", event, stream))
        self.complete.discard(event)
        return (self.result,)

    def cudaStreamWaitEvent(self, stream: int, event: int, _: int) -> tuple[Any]:  # noqa: N802
        """Hold a stream."""
        self.log.append(("hold", event, stream))
        return (self.result,)

    def cudaEventSynchronize(self, event: int) -> tuple[Any]:  # noqa: N802
        """Complete it."""
        self.log.append(("wait", event, -1))
        self.complete.add(event)
        return (self.result,)

    def cudaEventQuery(self, event: int) -> tuple[Any]:  # noqa: N802
        """Tell whether it is complete."""
        self.log.append(("ask", event, -1))
        if self.result != _SUCCESS:
            return (self.result,)
        return (_SUCCESS if event in self.complete else _NOT_READY,)
