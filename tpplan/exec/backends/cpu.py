"""Virtual devices: programs run on the CPU, synchronously, in one of the orders that they allow.

Synchronisation costs nothing here: the order is computed once per program, and only copies and sums are run.
:mod:`tpplan.exec.backends.adversary` has the same interface, with worst-case orders.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from tpplan.errors import ExecutionError, InternalError
from tpplan.exec.backends.engine import Virtual
from tpplan.exec.memory.binding import resolve, slot_number, span
from tpplan.exec.programs.program import HOST, OPERANDS, Await, Copy, Record, Signal, Sum, Wait, flat, reads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.programs.program import Buffer, Event, Flag, Program, Step, Stream, View

#: Maximum number of cached programs, and of programs bound to a size: prompts may have any length.
_KEPT = 128

#: Elements that each torch thread adds at a time, so that partial sums stay in its cache.
_CACHED = 2**16


class Place(NamedTuple):
    """Memory that a command reads or writes.

    Attributes:
        view: a view of an operand or of the context's memory.
        slot: index of the queue's slot, relative to the one that was next when the program began.
    """

    view: View
    slot: int


class Work(NamedTuple):
    """A Copy or Sum; a Copy has a single source.

    Attributes:
        target: memory to write.
        sources: memory to read.
    """

    target: Place
    sources: tuple[Place, ...]


class Pending:
    """A handle for a program, which is complete already."""

    def done(self) -> bool:
        """Return True: the results may be read."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return at once, whatever the ``timeout`` in seconds: there is nothing to wait for."""


_DONE = Pending()


class _Bound(NamedTuple):
    """A program bound to operands of some size.

    Attributes:
        program: the program, kept alive because its identity is part of the key.
        memory: tensors in the context's memory.
        operands: views of the caller's tensors.
        work: (target, sources) as indices into the tensors of ``memory`` followed by those of ``operands``.
    """

    program: Program
    memory: tuple[Tensor, ...]
    operands: tuple[View, ...]
    work: tuple[tuple[int, tuple[int, ...]], ...]


