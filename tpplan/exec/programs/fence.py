"""The commands by which streams wait for each other."""

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
    """Let everything later in ``after`` wait for everything earlier in ``before``, over one stream.

    That takes an event for each stream, where waiting for each other would take the product of their numbers.
    """
    for stream in before:
        if stream != hub:
            yield from order(name, stream, hub)
    waiting = [stream for stream in after if stream != hub]
    if waiting:
        yield Record(hub, Event(name, hub))
        yield from (Wait(stream, Event(name, hub)) for stream in waiting)


def meet(name: str, pairs: Iterable[tuple[Stream, Stream]], hub: Stream) -> Iterator[Command]:
    """Let the second stream of each pair wait for the first; over one stream, if that takes fewer waits."""
    told, waits = announce(name, pairs, hub)
    yield from (*told, *waits)


def announce(
    name: str, pairs: Iterable[tuple[Stream, Stream]], hub: Stream, number: int = 0
) -> tuple[tuple[Command, ...], tuple[Wait, ...]]:
    """Return what :func:`meet` does in two steps: what the first streams tell, and how the second wait for it, later.

    Args:
        name: of the events.
        pairs: the first streams, and who waits for each.
        hub: among them, over which they tell it if that takes fewer waits.
        number: of the events for which the second streams wait.
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
    """Let ``then`` wait for what is in ``first`` by now."""
    yield Record(first, Event(name, first))
    yield Wait(then, Event(name, first))


def without_callers(program: Program) -> tuple[Command, ...]:
    """Return the commands of a program whose callers' streams are tpplan's, without events that order nothing."""
    recorded: dict[Event, Stream] = {}
    waiting: list[Command] = []
    for each in program.commands:
        called = isinstance(each, Record | Wait) and each.stream.kind == CALLER
        command = evolve(each, stream=own(each.stream.device)) if called else each
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
