"""Lowering to copies through pinned host memory, a ring of it for each sender, in parts that overlap.

A part of the rows goes in a round: all senders fill the next slot of their rings, then all receivers read it, while the
senders fill the other slot. Events keep the rounds in order, for the copy engines know no flags.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attrs import Factory, define

from tpplan.exec.fence import HOST_STREAM, caller, fence, order, own
from tpplan.exec.program import (
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
    from collections.abc import Sequence

    from tpplan.exec.operation import Moves, Reduction

#: All rings were read; the next program that fills one waits for it.
_DRAINED = Event("drained", HOST_STREAM)


def load(device: int) -> Stream:
    """Return tpplan's second stream on a device: what comes from the host does not wait for what goes there."""
    return Stream(LOAD, device)


def staged(source: View, start: int, stop: int) -> View:
    """Return where these columns of what is sent are in the sender's ring; parts take turns with its slots."""
    ring = Buffer(STAGE, source.buffer.device, source.part % SLOTS, SLOTS)
    width = source.stop - source.start
    return View(ring, start - source.start, stop - source.start, source.part, source.parts, width)


@define
class _Rounds:
    """Rounds so far.

    Attributes:
        commands: of them.
        senders: all streams that have filled a ring.
        readers: the streams that read in each round since all slots were free.
    """

    commands: list[Command] = Factory(list)
    senders: set[Stream] = Factory(set)
    readers: list[list[Stream]] = Factory(list)

    def add(self, sent: Sequence[View], taken: Sequence[Copy | Sum]) -> None:
        """Add a round.

        Args:
            sent: by different senders.
            taken: what reads where that is staged.
        """
        senders = [own(view.buffer.device) for view in sent]
        readers = sorted({command.stream for command in taken})
        if len(self.readers) >= SLOTS:
            freed = self.readers[-SLOTS]
            self.commands += fence("freed", freed, freed[0], senders)
        self.commands += (Copy(own(v.buffer.device), v, staged(v, v.start, v.stop)) for v in sent)
        if HOST_STREAM not in senders:  # what the host has done is done before it issues what follows
            self.commands += fence("staged", senders, senders[0], readers)
        self.commands += taken
        self.senders.update(senders)
        self.readers.append(readers)

    def turn(self, then: Sequence[Stream]) -> None:
        """Let ``then`` wait until everything is read."""
        readers = sorted({stream for streams in self.readers for stream in streams})
        self.commands += fence("read", readers, readers[0], then)
        self.readers.clear()

    def program(self, name: str) -> Program:
        """Put the commands between the caller's streams and, at both ends, what fills the rings before and after."""
        streams = sorted({command.stream for command in self.commands} - {HOST_STREAM})
        loads = [stream for stream in streams if stream.kind == LOAD]
        devices = sorted({stream.device for stream in streams})
        commands: list[Command] = [Record(caller(d), Event("enter", caller(d))) for d in devices]
        commands += (Wait(stream, Event("enter", caller(stream.device))) for stream in streams)
        commands += (Wait(sender, _DRAINED) for sender in sorted(self.senders))
        commands += self.commands
        for stream in streams:
            commands += order("leave", stream, caller(stream.device))
        commands += (Wait(loads[0], Event("leave", stream)) for stream in loads[1:])
        commands.append(Record(loads[0], _DRAINED))
        return Program(f"{name} through host memory", tuple(commands))


def moves(operation: Moves, parts: int) -> Program:
    """Every sender sends all columns that anybody else wants of its tensor, and every receiver takes its own."""
    rounds = _Rounds()
    remote = []
    sent: dict[Buffer, View] = {}
    for source, target in operation.moves:
        if source.buffer.device == target.buffer.device:
            rounds.commands.append(Copy(own(source.buffer.device), source, target))
            continue
        remote.append((source, target))
        first = sent.get(source.buffer, source)
        sent[source.buffer] = first._replace(start=min(first.start, source.start), stop=max(first.stop, source.stop))
    for part in range(parts):
        piece = {buffer: view.rows(part, parts) for buffer, view in sent.items()}
        taken = [
            Copy(load(t.buffer.device), staged(piece[s.buffer], s.start, s.stop), t.rows(part, parts))
            for s, t in remote
        ]
        rounds.add(tuple(piece.values()), taken)
    return rounds.program(operation.name)


def reduction(operation: Reduction, parts: int) -> Program:
    """Every taker adds up its share of the columns from all rings, and sends the sum to the others."""
    rounds = _Rounds()
    summing = [share.taker for share in operation.shares()]
    givers = [giver for giver in operation.givers if summing != [giver]]
    for part in range(parts):
        given = {g: View(Buffer(INPUT, g), 0, operation.columns, part, parts) for g in givers}
        sums = [
            operation.total(load(share.taker), share, partial(_fetched, given, share.start, share.stop))
            for share in operation.shares(part, parts)
        ]
        rounds.add(tuple(given.values()), sums)
    if len(operation.takers) > 1:
        rounds.turn([own(taker) for taker in summing])
        for part in range(parts):
            shares = operation.shares(part, parts)
            sent = [share.of(OUTPUT, share.taker) for share in shares]
            copies = [
                Copy(load(taker), staged(view, view.start, view.stop), share.of(OUTPUT, taker))
                for share, view in zip(shares, sent, strict=True)
                for taker in operation.takers
                if taker != share.taker
            ]
            rounds.add(sent, copies)
    return rounds.program(operation.name)


def _fetched(given: dict[int, View], start: int, stop: int, giver: int) -> View:
    """Return where a giver's columns are staged."""
    return staged(given[giver], start, stop)
