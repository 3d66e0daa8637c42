"""Carrying messages between processes with torch.distributed."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from attrs import frozen
from torch import Tensor, distributed

from tpplan.errors import ExecutionError
from tpplan.exec.group.lost import PeerError, is_silence, reason_of
from tpplan.exec.toolchain.torch_shims import backends_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from tpplan.exec.group.meeting import Meeting

#: Tags of messages are numbers of 31 bits.
_TAGS = 2**31


@frozen(eq=False)
class Message:
    """A message on its way.

    Attributes:
        data: contiguous uint8 on the carrier's device: the data to send, or room for what is received.
        process: index of the other process in the group.
        is_sent: whether it is sent, not received.
    """

    data: Tensor
    process: int
    is_sent: bool


class MessageTransport(Protocol):
    """Carries messages between processes.

    Attributes:
        place: the torch device whose memory it reads and writes.
    """

    place: torch.device

    def carry(self, messages: Sequence[Message], mark: str) -> Callable[[], None]:
        """Start to send and to receive, and return a callable after which the data may be used.

        Args:
            messages: the messages, in the same order in both processes of each.
            mark: what distinguishes these messages from others; the same in both processes.

        Raises:
            PeerError: messages do not come; the error, also that of the callable, says why, the same in all processes.
        """

    def fail(self, reason: str) -> None:
        """Let the others know why this process sends nothing any more, in words that follow its name."""


class GroupTransport:
    """Carries messages with the processes of a group.

    Attributes:
        place: the torch device whose memory it reads and writes: the first of the process's GPUs if the group has a
            backend for GPUs, other than gloo, which copies through host memory itself; else the CPU.
        backend: name of the backend that carries the messages.
        name: what distinguishes its messages from those of other carriers of the group; the same in all processes.
    """

    name = ""

    def __init__(self, meeting: Meeting, places: Sequence[torch.device]) -> None:
        """Choose where messages start and arrive.

        Args:
            meeting: the processes.
            places: torch devices that this process owns.

        Raises:
            ExecutionError: the group has no backend for such devices.
        """
        backends = backends_of(meeting.group)
        gpus = [place for place in places if place.type == "cuda"]
        kind = "cuda" if gpus and backends.get("cuda", "gloo") != "gloo" else "cpu"
        if kind not in backends:
            found = " and ".join(f"{backend} for {each}" for each, backend in backends.items())
            hint = 'initialise torch.distributed with "cpu:gloo,cuda:nccl" or "gloo"'
            raise ExecutionError(f"group: it has {found}, but messages in host memory need one for {kind}", hint)
        self.backend = backends[kind]
        self.place = gpus[0] if kind == "cuda" else torch.device("cpu")
        self._meeting, self._group = meeting, meeting.group
        self._ranks = distributed.get_process_group_ranks(meeting.group)

    def open(self) -> None:
        """Exchange a first message with all processes of the group, as NCCL requires before some exchange any.

        Raises:
            ExecutionError: torch.distributed failed.
        """
        others = [process for process in range(len(self._ranks)) if process != self._meeting.process]
        try:
            with self.current(), self._explaining(others):
                distributed.all_reduce(torch.zeros(1, device=self.place), group=self._group)
                if self.place.type == "cuda":
                    torch.cuda.synchronize(self.place)
        except PeerError as error:
            hint = f"see whether {self.backend} works between these processes without tpplan"
            raise ExecutionError(f"the processes exchange no messages: {error}", hint) from error

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager in which the GPU that messages use is current, as NCCL requires."""
        return torch.cuda.device(self.place) if self.place.type == "cuda" else nullcontext()

    def carry(self, messages: Sequence[Message], mark: str) -> Callable[[], None]:
        """Start to send and to receive; see :class:`MessageTransport`. The current streams order it on GPUs."""
        tag = zlib.crc32(f"{self.name} {mark}".encode()) % _TAGS  # so that no message is taken for another
        works: list[_Started] = []
        with self.current():
            if self.place.type == "cuda":  # NCCL takes all at once
                processes = {message.process for message in messages}
                with self._explaining(processes):
                    works += [
                        _Started(work, processes) for work in distributed.batch_isend_irecv(self._moves(messages, tag))
                    ]
            else:  # one by one, so that an error is about one process
                for message in messages:
                    with self._explaining({message.process}):
                        move = distributed.isend if message.is_sent else distributed.irecv
                        work = move(message.data, self._ranks[message.process], self._group, tag)
                        works.append(_Started(work, {message.process}))

        def wait() -> None:
            with self.current():
                for i, each in enumerate(works):
                    with self._explaining(each.processes, works[i + 1 :]):
                        each.work.wait()

        return wait

    def fail(self, reason: str) -> None:
        """Let the others know why this process sends nothing any more; see :class:`MessageTransport`."""
        self._meeting.cause((), reason)

    def _moves(self, messages: Sequence[Message], tag: int) -> list[distributed.P2POp]:
        return [
            distributed.P2POp(
                distributed.isend if message.is_sent else distributed.irecv,
                message.data,
                self._ranks[message.process],
                self._group,
                tag,
            )
            for message in messages
        ]

    @contextmanager
    def _explaining(self, processes: Collection[int], later: Sequence[_Started] = ()) -> Iterator[None]:
        """Replace an error of torch.distributed, which names no process, by one that does.

        Args:
            processes: the processes that the block sends to or receives from.
            later: messages that are waited for behind it.

        Raises:
            PeerError: torch.distributed failed.
        """
        try:
            yield
        except RuntimeError as error:
            awaited = {*processes}
            reason = reason_of(error)
            if is_silence(reason) and self.place.type == "cpu":  # gloo ends all connections: no wait takes any longer
                awaited.update(*(each.processes for each in later if not each.is_done()))
            raise PeerError(self._meeting.cause(sorted(awaited), reason), sorted(awaited)) from error


@frozen(eq=False)
class _Started:
    """Messages on their way.

    Attributes:
        work: what torch.distributed waits for.
        processes: where they go to or come from.
    """

    work: Any
    processes: Collection[int]

    def is_done(self) -> bool:
        """Wait, and return whether the messages have come."""
        try:
            self.work.wait()
        except RuntimeError:
            return False
        return True
