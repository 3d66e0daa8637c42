"""The context of a compiled plan: memory and operations, also beside other work and in graphs, until it is closed.

``Guard`` keeps it from use by several threads at once, and from use after close.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from itertools import product
from sys import _current_frames, _getframe
from threading import get_ident
from typing import TYPE_CHECKING, Self, TypeVar

import torch

from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec.calls.call import Calls
from tpplan.exec.calls.repeat import Inflight, Runner
from tpplan.exec.calls.resolve import Resolver
from tpplan.exec.calls.slices import Cuts
from tpplan.exec.checks import check_copied, check_dtype, check_kind, check_stored, check_type, share_bytes, whole
from tpplan.exec.explain import explain
from tpplan.exec.group.telling import Alone
from tpplan.exec.handles import Gathered
from tpplan.exec.programs.lower import Mode
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType, FrameType, TracebackType

    from torch import Tensor

    from tpplan.core.axes import Slice
    from tpplan.core.plan import SplitPlan
    from tpplan.exec.backends.engine import Engine
    from tpplan.exec.cuda.channel import Channel
    from tpplan.exec.cuda.graph import Graph
    from tpplan.exec.explain import Explanation
    from tpplan.exec.group.meeting import Meeting
    from tpplan.exec.handles import Aside
    from tpplan.exec.memory.device import DeviceContext
    from tpplan.exec.memory.host import HostMemory
    from tpplan.exec.rope.tables import Rope

    #: A place in the queue: an object of its own, the thread, and the code of the function that uses the context.
    _Turn = tuple[object, int, CodeType]


#: Seconds between two looks whether another thread's operation has ended.
_LOOK_SECONDS = 5e-4
_GENERATOR = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_Data = TypeVar("_Data")


class TPContext:
    """A compiled plan: the operations that move data between its devices.

    Devices are named by their index in the plan. Tensors have the shape ``[..., columns]``; all dimensions but the last
    are flattened into rows (tokens), 0 to ``max_rows``. An operation on an axis takes or returns one tensor for each
    device that holds a part of the axis, in device order (:meth:`devices_of`). ``axis=None`` means all devices in use.
    A part has as many columns as the device's slice has elements, times ``dim`` (such as the head size). ``layer`` is
    needed only where the plan cuts layers differently.

    If the plan's devices belong to several processes, an operation takes and returns the tensors of this process's
    devices only, and all processes call the same operations in the same order. Host memory is each process's own: what
    comes from it has to be the same in all, and what goes there arrives in all.

    Ordering: an operation runs after the work already queued on the caller's current streams of its devices, and later
    work on these streams runs after the operation. So results can be used, and operands overwritten, right away.
    Results are new tensors that no later call writes, unless the caller passes ``out``. No call changes the current
    device or stream. All arguments are checked before any data moves: an error leaves every tensor unchanged.

    Only one thread at a time may use a context; a call from a second one meanwhile raises an error. As a context
    manager, it closes on exit.

    Attributes:
        plan: the compiled plan.
        devices: a DeviceContext for each device in use that this process owns, by index, ascending.
        all_devices: indices of the devices in use, those of other processes too, ascending.
        max_rows: maximum rows of an operand.
        dtype: dtype of the activations, used for scratch and RoPE tables; operations take any dtype.
    """

    _has_waited = False  # for the end of all operations, before everything was released

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
        self.plan = plan
        self.devices: Mapping[int, DeviceContext] = {device.index: device for device in devices}
        self.all_devices = tuple(places)
        self.max_rows = max_rows
        self.dtype = dtype
        self._host = host
        self._engine = engine
        self._meeting = meeting
        self._guard = Guard()
        self._inflight = Inflight()
        self._cuts = Cuts(plan, self.all_devices, tuple(self.devices))
        everywhere = {**places, HOST: torch.device("cpu")}
        resolvers = {
            (captured, aside): Resolver(self._cuts, Calls(engine, everywhere, max_rows, Mode(captured, aside)))
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

    @property
    def transport(self) -> str:
        """The transport between the devices: ``peer``, ``host`` or ``events``."""
        return self._engine.transport

    @property
    def process(self) -> int:
        """Index of this process among those that the plan's devices belong to; 0 if there is only one."""
        return self._meeting.process if self._meeting else 0

    @property
    def processes(self) -> int:
        """Number of processes that the plan's devices belong to."""
        return self._meeting.count if self._meeting else 1

    @property
    def can_capture(self) -> bool:
        """Whether :meth:`capture` captures: on GPUs, unless torch.distributed carries all messages of processes."""
        on_gpus = any(device.device.type == "cuda" for device in self.devices.values())
        return on_gpus and (self._meeting is None or self.transport == "peer")

    def split(self, axis: Axis | str, layer: int | None = None) -> tuple[Slice, ...]:
        """Return the slice, in elements, of each device of this process that holds a part of ``axis``.

        Works on a closed context too.

        Raises:
            RequestError: the plan has no such axis or layer, or layers cut the axis differently and none was given.
        """
        return self._cuts.own_split(axis, layer)

    def devices_of(self, axis: Axis | str | None, layer: int | None = None) -> tuple[int, ...]:
        """Return this process's devices that hold a part of ``axis``, ascending; for None, all of its devices in use.

        Works on a closed context too.

        Raises:
            RequestError: see :meth:`split`.
        """
        return tuple(self._cuts.own_of(self._cuts.devices_of(axis, layer)))

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

    def tell(self, mine: _Data) -> list[_Data]:
        """Tell all processes something, and return what each of them has told; all call it at the same time.

        It waits for all, as long as torch.distributed does, and so also makes up for steps that took one of them longer
        than kernels wait. It passes through host memory: use it for prompts or settings, not for activations. Nothing
        that arrives is run: bytes that are no plain data are an error.

        Args:
            mine: plain data of at most 16 MiB: None, bool, int, float, str, bytes, and lists, tuples and dictionaries
                of these.

        Raises:
            ExecutionError: torch.distributed failed, as when a process has ended; a process told no plain data or has
                another version of tpplan; or the context is closed.
        """
        with self._guard:
            return (self._meeting or Alone()).tell(mine)

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
            to other devices' memory, as on virtual devices, if there is only one device, or if there are several
            processes.

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

        Each process captures its own, of its GPU, and all of them replay theirs.

        ``with ctx.capture() as graph:`` records the work of the block; ``graph.replay()`` runs it. Run the same work
        once before capturing. Inputs and outputs keep their addresses, so copy new inputs into the captured tensors.
        Work that involves the host cannot be captured: gather, and operations on tensors in host memory.

        Raises:
            ExecutionError: the context is on virtual devices, or torch.distributed carries all messages between its
                processes.
        """
        with self._guard:
            return self._engine.backend.capture()

    def copy_pinned(self, buffer: int, x: Tensor) -> Tensor:
        """Copy a tensor into one of the two host buffers, synchronously.

        Args:
            buffer: 0 or 1.
            x: a tensor of any shape, on any device; it may itself be a view of the buffers.

        Returns:
            The copy: a view of the buffer, valid until the buffer is used again.

        Raises:
            ExecutionError: there is no such buffer, it is too small, or the tensor has no values that can be copied.
        """
        with self._guard:
            check_kind("copy_pinned: x", x)
            check_copied("copy_pinned: x", x.dtype)
            if x.is_meta:
                raise ExecutionError(
                    "copy_pinned: x is on meta, where tensors have no values", "copy one that has some"
                )
            check_stored("copy_pinned: x", x)
            view = self._host.buffer(buffer, x.shape, x.dtype)
            values = x.detach()
            self._inflight.settle(view)
            if values.device.type == "cpu":
                self._inflight.settle(values)
            view.copy_(values.clone() if share_bytes(values, view) else values)
            return view

    def get_pinned(self, buffer: int, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return a view of one of the two host buffers, which are pinned on CUDA; waits for gathers that write it.

        Args:
            buffer: 0 or 1.
            shape: shape of the tensor, such as ``batch, query length, columns``, as integers or as one tuple.
            dtype: dtype of the tensor; that of the activations by default.

        Raises:
            ExecutionError: there is no such buffer, it is too small, a size is not a non-negative integer, or
                ``dtype`` is not a dtype.
        """
        with self._guard:
            dtype = self.dtype if dtype is None else dtype
            check_dtype("get_pinned: dtype", dtype)
            sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
            checked = [whole(f"get_pinned: shape[{i}]", size) for i, size in enumerate(sizes)]
            view = self._host.buffer(buffer, checked, dtype)
            self._inflight.settle(view)
            return view

    def begin_scratch(self) -> None:
        """Free the scratch of all devices: slices handed out from now on may alias earlier ones."""
        with self._guard:
            for device in self.devices.values():
                device.begin_scratch()

    def scratch(
        self,
        rows: int,
        axis: Axis | str,
        *,
        dim: int = 1,
        dtype: torch.dtype | None = None,
        layer: int | None = None,
        full: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return uninitialised scratch tensors, valid until :meth:`begin_scratch`; useful as ``out`` of an operation.

        Args:
            rows: tokens.
            axis: the axis whose devices get a tensor.
            dim: columns per element.
            dtype: dtype of the tensors; that of the activations by default.
            layer: the layer whose cut to use.
            full: make every tensor as wide as the whole axis, instead of as its device's slice.

        Returns:
            ``[rows, elements × dim]`` on each device that holds elements of the axis.

        Raises:
            ExecutionError: a device has too little room, a size is not an integer, or ``dtype`` is not a dtype; no
                scratch is taken on any device then.
        """
        with self._guard:
            slices = self._cuts.columns("scratch", axis, layer, dim)
            dtype, width = self.dtype if dtype is None else dtype, slices[-1][2]
            wanted = [
                (self.devices[device], width if full else stop - start)
                for device, start, stop in slices
                if device in self.devices
            ]
            for device, columns in wanted:
                device.check_scratch(rows, columns, dtype)
            return tuple(device.arena.slice(rows, columns, dtype) for device, columns in wanted)

    def reserve_scratch(self, sizes: Mapping[int, int]) -> None:
        """Check that each device has this many bytes of scratch after a :meth:`begin_scratch`.

        Raises:
            ExecutionError: a device has less scratch or is not in use, or a size is not a non-negative integer.
        """
        with self._guard:
            check_type("reserve_scratch: sizes", sizes, Mapping, "name bytes by device, such as {0: 4096}")
            for index, size in sizes.items():
                if type(index) is not int or index not in self.devices:
                    whose = "of another process" if type(index) is int and index in self.all_devices else "not in use"
                    message = f"reserve_scratch: device {index!r:.40} is {whose}"
                    raise ExecutionError(message, f"devices in use: {', '.join(map(str, self.devices))}")
                self.devices[index].reserve_scratch(size)

    def rope_tables(self, rope: Rope, positions: int | None = None) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the sine and cosine tables on each device that holds KV heads, computed once and cached.

        Args:
            rope: the model's RoPE parameters; see :meth:`tpplan.exec.rope.tables.Rope.from_config`.
            positions: rows of the tables; by default the tokens of the plan's longest sequence.

        Returns:
            Two tensors ``[positions, rope.width]`` for each device, in the activations' dtype.

        Raises:
            ExecutionError: ``rope`` is not a Rope, ``positions`` is invalid, or the plan left too little room for the
                tables.
        """
        with self._guard:
            rows = self.plan.request.sequence_tokens if positions is None else positions
            heads = [split.bounds for split in self.plan.splits if split.axis is Axis.KV_HEADS]
            holders = [d for d in self.devices.values() if any(b[d.index] < b[d.index + 1] for b in heads)]
            for device in holders:
                device.check_rope_tables(rope, rows, self.dtype)
            return tuple(device.rope_tables(rope, rows, self.dtype) for device in holders)

    def synchronize(self) -> None:
        """Wait until all issued operations are complete."""
        with self._guard:
            self._engine.backend.synchronize()

    def close(self) -> None:
        """Wait for all operations and free all memory, even after a failure; closing twice does nothing.

        If an interrupt such as Ctrl-C comes meanwhile, the context is closed, and another call frees what is left.
        Several processes whose kernels write to each other's memory wait for each other, for their time-out at most.

        Raises:
            ExecutionError: a device timed out waiting for another, or the call comes from inside an operation.
        """
        self._guard.close()
        try:
            waits = () if self._has_waited else (self._wait_for_all,)
            devices = [device.close for device in self.devices.values()]
            # Each does nothing more the second time.
            run_all(
                (
                    *waits,
                    self._engine.backend.close,
                    self._runner.clear,
                    self._inflight.clear,
                    self._host.close,
                    *devices,
                )
            )
        finally:
            self._guard.leave()

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

    def _wait_for_all(self) -> None:
        """Wait until all issued operations are complete; only the first close does."""
        self._has_waited = True
        self._engine.backend.synchronize()


class Guard:
    """Lets one thread at a time use a context, and none after its close.

    Threads queue up, and the first has its turn. To join the queue is a single step, between whose parts no interrupt
    such as Ctrl-C can come. To leave it is another one, which an interrupt can prevent: a turn counts only as long as
    the function that took it is running, and whoever comes next drops one that was left behind.

    A function takes one turn at a time, and does not catch an exception and go on after it.

    Attributes:
        closed: whether no operation may begin any more.
    """

    def __init__(self) -> None:
        self.closed = False
        self._queue: deque[_Turn] = deque()

    def __enter__(self) -> None:
        """Take a turn.

        Raises:
            ExecutionError: the context is closed, or an operation is running.
        """
        queue, turn = self._queue, (object(), get_ident(), _getframe(1).f_code)
        queue.append(turn)
        if self.closed or queue[0] is not turn:
            self._begin(turn, _getframe(1))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.popleft()

    def close(self) -> None:
        """Let no operation begin any more, wait for a running one to end, and take the turn of the calling function.

        The function releases everything, and gives the turn back by :meth:`leave`.

        Raises:
            ExecutionError: the thread is in an operation or in such a function already, so that it would wait for
                itself; nothing is closed then.
        """
        caller, thread = _getframe(1), get_ident()
        if any(turn[1] == thread and self._is_running(turn, caller) for turn in self._queue.copy()):
            raise _own()
        self.closed = True
        turn = object(), thread, caller.f_code
        self._queue.append(turn)
        while (first := self._queue[0]) is not turn:
            if self._is_running(first, caller):
                time.sleep(_LOOK_SECONDS)
            else:
                self._drop(first)

    def leave(self) -> None:
        """Give back the turn that :meth:`close` took."""
        self._queue.popleft()

    def _begin(self, turn: _Turn, caller: FrameType) -> None:
        """Drop turns that were left behind before this one, or drop this one and raise an error."""
        while not self.closed and (first := self._queue[0]) is not turn:
            if self._is_running(first, caller):
                self._drop(turn)
                if first[1] == turn[1]:
                    raise _own()
                hint = "give each thread a context of its own, or take turns"
                raise ExecutionError("another thread is using this context", hint)
            self._drop(first)
        if self.closed:
            self._drop(turn)
            raise ExecutionError("the context is closed", "compile the plan again")

    def _drop(self, turn: _Turn) -> None:
        """Remove a turn; another thread may have done so."""
        with suppress(ValueError):
            self._queue.remove(turn)

    def _is_running(self, turn: _Turn, caller: FrameType) -> bool:
        """Return whether the function that took a turn is running.

        Args:
            turn: the turn.
            caller: the calling thread's frame that takes another turn, or is about to.
        """
        _, thread, code = turn
        frame = caller.f_back if thread == get_ident() else _current_frames().get(thread)
        last = frame
        while frame is not None:
            if frame.f_code is code and getattr(frame.f_locals.get("self"), "_guard", self) is self:
                return True
            last, frame = frame, frame.f_back
        # The way up ends at a generator if its thread has gone on meanwhile: it may be running.
        return last is not None and bool(last.f_code.co_flags & _GENERATOR)


def run_all(steps: Sequence[Callable[[], object]]) -> None:
    """Run all steps even if one raises an exception, which is raised at the end.

    Unlike a :class:`contextlib.ExitStack`, it makes no reference cycle of that, which would keep memory.
    """
    if steps:
        try:
            steps[0]()
        finally:
            run_all(steps[1:])


def _own() -> ExecutionError:
    """Return the error for a call from a signal handler or a callback inside an operation of the same thread."""
    hint = "let the handler set a flag, and act on it after the operation"
    return ExecutionError("this thread is in an operation of the context", hint)
