"""From an operation to its program: lowered and checked once, kept, and handed to the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import Factory, define

from tpplan.exec.lower import Route, lower, route
from tpplan.exec.operands import matrix
from tpplan.exec.operation import Moves, Operation, Reduction
from tpplan.exec.ordering import verify
from tpplan.exec.program import INPUT, OUTPUT, RESIDUAL, Buffer, Program

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.gathered import Pending
    from tpplan.exec.graph import Graph
    from tpplan.exec.lower import Limits
    from tpplan.exec.operands import Layout


class Backend(Protocol):
    """Where programs run."""

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program on matrices ``[rows, columns]``, one for each of the caller's buffers that it names."""

    def synchronize(self) -> None:
        """Return when everything that was issued is complete."""

    def capture(self) -> Graph:
        """Return a graph that captures what a ``with`` block issues.

        Raises:
            ExecutionError: this backend has no graphs.
        """

    def close(self) -> None:
        """Give everything back."""


#: How many operations, programs, and sizes of an operation are remembered.
_KEPT = 1024


@define(eq=False)
class Prepared:
    """An operation with its programs.

    Attributes:
        operation: what is done.
        operands: the caller's buffers: inputs, residuals, outputs, each in the operation's order.
        programs: by rows and bytes per element.
    """

    operation: Operation
    operands: tuple[Buffer, ...]
    programs: dict[tuple[int, int], Program] = Factory(dict)


class Engine:
    """Keeps every operation that a context was asked for, and every program.

    Attributes:
        backend: runs them.
        transport: ``peer``, ``host`` or ``events``.
        limits: of the context's memory.
        notes: what a person should know of how these came about.
    """

    def __init__(self, backend: Backend, transport: str, limits: Limits, notes: Sequence[str] = ()) -> None:
        self.backend = backend
        self.transport = transport
        self.limits = limits
        self.notes = tuple(notes)
        self._prepared: dict[Hashable, Prepared] = {}
        self._programs: dict[tuple[Operation, Route], Program] = {}

    def prepare(self, make: Callable[..., Operation], arguments: tuple[Hashable, ...]) -> Prepared:
        """Return the operation that ``make`` makes of these arguments, made once."""
        key = (make, arguments)
        if key not in self._prepared:
            _make_room(self._prepared)
            operation = make(*arguments)
            self._prepared[key] = Prepared(operation, _operands(operation))
        return self._prepared[key]

    def program(self, operation: Operation, way: Route) -> Program:
        """Return the program of an operation, lowered and checked once.

        Raises:
            InternalError: what was lowered is not safe.
        """
        key = (operation, way)
        if key not in self._programs:
            _make_room(self._programs)
            self._programs[key] = verify(lower(operation, way), in_place=isinstance(operation, Reduction))
        return self._programs[key]

    def route(self, operation: Operation, rows: int, item_bytes: int) -> Route:
        """Return how an operation of this size goes."""
        return route(operation, self.transport, rows, item_bytes, self.limits)

    def run(
        self,
        make: Callable[..., Operation],
        arguments: tuple[Hashable, ...],
        layout: Layout,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> Pending | None:
        """Issue an operation; nothing happens for no rows.

        Args:
            make: from the module ``operation``.
            arguments: of it.
            layout: of all tensors.
            inputs: tensors that are only read, in the order of the operation's devices; then
            outputs: those that are written, by rows.
        """
        if not layout.rows:
            return None
        prepared = self.prepare(make, arguments)
        size = (layout.rows, layout.dtype.itemsize)
        program = prepared.programs.get(size)
        if program is None:
            program = self.program(prepared.operation, self.route(prepared.operation, *size))
            _make_room(prepared.programs)
            prepared.programs[size] = program
        matrices = [matrix(tensor) for tensor in (*inputs, *outputs)]
        return self.backend.run(program, dict(zip(prepared.operands, matrices, strict=True)))


def _make_room(kept: dict[Any, Any]) -> None:
    """Forget the oldest entry where there are many: widths and rows that never come again do not add up."""
    if len(kept) >= _KEPT:
        del kept[next(iter(kept))]


def _operands(operation: Operation) -> tuple[Buffer, ...]:
    """Return the buffers of an operation, those that are only read first."""
    if isinstance(operation, Moves):
        ends = [view.buffer for ends in zip(*operation.moves, strict=True) for view in ends]
        return tuple(dict.fromkeys(ends))
    inputs = operation.givers if isinstance(operation, Reduction) else operation.devices
    outputs = operation.takers if isinstance(operation, Reduction) else operation.devices
    residuals = outputs if isinstance(operation, Reduction) and operation.residual else ()
    buffers = [Buffer(INPUT, d) for d in inputs] + [Buffer(RESIDUAL, d) for d in residuals]
    return (*buffers, *(Buffer(OUTPUT, d) for d in outputs))
