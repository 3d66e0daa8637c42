"""Plans that somebody edited so that they break no rule, and plans that are cut by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from tpplan.core.plan import Cache
from tpplan.planner.attempt import Attempt
from tpplan.planner.ledger import demands, ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.core.axes import Axis
    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import SplitPlan

    #: Returns an edited plan, and how differences begin that :mod:`tpplan.planner.recount` must find in it.
    Edit = Callable[[SplitPlan], tuple[SplitPlan, list[str]]]


def recut(plan: SplitPlan, model: ModelSpec, bounds: Mapping[Axis, tuple[int, ...]]) -> SplitPlan:
    """Return a plan with other cuts of some axes, and the ledger of these cuts."""
    wanted = demands(model, plan.request, len(plan.devices))
    cuts = tuple(bounds.get(d.axis) or plan.bounds(d.axis, int(d.layers.partition("-")[0] or 0)) for d in wanted.axes)
    memory = ledger(cuts, wanted, plan.devices, plan.request)
    return Attempt(model, plan.devices, plan.request, wanted, cuts, memory).plan()


def _model(**values: Any) -> Edit:
    def edit(plan: SplitPlan) -> tuple[SplitPlan, list[str]]:
        right = {name: getattr(plan.model, name) for name in values}
        wrong = [f"model.{name} is {value}, expected {right[name]}" for name, value in values.items()]
        return evolve(plan, model=evolve(plan.model, **values)), wrong

    return edit


def _request(bucket: str, **values: Any) -> Edit:
    """Return an edit of the request that changes a bucket, which stays as it is in the ledger."""

    def edit(plan: SplitPlan) -> tuple[SplitPlan, list[str]]:
        return evolve(plan, request=evolve(plan.request, **values)), [f"memory[{_fullest(plan, bucket)}].{bucket} is "]

    return edit


def _bucket(name: str, by: float) -> Edit:
    """Return an edit of a bucket of one device, which leaves as much more or less free."""

    def edit(plan: SplitPlan) -> tuple[SplitPlan, list[str]]:
        memory, at = [*plan.memory], _fullest(plan, name)
        right = getattr(memory[at], name)
        wrong = int(right * by)
        was = memory[at].free_bytes
        free = was + right - wrong
        memory[at] = evolve(memory[at], **{name: wrong, "free_bytes": free})
        values = [(name, wrong, right), ("free_bytes", free, was)]
        edited = evolve(plan, memory=tuple(memory))
        return edited, [f"memory[{at}].{field} is {value}, expected {expected}" for field, value, expected in values]

    return edit


def _fullest(plan: SplitPlan, bucket: str) -> int:
    """Return the device with the most bytes in a bucket."""
    return max(range(len(plan.memory)), key=lambda i: int(getattr(plan.memory[i], bucket)))


EDITS: Final[dict[str, Edit]] = {
    "dtype": lambda plan: _model(dtype="float16" if plan.model.dtype == "bfloat16" else "bfloat16")(plan),
    "one layer more": lambda plan: _model(layers=plan.model.layers + 1)(plan),
    "architecture": _model(architecture="OtherForCausalLM"),
    "no cache": _bucket("cache_bytes", 0),
    "less weights": _bucket("weights_bytes", 0.5),
    "less workspace": _bucket("workspace_bytes", 0.99),
    "cache of another kind": lambda plan: _request("cache_bytes", cache=Cache("q8", plan.request.cache.tokens))(plan),
    "fewer tokens": lambda plan: _request("workspace_bytes", cache=Cache(plan.request.cache.kind, 64))(plan),
    "more sequences": lambda plan: _request("workspace_bytes", batch=plan.request.max_rows)(plan),
    "fewer rows": lambda plan: _request("workspace_bytes", max_rows=plan.request.batch)(plan),
}
