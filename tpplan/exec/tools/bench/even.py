"""Even counterparts of uneven plans, to compare the time of the same payload in equal slices."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.plan import DeviceMemory
from tpplan.core.workspace import workspace_bytes
from tpplan.exec.compiler import compile as compile_plan

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext

#: Name of tpplan with even slices in the benchmark report.
EVEN = "even"
#: Operations whose time depends on the slices.
SLICED = ("allgather", "scatter", "gather")


def even_context(context: TPContext) -> TPContext | None:
    """Return a context with even slices, on the same devices and transport; None if the slices are already even.

    Raises:
        ExecutionError: the devices have no room for both contexts.
    """
    plan, kind = even_plan(context.plan), context.devices[context.all_devices[0]].device.type
    if plan is None:
        return None
    return compile_plan(plan, backend=kind, transport=context.explain().transport, scratch=False)


def even_plan(plan: SplitPlan) -> SplitPlan | None:
    """Return a plan that splits the residual stream evenly between the devices that hold a part of it.

    Returns:
        A plan to run beside the given one, with only the workspace in its ledger. None if the split is already even, up
        to the size of a unit.
    """
    split = plan.split(Axis.RS)
    widths = [stop - start for start, stop in pairwise(split.bounds)]
    count = sum(width > 0 for width in widths)
    units = -(-split.size // split.unit)
    cuts = [min(split.size, units * i // count * split.unit) for i in range(count + 1)]
    even = [stop - start for start, stop in pairwise(cuts)]
    if sorted(even) == sorted(filter(None, widths)) or not all(even):
        return None
    held = [sum(width > 0 for width in widths[:i]) for i in range(len(split.bounds))]
    bounds = tuple(cuts[i] for i in held)
    splits = tuple(evolve(each, bounds=bounds) if each is split else each for each in plan.splits)
    sizes = workspace_bytes(splits, plan.model.dtype, plan.request)
    return evolve(
        plan,
        request=evolve(plan.request, strategy="balanced"),  # the ledger of "latency" would include the bytes read
        splits=splits,
        devices=tuple(
            evolve(device, budget_bytes=size + 1, overhead_bytes=0)
            for device, size in zip(plan.devices, sizes, strict=True)
        ),
        memory=tuple(DeviceMemory(i, 0, 0, size, 0, 1) for i, size in enumerate(sizes)),
    )
