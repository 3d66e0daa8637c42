"""Sharing the memory of a context's GPUs with the other processes, while it is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from tpplan.exec.cluster.ipc import Handle, Opened
    from tpplan.exec.cluster.meeting import Meeting
    from tpplan.exec.compiler import Areas

    #: Handles of a device's control area and exchange buffer.
    Handles = tuple[Handle, Handle]


class Sharing:
    """One exchange between all processes, when each has allocated its memory or failed to.

    Attributes:
        opened: the control area and the exchange buffer of each device of another process, if they are shared.
    """

    def __init__(self, meeting: Meeting, gpu: torch.device | None) -> None:
        """Prepare it.

        Args:
            meeting: the processes.
            gpu: the GPU whose kernels write to other processes' memory; None if nothing is shared.
        """
        self.opened: dict[int, tuple[Opened, Opened]] = {}
        self._meeting = meeting
        self._gpu = gpu
        self._has_told = False

    def share(self, areas: Areas) -> Areas:
        """Share the areas of this process's devices, and return those of the others.

        Raises:
            ExecutionError: memory cannot be shared, or, without a message, another process has failed.
        """
        told = self._tell("", self._handles(areas))
        if any(failure for failure, _ in told):
            raise ExecutionError("")
        if self._gpu is not None:
            self._open(self._gpu, {d: each for _, handles in told for d, each in handles.items() if d not in areas})
        return {device: (control.tensor, exchange.tensor) for device, (control, exchange) in self.opened.items()}

    def fail(self, failure: str) -> None:
        """Tell the others why nothing is shared, unless they know already that this process had come so far."""
        if not self._has_told:
            self._tell(failure, {})

    def _handles(self, areas: Areas) -> dict[int, Handles]:
        if self._gpu is None:
            return {}
        from tpplan.exec.cluster.ipc import Handle  # noqa: PLC0415 (needs CUDA)

        return {device: (Handle.of(control), Handle.of(exchange)) for device, (control, exchange) in areas.items()}

    def _open(self, gpu: torch.device, handles: Mapping[int, Handles]) -> None:
        from tpplan.exec.cluster.ipc import Opened  # noqa: PLC0415 (needs CUDA)

        for device, (control, exchange) in handles.items():
            self.opened[device] = Opened.on(gpu, control), Opened.on(gpu, exchange)

    def _tell(self, failure: str, handles: dict[int, Handles]) -> list[tuple[str, dict[int, Handles]]]:
        self._has_told = True
        return self._meeting.tell((failure, handles))
