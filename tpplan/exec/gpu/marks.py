"""Marks: the points in streams that other streams, or the host, wait for; torch's events take several times as long.

A program's events are names: what was recorded last by a name, on whatever device, is what a wait for it is for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from attrs import define, frozen
from cuda.bindings import runtime

from tpplan.errors import ExecutionError
from tpplan.exec.gathered import wait_within
from tpplan.exec.torch_shims import switch_device

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tpplan.exec.programs.program import Event, Record, Wait

_SUCCESS = runtime.cudaError_t.cudaSuccess
#: Of a question whether a point is passed.
_ANSWERS = _SUCCESS, runtime.cudaError_t.cudaErrorNotReady


@frozen(eq=False)
class Mark:
    """An event of the driver: of one device, recorded again and again.

    Attributes:
        handle: of the driver.
    """

    handle: Any
    _destroy = staticmethod(runtime.cudaEventDestroy)  # which is still there when modules are torn down

    @classmethod
    def on(cls, ordinal: int) -> Self:
        """Return a new one on a device that has this number in torch.

        Raises:
            ExecutionError: the driver refuses.
        """
        before = switch_device(ordinal)
        try:
            error, handle = runtime.cudaEventCreateWithFlags(runtime.cudaEventDisableTiming)
        finally:
            switch_device(before)
        if error != _SUCCESS:
            raise _failed(error)
        return cls(handle)

    def __del__(self) -> None:
        self._destroy(self.handle)

    def record(self, stream: int) -> None:
        """Mark the point that a stream has reached; if it is a default stream, its device has to be current.

        Raises:
            ExecutionError: the driver refuses.
        """
        (error,) = runtime.cudaEventRecord(self.handle, stream)
        if error != _SUCCESS:
            raise _failed(error)

    def hold(self, stream: int) -> None:
        """Hold back a stream until the point is passed; if it is a default stream, its device has to be current.

        Raises:
            ExecutionError: the driver refuses.
        """
        (error,) = runtime.cudaStreamWaitEvent(stream, self.handle, 0)
        if error != _SUCCESS:
            raise _failed(error)

    def is_passed(self) -> bool:
        """Tell whether everything before the point is done.

        Raises:
            ExecutionError: something has failed on the device.
        """
        (error,) = runtime.cudaEventQuery(self.handle)
        if error not in _ANSWERS:
            raise _failed(error)
        return bool(error == _SUCCESS)

    def wait(self) -> None:
        """Return when everything before the point is done.

        Raises:
            ExecutionError: something has failed on the device.
        """
        (error,) = runtime.cudaEventSynchronize(self.handle)
        if error != _SUCCESS:
            raise _failed(error)


class Pending:
    """A program that was issued."""

    _marks: Sequence[tuple[Mark, list[Mark]]] = ()  # of one that an error has left half made

    def __init__(self, marks: Sequence[tuple[Mark, list[Mark]]], check: Callable[[], None]) -> None:
        """Take over the marks of its results.

        Args:
            marks: that nobody else records, each with where it goes when nobody can ask for it any more.
            check: refuses results of devices that waited in vain.
        """
        self._marks = marks
        self._check = check
        self._is_done = not marks

    def __del__(self) -> None:
        for mark, free in self._marks:
            free.append(mark)

    def done(self) -> bool:
        """Return whether the results are complete."""
        if not self._is_done:
            self._is_done = all(mark.is_passed() for mark, _ in self._marks)
        return self._is_done

    def wait(self, timeout: float | None = None) -> None:
        """Return when the results are complete.

        Raises:
            TimeoutError: they are not, after ``timeout`` seconds.
            ExecutionError: they never will be, for a device waited in vain, or something has failed.
        """
        if timeout is None:
            for mark, _ in () if self._is_done else self._marks:
                mark.wait()
            self._is_done = True
        else:
            wait_within(timeout, self.done)
        self._check()


@define(eq=False)
class Name:
    """An event of programs.

    Attributes:
        latest: what was recorded last by its name; None if nothing was.
    """

    latest: Mark | None = None


@frozen(eq=False)
class Recording:
    """A Record, ready to be issued.

    Attributes:
        name: of its event.
        take: returns the mark to record.
    """

    name: Name
    take: Callable[[], Mark]

    def bind(self, *_: object) -> Callable[[int], None]:
        """Return what records on the stream that it is given, whatever the operands."""
        return self._record

    def _record(self, stream: int) -> None:
        mark = self.take()
        mark.record(stream)
        self.name.latest = mark


@frozen(eq=False, kw_only=True)
class Waiting:
    """A Wait, ready to be issued.

    Attributes:
        name: of its event.
        on_host: whether it is the host that waits.
    """

    name: Name
    on_host: bool

    def bind(self, *_: object) -> Callable[[int], None]:
        """Return what waits on the stream that it is given, whatever the operands."""
        return self._wait

    def _wait(self, stream: int) -> None:
        mark = self.name.latest
        if mark is None:
            return
        if self.on_host:
            mark.wait()
        else:
            mark.hold(stream)


class Marks:
    """The marks of all devices, by the names of the programs' events."""

    def __init__(self, ordinals: Mapping[int, int]) -> None:
        """Take torch's number of each of the plan's devices in use."""
        self._ordinals = ordinals
        self._names: dict[Event, Name] = {}
        self._own: dict[tuple[Event, int], Mark] = {}
        self._free: dict[int, list[Mark]] = {device: [] for device in ordinals}

    def recording(self, step: Record, results: Collection[Event]) -> Recording:
        """Return a Record, ready to be issued.

        Each device has a mark of its own for each event, for any device may record some events. Those of results are
        the caller's, to wait for at any time: the next call records others.
        """
        device = step.stream.device
        name = self._name(step.event)
        if step.event in results:
            return Recording(name, partial(self._take, device))
        key = (step.event, device)
        if key not in self._own:
            self._own[key] = self._take(device)
        mark = self._own[key]
        return Recording(name, lambda: mark)

    def waiting(self, step: Wait, *, on_host: bool) -> Waiting:
        """Return a Wait, ready to be issued."""
        return Waiting(name=self._name(step.event), on_host=on_host)

    def results(self, events: Sequence[Event], check: Callable[[], None]) -> Callable[[], Pending]:
        """Return what waits for the latest marks of events; ``check`` is for :class:`Pending`."""
        if not events:
            nothing = Pending((), check)
            return lambda: nothing
        names = [(self._name(event), self._free[event.stream.device]) for event in events]
        return lambda: Pending([(name.latest, free) for name, free in names if name.latest], check)

    def forget(self) -> None:
        """Forget what was recorded."""
        for name in self._names.values():
            name.latest = None

    def clear(self) -> None:
        """Let go of all marks but those that somebody may still ask for."""
        self._names.clear()
        self._own.clear()
        for free in self._free.values():
            free.clear()

    def _name(self, event: Event) -> Name:
        return self._names.setdefault(event, Name())

    def _take(self, device: int) -> Mark:
        free = self._free[device]
        return free.pop() if free else Mark.on(self._ordinals[device])


def _failed(error: Any) -> ExecutionError:
    return ExecutionError(f"an event failed: {error.name}", "earlier work on these devices may have failed")
