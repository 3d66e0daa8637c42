"""Dependency graphs of programs issued one after the other.

They include the worst-case caller. Each program is called from new streams, which write its operands just before it,
and read and overwrite them just after it. The host overwrites its inputs as soon as the program is issued, and reads
and overwrites its outputs once the program's results are complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from attrs import Factory, define

from tpplan.exec.programs.call import Access
from tpplan.exec.programs.fence import HOST_STREAM
from tpplan.exec.programs.program import CALLER, Await, Copy, Event, Flag, Record, Signal, Stream, Sum, Wait

if TYPE_CHECKING:
    from tpplan.exec.programs.call import Call
    from tpplan.exec.programs.program import Step
    from tpplan.exec.programs.region import Memory, Region

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
        wanted: number of signals that it waits for.
        raised: number of signals issued by the end of its program.
    """

    node: Node
    wanted: int
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
