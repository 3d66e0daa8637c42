"""Lowering to copies through pinned host memory, a ring of it for each sender, in parts that overlap.

Events keep them in order, for the copy engines know no flags.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from attrs import Factory, define

from tpplan.exec.fence import HOST_STREAM, caller, order, own
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
    View,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.exec.operation import Moves, Reduction, Share

#: All rings were read; the next program that fills one waits for it.
_DRAINED = Event("drained", HOST_STREAM)


def load(device: int) -> Stream:
    """Return tpplan's second stream on a device: what comes from the host does not wait for what goes there."""
    return Stream(LOAD, device)


class Delivery(NamedTuple):
    """Where a receiver of a message puts some of its columns.

    Attributes:
        start: first of the message's columns.
        target: as many columns as are wanted.
    """

    start: int
    target: View


@define
class _Rings:
    """Commands that go through the rings.

    Attributes:
        commands: so far.
        filled: how often each sender's ring was filled.
        readers: the streams that read what each slot of a ring last held.
    """

    commands: list[Command] = Factory(list)
    filled: Counter[int] = Factory(Counter)
    readers: dict[tuple[int, int], list[Stream]] = Factory(dict)

    def send(self, source: View, deliveries: Iterable[Delivery]) -> None:
        """Fill the next slot of the source's ring when it was read, and deliver what is in it."""
        sender = source.buffer.device
        stream, slot, width = own(sender), self.filled[sender] % SLOTS, source.stop - source.start
        stage = View(Buffer(STAGE, sender, slot, SLOTS), 0, width, source.part, source.parts, width)
        freed = (sender + 1) * SLOTS + slot
        self.commands += (Wait(stream, Event("freed", r, freed)) for r in self.readers.get((sender, slot), ()))
        self.commands += (Copy(stream, source, stage), Record(stream, Event("staged", stream, slot)))
        self.filled[sender] += 1
        self.readers[sender, slot] = []
        for start, target in deliveries:
            reader = load(target.buffer.device)
            if sender != HOST:  # what the host has done is done before it issues what follows
                self.commands.append(Wait(reader, Event("staged", stream, slot)))
            columns = stage._replace(start=start, stop=start + target.stop - target.start)
            self.commands += (Copy(reader, columns, target), Record(reader, Event("freed", reader, freed)))
            self.readers[sender, slot].append(reader)

    def after_sending(self, device: int) -> None:
        """Let what a device loads from now on wait until what it sent was read: it may be written over that."""
        if self.filled[device]:
            sent = Event("staged", own(device), (self.filled[device] - 1) % SLOTS)
            self.commands.append(Wait(load(device), sent))

    def program(self, name: str) -> Program:
        """Put the commands between the caller's streams and, at both ends, what fills the rings before and after."""
        streams = sorted({c.stream for c in self.commands if c.stream != HOST_STREAM})
        loads = [stream for stream in streams if stream.kind == LOAD]
        devices = sorted({stream.device for stream in streams})
        commands: list[Command] = [Record(caller(d), Event("enter", caller(d))) for d in devices]
        for device in devices:
            first, *others = sorted((s for s in streams if s.device == device), reverse=True)  # own, then load
            commands.append(Wait(first, Event("enter", caller(device))))
            # An earlier program by another transport may have used the same scratch in the device's own stream.
            commands += (command for stream in others for command in order("enter", first, stream))
        commands += (Wait(own(sender), _DRAINED) for sender in sorted(self.filled))
        commands += self.commands
        for stream in streams:
            commands += order("leave", stream, caller(stream.device))
        commands += (Wait(loads[0], Event("leave", stream)) for stream in loads[1:])
        commands.append(Record(loads[0], _DRAINED))
        return Program(f"{name} through host memory", _pruned(commands))


def moves(operation: Moves, parts: int) -> Program:
    """Every view goes into its sender's ring once, and from there to all its targets."""
    rings = _Rings()
    targets: dict[View, list[View]] = {}
    for source, target in operation.moves:
        if source.buffer.device == target.buffer.device:
            rings.commands.append(Copy(own(source.buffer.device), source, target))
        else:
            targets.setdefault(source, []).append(target)
    for part in range(parts):
        for source, views in targets.items():
            rings.send(source.rows(part, parts), [Delivery(0, view.rows(part, parts)) for view in views])
    return rings.program(operation.name)


def reduction(operation: Reduction, parts: int) -> Program:
    """Every taker fetches its share of the columns from all rings, adds it up, and sends the sum to the others."""
    rings = _Rings()
    for part in range(parts):
        _add_up(rings, operation, operation.shares(part, parts))
    summing = {share.taker for share in operation.shares()}
    for taker in operation.takers:
        if taker in summing:
            rings.commands += order("summed", load(taker), own(taker))
        else:
            rings.after_sending(taker)
    for part in range(parts):
        for share in operation.shares(part, parts):
            others = [Delivery(0, share.of(OUTPUT, t)) for t in operation.takers if t != share.taker]
            if others:
                rings.send(share.of(OUTPUT, share.taker), others)
    return rings.program(operation.name)


def _add_up(rings: _Rings, operation: Reduction, shares: tuple[Share, ...]) -> None:
    """Fetch a part of the rows from all givers and add it up."""
    for giver in operation.givers:
        wanted = [Delivery(share.start, operation.slab(share, giver)) for share in shares if share.taker != giver]
        if wanted:
            whole = View(Buffer(INPUT, giver), 0, operation.columns)
            rings.send(whole.rows(shares[0].part, shares[0].parts), wanted)
    for share in shares:
        rings.after_sending(share.taker)
        rings.commands.append(operation.total(load(share.taker), share, partial(operation.slab, share)))


def _pruned(commands: list[Command]) -> tuple[Command, ...]:
    """Leave out the records that nothing waits for."""
    wanted = {_DRAINED}
    kept: list[Command] = []
    for command in reversed(commands):
        if isinstance(command, Record):
            if command.event not in wanted:
                continue
            wanted.discard(command.event)
        elif isinstance(command, Wait):
            wanted.add(command.event)
        kept.append(command)
    return tuple(reversed(kept))
