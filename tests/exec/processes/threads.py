"""Processes as threads of one: a carrier of messages in memory, and contexts that own some devices of a plan each."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from threading import Barrier, Condition
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from attrs import Factory, define
from hypothesis import strategies as st
from torch import Tensor

from tests.contexts import CPU
from tests.exec.reference import same
from tpplan.core.axes import Axis
from tpplan.exec import HOST, build
from tpplan.exec.group.telling import Telling
from tpplan.exec.processes.distributed import Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext
    from tpplan.exec.group.transport import Message

_T = TypeVar("_T")

#: A message: sender, receiver, mark, and how many messages with these went before it.
Key = tuple[int, int, str, int]

_META = torch.device("meta")

#: Devices of UNEVEN in two processes; device 2, which the second one owns, has no heads.
OWN = ((0, 3), (2,))


@define(eq=False)
class Mail:
    """Messages between threads.

    Attributes:
        timeout_s: how long a thread waits for another.
        lost: why no more messages come, if a thread has failed.
        sent: data on its way.
        count: number of messages carried.
    """

    timeout_s: float = 20.0
    lost: str = ""
    sent: dict[Key, Tensor] = Factory(dict)
    count: int = 0
    _changed: Condition = Factory(Condition)

    def put(self, key: Key, data: Tensor) -> None:
        """Send data, which may not be overwritten before it is taken."""
        with self._changed:
            assert key not in self.sent
            self.sent[key] = data
            self.count += 1
            self._changed.notify_all()

    def take(self, key: Key, room: Tensor) -> None:
        """Wait for data, and receive it."""
        with self._changed:
            self._wait(lambda: key in self.sent, key)
            data = self.sent[key]
            assert data.shape == room.shape, f"{key}: {data.numel()} bytes were sent, {room.numel()} are expected"
            room.copy_(data)
            del self.sent[key]
            self._changed.notify_all()

    def taken(self, key: Key) -> None:
        """Wait until data is received."""
        with self._changed:
            self._wait(lambda: key not in self.sent, key)

    def lose(self, reason: str) -> None:
        """Let all waiting threads fail, as connections to a process that has ended do."""
        with self._changed:
            self.lost = self.lost or reason
            self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool], key: Key) -> None:
        self._changed.wait_for(lambda: is_so() or self.lost, self.timeout_s)
        if not is_so():
            raise RuntimeError(self.lost or f"{key} timed out")


class ThreadCarrier:
    """Carries messages of one of the threads, each at once or as late as it may, as chance has it.

    Attributes:
        place: the CPU.
        fault: what is raised instead of carrying anything.
        reason: why this thread sends nothing any more, as told to the others.
    """

    def __init__(self, process: int, mail: Mail, random: Random) -> None:
        self.place = CPU
        self.fault: BaseException | None = None
        self.reason = ""
        self._process = process
        self._mail = mail
        self._random = random
        self._counts: Counter[tuple[int, int, str]] = Counter()

    def carry(self, messages: Sequence[Message], mark: str) -> Callable[[], None]:
        """Start to send and to receive, and return a callable after which the data may be used."""
        if self.fault:
            raise self.fault
        assert messages
        keys = [self._key(message, mark) for message in messages]
        unread = [*self._send(messages, keys)]
        late = []
        for message, key in zip(messages, keys, strict=True):
            if not message.is_sent:
                receive = partial(self._mail.take, key, message.data)
                if self._random.random() < 1 / 2:
                    receive()
                else:
                    late.append(receive)
        self._random.shuffle(late)

        def wait() -> None:
            for each in (*late, *unread):  # first what others wait for
                each()

        return wait

    def fail(self, reason: str) -> None:
        """Let the others know why no more messages come."""
        self.reason = reason

    def _send(self, messages: Sequence[Message], keys: Sequence[Key]) -> Iterator[partial[None]]:
        """Send copies of what is sent, or the data itself: yield what waits until that is read."""
        for message, key in zip(messages, keys, strict=True):
            if message.is_sent:
                is_late = self._random.random() < 1 / 2
                self._mail.put(key, message.data if is_late else message.data.clone())
                if is_late:
                    yield partial(self._mail.taken, key)

    def _key(self, message: Message, mark: str) -> Key:
        data, other = message.data, message.process
        assert (data.dtype, data.dim(), data.device) == (torch.uint8, 1, CPU)
        assert data.is_contiguous()
        assert data.numel()
        assert other != self._process
        ends = (self._process, other, mark) if message.is_sent else (other, self._process, mark)
        self._counts[ends] += 1
        return (*ends, self._counts[ends])


@define
class Opened:
    """Memory of another process, which the driver is not asked for."""

    tensor: torch.Tensor
    is_open: bool = True

    def close(self) -> None:
        """Close it, once."""
        assert self.is_open
        self.is_open = False


class ThreadMeeting(Telling):
    """A meeting of threads.

    Attributes:
        process: index of this thread.
        count: number of threads.
    """

    def __init__(self, process: int, count: int, barrier: Barrier, told: dict[int, bytes]) -> None:
        self.process, self.count = process, count
        self._barrier, self._told = barrier, told

    def _exchanged(self, mine: bytes) -> list[bytes]:
        self._told[self.process] = mine
        self._barrier.wait()
        found = [self._told[i] for i in range(self.count)]
        self._barrier.wait()
        assert len({*map(len, found)}) == 1, "processes exchange as many bytes"
        return found


class Together:
    """The contexts of a plan in several processes, which are threads here.

    Attributes:
        contexts: of each process.
        carriers: of each process.
        mail: what they carry.
        meetings: of each process.
    """

    def __init__(self, plan: SplitPlan, own: Sequence[Sequence[int]], *, seed: int = 0) -> None:
        """Build the contexts.

        Args:
            plan: their plan.
            own: the devices of each process.
            seed: decides when messages are carried.
        """
        self.mail = Mail()
        self.carriers = [ThreadCarrier(i, self.mail, Random(seed + i)) for i in range(len(own))]
        barrier, told = Barrier(len(own), timeout=20), dict[int, bytes]()
        self.meetings = [ThreadMeeting(i, len(own), barrier, told) for i in range(len(own))]
        owners = {device: process for process, devices in enumerate(own) for device in devices}
        self.contexts = [self._build(plan, owners, process) for process in range(len(own))]
        self._pool = ThreadPoolExecutor(len(own))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        for ctx in self.contexts:
            ctx.close()

    def run(self, call: Callable[[TPContext], _T]) -> list[_T]:
        """Make a call in all processes at once, and return what each gets; raise the error that came first."""
        errors: list[BaseException] = []
        outcomes = self.outcomes(call, errors)
        if errors:
            raise errors[0]
        assert not self.mail.sent, "some messages were not received"
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    def outcomes(
        self, call: Callable[[TPContext], _T], errors: list[BaseException] | None = None
    ) -> list[_T | BaseException]:
        """Make a call in all processes at once, and return what each gets, or its error.

        Args:
            call: what to do with a context.
            errors: receives the errors in the order in which they come.
        """

        def guarded(ctx: TPContext) -> _T | BaseException:
            try:
                return call(ctx)
            except BaseException as error:  # noqa: BLE001 (Ctrl-C among them)
                if errors is not None:
                    errors.append(error)
                self.mail.lose("another process has gone")
                return error

        futures = [self._pool.submit(guarded, ctx) for ctx in self.contexts]
        return [future.result() for future in futures]

    def _build(self, plan: SplitPlan, owners: Mapping[int, int], process: int) -> TPContext:
        meeting: Any = self.meetings[process]
        places = [CPU if owners.get(i) == process else _META for i in range(len(plan.devices))]
        return build.build(
            plan,
            places,
            lambda memory: Processes(memory, owners, process, self.carriers[process], []),
            transport="events",
            max_rows=plan.request.max_rows,
            dtype=getattr(torch, plan.model.dtype),
            meeting=meeting,
        )


def used(plan: SplitPlan) -> tuple[int, ...]:
    """Return the devices that a plan uses."""
    return tuple(i for i, memory in enumerate(plan.memory) if memory.used_bytes)


@st.composite
def shares(draw: st.DrawFn, devices: Sequence[int], most: int = 4) -> tuple[tuple[int, ...], ...]:
    """Each device belongs to one of up to so many processes, and each process has some devices."""
    whose = draw(st.lists(st.integers(0, most - 1), min_size=len(devices), max_size=len(devices)))
    pairs = list(zip(devices, whose, strict=True))
    return tuple(tuple(d for d, owner in pairs if owner == process) for process in dict.fromkeys(whose))


def gathered(ctx: TPContext) -> bool:
    """Scatter and gather something, and return whether it is what it was."""
    x = torch.arange(80.0).view(2, 40)
    return same(ctx.gather(ctx.scatter(x, Axis.RESIDUAL, source=HOST), Axis.RESIDUAL).tensor, x)
