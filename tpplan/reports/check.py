"""Checking whether plans are current: whether planning again gives the same plan, as ``tpplan check`` reports."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from tpplan.core.plan import AUTO, reserves_told, rooms_told
from tpplan.errors import RequestError, TpplanError
from tpplan.files.codec import document
from tpplan.hardware.spec import spec_of
from tpplan.planfile.codec import fingerprint
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.plan import plan_request, replan
from tpplan.planner.request import asked_strategy, resolve
from tpplan.reports.diff import PlanDiff, diff
from tpplan.reports.error import ErrorBody, error_report
from tpplan.reports.manifest import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.core.device import Device
    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import Request, SplitPlan
    from tpplan.core.speed import LinkSpeed
    from tpplan.planner.manifest import Entry, Manifest
    from tpplan.planner.options import Options


class StaleReason(StrEnum):
    """Why planning again gives another plan, or none."""

    MODEL = "model"  # the plan is for a model with another fingerprint
    DRAFT = "draft"  # the plan has room for another draft model of the same name
    DEVICES = "devices"  # the plan is for other devices than the given ones
    PLANNING = "planning"  # the same inputs, another result: edited by hand, or by another tpplan
    OPTIONS = "options"  # the manifest asks otherwise than the plan was asked for
    MISSING = "missing"  # the plan of a manifest was not made yet
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
        manifest: path of the manifest that has the plans; left out if there is none.
        unlisted: plan files in the folders of the manifest's plans that it does not name.
        notes: what the command noted on standard error beside it; left out for none.
    """

    current: bool
    plans: tuple[PlanCheck, ...]
    manifest: str = ""
    unlisted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check(
    plans: Mapping[str, SplitPlan | TpplanError],
    model: ModelSpec,
    devices: tuple[Device, ...] = (),
    predicting: Callable[[], ModelSpec] | None = None,
    links: tuple[LinkSpeed, ...] = (),
) -> CheckReport:
    """Plan each plan's request again, for ``model``, and compare the results.

    For other devices than a plan's, or links that were measured again, a strategy that ``auto`` chose is chosen again.

    Args:
        plans: for the path of each file its plan, or the error that kept it from being read.
        model: the model to plan for.
        devices: the devices to plan for; by default those of each plan.
        predicting: function that reads the model's prediction layers; without it their room is that of the plan, as
            that of a draft model always is.
        links: measured links between ``devices``; by default those that a plan for the same devices rests on.
    """
    checks = tuple(_check(path, plan, model, devices, predicting, links=links) for path, plan in plans.items())
    return CheckReport(all(c.current for c in checks), checks)


def check_manifest(
    manifest: Manifest,
    stored: Mapping[str, SplitPlan | TpplanError | None],
    inputs_of: Callable[[Entry], Inputs],
    unlisted: tuple[str, ...] = (),
) -> CheckReport:
    """Make the plan of every entry of a manifest again, and compare it with the stored one.

    Args:
        manifest: the manifest.
        stored: for the path of each file its plan, the error that kept it from being read, or None if there is no file.
        inputs_of: function that reads what an entry is planned with.
        unlisted: plan files in the same folders that no entry names.
    """
    checks = tuple(_check_entry(entry, stored[entry.file], inputs_of) for entry in manifest.plans)
    return CheckReport(all(c.current for c in checks), checks, manifest.path, unlisted)


def _check(
    path: str,
    old: SplitPlan | TpplanError,
    model: ModelSpec,
    devices: tuple[Device, ...],
    predicting: Callable[[], ModelSpec] | None,
    *,
    links: tuple[LinkSpeed, ...],
) -> PlanCheck:
    if isinstance(old, TpplanError):
        return _unchecked(path, old)
    draft = None
    if predicting and old.request.mtp and old.request.draft:
        try:
            draft = attrs.evolve(predicting(), name=old.request.draft.name)
        except TpplanError as error:
            if old.model.fingerprint == fingerprint(model):  # else it is another model, which is told
                return _unchecked(path, error)
    inputs = Inputs(model, devices or old.devices, links, draft, is_split=True)
    return _compare(path, old, inputs, lambda now: _again(old, now))


def _again(old: SplitPlan, now: Inputs) -> SplitPlan:
    """Return the plan that an old plan's request gives today."""
    strategy = asked_strategy(old)
    room = now.room(strategy)
    if now.devices == old.devices and not now.links:
        return replan(now.model, old, room)
    asked = attrs.evolve(old.request, strategy=strategy, draft=None if room else old.request.draft)
    return plan_request(now.model, now.devices, asked, now.links, room)


def _check_entry(entry: Entry, old: SplitPlan | TpplanError | None, inputs_of: Callable[[Entry], Inputs]) -> PlanCheck:
    if old is None:
        text = "new: not made yet"
        return PlanCheck(path=entry.file, current=False, reasons=(StaleReason.MISSING,), message=text)
    try:
        if isinstance(old, TpplanError):
            raise old
        inputs = inputs_of(entry)
    except TpplanError as error:
        return _unchecked(entry.file, error)
    return _compare(entry.file, old, inputs, lambda inputs: inputs.plan(entry.options), entry.options)


