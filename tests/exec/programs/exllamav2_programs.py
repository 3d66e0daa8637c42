"""The order in which ExLlamaV2's tensor-parallel operations are issued, in tpplan's commands.

All of them go through one pinned buffer. Its caller works in the very streams in which it copies; here that is a fence
before and one behind, so that all that is left to find is its own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tpplan.exec.programs.fence import caller, order, own
from tpplan.exec.programs.program import (
    HOST,
    INPUT,
    OUTPUT,
    STAGE,
    Buffer,
    Copy,
    Event,
    Program,
    Record,
    Sum,
    View,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tpplan.exec.programs.program import Command

COLUMNS = 12


def _pinned(start: int = 0, stop: int = COLUMNS) -> View:
    return View(Buffer(STAGE, HOST), start, stop, width=COLUMNS)


def _whole(role: str, device: int) -> View:
    return View(Buffer(role, device), 0, COLUMNS)


def _passed(device: int) -> Event:
    return Event("sync", own(device))


def _called(name: str, devices: Iterable[int], commands: Sequence[Command], results: tuple[Event, ...] = ()) -> Program:
    """Put commands between the caller's streams."""
    enter = [command for d in devices for command in order("enter", caller(d), own(d))]
    leave = [command for d in devices for command in order("leave", own(d), caller(d))]
    return Program(f"ExLlamaV2's {name}", (*enter, *commands, *leave), results)


def _barrier(devices: Sequence[int]) -> Iterator[Command]:
    """Let every stream wait for all others: a chain of events there, and one back."""
    yield Record(own(devices[0]), _passed(devices[0]))
    for before, device in pairwise(devices):
        yield Wait(own(device), _passed(before))
        yield Record(own(device), _passed(device))
    yield from (Wait(own(device), _passed(devices[-1])) for device in devices[:-1])


def broadcast(source: int, targets: Sequence[int]) -> Program:
    """One download, then the uploads, each in its device's stream."""
    commands = [Copy(own(source), _whole(INPUT, source), _pinned())]
    commands += (Copy(own(target), _pinned(), _whole(OUTPUT, target)) for target in targets)
    return _called("broadcast", sorted({source, *targets}), commands)


def _downloads(cuts: Sequence[int]) -> Iterator[Copy]:
    for device, (start, stop) in enumerate(pairwise(cuts)):
        yield Copy(own(device), View(Buffer(INPUT, device), 0, stop - start), _pinned(start, stop))


def allgather(cuts: Sequence[int]) -> Program:
    """The downloads, a barrier, the uploads."""
    devices = range(len(cuts) - 1)
    uploads = (Copy(own(device), _pinned(), _whole(OUTPUT, device)) for device in devices)
    return _called("allgather", devices, (*_downloads(cuts), *_barrier(devices), *uploads))


def gather(cuts: Sequence[int], *, waited_for: bool) -> Program:
    """The downloads and a barrier; the pinned buffer is the result, and the original knows of no event to wait for."""
    devices = range(len(cuts) - 1)
    downloads = (
        Copy(copy.stream, copy.source, View(Buffer(OUTPUT, HOST), copy.target.start, copy.target.stop))
        for copy in _downloads(cuts)
    )
    results = (_passed(devices[-1]),) if waited_for else ()
    return _called("gather", devices, (*downloads, *_barrier(devices)), results)


def all_reduce(count: int) -> Program:
    """A sum that goes from device to device through the pinned buffer, and from there to all but the last."""
    commands: list[Command] = []
    for device in range(count):
        stream, residual = own(device), _whole(OUTPUT, device)
        if device:
            commands += (Wait(stream, _passed(device - 1)), Copy(stream, _pinned(), residual))
        commands += (Sum(stream, (residual, _whole(INPUT, device)), residual), Copy(stream, residual, _pinned()))
        commands.append(Record(stream, _passed(device)))
    for device in range(count - 1):
        commands += (Wait(own(device), _passed(count - 1)), Copy(own(device), _pinned(), _whole(OUTPUT, device)))
    return _called("all_reduce", range(count), commands)
