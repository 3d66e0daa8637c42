"""The context of a compiled plan: its operations."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product
from typing import TYPE_CHECKING, Self

import torch

from tpplan.exec.arguments import whole
from tpplan.exec.calls import Calls
from tpplan.exec.context_memory import ContextMemory
from tpplan.exec.explain import explain
from tpplan.exec.gathered import Gathered
from tpplan.exec.programs.program import HOST
from tpplan.exec.resolver import Resolver
from tpplan.exec.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from torch import Tensor

    from tpplan.axes import Axis
    from tpplan.exec.aside import Aside
    from tpplan.exec.device import DeviceContext
    from tpplan.exec.engine import Engine
    from tpplan.exec.explain import Explanation
    from tpplan.exec.gpu.channel import Channel
    from tpplan.exec.gpu.graph import Graph
    from tpplan.exec.host import HostMemory
    from tpplan.plan import SplitPlan


class TPContext(ContextMemory):
    """A plan, compiled: every operation that moves data between the plan's devices.

    Devices are named by their index in the plan. Tensors have the shape ``[..., columns]``; all dimensions but the last
    together are the rows (tokens), 0 to ``max_rows``. An operation on an axis takes or returns one tensor for each
    device that holds a part of the axis, in device order (:meth:`devices_of`); ``axis=None`` stands for all devices in
    use. A part has the columns of the device's slice, times ``dim`` (such as the head size). ``layer`` is needed only
    where the plan cuts layers differently.

    Ordering: an operation reads its operands after what the caller's current streams on their devices hold at the time
    of the call, and these streams go on after its results. So a result may be used, and an operand overwritten, right
    away. Results are new tensors that no later call writes, unless the caller passes ``out``. No call changes the
    current device or stream. Everything is checked before anything moves: an error leaves all tensors as they were.

    A context serves one thread at a time and says so to others. Leaving it as a context manager closes it.

    Attributes:
        plan: what was compiled.
        devices: what the context has on each device in use.
        all_devices: the devices in use, ascending.
        max_rows: most rows of an operand.
        dtype: of the activations, for scratch and RoPE tables; operations take any dtype.
    """

    def __init__(
        self,
        plan: SplitPlan,
        devices: Sequence[DeviceContext],
        host: HostMemory,
        engine: Engine,
        *,
        max_rows: int,
        dtype: torch.dtype,
    ) -> None:
        """Take over everything that :func:`tpplan.exec.compile` has made."""
        super().__init__(plan, devices, host, dtype)
        self.max_rows = max_rows
        self._engine = engine
        places = {d.index: d.device for d in devices}
        places[HOST] = torch.device("cpu")
        resolvers = {
            (captured, aside): Resolver(self._cuts, Calls(engine, places, max_rows, captured=captured, aside=aside))
            for captured, aside in product((False, True), repeat=2)
        }
        self._runner = Runner(engine.backend, self._inflight, resolvers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._guard.closed else f"{len(self.devices)} devices"
        return f"<TPContext {self.plan.model.name}, {state}>"

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
            axis: whose devices get a copy.
            layer: whose cut is meant.
            source: the device that ``x`` is on, or HOST; needed only where its torch device does not tell: virtual
                devices share the CPU, and ``x`` counts as the first one's.
            out: tensors like the results, to write to instead of new ones.

        Returns:
            A tensor like ``x`` on each of the devices, also on the one that ``x`` is on.

        Raises:
            ExecutionError: an operand of the wrong kind, shape, dtype, device or number, or a closed context.
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
        """Copy to every device its slice of the columns of ``x``.

        Args:
            x: ``[..., size of the axis × dim]``; for dtype and place see :meth:`broadcast`.
            axis: that cuts the columns.
            dim: columns per element of the axis.
            layer: whose cut is meant.
            source: see :meth:`broadcast`.
            out: tensors like the results, to write to instead of new ones.

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
        """Copy the parts of all devices into one tensor in host memory, without waiting for it.

        Args:
            parts: ``[..., elements × dim]`` from each device that holds elements of the axis.
            axis: that cuts the columns.
            dim: columns per element of the axis.
            layer: whose cut is meant.
            out: ``[..., size of the axis × dim]`` in host memory, to write to; not to be read before the result is.

        Returns:
            A handle; its ``tensor``, ``[..., size of the axis × dim]``, waits until it is complete.

        Raises:
            ExecutionError: see :meth:`broadcast`.
        """
        with self._guard:
            outputs = None if out is None else (out,)
            (whole,), pending = self._runner.run("gather", (axis, dim, layer), (parts,), outputs)
            if pending is not None:
                self._inflight.add(whole, pending)
            return Gathered(whole, pending)

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
        """Copy the parts of all devices into one tensor on every device that holds a part of ``to``.

        Args:
            parts: ``[..., elements × dim]`` from each device that holds elements of ``axis``.
            axis: that cuts the columns.
            to: whose devices get the whole.
            dim: columns per element of ``axis``.
            layer: whose cuts are meant.
            out: tensors like the results, to write to instead of new ones.

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
        """Add up the parts of all devices, and a residual, on every device in use.

        The parts are added in float32 in device order, then the residual, and the sum is rounded once: all devices
        hold the same bits, and the same as on one device.

        Args:
            parts: ``[..., columns]`` in float16, bfloat16 or float32 from each device that holds elements of ``axis``.
            residual: tensors like the parts, one on each device in use, all with the same contents.
            axis: whose devices have parts.
            layer: whose cut is meant.
            out: tensors like the results, to write to instead of new ones; may be parts or residuals themselves.

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
        """Add to every target, in place, the columns of its source that belong to the device's slice.

        Args:
            target: ``[..., elements × dim]`` in float16, bfloat16 or float32, on each device that holds elements.
            source: on each of them ``[..., size of the axis × dim]``, of which the slice is taken, or the slice.
            axis: that cuts the columns.
            dim: columns per element of the axis.
            layer: whose cut is meant.

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

    @property
    def transport(self) -> str:
        """By which means devices talk to each other: ``peer``, ``host`` or ``events``."""
        return self._engine.transport

    def explain(self) -> Explanation:
        """Return how each operation goes on each axis, for how many rows, and why; ``str()`` makes a table of it."""
        with self._guard:
            return explain(self.plan, self.all_devices, self._engine, self.max_rows, self.dtype)

    def channel(self, elements: int) -> Channel | None:
        """Return what kernels of the caller's add up by while they compute, instead of ``all_reduce`` behind them.

        Args:
            elements: most of a sum: rows × columns.

        Returns:
            One that all devices in use take part in, the same for the same number of elements; None where a kernel
            cannot write to other devices, as on virtual ones, or there is a single device.

        Raises:
            ExecutionError: this is no whole number from 1, the context is closed, or is being captured and was not
                asked for it before.
        """
        with self._guard:
            whole("channel: elements", elements, 1)
            return self._engine.backend.channel(elements)

    def aside(self) -> Aside:
        """Let a ``with`` block issue operations beside what the devices compute meanwhile.

        The block has second streams of all devices as current ones, which begin behind what the current ones hold:
        ``with ctx.aside() as aside: ctx.all_reduce(parts, out=sums)``. What is issued after the block does not wait
        for it until ``aside.wait()``. Up to then, keep the tensors that it reads and writes, or torch would give their
        memory to others; pass ``out``, for new tensors belong to the second streams. In a graph, wait before that ends.
        What no slot takes is left to copy engines where there is room, and other kernels keep their multiprocessors.
        """
        with self._guard:
            return self._engine.backend.aside()

    def capture(self) -> Graph:
        """Capture operations, and the caller's own torch work on all devices, into one CUDA graph.

        ``with ctx.capture() as graph:`` records what the block issues; ``graph.replay()`` runs it. Run everything once
        before; inputs and outputs keep their addresses, so write new inputs into the old tensors. What the host takes
        part in cannot be captured: gather, and operations on tensors in host memory.

        Raises:
            ExecutionError: the context is on virtual devices.
        """
        with self._guard:
            return self._engine.backend.capture()

    def synchronize(self) -> None:
        """Return when everything that was issued is complete."""
        with self._guard:
            self._engine.backend.synchronize()

    def close(self) -> None:
        """Wait for everything, and give all memory back, also if something has failed; closing again does nothing.

        Raises:
            ExecutionError: a device waited in vain, or the call comes from inside an operation.
        """
        if self._guard.close():
            with ExitStack() as stack:
                for device in self.devices.values():
                    stack.callback(device.close)
                stack.callback(self._host.close)
                stack.callback(self._inflight.clear)
                stack.callback(self._runner.clear)
                stack.callback(self._engine.backend.close)
                self._engine.backend.synchronize()
