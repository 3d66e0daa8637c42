"""The context's operations, as modules of a device's model call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tpplan.exec.context import TPContext
from tpplan.transformers.lockstep import Lockstep, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpplan.core.axes import Axis


@frozen
class Operations:
    """The context's operations, between models that run in lockstep.

    Attributes:
        context: the compiled plan.
        lockstep: runs the models.
    """

    context: TPContext
    lockstep: Lockstep

    def sum(self, name: str, x: Tensor, axis: Axis, layer: int | None) -> Tensor:
        """Return the sum over the devices that have a part of an axis; what others pass only has the right shape."""
        owners = self.context.devices_of(axis, layer)

        def run(operands: Mapping[int, Tensor], out: Sequence[Tensor]) -> None:
            self.context.all_reduce([operands[each] for each in owners], axis=axis, layer=layer, out=out)

        return self._in_passes(name, x, x.shape[-1], run)

    def join(self, name: str, x: Tensor, axis: Axis, layer: int | None, *, columns: int, dim: int) -> Tensor:
        """Return the columns of all devices side by side; what devices without a part of the axis pass is ignored.

        Args:
            name: name of the module.
            x: this device's columns.
            axis: axis that cuts the columns.
            layer: number of the layer that is cut.
            columns: number of the result's columns.
            dim: columns for each element of the axis.
        """
        owners = self.context.devices_of(axis, layer)

        def run(operands: Mapping[int, Tensor], out: Sequence[Tensor]) -> None:
            self.context.allgather([operands[each] for each in owners], axis, dim=dim, layer=layer, out=out)

        return self._in_passes(name, x, columns, run)

    def spread(self, name: str, x: Tensor, axis: Axis, layer: int | None) -> Tensor:
        """Return what the first device with a part of an axis has; what others pass only has the right shape."""
        first = self.context.plan.slices(axis, layer)[0].device

        def run(operands: Mapping[int, Tensor], out: Sequence[Tensor]) -> None:
            own = operands[first] if first in operands else out[0].to("meta")
            self.context.broadcast(own, source=first, out=out)

        return self._in_passes(name, x, x.shape[-1], run)

    def _in_passes(
        self, name: str, x: Tensor, columns: int, run: Callable[[Mapping[int, Tensor], Sequence[Tensor]], None]
    ) -> Tensor:
        """Run an operation on as many rows at a time as the plan allows.

        Args:
            name: name of the module.
            x: this device's operand.
            columns: number of the result's columns.
            run: fills the results of all devices, given their operands by device.
        """

        def filled(operands: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
            out = [operand.new_empty(*operand.shape[:-1], columns) for operand in operands.values()]
            run(operands, out)
            return dict(zip(operands, out, strict=True))

        operation, rows = Operation(name, filled), x.flatten(0, -2).contiguous()
        done = [self.lockstep.meet(operation, part) for part in torch.split(rows, self.context.max_rows)]
        return (done[0] if len(done) == 1 else torch.cat(done)).view(*x.shape[:-1], columns)
