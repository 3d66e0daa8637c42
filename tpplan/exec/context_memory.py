"""The memory of a context that callers use: scratch, RoPE tables, and buffers in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.axes import Axis, Slice, slices_of
from tpplan.errors import ExecutionError
from tpplan.exec.guard import Guard
from tpplan.exec.operands import check_kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from tpplan.exec.device import DeviceContext
    from tpplan.exec.host import HostMemory
    from tpplan.exec.operands import Slices
    from tpplan.exec.rope import Rope
    from tpplan.plan import SplitPlan


class ContextMemory:
    """What a compiled plan has on its devices; :class:`tpplan.exec.context.TPContext` adds the operations.

    Attributes:
        plan: what was compiled.
        devices: what the context has on each device in use, by index.
        all_devices: the devices in use, ascending.
        dtype: of the activations, for scratch and RoPE tables; operations take any dtype.
    """

    def __init__(self, plan: SplitPlan, devices: Sequence[DeviceContext], host: HostMemory, dtype: torch.dtype) -> None:
        """Take over what was allocated."""
        self.plan = plan
        self.devices: Mapping[int, DeviceContext] = {device.index: device for device in devices}
        self.all_devices = tuple(self.devices)
        self.dtype = dtype
        self._host = host
        self._guard = Guard()
        self._slices: dict[tuple[Axis | str, int | None], tuple[Slice, ...]] = {}
        self._cuts: dict[tuple[Axis | str, int | None, int], Slices] = {}

    def split(self, axis: Axis | str, layer: int | None = None) -> tuple[Slice, ...]:
        """Return the slices of the devices that hold a part of ``axis``, in elements.

        Raises:
            RequestError: the plan has no such axis, or cuts it in several ways and no layer was named.
        """
        try:
            return self._slices[axis, layer]
        except (KeyError, TypeError):  # the latter for what cannot be hashed, which the plan does not know either
            found = slices_of(self.plan.bounds(axis, layer))
        self._slices[axis, layer] = found
        return found

    def devices_of(self, axis: Axis | str | None, layer: int | None = None) -> tuple[int, ...]:
        """Return the devices that hold a part of ``axis``, ascending; all in use for None.

        Raises:
            RequestError: see :meth:`split`.
        """
        return self.all_devices if axis is None else tuple(s.device for s in self.split(axis, layer))

    def copy_pinned(self, buffer: int, x: Tensor) -> Tensor:
        """Copy a tensor into one of the two host buffers, and wait until it is there.

        Args:
            buffer: 0 or 1.
            x: of any shape, on any device.

        Returns:
            The copy: a view of the buffer, valid until it is used for something else.

        Raises:
            ExecutionError: there is no such buffer, it is too small, or the tensor has no values that can be copied.
        """
        with self._guard:
            check_kind("copy_pinned: x", x)
            if x.is_meta:
                raise ExecutionError(
                    "copy_pinned: x is on meta, where tensors have no values", "copy one that has some"
                )
            view = self._host.buffer(buffer, x.shape, x.dtype)
            view.copy_(x.detach())
            return view

    def get_pinned(self, buffer: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor over one of the two host buffers, pinned where devices read it.

        Args:
            buffer: 0 or 1.
            shape: of the tensor, such as ``batch, query length, columns``.
            dtype: the activations' if not given.

        Raises:
            ExecutionError: there is no such buffer, or it is too small.
        """
        with self._guard:
            return self._host.buffer(buffer, shape, dtype or self.dtype)

    def begin_scratch(self) -> None:
        """Make the scratch of all devices free again: slices from now on may alias those handed out before."""
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
        """Return uninitialised tensors of scratch, valid until :meth:`begin_scratch`; they make a good ``out``.

        Args:
            rows: tokens.
            axis: on whose devices.
            dim: columns per element.
            dtype: the activations' if not given.
            layer: whose cut is meant.
            full: as wide as the whole axis, on every device, instead of as its slice.

        Returns:
            ``[rows, elements × dim]`` on each device that holds elements of the axis.

        Raises:
            ExecutionError: a device has too little room.
        """
        with self._guard:
            slices = self._columns("scratch", axis, layer, dim)
            width = slices[-1][2]
            return tuple(
                self.devices[device].scratch(rows, width if full else stop - start, dtype or self.dtype)
                for device, start, stop in slices
            )

    def reserve_scratch(self, sizes: Mapping[int, int]) -> None:
        """Make sure that slices of these bytes, by device, can follow a :meth:`begin_scratch`.

        Raises:
            ExecutionError: a device has less scratch than that, or is not in use.
        """
        with self._guard:
            for index, size in sizes.items():
                if index not in self.devices:
                    raise ExecutionError(
                        f"device {index} is not in use", f"devices in use: {', '.join(map(str, self.devices))}"
                    )
                self.devices[index].reserve_scratch(size)

    def rope_tables(self, rope: Rope, positions: int | None = None) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the sine and the cosine table on each device that holds KV heads, made once and kept.

        Args:
            rope: of the model; see :meth:`tpplan.exec.rope.Rope.from_config`.
            positions: rows of the tables; as many as the plan's cache has tokens per sequence if not given.

        Returns:
            Two tensors ``[positions, rope.width]`` for each device, in the activations' dtype.

        Raises:
            ExecutionError: there are no positions, or the plan left too little room for the tables.
        """
        with self._guard:
            request = self.plan.request
            rows = -(-request.cache.tokens // request.batch) if positions is None else positions
            heads = [split.bounds for split in self.plan.splits if split.axis is Axis.KV]
            holders = [d for d in self.devices.values() if any(b[d.index] < b[d.index + 1] for b in heads)]
            for device in holders:
                device.check_rope_tables(rope, rows, self.dtype)
            return tuple(device.rope_tables(rope, rows, self.dtype) for device in holders)

    def _columns(self, what: str, axis: Axis | str, layer: int | None, dim: int) -> Slices:
        """Return (device, start, stop) of every slice in columns; the last one stops where the axis does.

        Raises:
            ExecutionError: ``dim`` is no whole number or less than 1.
        """
        if type(dim) is not int or dim < 1:
            raise ExecutionError(f"{what}: dim is {dim}, expected 1 or more", "dim is the columns per element")
        slices = self.split(axis, layer)
        key = (axis, layer, dim)
        if key not in self._cuts:
            self._cuts[key] = tuple((s.device, s.start * dim, s.end * dim) for s in slices)
        return self._cuts[key]
