"""A happens-before checker, which proves programs free of data races and deadlocks under any scheduling of streams.

For programs that one context runs one after the other, it checks:

- Any two accesses to the same bytes, one of which writes, are ordered: by a stream, an event, a flag or the host.
- No command waits for ever, or for a command that is not issued by the end of the program.
- Every program raises each flag as often as it is awaited, and every message is freed, so that senders and receivers
  agree on the index of the next slot.
- A program reads the context's memory and its outputs only where it has written them before, and its inputs only where
  it has not.
- No output has a gap.

It assumes the worst caller. Each program is called from new streams, which write its operands just before it, and read
and overwrite them just after it. The host overwrites its inputs as soon as the program is issued, and reads and
overwrites its outputs once the program's results are complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from attrs import Factory, define, frozen

from tpplan.errors import InternalError
from tpplan.exec.programs.fence import HOST_STREAM, caller, own
from tpplan.exec.programs.program import (
    CALLER,
    HOST,
    INPUT,
    OPERANDS,
    OUTPUT,
    RESIDUAL,
    Await,
    Copy,
    Event,
    Flag,
    Program,
    Record,
    Signal,
    Stream,
    Sum,
    View,
    Wait,
    flat,
    reads,
    writes,
)
from tpplan.exec.programs.region import Memory, Region, gap, regions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpplan.exec.programs.program import Buffer, Step


class Access(NamedTuple):
    """What a command or the caller accesses.

    Attributes:
        stream: the stream that does it; None for what the caller does on the host with a program's results.
        what: the command, or a description of what the caller does.
        reads: regions that it reads.
        writes: regions that it writes.
    """

    stream: Stream | None
    what: Step | Record | Wait | str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


@frozen(eq=False)
class Call:
    """A call of a program, with operands that no other call uses.

    What it accesses is found once, however many timelines it is part of.

    Attributes:
        program: the program to run.
        in_place: whether each device's output may be its input or its residual.
    """

    program: Program
    in_place: bool = False

    @cached_property
    def before(self) -> tuple[Access, ...]:
        """The caller's accesses before the program, each from a new stream of its device."""
        return tuple(
            access
            for device in self._devices
            for access in self._caller("writes", device, OPERANDS, HOST_STREAM if device == HOST else caller(device))
        )

    @cached_property
    def steps(self) -> tuple[Access, ...]:
        """The accesses of the commands, in order of issue; views of slots are in the first one."""
        return tuple(
            Access(step.stream, step, self._regions(reads(step)), self._regions(writes(step)))
            for step in flat(self.program)
        )

    @cached_property
    def after(self) -> tuple[Access, ...]:
        """The caller's accesses after the program."""
        does = "reads and overwrites"
        devices = [device for device in self._devices if device != HOST]
        return (
            *(access for device in devices for access in self._caller(does, device, OPERANDS, caller(device))),
            *self._caller("overwrites", HOST, (INPUT, RESIDUAL), HOST_STREAM),
            *self._caller(does, HOST, (OUTPUT,), None),
        )

    @cached_property
    def _views(self) -> list[View]:
        """The views of operands."""
        steps = flat(self.program)
        return [v for step in steps for v in (*reads(step), *writes(step)) if v.buffer.role in OPERANDS]

    @cached_property
    def _operands(self) -> dict[Buffer, int]:
        """The columns of each operand."""
        operands: dict[Buffer, int] = {}
        for view in self._views:
            operands[view.buffer] = max(view.stop, operands.get(view.buffer, 0))
        return operands

    @cached_property
    def _parts(self) -> int:
        """A number of parts of the operands' rows such that every view covers whole parts."""
        return lcm(*{view.parts for view in self._views})

    @property
    def _devices(self) -> list[int]:
        return sorted({buffer.device for buffer in self._operands})

    def _caller(self, does: str, device: int, roles: tuple[str, ...], stream: Stream | None) -> Iterator[Access]:
        """Yield an access of the caller to all operands of a device in these roles, if there are any."""
        operands = sorted(b for b in self._operands if b.device == device and b.role in roles)
        if operands:
            wholes = self._regions(View(b, 0, self._operands[b]) for b in operands)
            yield Access(stream, f"the caller {does} {', '.join(map(str, operands))}", (), wholes)

    def _regions(self, views: Iterable[View]) -> tuple[Region, ...]:
        """Return the regions of views, including those of possible aliases."""
        found: list[Region] = []
        for view in views:
            found += regions(view, self._parts)
            if self.in_place and view.buffer.role == OUTPUT:
                aliases = (view.buffer._replace(role=role) for role in (INPUT, RESIDUAL))
                may_be = (view._replace(buffer=alias) for alias in aliases if alias in self._operands)
                found += (region._replace(view=view) for alias in may_be for region in regions(alias, self._parts))
        return tuple(found)


