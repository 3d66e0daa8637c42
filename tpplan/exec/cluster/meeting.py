"""A meeting of the processes of a group, in which each of them tells something to all others."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

from tpplan.errors import ExecutionError
from tpplan.exec.cluster.carrier import reason_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Told = TypeVar("_Told")


class Meeting:
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

    def tell(self, mine: _Told) -> list[_Told]:
        """Tell all processes something that can be pickled, and return what each of them has told.

        Raises:
            ExecutionError: torch.distributed failed, as when a process has ended.
        """
        told: list[Any] = [None] * self.count
        try:
            with torch.cuda.device(self.gpu) if self.gpu else nullcontext():
                distributed.all_gather_object(told, mine, self.group)
        except RuntimeError as error:
            hint = "compile in all processes of the group at the same time"
            raise ExecutionError(f"the processes could not agree on the plan: {reason_of(error)}", hint) from error
        return told
