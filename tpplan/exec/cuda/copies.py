"""Copies by copy engines and by the host, prepared so that each costs the host little more than the driver's call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.errors import ExecutionError
from tpplan.exec.memory.binding import finder, resolve
from tpplan.exec.toolchain.bindings import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.programs.program import Buffer, Copy

_SUCCESS = runtime.cudaError_t.cudaSuccess
#: The driver tells from the addresses which memory they are in.
_ANY = runtime.cudaMemcpyKind.cudaMemcpyDefault


class Transfer:
    """A copy by a copy engine, within a memory or between two."""

    def __init__(self, step: Copy, memory: Memory, dtype: torch.dtype) -> None:
        """Prepare everything that does not depend on the operands.

        Args:
            step: the program's copy.
            memory: the context's memory.
            dtype: dtype of the operands.
        """
        self._step = step
        self._target, self._source = (finder(view, memory, dtype.itemsize) for view in (step.target, step.source))
        self._width = (step.target.stop - step.target.start) * dtype.itemsize

    def bind(self, operands: Mapping[Buffer, Tensor], rows: int) -> Callable[[int], None]:
        """Return a callable that copies on a given stream any number of times.

        Args:
            operands: the caller's tensors, ``[rows, columns]`` each, with contiguous columns; only their addresses are
                kept.
            rows: rows of each tensor.
        """
        width = self._width
        target, step, count = self._target(operands, rows)
        source, source_step, _ = self._source(operands, rows)
        size = count * width
        if not size:
            return lambda _: None
        if count == 1 or (step == width and source_step == width):
            return self._copying(runtime.cudaMemcpyAsync, target, source, size, _ANY)
        if source_step >= width:
            return self._copying(runtime.cudaMemcpy2DAsync, target, step, source, source_step, width, count, _ANY)
        # overlapping rows, such as those of an expanded tensor, which a copy engine refuses
        each = [
            self._copying(runtime.cudaMemcpyAsync, target + i * step, source + i * source_step, width, _ANY)
            for i in range(count)
        ]

        def copy_rows(stream: int) -> None:
            for copy in each:
                copy(stream)

        return copy_rows

    def _copying(self, function: Callable[..., tuple[Any]], *arguments: Any) -> Callable[[int], None]:
        """Return a callable that calls the runtime; if the stream is a default one, its device must be current."""

        def copy(stream: int) -> None:
            (error,) = function(*arguments, stream)
            if error != _SUCCESS:
                message = f"the copy {self._step} failed: {error.name}"
                raise ExecutionError(message, "earlier work on these devices may have failed")

        return copy


class HostCopy:
    """A copy within host memory by the host, complete before the next command is issued."""

    def __init__(self, step: Copy, memory: Memory, dtype: torch.dtype) -> None:
        """Take the arguments of :class:`Transfer`."""
        self._views = step.target, step.source
        self._memory = memory
        self._dtype = dtype

    def bind(self, operands: Mapping[Buffer, Tensor], rows: int) -> Callable[[int], None]:
        """Return a callable that copies; it keeps the tensors alive."""
        target, source = (resolve(view, operands, self._memory, rows, self._dtype) for view in self._views)

        def copy(_: int) -> None:
            target.copy_(source)

        return copy