#: The key of the host's stream, which all programs share.
_HOST = (HOST_STREAM, 0)


class Node(NamedTuple):
    """A node of the dependency graph.

    Attributes:
        program: index of its call in the sequence.
        what: a command, or a description of what the caller does.
        reads: regions that it reads.
        writes: regions that it writes.
        after: indices of nodes that are complete before this one starts; indirect dependencies may be left out.
    """

    program: int
    what: Step | Record | Wait | str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    after: list[int]

    def __str__(self) -> str:
        return f'"{self.what}" of program {self.program + 1}'


class Stuck(NamedTuple):
    """A node that waits for ever.

    Attributes:
        node: an Await.
        signals: number of signals that it waits for.
        raised: number of signals issued by the end of its program.
    """

    node: Node
    signals: int
    raised: int


@define
class Timeline:
    """The dependency graph of a sequence of programs on one context.

    Attributes:
        nodes: the nodes in order of issue.
        stuck: the nodes that wait for ever.
    """

    nodes: list[Node] = Factory(list)
    stuck: list[Stuck] = Factory(list)
    _program: int = -1
    _last: dict[tuple[Stream | None, int], int] = Factory(dict)
    _recorded: dict[Event, int] = Factory(dict)
    _raised: defaultdict[Flag, list[int]] = Factory(lambda: defaultdict(list))
    _awaited: Counter[tuple[Flag, int]] = Factory(Counter)
    _polling: list[tuple[int, Flag, int]] = Factory(list)

    def run(self, call: Call) -> None:
        """Add a program, with its caller's accesses before and after it."""
        self._program += 1
        for access in call.before:
            self._add(access, [])
        for access in call.steps:
            self._issue(access)
        results = [self._recorded[event] for event in call.program.results if event in self._recorded]
        for access in call.after:
            self._add(access, [] if access.stream else results)
        self._raise()

    def _issue(self, access: Access) -> None:
        """Add a command."""
        step, index = access.what, len(self.nodes)
        after: list[int] = []
        if isinstance(step, Record):
            self._recorded[step.event] = index
        elif isinstance(step, Wait):
            if step.event in self._recorded:
                after.append(self._recorded[step.event])
        elif isinstance(step, Signal):
            self._raised[step.flag].append(index)
        elif isinstance(step, Await):
            device = step.stream.device
            self._awaited[step.flag, device] += 1
            self._polling.append((index, step.flag, self._awaited[step.flag, device] - step.behind))
        elif isinstance(step, Copy | Sum):
            access = self._in_slots(access, step.stream.device)
        self._add(access, after)

    def _add(self, access: Access, after: list[int]) -> None:
        """Add a node after its stream's last node and the host's; without a stream, no node follows it."""
        stream, what, reads, writes = access
        key = (stream, self._program if stream and stream.kind == CALLER else 0)
        if _HOST in self._last:
            after.append(self._last[_HOST])
        if key != _HOST and key in self._last:
            after.append(self._last[key])
        if stream:
            self._last[key] = len(self.nodes)
        self.nodes.append(Node(self._program, what, reads, writes, after))

    def _raise(self) -> None:
        """Add the dependency of every Await of the program on its Signal, which may have been issued later."""
        for index, flag, wanted in self._polling:
            raised = self._raised[flag]
            if wanted > len(raised):
                self.stuck.append(Stuck(self.nodes[index], wanted, len(raised)))
            elif wanted > 0:
                self.nodes[index].after.append(raised[wanted - 1])
        self._polling.clear()

    def _in_slots(self, access: Access, device: int) -> Access:
        """Return an access with its regions of queues in the slot of the message that a device handles next."""
        if not any(region.view.buffer.queue for region in (*access.reads, *access.writes)):
            return access
        reads, writes = (
            tuple(region._replace(memory=self._memory(region, device)) for region in found) for found in access[2:]
        )
        return Access(access.stream, access.what, reads, writes)

    def _memory(self, region: Region, device: int) -> Memory:
        queue = region.view.buffer.queue
        if not queue:
            return region.memory
        passed = Flag("full", queue) if device == queue.sender else Flag("free", queue, device)
        return queue, len(self._raised[passed]) % queue.slots


#: Kinds of findings.
RACE, DEADLOCK, FLAGS, UNWRITTEN, OVERWRITTEN, GAP = "race", "deadlock", "flags", "unwritten", "overwritten", "gap"

_SHOWN = 5

#: Maximum number of programs that are known to be safe: hashing one takes about 6 % of the time to check it.
_KEPT = 1024