class VirtualDevices(Virtual):
    """Runs programs on the CPU synchronously; not thread-safe."""

    def __init__(self, memory: Memory) -> None:
        """Use the context's memory, which is all on the CPU."""
        self._memory: Memory | None = memory
        self._work: dict[int, tuple[Program, tuple[Work, ...]]] = {}
        self._bound: dict[tuple[int, int, torch.dtype], _Bound] = {}

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Run a program synchronously.

        Args:
            program: the program; use the same object each time, as its order is cached by identity.
            operands: the caller's tensors, ``[rows, columns]`` each with any strides, all with the same number of rows
                and of the same dtype. An ``output`` may be the same tensor as its device's ``input`` or ``residual``.

        Raises:
            ExecutionError: the devices are closed.
            InternalError: the program deadlocks, or needs more memory than the context has.
        """
        some = next(iter(operands.values()))
        rows, dtype = some.shape[0], some.dtype
        with torch.inference_mode():  # autograd does not matter: only bytes are moved
            bound = self._bound.get((id(program), rows, dtype)) or self._bind(program, rows, dtype)
            tensors = [*bound.memory, *[_cut(operands[view.buffer], view, rows) for view in bound.operands]]
            for target, sources in bound.work:
                if len(sources) == 1:
                    tensors[target].copy_(tensors[sources[0]])
                else:
                    add(tensors[target], [tensors[source] for source in sources])
        return _DONE

    def synchronize(self) -> None:
        """Return at once: no work is ever pending."""

    def close(self) -> None:
        """Release the memory; closing again does nothing."""
        self._memory = None
        self._work.clear()
        self._bound.clear()

    def _bind(self, program: Program, rows: int, dtype: torch.dtype) -> _Bound:
        """Resolve a program's views of the context's memory to tensors, and index all views."""
        if self._memory is None:
            raise ExecutionError("the virtual devices are closed", "compile the plan again")
        for kept in (self._bound, self._work):
            if len(kept) >= _KEPT:
                kept.clear()
        if id(program) not in self._work:
            self._work[id(program)] = program, sequence(program)
        work = [w for w in self._work[id(program)][1] if range(*span(w.target.view, rows))]
        places = dict.fromkeys(place for each in work for place in (each.target, *each.sources))
        mine = [place for place in places if place.view.buffer.role not in OPERANDS]
        theirs = [place for place in places if place.view.buffer.role in OPERANDS]
        index = {place: i for i, place in enumerate((*mine, *theirs))}
        bound = self._bound[id(program), rows, dtype] = _Bound(
            program,
            tuple(resolve(view, {}, self._memory, rows, dtype, slot=slot) for view, slot in mine),
            tuple(view for view, _ in theirs),
            tuple((index[target], tuple(index[source] for source in sources)) for target, sources in work),
        )
        return bound


def sequence(program: Program) -> tuple[Work, ...]:
    """Return a program's copies and sums in an order in which its streams could run them.

    Slots are numbered from the start of the program. This is valid as programs run one at a time, and lowered programs
    leave every queue empty.

    Raises:
        InternalError: the program deadlocks.
    """
    order: list[Work] = []
    raised: Counter[Flag] = Counter()
    awaited: Counter[tuple[Stream, Flag]] = Counter()
    passed: set[int] = set()  # positions of Records
    pending = _resolved(program)
    while pending:
        left: list[tuple[int, Step | Record | Wait, int | None]] = []
        held: set[Stream] = set()
        for position, step, record in pending:
            stream = step.stream
            ready = record is None or record in passed
            if isinstance(step, Await):
                ready = raised[step.flag] > awaited[stream, step.flag] - step.behind
            if stream in held or not ready or any(each.device == HOST for each in held):
                held.add(stream)
                left.append((position, step, record))
                continue
            if isinstance(step, Copy | Sum):
                views = (step.target, *reads(step))
                target, *sources = (Place(view, slot_number(view, stream.device, raised)) for view in views)
                order.append(Work(target, tuple(sources)))
            elif isinstance(step, Signal):
                raised[step.flag] += 1
            elif isinstance(step, Await):
                awaited[stream, step.flag] += 1
            elif isinstance(step, Record):
                passed.add(position)
        if len(left) == len(pending):
            raise InternalError(f"{program.name} never ends: {'; '.join(str(step) for _, step, _ in left)}")
        pending = left
    return tuple(order)


def _resolved(program: Program) -> list[tuple[int, Step | Record | Wait, int | None]]:
    """Return every step with its position and, for a Wait, the position of its Record if in the same program."""
    latest: dict[Event, int] = {}
    steps: list[tuple[int, Step | Record | Wait, int | None]] = []
    for position, step in enumerate(flat(program)):
        steps.append((position, step, latest.get(step.event) if isinstance(step, Wait) else None))
        if isinstance(step, Record):
            latest[step.event] = position
    return steps


def add(target: Tensor, sources: Sequence[Tensor]) -> None:
    """Add in float32, in the given order, and round once: bitwise reproducible except for NaN payloads.

    Args:
        target: the result in float16, bfloat16 or float32; it may be one of the sources.
        sources: at least two tensors of the target's shape and dtype.
    """
    if len(sources) == 2:  # noqa: PLR2004
        torch.add(*sources, out=target)  # torch adds two halves in float32, too
        return
    rows, columns = target.shape
    if target.device.type != "cpu":
        _add(target, sources)
        return
    at_once = max(1, _CACHED * torch.get_num_threads() // columns)
    if rows <= at_once:
        _add(target, sources)
        return
    for part, *parts in zip(*(torch.split(tensor, at_once) for tensor in (target, *sources)), strict=True):
        _add(part, parts)


def _add(target: Tensor, sources: Sequence[Tensor]) -> None:
    if target.dtype == torch.float32 and target.data_ptr() not in {source.data_ptr() for source in sources[2:]}:
        total = torch.add(*sources[:2], out=target)
    else:
        total = torch.add(sources[0].float(), sources[1])
    for source in sources[2:]:
        total.add_(source)
    if total is not target:
        target.copy_(total)


def _cut(tensor: Tensor, view: View, rows: int) -> Tensor:
    """Return a view's part of an operand; fast for the whole tensor, the most common case."""
    _, start, stop, _, parts, _ = view
    if parts > 1:
        first, end = span(view, rows)
        tensor = tensor.narrow(0, first, end - first)
    if start or stop != tensor.shape[1]:
        tensor = tensor.narrow(1, start, stop - start)
    return tensor
