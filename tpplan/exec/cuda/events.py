"""CUDA events for ordering streams and the host, through the runtime API, as torch's events are several times slower.

A program's events are names. A wait for a name is for its latest record, on whatever device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from attrs import define, frozen

from tpplan.errors import ExecutionError
from tpplan.exec.handles import wait_within
from tpplan.exec.toolchain.bindings import runtime
from tpplan.exec.toolchain.torch_shims import current_device, switch_device

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tpplan.exec.programs.program import Event, Record, Wait

_SUCCESS = runtime.cudaError_t.cudaSuccess
#: Results of a query that are not errors.
_ANSWERS = _SUCCESS, runtime.cudaError_t.cudaErrorNotReady


@frozen(eq=False)
class CudaEvent:
    """A CUDA event of one device, which is recorded repeatedly.

    Attributes:
        handle: the event's handle.
    """

    handle: Any
    _destroy = staticmethod(runtime.cudaEventDestroy)  # still available when modules are torn down

    @classmethod
    def on(cls, ordinal: int) -> Self:
        """Create an event on the device with this ordinal.

        Raises:
            ExecutionError: CUDA reports an error.
        """
        before = current_device()
        try:  # before the switch: an interrupt comes right behind it
            switch_device(ordinal)
            error, handle = runtime.cudaEventCreateWithFlags(runtime.cudaEventDisableTiming)
        finally:
            switch_device(before)
        if error != _SUCCESS:
            raise _failed(error)
        return cls(handle)

    def __del__(self) -> None:
        self._destroy(self.handle)

    def record(self, stream: int) -> None:
        """Record the event on a stream; if that is a default stream, its device must be current.

        Raises:
            ExecutionError: CUDA reports an error.
        """
        (error,) = runtime.cudaEventRecord(self.handle, stream)
        if error != _SUCCESS:
            raise _failed(error)

    def hold(self, stream: int) -> None:
        """Make a stream wait for the event; if that is a default stream, its device must be current.

        Raises:
            ExecutionError: CUDA reports an error.
        """
        (error,) = runtime.cudaStreamWaitEvent(stream, self.handle, 0)
        if error != _SUCCESS:
            raise _failed(error)

    def is_passed(self) -> bool:
        """Return whether all work before the event is complete.

        Raises:
            ExecutionError: work on the device failed.
        """
        (error,) = runtime.cudaEventQuery(self.handle)
        if error not in _ANSWERS:
            raise _failed(error)
        return bool(error == _SUCCESS)

    def wait(self) -> None:
        """Block until all work before the event is complete.

        Raises:
            ExecutionError: work on the device failed.
        """
        (error,) = runtime.cudaEventSynchronize(self.handle)
        if error != _SUCCESS:
            raise _failed(error)


class Pending:
    """A handle for an issued program."""

    _events: Sequence[tuple[CudaEvent, list[CudaEvent]]] = ()  # in case __init__ failed

    def __init__(self, events: Sequence[tuple[CudaEvent, list[CudaEvent]]], check: Callable[[], None]) -> None:
        """Take ownership of the events of the program's results.

        Args:
            events: events that nothing else records, each with the list to return it to when the handle is deleted.
            check: raises an error if a device timed out.
        """
        self._events = events
        self._check = check
        self._is_done = not events

    def __del__(self) -> None:
        for event, free in self._events:
            free.append(event)

    def done(self) -> bool:
        """Return whether the results are complete."""
        if not self._is_done:
            self._is_done = all(event.is_passed() for event, _ in self._events)
        return self._is_done

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the results are complete.

        Raises:
            TimeoutError: they are not complete after ``timeout`` seconds.
            ExecutionError: they never will be, as a device timed out or work on it failed.
        """
        if timeout is None:
            for event, _ in () if self._is_done else self._events:
                event.wait()
            self._is_done = True
        else:
            wait_within(timeout, self.done)
        self._check()


@define(eq=False)
class Name:
    """A named event of programs.

    Attributes:
        latest: the CUDA event recorded last by this name; None if there is none.
    """

    latest: CudaEvent | None = None


@frozen(eq=False)
class Recording:
    """A prepared Record.

    Attributes:
        name: its named event.
        take: returns the CUDA event to record.
    """

    name: Name
    take: Callable[[], CudaEvent]

    def bind(self, *_: object) -> Callable[[int], None]:
        """Return a callable that records on a given stream, whatever the operands."""
        return self._record

    def _record(self, stream: int) -> None:
        event = self.take()
        event.record(stream)
        self.name.latest = event


@frozen(eq=False, kw_only=True)
class Waiting:
    """A prepared Wait.

    Attributes:
        name: its named event.
        on_host: whether the host waits.
    """

    name: Name
    on_host: bool

    def bind(self, *_: object) -> Callable[[int], None]:
        """Return a callable that makes a given stream wait, whatever the operands."""
        return self._wait

    def _wait(self, stream: int) -> None:
        event = self.name.latest
        if event is None:
            return
        if self.on_host:
            event.wait()
        else:
            event.hold(stream)


class CudaEvents:
    """The CUDA events of all devices, by the programs' events."""

    def __init__(self, ordinals: Mapping[int, int]) -> None:
        """Take the ordinal of each device of the plan in use."""
        self._ordinals = ordinals
        self._names: dict[Event, Name] = {}
        self._own: dict[tuple[Event, int], CudaEvent] = {}
        self._free: dict[int, list[CudaEvent]] = {device: [] for device in ordinals}

    def recording(self, step: Record, results: Collection[Event]) -> Recording:
        """Return a prepared Record.

        Each device has a CUDA event of its own for each named event, as any device may record some of them. Events of
        results belong to the caller, who may wait for them at any time, so each call records new ones.
        """
        device = step.stream.device
        name = self._name(step.event)
        if step.event in results:
            return Recording(name, partial(self._take, device))
        key = (step.event, device)
        if key not in self._own:
            self._own[key] = self._take(device)
        event = self._own[key]
        return Recording(name, lambda: event)

    def waiting(self, step: Wait, *, on_host: bool) -> Waiting:
        """Return a prepared Wait."""
        return Waiting(name=self._name(step.event), on_host=on_host)

    def results(self, events: Sequence[Event], check: Callable[[], None]) -> Callable[[], Pending]:
        """Return a callable that creates a handle for the latest records of events; see :class:`Pending`."""
        if not events:
            nothing = Pending((), check)
            return lambda: nothing
        names = [(self._name(event), self._free[event.stream.device]) for event in events]
        return lambda: Pending([(name.latest, free) for name, free in names if name.latest], check)

    def forget(self) -> None:
        """Forget all records."""
        for name in self._names.values():
            name.latest = None

    def clear(self) -> None:
        """Release all CUDA events but those that handles still hold."""
        self._names.clear()
        self._own.clear()
        for free in self._free.values():
            free.clear()

    def _name(self, event: Event) -> Name:
        return self._names.setdefault(event, Name())

    def _take(self, device: int) -> CudaEvent:
        free = self._free[device]
        return free.pop() if free else CudaEvent.on(self._ordinals[device])


def _failed(error: Any) -> ExecutionError:
    return ExecutionError(f"an event failed: {error.name}", "earlier work on these devices may have failed")
