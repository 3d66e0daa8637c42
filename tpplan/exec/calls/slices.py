"""The cuts of a plan's axes into slices by device, cached by axis and layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpplan.core.axes import Axis, Slice, slices_of
from tpplan.errors import ExecutionError, RequestError
from tpplan.exec.checks import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.calls.operands import Slices


_DIM: Final = "dim is the columns per element"
_MOST_COLUMNS: Final = 2**63 - 1


class Cuts:
    """The cuts of a plan.

    Attributes:
        devices: the devices in use, ascending.
        own: those that this process owns.
    """

    def __init__(self, plan: SplitPlan, devices: tuple[int, ...], own: tuple[int, ...]) -> None:
        """Start with empty caches."""
        self.devices = devices
        self.own = own
        self._plan = plan
        self._slices: dict[tuple[Axis | str, int | None], tuple[Slice, ...]] = {}
        self._columns: dict[tuple[Axis | str, int | None, int], Slices] = {}

    def split(self, axis: Axis | str, layer: int | None = None) -> tuple[Slice, ...]:
        """Return the slices of the devices that hold a part of ``axis``, in elements.

        Raises:
            RequestError: the plan has no such axis or layer, or cuts the axis in several ways and no layer was named.
        """
        self._check_layer(layer)
        try:
            return self._slices[axis, layer]
        except (KeyError, TypeError):  # TypeError: unhashable, so unknown to the plan too
            found = slices_of(self._plan.bounds(axis, layer))
        self._slices[axis, layer] = found
        return found

    def own_split(self, axis: Axis | str, layer: int | None = None) -> tuple[Slice, ...]:
        """Return the slices of this process's devices; see :meth:`split`."""
        slices = self.split(axis, layer)
        return slices if self.own == self.devices else tuple([each for each in slices if each.device in self.own])

    def own_of(self, devices: Sequence[int]) -> Sequence[int]:
        """Return those of some devices that this process owns."""
        return devices if self.own == self.devices else [device for device in devices if device in self.own]

    def devices_of(self, axis: Axis | str | None, layer: int | None = None) -> tuple[int, ...]:
        """Return the devices that hold a part of ``axis``, ascending, all in use for None.

        Raises:
            RequestError: see :meth:`split`.
        """
        if axis is None:
            self._check_layer(layer)
            return self.devices
        return tuple([s.device for s in self.split(axis, layer)])

    def columns(self, what: str, axis: Axis | str, layer: int | None, dim: int) -> Slices:
        """Return (device, start, stop) of every slice in columns; the last one stops where the axis does.

        Raises:
            ExecutionError: ``dim`` is not an int, less than 1, or so large that no tensor has as many columns.
            RequestError: see :meth:`split`.
        """
        whole(f"{what}: dim", dim, 1, _DIM)
        slices = self.split(axis, layer)
        key = (axis, layer, dim)
        if key not in self._columns:
            if slices[-1].end * dim > _MOST_COLUMNS:
                raise ExecutionError(
                    f"{what}: dim is {dim!r:.40}, which makes more columns than a tensor can have", _DIM
                )
            self._columns[key] = tuple((s.device, s.start * dim, s.end * dim) for s in slices)
        return self._columns[key]

    def _check_layer(self, layer: int | None) -> None:
        """Check that the plan has a layer, given as an int; True, which equals 1, is refused."""
        if layer is not None and (type(layer) is not int or not 0 <= layer < self._plan.model.layers):
            name, last = self._plan.model.name, self._plan.model.layers - 1
            raise RequestError(f"the plan for {name} has no layer {layer!r:.40}", f"its layers are 0 to {last}")
