"""Lowering: an operation, a transport and a class of sizes make a program.

- ``events``: copies from device to device between fences of events. Needs nothing but copies that arrive.
- ``peer``: one kernel per device, which writes into the others' memory. What is small goes through slots; what is not
  goes straight where it belongs, and sums are shared out by columns; who sends little passes on a part of what others
  send to several. Large moves may be left to copy engines.
- ``host``: through pinned host memory, by kernels: what is small through slots, what is not in frames; sums that would
  bring each device too much are shared out by columns. Where kernels may not wait, in parts by copies.

What is small, and what copy engines get, is told by the room in a slot and by the thresholds of a
:class:`~tpplan.exec.links.tuning.Tuning`.

What comes from the host, or stays on its device, is the same for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from tpplan.errors import ExecutionError
from tpplan.exec.links.tuning import EXCHANGES, FANS, SUMS, Tuning
from tpplan.exec.programs import lower_events, lower_flags, lower_host, relays
from tpplan.exec.programs.operation import Addition, Moves, Reduction
from tpplan.exec.programs.program import HOST, SLOTS
from tpplan.sizes import format_bytes
from tpplan.workspace import ALIGNMENT, CHUNKS, PAIR

if TYPE_CHECKING:
    from tpplan.exec.programs.operation import Operation
    from tpplan.exec.programs.program import Program

#: Bytes that go through host memory at once, if a row has not more: a copy engine stands still between smaller ones
#: (of 64 MiB between two H200, 4 MiB at a time took 3 % less time than 2), and of larger ones too little is read while
#: others are filled.
_SMALLEST_CHUNK, LARGEST_CHUNK = 2**20, 2**22

#: Slots of a sender's pinned ring, if each has room for a row; else there are two.
RING_SLOTS = 4

#: If sums that are shared out spare each device so many bytes, they are: about what its link carries in the time that
#: the totals take from one device to another.
SPARED_BYTES = 256 * 2**10
#: If so many could be spared of a sum in which not all devices take part alike, it goes by copies, which share it out.
_COPIED_BYTES = 2 * 2**20

#: Bytes of a message that goes in frames, or that a kernel writes into the host's memory: it counts them in 32 bits.
_MOST_COUNTED = 2**32 - 1

TRANSPORTS = ("peer", "host", "events")


@frozen
class Limits:
    """Room for messages in the context's memory, and which of them go which way.

    Attributes:
        slot_bytes: of a slot of a queue.
        frame_bytes: of a slot of frames in host memory; 0 where there are none.
        streams: whether kernels send a message of any length through these; if not, it is cut into parts that fit.
        spared_bytes: sums in frames are shared out if that spares each device more.
        stage_bytes: of half a pinned ring, see :meth:`ring_slot`.
        exchange_bytes: of a device's exchange buffer.
        straight: whether kernels can write straight into other devices' tensors; if not, large ones go by ``events``.
        tuning: thresholds.
    """

    slot_bytes: int
    stage_bytes: int
    exchange_bytes: int
    straight: bool = True
    frame_bytes: int = 0
    streams: bool = False
    spared_bytes: int = SPARED_BYTES
    tuning: Tuning = field(factory=Tuning)

    def slots(self, operation: Operation, transport: str) -> int:
        """Return the largest message of an operation that goes through slots."""
        return min(self.slot_bytes, self.tuning.slots(transport, kind_of(operation)))

    def ring_slot(self, slots: int) -> int:
        """Return the bytes of each of so many slots of a pinned ring."""
        return PAIR * self.stage_bytes // slots // ALIGNMENT * ALIGNMENT

    def frames(self, operation: Operation, rows: int, row_bytes: int) -> int:
        """Return in how many parts messages of so many rows go in frames; 0 if they do not."""
        fits = bool(self.frame_bytes) if self.streams else row_bytes <= self.frame_bytes
        if not fits or rows * row_bytes > _MOST_COUNTED:
            return 0
        return 1 if self.streams else _parts(operation.name, rows, row_bytes, self.frame_bytes)

    def passes_on(self, operation: Moves, column_bytes: int) -> bool:
        """Tell whether devices of ``peer`` pass on a part of what one of them sends."""
        return self.straight and 0 < self.tuning.passed_on_bytes <= relays.spared(operation) * column_bytes

    def lands(self, operation: Operation, column_bytes: int) -> bool:
        """Tell whether every device's kernel writes what an operation brings to the host."""
        is_gather = isinstance(operation, Moves) and all(target.buffer.device == HOST for _, target in operation.moves)
        return is_gather and operation.columns * column_bytes <= min(self.tuning.gathers_bytes, _MOST_COUNTED)

    def copies(self, operation: Operation, message_bytes: int, *, captured: bool, aside: bool) -> bool:
        """Tell whether a message that is too large for slots of ``peer`` goes by ``events``.

        Where kernels can write straight, only beside other work, and in graphs: there an event costs next to nothing.
        """
        return not self.straight or aside or (captured and 0 < self.tuning.copies(kind_of(operation)) <= message_bytes)


