"""The CUDA streams that programs are issued to, and the side streams of work beside the current ones.

They are torch's streams, so the caller's torch work and tpplan's are ordered. Nothing here changes the current device
or stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.handles import Aside
from tpplan.exec.toolchain.torch_shims import current_device, is_capturing, make_current, stream_handle, switch_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from tpplan.exec.handles import Noting


#: Priority of streams for communication: their kernels' blocks are scheduled before those of callers' kernels, as other
#: devices wait for them.
PRIORITY = -1


class Streams:
    """The streams of a context's devices; :class:`tpplan.exec.cuda.backend.CudaDevices` issues programs to them.

    tpplan's stream on a device is the current one at the time of the call, so most programs need no events between the
    caller's stream and tpplan's. A second stream copies from host memory.

    Attributes:
        captures: whether a graph of the context is being captured.
    """

    captures = False
    _others = 0

    def __init__(self, places: Mapping[int, torch.device], others: int = 0) -> None:
        """Create the streams that copy from host memory.

        Args:
            places: torch device, with its ordinal, for each device of the plan in use.
            others: number of devices of other processes that they exchange data with.
        """
        self._others = others
        self._places = places
        self._ordinals = {device: int(place.index) for device, place in places.items()}
        self._loads = {d: torch.cuda.Stream(place, priority=PRIORITY) for d, place in places.items()}  # type: ignore[no-untyped-call]
        self._loaded: set[int] = set()
        self._current: dict[int, int] = {}
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        self._load_handles = {device: stream.cuda_stream for device, stream in self._loads.items()}

    def is_capturing(self) -> bool:
        """Return whether the context is being captured, by its own graph or, for a single device, by any.

        Raises:
            ExecutionError: a foreign graph captures the current stream, and there are several devices.
        """
        if self.captures:
            return True
        if not self._has_several():
            return any(map(_is_capturing_on, self._ordinals.values()))
        if is_capturing():
            raise _foreign(current_device())
        return False

    def _has_several(self) -> bool:
        """Return whether there are several devices, which would wait in vain for one that is captured alone."""
        return len(self._ordinals) + self._others > 1

    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Return the streams on which work was issued since the last :meth:`forget`."""
        current = [self._streams[each] for each in tuple(self._current.items())]  # other threads may call this
        return (*current, *(self._loads[device] for device in sorted(self._loaded)))

    def forget(self) -> None:
        """Forget issued work, all of which is complete; called before and after the capture of a graph."""
        self._current.clear()
        self._loaded.clear()

    def turn_to_current(self, devices: Iterable[int] | None = None) -> None:
        """Order work issued from now on to these devices, or to all, after the work queued on the current streams."""
        for device in self._ordinals if devices is None else devices:
            handle = self._handle(device)
            if self._current.get(device) != handle:
                self._turn_to(device, handle)

    def _is_busy(self) -> bool:
        """Return whether any stream has unfinished work.

        Raises:
            ExecutionError: work on a device failed.
        """
        try:
            return not all(stream.query() for stream in self.streams())
        except RuntimeError as error:  # the base class of torch's device errors
            message = f"a device failed: {str(error).partition(chr(10))[0]}"
            raise ExecutionError(message, "close the context, and compile again") from error

    def _handle(self, device: int) -> int:
        """Return a device's current stream, 0 for the default one; overridden where tests have devices share a GPU."""
        return stream_handle(self._ordinals[device])

    def _turn_to(self, device: int, handle: int) -> None:
        """Make a device's current stream tpplan's; it waits for tpplan's previous one, if that is another.

        Raises:
            ExecutionError: a foreign graph captures it, and there are several devices.
        """
        is_foreign = not self.captures and _is_capturing_on(self._ordinals[device])
        if is_foreign and self._has_several():
            raise _foreign(self._ordinals[device])
        before = self._current.get(device)
        key = (device, handle)
        if key not in self._streams:
            place = self._places[device]
            stream = torch.cuda.default_stream(place)
            if handle:
                stream = torch.cuda.ExternalStream(handle, place)  # type: ignore[no-untyped-call]
            self._streams[key] = stream
        # Captured work cannot wait for work that is not; whoever captures has waited for it.
        if before is not None and (not is_foreign or _is_captured(self._streams[device, before])):
            self._streams[key].wait_stream(self._streams[device, before])
        self._current[device] = handle


def _is_capturing_on(ordinal: int) -> bool:
    before = current_device()
    try:  # before the switch: an interrupt comes right behind it
        switch_device(ordinal)
        return is_capturing()
    finally:
        switch_device(before)


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return is_capturing()


def _foreign(ordinal: int) -> ExecutionError:
    """Return the error for a capture of one device without the others that it exchanges data with."""
    message = f"cuda:{ordinal} is being captured, but not by the context"
    return ExecutionError(message, "capture with ctx.capture(), which takes all devices")


def streams_aside(places: Iterable[torch.device]) -> tuple[torch.cuda.Stream, ...]:
    """Create a side stream on every device."""
    return tuple(torch.cuda.Stream(place, priority=PRIORITY) for place in places)  # type: ignore[no-untyped-call]


class StreamsAside(Aside):
    """Makes side streams current in its block; they start after the work queued on the current streams."""

    def __init__(self, backend: Noting, streams: Sequence[torch.cuda.Stream]) -> None:
        """Create it closed; the ``with`` statement opens it.

        Args:
            backend: issues programs to the current streams.
            streams: a side stream of every device.
        """
        super().__init__(backend)
        self._streams = streams
        self._before: list[torch.cuda.Stream] = []
        self._done: list[torch.cuda.Event] = []

    def __enter__(self) -> Self:
        super().__enter__()
        self._before = [torch.cuda.current_stream(stream.device) for stream in self._streams]
        try:
            for stream, before in zip(self._streams, self._before, strict=True):
                stream.wait_stream(before)
            make_current(self._streams)
        except BaseException:  # such as Ctrl-C: nobody else would end it
            make_current(self._before)
            super().__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        make_current(self._before)
        super().__exit__(kind, error, trace)
        self._done = [stream.record_event() for stream in self._streams]
        if kind:  # after an error the caller may never wait
            self.wait()

    def wait(self) -> None:
        """Make the current streams wait for the work of the block."""
        super().wait()
        for stream, done in zip(self._streams, self._done, strict=True):
            torch.cuda.current_stream(stream.device).wait_event(done)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return another stream of a GPU; its device is typed, which torch's own class does not."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
