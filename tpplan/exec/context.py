"""The context of a compiled plan: memory and operations, also beside other work and in graphs, until it is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeVar

from tpplan.exec.checks import whole
from tpplan.exec.context_operations import ContextOperations
from tpplan.exec.explain import explain
from tpplan.exec.group.telling import Alone
from tpplan.exec.guard import run_all

if TYPE_CHECKING:
    from types import TracebackType

    from tpplan.exec.aside import Aside
    from tpplan.exec.cuda.channel import Channel
    from tpplan.exec.cuda.graph import Graph
    from tpplan.exec.explain import Explanation


_Told = TypeVar("_Told")


class TPContext(ContextOperations):
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

    def tell(self, mine: _Told) -> list[_Told]:
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

    def _wait_for_all(self) -> None:
        """Wait until all issued operations are complete; only the first close does."""
        self._has_waited = True
        self._engine.backend.synchronize()
