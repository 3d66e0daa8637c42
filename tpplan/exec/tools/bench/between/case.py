"""An operation between processes on some rows, with operands whose results are known, and who runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

#: Operations that are timed.
OPERATIONS: Final = ("broadcast", "scatter", "allgather", "all_reduce", "all_reduce with residual")
#: Operands are whole numbers up to this, so that sums of 64 processes are exact in bfloat16, in any order.
_MOST: Final = 4


class Case:
    """An operation on so many rows, and what comes of it by whole numbers on the CPU.

    Attributes:
        operation: one of :data:`OPERATIONS`.
        rows: number of rows of its tensors.
        widths: columns of each process: those that it has of an allgather and gets of a scatter.
        process: this one.
        dtype: of the elements.
        given: this process's operand in host memory; None for a process that only receives.
        residual: on this process's device, zeros until :meth:`refill`; None for operations without.
    """

    def __init__(
        self,
        operation: str,
        rows: int,
        widths: Sequence[int],
        process: int,
        *,
        place: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Make the operands and the result."""
        self.operation, self.rows, self.widths, self.process = operation, rows, tuple(widths), process
        self.dtype = dtype
        self._count = count = len(widths)
        self.residual: Tensor | None = None
        noise = [self._noise(seed) for seed in range(count if operation.startswith("all_reduce") else 1)]
        self._result = noise[0].short()
        self.given: Tensor | None
        if operation == "all_reduce":
            self.given, self._result = noise[process], sum(noise[1:], noise[0].short())
        elif operation == "all_reduce with residual":  # the sum of results and residual is the result again
            self.given = noise[process] if process else count * self._result - sum(noise[1:], 0 * self._result)
            self._more = (1 - count) * self._result
            self.residual = torch.zeros(rows, sum(widths), dtype=dtype, device=place)
        elif operation == "allgather":
            self.given = noise[0][:, self.columns()]
        else:
            self.given = None if process else noise[0]
            if operation == "scatter":
                self._result = self._result[:, self.columns()]

    def refill(self) -> None:
        """Fill the residual, which timing leaves at zero."""
        if self.residual is not None:
            self.residual.copy_(self._more)

    def expected(self, times: int) -> Tensor:
        """Return the result in host memory, of so many calls of which each but the first adds up the results before.

        Beyond the dtype's range it is infinite, as it is in the processes.
        """
        factor = float(self._count) ** (times - 1) if self.operation == "all_reduce" else 1.0
        return (self._result.double() * factor).to(self.dtype)

    def slack(self, times: int) -> float:
        """Return how far off each element may be after as many calls, as a share of it.

        Sums of sums grow by the number of processes. If that is no power of two, they are rounded.
        """
        is_exact = self.operation != "all_reduce" or self._count & (self._count - 1) == 0
        return 0.0 if is_exact else (times - 1) * self._count * torch.finfo(self.dtype).eps

    def assembled(self, gathered: Tensor) -> Tensor:
        """Return the rows whose parts a collective has put one behind the other, all as wide as the widest."""
        parts = gathered.view(self._count, self.rows, max(self.widths))
        return torch.cat([part[:, :width] for part, width in zip(parts, self.widths, strict=True)], 1)

    def cut(self, whole: Tensor) -> Tensor:
        """Return the parts of rows as :meth:`assembled` takes them."""
        parts = torch.split_with_sizes(whole, list(self.widths), 1)
        return torch.cat([functional.pad(part, (0, max(self.widths) - part.shape[1])) for part in parts])

    def columns(self) -> slice:
        """Return which columns are this process's part."""
        ends = [*accumulate(self.widths)]
        return slice(ends[self.process] - self.widths[self.process], ends[self.process])

    def _noise(self, seed: int) -> Tensor:
        size = (self.rows, sum(self.widths))
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-_MOST, _MOST + 1, size, generator=generator, dtype=torch.int8)


@frozen(kw_only=True, eq=False)
class Contender:
    """An implementation of a case in this process.

    Attributes:
        who: name of the implementation.
        operand: the tensor whose first columns this process fills before a call.
        call: runs the operation, and returns the tensor that it wrote.
        in_place: whether that tensor is the operand.
        arrange: makes rows of the tensor that was written, as the case expects them.
        lay: makes of the case's operand what the first columns of this one's are.
    """

    who: str
    operand: Tensor
    call: Callable[[], Tensor]
    in_place: bool = False
    arrange: Callable[[Tensor], Tensor] = lambda written: written
    lay: Callable[[Tensor], Tensor] = lambda given: given

    def check(self, case: Case, run: Callable[[], Tensor], times: int, wait: Callable[[], None]) -> None:
        """Run twice, the second time on the case's operands and on spoiled results, and check what comes of it.

        Args:
            case: that it is an implementation of.
            run: runs it so many times in a row, and returns the tensor that was written.
            times: calls of it in a run.
            wait: waits for all processes, and for their devices.

        Raises:
            ValueError: the result is wrong.
        """
        run().fill_(float("nan"))
        case.refill()
        if case.given is not None:
            given = self.lay(case.given)
            self.operand[:, : given.shape[1]].copy_(given)
        wait()
        found = self.arrange(run()).cpu()
        times = times if self.in_place else 1
        right = case.expected(times)
        near = (found.double() - right.double()).abs() <= case.slack(times) * right.double().abs()
        wrong = int((~near & (found != right)).sum())
        self.operand.zero_()
        if case.residual is not None:
            case.residual.zero_()
        if wrong:
            message = f"{wrong} of {right.numel()} elements are wrong"
            raise ValueError(message)
