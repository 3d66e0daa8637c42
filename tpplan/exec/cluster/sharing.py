"""Sharing the memory of a context's GPUs with the other processes, while it is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from tpplan.exec.cluster.ipc import Handle, Opened
    from tpplan.exec.cluster.meeting import Meeting


class Sharing:
    """One exchange between all processes, when each has allocated its memory or failed to.

    Attributes:
        opened: the control area of every device of another process, if they are shared.
    """

    def __init__(self, meeting: Meeting, gpu: torch.device | None) -> None:
        """Prepare it.

        Args:
            meeting: the processes.
            gpu: the GPU whose kernels write to other processes' memory; None if nothing is shared.
        """
        self.opened: dict[int, Opened] = {}
        self._meeting = meeting
        self._gpu = gpu
        self._has_told = False
        if gpu:
            from tpplan.exec.cluster import ipc  # noqa: PLC0415 (needs CUDA)

            self._handle, self._open = ipc.Handle.of, ipc.Opened.on

    def share(self, controls: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """Share the control areas of this process's devices, and return those of the others.

        Raises:
            ExecutionError: memory cannot be shared, or, without a message, another process has failed.
        """
        told = self._tell("", {device: self._handle(area) for device, area in controls.items()} if self._gpu else {})
        if any(failure for failure, _ in told):
            raise ExecutionError("")
        for device, handle in (each for _, theirs in told for each in theirs.items()):
            if device not in controls and self._gpu:
                self.opened[device] = self._open(self._gpu, handle)
        return {device: opened.tensor for device, opened in self.opened.items()}

    def fail(self, failure: str) -> None:
        """Tell the others why nothing is shared, unless they know already that this process had come so far."""
        if not self._has_told:
            self._tell(failure, {})

    def _tell(self, failure: str, handles: dict[int, Handle]) -> list[tuple[str, dict[int, Handle]]]:
        self._has_told = True
        return self._meeting.tell((failure, handles))
