"""The meeting of the processes of a group, in which each of them tells plain data to all others."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed

from tpplan.errors import ExecutionError
from tpplan.exec.group.lost import Causes, PeerError, about, is_silence, named, reason_of
from tpplan.exec.group.telling import FIRST_BYTES, MAGIC, Telling
from tpplan.exec.toolchain.torch_shims import backends_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

#: torch.distributed's tag of the messages.
_TAG: Final = 0x7070

#: Number of meetings of each group that have told something, the same in all of its processes.
_MEETINGS: Counter[tuple[int, ...]] = Counter()


class Meeting(Telling):
    """The processes of a group.

    Attributes:
        group: the processes.
        process: index of this process in the group.
        count: number of processes.
        gpu: this process's first GPU, which is current while NCCL tells something; None if it has none.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        """Meet the processes of a group, by default all.

        Raises:
            ExecutionError: there is no group, or this process is not in it.
        """
        if not distributed.is_available() or not distributed.is_initialized():
            hint = "call torch.distributed.init_process_group in every process first"
            raise ExecutionError("group: torch.distributed has no processes yet", hint)
        found: Any = distributed.group.WORLD if group is None else group
        if not isinstance(found, distributed.ProcessGroup) or distributed.get_rank(found) < 0:
            hint = "compile only in the processes that are in the group"
            raise ExecutionError("group: this process is not in it", hint)
        self.group = found
        self.process, self.count = distributed.get_rank(found), distributed.get_world_size(found)
        self.gpu: torch.device | None = None
        self._ranks = tuple(distributed.get_process_group_ranks(found))
        self._others = tuple(i for i in range(self.count) if i != self.process)

    def cause(self, awaited: Sequence[int], reason: str) -> str:
        """Return why processes no longer reach each other, in words, the same in all as far as they can tell.

        Args:
            awaited: the processes whose messages do not come; none if this process has failed by itself.
            reason: what torch.distributed says, or what this process has met itself, as the rest of a sentence.
        """
        return self._causes.verdict(awaited, reason)

    def named(self, processes: Sequence[int]) -> str:
        """Return the names of processes, as in a sentence."""
        return named(processes, self._ranks)

    @cached_property
    def _causes(self) -> Causes:
        """What finds causes: made when the first thing is told, as by all processes at once."""
        _MEETINGS[self._ranks] += 1
        name = f"tpplan/{'-'.join(map(str, self._ranks))}/{_MEETINGS[self._ranks]}"
        return Causes(name, self.process, self._ranks)

    def _exchanged(self, mine: bytes) -> list[bytes]:
        _ = self._causes  # in the same order in all processes
        buffers = [bytearray(mine) if i == self.process else bytearray(len(mine)) for i in range(self.count)]
        rooms = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
        try:
            if "cpu" in backends_of(self.group):
                self._send(rooms)
            else:
                self._gather(rooms)
        except RuntimeError as error:
            awaited = error.awaited if isinstance(error, PeerError) else self._others
            reason = reason_of(error)
            if is_silence(reason) and len(mine) == FIRST_BYTES:  # gloo then ends all connections, blameless ones too
                awaited = tuple(i for i in self._others if not buffers[i].startswith(MAGIC)) or awaited
            hint = "see whether all processes run and reach each other, and make the same calls at the same time"
            raise ExecutionError(f"the processes could not meet: {self.cause(awaited, reason)}", hint) from error
        return [bytes(buffer) for buffer in buffers]

    def _send(self, rooms: Sequence[Tensor]) -> None:
        """Exchange host memory with each process by itself, so that an error is about one of them.

        Raises:
            PeerError: a process does not take or send its message.
        """
        works: list[tuple[int, Any]] = []
        for take in (True, False):
            for other in self._others:
                move, room = (distributed.irecv, other) if take else (distributed.isend, self.process)
                with about(other):
                    works.append((other, move(rooms[room], self._ranks[other], self.group, _TAG)))
        for other, work in works:
            with about(other):
                work.wait()

    def _gather(self, rooms: Sequence[Tensor]) -> None:
        """Exchange host memory by way of GPUs, as NCCL alone requires."""
        place = self.gpu or torch.device("cuda", torch.cuda.current_device())
        with torch.cuda.device(place):
            found = [room.to(place) for room in rooms]
            distributed.all_gather(found, found[self.process].clone(), self.group)
            for room, each in zip(rooms, found, strict=True):
                room.copy_(each)
