"""Helpers for devices that several processes own: agreeing on facts, and allocating room for results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpplan.core.axes import Axis
    from tpplan.exec.context import TPContext


def agreed(context: TPContext, facts: Sequence[bool]) -> list[bool]:
    """Return which facts hold in all processes; each process gives as many, at the same time.

    What a process can do may depend on its devices. Whatever decides on the operations that follow, or on their rows,
    has to be the same in all processes.
    """
    return [all(each) for each in zip(*context.tell(list(facts)), strict=True)]


def room_for(context: TPContext, rows: int, columns: int, dtype: torch.dtype, axis: Axis | None = None) -> list[Tensor]:
    """Return room for a result on each device of this process that holds a part of ``axis``, by default on all.

    Operations need it in a process that gets a result of which it has no part: only from there they know the shape.
    """
    places = [context.devices[device].device for device in context.devices_of(axis)]
    return [torch.empty(rows, columns, dtype=dtype, device=place) for place in places]
