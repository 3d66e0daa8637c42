"""An adversarial scheduler: runs programs on the CPU in any order that they allow, and makes the worst of each.

It knows nothing of why a program is right. It is a small machine with the rules of real devices: streams are queues,
events mean what was recorded last when they are waited for, flags are counters in memory. Copies and sums take time:
from begin to end, their target holds garbage, and what somebody else changes under them becomes garbage in the result.
So a program that leaves anything unordered gives wrong bytes under some seed, and one that waits for what never happens
is a deadlock that shows what each stream waits for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from attrs import Factory, define, frozen
from torch import Tensor

from tpplan.errors import InternalError
from tpplan.exec.binding import BITS, resolve, slot_number
from tpplan.exec.engine import Virtual
from tpplan.exec.programs.fence import caller
from tpplan.exec.programs.program import HOST, SLOT, Await, Buffer, Copy, Record, Signal, Step, Sum, Wait, flat, reads

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

    from tpplan.exec.binding import Memory
    from tpplan.exec.programs.program import Event, Flag, Program, Queue, Stream

#: A stream is up to so many times as likely to be chosen as another, so that some fall far behind.
_UNFAIR = 1000

#: After about so many choices, other streams are the likely ones.
_MOOD = 50


@define(eq=False)
class _Mark:
    """A point in a stream that a Record stands for.

    Attributes:
        passed: whether the stream got there.
    """

    passed: bool = False


@frozen(eq=False)
class _Call:
    """A caller's own work.

    Attributes:
        work: to be done at once.
    """

    work: Callable[[], object]

    def __str__(self) -> str:
        return "the caller's work"


@define(eq=False)
class _Task:
    """A step that was issued.

    Attributes:
        step: what to do.
        operands: the caller's tensors.
        mark: of a Record or Wait; a Wait without one waits for nothing.
        writing: of a Copy or Sum that has begun.
    """

    step: Step | Record | Wait | _Call
    operands: Mapping[Buffer, Tensor] = Factory(dict)
    mark: _Mark | None = None
    writing: _Writing | None = None


@frozen(eq=False)
class _Writing:
    """A Copy or Sum on its way; tensors are of integers.

    Attributes:
        sources: what is read.
        seen: what they held after the target was poisoned.
        target: what is written.
        poison: that it was given.
        result: what it is to hold in the end.
    """

    sources: tuple[Tensor, ...]
    seen: tuple[Tensor, ...]
    target: Tensor
    poison: Tensor
    result: Tensor


class Pending:
    """A program that was issued.

    Its results are those in host memory; a program without any has nothing to wait for, and one that has been waited
    for may still be at work on other tensors.
    """

    def __init__(self, machine: Adversary, marks: Iterable[_Mark]) -> None:
        """Wait for marks of a machine."""
        self._machine = machine
        self._marks = tuple(marks)

    def done(self) -> bool:
        """Return whether the results may be read; time passes with every question."""
        self._machine.pass_time()
        return all(mark.passed for mark in self._marks)

    def wait(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Let time pass until the results may be read; ``timeout`` is for devices that have a clock.

        Raises:
            InternalError: they never may.
        """
        self._machine.drive(lambda: all(mark.passed for mark in self._marks))


