"""Lowering: an operation, a transport and a size class determine a program.

- ``events``: copies from device to device, ordered by events. Requires nothing but working copies.
- ``peer``: one kernel per device, which writes to the other devices' memory. Small messages go through slots. Large
  ones are written straight to their targets, and reductions are divided by columns. Devices that send little relay a
  part of what others send to several. Large moves may be left to copy engines.
- ``host``: kernels send through pinned host memory, small messages through slots and large ones in frames. Reductions
  that would bring each device too much data are divided by columns. Where kernels may not wait for each other, copies
  in parts.

The slot size and the thresholds of a :class:`~tpplan.exec.tuning.Tuning` decide which messages count as small,
and which go to copy engines.

Copies from the host and within a device are the same for all transports.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from attrs import field, frozen

from tpplan.core.sizes import format_apart
from tpplan.core.workspace import ALIGNMENT, CHUNKS, PAIR
from tpplan.errors import ExecutionError
from tpplan.exec.programs import lower_flags, lower_host
from tpplan.exec.programs.fence import caller, fence, meet, order, own
from tpplan.exec.programs.operation import Addition, Moves, Reduction
from tpplan.exec.programs.program import HOST, INPUT, OUTPUT, SLOTS, Buffer, Copy, Event, Exchange, Program, Sum, View
from tpplan.exec.protocol.direct import VECTOR_BYTES
from tpplan.exec.tuning import EXCHANGES, FANS, SUMS, Tuning

if TYPE_CHECKING:
    from tpplan.exec.programs.operation import Operation
    from tpplan.exec.programs.program import Command


def moves(operation: Moves) -> Program:
    """Lower moves: every target device pulls its columns."""
    ends = [(source.buffer.device, target.buffer.device) for source, target in operation.moves]
    touched = [(device, target) for source, target in ends for device in (source, target)]
    hub = own(min(target for _, target in ends))
    commands: list[Command] = [
        *meet("enter", ((caller(device), own(target)) for device, target in touched), hub),
        *(Copy(own(target.buffer.device), source, target) for source, target in operation.moves),
        *meet("leave", ((own(target), caller(device)) for device, target in touched), hub),
    ]
    return Program(f"{operation.name} by events", tuple(commands))


def local(operation: Moves, *, by_kernels: bool = False) -> Program:
    """Lower local moves: each device copies its own columns, within its memory or to the host, waiting for no other.

    Args:
        operation: the operation to lower.
        by_kernels: whether kernels copy, instead of copy engines; only to the host.
    """
    commands: list[Command] = []
    leave: list[Command] = []  # issued last, so that it delays no copy
    results = []
    for source, target in operation.moves:
        stream = own(source.buffer.device)
        copy = Copy(stream, source, target)
        commands += order("enter", caller(stream.device), stream)
        commands.append(Exchange(stream, (copy,)) if by_kernels else copy)
        leave += order("leave", stream, caller(stream.device))
        if target.buffer.device == HOST:
            results.append(Event("leave", stream))
    where = "by kernels of each device" if by_kernels else "on each device"
    return Program(f"{operation.name} {where}", (*commands, *leave), tuple(results))


def addition(operation: Addition) -> Program:
    """Lower an addition: every device adds its own columns."""
    commands: list[Command] = []
    for share in operation.shares:
        device = share.receiver
        target = View(Buffer(OUTPUT, device), 0, share.stop - share.start)
        commands += order("enter", caller(device), own(device))
        commands.append(Sum(own(device), (target, share.of(INPUT, device)), target))
        commands += order("leave", own(device), caller(device))
    return Program(f"{operation.name} on each device", tuple(commands))


def reduction(operation: Reduction, parts: int) -> Program:
    """Lower a reduction: each receiver pulls its share from all senders, sums it, and pulls the others' sums."""
    callers = [caller(device) for device in operation.devices]
    workers = [own(receiver) for receiver in operation.receivers]
    shares = operation.shares()
    summed = [own(share.receiver) for share in shares]
    hub = summed[0]
    commands: list[Command] = [*fence("enter", callers, hub, summed)]
    for part in range(parts):
        for share in operation.shares(part, parts):
            stream = own(share.receiver)
            senders = operation.others(share.receiver)
            commands += (Copy(stream, share.of(INPUT, g), operation.slab(share, g)) for g in senders)
            commands.append(operation.total(stream, share, partial(operation.slab, share)))
    commands += fence("sum", summed, hub, [w for w in workers if {*summed} - {w}])
    for receiver in operation.receivers:
        for share in shares:
            if share.receiver != receiver:
                commands.append(Copy(own(receiver), share.of(OUTPUT, share.receiver), share.of(OUTPUT, receiver)))
    commands += fence("leave", workers, hub, callers)
    return Program(f"{operation.name} by events", tuple(commands))


