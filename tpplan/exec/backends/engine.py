"""The engine: lowers operations to programs, checks and caches them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

from tpplan.errors import ExecutionError
from tpplan.exec.handles import Aside
from tpplan.exec.programs.lower import Route, lower, route
from tpplan.exec.programs.operation import Operation, Reduction
from tpplan.exec.programs.ordering import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.cuda.channel import Channel
    from tpplan.exec.cuda.graph import Graph
    from tpplan.exec.handles import Pending
    from tpplan.exec.programs.lower import Limits, Mode
    from tpplan.exec.programs.program import Buffer, Program


class Backend(Protocol):
    """The interface of backends, which run programs on devices.

    Attributes:
        asides: number of open ``aside`` blocks, in which programs run concurrently with other work.
    """

    asides: int

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Issue a program on matrices ``[rows, columns]``, one for each caller's buffer in the program."""

    def bind(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Callable[[], Pending] | None:
        """Return a callable that issues a program on the same memory again; None if that saves nothing."""

    def is_capturing(self) -> bool:
        """Return whether issued work is being captured in a graph."""

    def channel(self, elements: int) -> Channel | None:
        """Return a channel for sums of up to this many elements by callers' kernels; None if there are none."""

    def synchronize(self) -> None:
        """Block until all issued work is complete."""

    def aside(self) -> Aside:
        """Return a context manager whose block issues work concurrently with other work."""

    def capture(self) -> Graph:
        """Return a graph that captures the work that its ``with`` block issues.

        Raises:
            ExecutionError: this backend has no graphs.
        """

    def close(self) -> None:
        """Release all resources."""


class Virtual:
    """Base class of virtual devices, with the GPU features that they lack.

    Attributes:
        asides: see :class:`Backend`.
    """

    asides = 0

    def bind(self, *_: object) -> None:
        """Return None: binding a program to memory would save nothing."""

    def is_capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def channel(self, _: int) -> None:
        """Return None: there are no kernels."""
        return

    def aside(self) -> Aside:
        """Return a context manager in whose block programs take the routes for concurrent work, without any."""
        return Aside(self)

    def capture(self) -> NoReturn:
        """Raise an error: CUDA graphs need CUDA devices.

        Raises:
            ExecutionError: always.
        """
        raise ExecutionError("virtual devices have no graphs", 'capture with backend="cuda"')


#: Maximum number of cached programs.
_KEPT = 1024


class Engine:
    """Lowers a context's operations and caches their programs.

    Attributes:
        backend: runs the programs.
        transport: ``peer``, ``host`` or ``events``.
        limits: sizes of the context's buffers, and thresholds.
        notes: reasons for the choice of these, for the user.
    """

    def __init__(self, backend: Backend, transport: str, limits: Limits, notes: Sequence[str] = ()) -> None:
        self.backend = backend
        self.transport = transport
        self.limits = limits
        self.notes = tuple(notes)
        self._programs: dict[tuple[Operation, Route], Program] = {}

    def program(self, operation: Operation, way: Route) -> Program:
        """Return the program of an operation, lowered and checked on first use.

        Raises:
            InternalError: the program is not safe.
        """
        key = (operation, way)
        if key not in self._programs:
            if len(self._programs) >= _KEPT:  # drop the oldest: some widths never recur
                del self._programs[next(iter(self._programs))]
            self._programs[key] = verify(lower(operation, way), in_place=isinstance(operation, Reduction))
        return self._programs[key]

    def route(self, operation: Operation, rows: int, item_bytes: int, mode: Mode) -> Route:
        """Return the route of an operation of this size, issued in this mode.

        If the buffers for copies aside cannot hold a row, the route is the same as alone.

        Raises:
            ExecutionError: see :func:`tpplan.exec.programs.lower.route`.
        """
        find = partial(route, operation, self.transport, rows, item_bytes, self.limits)
        if mode.aside:
            with suppress(ExecutionError):
                return find(mode=mode)
        return find(mode=mode._replace(aside=False))
