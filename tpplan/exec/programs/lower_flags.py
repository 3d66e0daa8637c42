"""Lowering to one kernel per device; the kernels write to memory that others read, synchronised by flags.

Relays are devices that send little, and forward a part of what a busier device would send to several. A relay reads its
columns once from the source and writes them to all targets. It is a target itself, so the total traffic is the same as
without relays.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from tpplan.core.workspace import PAIR
from tpplan.exec.programs.fence import caller, order, own
from tpplan.exec.programs.operation import Share, share_out
from tpplan.exec.programs.program import (
    EXCHANGE,
    HOST,
    INPUT,
    OUTPUT,
    SLOT,
    Await,
    Buffer,
    Copy,
    Exchange,
    Flag,
    Program,
    Queue,
    Signal,
    Sum,
    View,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpplan.exec.programs.operation import Moves, Reduction
    from tpplan.exec.programs.program import Command, Step


#: Cached operations: routes are computed again and again.
_KEPT = 256


def sends(operation: Moves) -> dict[View, dict[int, View]]:
    """Return for each source view its target views, by device."""
    found: dict[View, dict[int, View]] = {}
    for source, target in operation.moves:
        found.setdefault(source, {})[target.buffer.device] = target
    return found


def shares(operation: Moves) -> dict[View, tuple[tuple[int, int, int], ...]]:
    """Return which device sends which columns of each view: (device, start, stop), the view's own device first.

    This balances what devices send: the less a device sends itself, the more it relays for those above average.
    """
    sent, count = Counter[int](), len(operation.devices)
    for source, target in operation.moves:
        if source.buffer.device != target.buffer.device:
            sent[source.buffer.device] += count * (source.stop - source.start)
    average, found = sent.total() // count, {}  # all numbers are times count, to stay integers
    for source, targets in sends(operation).items():
        sender, width = source.buffer.device, source.stop - source.start
        room = {device: max(0, average - sent[device]) for device in targets if device != sender}
        repeated = count * (len(room) - 1) * width  # the most that relays could save it
        given = min(sent[sender] - average, repeated)
        weights = {sender: 1}
        if given > 0 and any(room.values()):
            weights = {sender: (repeated - given) * sum(room.values())}
            weights |= {device: given * columns for device, columns in room.items()}
        cut = share_out(width, weights)
        found[source] = cut if len(cut) > 1 else ((sender, 0, width),)  # a single relay would only replace the sender
    return found


@lru_cache(_KEPT)
def spared(operation: Moves) -> int:
    """Return how many columns relays save the sender, for the view where they save most."""
    targets = sends(operation)
    return max(
        sum(stop - start for device, start, stop in cut if device != source.buffer.device)
        * (len({*targets[source]} - {source.buffer.device}) - 1)
        for source, cut in shares(operation).items()
    )


class Message(NamedTuple):
    """A view that a device writes into a slot for other devices.

    Attributes:
        source: the view to send.
        queue: the queue of the slot.
    """

    source: View
    queue: Queue

    def slot(self, start: int, stop: int) -> View:
        """Return the slot's view of these columns of the source."""
        first, last, slot = self.source.start, self.source.stop, Buffer(SLOT, self.queue.place, queue=self.queue)
        return View(slot, start - first, stop - first, self.source.part, self.source.parts, last - first)

    def send(self) -> Iterator[Step]:
        """Wait until every receiver has freed the slot, fill it, and signal that it is full."""
        stream = own(self.queue.sender)
        yield from (Await(stream, Flag("free", self.queue, r), self.queue.slots) for r in self.queue.receivers)
        yield Copy(stream, self.source, self.slot(self.source.start, self.source.stop))
        yield Signal(stream, Flag("full", self.queue))


def _messages(sends: Iterable[tuple[View, int]], *, on_host: bool, framed: bool) -> dict[tuple[int, int], Message]:
    """Return the message for every sender and receiver.

    All devices can read host memory, so one message there, with all columns needed anywhere, serves all receivers.
    """
    wanted = {(source.buffer.device, receiver): source for source, receiver in sends}
    if not on_host:
        return {ends: Message(source, Queue(ends[1], ends[0], ends[1:])) for ends, source in wanted.items()}
    messages = {}
    for sender in dict.fromkeys(sender for sender, _ in wanted):
        views = {receiver: source for (s, receiver), source in wanted.items() if s == sender}
        start, stop = min(v.start for v in views.values()), max(v.stop for v in views.values())
        whole = next(iter(views.values()))._replace(start=start, stop=stop)
        message = Message(whole, Queue(HOST, sender, tuple(sorted(views)), framed))
        messages.update(dict.fromkeys(((sender, receiver) for receiver in views), message))
    return messages


