"""Running calls: checked and prepared the first time, and issued at once where the same memory comes again."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpplan.exec.calls import Call
    from tpplan.exec.engine import Backend
    from tpplan.exec.gathered import Pending
    from tpplan.exec.inflight import Inflight

#: On how many memories calls are remembered.
_KEPT = 1024


class Runner:
    """Runs the calls of a context.

    Servers use the same memory all the time, and so does torch's allocator where results are new tensors: what was
    found right about tensors holds of all others of their likeness, and what was worked out, too.
    """

    def __init__(self, backend: Backend, inflight: Inflight) -> None:
        """Start without anything that could come again.

        Args:
            backend: issues programs.
            inflight: host memory that devices may still be writing.
        """
        self._backend = backend
        self._inflight = inflight
        self._known: dict[object, Callable[[], Pending]] = {}

    def run(
        self, call: Call, inputs: tuple[Sequence[Tensor], ...], out: Sequence[Tensor] | None
    ) -> tuple[tuple[Tensor, ...], Pending | None]:
        """Issue a call.

        Args:
            call: of some operation.
            inputs: the tensors of each group.
            out: tensors to write to; new ones if not given.

        Returns:
            The outputs, and what is issued if there are any rows.

        Raises:
            ExecutionError: see :meth:`Call.admit`.
        """
        if out is None:
            out = call.new()
        likeness = call.likeness(inputs, out)
        issue = self._known.get(likeness)
        if issue is None:
            return self._run_first(call, inputs, out, likeness)
        if call.hosted:
            self._settle(call, (*chain.from_iterable(inputs), *out))
        return tuple(out), issue()

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()

    def _run_first(
        self, call: Call, inputs: tuple[Sequence[Tensor], ...], out: Sequence[Tensor], likeness: object
    ) -> tuple[tuple[Tensor, ...], Pending | None]:
        """Check the tensors of a call, and issue it."""
        tensors, is_dense = call.admit(inputs, out)
        self._settle(call, tensors)
        if call.program is None:
            return tuple(out), None
        operands = call.operands(tensors, is_dense=is_dense)
        issue = self._backend.bind(call.program, operands)
        if issue is None:
            return tuple(out), self._backend.run(call.program, operands)
        if is_dense and likeness is not None:  # of others there may be copies
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[likeness] = issue
        return tuple(out), issue()

    def _settle(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Wait for whatever writes to tensors in host memory."""
        for i in call.hosted:
            self._inflight.settle(tensors[i])