class Adversary(Virtual):
    """Virtual devices that do the worst that programs allow; the same interface as ``VirtualDevices``.

    :meth:`run` only issues: everything but what the host itself does happens at random later, while the host waits for
    something. Not safe for two threads at once.
    """

    def __init__(self, memory: Memory, random: Random) -> None:
        """Fill the context's memory with garbage.

        Args:
            memory: of the context, on the CPU.
            random: decides everything.
        """
        self._memory = memory
        self._random = random
        self._queues: dict[Stream, deque[_Task]] = {}
        self._weights: dict[Stream, float] = {}
        self._callers: dict[Stream, Stream] = {}
        self._latest: dict[Event, _Mark] = {}
        self._raised: Counter[Flag] = Counter()
        self._awaited: Counter[tuple[Flag, int]] = Counter()
        self._known: set[Queue] = set()
        for block in (*memory.exchange.values(), *memory.rings.values()):
            self._spoil(block)

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program; for the operands see ``VirtualDevices``.

        Raises:
            InternalError: the host itself waits for something that never happens.
        """
        for step in flat(program):
            stream = self._callers.get(step.stream, step.stream)
            task = _Task(step, operands)
            if isinstance(step, Record):
                task.mark = self._latest[step.event] = _Mark()
            elif isinstance(step, Wait):
                task.mark = self._latest.get(step.event)
            self._issue(stream, task)
        marks = (self._latest.get(event) for event in program.results)
        return Pending(self, (mark for mark in marks if mark))

    def call(self, stream: Stream, work: Callable[[], object]) -> None:
        """Issue the caller's own work on a stream, which is done in one go."""
        self._issue(stream, _Task(_Call(work)))

    def use(self, stream: Stream) -> None:
        """Make another stream the caller's current one on its device; what is in the old one is not waited for."""
        self._callers[caller(stream.device)] = stream

    def synchronize(self) -> None:
        """Let time pass until everything that was issued is done.

        Raises:
            InternalError: something never is.
        """
        self.drive(lambda: not any(self._queues.values()))

    def close(self) -> None:
        """Do what was issued; closing again does nothing.

        Raises:
            InternalError: some of it is never done.
        """
        try:
            self.synchronize()
        finally:
            self._queues.clear()

    def drive(self, reached: Callable[[], bool]) -> None:
        """Run commands until something is reached.

        Raises:
            InternalError: nothing can run before that.
        """
        while not reached():
            if not self.pass_time():
                heads = (f"{stream} at {queue[0].step}" for stream, queue in self._queues.items() if queue)
                raise InternalError(f"deadlock: {'; '.join(heads) or 'nothing was issued'}")

    def pass_time(self) -> bool:
        """Run one command, or half of one, of any stream that can; return whether there was one."""
        able = [stream for stream, queue in self._queues.items() if queue and self._is_able(queue[0])]
        if not able:
            return False
        if self._random.random() < 1 / _MOOD:
            self._weights.clear()
        weights = [self._weights.setdefault(stream, _UNFAIR ** self._random.random()) for stream in able]
        (stream,) = self._random.choices(able, weights)
        if self._advance(self._queues[stream][0]):
            self._queues[stream].popleft()
        return True

    def _issue(self, stream: Stream, task: _Task) -> None:
        """Queue a task; those of the host's stream are done before anything else is issued."""
        queue = self._queues.setdefault(stream, deque())
        queue.append(task)
        if stream.device == HOST:
            self.drive(lambda: not queue)

    def _is_able(self, task: _Task) -> bool:
        step = task.step
        if isinstance(step, Await):
            turn = self._awaited[step.flag, step.stream.device] + 1
            return self._raised[step.flag] >= turn - step.behind
        return not isinstance(step, Wait) or task.mark is None or task.mark.passed

    def _advance(self, task: _Task) -> bool:
        """Do a task, or the next half of it; return whether it is done."""
        step = task.step
        if isinstance(step, Copy | Sum):
            if task.writing is None:
                task.writing = self._begin(step, task.operands)
                return False
            self._end(task.writing)
        elif isinstance(step, _Call):
            step.work()
        elif isinstance(step, Signal):
            self._raised[step.flag] += 1
        elif isinstance(step, Await):
            self._awaited[step.flag, step.stream.device] += 1
        elif isinstance(step, Record) and task.mark:
            task.mark.passed = True
        return True

    @torch.inference_mode()
    def _begin(self, step: Copy | Sum, operands: Mapping[Buffer, Tensor]) -> _Writing:
        """Read the sources, and poison the target so that none of its elements is right."""
        some = next(iter(operands.values()))
        tensors = []
        for view in (step.target, *reads(step)):
            queue = view.buffer.queue
            if view.buffer.role == SLOT and queue and queue not in self._known:
                self._known.add(queue)
                self._spoil(self._memory.slots(queue))
            slot = slot_number(view, step.stream.device, self._raised)
            tensors.append(resolve(view, operands, self._memory, some.shape[0], some.dtype, slot=slot))
        total = tensors[1].clone()
        if isinstance(step, Sum):
            total = total.float()
            for source in tensors[2:]:
                total += source.float()
        bits = BITS[some.dtype.itemsize]
        target, *sources = (tensor.view(bits) for tensor in tensors)
        result = total.to(some.dtype).view(bits)
        poison = self._garbage(result)
        target.copy_(poison)
        return _Writing(tuple(sources), tuple(s.clone() for s in sources), target, poison, result)

    @torch.inference_mode()
    def _end(self, writing: _Writing) -> None:
        """Write the result, with garbage where a source or the target was written meanwhile."""
        changed = writing.target != writing.poison
        for source, seen in zip(writing.sources, writing.seen, strict=True):
            changed |= source != seen
        writing.target.copy_(torch.where(changed, self._garbage(writing.result), writing.result))

    def _garbage(self, right: Tensor) -> Tensor:
        """Return integers each of which is wrong."""
        noise = bytearray(self._random.randbytes(right.numel() * right.element_size()))
        if not noise:
            return right
        return right ^ (torch.frombuffer(noise, dtype=right.dtype).view(right.shape) | 1)

    def _spoil(self, block: Tensor) -> None:
        block.copy_(self._garbage(block))
