"""Lowering to copies through pinned host memory, a ring of it for each sender, in parts that overlap.

So goes what comes from the host; and all that ``host`` moves, where kernels may not wait for each other.

A part of the rows goes in a round: all senders fill the next slot of their rings, then all receivers read it, while the
senders fill the others. Events keep the rounds in order, for the copy engines know no flags. Of two slots one would
stand idle while an event passes from device to device.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tpplan.exec.programs.fence import HOST_STREAM, announce, caller, order, own
from tpplan.exec.programs.program import (
    HOST,
    INPUT,
    LOAD,
    OUTPUT,
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
    reads,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tpplan.exec.programs.operation import Moves, Reduction

#: All rings were read; the next program that fills one waits for it.
_DRAINED = Event("drained", HOST_STREAM)

#: Every share is added up, and all rings were read.
_SUMMED = Event("summed", HOST_STREAM)


def load(device: int) -> Stream:
    """Return tpplan's second stream on a device: what comes from the host does not wait for what goes there."""
    return Stream(LOAD, device)


def staged(source: View, start: int, stop: int, slots: int) -> View:
    """Return where these columns of what is sent are in the sender's ring; parts take turns with its slots."""
    ring = Buffer(STAGE, source.buffer.device, source.part % slots, slots)
    width = source.stop - source.start
    return View(ring, start - source.start, stop - source.start, source.part, source.parts, width)


class _Round(NamedTuple):
    """A part of the rows on its way.

    Attributes:
        sent: what fills a slot of each sender's ring.
        taken: what reads there.
    """

    sent: tuple[Copy, ...]
    taken: tuple[Copy | Sum, ...]

    def readings(self) -> list[tuple[Stream, Stream]]:
        """Return whose slot is read by whom: by which stream it is filled, and which reads it."""
        fills = {copy.target.buffer: copy.stream for copy in self.sent}
        read = ((fills.get(view.buffer), each.stream) for each in self.taken for view in reads(each))
        return list(dict.fromkeys((filler, reader) for filler, reader in read if filler))


def _rounds(begin: Event, rounds: Sequence[_Round], end: Event, slots: int) -> Iterator[Command]:
    """Let rounds by the same streams follow one another: each starts when the slot's last message is read.

    Args:
        begin: all slots are free.
        rounds: in order.
        end: is recorded when all slots are free again.
        slots: of each ring.
    """
    freed: dict[int, tuple[Wait, ...]] = {}  # what the next to fill a slot wait for
    for number, each in enumerate(rounds):
        senders = list(dict.fromkeys(copy.stream for copy in each.sent))
        readings = each.readings()
        yield from freed.get(number % slots, ()) if number else (Wait(sender, begin) for sender in senders)
        yield from each.sent
        if HOST_STREAM not in senders:  # what the host has done is done before it issues what follows
            told, waits = announce("staged", readings, senders[0])
            yield from (*told, *waits)
        yield from each.taken
        if number + slots < len(rounds):
            back = [(reader, sender) for sender, reader in readings]
            told, freed[number % slots] = announce("freed", back, back[0][0], number % slots)
            yield from told
    hub, *others = sorted({command.stream for command in rounds[-1].taken})
    for reader in others:
        yield from order("read", reader, hub)
    yield Record(hub, end)


def _sent(views: Iterable[View], whole: View, slots: int) -> Iterator[Copy]:
    """Yield what sends parts of the columns that have a place in a ring together."""
    return (Copy(own(v.buffer.device), v, staged(whole, v.start, v.stop, slots)) for v in views)


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


def moves(operation: Moves, parts: int, slots: int) -> Program:
    """Every sender sends all columns that anybody else wants of its tensor, and every receiver takes its own.

    Args:
        operation: to be lowered.
        parts: of the rows.
        slots: of each ring.
    """
    within: list[Command] = []
    remote = []
    sent: dict[Buffer, View] = {}
    for source, target in operation.moves:
        if source.buffer.device == target.buffer.device:
            within.append(Copy(own(source.buffer.device), source, target))
            continue
        remote.append((source, target))
        first = sent.get(source.buffer, source)
        sent[source.buffer] = first._replace(start=min(first.start, source.start), stop=max(first.stop, source.stop))
    rounds = []
    for part in range(parts):
        piece = {buffer: view.rows(part, parts) for buffer, view in sent.items()}
        taken = (
            Copy(load(t.buffer.device), staged(piece[s.buffer], s.start, s.stop, slots), t.rows(part, parts))
            for s, t in remote
        )
        sends = (copy for view in piece.values() for copy in _sent((view,), view, slots))
        rounds.append(_Round(tuple(sends), tuple(taken)))
    # What stays on its device comes last, for the others wait for the rounds.
    return _program(operation.name, (*_rounds(_DRAINED, rounds, _DRAINED, slots), *within))


def reduction(operation: Reduction, parts: int, slots: int) -> Program:
    """Every taker adds up its share of the columns, of others from their rings, and sends the sum to the others.

    Args:
        operation: to be lowered.
        parts: of the rows.
        slots: of each ring.
    """
    asked = {giver: operation.asked_of(giver) for giver in operation.givers}
    adding, spreading = [], []
    for part in range(parts):
        shares = operation.shares(part, parts)
        given = {
            giver: [View(Buffer(INPUT, giver), start, stop, part, parts) for start, stop in spans]
            for giver, spans in asked.items()
            if spans
        }
        wholes = {giver: views[0]._replace(stop=views[-1].stop) for giver, views in given.items()}
        sends = (copy for giver, views in given.items() for copy in _sent(views, wholes[giver], slots))
        sums = (
            operation.total(load(share.taker), share, partial(_fetched, wholes, share.start, share.stop, slots))
            for share in shares
        )
        adding.append(_Round(tuple(sends), tuple(sums)))
        sent = {share: share.of(OUTPUT, share.taker) for share in shares}
        copies = (
            Copy(load(taker), staged(view, view.start, view.stop, slots), share.of(OUTPUT, taker))
            for share, view in sent.items()
            for taker in operation.takers
            if taker != share.taker
        )
        sends = (copy for view in sent.values() for copy in _sent((view,), view, slots))
        spreading.append(_Round(tuple(sends), tuple(copies)))
    spread = partial(_rounds, rounds=spreading, end=_DRAINED, slots=slots)
    if not any(asked.values()):  # who adds up all columns has all that there is to add up
        alone = (operation.total(own(each.taker), each, partial(each.of, INPUT)) for each in operation.shares())
        return _program(operation.name, (*alone, *spread(_DRAINED)))
    if len(operation.takers) == 1:
        return _program(operation.name, _rounds(_DRAINED, adding, _DRAINED, slots))
    return _program(operation.name, (*_rounds(_DRAINED, adding, _SUMMED, slots), *spread(_SUMMED)))


def _fetched(given: dict[int, View], start: int, stop: int, slots: int, giver: int) -> View:
    """Return where a giver's columns are staged."""
    return staged(given[giver], start, stop, slots)