def _unchecked(path: str, why: TpplanError) -> PlanCheck:
    error = error_report(why).error
    return PlanCheck(path=path, current=False, reasons=(), message=error.message, error=error)


def _compare(
    path: str, old: SplitPlan, inputs: Inputs, plan: Callable[[Inputs], SplitPlan], options: Options | None = None
) -> PlanCheck:
    """Compare a plan with the one that is made today.

    Args:
        path: of its file.
        old: the plan.
        inputs: what it is made of today.
        plan: function that makes it.
        options: that a manifest asks for; by default those that the plan was asked for.
    """
    devices, was, now = inputs.devices, old.model.fingerprint, fingerprint(inputs.model)
    reasons, texts = [], []
    if was == now:
        inputs = _as_named(old, inputs, options)
    else:
        reasons.append(StaleReason.MODEL)
        texts.append(f"the plan is for {old.model.name} with the fingerprint {was}, {inputs.model.name} has {now}")
    if devices != old.devices:
        reasons.append(StaleReason.DEVICES)
        texts.append("the plan is for other devices than those that were named")
    changes = refused = None
    try:
        if options:
            others, draft = _other_options(old, inputs, options)
            if others:
                reasons.append(StaleReason.OPTIONS)
                texts.append(f"the manifest asks for {'; '.join(others)}")
        else:
            draft = _other_room(old, inputs) if inputs.draft else ""
        if draft:
            reasons.append(StaleReason.DRAFT)
            texts.append(draft)
        new = plan(inputs)
        changes = diff(old, new)
        if not reasons and old.speed and new.speed and old.speed.links != new.speed.links:
            reasons.append(StaleReason.DEVICES)
            texts.append("the plan is for links of another speed than those that were named")
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


def _as_named(old: SplitPlan, inputs: Inputs, options: Options | None) -> Inputs:
    """Return what a plan is made of today, with the names that the model and its prediction layers have in the plan.

    The directory may have another name on this machine, and other files beside the weights, or none.
    """
    same, draft = old.model, old.request.draft
    model = attrs.evolve(inputs.model, name=same.name, not_planned=same.not_planned, assumed=same.assumed)
    if inputs.draft and draft and old.request.mtp and options and options.mtp:
        inputs = attrs.evolve(inputs, draft=attrs.evolve(inputs.draft, name=draft.name))
    return attrs.evolve(inputs, model=model)


def _other_options(old: SplitPlan, inputs: Inputs, options: Options) -> tuple[list[str], str]:
    """Return in words what a manifest asks for otherwise than a plan was asked for, and how its draft model changed.

    Raises:
        InfeasibleError: the draft model does not fit.
        RequestError: it asks for what is not valid for the model.
    """
    asked = inputs.asked(options)
    is_auto = asked.strategy == AUTO
    resolved = resolve(inputs.model, attrs.evolve(asked, strategy=old.request.strategy if is_auto else asked.strategy))
    before, now = _words(old.request), _words(resolved)
    if is_auto and asked_strategy(old) != AUTO:
        now["strategy"] = AUTO
    elif old.speed and not is_auto:
        before["strategy"] = AUTO
    before["reserve"], now["reserve"] = reserves_told(old.request.reserve, resolved.reserve)
    is_drafting = inputs.draft and not resolved.mtp
    now["draft"] = inputs.draft.name if inputs.draft and is_drafting else "none"
    now["draft-output"] = "given" if is_drafting and inputs.is_split else "none"
    others = [f"{key} {now[key]} instead of {before[key]}" for key in now if now[key] != before[key]]
    is_same = all(now[key] == before[key] for key in ("draft", "draft-output", "mtp"))
    return others, _other_room(old, inputs) if is_same else ""


def _other_room(old: SplitPlan, inputs: Inputs) -> str:
    """Return in words how a plan's draft model changed: its room for what the plan was asked for is another today.

    Other devices have other room, which says nothing of the draft model.

    Raises:
        InfeasibleError: it does not fit.
    """
    draft = old.request.draft
    if draft is None or inputs.devices != old.devices:
        return ""
    asked = attrs.evolve(old.request, draft=None, strategy=asked_strategy(old))
    today = inputs.with_room(asked, old.devices)[0].draft
    if today is None or today.room_bytes == draft.room_bytes:
        return ""
    before, now = rooms_told(draft.room_bytes, today.room_bytes)
    what, whose = (draft.name, "their") if old.request.mtp else (f"the draft model {draft.name}", "its")
    return f"{what} changed: {whose} room is {now} instead of {before}"


def _words(request: Request) -> dict[str, str]:
    """Return the parts of a request by the options that ask for them."""
    tokens, context = request.cache.tokens, request.sequence_tokens
    draft = None if request.mtp else request.draft
    return {
        "cache": request.cache.kind,
        "context": f"{context}",
        "tokens": f"{tokens}" if tokens != context * request.batch else "for equal parts",
        **{name: str(getattr(request, name)) for name in ("batch", "layout", "strategy", "kv")},
        "max-rows": f"{request.max_rows}",
        "full-window": str(request.full_window).lower(),
        "beyond": str(request.beyond).lower(),
        "draft": draft.name if draft else "none",
        "draft-output": "given" if draft and draft.split else "none",
        "mtp": str(request.mtp).lower(),
        "drafts for": request.drafts_for or "none",
    }
