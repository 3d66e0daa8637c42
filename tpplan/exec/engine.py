"""From an operation to its program: lowered and checked once, and kept."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

from tpplan.errors import ExecutionError
from tpplan.exec.aside import Aside
from tpplan.exec.programs.lower import Route, lower, route
from tpplan.exec.programs.operation import Operation, Reduction
from tpplan.exec.programs.ordering import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.gathered import Pending
    from tpplan.exec.gpu.channel import Channel
    from tpplan.exec.gpu.graph import Graph
    from tpplan.exec.programs.lower import Limits
    from tpplan.exec.programs.program import Buffer, Program


class Backend(Protocol):
    """Where programs run.

    Attributes:
        asides: how many blocks are open in which they go beside other work, and leave kernels of others their room.
    """

    asides: int

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program on matrices ``[rows, columns]``, one for each of the caller's buffers that it names."""

    def bind(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Callable[[], Pending] | None:
        """Return what issues a program on the same memory as often as it is called; None where that saves nothing."""

    def is_capturing(self) -> bool:
        """Tell whether what is issued becomes part of a graph."""

    def channel(self, elements: int) -> Channel | None:
        """Return what kernels of callers add up by, for sums of so many elements; None where there is no such thing."""

    def synchronize(self) -> None:
        """Return when everything that was issued is complete."""

    def aside(self) -> Aside:
        """Return what lets a ``with`` block issue beside other work."""

    def capture(self) -> Graph:
        """Return a graph that captures what a ``with`` block issues.

        Raises:
            ExecutionError: this backend has no graphs.
        """

    def close(self) -> None:
        """Give everything back."""


class Virtual:
    """What devices in the CPU's memory have not.

    Attributes:
        asides: see :class:`Backend`.
    """

    asides = 0

    def bind(self, *_: object) -> None:
        """Return nothing: to issue a program again costs as much as the first time."""

    def is_capturing(self) -> bool:
        """Tell that there are no graphs here."""
        return False

    def channel(self, _: int) -> None:
        """Return nothing: there are no kernels."""
        return

    def aside(self) -> Aside:
        """Return what lets programs go as beside other work, though there is none."""
        return Aside(self)

    def capture(self) -> NoReturn:
        """Refuse: there is no CUDA graph without CUDA devices.

        Raises:
            ExecutionError: always.
        """
        raise ExecutionError("virtual devices have no graphs", 'capture with backend="cuda"')


#: How many programs are remembered.
_KEPT = 1024


class Engine:
    """Keeps every program that a context was asked for.

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
        self._programs: dict[tuple[Operation, Route], Program] = {}

    def program(self, operation: Operation, way: Route) -> Program:
        """Return the program of an operation, lowered and checked once.

        Raises:
            InternalError: what was lowered is not safe.
        """
        key = (operation, way)
        if key not in self._programs:
            if len(self._programs) >= _KEPT:  # widths that never come again do not add up: the oldest is forgotten
                del self._programs[next(iter(self._programs))]
            self._programs[key] = verify(lower(operation, way), in_place=isinstance(operation, Reduction))
        return self._programs[key]

    def route(
        self, operation: Operation, rows: int, item_bytes: int, *, captured: bool = False, aside: bool = False
    ) -> Route:
        """Return how an operation of this size goes, called or captured, alone or beside other work.

        Where a row has no room to be copied, it goes there as it would alone.

        Raises:
            ExecutionError: see :func:`tpplan.exec.programs.lower.route`.
        """
        find = partial(route, operation, self.transport, rows, item_bytes, self.limits, captured=captured)
        if aside:
            with suppress(ExecutionError):
                return find(aside=True)
        return find(aside=False)