#: Range of chunk sizes in bytes for copies through host memory, unless a row is larger. Copy engines idle between
#: smaller chunks (64 MiB between two H200 took 3 % less time in chunks of 4 MiB than of 2 MiB); larger ones overlap
#: too little.
_SMALLEST_CHUNK, LARGEST_CHUNK = 2**20, 2**22

#: Slots of a sender's pinned ring if each has room for a row; otherwise two.
RING_SLOTS = 4

#: Reductions in frames are divided by columns if that saves each device this many bytes: about what its link carries
#: in the time that the sums take from one device to another.
SPARED_BYTES = 256 * 2**10
#: If an uneven reduction could save this many bytes, it is done by copies, which divide it by columns.
_COPIED_BYTES = 2 * 2**20

#: Maximum bytes of a message in frames, or that a kernel writes to host memory: kernels count them in 32 bits.
_MOST_COUNTED = 2**32 - 1


class Mode(NamedTuple):
    """How an operation is issued.

    Attributes:
        captured: whether it becomes part of a CUDA graph.
        aside: whether it runs concurrently with other work. Then large tensors are left to copy engines, as waiting
            kernels would occupy multiprocessors.
    """

    captured: bool = False
    aside: bool = False


#: The mode of a plain call.
CALLED = Mode()


@frozen
class Limits:
    """Sizes of the context's communication buffers, and the thresholds between paths.

    Attributes:
        slot_bytes: size of a queue's slot.
        stage_bytes: size of half a pinned ring, see :meth:`ring_slot`.
        exchange_bytes: size of a device's exchange buffer.
        direct: whether kernels can write to other devices' tensors; if not, large messages go by ``events``.
        frame_bytes: size of a slot for frames in host memory; 0 if there are none.
        streams: whether kernels stream messages of any length through frames; if not, messages are cut to fit.
        spared_bytes: reductions in frames are divided by columns if that saves each device more than this.
        tuning: thresholds.
        held_bytes: largest sum that a device can hold while others read its part: in registers, and in half of its
            exchange buffer.
        mirror_bytes: size of the memory that stands in for an input and an output of a device where other devices
            cannot reach these; 0 if they can. Rows are moved in as many turns as it takes.
    """

    slot_bytes: int
    stage_bytes: int
    exchange_bytes: int
    direct: bool = True
    frame_bytes: int = 0
    streams: bool = False
    spared_bytes: int = SPARED_BYTES
    tuning: Tuning = field(factory=Tuning)
    held_bytes: int = 0
    mirror_bytes: int = 0

    def slots(self, operation: Operation, transport: str) -> int:
        """Return the maximum bytes of an operation's message that goes through slots."""
        return min(self.slot_bytes, self.tuning.slots(transport, kind_of(operation)))

    def ring_slot(self, slots: int) -> int:
        """Return the bytes of a slot if a pinned ring is divided into ``slots`` slots."""
        return PAIR * self.stage_bytes // slots // ALIGNMENT * ALIGNMENT

    def frames(self, operation: Operation, rows: int, row_bytes: int) -> int:
        """Return the number of parts in which messages of this size go in frames; 0 if they cannot."""
        fits = bool(self.frame_bytes) if self.streams else row_bytes <= self.frame_bytes
        if not fits or rows * row_bytes > _MOST_COUNTED:
            return 0
        return 1 if self.streams else _parts(operation.name, rows, row_bytes, self.frame_bytes)

    def relays(self, operation: Moves, column_bytes: int) -> bool:
        """Return whether devices of ``peer`` relay a part of what one of them sends."""
        return self.direct and 0 < self.tuning.passed_on_bytes <= lower_flags.spared(operation) * column_bytes

    def one_shot(self, operation: Operation, rows: int, item_bytes: int) -> bool:
        """Return whether every device of ``peer`` adds up all of a sum, instead of a share of the columns."""
        row_bytes = operation.columns * item_bytes
        most = min(self.tuning.peer_one_shot_bytes, self.held_bytes)
        is_aligned = not row_bytes % VECTOR_BYTES  # in whole vectors, blocks read and write the same of all devices
        return self.direct and rows * row_bytes <= most and is_aligned and _is_even(operation)

    def mirrors(self, operation: Operation, item_bytes: int) -> bool:
        """Return whether kernels can write an operation's rows directly: to tensors, or to what stands in for them."""
        return not self.mirror_bytes or PAIR * (operation.reach * item_bytes + ALIGNMENT) <= self.mirror_bytes

    def writes_host_memory(self, operation: Operation, column_bytes: int) -> bool:
        """Return whether an operation is a gather that kernels, not copy engines, write to host memory."""
        is_gather = isinstance(operation, Moves) and all(target.buffer.device == HOST for _, target in operation.moves)
        return is_gather and operation.columns * column_bytes <= min(self.tuning.gathers_bytes, _MOST_COUNTED)

    def writes(self, operation: Operation, message_bytes: int, mode: Mode) -> bool:
        """Return whether kernels write a message directly that is too large for slots of ``peer``.

        If they can, copy engines are better only in graphs, where an event costs next to nothing.
        """
        copies_from = self.tuning.copies(kind_of(operation)) if mode.captured else 0
        return self.direct and not 0 < copies_from <= message_bytes


