"""Programs: what an operation does, as commands on streams that say which bytes they read and write.

A program knows neither rows nor dtype: every buffer is a matrix with one row per token, and a view names columns of it.
So one program serves every pass of its kind, and what is proved of it holds for all of them.

Its commands stand in the order in which the host issues them. Those of one stream run in that order; between streams
nothing is ordered but by events (Record, Wait) and flags (Signal, Await). The host is a stream too: it runs each of its
commands before it issues the next one of any stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attrs import frozen

from tpplan.workspace import FRAME_SLOTS, HOST_SLOTS, PAIR

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Stands for the host where a device's index is expected.
HOST = -1

#: Messages that a queue on a device holds, and the fewest slots of a ring: one is filled while another is read.
SLOTS = PAIR

#: Kinds of streams: the caller's current one, tpplan's, and tpplan's second one, for copies from the host.
CALLER, OWN, LOAD = "caller", "own", "load"

#: Roles of buffers: the caller's tensors, and the context's memory.
INPUT, RESIDUAL, OUTPUT, EXCHANGE, STAGE, SLOT = "input", "residual", "output", "exchange", "stage", "slot"
OPERANDS = (INPUT, RESIDUAL, OUTPUT)


class Stream(NamedTuple):
    """Where commands run in order.

    Attributes:
        kind: ``caller``, ``own`` or ``load``; the host's stream is ``("own", HOST)``.
        device: index into the plan's devices, or HOST.
    """

    kind: str
    device: int

    def __str__(self) -> str:
        return "host" if self.device == HOST else f"{self.kind}{self.device}"


class Queue(NamedTuple):
    """A ring of messages from one device to others, guarded by flags.

    Attributes:
        place: the device in whose memory the slots are, or HOST.
        sender: fills them.
        receivers: read them; a slot is filled again when all of them have freed it.
        framed: whether kernels cut messages into frames with flags of their own, which pass through while the rest is
            on its way, so that a message may be longer than its slot; if not, flags travel inside the data.
    """

    place: int
    sender: int
    receivers: tuple[int, ...]
    framed: bool = False

    @property
    def slots(self) -> int:
        """How many messages it holds: more in host memory, where it takes long to see that one was read."""
        if self.framed:
            return FRAME_SLOTS
        return HOST_SLOTS if self.place == HOST else SLOTS


class Buffer(NamedTuple):
    """A matrix of one row per token.

    Attributes:
        role: ``input``, ``residual`` and ``output`` are the caller's and hold all rows; ``exchange``, ``stage`` and
            ``slot`` are the context's and hold the rows of one part.
        device: where it is, or HOST. The ring of a ``stage`` is pinned host memory; ``device`` is its sender.
        piece: which of ``pieces`` equal pieces of the device's exchange buffer, or slot of the ring (stage).
        pieces: how many.
        queue: of a slot. Which of the queue's slots: as many as its sender has signalled ``full``, or its receiver
            ``free``, before, modulo :attr:`Queue.slots`.
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
    """Columns ``start`` to ``stop`` of part ``part`` of ``parts`` of a buffer's rows.

    Of ``R`` rows a part has those from ``R·part // parts`` to ``R·(part + 1) // parts``. The caller's buffers hold all
    rows; the context's hold the rows of the part, ``width`` columns wide and densely packed.
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
    """A name for a point in a stream; a Wait is for the latest Record that was issued before it, if there is one.

    Attributes:
        name: what has happened.
        stream: of which stream; ``("own", HOST)`` where any stream may record it.
        number: tells apart the events of one name.
    """

    name: str
    stream: Stream
    number: int = 0

    def __str__(self) -> str:
        return f"{self.name}({self.stream}{f', {self.number}' if self.number else ''})"


class Flag(NamedTuple):
    """A counter in memory that one device raises and others poll.

    Attributes:
        name: ``full`` (a message is in the queue's slot) or ``done`` (written where it belongs), raised by the sender;
            ``free`` (the slot was read) or ``ready`` (the target may be written), raised by the receiver ``device``.
        queue: whose.
        device: the receiver, where each has its own flag; else HOST.
    """

    name: str
    queue: Queue
    device: int = HOST

    def __str__(self) -> str:
        who = ",".join(map(str, self.queue.receivers)) if self.device == HOST else str(self.device)
        return f"{self.name}({self.queue.sender}→{who})"


@frozen
class Copy:
    """Copies as many columns as both views have; within one device or between memories.

    Attributes:
        stream: that runs it.
        source: read.
        target: written.
    """

    stream: Stream
    source: View
    target: View

    def __str__(self) -> str:
        return f"{self.stream}: {self.target} = {self.source}"


@frozen
class Sum:
    """Adds in float32, in the given order, and rounds once; the target may be one of the sources.

    Attributes:
        stream: that runs it.
        sources: at least one.
        target: written.
    """

    stream: Stream
    sources: tuple[View, ...]
    target: View

    def __str__(self) -> str:
        return f"{self.stream}: {self.target} = {' + '.join(map(str, self.sources))}"


@frozen
class Record:
    """Marks the point that ``stream`` has reached."""

    stream: Stream
    event: Event

    def __str__(self) -> str:
        return f"{self.stream}: record {self.event}"


@frozen
class Wait:
    """Holds ``stream`` until the latest recorded point of ``event`` is passed."""

    stream: Stream
    event: Event

    def __str__(self) -> str:
        return f"{self.stream}: wait {self.event}"


@frozen
class Signal:
    """Raises a flag by one, after everything before it in its stream."""

    stream: Stream
    flag: Flag

    def __str__(self) -> str:
        return f"{self.stream}: signal {self.flag}"


@frozen
class Await:
    """Holds ``stream``: its n-th wait for ``flag`` lasts until the flag was raised ``n - behind`` times.

    Attributes:
        stream: that polls.
        flag: polled.
        behind: how many times the flag may be behind: 0 for a message, the queue's slots for the credit to send one.
    """

    stream: Stream
    flag: Flag
    behind: int = 0

    def __str__(self) -> str:
        return f"{self.stream}: await {self.flag}{f' behind {self.behind}' if self.behind else ''}"


Step = Copy | Sum | Signal | Await


@frozen
class Exchange:
    """One kernel per device that goes through its steps while those of other devices do the same.

    Attributes:
        stream: that runs it.
        steps: in order; each on ``stream``.
    """

    stream: Stream
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join((f"{self.stream}: exchange", *(f"    {step}" for step in self.steps)))


Command = Copy | Sum | Record | Wait | Exchange


@frozen
class Program:
    """An operation, lowered.

    Attributes:
        name: of the operation and its transport, for people.
        commands: in the order of issue.
        results: events that the host waits for before it reads an output in host memory.
    """

    name: str
    commands: tuple[Command, ...]
    results: tuple[Event, ...] = ()

    def __str__(self) -> str:
        return "\n".join((self.name, *map(str, self.commands)))


def flat(program: Program) -> Iterator[Step | Record | Wait]:
    """Yield the commands in order of issue, with the steps of exchanges in place of them."""
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
