"""The backend for one GPU in each of several processes, whose kernels write to each other's memory.

Tensors that other processes cannot reach have mirrors in the exchange buffer, which stand in for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from attrs import frozen

from tpplan.core.workspace import ALIGNMENT
from tpplan.errors import ExecutionError, InternalError
from tpplan.exec.cuda.backend import CudaDevices
from tpplan.exec.cuda.copies import Transfer
from tpplan.exec.cuda.exclusive import ISSUING
from tpplan.exec.cuda.launch import Bound
from tpplan.exec.programs.fence import own
from tpplan.exec.programs.program import (
    EXCHANGE,
    HOST,
    INPUT,
    OPERANDS,
    OUTPUT,
    SLOT,
    Await,
    Buffer,
    Copy,
    Sum,
    View,
    flat,
    reads,
    writes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    import torch
    from torch import Tensor

    from tpplan.exec.cuda.launch import BoundStep, ReadyProgram
    from tpplan.exec.handles import Pending
    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.processes.distributed import Processes
    from tpplan.exec.processes.shared import Sharing
    from tpplan.exec.programs.program import Program


@frozen
class Mirrors:
    """The mirrored operands of a program, the same in all processes.

    A mirror is a piece of its device's exchange buffer, of which each device needs one or two. In a sum, a device's
    input and output have the same one, as sums may be in place.

    Attributes:
        columns: columns of each mirrored operand.
        pieces: the mirror of each.
    """

    columns: Mapping[Buffer, int]
    pieces: Mapping[Buffer, Buffer]

    @classmethod
    def of(cls, program: Program) -> Self:
        """Return the operands that a device other than their own reads or writes.

        Where devices relay what they read from another, all operands are mirrored: kernels then move pieces of the same
        size, for which all operands have to be aligned alike.
        """
        steps = [*flat(program)]
        touched = [(view, step.stream.device) for step in steps for view in (*reads(step), *writes(step))]
        found = {view.buffer for view, device in touched if view.buffer.device != device}
        is_sum = any(isinstance(step, Sum) for step in steps)
        if not is_sum and any(buffer.role == INPUT for buffer in found):
            found = {view.buffer for view, _ in touched if view.buffer.role in OPERANDS}
        counts, pieces = Counter(buffer.device for buffer in found), dict[Buffer, Buffer]()
        for buffer in sorted(found):
            before = sum(other.device == buffer.device for other in pieces)
            piece, count = (0, 1) if is_sum else (before, counts[buffer.device])
            pieces[buffer] = Buffer(EXCHANGE, buffer.device, piece, count)
        return cls({each: max(v.stop for v, _ in touched if v.buffer == each) for each in pieces}, pieces)

    def rows(self, room: int, item_bytes: int) -> int:
        """Return how many rows there is room for at a time.

        Args:
            room: bytes of each device's exchange buffer.
            item_bytes: bytes of an element.

        Raises:
            InternalError: there is no room for one.
        """
        rows = min(
            room // piece.pieces // ALIGNMENT * ALIGNMENT // (self.columns[buffer] * item_bytes)
            for buffer, piece in self.pieces.items()
        )
        if rows < 1:
            raise InternalError(f"mirrors of {max(self.columns.values())} columns have no room in {room} bytes")
        return rows

    def over(self, memory: Memory, rows: int, dtype: torch.dtype) -> dict[Buffer, Tensor]:
        """Return the mirrors ``[rows, columns]`` of all devices.

        Args:
            memory: memory with the exchange buffers of all devices.
            rows: rows of the operands.
            dtype: dtype of the operands.
        """
        sizes = {buffer: rows * columns * dtype.itemsize for buffer, columns in self.columns.items()}
        return {
            buffer: memory.block(piece, 0)[: sizes[buffer]].view(dtype).view(rows, self.columns[buffer])
            for buffer, piece in self.pieces.items()
        }

    def inward(self, devices: Container[int]) -> Iterator[Copy]:
        """Yield the copies of these devices' inputs to mirrors, before the kernels run."""
        for buffer, (operand, mirror) in self._views(devices):
            if buffer.role != OUTPUT:
                yield Copy(own(buffer.device), operand, mirror)

    def outward(self, devices: Container[int]) -> Iterator[Copy]:
        """Yield the copies of mirrors to these devices' outputs, after the kernels."""
        for buffer, (operand, mirror) in self._views(devices):
            if buffer.role == OUTPUT:
                yield Copy(own(buffer.device), mirror, operand)

    def _views(self, devices: Container[int]) -> Iterator[tuple[Buffer, tuple[View, View]]]:
        for buffer, piece in self.pieces.items():
            columns = self.columns[buffer]
            if buffer.device in devices:
                yield buffer, (View(buffer, 0, columns), View(piece, 0, columns, width=columns))


