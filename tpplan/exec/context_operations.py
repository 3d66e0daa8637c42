"""The operations of a context: they move data between its devices, or add it up."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch

from tpplan.exec.calls.call import Calls
from tpplan.exec.calls.repeat import Runner
from tpplan.exec.calls.resolve import Resolver
from tpplan.exec.context_memory import ContextMemory
from tpplan.exec.handles import Gathered
from tpplan.exec.programs.lower import Mode
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpplan.core.axes import Axis
    from tpplan.core.plan import SplitPlan
    from tpplan.exec.backends.engine import Engine
    from tpplan.exec.group.meeting import Meeting
    from tpplan.exec.memory.device import DeviceContext
    from tpplan.exec.memory.host import HostMemory


class ContextOperations(ContextMemory):
    """The operations of a compiled plan; :class:`tpplan.exec.context.TPContext` says what they have in common.

    Attributes:
        max_rows: maximum rows of an operand.
    """

    def __init__(
        self,
        plan: SplitPlan,
        places: Mapping[int, torch.device],
        devices: Sequence[DeviceContext],
        host: HostMemory,
        engine: Engine,
        *,
        max_rows: int,
        dtype: torch.dtype,
        meeting: Meeting | None = None,
    ) -> None:
        """Take ownership of everything that :func:`tpplan.exec.compile` has made.

        Args:
            plan: the compiled plan.
            places: torch device of each device in use; ``meta`` for those of other processes.
            devices: the devices in use that this process owns.
            host: host memory.
            engine: runs the operations.
            max_rows: maximum rows of an operand.
            dtype: dtype of the activations.
            meeting: the processes that the devices belong to, if there are several.
        """
        super().__init__(plan, places, devices, host, dtype)
        self.max_rows = max_rows
        self._engine = engine
        self._meeting = meeting
        everywhere = {**places, HOST: torch.device("cpu")}
        resolvers = {
            (captured, aside): Resolver(self._cuts, Calls(engine, everywhere, max_rows, Mode(captured, aside)))
            for captured, aside in product((False, True), repeat=2)
        }
        self._runner = Runner(engine.backend, self._inflight, resolvers)

    def broadcast(
        self,
        x: Tensor,
        axis: Axis | str | None = None,
        *,
        layer: int | None = None,
        source: int | None = None,
        out: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Copy ``x`` to every device that holds a part of ``axis``.

        Args:
            x: ``[..., columns]``, any dtype of 1, 2, 4 or 8 bytes; on one of the devices or in host memory.
            axis: the axis whose devices get a copy; None for all devices in use.
            layer: the layer whose cut to use.
            source: the device that ``x`` is on, or HOST. Needed only where the torch device is ambiguous: virtual
                devices share the CPU, and by default ``x`` counts as on the first one. Also needed between processes,
                where those that do not own the source pass a tensor on ``meta``.
            out: preallocated tensors for the results.

        Returns:
            A tensor like ``x`` on each of the devices, including the one that ``x`` is on.

        Raises:
            ExecutionError: an operand has the wrong type, shape, dtype or device, there are too many or too few, or the
                context is closed.
        """
        return self._run("broadcast", (axis, layer, source), ((x,),), out)

    def scatter(
        self,
        x: Tensor,
        axis: Axis | str,
        *,
        dim: int = 1,
        layer: int | None = None,
        source: int | None = None,
        out: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Copy to each device its slice of the columns of ``x``.

        Args:
            x: ``[..., size of the axis × dim]``; for dtype and device see :meth:`broadcast`.
            axis: the axis by which the columns are cut.
            dim: columns per element of the axis.
            layer: the layer whose cut to use.
            source: see :meth:`broadcast`.
            out: preallocated tensors for the results.

        Returns:
            ``[..., elements × dim]`` on each device that holds elements of the axis.

        Raises:
            ExecutionError: see :meth:`broadcast`.
        """
        return self._run("scatter", (axis, dim, layer, source), ((x,),), out)

    def gather(
        self,
        parts: Sequence[Tensor],
        axis: Axis | str,
        *,
        dim: int = 1,
        layer: int | None = None,
        out: Tensor | None = None,
    ) -> Gathered:
        """Concatenate the parts of all devices into one tensor in host memory, asynchronously.

        Args:
            parts: ``[..., elements × dim]`` from each device that holds elements of the axis.
            axis: the axis by which the columns are cut.
            dim: columns per element of the axis.
            layer: the layer whose cut to use.
            out: preallocated ``[..., size of the axis × dim]`` in host memory; read it only when the handle is done.
                Needed in a process that has no part.

        Returns:
            A handle; its ``tensor``, ``[..., size of the axis × dim]``, blocks until it is complete.

        Raises:
            ExecutionError: see :meth:`broadcast`.
        """
        with self._guard:
            outputs = None if out is None else (out,)
            (tensor,), pending = self._runner.run("gather", (axis, dim, layer), (parts,), outputs)
            if pending is not None:
                self._inflight.add(tensor, pending)
            return Gathered(tensor, pending)

    def allgather(
        self,
        parts: Sequence[Tensor],
        axis: Axis | str,
        to: Axis | str | None = None,
        *,
        dim: int = 1,
        layer: int | None = None,
        out: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Concatenate the parts of all devices into one tensor on every device that holds a part of ``to``.

        Args:
            parts: ``[..., elements × dim]`` from each device that holds elements of ``axis``.
            axis: the axis by which the columns are cut.
            to: the axis whose devices get the result; None for all devices in use.
            dim: columns per element of ``axis``.
            layer: the layer whose cuts to use.
            out: preallocated tensors for the results; needed in a process that gets results but has no part.

        Returns:
            ``[..., size of the axis × dim]`` on each device of ``to``.

        Raises:
            ExecutionError: see :meth:`broadcast`.
        """
        return self._run("allgather", (axis, to, dim, layer), (parts,), out)

    def all_reduce(
        self,
        parts: Sequence[Tensor],
        residual: Sequence[Tensor] | None = None,
        *,
        axis: Axis | str | None = None,
        layer: int | None = None,
        out: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Sum the parts of all devices, and optionally a residual, on every device in use.

        The parts are added in float32 in device order, then the residual, and the sum is rounded once. So the result
        is bitwise equal on all devices, and equal to that on one device.

        Args:
            parts: ``[..., columns]`` in float16, bfloat16 or float32 from each device that holds elements of ``axis``.
            residual: tensors like the parts, one on each device in use, all with the same values.
            axis: the axis whose devices have parts; None for all devices in use.
            layer: the layer whose cut to use.
            out: preallocated tensors for the results; may be the parts or residuals themselves. Needed, unless there
                are residuals, in a process that has no part.

        Returns:
            ``[..., columns]`` on each device in use.

        Raises:
            ExecutionError: see :meth:`broadcast`.
        """
        inputs = (parts,) if residual is None else (parts, residual)
        return self._run("all_reduce", (axis, layer), inputs, out)

    def add_residual(
        self,
        target: Sequence[Tensor],
        source: Sequence[Tensor],
        axis: Axis | str,
        *,
        dim: int = 1,
        layer: int | None = None,
    ) -> None:
        """Add to each target, in place, the device's slice of the columns of its source.

        Args:
            target: ``[..., elements × dim]`` in float16, bfloat16 or float32, on each device that holds elements.
            source: on each of these devices either the whole ``[..., size of the axis × dim]`` or just the slice.
            axis: the axis by which the columns are cut.
            dim: columns per element of the axis.
            layer: the layer whose cut to use.

        Raises:
            ExecutionError: see :meth:`broadcast`.
        """
        self._run("add_residual", (axis, dim, layer), (source,), target)

    def _run(
        self,
        name: str,
        asked: tuple[object, ...],
        inputs: tuple[Sequence[Tensor], ...],
        out: Sequence[Tensor] | None,
    ) -> tuple[Tensor, ...]:
        """Run an operation and return its outputs; see :meth:`Runner.run`."""
        with self._guard:
            outputs, _ = self._runner.run(name, asked, inputs, out)
            return outputs
