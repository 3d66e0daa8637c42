"""What ``tpplan check`` tells of plans: whether planning again gives the same plan."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from tpplan.codec import fingerprint
from tpplan.diff import diff
from tpplan.error_report import ErrorBody, error_report
from tpplan.errors import RequestError, TpplanError
from tpplan.infeasible import InfeasibleError
from tpplan.plandiff import PlanDiff
from tpplan.planner import replan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.devices import Device
    from tpplan.model import ModelSpec
    from tpplan.plan import SplitPlan


class StaleReason(StrEnum):
    """Why a plan is not what planning again gives."""

    MODEL = "model"  # the plan is for another fingerprint
    DEVICES = "devices"  # the plan is for others than those that were named
    PLANNING = "planning"  # the same inputs, another decision: edited by hand, or by another tpplan
    INFEASIBLE = "infeasible"  # nothing fits any more
    REQUEST = "request"  # the request has no meaning for the model any more


@frozen(kw_only=True)
class PlanCheck:
    """One plan.

    Attributes:
        path: of its file, as it was named.
        current: whether planning again gives the same plan.
        reasons: why it is stale, empty if it is current or was not checked.
        message: the same in words.
        error: why it was not checked: it cannot be read, or is no valid plan; left out if it was.
        diff: from the plan to the one that planning again gives; left out if it gives none or the same.
    """

    path: str
    current: bool
    reasons: tuple[StaleReason, ...]
    message: str
    error: ErrorBody | None = None
    diff: PlanDiff | None = None


@frozen
class CheckReport:
    """Several plans.

    Attributes:
        current: whether all of them are.
        plans: in the order in which they were named.
    """

    current: bool
    plans: tuple[PlanCheck, ...]


def check(
    plans: Mapping[str, SplitPlan | TpplanError], model: ModelSpec, devices: tuple[Device, ...] = ()
) -> CheckReport:
    """Plan again what each plan was asked, for ``model``, and compare.

    Args:
        plans: by the paths of their files, or why one cannot be read.
        model: to plan for.
        devices: to plan for; each plan's own by default.
    """
    checks = tuple(_check(path, plan, model, devices) for path, plan in plans.items())
    return CheckReport(all(c.current for c in checks), checks)


def _check(path: str, old: SplitPlan | TpplanError, model: ModelSpec, devices: tuple[Device, ...]) -> PlanCheck:
    if isinstance(old, TpplanError):
        error = error_report(old).error
        return PlanCheck(path=path, current=False, reasons=(), message=error.message, error=error)
    devices = devices or old.devices
    was, now = old.model.fingerprint, fingerprint(model)
    reasons, texts = [], []
    if was == now:  # a folder may have another name where the plans are checked
        model = attrs.evolve(model, name=old.model.name)
    else:
        reasons.append(StaleReason.MODEL)
        texts.append(f"the plan is for {old.model.name} with the fingerprint {was}, {model.name} has {now}")
    if devices != old.devices:
        reasons.append(StaleReason.DEVICES)
        texts.append("the plan is for other devices than those that were named")
    changes = None
    try:
        changes = diff(old, replan(model, attrs.evolve(old, devices=devices)))
    except InfeasibleError as error:
        reasons.append(StaleReason.INFEASIBLE)
        texts.append(error.message)
    except RequestError as error:
        reasons.append(StaleReason.REQUEST)
        texts.append(error.message)
    if changes and not reasons:
        reasons.append(StaleReason.PLANNING)
        texts.append("the same inputs give another plan")
    return PlanCheck(
        path=path,
        current=not reasons,
        reasons=tuple(reasons),
        message="; ".join(texts) or "current",
        diff=changes or None,
    )