@frozen
class Finding:
    """A defect of programs.

    Attributes:
        kind: ``race``, ``deadlock``, ``flags``, ``unwritten``, ``overwritten`` or ``gap``.
        message: a sentence that names the commands, the columns and, counted from 1, the programs of the sequence.
    """

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@lru_cache(_KEPT)
def verify(program: Program, *, in_place: bool = False) -> Program:
    """Check that a program may run any number of times in a row, and return it or an equal one checked before.

    Args:
        program: the program to check.
        in_place: whether each device's output may be its input or its residual.

    Raises:
        InternalError: the program is not safe.
    """
    # Every run leaves the same state, so the second run stands for all later ones. But a slot may hold a message of an
    # earlier run, in the worst case as many runs ago as the queue has slots.
    views = (view for step in flat(program) for view in writes(step))
    slots = max((view.buffer.queue.slots for view in views if view.buffer.queue), default=1)
    found = check([Call(program, in_place)] * (1 + slots))
    if found:
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        raise InternalError("\n".join((f"{program.name} is not safe:", *map(str, found[:_SHOWN]), *more)))
    return program


def check(calls: Sequence[Call]) -> tuple[Finding, ...]:
    """Return all findings on programs that one context runs in this order; empty if they are safe.

    A finding that recurs in a later call of the same program is reported once.
    """
    timeline = Timeline()
    for call in calls:
        timeline.run(call)
    programs = {id(call.program): call.program for call in calls}.values()  # hashing a program is slow
    found = [finding for program in programs for finding in (*_flags(program), *_gaps(program))]
    order = _order(timeline.nodes)
    found += _deadlocks(timeline, order)
    found += _Watch(timeline.nodes).watch(order)
    return tuple(found)


def _flags(program: Program) -> Iterator[Finding]:
    """Find flags that are raised more or less often than awaited, and messages that not every receiver frees."""
    raised: defaultdict[Flag, list[Stream]] = defaultdict(list)
    awaited: defaultdict[Flag, list[Stream]] = defaultdict(list)
    for step in flat(program):
        if isinstance(step, Signal | Await):
            (raised if isinstance(step, Signal) else awaited)[step.flag].append(step.stream)
    for flag in sorted({*raised, *awaited}):
        queue, count = flag.queue, len(raised[flag])
        by, to = (queue.sender, queue.receivers) if flag.device == HOST else (flag.device, (queue.sender,))
        others = {*raised[flag]} - {own(by)} | {*awaited[flag]} - {own(device) for device in to}
        if others:
            yield Finding(FLAGS, f"{flag} is not for {min(others)} to use")
        for device in to:
            waits = awaited[flag].count(own(device))
            if waits != count:
                yield Finding(FLAGS, f"{flag} is raised {count} times and awaited {waits} times by {own(device)}")
    for queue, receiver in sorted({(flag.queue, r) for flag in raised for r in flag.queue.receivers}):
        full, free = Flag("full", queue), Flag("free", queue, receiver)
        if len(raised[full]) != len(raised[free]):
            yield Finding(FLAGS, f"{full} is raised {len(raised[full])} times, but {free} {len(raised[free])} times")


def _gaps(program: Program) -> Iterator[Finding]:
    """Find columns of an output that are not written although later columns, or other rows of them, are."""
    written: defaultdict[Buffer, list[View]] = defaultdict(list)
    for step in flat(program):
        for view in writes(step):
            if view.buffer.role == OUTPUT:
                written[view.buffer].append(view)
    for buffer, views in written.items():
        stop, parts = max(view.stop for view in views), lcm(*{view.parts for view in views})
        spans: defaultdict[Memory, list[tuple[int, int]]] = defaultdict(list)
        for region in (r for view in views for r in regions(view, parts)):
            spans[region.memory].append((region.start, region.stop))
        for whole in regions(View(buffer, 0, stop), parts):
            column = gap(spans[whole.memory], 0, stop)
            if column is not None:
                yield Finding(GAP, f"nothing in {program.name} writes all rows of {View(buffer, column, stop)}")
                break


def _order(nodes: Sequence[Node]) -> list[int]:
    """Return the nodes in topological order, without those that never run."""
    left = [len(node.after) for node in nodes]
    followers: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for earlier in node.after:
            followers[earlier].append(index)
    order = [index for index, count in enumerate(left) if not count]
    for index in order:  # grows in the loop
        for follower in followers[index]:
            left[follower] -= 1
            if not left[follower]:
                order.append(follower)
    return order


