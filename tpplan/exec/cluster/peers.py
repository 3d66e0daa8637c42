"""The backend for one GPU in each of several processes, whose kernels write to each other's memory."""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.cluster.mirrors import Mirrors
from tpplan.exec.gpu.bound import Bound
from tpplan.exec.gpu.copies import Transfer
from tpplan.exec.gpu.cuda import CudaDevices
from tpplan.exec.programs.program import HOST, SLOT, Await, flat, reads, writes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from tpplan.exec.binding import Memory
    from tpplan.exec.cluster.ipc import Opened
    from tpplan.exec.cluster.processes import Processes
    from tpplan.exec.gathered import Pending
    from tpplan.exec.gpu.bound import BoundStep, ReadyProgram
    from tpplan.exec.programs.program import Buffer, Program

#: How long a process that closes waits for the others to close, in seconds: as long as kernels wait for each other.
_PATIENCE = 10.0
_NAP = 1e-3
#: Kinds of programs, and the maximum number whose kind is known.
_SLOTS, _STRAIGHT, _FAR = "slots", "straight", "far"
_KEPT = 1024
#: Memory that another process may still write to: of contexts that are not closed, or were when others were not.
_HELD: dict[int, object] = {}


class PeerProcesses(CudaDevices):
    """Runs exchanges by kernels, which each process launches for its own GPU; everything else as Processes do.

    Kernels of different processes wait for each other as those of one process do. They do not reach the tensors of
    other processes: copies in the exchange buffers stand in for those that other devices would read or write.
    """

    def __init__(
        self,
        memory: Memory,
        own: Mapping[int, torch.device],
        others: Mapping[int, torch.device],
        *,
        process: int,
        opened: Mapping[int, tuple[Opened, Opened]],
        far: Processes,
    ) -> None:
        """Load the kernels.

        Args:
            memory: memory of this process's device, and the control areas and exchange buffers of all devices.
            own: the GPU of this process's device.
            others: the GPU of each device that another process owns.
            process: index of this process.
            opened: the control area and the exchange buffer of each of these devices.
            far: runs all other programs.
        """
        super().__init__(memory, own, transport="peer", others=others)
        self._shared = memory
        self._process = process
        self._opened = opened
        self._far = far
        self._programs: dict[int, tuple[Program, str, Mirrors]] = {}
        _HELD[id(opened)] = memory, opened

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program; see :meth:`tpplan.exec.gpu.cuda.CudaDevices.run`."""
        if self._kind(program) != _FAR:
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
        """Return a callable that issues a program on the same memory again; None unless kernels run it."""
        return None if self._kind(program) == _FAR else super().bind(program, operands)

    def _bind(self, ready: ReadyProgram, operands: Mapping[Buffer, Tensor]) -> Bound:
        """Bind a program; one that goes straight, to mirrors of some rows after the other."""
        if self._kind(ready.program) != _STRAIGHT:
            return super()._bind(ready, operands)
        some = next(iter(operands.values()))
        here, dtype, mirrors = self._places, some.dtype, self._mirrors_of(ready.program)
        inward, outward = (
            [(Transfer(copy, self._memory, dtype), copy.stream.device) for copy in copies]
            for copies in (mirrors.inward(here), mirrors.outward(here))
        )
        steps: list[BoundStep] = []
        at_once = mirrors.rows(min(map(len, self._memory.exchange.values())), dtype.itemsize)
        for first in range(0, len(some), at_once):
            rows = min(at_once, len(some) - first)
            part = {buffer: x[first : first + rows] for buffer, x in operands.items() if not x.is_meta}
            steps += ((copy.bind(part, rows), device, 0) for copy, device in inward)
            steps += super()._bind(ready, part | mirrors.over(self._memory, rows, dtype)).steps
            steps += ((copy.bind(part, rows), device, 0) for copy, device in outward)
        return Bound(ready, tuple(steps), quick=tuple(steps) if self.is_capturing() else ())

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
            for opened in chain.from_iterable(self._opened.values()):
                opened.close()
            del _HELD[id(self._opened)]

    def _leave(self) -> bool:
        """Tell the other processes that nothing is written to their memory any more; return whether all told the same.

        A failed context does not wait, as others may be gone.
        """
        ((device, place),) = self._places.items()
        for other, (control, _) in self._opened.items():
            control.write(self._exchanges.closed(other) + 4 * self._process, 1)
        first = self._exchanges.closed(device)
        words = self._shared.flags[device][first : first + 4 * (1 + len(self._opened))].view(torch.int32)
        end = time.monotonic() + (0 if self._exchanges.has_failed() else _PATIENCE)
        with torch.cuda.device(place), torch.cuda.stream(torch.cuda.Stream(place)):  # type: ignore[no-untyped-call]
            while int(words.sum()) < len(self._opened):
                if time.monotonic() > end:
                    return False
                time.sleep(_NAP)
        return True

    def _kind(self, program: Program) -> str:
        """Return whether kernels run a program through slots, or straight, or it is left to :class:`Processes`."""
        return self._known(program)[1]

    def _mirrors_of(self, program: Program) -> Mirrors:
        """Return the mirrors of a program that goes straight."""
        return self._known(program)[2]

    def _known(self, program: Program) -> tuple[Program, str, Mirrors]:
        if id(program) not in self._programs:
            if len(self._programs) >= _KEPT:
                self._programs.clear()
            steps = [*flat(program)]
            has_slots = any(view.buffer.role == SLOT for step in steps for view in writes(step))
            waits = any(isinstance(step, Await) for step in steps)
            kind = _SLOTS if has_slots else _STRAIGHT if waits else _FAR
            mirrors = Mirrors.of(program) if kind == _STRAIGHT else Mirrors({}, {})
            self._programs[id(program)] = program, kind, mirrors  # keeps it alive, as its identity is the key
        return self._programs[id(program)]


def _is_on_host(program: Program) -> bool:
    """Return whether a program reads or writes host memory."""
    return any(view.buffer.device == HOST for step in flat(program) for view in (*reads(step), *writes(step)))
