"""Programs: the intermediate representation of operations, as commands on streams with explicit reads and writes.

A program depends on neither row count nor dtype: every buffer is a matrix with one row per token, and a view names
columns of it. So one program serves all calls of its kind, and what is proved of it holds for all of them.

Commands are listed in the order in which the host issues them. The commands of one stream run in that order. Streams
are ordered with each other only by events (Record, Wait) and flags (Signal, Await). The host is a stream too: it
completes each of its commands before it issues the next command of any stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attrs import frozen

from tpplan.core.workspace import FRAME_SLOTS, HOST_SLOTS, PAIR

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Stands for the host where a device's index is expected.
HOST = -1

#: Slots of a queue in device memory, and minimum slots of a ring: one slot is filled while another is read.
SLOTS = PAIR

#: Kinds of streams: the caller's current one, tpplan's, and tpplan's second one, for copies from the host.
CALLER, OWN, LOAD = "caller", "own", "load"

#: Roles of buffers: the caller's tensors, and the context's memory.
INPUT, RESIDUAL, OUTPUT, EXCHANGE, STAGE, SLOT = "input", "residual", "output", "exchange", "stage", "slot"
OPERANDS = (INPUT, RESIDUAL, OUTPUT)


class Stream(NamedTuple):
    """A stream: its commands run in order.

    Attributes:
        kind: ``caller``, ``own`` or ``load``; the host's stream is ``("own", HOST)``.
        device: index into the plan's devices, or HOST.
    """

    kind: str
    device: int

    def __str__(self) -> str:
        return "host" if self.device == HOST else f"{self.kind}{self.device}"


class Queue(NamedTuple):
    """A ring buffer of messages from one device to others, guarded by flags.

    Attributes:
        place: the device whose memory holds the slots, or HOST.
        sender: the device that fills the slots.
        receivers: the devices that read the slots; a slot is reused once all of them have freed it.
        framed: whether kernels cut messages into frames, each with its own flag. Frames are pipelined, so a message may
            be longer than its slot. If false, flags are part of the data.
    """

    place: int
    sender: int
    receivers: tuple[int, ...]
    framed: bool = False

    @property
    def slots(self) -> int:
        """Number of slots; more in host memory, where the sender learns late that a slot was read."""
        if self.framed:
            return FRAME_SLOTS
        return HOST_SLOTS if self.place == HOST else SLOTS


class Buffer(NamedTuple):
    """A matrix with one row per token.

    Attributes:
        role: ``input``, ``residual`` and ``output`` are the caller's and hold all rows; ``exchange``, ``stage`` and
            ``slot`` are the context's and hold the rows of one part.
        device: the device that holds it, or HOST. A ``stage`` is in pinned host memory; ``device`` is its sender.
        piece: index of the piece of the device's exchange buffer, or of the ring's slot (``stage``).
        pieces: number of equal pieces or of slots.
        queue: the queue of a ``slot``. The slot's index is the number of earlier ``full`` signals by the sender, or
            ``free`` signals by the receiver, modulo :attr:`Queue.slots`.
    """

    role: str
    device: int
    piece: int = 0
    pieces: int = 1
    queue: Queue | None = None

    def __str__(self) -> str:
        where = "host" if self.device == HOST else str(self.device)
        if self.queue:
            return f"slot of {self.queue.sender}→{','.join(map(str, self.queue.receivers))} at {where}"
        piece = f"[{self.piece}/{self.pieces}]" if self.pieces > 1 else ""
        return f"{self.role}{piece}@{where}"


class View(NamedTuple):
    """Columns ``start`` to ``stop`` of a buffer, in part ``part`` of ``parts`` of the rows.

    Of ``R`` rows, a part has rows ``R·part // parts`` to ``R·(part + 1) // parts``. The caller's buffers hold all rows.
    The context's buffers hold the rows of the part, ``width`` columns wide and densely packed.
    """

    buffer: Buffer
    start: int
    stop: int
    part: int = 0
    parts: int = 1
    width: int = 0

    def rows(self, part: int, parts: int) -> View:
        """Return these columns of a part of the rows."""
        return self._replace(part=part, parts=parts)

    def __str__(self) -> str:
        rows = f" rows {self.part}/{self.parts}" if self.parts > 1 else ""
        return f"{self.buffer}[{self.start}:{self.stop}]{rows}"


class Event(NamedTuple):
    """The name of an event; a Wait waits for the latest Record issued before it, or for nothing if there is none.

    Attributes:
        name: what has happened.
        stream: the stream that records it; ``("own", HOST)`` if any stream may.
        number: distinguishes events with the same name.
    """

    name: str
    stream: Stream
    number: int = 0

    def __str__(self) -> str:
        return f"{self.name}({self.stream}{f', {self.number}' if self.number else ''})"


class Flag(NamedTuple):
    """A counter in memory that one device increments and others poll.

    Attributes:
        name: ``full`` (a message is in the queue's slot) or ``done`` (the target is written), raised by the sender;
            ``free`` (the slot was read) or ``ready`` (the target may be written), raised by the receiver ``device``.
        queue: the queue that the flag guards.
        device: the receiver, if each receiver has its own flag; else HOST.
    """

    name: str
    queue: Queue
    device: int = HOST

    def __str__(self) -> str:
        who = ",".join(map(str, self.queue.receivers)) if self.device == HOST else str(self.device)
        return f"{self.name}({self.queue.sender}→{who})"


@frozen
class Copy:
    """Copies a view to one of the same number of columns, within one memory or between two.

    Attributes:
        stream: the stream that runs it.
        source: the view to read.
        target: the view to write.
    """

    stream: Stream
    source: View
    target: View

    def __str__(self) -> str:
        return f"{self.stream}: {self.target} = {self.source}"


@frozen
class Sum:
    """Adds views in float32, in the given order, and rounds once; the target may be one of the sources.

    Attributes:
        stream: the stream that runs it.
        sources: the views to add, at least one.
        target: the view to write.
    """

    stream: Stream
    sources: tuple[View, ...]
    target: View

    def __str__(self) -> str:
        return f"{self.stream}: {self.target} = {' + '.join(map(str, self.sources))}"


@frozen
class Record:
    """Records ``event`` on ``stream``."""

    stream: Stream
    event: Event

    def __str__(self) -> str:
        return f"{self.stream}: record {self.event}"


@frozen
class Wait:
    """Makes ``stream`` wait for the latest record of ``event``."""

    stream: Stream
    event: Event

    def __str__(self) -> str:
        return f"{self.stream}: wait {self.event}"


@frozen
class Signal:
    """Increments a flag after all earlier commands of its stream."""

    stream: Stream
    flag: Flag

    def __str__(self) -> str:
        return f"{self.stream}: signal {self.flag}"


@frozen
class Await:
    """Makes ``stream`` poll a flag: its n-th wait for ``flag`` lasts until the flag was raised ``n - behind`` times.

    Attributes:
        stream: the stream that waits.
        flag: the flag to poll.
        behind: how far the flag may lag: 0 to receive a message, the queue's number of slots for a credit to send one.
    """

    stream: Stream
    flag: Flag
    behind: int = 0

    def __str__(self) -> str:
        return f"{self.stream}: await {self.flag}{f' behind {self.behind}' if self.behind else ''}"


Step = Copy | Sum | Signal | Await


@frozen
class Exchange:
    """A kernel on one device that runs its steps concurrently with the kernels of the other devices.

    Attributes:
        stream: the stream that runs it.
        steps: the steps in order, each on ``stream``.
    """

    stream: Stream
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join((f"{self.stream}: exchange", *(f"    {step}" for step in self.steps)))


Command = Copy | Sum | Record | Wait | Exchange


@frozen
class Program:
    """A lowered operation.

    Attributes:
        name: operation and transport, to be displayed.
        commands: the commands in order of issue.
        results: events that the host waits for before it reads an output in host memory.
    """

    name: str
    commands: tuple[Command, ...]
    results: tuple[Event, ...] = ()

    def __str__(self) -> str:
        return "\n".join((self.name, *map(str, self.commands)))


def flat(program: Program) -> Iterator[Step | Record | Wait]:
    """Yield the commands in order of issue, with each exchange replaced by its steps."""
    for command in program.commands:
        if isinstance(command, Exchange):
            yield from command.steps
        else:
            yield command


def reads(step: Step | Record | Wait) -> tuple[View, ...]:
    """Return the views that a command reads."""
    if isinstance(step, Copy):
        return (step.source,)
    return step.sources if isinstance(step, Sum) else ()


def writes(step: Step | Record | Wait) -> tuple[View, ...]:
    """Return the views that a command writes."""
    return (step.target,) if isinstance(step, Copy | Sum) else ()
