"""An adversarial scheduler: runs programs on the CPU in random orders that they allow, with worst-case interleaving.

It is independent of any reasoning about programs: a small machine with the rules of real devices. Streams are queues; a
wait is for the event's latest record; flags are counters in memory. Copies and sums take time: meanwhile their target
holds garbage, and any element of a source or target that changes becomes garbage in the result. So under some seed a
program with a data race gives wrong bytes. A deadlock raises an error that tells what each stream waits for.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from attrs import Factory, define, frozen
from torch import Tensor

from tpplan.errors import InternalError
from tpplan.exec.backends.engine import Virtual
from tpplan.exec.memory.binding import BITS, resolve, slot_number
from tpplan.exec.programs.fence import caller
from tpplan.exec.programs.program import HOST, SLOT, Await, Buffer, Copy, Record, Signal, Step, Sum, Wait, flat, reads

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.programs.program import Event, Flag, Program, Queue, Stream


#: Minimum bytes of noise that garbage is made of.
_NOISE = 1 << 14


class Garbage:
    """Makes garbage from windows of the same noise, which is drawn again when it is too short."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._noise = torch.empty(0, dtype=torch.uint8, device="cpu")

    def unlike(self, right: Tensor) -> Tensor:
        """Return random integers, each different from that in the dense tensor ``right``."""
        count, size = right.numel(), right.element_size()
        if 2 * count * size > self._noise.shape[0]:
            drawn = bytearray(self._random.randbytes(max(2 * count * size, _NOISE)))
            self._noise = torch.frombuffer(drawn, dtype=torch.uint8) | 1
        noise = self._noise.view(right.dtype)
        start = int(self._random.random() * (noise.shape[0] - count))
        return right ^ noise.as_strided(right.shape, right.stride(), start)

    def spoil(self, block: Tensor) -> None:
        """Fill a dense tensor with garbage."""
        block.copy_(self.unlike(block))


#: Maximum ratio of the probabilities of two streams to be chosen, so that some fall far behind.
_UNFAIR = 100_000

#: Average number of choices until the probabilities change.
_MOOD = 200

#: Steps in two halves, and those after which other streams may be blocked or no longer be.
_TAKES_TIME, _CHANGES = Copy | Sum, Record | Signal | Await


@define(eq=False)
class _Mark:
    """A recorded event.

    Attributes:
        is_reached: whether the stream has reached it.
    """

    is_reached: bool = False


@frozen(eq=False)
class _Call:
    """The caller's own work on a stream.

    Attributes:
        work: a callable that does it.
    """

    work: Callable[[], object]

    def __str__(self) -> str:
        return "the caller's work"


@define(eq=False)
class _Task:
    """An issued step.

    Attributes:
        step: the step.
        operands: the caller's tensors.
        mark: the event of a Record or Wait; a Wait without one waits for nothing.
        writing: the state of a Copy or Sum in progress.
    """

    step: Step | Record | Wait | _Call
    operands: Mapping[Buffer, Tensor] = Factory(dict)
    mark: _Mark | None = None
    writing: _Writing | None = None


@frozen(eq=False)
class _Writing:
    """A Copy or Sum in progress; all tensors are viewed as integers.

    Attributes:
        sources: tensors to read.
        contents: contents of the sources just after the target was poisoned, which may be one of them.
        target: tensor to write.
        poison: garbage that the target holds meanwhile.
        result: final contents of the target.
    """

    sources: tuple[Tensor, ...]
    contents: tuple[Tensor, ...]
    target: Tensor
    poison: Tensor
    result: Tensor


