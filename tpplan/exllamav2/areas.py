"""The scratch that a TPContext of ExLlamaV2 slices, one area on each device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from tpplan.core.workspace import align, areas
from tpplan.errors import ExecutionError
from tpplan.exec.checks import check_dtype, whole
from tpplan.exec.memory.arena import Arena
from tpplan.exllamav2.model import DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from tpplan.core.plan import SplitPlan

#: What makes room for more.
MORE_SCRATCH = "pass TPContext a larger scratch_bytes"
_AGAIN = "call begin_scratch_alloc_tp() before slices that may take the place of older ones"


def model_context(model: Any, device: int) -> Any:
    """Return the model's own context of a device, with scratch and RoPE tables; None unless ExLlamaV2 has made one."""
    contexts = getattr(model, "device_context", None)
    if not isinstance(contexts, list | tuple) or device >= len(contexts):
        return None
    return contexts[device]


class Area(Protocol):
    """Scratch on one device, handed out in slices."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all scratch."""

    @property
    def free_bytes(self) -> int:
        """Bytes left until the next :meth:`begin`."""

    def begin(self) -> None:
        """Make all of it free again."""

    def slice(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised ``[rows, columns]``, for which there is room."""


class ModelArea:
    """The scratch of a device context of ExLlamaV2, in which its layers have theirs too."""

    def __init__(self, context: Any) -> None:
        """Take an ``ExLlamaV2DeviceContext``, which allocates its scratch when it is first sliced."""
        self._context = context

    @property
    def size_bytes(self) -> int:
        """Bytes of all scratch."""
        return int(self._context.scratch_bytes) // 2 * 2

    @property
    def free_bytes(self) -> int:
        """Bytes left until the next :meth:`begin`."""
        return self.size_bytes - 2 * int(self._context.scratch_idx)  # which counts float16

    def begin(self) -> None:
        """Make all of it free again."""
        self._context.begin_scratch_alloc()

    def slice(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised ``[rows, columns]``, for which there is room."""
        size = rows * columns * dtype.itemsize
        memory: Tensor = self._context.get_scratch_slice(size)
        return memory.view(torch.uint8)[:size].view(dtype).view(rows, columns)


class Scratch:
    """The scratch of all devices in use, by their numbers.

    It is that of the model's device contexts, as far as it has some, so that ExLlamaV2's layers and this context share
    it; else one block of memory on each device, of the plan's size, allocated when it is first needed.
    """

    def __init__(self, model: Any) -> None:
        """Have none yet, for a model that may get device contexts later."""
        self._model = model
        self._devices: dict[int, tuple[int, int, str]] = {}
        self._own: dict[int, Arena] = {}

    def plan(self, plan: SplitPlan, ordinals: Sequence[int]) -> None:
        """Have what a plan has, on devices with these numbers, and release what was allocated for another."""
        self.close()
        sizes = [area.scratch_bytes for area in areas(plan.splits, DTYPE, plan.request)]
        self._devices = {
            ordinal: (index, sizes[index], f"device {ordinal} ({plan.devices[index].name})")
            for index, ordinal in enumerate(ordinals)
            if sizes[index]
        }

    def allocate(self, places: Sequence[torch.device]) -> None:
        """Allocate what is not allocated, on all devices or none.

        Args:
            places: torch device of each device of the plan.

        Raises:
            ExecutionError: a device has too little memory.
        """
        self._areas(self._devices, places)

    def begin(self) -> None:
        """Make the scratch of all devices free again."""
        for device in self._devices:
            context = model_context(self._model, device)
            area = self._own.get(device) if context is None else ModelArea(context)
            if area is not None:
                area.begin()

    def slices(
        self, columns: Mapping[int, int], rows: int, dtype: torch.dtype, places: Sequence[torch.device]
    ) -> list[Tensor]:
        """Return uninitialised scratch ``[rows, columns]``, on all devices or none.

        Args:
            columns: number of columns of each device that gets a slice.
            rows: number of rows of every slice.
            dtype: dtype of all slices.
            places: torch device of each device of the plan.

        Raises:
            ExecutionError: a device has too little room, is not in use or has too little memory; or a size is no whole
                number, or ``dtype`` no dtype.
        """
        check_dtype("scratch: dtype", dtype)
        whole("scratch: rows", rows)
        for device, width in columns.items():
            whole(f"scratch: columns of device {device}", width)
            if device not in self._devices:
                raise ExecutionError(f"device {device} is not in use", f"devices in use: {[*self._devices]}")
        found = self._areas(columns, places)
        for device, area in found.items():
            size = rows * columns[device] * dtype.itemsize
            if align(size) > area.free_bytes:
                more = MORE_SCRATCH if device in self._own else "load the model with a larger max_input_len"
                message = f"{size} bytes asked for, {area.free_bytes} free of {area.size_bytes} of scratch"
                hint = f"{_AGAIN}, or {more}" if align(size) <= area.size_bytes else more
                raise ExecutionError(f"{self._devices[device][-1]}: {message}", hint)
        return [area.slice(rows, columns[device], dtype) for device, area in found.items()]

    def close(self) -> None:
        """Release what was allocated here."""
        for arena in self._own.values():
            arena.close()
        self._own.clear()

    def _areas(self, devices: Iterable[int], places: Sequence[torch.device]) -> dict[int, Area]:
        """Return the area of each device, allocated here if nobody has; on an error, nothing new is allocated."""
        contexts = {device: model_context(self._model, device) for device in devices}
        made = {}
        for device, context in contexts.items():
            if context is None and device not in self._own:
                index, size, name = self._devices[device]
                made[device] = Arena(size, places[index], name)
        self._own |= made
        return {
            device: self._own[device] if context is None else ModelArea(context) for device, context in contexts.items()
        }
