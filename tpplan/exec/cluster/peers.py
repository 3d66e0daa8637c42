"""The backend for one GPU in each of several processes, whose kernels write to each other's memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.gpu.cuda import CudaDevices
from tpplan.exec.programs.program import HOST, SLOT, flat, reads, writes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from tpplan.exec.binding import Memory
    from tpplan.exec.cluster.ipc import Opened
    from tpplan.exec.cluster.processes import Processes
    from tpplan.exec.gathered import Pending
    from tpplan.exec.programs.program import Buffer, Program

#: How long a process that closes waits for the others to close, in seconds: as long as kernels wait for each other.
_PATIENCE = 10.0
_NAP = 1e-3
#: Maximum number of programs that are known to go through slots, or not to.
_KEPT = 1024
#: Memory that another process may still write to, kept until this one ends.
_ABANDONED: list[object] = []


class PeerProcesses(CudaDevices):
    """Runs small exchanges by kernels, which the processes launch for their own GPU; everything else as Processes do.

    Kernels of different processes wait for each other as those of one process do.
    """

    def __init__(
        self,
        memory: Memory,
        own: Mapping[int, torch.device],
        others: Mapping[int, torch.device],
        *,
        process: int,
        opened: Mapping[int, Opened],
        far: Processes,
    ) -> None:
        """Load the kernels.

        Args:
            memory: memory of this process's device, and the control areas of all devices.
            own: the GPU of this process's device.
            others: the GPU of each device that another process owns.
            process: index of this process.
            opened: the control areas of these devices.
            far: runs all other programs.
        """
        super().__init__(memory, own, transport="peer", others=others)
        self._shared = memory
        self._process = process
        self._opened = opened
        self._far = far
        self._through_slots: dict[int, tuple[Program, bool]] = {}

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program; see :meth:`tpplan.exec.gpu.cuda.CudaDevices.run`."""
        if self._is_through_slots(program):
            return super().run(program, operands)
        if self.is_capturing() and _is_on_host(program):
            message = f"{program.name} cannot be captured: the host takes part"
            raise ExecutionError(message, "call it beside the graph")
        with self._issuing:
            self.turn_to_current()
            try:
                return self._far.run(program, operands)
            except BaseException:  # perhaps done by only some processes
                self._exchanges.interrupt()
                raise

    def bind(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Callable[[], Pending] | None:
        """Return a callable that issues a program on the same memory again; None unless kernels run all of it."""
        return super().bind(program, operands) if self._is_through_slots(program) else None

    def close(self) -> None:
        """Wait for the other processes to close, for some seconds at most, and release all resources.

        Memory that one of them may still write to is kept until this process ends.
        """
        if self._issuing.closed:
            return
        have_left = self._leave()
        self._far.close()
        super().close()
        if have_left:
            for opened in self._opened.values():
                opened.close()
        else:
            _ABANDONED.append((self._shared, self._opened))

    def _leave(self) -> bool:
        """Tell the other processes that nothing is written to their memory any more; return whether all told the same.

        A failed context does not wait, as others may be gone.
        """
        ((device, place),) = self._places.items()
        for other, opened in self._opened.items():
            opened.write(self._exchanges.closed(other) + 4 * self._process, 1)
        first = self._exchanges.closed(device)
        words = self._shared.flags[device][first : first + 4 * (1 + len(self._opened))].view(torch.int32)
        end = time.monotonic() + (0 if self._exchanges.has_failed() else _PATIENCE)
        with torch.cuda.device(place), torch.cuda.stream(torch.cuda.Stream(place)):  # type: ignore[no-untyped-call]
            while int(words.sum()) < len(self._opened):
                if time.monotonic() > end:
                    return False
                time.sleep(_NAP)
        return True

    def _is_through_slots(self, program: Program) -> bool:
        """Return whether all of a program is kernels that exchange messages through slots."""
        if id(program) not in self._through_slots:
            if len(self._through_slots) >= _KEPT:
                self._through_slots.clear()
            views = (view for step in flat(program) for view in writes(step))
            is_so = any(view.buffer.role == SLOT for view in views)
            self._through_slots[id(program)] = program, is_so  # keeps it alive, as its identity is the key
        return self._through_slots[id(program)][1]


def _is_on_host(program: Program) -> bool:
    """Return whether a program reads or writes host memory."""
    return any(view.buffer.device == HOST for step in flat(program) for view in (*reads(step), *writes(step)))
