"""Lowering to one kernel per device; the kernels write into memory that others read, and flags keep them in order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tpplan.exec.fence import caller, order, own
from tpplan.exec.operation import Share
from tpplan.exec.program import (
    HOST,
    INPUT,
    OUTPUT,
    SLOT,
    SLOTS,
    Await,
    Buffer,
    Copy,
    Exchange,
    Flag,
    Program,
    Queue,
    Signal,
    View,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpplan.exec.operation import Moves, Reduction
    from tpplan.exec.program import Command, Step


class Message(NamedTuple):
    """A view that a device puts into a slot for others.

    Attributes:
        source: what it sends.
        queue: to whom.
    """

    source: View
    queue: Queue

    @property
    def slot(self) -> View:
        """Where it is on its way."""
        width = self.source.stop - self.source.start
        return View(Buffer(SLOT, self.queue.place, queue=self.queue), 0, width, width=width)

    def send(self) -> Iterator[Step]:
        """Wait until every receiver has freed the slot, fill it, and say so."""
        stream = own(self.queue.sender)
        yield from (Await(stream, Flag("free", self.queue, r), SLOTS) for r in self.queue.receivers)
        yield Copy(stream, self.source, self.slot)
        yield Signal(stream, Flag("full", self.queue))


def _messages(sends: Iterable[tuple[View, int]], *, on_host: bool) -> list[Message]:
    """Address views to receivers; in host memory, which all can read, one message serves all receivers of a view."""
    receivers: dict[View, list[int]] = {}
    for source, receiver in sends:
        receivers.setdefault(source, []).append(receiver)
    messages = []
    for source, who in receivers.items():
        sender = source.buffer.device
        if on_host:
            messages.append(Message(source, Queue(HOST, sender, tuple(who))))
        else:
            messages += [Message(source, Queue(r, sender, (r,))) for r in who]
    return messages


def moves(operation: Moves, *, on_host: bool) -> Program:
    """Send every view through a slot."""
    sends = [(source, target.buffer.device) for source, target in operation.moves if _is_remote(source, target)]
    messages = _messages(sends, on_host=on_host)
    kernels: dict[int, list[Step]] = {device: [] for device in operation.devices}
    for message in messages:
        kernels[message.queue.sender] += message.send()
    for source, target in operation.moves:
        device = target.buffer.device
        stream = own(device)
        if _is_remote(source, target):
            message = next(m for m in messages if m.source == source and device in m.queue.receivers)
            kernels[device] += (
                Await(stream, Flag("full", message.queue)),
                Copy(stream, message.slot, target),
                Signal(stream, Flag("free", message.queue, device)),
            )
        else:
            kernels[device].append(Copy(stream, source, target))
    return _program(f"{operation.name} by {_slots(on_host=on_host)}", kernels)


def reduction(operation: Reduction, *, on_host: bool) -> Program:
    """Send every part to every taker, which adds them up."""
    sends = [
        (View(Buffer(INPUT, giver), 0, operation.columns), taker)
        for giver in operation.givers
        for taker in operation.takers
        if giver != taker
    ]
    messages = _messages(sends, on_host=on_host)
    kernels: dict[int, list[Step]] = {device: [] for device in operation.devices}
    for message in messages:
        kernels[message.queue.sender] += message.send()
    for taker in operation.takers:
        queues = [m.queue for m in messages if taker in m.queue.receivers]
        slots = {m.queue.sender: m.slot for m in messages if taker in m.queue.receivers}
        whole = Share(taker, 0, operation.columns)
        kernels[taker] += (Await(own(taker), Flag("full", queue)) for queue in queues)
        kernels[taker].append(operation.total(own(taker), whole, slots.__getitem__))
        kernels[taker] += (Signal(own(taker), Flag("free", queue, taker)) for queue in queues)
    return _program(f"{operation.name} by {_slots(on_host=on_host)}", kernels)


def direct_moves(operation: Moves) -> Program:
    """Write every view where it belongs, as soon as the target's device is ready for it."""
    ends = [(source.buffer.device, target.buffer.device) for source, target in operation.moves]
    pairs = [_pair(sender, receiver) for sender, receiver in dict.fromkeys(ends) if sender != receiver]
    kernels = _opened(operation.devices, pairs)
    for source, target in operation.moves:
        sender = source.buffer.device
        kernels[sender].append(Copy(own(sender), source, target))
    _close(kernels, pairs)
    return _program(f"{operation.name} straight to peers", kernels)


def direct_reduction(operation: Reduction) -> Program:
    """Every taker adds up its share of the columns straight from all givers and writes it to all takers."""
    shares = operation.shares()
    pairs = [_pair(share.taker, d) for share in shares for d in operation.devices if d != share.taker]
    kernels = _opened(operation.devices, pairs)
    for share in shares:
        stream = own(share.taker)
        kernels[share.taker].append(operation.total(stream, share, partial(share.of, INPUT)))
        for taker in operation.takers:
            if taker != share.taker:
                copy = Copy(stream, share.of(OUTPUT, share.taker), share.of(OUTPUT, taker))
                kernels[share.taker].append(copy)
    _close(kernels, pairs)
    return _program(f"{operation.name} straight from and to peers", kernels)


def _pair(sender: int, receiver: int) -> Queue:
    return Queue(receiver, sender, (receiver,))


def _opened(devices: Iterable[int], pairs: list[Queue]) -> dict[int, list[Step]]:
    """Start kernels in which the sender of every pair waits until the receiver's tensors may be read and written."""
    kernels: dict[int, list[Step]] = {device: [] for device in devices}
    for pair in pairs:
        kernels[pair.place].append(Signal(own(pair.place), Flag("ready", pair, pair.place)))
    for pair in pairs:
        kernels[pair.sender].append(Await(own(pair.sender), Flag("ready", pair, pair.place)))
    return kernels


def _close(kernels: dict[int, list[Step]], pairs: list[Queue]) -> None:
    """End kernels: the receiver of every pair waits until the sender has done with its tensors."""
    for pair in pairs:
        kernels[pair.sender].append(Signal(own(pair.sender), Flag("done", pair)))
    for pair in pairs:
        kernels[pair.place].append(Await(own(pair.place), Flag("done", pair)))


def _slots(*, on_host: bool) -> str:
    return "slots on the host" if on_host else "slots of peers"


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