def moves(operation: Moves, *, on_host: bool, framed: bool = False, parts: int = 1) -> Program:
    """Lower moves: send every view through slots.

    Args:
        operation: the operation to lower.
        on_host: whether the slots are in host memory.
        framed: whether messages are sent in frames.
        parts: number of parts of the rows; each part is a message.
    """
    kernels: dict[int, list[Step]] = {device: [] for device in operation.devices}
    for part in range(parts):
        pieces = [(source.rows(part, parts), target.rows(part, parts)) for source, target in operation.moves]
        sends = [(source, target.buffer.device) for source, target in pieces if _is_remote(source, target)]
        messages = _messages(sends, on_host=on_host, framed=framed)
        _send(kernels, messages)
        for source, target in pieces:
            device = target.buffer.device
            stream = own(device)
            if _is_remote(source, target):
                message = messages[source.buffer.device, device]
                kernels[device] += (
                    Await(stream, Flag("full", message.queue)),
                    Copy(stream, message.slot(source.start, source.stop), target),
                    Signal(stream, Flag("free", message.queue, device)),
                )
            else:
                kernels[device].append(Copy(stream, source, target))
    return _program(f"{operation.name} by {_slots(on_host=on_host, framed=framed)}", kernels)


def reduction(operation: Reduction, *, on_host: bool, framed: bool = False, parts: int = 1) -> Program:
    """Lower a reduction: send every part to every receiver, which sums them; for the arguments see :func:`moves`."""
    kernels: dict[int, list[Step]] = {device: [] for device in operation.devices}
    for part in range(parts):
        sends = [
            (View(Buffer(INPUT, sender), 0, operation.columns, part, parts), receiver)
            for sender in operation.senders
            for receiver in operation.receivers
            if sender != receiver
        ]
        messages = _messages(sends, on_host=on_host, framed=framed)
        _send(kernels, messages)
        for receiver in operation.receivers:
            received = {sender: message for (sender, to), message in messages.items() if to == receiver}
            slots = {sender: message.slot(0, operation.columns) for sender, message in received.items()}
            whole = Share(receiver, 0, operation.columns, part, parts)
            kernels[receiver] += (Await(own(receiver), Flag("full", message.queue)) for message in received.values())
            kernels[receiver].append(operation.total(own(receiver), whole, slots.__getitem__))
            kernels[receiver] += (
                Signal(own(receiver), Flag("free", message.queue, receiver)) for message in received.values()
            )
    return _program(f"{operation.name} by {_slots(on_host=on_host, framed=framed)}", kernels)


def shared_reduction(operation: Reduction, parts: int) -> Program:
    """Lower a reduction: send every part in frames to every receiver, which sums its share and sends the sum likewise.

    Args:
        operation: a reduction whose receivers are its senders and all have a share.
        parts: number of parts of the rows.
    """
    kernels: dict[int, list[Step]] = {device: [] for device in operation.devices}
    queues = {
        d: Queue(HOST, d, tuple(sorted(_others(d, operation.receivers))), framed=True) for d in operation.receivers
    }
    for part in range(parts):
        shares = {share.receiver: share for share in operation.shares(part, parts)}
        wholes = {d: View(Buffer(INPUT, d), 0, operation.columns, part, parts) for d in operation.receivers}
        for device in operation.receivers:
            kernels[device] += _shared(operation, shares, wholes, queues, device)
    return _program(f"{operation.name} by shared frames on the host", kernels)


def _shared(
    operation: Reduction, shares: dict[int, Share], wholes: dict[int, View], queues: dict[int, Queue], device: int
) -> Iterator[Step]:
    """Yield a device's steps for a part of the rows: send its part, sum its share, send the sum, receive other sums."""
    stream, others, share = own(device), _others(device, operation.receivers), shares[device]
    yield from Message(wholes[device], queues[device]).send()
    slots = {other: Message(wholes[other], queues[other]).slot(share.start, share.stop) for other in others}
    yield from (Await(stream, Flag("full", queues[other])) for other in others)
    yield operation.total(stream, share, slots.__getitem__)
    yield from (Signal(stream, Flag("free", queues[other], device)) for other in others)
    yield from Message(share.of(OUTPUT, device), queues[device]).send()
    totals = {other: shares[other].of(OUTPUT, device) for other in others}
    yield from (Await(stream, Flag("full", queues[other])) for other in others)
    for other, total in totals.items():
        yield Copy(stream, Message(total, queues[other]).slot(total.start, total.stop), total)
    yield from (Signal(stream, Flag("free", queues[other], device)) for other in others)


