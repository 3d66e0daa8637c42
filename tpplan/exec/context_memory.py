"""The memory that a context offers to callers: scratch, RoPE tables, and buffers in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec.calls.inflight import Inflight
from tpplan.exec.calls.slices import Cuts
from tpplan.exec.checks import check_dtype, check_type, whole
from tpplan.exec.guard import Guard
from tpplan.exec.overlap import share_bytes
from tpplan.exec.tensors import check_copied, check_kind, check_stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor

    from tpplan.core.axes import Slice
    from tpplan.core.plan import SplitPlan
    from tpplan.exec.memory.device import DeviceContext
    from tpplan.exec.memory.host import HostMemory
    from tpplan.exec.rope.tables import Rope


class ContextMemory:
    """The memory of a compiled plan; :class:`tpplan.exec.context_operations.ContextOperations` adds the operations.

    Attributes:
        plan: the compiled plan.
        devices: a DeviceContext for each device in use that this process owns, by index, ascending.
        all_devices: indices of the devices in use, those of other processes too, ascending.
        dtype: dtype of the activations, used for scratch and RoPE tables; operations take any dtype.
    """

    def __init__(
        self,
        plan: SplitPlan,
        used: Iterable[int],
        devices: Sequence[DeviceContext],
        host: HostMemory,
        dtype: torch.dtype,
    ) -> None:
        """Take ownership of the allocated memory."""
        self.plan = plan
        self.devices: Mapping[int, DeviceContext] = {device.index: device for device in devices}
        self.all_devices = tuple(used)
        self.dtype = dtype
        self._host = host
        self._guard = Guard()
        self._inflight = Inflight()
        self._cuts = Cuts(plan, self.all_devices, tuple(self.devices))

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
            heads = [split.bounds for split in self.plan.splits if split.axis is Axis.KV]
            holders = [d for d in self.devices.values() if any(b[d.index] < b[d.index + 1] for b in heads)]
            for device in holders:
                device.check_rope_tables(rope, rows, self.dtype)
            return tuple(device.rope_tables(rope, rows, self.dtype) for device in holders)
