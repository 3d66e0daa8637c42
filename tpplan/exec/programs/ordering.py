"""A happens-before checker, which proves programs free of data races and deadlocks under any scheduling of streams.

For programs that one context runs one after the other, it checks:

- Any two accesses to the same bytes, one of which writes, are ordered: by a stream, an event, a flag or the host.
- No command waits for ever, or for a command that is not issued by the end of the program.
- Every program raises each flag as often as it is awaited, and every message is freed, so that senders and receivers
  agree on the index of the next slot.
- A program reads the context's memory and its outputs only where it has written them before, and its inputs only where
  it has not.
- No output has a gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING

from attrs import Factory, define, frozen

from tpplan.errors import InternalError
from tpplan.exec.programs.call import Call
from tpplan.exec.programs.fence import own
from tpplan.exec.programs.program import (
    HOST,
    INPUT,
    OPERANDS,
    OUTPUT,
    RESIDUAL,
    Await,
    Flag,
    Signal,
    Sum,
    View,
    flat,
    writes,
)
from tpplan.exec.programs.region import Memory, Region, gap, regions
from tpplan.exec.programs.timeline import Node, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpplan.exec.programs.program import Buffer, Program, Stream

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
    for node, wanted, raised in timeline.stuck:
        yield Finding(DEADLOCK, f"{node} waits for {wanted} signals, of which {raised} are issued with it or before")
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
        found: findings so far, by the commands.
        past: for each node, a bit set of the nodes that are complete when it ends.
        read: for each memory, the reads and their nodes; an operand's memory is told apart by its program. Reads that a
            later write covers are dropped: the write is ordered after them, and later accesses are compared with it.
        written: the same for writes.
    """

    nodes: Sequence[Node]
    found: dict[tuple[object, ...], Finding] = Factory(dict)
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
        return self.found.values()

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
        self.found.setdefault((kind, sentence, first.what, second.what), Finding(kind, sentence.format(first, second)))
