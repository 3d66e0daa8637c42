"""Lowering to copies through pinned host memory, a ring of it for each sender, in parts that overlap.

A part of the rows goes in a round: all senders fill the next slot of their rings, then all receivers read it, while the
senders fill the other slot. Events keep the rounds in order, for the copy engines know no flags.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tpplan.exec.fence import HOST_STREAM, caller, fence, order, own
from tpplan.exec.program import (
    HOST,
    INPUT,
    LOAD,
    OUTPUT,
    SLOTS,
    STAGE,
    Buffer,
    Command,
    Copy,
    Event,
    Program,
    Record,
    Stream,
    Sum,
    View,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tpplan.exec.operation import Moves, Reduction

#: All rings were read; the next program that fills one waits for it.
_DRAINED = Event("drained", HOST_STREAM)

#: Every share is added up, and all rings were read.
_SUMMED = Event("summed", HOST_STREAM)


def load(device: int) -> Stream:
    """Return tpplan's second stream on a device: what comes from the host does not wait for what goes there."""
    return Stream(LOAD, device)


def staged(source: View, start: int, stop: int) -> View:
    """Return where these columns of what is sent are in the sender's ring; parts take turns with its slots."""
    ring = Buffer(STAGE, source.buffer.device, source.part % SLOTS, SLOTS)
    width = source.stop - source.start
    return View(ring, start - source.start, stop - source.start, source.part, source.parts, width)


class _Round(NamedTuple):
    """A part of the rows on its way.

    Attributes:
        sent: views, by different senders.
        taken: what reads where they are staged.
    """

    sent: tuple[View, ...]
    taken: tuple[Copy | Sum, ...]


def _rounds(begin: Event, rounds: Sequence[_Round], end: Event) -> Iterator[Command]:
    """Let rounds by the same streams follow one another: each starts when the slot's last message is read.

    Args:
        begin: all slots are free.
        rounds: in order.
        end: is recorded when all slots are free again.
    """
    for number, (sent, taken) in enumerate(rounds):
        senders = [own(view.buffer.device) for view in sent]
        readers = sorted({command.stream for command in taken})
        hub, freed = readers[0], Event("freed", readers[0], number % SLOTS)
        if number == 0 or number >= SLOTS:
            yield from (Wait(sender, freed if number else begin) for sender in senders)
        yield from (Copy(own(v.buffer.device), v, staged(v, v.start, v.stop)) for v in sent)
        if HOST_STREAM not in senders:  # what the host has done is done before it issues what follows
            yield from fence("staged", senders, senders[0], readers)
        yield from taken
        last = number == len(rounds) - 1
        if last or number + SLOTS < len(rounds):
            for reader in readers[1:]:
                yield from order("read", reader, hub)
            yield Record(hub, end if last else freed)


def _program(name: str, commands: Iterable[Command]) -> Program:
    """Put commands between the caller's streams, unless other commands put them there.

    Every copy and sum touches operands of its own device only.
    """
    body: list[Command] = []
    entered: defaultdict[Stream | Event, set[int]] = defaultdict(set)  # whose caller's stream it comes after
    for command in commands:
        stream, device = command.stream, command.stream.device
        if isinstance(command, Record):
            entered[command.event] = {*entered[stream]}
        elif isinstance(command, Wait):
            entered[stream] |= entered[command.event]
        elif device not in {HOST, *entered[stream]}:
            body.append(Wait(stream, Event("enter", caller(device))))
            entered[stream].add(device)
        body.append(command)
    devices = sorted({command.stream.device for command in body} - {HOST})
    leave: list[Command] = []
    left: defaultdict[Stream | Event, set[int]] = defaultdict(set)  # whose caller's stream comes after it
    left[HOST_STREAM].update(devices)
    for command in reversed(body):
        stream, device = command.stream, command.stream.device
        if isinstance(command, Wait):
            left[command.event] |= left[stream]
        elif isinstance(command, Record):
            left[stream] |= left.pop(command.event, set())
        elif device not in {HOST, *left[stream]}:
            leave += order("leave", stream, caller(device))
            left[stream].add(device)
    enter = (Record(caller(device), Event("enter", caller(device))) for device in devices)
    return Program(f"{name} through host memory", (*enter, *body, *leave))


def moves(operation: Moves, parts: int) -> Program:
    """Every sender sends all columns that anybody else wants of its tensor, and every receiver takes its own."""
    commands: list[Command] = []
    remote = []
    sent: dict[Buffer, View] = {}
    for source, target in operation.moves:
        if source.buffer.device == target.buffer.device:
            commands.append(Copy(own(source.buffer.device), source, target))
            continue
        remote.append((source, target))
        first = sent.get(source.buffer, source)
        sent[source.buffer] = first._replace(start=min(first.start, source.start), stop=max(first.stop, source.stop))
    rounds = []
    for part in range(parts):
        piece = {buffer: view.rows(part, parts) for buffer, view in sent.items()}
        taken = (
            Copy(load(t.buffer.device), staged(piece[s.buffer], s.start, s.stop), t.rows(part, parts))
            for s, t in remote
        )
        rounds.append(_Round(tuple(piece.values()), tuple(taken)))
    return _program(operation.name, (*commands, *_rounds(_DRAINED, rounds, _DRAINED)))


def reduction(operation: Reduction, parts: int) -> Program:
    """Every taker adds up its share of the columns from all rings, and sends the sum to the others."""
    summing = [share.taker for share in operation.shares()]
    givers = [giver for giver in operation.givers if summing != [giver]]
    adding, spreading = [], []
    for part in range(parts):
        shares = operation.shares(part, parts)
        given = {g: View(Buffer(INPUT, g), 0, operation.columns, part, parts) for g in givers}
        sums = (
            operation.total(load(share.taker), share, partial(_fetched, given, share.start, share.stop))
            for share in shares
        )
        adding.append(_Round(tuple(given.values()), tuple(sums)))
        sent = {share: share.of(OUTPUT, share.taker) for share in shares}
        copies = (
            Copy(load(taker), staged(view, view.start, view.stop), share.of(OUTPUT, taker))
            for share, view in sent.items()
            for taker in operation.takers
            if taker != share.taker
        )
        spreading.append(_Round(tuple(sent.values()), tuple(copies)))
    if not givers:  # who adds up all columns has all that there is to add up
        alone = (operation.total(own(each.taker), each, partial(each.of, INPUT)) for each in operation.shares())
        return _program(operation.name, (*alone, *_rounds(_DRAINED, spreading, _DRAINED)))
    if len(operation.takers) == 1:
        return _program(operation.name, _rounds(_DRAINED, adding, _DRAINED))
    return _program(operation.name, (*_rounds(_DRAINED, adding, _SUMMED), *_rounds(_SUMMED, spreading, _DRAINED)))


def _fetched(given: dict[int, View], start: int, stop: int, giver: int) -> View:
    """Return where a giver's columns are staged."""
    return staged(given[giver], start, stop)
