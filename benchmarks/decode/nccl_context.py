"""A compiled plan whose devices talk by NCCL: what a decoder asks of it, and everything else as in tpplan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.cuda import nccl

from tpplan.exec.handles import Gathered
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpplan.core.axes import Axis
    from tpplan.exec import TPContext


class NcclContext:
    """Stands in for a context of a plan of the layout ``reduce``, of which a dense model needs three operations.

    Only the movement differs: NCCL adds up in the tensors' dtype, and the residual is added behind that. What goes
    between devices and the host goes by torch's copies, for NCCL knows no host.
    """

    def __init__(self, context: TPContext) -> None:
        """Stand in for a context."""
        self._context = context

    def __getattr__(self, name: str) -> Any:
        """Return whatever is not an operation."""
        if name in {"allgather", "add_residual", "scatter"}:
            raise NotImplementedError(f"{name} goes not by NCCL here")
        return getattr(self._context, name)

    def channel(self, elements: int) -> None:
        """Return nothing: kernels that add up as they multiply are not NCCL's."""
        del elements

    def broadcast(
        self, x: Tensor, *, source: int | None = None, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Copy to all devices."""
        ctx = self._context
        outs = out or [torch.empty_like(x, device=ctx.devices[i].device) for i in ctx.all_devices]
        if source == HOST:
            for target in outs:
                target.copy_(x)
        else:
            root = 0 if source is None else ctx.all_devices.index(source)
            outs[root].copy_(x)
            nccl.broadcast(outs, root)
        return tuple(outs)

    def gather(self, parts: Sequence[Tensor], axis: Axis) -> Gathered:
        """Copy the parts of all devices into one tensor in host memory, and wait for it."""
        copies = [part.cpu() for _, part in zip(self._context.devices_of(axis), parts, strict=True)]
        return Gathered(torch.cat(copies, -1), None)

    def all_reduce(
        self,
        parts: Sequence[Tensor],
        residual: Sequence[Tensor] | None = None,
        *,
        axis: Axis | None = None,
        layer: int | None = None,
        out: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Add up the parts of all devices, and a residual; a device without a part takes part with zeros."""
        ctx = self._context
        given = dict(zip(ctx.devices_of(axis, layer), parts, strict=True))
        like = parts[0]
        inputs = [
            given[i].contiguous() if i in given else torch.zeros_like(like, device=ctx.devices[i].device)
            for i in ctx.all_devices
        ]
        sums = list(out) if out is not None and residual is None else [torch.empty_like(x) for x in inputs]
        nccl.all_reduce(inputs, sums)  # type: ignore[no-untyped-call]
        if residual is None:
            return tuple(sums)
        if out is None:
            return tuple(x.add_(more) for x, more in zip(sums, residual, strict=True))
        return tuple(torch.add(x, more, out=to) for x, more, to in zip(sums, residual, out, strict=True))
