"""Lowering to pipelined copies through pinned host memory, with a ring buffer for each sender.

Used for copies from the host, and for everything that ``host`` moves if kernels may not wait for each other.

Each round moves a part of the rows: all senders fill the next slot of their rings, then all receivers read it, while
the senders fill other slots. Rounds are ordered by events, as copy engines cannot poll flags. Two slots are not enough:
one would be idle while an event passes from device to device.
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

#: Recorded when all rings were read; the next program that fills a ring waits for it.
_DRAINED = Event("drained", HOST_STREAM)

#: Recorded when every share is summed and all rings were read.
_SUMMED = Event("summed", HOST_STREAM)


def load(device: int) -> Stream:
    """Return tpplan's second stream on a device, on which copies from the host overlap with copies to it."""
    return Stream(LOAD, device)


def staged(source: View, start: int, stop: int, slots: int) -> View:
    """Return the view of the sender's ring that stages these columns; parts use its slots in turn."""
    ring = Buffer(STAGE, source.buffer.device, source.part % slots, slots)
    width = source.stop - source.start
    return View(ring, start - source.start, stop - source.start, source.part, source.parts, width)


class _Round(NamedTuple):
    """The transfer of a part of the rows.

    Attributes:
        fills: the commands that fill a slot of each sender's ring.
        reads: the commands that read these slots.
    """

    fills: tuple[Copy, ...]
    reads: tuple[Copy | Sum, ...]

    def readings(self) -> list[tuple[Stream, Stream]]:
        """Return for each slot and reader the stream that fills the slot and the stream that reads it."""
        fills = {copy.target.buffer: copy.stream for copy in self.fills}
        read = ((fills.get(view.buffer), each.stream) for each in self.reads for view in reads(each))
        return list(dict.fromkeys((filler, reader) for filler, reader in read if filler))


def _rounds(begin: Event, rounds: Sequence[_Round], end: Event, slots: int) -> Iterator[Command]:
    """Pipeline rounds on the same streams: each starts when the slot's previous message is read.

    Args:
        begin: the event after which all slots are free.
        rounds: the rounds in order.
        end: the event to record when all slots are free again.
        slots: number of slots of each ring.
    """
    freed: dict[int, tuple[Wait, ...]] = {}  # by slot: waits before it is filled again
    for number, each in enumerate(rounds):
        senders = list(dict.fromkeys(copy.stream for copy in each.fills))
        readings = each.readings()
        yield from freed.get(number % slots, ()) if number else (Wait(sender, begin) for sender in senders)
        yield from each.fills
        if HOST_STREAM not in senders:  # the host completes its copies before it issues later commands
            told, waits = announce("staged", readings, senders[0])
            yield from (*told, *waits)
        yield from each.reads
        if number + slots < len(rounds):
            back = [(reader, sender) for sender, reader in readings]
            told, freed[number % slots] = announce("freed", back, back[0][0], number % slots)
            yield from told
    hub, *others = sorted({command.stream for command in rounds[-1].reads})
    for reader in others:
        yield from order("read", reader, hub)
    yield Record(hub, end)


def _fill(views: Iterable[View], whole: View, slots: int) -> Iterator[Copy]:
    """Yield the copies of these views into the ring slot that stages ``whole``, which contains them all."""
    return (Copy(own(v.buffer.device), v, staged(whole, v.start, v.stop, slots)) for v in views)


def _program(name: str, commands: Iterable[Command]) -> Program:
    """Order commands after earlier and before later work of the callers' streams, where not implied already.

    Every copy and sum touches operands of its own device only.
    """
    body: list[Command] = []
    entered: defaultdict[Stream | Event, set[int]] = defaultdict(set)  # devices whose caller streams it follows
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
    left: defaultdict[Stream | Event, set[int]] = defaultdict(set)  # devices whose caller streams follow it
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
    """Lower moves: each sender stages all columns that others need, and each receiver reads those it needs.

    Args:
        operation: the operation to lower.
        parts: number of parts of the rows.
        slots: number of slots of each ring.
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
        sends = (copy for view in piece.values() for copy in _fill((view,), view, slots))
        rounds.append(_Round(tuple(sends), tuple(taken)))
    # Copies within a device come last, as other devices wait for the rounds.
    return _program(operation.name, (*_rounds(_DRAINED, rounds, _DRAINED, slots), *within))


def reduction(operation: Reduction, parts: int, slots: int) -> Program:
    """Lower a reduction: each receiver sums its share, reading other parts from their rings, and sends it on.

    Args:
        operation: the operation to lower.
        parts: number of parts of the rows.
        slots: number of slots of each ring.
    """
    asked = {sender: operation.asked_of(sender) for sender in operation.senders}
    adding, spreading = [], []
    for part in range(parts):
        shares = operation.shares(part, parts)
        given = {
            sender: [View(Buffer(INPUT, sender), start, stop, part, parts) for start, stop in spans]
            for sender, spans in asked.items()
            if spans
        }
        wholes = {sender: views[0]._replace(stop=views[-1].stop) for sender, views in given.items()}
        sends = (copy for sender, views in given.items() for copy in _fill(views, wholes[sender], slots))
        sums = (
            operation.total(load(share.receiver), share, partial(_fetched, wholes, share.start, share.stop, slots))
            for share in shares
        )
        adding.append(_Round(tuple(sends), tuple(sums)))
        sent = {share: share.of(OUTPUT, share.receiver) for share in shares}
        copies = (
            Copy(load(receiver), staged(view, view.start, view.stop, slots), share.of(OUTPUT, receiver))
            for share, view in sent.items()
            for receiver in operation.receivers
            if receiver != share.receiver
        )
        sends = (copy for view in sent.values() for copy in _fill((view,), view, slots))
        spreading.append(_Round(tuple(sends), tuple(copies)))
    spread = partial(_rounds, rounds=spreading, end=_DRAINED, slots=slots)
    if not any(asked.values()):  # the only sender sums all columns
        alone = (operation.total(own(each.receiver), each, partial(each.of, INPUT)) for each in operation.shares())
        return _program(operation.name, (*alone, *spread(_DRAINED)))
    if len(operation.receivers) == 1:
        return _program(operation.name, _rounds(_DRAINED, adding, _DRAINED, slots))
    return _program(operation.name, (*_rounds(_DRAINED, adding, _SUMMED, slots), *spread(_SUMMED)))


def _fetched(given: dict[int, View], start: int, stop: int, slots: int, sender: int) -> View:
    """Return the view of the ring in which a sender's columns are staged."""
    return staged(given[sender], start, stop, slots)