def kind_of(operation: Operation) -> str:
    """Return which thresholds are for an operation: ``fans``, ``exchanges`` or ``sums``."""
    if not isinstance(operation, Moves):
        return SUMS
    senders = {s.buffer.device for s, target in operation.moves if s.buffer.device != target.buffer.device}
    return EXCHANGES if len(senders) > 1 else FANS


@frozen
class Route:
    """How an operation of some size goes; equal routes have equal programs.

    Attributes:
        transport: ``peer``, ``host``, ``events``, or ``local`` where no device talks to another.
        small: whether every message goes through a slot; of ``local`` moves, whether kernels write what the host gets.
        passed_on: whether devices pass on a part of what another one sends.
        framed: whether kernels send it in frames.
        shared: whether sums in frames are shared out.
        parts: into how many parts the rows are cut.
        slots: of a ring that they go through.
    """

    transport: str
    small: bool = False
    passed_on: bool = False
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
    captured: bool = False,
    aside: bool = False,
) -> Route:
    """Choose between what a transport has for small and for large tensors.

    Args:
        operation: to be lowered.
        transport: ``peer``, ``host`` or ``events``.
        rows: at least 1.
        item_bytes: of an element.
        limits: of the context.
        captured: whether it will be part of a graph.
        aside: whether it goes beside other work: what is large is left to copy engines then, for the threads of kernels
            that wait would keep those of others out of their multiprocessors.

    Raises:
        ExecutionError: one row is more than the context has room for.
    """
    if _is_local(operation):
        return Route("local", small=limits.lands(operation, rows * item_bytes))
    columns, small = operation.columns, transport != "events"
    if isinstance(operation, Moves):
        if any(source.buffer.device == HOST for source, _ in operation.moves):
            transport, small = "host", False  # by copies
        if transport == "host":
            columns = operation.span  # one message for all
    row_bytes, slots = columns * item_bytes, RING_SLOTS
    if small and (found := _through_slots(operation, transport, rows, row_bytes, limits, aside=aside)):
        return found
    if (
        transport == "peer"
        and not aside
        and isinstance(operation, Moves)
        and limits.passes_on(operation, rows * item_bytes)
    ):
        return Route(transport, passed_on=True)
    if transport == "peer" and limits.copies(operation, rows * row_bytes, captured=captured, aside=aside):
        transport = "events"
    if transport == "events" and isinstance(operation, Reduction):
        row_bytes = max(share.stop - share.start for share in operation.shares()) * item_bytes
        fetched = max(len(operation.others(taker)) for taker in operation.takers)
        limit = limits.exchange_bytes // fetched // ALIGNMENT * ALIGNMENT
    elif transport == "host" and not isinstance(operation, Addition):  # which is local
        row_bytes = operation.span * item_bytes
        slots = RING_SLOTS if row_bytes <= limits.ring_slot(RING_SLOTS) else SLOTS
        limit = min(limits.ring_slot(slots), max(row_bytes, _chunk_bytes(rows, row_bytes)))
    else:
        return Route(transport)
    return Route(transport, parts=_parts(operation.name, rows, row_bytes, limit), slots=slots)