def kind_of(operation: Operation) -> str:
    """Return the class of thresholds that apply to an operation: ``fans``, ``exchanges`` or ``sums``."""
    if not isinstance(operation, Moves):
        return SUMS
    senders = {s.buffer.device for s, target in operation.moves if s.buffer.device != target.buffer.device}
    return EXCHANGES if len(senders) > 1 else FANS


@frozen
class Route:
    """The path of an operation of some size; equal routes give equal programs.

    Attributes:
        transport: ``peer``, ``host``, ``events``, or ``local`` if no devices communicate.
        small: whether every message goes through a slot; for ``local`` moves, whether kernels write to host memory.
        relayed: whether devices relay a part of what another device sends.
        one_shot: whether every device adds up all of a sum.
        framed: whether kernels send messages in frames.
        shared: whether a reduction in frames is divided by columns.
        parts: number of parts of the rows.
        slots: number of slots of the ring, if one is used.
    """

    transport: str
    small: bool = False
    relayed: bool = False
    one_shot: bool = False
    framed: bool = False
    shared: bool = False
    parts: int = 1
    slots: int = RING_SLOTS


def route(
    operation: Operation,
    transport: str,
    rows: int,
    item_bytes: int,
    limits: Limits,
    *,
    mode: Mode = CALLED,
) -> Route:
    """Choose among a transport's paths for small and large tensors.

    Args:
        operation: the operation to lower.
        transport: ``peer``, ``host`` or ``events``.
        rows: number of rows, at least 1.
        item_bytes: bytes of an element.
        limits: the context's buffer sizes and thresholds.
        mode: how the operation is issued.

    Raises:
        ExecutionError: one row exceeds the context's buffers.
    """
    if _is_local(operation):
        return Route("local", small=limits.writes_host_memory(operation, rows * item_bytes))
    columns, small = operation.columns, transport != "events"
    if isinstance(operation, Moves):
        if any(source.buffer.device == HOST for source, _ in operation.moves):
            transport, small = "host", False  # by copies
        if transport == "host":
            columns = operation.span  # one message for all receivers
    row_bytes, slots = columns * item_bytes, RING_SLOTS
    if small and (found := _through_slots(operation, transport, rows, row_bytes, limits, mode=mode)):
        return found
    by_kernels = transport == "peer" and not mode.aside and limits.mirrors(operation, item_bytes)
    if by_kernels and (found := _read_by_several(operation, rows, item_bytes, limits)):
        return found
    if transport == "peer" and not (by_kernels and limits.writes(operation, rows * row_bytes, mode)):
        transport = "events"
    if transport == "events" and isinstance(operation, Reduction):
        row_bytes = max(share.stop - share.start for share in operation.shares()) * item_bytes
        fetched = max(len(operation.others(receiver)) for receiver in operation.receivers)
        limit = limits.exchange_bytes // fetched // ALIGNMENT * ALIGNMENT
    elif transport == "host" and not isinstance(operation, Addition):  # which is local
        row_bytes = operation.span * item_bytes
        slots = RING_SLOTS if row_bytes <= limits.ring_slot(RING_SLOTS) else SLOTS
        limit = min(limits.ring_slot(slots), max(row_bytes, _chunk_bytes(rows, row_bytes)))
    else:
        return Route(transport)
    return Route(transport, parts=_parts(operation.name, rows, row_bytes, limit), slots=slots)