class Pending:
    """A handle for an issued program.

    It waits only for results in host memory: the program may still be working on other tensors afterwards.
    """

    def __init__(self, machine: Adversary, marks: Iterable[_Mark]) -> None:
        """Create a handle that is done when a machine has passed all marks."""
        self._machine = machine
        self._marks = tuple(marks)

    def done(self) -> bool:
        """Return whether the results may be read; every call lets time pass."""
        self._machine.pass_time()
        return all(mark.is_reached for mark in self._marks)

    def wait(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Let time pass until the results may be read; ``timeout`` is ignored, as there is no clock.

        Raises:
            InternalError: the results are never complete.
        """
        self._machine.drive(lambda: all(mark.is_reached for mark in self._marks))


class Adversary(Virtual):
    """Virtual devices with worst-case scheduling and the interface of ``VirtualDevices``; not thread-safe.

    :meth:`run` only issues commands. All but the host's own run later, in random order, while the host waits.
    """

    def __init__(self, memory: Memory, random: Random) -> None:
        """Fill the context's memory with garbage.

        Args:
            memory: the context's memory, on the CPU.
            random: the source of all random choices.
        """
        self._memory = memory
        self._random = random
        self._garbage = Garbage(random)
        self._queues: dict[Stream, deque[_Task]] = {}
        self._weights: dict[Stream, float] = {}
        self._able: list[Stream] = []
        self._reaches: list[float] = []
        self._callers: dict[Stream, Stream] = {}
        self._latest: dict[Event, _Mark] = {}
        self._raised: Counter[Flag] = Counter()
        self._awaited: Counter[tuple[Flag, int]] = Counter()
        self._known: set[Queue] = set()
        for block in (*memory.exchange.values(), *memory.rings.values()):
            self._garbage.spoil(block)

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program; for the operands see ``VirtualDevices``.

        Raises:
            InternalError: the host itself deadlocks.
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
        """Issue the caller's own work on a stream; it runs atomically."""
        self._issue(stream, _Task(_Call(work)))

    def use(self, stream: Stream) -> None:
        """Make another stream the caller's current one on its device, without waiting for the old one."""
        self._callers[caller(stream.device)] = stream

    def synchronize(self) -> None:
        """Let time pass until all issued work is complete.

        Raises:
            InternalError: some streams deadlock.
        """
        self.drive(lambda: not any(self._queues.values()))

    def close(self) -> None:
        """Complete all issued work; closing again does nothing.

        Raises:
            InternalError: some streams deadlock.
        """
        try:
            self.synchronize()
        finally:
            self._queues.clear()
            self._look()

    def drive(self, reached: Callable[[], bool]) -> None:
        """Run commands until ``reached`` returns true.

        Raises:
            InternalError: a deadlock comes first.
        """
        while not reached():
            if not self.pass_time():
                heads = (f"{stream} at {queue[0].step}" for stream, queue in self._queues.items() if queue)
                raise InternalError(f"deadlock: {'; '.join(heads) or 'nothing was issued'}")

    def pass_time(self) -> bool:
        """Run a command, or half of one, of a random stream that is not blocked; return False if all are."""
        if not self._able:
            return False
        if self._random.random() < 1 / _MOOD:
            self._weights.clear()
            self._look()
        chosen = bisect(self._reaches, self._random.random() * self._reaches[-1], hi=len(self._able) - 1)
        queue = self._queues[self._able[chosen]]
        if self._advance(queue[0]):
            task = queue.popleft()
            if isinstance(task.step, _CHANGES) or not queue or not self._is_able(queue[0]):
                self._look()
        return True

    def _look(self) -> None:
        """Find the streams that are not blocked, and their cumulative weights."""
        self._able = [stream for stream, queue in self._queues.items() if queue and self._is_able(queue[0])]
        weights = (self._weights.setdefault(stream, _UNFAIR ** self._random.random()) for stream in self._able)
        self._reaches = [*accumulate(weights)]

    def _issue(self, stream: Stream, task: _Task) -> None:
        """Queue a task; a task of the host's stream completes before anything else is issued."""
        queue = self._queues.setdefault(stream, deque())
        queue.append(task)
        if len(queue) == 1:
            self._look()
        if stream.device == HOST:
            self.drive(lambda: not queue)

    def _is_able(self, task: _Task) -> bool:
        step = task.step
        if isinstance(step, Await):
            turn = self._awaited[step.flag, step.stream.device] + 1
            return self._raised[step.flag] >= turn - step.behind
        return not isinstance(step, Wait) or task.mark is None or task.mark.is_reached

    def _advance(self, task: _Task) -> bool:
        """Run a task, or half of one that takes time; return whether it is complete."""
        step = task.step
        if isinstance(step, _TAKES_TIME):
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
            task.mark.is_reached = True
        return True

    @torch.inference_mode()
    def _begin(self, step: Copy | Sum, operands: Mapping[Buffer, Tensor]) -> _Writing:
        """Read the sources and poison the target: each of its elements becomes wrong."""
        some = next(iter(operands.values()))
        tensors = []
        for view in (step.target, *reads(step)):
            queue = view.buffer.queue
            if view.buffer.role == SLOT and queue and queue not in self._known:
                self._known.add(queue)
                self._garbage.spoil(self._memory.slots(queue))
            slot = slot_number(view, step.stream.device, self._raised)
            tensors.append(resolve(view, operands, self._memory, some.shape[0], some.dtype, slot=slot))
        bits = BITS[some.dtype.itemsize]
        if isinstance(step, Sum):
            total = tensors[1].to(torch.float32, copy=True)
            for source in tensors[2:]:
                total += source
            result = total.to(some.dtype).view(bits)
        else:
            result = tensors[1].view(bits).clone()
        target, *sources = (tensor.view(bits) for tensor in tensors)
        poison = self._garbage.unlike(result)
        target.copy_(poison)
        return _Writing(tuple(sources), tuple(s.clone() for s in sources), target, poison, result)

    @torch.inference_mode()
    def _end(self, writing: _Writing) -> None:
        """Write the result, with garbage where a source or the target has changed meanwhile."""
        pairs = [(writing.target, writing.poison), *zip(writing.sources, writing.contents, strict=True)]
        result = writing.result
        if not all(torch.equal(now, before) for now, before in pairs):
            for now, before in pairs:
                result = torch.where(now != before, self._garbage.unlike(writing.result), result)
        writing.target.copy_(result)