def direct_moves(operation: Moves, *, relayed: bool = False) -> Program:
    """Lower moves: write every view straight to its target, as soon as the target's device is ready.

    Args:
        operation: the operation to lower.
        relayed: whether relays send a part of what a device sends to several.
    """
    copies, cuts = [], shares(operation) if relayed else {}
    for source, targets in sends(operation).items():
        sender, width = source.buffer.device, source.stop - source.start
        for device, start, stop in cuts.get(source, ((sender, 0, width),)):
            read = _columns(source, start, stop)
            views = {target: _columns(view, start, stop) for target, view in targets.items()}
            if device != sender and sender in views:
                copies.append(Copy(own(sender), read, views.pop(sender)))
            if device in views:
                copies.append(Copy(own(device), read, views[device]))
                read = read if device == sender else views[device]
            copies += (Copy(own(device), read, views[other]) for other in _others(device, views))
    ends = ((copy.stream.device, view.buffer.device) for copy in copies for view in (copy.source, copy.target))
    pairs = [_pair(device, other) for device, other in dict.fromkeys(ends) if device != other]
    kernels = _opened(operation.devices, pairs)
    for copy in copies:
        kernels[copy.stream.device].append(copy)
    _close(kernels, pairs)
    return _program(f"{operation.name} {'passed on by' if relayed else 'straight to'} peers", kernels)


def direct_reduction(operation: Reduction) -> Program:
    """Lower a reduction: every receiver sums its share straight from the senders' memory and writes it to all."""
    shares = operation.shares()
    pairs = [_pair(share.receiver, d) for share in shares for d in operation.devices if d != share.receiver]
    kernels = _opened(operation.devices, pairs)
    for share in shares:
        stream = own(share.receiver)
        kernels[share.receiver].append(operation.total(stream, share, partial(share.of, INPUT)))
        total = share.of(OUTPUT, share.receiver)
        others = _others(share.receiver, operation.receivers)
        kernels[share.receiver] += (Copy(stream, total, share.of(OUTPUT, other)) for other in others)
    _close(kernels, pairs)
    return _program(f"{operation.name} straight from and to peers", kernels)


def one_shot_reduction(operation: Reduction) -> Program:
    """Lower a reduction: every device sums all parts straight from their memory, and writes once all have read its own.

    Meanwhile it holds the sum in a half of its exchange buffer, or in registers.

    Args:
        operation: a reduction whose receivers are its senders.
    """
    pairs = [_pair(device, other) for device in operation.devices for other in _others(device, operation.devices)]
    kernels, whole = _opened(operation.devices, pairs), operation.columns
    held = {d: View(Buffer(EXCHANGE, d, 1, PAIR), 0, whole, width=whole) for d in operation.devices}
    for device in operation.devices:
        share = Share(device, 0, whole)
        total = operation.total(own(device), share, partial(share.of, INPUT))
        kernels[device].append(Sum(total.stream, total.sources, held[device]))
    _close(kernels, pairs)
    for device in operation.devices:
        kernels[device].append(Copy(own(device), held[device], View(Buffer(OUTPUT, device), 0, whole)))
    return _program(f"{operation.name} in one shot from peers", kernels)


def _columns(view: View, start: int, stop: int) -> View:
    """Return columns ``start`` to ``stop`` of a view."""
    return view._replace(start=view.start + start, stop=view.start + stop)


def _others(device: int, devices: Iterable[int]) -> list[int]:
    """Return the other devices in the order in which to write to them, staggered so that not all write to the same."""
    return sorted((other for other in devices if other != device), key=lambda other: (other < device, other))


def _pair(sender: int, receiver: int) -> Queue:
    return Queue(receiver, sender, (receiver,))


def _opened(devices: Iterable[int], pairs: list[Queue]) -> dict[int, list[Step]]:
    """Return the first steps of kernels: every pair's sender waits until it may access the receiver's tensors."""
    kernels: dict[int, list[Step]] = {device: [] for device in devices}
    for pair in pairs:
        kernels[pair.place].append(Signal(own(pair.place), Flag("ready", pair, pair.place)))
    for pair in pairs:
        kernels[pair.sender].append(Await(own(pair.sender), Flag("ready", pair, pair.place)))
    return kernels


def _close(kernels: dict[int, list[Step]], pairs: list[Queue]) -> None:
    """Add the last steps of kernels: every pair's receiver waits until the sender no longer accesses its tensors."""
    for pair in pairs:
        kernels[pair.sender].append(Signal(own(pair.sender), Flag("done", pair)))
    for pair in pairs:
        kernels[pair.place].append(Await(own(pair.place), Flag("done", pair)))


def _slots(*, on_host: bool, framed: bool) -> str:
    return f"{'frames' if framed else 'slots'} {'on the host' if on_host else 'of peers'}"


def _send(kernels: dict[int, list[Step]], messages: dict[tuple[int, int], Message]) -> None:
    """Add the sending of each message to its sender's kernel."""
    for message in dict.fromkeys(messages.values()):
        kernels[message.queue.sender] += message.send()


def _is_remote(source: View, target: View) -> bool:
    return source.buffer.device != target.buffer.device


def _program(name: str, kernels: dict[int, list[Step]]) -> Program:
    commands: list[Command] = []
    for device in kernels:
        commands += order("enter", caller(device), own(device))
    commands += (Exchange(own(device), tuple(steps)) for device, steps in kernels.items())
    for device in kernels:
        commands += order("leave", own(device), caller(device))
    return Program(name, tuple(commands))