#: How long a process that closes after a failure waits for the others, one of which may be gone, in seconds.
_IMPATIENCE = 3.0
#: Kinds of programs: by kernels through slots, or straight; by each device alone; or left to torch.distributed.
_SLOTS, _DIRECT, _ALONE, _FAR = "slots", "straight", "alone", "far"
#: Maximum number of programs whose kind is known.
_KEPT = 1024


class _Route(NamedTuple):
    """How a program runs; it is kept alive, as routes are looked up by its identity."""

    program: Program
    kind: str
    mirrors: Mirrors


class PeerProcesses(CudaDevices):
    """Runs exchanges by kernels, which each process launches for its own GPU; everything else as Processes do.

    Kernels of different processes wait for each other as those of one process do. They do not reach the tensors of
    other processes: copies in the exchange buffers stand in for those that other devices would read or write.
    """

    _has_left = False

    def __init__(
        self,
        memory: Memory,
        own: Mapping[int, torch.device],
        others: Mapping[int, int],
        *,
        timeout: float,
        sharing: Sharing,
        far: Processes,
    ) -> None:
        """Load the kernels.

        Args:
            memory: memory of this process's device, and the control areas and exchange buffers of all devices.
            own: the GPU of this process's device.
            others: multiprocessors of each device that another process owns.
            timeout: how long a kernel waits for another device, and this process for the others when it closes, in
                seconds.
            sharing: what the processes share.
            far: runs all other programs.
        """
        assert sharing.page  # noqa: S101 (kernels of several processes share one)
        self._presence = sharing.page.presence
        cause = partial(self._presence.cause, name=sharing.named, timeout=timeout)
        super().__init__(
            memory, own, transport="peer", timeout=timeout, others=others, status=sharing.page.status, cause=cause
        )
        self._timeout = timeout
        self._sharing = sharing
        self._far = far
        self._programs: dict[int, _Route] = {}

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program; see :meth:`tpplan.exec.cuda.backend.CudaDevices.run`."""
        if self._route(program).kind != _FAR:
            return super().run(program, operands)
        if self.is_capturing() and (self._far.is_on_host or _is_on_host(program)):
            message = f"{program.name} cannot be captured: the host takes part"
            raise ExecutionError(message, "call it beside the graph")
        with ISSUING:  # not while waiting for other processes, which may wait for another context of this one
            self.check()
            self.turn_to_current()
        try:
            return self._far.run(program, operands)
        except BaseException:  # perhaps done by only some processes
            self._presence.blame()  # says more to those whose kernels wait
            self._exchanges.interrupt()
            raise

    def bind(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Callable[[], Pending] | None:
        """Return a callable that issues a program on the same memory again; None unless kernels run it."""
        return None if self._route(program).kind == _FAR else super().bind(program, operands)

    def _bind(self, ready: ReadyProgram, operands: Mapping[Buffer, Tensor]) -> Bound:
        """Bind a program; one that goes straight, to mirrors of some rows after the other."""
        if self._route(ready.program).kind != _DIRECT:
            return super()._bind(ready, operands)
        some = next(iter(operands.values()))
        here, dtype, mirrors = self._places, some.dtype, self._route(ready.program).mirrors
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
        """Wait for the other processes to close, for the time-out at most, and release all resources.

        Memory that one of them may still write to is kept until this process ends.
        """
        if self._has_left:
            return
        seconds = min(_IMPATIENCE, self._timeout) if self._exchanges.has_failed() else self._timeout
        self._far.close()
        self._programs.clear()
        super().close()
        self._sharing.leave(seconds)
        self._has_left = True

    def _route(self, program: Program) -> _Route:
        if id(program) not in self._programs:
            if len(self._programs) >= _KEPT:
                self._programs.clear()
            steps = [*flat(program)]
            has_slots = any(view.buffer.role == SLOT for step in steps for view in writes(step))
            waits = any(isinstance(step, Await) for step in steps)
            kind = _SLOTS if has_slots else _DIRECT if waits else _FAR if _crosses(program) else _ALONE
            mirrors = Mirrors.of(program) if kind == _DIRECT else Mirrors({}, {})
            self._programs[id(program)] = _Route(program, kind, mirrors)
        return self._programs[id(program)]


def _is_on_host(program: Program) -> bool:
    """Return whether a program reads or writes host memory."""
    return any(view.buffer.device == HOST for step in flat(program) for view in (*reads(step), *writes(step)))


def _crosses(program: Program) -> bool:
    """Return whether a program reads or writes host memory or that of another device than the stream's."""
    return any(v.buffer.device != step.stream.device for step in flat(program) for v in (*reads(step), *writes(step)))
