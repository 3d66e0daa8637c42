"""Synchronisation between streams by events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.exec.programs.program import CALLER, HOST, OWN, Event, Record, Stream, Wait

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpplan.exec.programs.program import Command, Program

HOST_STREAM = Stream(OWN, HOST)


def caller(device: int) -> Stream:
    """Return the stream that was current on a device when the operation was called."""
    return Stream(CALLER, device)


def own(device: int) -> Stream:
    """Return tpplan's stream on a device, or the host's."""
    return Stream(OWN, device)


def fence(name: str, before: Iterable[Stream], hub: Stream, after: Iterable[Stream]) -> Iterator[Command]:
    """Make the streams ``after`` wait for all earlier work of the streams ``before``, through the stream ``hub``.

    This takes one event per stream; without a hub, the number of waits would be the product of both counts.
    """
    for stream in before:
        if stream != hub:
            yield from order(name, stream, hub)
    waiting = [stream for stream in after if stream != hub]
    if waiting:
        yield Record(hub, Event(name, hub))
        yield from (Wait(stream, Event(name, hub)) for stream in waiting)


def meet(name: str, pairs: Iterable[tuple[Stream, Stream]], hub: Stream) -> Iterator[Command]:
    """Make the second stream of each pair wait for the first; through ``hub`` if that takes fewer waits."""
    told, waits = announce(name, pairs, hub)
    yield from (*told, *waits)


def announce(
    name: str, pairs: Iterable[tuple[Stream, Stream]], hub: Stream, number: int = 0
) -> tuple[tuple[Command, ...], tuple[Wait, ...]]:
    """Return the commands of :func:`meet` in two steps: the first streams' records, and the second streams' waits.

    Args:
        name: name of the events.
        pairs: pairs of a stream and one that waits for it.
        hub: one of the first streams, used to combine the events if that takes fewer waits.
        number: number of the events that the second streams wait for.
    """
    pairs = dict.fromkeys(pairs)
    firsts, seconds = (dict.fromkeys(pair[end] for pair in pairs) for end in (0, 1))
    direct = sum(first.device != second.device for first, second in pairs)
    told: list[Command] = []
    if direct > sum(stream.device != hub.device for stream in (*firsts, *seconds)):
        for first in firsts:
            if first != hub:
                told += order(name, first, hub)
        pairs, firsts = dict.fromkeys((hub, second) for second in seconds if second != hub), {hub: None}
    told += (Record(first, Event(name, first, number)) for first in firsts)
    return (*told,), tuple(Wait(second, Event(name, first, number)) for first, second in pairs)


def order(name: str, first: Stream, then: Stream) -> Iterator[Command]:
    """Make ``then`` wait for all earlier work of ``first``."""
    yield Record(first, Event(name, first))
    yield Wait(then, Event(name, first))


def without_callers(program: Program) -> tuple[Command, ...]:
    """Return a program's commands with the callers' streams replaced by tpplan's, without redundant events."""
    recorded: dict[Event, Stream] = {}
    waiting: list[Command] = []
    for each in program.commands:
        called = isinstance(each, Record | Wait) and each.stream.kind == CALLER
        command = evolve(each, stream=own(each.stream.device)) if called else each
        if isinstance(command, Record):
            recorded[command.event] = command.stream
        if not (isinstance(command, Wait) and recorded.get(command.event) == command.stream):
            waiting.append(command)
    # Events that any stream may record also order programs; all others only order commands of one program.
    wanted = {*program.results, *(event for event in recorded if event.stream == HOST_STREAM)}
    kept: list[Command] = []
    for command in reversed(waiting):
        if isinstance(command, Record) and command.event not in wanted:
            continue
        if isinstance(command, Wait):
            wanted.add(command.event)
        kept.append(command)
    return tuple(reversed(kept))
