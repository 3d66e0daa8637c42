"""The context of a compiled plan, with its communication operations."""

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
from tpplan.exec.programs.lower import Mode
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
    """A compiled plan: the operations that move data between its devices.

    Devices are named by their index in the plan. Tensors have the shape ``[..., columns]``; all dimensions but the last
    are flattened into rows (tokens), 0 to ``max_rows``. An operation on an axis takes or returns one tensor for each
    device that holds a part of the axis, in device order (:meth:`devices_of`). ``axis=None`` means all devices in use.
    A part has as many columns as the device's slice has elements, times ``dim`` (such as the head size). ``layer`` is
    needed only where the plan cuts layers differently.

    Ordering: an operation runs after the work already queued on the caller's current streams of its devices, and later
    work on these streams runs after the operation. So results can be used, and operands overwritten, right away.
    Results are new tensors that no later call writes, unless the caller passes ``out``. No call changes the current
    device or stream. All arguments are checked before any data moves: an error leaves every tensor unchanged.

    Only one thread at a time may use a context; a call from a second one meanwhile raises an error. As a context
    manager, it closes on exit.

    Attributes:
        plan: the compiled plan.
        devices: a DeviceContext for each device in use, by index.
        all_devices: indices of the devices in use, ascending.
        max_rows: maximum rows of an operand.
        dtype: dtype of the activations, used for scratch and RoPE tables; operations take any dtype.
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
        """Take ownership of everything that :func:`tpplan.exec.compile` has made."""
        super().__init__(plan, devices, host, dtype)
        self.max_rows = max_rows
        self._engine = engine
        places = {d.index: d.device for d in devices}
        places[HOST] = torch.device("cpu")
        resolvers = {
            (captured, aside): Resolver(self._cuts, Calls(engine, places, max_rows, Mode(captured, aside)))
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
            axis: the axis whose devices get a copy; None for all devices in use.
            layer: the layer whose cut to use.
            source: the device that ``x`` is on, or HOST. Needed only where the torch device is ambiguous: virtual
                devices share the CPU, and by default ``x`` counts as on the first one.
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
            out: preallocated tensors for the results.

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
            out: preallocated tensors for the results; may be the parts or residuals themselves.

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

    @property
    def transport(self) -> str:
        """The transport between the devices: ``peer``, ``host`` or ``events``."""
        return self._engine.transport

    def explain(self) -> Explanation:
        """Return which path each operation takes on each axis at each row count, and why; ``str()`` gives a table."""
        with self._guard:
            return explain(self.plan, self.all_devices, self._engine, self.max_rows, self.dtype)

    def channel(self, elements: int) -> Channel | None:
        """Return a channel, by which the caller's own kernels sum across devices without a separate ``all_reduce``.

        Args:
            elements: maximum elements of a sum (rows × columns).

        Returns:
            A channel between all devices in use, the same one for the same ``elements``. None if kernels cannot write
            to other devices' memory, as on virtual devices, or if there is only one device.

        Raises:
            ExecutionError: ``elements`` is not a positive integer, the context is closed, or a capture is running and
                this channel was not created before it.
        """
        with self._guard:
            whole("channel: elements", elements, 1)
            return self._engine.backend.channel(elements)

    def aside(self) -> Aside:
        """Return a context manager whose block runs operations concurrently with other work on the devices.

        Inside ``with ctx.aside() as aside: ctx.all_reduce(parts, out=sums)``, side streams are current on all devices.
        They start after the work already queued on the current streams. Work issued after the block does not wait for
        it until ``aside.wait()``. Until then, keep references to the tensors that the block reads and writes, or torch
        may reuse their memory. Pass ``out``, as new tensors belong to the side streams. Inside a captured graph, wait
        before the capture ends. Messages too large for a slot go by copy engine where there is room, which leaves the
        multiprocessors to other kernels.
        """
        with self._guard:
            return self._engine.backend.aside()

    def capture(self) -> Graph:
        """Capture operations, and the caller's own torch work on all devices, into one CUDA graph.

        ``with ctx.capture() as graph:`` records the work of the block; ``graph.replay()`` runs it. Run the same work
        once before capturing. Inputs and outputs keep their addresses, so copy new inputs into the captured tensors.
        Work that involves the host cannot be captured: gather, and operations on tensors in host memory.

        Raises:
            ExecutionError: the context is on virtual devices.
        """
        with self._guard:
            return self._engine.backend.capture()

    def synchronize(self) -> None:
        """Wait until all issued operations are complete."""
        with self._guard:
            self._engine.backend.synchronize()

    def close(self) -> None:
        """Wait for all operations and free all memory, even after a failure; closing twice does nothing.

        Raises:
            ExecutionError: a device timed out waiting for another, or the call comes from inside an operation.
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
