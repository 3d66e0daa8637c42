"""Checking whether plans are current: whether planning again gives the same plan, as ``tpplan check`` reports."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from tpplan.errors import RequestError, TpplanError
from tpplan.files.codec import document
from tpplan.hardware.spec import spec_of
from tpplan.planfile.codec import fingerprint
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.plan import replan
from tpplan.reports.diff import PlanDiff, diff
from tpplan.reports.error import ErrorBody, error_report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.core.device import Device
    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import SplitPlan


class StaleReason(StrEnum):
    """Why planning again gives another plan, or none."""

    MODEL = "model"  # the plan is for a model with another fingerprint
    DEVICES = "devices"  # the plan is for other devices than the given ones
    PLANNING = "planning"  # the same inputs, another result: edited by hand, or by another tpplan
    INFEASIBLE = "infeasible"  # no plan fits any more
    REQUEST = "request"  # the request is no longer valid for the model


@frozen(kw_only=True)
class PlanCheck:
    """The result of checking one plan.

    Attributes:
        path: path of the file, as given.
        current: whether planning again gives the same plan.
        reasons: why the plan is stale, empty if it is current or was not checked.
        message: the result in words.
        error: why the plan was not checked: it cannot be read, or is not valid; left out if it was checked.
        refused: why planning again makes no plan, and what would make one; left out if it makes one.
        diff: changes from the plan to the new one; left out if there is no new one or it is the same.
    """

    path: str
    current: bool
    reasons: tuple[StaleReason, ...]
    message: str
    error: ErrorBody | None = None
    refused: ErrorBody | None = None
    diff: PlanDiff | None = None


@document("check-report")
@frozen
class CheckReport:
    """The results of checking several plans.

    Attributes:
        current: whether all plans are current.
        plans: one result per plan, in the order given.
    """

    current: bool
    plans: tuple[PlanCheck, ...]


def check(
    plans: Mapping[str, SplitPlan | TpplanError], model: ModelSpec, devices: tuple[Device, ...] = ()
) -> CheckReport:
    """Plan each plan's request again, for ``model``, and compare the results.

    Args:
        plans: for the path of each file its plan, or the error that kept it from being read.
        model: the model to plan for.
        devices: the devices to plan for; by default those of each plan.
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
    if was == now:  # the directory may have another name on this machine, and other files beside the weights, or none
        same = old.model
        model = attrs.evolve(model, name=same.name, not_planned=same.not_planned, assumed=same.assumed)
    else:
        reasons.append(StaleReason.MODEL)
        texts.append(f"the plan is for {old.model.name} with the fingerprint {was}, {model.name} has {now}")
    if devices != old.devices:
        reasons.append(StaleReason.DEVICES)
        texts.append("the plan is for other devices than those that were named")
    changes = refused = None
    try:
        changes = diff(old, replan(model, attrs.evolve(old, devices=devices)))
    except (InfeasibleError, RequestError) as error:
        reasons.append(StaleReason.INFEASIBLE if isinstance(error, InfeasibleError) else StaleReason.REQUEST)
        texts.append(error.message)
        refused = error_report(error, spec_of(devices)).error
    if changes and not reasons:
        reasons.append(StaleReason.PLANNING)
        texts.append("the same inputs give another plan")
    return PlanCheck(
        path=path,
        current=not reasons,
        reasons=tuple(reasons),
        message="; ".join(texts) or "current",
        refused=refused,
        diff=changes or None,
    )