def _read_by_several(operation: Operation, rows: int, item_bytes: int, limits: Limits) -> Route | None:
    """Return the route on which several devices read the same of another one; None if none is suitable."""
    if isinstance(operation, Moves):
        return Route("peer", relayed=True) if limits.relays(operation, rows * item_bytes) else None
    return Route("peer", one_shot=True) if limits.one_shot(operation, rows, item_bytes) else None


def _through_slots(
    operation: Operation, transport: str, rows: int, row_bytes: int, limits: Limits, *, mode: Mode
) -> Route | None:
    """Return the route of an operation through slots, whole or in frames; None if neither is suitable."""
    if rows * row_bytes <= limits.slots(operation, transport):
        return Route(transport, small=True)
    parts = limits.frames(operation, rows, row_bytes) if transport == "host" and not mode.aside else 0
    if not parts:
        return None
    spared, is_even = _spared(operation) * rows * row_bytes, _is_even(operation)
    if spared > _COPIED_BYTES and not is_even:
        return None
    return Route(transport, framed=True, shared=spared > limits.spared_bytes and is_even, parts=parts)


def _is_local(operation: Operation) -> bool:
    """Return whether no device communicates with another; sending to the host is allowed."""
    if isinstance(operation, Moves):
        return all(target.buffer.device in {HOST, source.buffer.device} for source, target in operation.moves)
    return isinstance(operation, Addition) or len(operation.devices) == 1


def _spared(operation: Operation) -> float:
    """Return how many messages a device receives less if a reduction is divided by columns; 0 for other operations."""
    if not isinstance(operation, Reduction):
        return 0
    devices = len(operation.devices)
    return max(len(operation.others(receiver)) for receiver in operation.receivers) - 2 * (devices - 1) / devices


def _is_even(operation: Operation) -> bool:
    """Return whether the operation is a reduction in which every device has a part, gets the sum, and has a share."""
    if not isinstance(operation, Reduction):
        return False
    return {*operation.senders} == {*operation.receivers} and len(operation.shares()) == len(operation.receivers)


def _chunk_bytes(rows: int, row_bytes: int) -> int:
    """Return the bytes of a chunk of these rows for copies through host memory."""
    return min(max(-(-rows // CHUNKS) * row_bytes, _SMALLEST_CHUNK), LARGEST_CHUNK)


def _parts(what: str, rows: int, row_bytes: int, limit: int) -> int:
    """Return the number of parts to cut the rows into so that each fits: a power of two, to keep programs few.

    Raises:
        ExecutionError: a single row does not fit.
    """
    if row_bytes > limit:
        takes, left = format_apart(row_bytes, limit)
        raise ExecutionError(
            f"{what}: one row takes {takes}, but the plan left {left} for it",
            "move fewer columns at a time",
        )
    parts = 1
    while -(-rows // parts) * row_bytes > limit:
        parts *= 2
    return parts


def lower(operation: Operation, way: Route) -> Program:
    """Return the program of an operation for a route from :func:`route`."""
    if isinstance(operation, Addition):
        return addition(operation)
    return _lower_moves(operation, way) if isinstance(operation, Moves) else _lower_reduction(operation, way)


def _lower_reduction(operation: Reduction, way: Route) -> Program:
    if way.transport in {"local", "events"}:
        return reduction(operation, way.parts)
    if way.shared:
        return lower_flags.shared_reduction(operation, way.parts)
    if way.small or way.framed:
        on_host = way.transport == "host"
        return lower_flags.reduction(operation, on_host=on_host, framed=way.framed, parts=way.parts)
    if way.transport == "peer":
        lowered = lower_flags.one_shot_reduction if way.one_shot else lower_flags.direct_reduction
        return lowered(operation)
    return lower_host.reduction(operation, way.parts, way.slots)


def _lower_moves(operation: Moves, way: Route) -> Program:
    if way.transport == "local":
        return local(operation, by_kernels=way.small)
    if way.transport == "events":
        return moves(operation)
    if way.small or way.framed:
        on_host = way.transport == "host"
        return lower_flags.moves(operation, on_host=on_host, framed=way.framed, parts=way.parts)
    if way.transport == "peer":
        return lower_flags.direct_moves(operation, relayed=way.relayed)
    return lower_host.moves(operation, way.parts, way.slots)
