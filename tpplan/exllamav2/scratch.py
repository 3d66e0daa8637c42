"""How much scratch the layers of ExLlamaV2 slice, and for how many rows a plan has room for that."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.workspace import ITEM_BYTES, align, areas
from tpplan.exllamav2.model import DTYPE

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan
    from tpplan.exllamav2.model import Numbers

_ITEM = ITEM_BYTES[DTYPE]

#: What each layer slices for all rows at once: as wide as an axis on all of its devices, and as wide as their parts.
#: Attention does so where its output matrix is cut by query heads, and where it is cut by residual columns.
_LAYERS = (
    ((Axis.Q, Axis.Q, Axis.Q), (Axis.Q, Axis.KV, Axis.KV, Axis.Q)),
    ((Axis.RS, Axis.RS, Axis.Q), (Axis.Q, Axis.KV, Axis.KV, Axis.RS)),
    ((Axis.RS, Axis.RS, Axis.ID), (Axis.ID, Axis.ID, Axis.RS)),
)

#: The layers' matrices: the axis of the inputs, whole, and the one of the outputs, cut.
_MATRICES = (
    (Axis.RS, Axis.Q),
    (Axis.RS, Axis.KV),
    (Axis.Q, Axis.Q),
    (Axis.Q, Axis.RS),
    (Axis.RS, Axis.ID),
    (Axis.ID, Axis.RS),
)


def rows_with_scratch(plan: SplitPlan, numbers: Numbers, reserved: int | None) -> int:
    """Return the least ``max_rows``, from the config's rows on, whose scratch has room on every device for any layer.

    The ledger counts the scratch of tpplan's own executor, by rows; more rows make room for more.

    Args:
        plan: with the splits that count, whatever its ``max_rows``.
        numbers: of the model's config.
        reserved: bytes beside the slices on each device in use; None for what the widest matrix of a layer takes that
            is dequantised there.
    """
    needs = [_need(plan, numbers, device, reserved) for device in range(len(plan.devices))]

    def suffices(rows: int) -> bool:
        found = areas(plan.splits, DTYPE, evolve(plan.request, max_rows=rows))
        return all(area.scratch_bytes >= need for area, need in zip(found, needs, strict=True))

    beyond = numbers.rows + max(needs) // (numbers.hidden * _ITEM) + 1  # every row has one of the residual stream
    return numbers.rows + bisect_left(range(numbers.rows, beyond), True, key=suffices)  # noqa: FBT003


def _need(plan: SplitPlan, numbers: Numbers, device: int, reserved: int | None) -> int:
    """Return the bytes of the hungriest layer on a device."""
    heads = {Axis.Q: numbers.head_dim, Axis.KV: numbers.head_dim}
    whole, part = {}, {}
    for axis in (Axis.KV, Axis.ID, Axis.RS, Axis.Q):
        bounds, width = plan.bounds(axis), heads.get(axis, 1)
        whole[axis], part[axis] = bounds[-1] * width, (bounds[device + 1] - bounds[device]) * width
    if reserved is None:
        elements = max(whole[inputs] * part[outputs] for inputs, outputs in _MATRICES)
        reserved = min(elements, numbers.dequantised) * _ITEM
    layers = (
        [*(whole[axis] for axis in full if part[axis]), *(part[axis] for axis in parts)] for full, parts in _LAYERS
    )
    slices = max(sum(align(numbers.rows * columns * _ITEM) for columns in layer) for layer in layers)
    return align(reserved) + slices if any(part.values()) else 0
