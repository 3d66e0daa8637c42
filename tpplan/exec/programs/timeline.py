"""Dependency graphs of programs issued one after the other.

They include the worst-case caller. Each program is called from new streams, which write its operands just before it,
and read and overwrite them just after it. The host overwrites its inputs as soon as the program is issued, and reads
and overwrites its outputs once the program's results are complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from attrs import Factory, define

from tpplan.exec.programs.fence import HOST_STREAM, caller
from tpplan.exec.programs.program import (
    CALLER,
    HOST,
    INPUT,
    OPERANDS,
    OUTPUT,
    RESIDUAL,
    Await,
    Buffer,
    Event,
    Flag,
    Record,
    Signal,
    Stream,
    View,
    Wait,
    flat,
    reads,
    writes,
)
from tpplan.exec.programs.region import regions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpplan.exec.programs.program import Program, Step
    from tpplan.exec.programs.region import Region


class Call(NamedTuple):
    """A call of a program, with operands that no other call uses.

    Attributes:
        program: the program to run.
        in_place: whether each device's output may be its input or its residual.
    """

    program: Program
    in_place: bool = False


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
    _operands: dict[Buffer, int] = Factory(dict)
    _in_place: bool = False
    _parts: int = 1
    _last: dict[tuple[Stream, int], int] = Factory(dict)
    _recorded: dict[Event, int] = Factory(dict)
    _raised: defaultdict[Flag, list[int]] = Factory(lambda: defaultdict(list))
    _awaited: Counter[tuple[Flag, int]] = Factory(Counter)
    _polling: list[tuple[int, Flag, int]] = Factory(list)

    def run(self, call: Call) -> None:
        """Add a program, with its caller's accesses before and after it."""
        program, self._in_place = call
        self._program += 1
        steps = tuple(flat(program))
        views = [v for step in steps for v in (*reads(step), *writes(step)) if v.buffer.role in OPERANDS]
        self._operands = {}
        for view in views:
            self._operands[view.buffer] = max(view.stop, self._operands.get(view.buffer, 0))
        self._parts = lcm(*{view.parts for view in views})
        devices = sorted({buffer.device for buffer in self._operands})
        for device in devices:
            self._call("writes", device, OPERANDS, HOST_STREAM if device == HOST else caller(device))
        for step in steps:
            self._issue(step)
        for device in devices:
            if device != HOST:
                self._call("reads and overwrites", device, OPERANDS, caller(device))
        self._call("overwrites", HOST, (INPUT, RESIDUAL), HOST_STREAM)
        results = [self._recorded[event] for event in program.results if event in self._recorded]
        self._call("reads and overwrites", HOST, (OUTPUT,), None, results)
        self._raise()

    def _call(
        self, does: str, device: int, roles: tuple[str, ...], stream: Stream | None, after: Iterable[int] = ()
    ) -> None:
        """Add an access of the caller to all operands of a device in these roles, if there are any."""
        operands = sorted(b for b in self._operands if b.device == device and b.role in roles)
        if operands:
            wholes = tuple(r for b in operands for r in self._regions(View(b, 0, self._operands[b]), device))
            what = f"the caller {does} {', '.join(map(str, operands))}"
            self._add(stream, Node(self._program, what, (), wholes, [*after]))

    def _issue(self, step: Step | Record | Wait) -> None:
        """Add a command."""
        device, index = step.stream.device, len(self.nodes)
        got, put = (tuple(r for v in views for r in self._regions(v, device)) for views in (reads(step), writes(step)))
        node = Node(self._program, step, got, put, [])
        if isinstance(step, Record):
            self._recorded[step.event] = index
        elif isinstance(step, Wait):
            if step.event in self._recorded:
                node.after.append(self._recorded[step.event])
        elif isinstance(step, Signal):
            self._raised[step.flag].append(index)
        elif isinstance(step, Await):
            self._awaited[step.flag, device] += 1
            self._polling.append((index, step.flag, self._awaited[step.flag, device] - step.behind))
        self._add(step.stream, node)

    def _add(self, stream: Stream | None, node: Node) -> None:
        """Add a node after its stream's last node and the host's; without a stream, no node follows it."""
        follows = [(HOST_STREAM, 0)]
        if stream and stream != HOST_STREAM:
            follows.append((stream, self._program if stream.kind == CALLER else 0))
        node.after.extend(self._last[key] for key in follows if key in self._last)
        if stream:
            self._last[follows[-1]] = len(self.nodes)
        self.nodes.append(node)

    def _raise(self) -> None:
        """Add the dependency of every Await of the program on its Signal, which may have been issued later."""
        for index, flag, wanted in self._polling:
            raised = self._raised[flag]
            if wanted > len(raised):
                self.stuck.append(Stuck(self.nodes[index], wanted, len(raised)))
            elif wanted > 0:
                self.nodes[index].after.append(raised[wanted - 1])
        self._polling.clear()

    def _regions(self, view: View, device: int) -> Iterator[Region]:
        """Yield the regions of a view that a device accesses, including those of possible aliases."""
        buffer, slot = view.buffer, 0
        if buffer.queue:
            sends = device == buffer.queue.sender
            passed = Flag("full", buffer.queue) if sends else Flag("free", buffer.queue, device)
            slot = len(self._raised[passed]) % buffer.queue.slots
        yield from regions(view, self._program, self._parts, slot)
        if self._in_place and buffer.role == OUTPUT:
            for role in (INPUT, RESIDUAL):
                alias = buffer._replace(role=role)
                if alias in self._operands:
                    may_be = regions(view._replace(buffer=alias), self._program, self._parts)
                    yield from (region._replace(view=view) for region in may_be)
