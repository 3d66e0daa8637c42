"""The backend for one GPU in each of several processes, whose kernels write to each other's memory.

Kernels tell each other where tensors are. A tensor that other processes cannot reach, or whose rows do not begin at
multiples of what kernels move at once, has a mirror in the exchange buffer, which stands in for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from attrs import define, evolve, field, frozen

from tpplan.core.workspace import ALIGNMENT, PAIR
from tpplan.errors import ExecutionError, InternalError
from tpplan.exec.cuda import encode_direct
from tpplan.exec.cuda.backend import CudaDevices
from tpplan.exec.cuda.copies import Transfer
from tpplan.exec.cuda.exclusive import ISSUING
from tpplan.exec.cuda.launch import Bound
from tpplan.exec.handles import Pending
from tpplan.exec.memory.binding import pitch
from tpplan.exec.processes.reach import PATIENT_S, SOON_S, Allocation, Reach
from tpplan.exec.programs.fence import own
from tpplan.exec.programs.program import (
    EXCHANGE,
    HOST,
    INPUT,
    OPERANDS,
    OUTPUT,
    RESIDUAL,
    SLOT,
    Await,
    Buffer,
    Copy,
    Exchange,
    Sum,
    View,
    flat,
    reads,
    writes,
)
from tpplan.exec.protocol.direct import VECTOR_BYTES

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    import torch
    from torch import Tensor

    from tpplan.exec.cuda.launch import BoundStep, ReadyProgram
    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.processes.distributed import Processes
    from tpplan.exec.processes.shared import Sharing
    from tpplan.exec.programs.program import Program


@frozen
class Mirrors:
    """The operands of a program that may need mirrors, the same in all processes.

    A mirror is a piece of its device's exchange buffer, of which each device needs one or two. In a sum, a device's
    input and output have the same one, as sums may be in place; that of a residual, where one is needed, is beside it.

    Attributes:
        columns: columns of each operand.
        pieces: the mirror of each.
        shared: those that a device other than their own touches.
    """

    columns: Mapping[Buffer, int] = field(factory=dict)
    pieces: Mapping[Buffer, Buffer] = field(factory=dict)
    shared: frozenset[Buffer] = frozenset()

    @classmethod
    def of(cls, program: Program) -> Self:
        """Return the operands that a device other than their own reads or writes.

        Where devices relay what they read from another, and in one-shot sums, these are all operands: kernels then move
        pieces of the same size, for which all operands have to be aligned alike.
        """
        steps = [*flat(program)]
        touched = [(view, step.stream.device) for step in steps for view in (*reads(step), *writes(step))]
        found = shared = frozenset(view.buffer for view, device in touched if view.buffer.device != device)
        is_sum = any(isinstance(step, Sum) for step in steps)
        is_one_shot = encode_direct.holds(_exchanges(program))
        if is_one_shot or (not is_sum and any(buffer.role == INPUT for buffer in found)):
            found = frozenset(view.buffer for view, _ in touched if view.buffer.role in OPERANDS)
        counts, pieces = Counter(buffer.device for buffer in found), dict[Buffer, Buffer]()
        for buffer in sorted(found):
            before = sum(other.device == buffer.device for other in pieces)
            piece, count = (0, 1) if is_sum else (before, counts[buffer.device])
            if is_one_shot:
                piece, count = (int(buffer.role == RESIDUAL), PAIR)
            pieces[buffer] = Buffer(EXCHANGE, buffer.device, piece, count)
        return cls({each: max(v.stop for v, _ in touched if v.buffer == each) for each in pieces}, pieces, shared)

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
        """Return the mirrors ``[rows, columns]``.

        Args:
            memory: memory with the exchange buffers of their devices.
            rows: rows of the operands.
            dtype: dtype of the operands.
        """
        sizes = {buffer: rows * columns * dtype.itemsize for buffer, columns in self.columns.items()}
        return {
            buffer: memory.block(piece, 0)[: sizes[buffer]].view(dtype).view(rows, self.columns[buffer])
            for buffer, piece in self.pieces.items()
        }

    def only(self, some: Container[Buffer]) -> Self:
        """Return the mirrors of some operands."""
        kept = {buffer: piece for buffer, piece in self.pieces.items() if buffer in some}
        return evolve(self, pieces=kept, columns={buffer: self.columns[buffer] for buffer in kept})

    def inward(self) -> Iterator[Copy]:
        """Yield the copies of inputs to mirrors, before the kernels run."""
        for buffer, (operand, mirror) in self._views():
            if buffer.role != OUTPUT:
                yield Copy(own(buffer.device), operand, mirror)

    def outward(self) -> Iterator[Copy]:
        """Yield the copies of mirrors to outputs, after the kernels."""
        for buffer, (operand, mirror) in self._views():
            if buffer.role == OUTPUT:
                yield Copy(own(buffer.device), mirror, operand)

    def _views(self) -> Iterator[tuple[Buffer, tuple[View, View]]]:
        for buffer, piece in self.pieces.items():
            columns = self.columns[buffer]
            yield buffer, (View(buffer, 0, columns), View(piece, 0, columns, width=columns))


#: How long a process that closes after a failure waits for the others, one of which may be gone, in seconds.
_IMPATIENCE = 3.0
#: Kinds of programs: by kernels through slots, or straight; by each device alone; or left to torch.distributed.
_SLOTS, _DIRECT, _ALONE, _FAR = "slots", "straight", "alone", "far"
#: Maximum number of programs whose kind is known.
_KEPT = 1024


class _Route(NamedTuple):
    """How a program runs; it is kept alive, as routes are looked up by its identity.

    Attributes:
        program: the program.
        kind: one of the kinds above.
        mirrors: the mirrors that it may need.
        columns: bitwise or of all first columns and numbers of columns that kernels move.
    """

    program: Program
    kind: str
    mirrors: Mirrors
    columns: int


@define(eq=False)
class Reissue:
    """Issues a program again, on memory that other processes reach.

    Attributes:
        issue: issues it.
        reach: what the others reach.
        allocations: the allocations that the memory is in.
    """

    issue: Callable[[], Pending]
    reach: Reach
    allocations: tuple[Allocation, ...]

    def __call__(self) -> Pending:
        """Issue it."""
        return self.issue()

    def is_stale(self) -> bool:
        """Return whether other memory has come to the same addresses, which the others have not opened."""
        return not all(map(self.reach.is_current, self.allocations))


class PeerProcesses(CudaDevices):
    """Runs exchanges by kernels, which each process launches for its own GPU; everything else as Processes do.

    Kernels of different processes wait for each other as those of one process do.
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
        reach: Reach,
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
            reach: what they reach of each other's memory beside that.
            far: runs all other programs.
        """
        assert sharing.page  # noqa: S101 (kernels of several processes share one)
        self._presence = sharing.page.presence
        cause = partial(self._presence.cause, name=sharing.named, timeout=timeout)
        super().__init__(
            memory,
            own,
            transport="peer",
            timeout=timeout,
            others=others,
            status=sharing.page.status,
            cause=cause,
            reach=reach.address,
        )
        self._timeout, self._reach = timeout, reach
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
        """Return a callable that issues a program on the same memory again.

        None unless kernels run it, and on memory that others reach or never will: what was late may be in time next.
        """
        route = self._route(program)
        if route.kind != _DIRECT:
            return None if route.kind == _FAR else super().bind(program, operands)
        found = self._allocations(route, operands)
        if any(each and each.is_late for each in found.values()):
            return None
        bound = self._over(self._ready_for(program, operands), operands, found)
        return Reissue(partial(self.issue, bound), self._reach, tuple({each for each in found.values() if each}))

    def _bind(self, ready: ReadyProgram, operands: Mapping[Buffer, Tensor]) -> Bound:
        """Bind a program; one that goes straight, with mirrors for what others do not reach."""
        route = self._route(ready.program)
        if route.kind != _DIRECT:
            return super()._bind(ready, operands)
        return self._over(ready, operands, self._allocations(route, operands))

    def _allocations(self, route: _Route, operands: Mapping[Buffer, Tensor]) -> dict[Buffer, Allocation | None]:
        """Return the allocations of this process's operands that are aligned; None for what no other device touches."""
        seconds = PATIENT_S if self.is_capturing() else SOON_S
        found: dict[Buffer, Allocation | None] = {}
        for buffer in route.mirrors.pieces:
            x = operands.get(buffer)
            if x is None or x.is_meta:
                continue
            piece = route.columns * x.itemsize | VECTOR_BYTES
            if not (x.data_ptr() | pitch(x)) & ((piece & -piece) - 1):
                found[buffer] = self._reach.find(x.data_ptr(), seconds) if buffer in route.mirrors.shared else None
        return found

    def _over(
        self, ready: ReadyProgram, operands: Mapping[Buffer, Tensor], found: Mapping[Buffer, Allocation | None]
    ) -> Bound:
        """Bind a program to what others reach, and to mirrors of the rest: of some rows after the other."""
        some = next(iter(operands.values()))
        dtype, every = some.dtype, self._route(ready.program).mirrors
        reached = {buffer for buffer, each in found.items() if each is None or each.is_reached}
        mirrors = every.only([b for b in every.pieces if b.device in self._places and b not in reached])
        inward, outward = (
            [(Transfer(copy, self._memory, dtype), copy.stream.device) for copy in copies]
            for copies in (mirrors.inward(), mirrors.outward())
        )
        steps: list[BoundStep] = []
        at_once = every.rows(min(map(len, self._memory.exchange.values())), dtype.itemsize)
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
        self._reach.close()
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
            mirrors = Mirrors.of(program) if kind == _DIRECT else Mirrors()
            self._programs[id(program)] = _Route(program, kind, mirrors, encode_direct.bits(_exchanges(program), 1))
        return self._programs[id(program)]


def _exchanges(program: Program) -> list[Exchange]:
    """Return the exchanges of a program."""
    return [command for command in program.commands if isinstance(command, Exchange)]


def _is_on_host(program: Program) -> bool:
    """Return whether a program reads or writes host memory."""
    return any(view.buffer.device == HOST for step in flat(program) for view in (*reads(step), *writes(step)))


def _crosses(program: Program) -> bool:
    """Return whether a program reads or writes host memory or that of another device than the stream's."""
    return any(v.buffer.device != step.stream.device for step in flat(program) for v in (*reads(step), *writes(step)))