def _deadlocks(timeline: Timeline, order: Sequence[int]) -> Iterator[Finding]:
    """Find nodes that wait for ever."""
    for node, signals, raised in timeline.stuck:
        yield Finding(DEADLOCK, f"{node} waits for {signals} signals, of which {raised} are issued with it or before")
    blocked = {*range(len(timeline.nodes))}.difference(order)
    if blocked:
        path = [min(blocked)]
        while path[-1] not in path[:-1]:
            path.append(next(index for index in timeline.nodes[path[-1]].after if index in blocked))
        cycle = path[path.index(path[-1]) :]
        yield Finding(DEADLOCK, ", which waits for ".join(str(timeline.nodes[index]) for index in cycle))


_Accesses = list[tuple[int, Region]]


@define
class _Watch:
    """Checks all memory accesses, in an order in which they may happen.

    Attributes:
        nodes: the nodes of a timeline.
        findings: findings so far, by the commands.
        past: for each node, a bit set of the nodes that are complete when it ends.
        read: for each memory, the reads and their nodes; an operand's memory is told apart by its program. Reads that a
            later write covers are dropped: the write is ordered after them, and later accesses are compared with it.
        written: the same for writes.
    """

    nodes: Sequence[Node]
    findings: dict[tuple[object, ...], Finding] = Factory(dict)
    past: list[int] = Factory(list)
    read: dict[Memory, _Accesses] = Factory(lambda: defaultdict(list))
    written: dict[Memory, _Accesses] = Factory(lambda: defaultdict(list))

    def watch(self, order: Iterable[int]) -> Iterable[Finding]:
        """Return races, reads of unwritten data, and reads of overwritten data."""
        self.past = [0] * len(self.nodes)
        for index in order:
            node, past = self.nodes[index], 1 << index
            for earlier in node.after:
                past |= self.past[earlier]
            self.past[index] = past
            if node.reads or node.writes:
                self._access(index, node)
        return self.findings.values()

    def _access(self, index: int, node: Node) -> None:
        """Check a node's accesses, and keep them."""
        read = [(self._memory(node, region), region) for region in node.reads]
        for memory, region in read:
            written = self.written[memory]
            self._compare(index, region, written)
            self._check_content(index, region, written)
        for region in node.writes:
            memory = self._memory(node, region)
            for kept in (self.written, self.read):
                if kept[memory]:
                    self._compare(index, region, kept[memory])
                    kept[memory] = [
                        (i, r)
                        for i, r in kept[memory]
                        if not region.covers(r, alike=self.nodes[i].program == node.program)
                    ]
            self.written[memory].append((index, region))
        for memory, region in read:
            self.read[memory].append((index, region))

    def _memory(self, node: Node, region: Region) -> Memory:
        return (*region.memory, node.program) if region.view.buffer.role in OPERANDS else region.memory

    def _compare(self, index: int, region: Region, accesses: _Accesses) -> None:
        """Find accesses to the same bytes that are not ordered before this one."""
        past, program = self.past[index], self.nodes[index].program
        for earlier, other in accesses:
            if not past >> earlier & 1 and region.overlaps(other, alike=program == self.nodes[earlier].program):
                self._tell(RACE, f"{region.view} in {{}} and {other.view} in {{}} are in no order", index, earlier)

    def _check_content(self, index: int, region: Region, accesses: _Accesses) -> None:
        """Find reads of data not yet written by the program, or of inputs it has overwritten, unless they are races."""
        node, view = self.nodes[index], region.view
        for target in node.writes:
            if target.memory == region.memory and target.overlaps(region, alike=True) and target[2:] != region[2:]:
                self._tell(OVERWRITTEN, f"{{}} reads {view} while it writes {target.view}", index, index)
        written = [
            (i, r)
            for i, r in accesses
            if self.nodes[i].program == node.program and not isinstance(self.nodes[i].what, str)
        ]
        if view.buffer.role in {INPUT, RESIDUAL}:
            for earlier, other in written:
                if region.overlaps(other, alike=True):
                    self._tell(OVERWRITTEN, f"{{}} reads {view} after {{}} wrote {other.view}", index, earlier)
        elif not (isinstance(node.what, Sum) and view == node.what.target):
            spans = ((r.start, r.stop) for _, r in written if r[2:5] == region[2:5])  # same place and rows
            column = gap(spans, region.start, region.stop)
            if column is not None:
                self._tell(UNWRITTEN, f"{{}} reads {view} before column {column} is written", index, index)

    def _tell(self, kind: str, sentence: str, index: int, other: int) -> None:
        """Add a finding on two nodes, once for all runs of the same commands."""
        first, second = self.nodes[index], self.nodes[other]
        self.findings.setdefault(
            (kind, sentence, first.what, second.what), Finding(kind, sentence.format(first, second))
        )