def _through_slots(
    operation: Operation, transport: str, rows: int, row_bytes: int, limits: Limits, *, aside: bool
) -> Route | None:
    """Return the route of an operation that kernels do through slots, whole or in frames; None if they do not."""
    if rows * row_bytes <= limits.slots(operation, transport):
        return Route(transport, small=True)
    parts = limits.frames(operation, rows, row_bytes) if transport == "host" and not aside else 0
    if not parts:
        return None
    spared, is_even = _spared(operation) * rows * row_bytes, _is_even(operation)
    if spared > _COPIED_BYTES and not is_even:
        return None
    return Route(transport, framed=True, shared=spared > limits.spared_bytes and is_even, parts=parts)


def _is_local(operation: Operation) -> bool:
    """Tell whether every device keeps to itself, or talks to the host alone."""
    if isinstance(operation, Moves):
        return all(target.buffer.device in {HOST, source.buffer.device} for source, target in operation.moves)
    return isinstance(operation, Addition) or len(operation.devices) == 1


def _spared(operation: Operation) -> float:
    """Return how many messages fewer come to a device if the columns of a sum are shared out; 0 if it is none."""
    if not isinstance(operation, Reduction):
        return 0
    devices = len(operation.devices)
    return max(len(operation.others(taker)) for taker in operation.takers) - 2 * (devices - 1) / devices


def _is_even(operation: Operation) -> bool:
    """Tell whether every device has a part, and gets the sum, and could add up a share of it."""
    if not isinstance(operation, Reduction):
        return False
    return {*operation.givers} == {*operation.takers} and len(operation.shares()) == len(operation.takers)


def _chunk_bytes(rows: int, row_bytes: int) -> int:
    """Return how much of so many rows to move through host memory at once, in whole rows."""
    return min(max(-(-rows // CHUNKS) * row_bytes, _SMALLEST_CHUNK), LARGEST_CHUNK)


def _parts(what: str, rows: int, row_bytes: int, limit: int) -> int:
    """Return into how many parts to cut the rows so that each fits: a power of two, so that programs stay few.

    Raises:
        ExecutionError: a single row does not fit.
    """
    if row_bytes > limit:
        raise ExecutionError(
            f"{what}: one row takes {format_bytes(row_bytes)}, but the plan left {format_bytes(limit)} for it",
            "move fewer columns at a time",
        )
    parts = 1
    while -(-rows // parts) * row_bytes > limit:
        parts *= 2
    return parts


def lower(operation: Operation, way: Route) -> Program:
    """Return the program of an operation for a route that :func:`route` gave for it."""
    if isinstance(operation, Addition):
        return lower_events.addition(operation)
    return _lower_moves(operation, way) if isinstance(operation, Moves) else _lower_reduction(operation, way)


def _lower_reduction(operation: Reduction, way: Route) -> Program:
    if way.transport in {"local", "events"}:
        return lower_events.reduction(operation, way.parts)
    if way.shared:
        return lower_flags.shared_reduction(operation, way.parts)
    if way.small or way.framed:
        on_host = way.transport == "host"
        return lower_flags.reduction(operation, on_host=on_host, framed=way.framed, parts=way.parts)
    if way.transport == "peer":
        return lower_flags.direct_reduction(operation)
    return lower_host.reduction(operation, way.parts, way.slots)


def _lower_moves(operation: Moves, way: Route) -> Program:
    if way.transport == "local":
        return lower_events.landing(operation) if way.small else lower_events.local(operation)
    if way.transport == "events":
        return lower_events.moves(operation)
    if way.small or way.framed:
        on_host = way.transport == "host"
        return lower_flags.moves(operation, on_host=on_host, framed=way.framed, parts=way.parts)
    if way.transport == "peer":
        return lower_flags.direct_moves(operation, passed_on=way.passed_on)
    return lower_host.moves(operation, way.parts, way.slots)
