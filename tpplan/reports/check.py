"""Checking whether plans are current: whether planning again gives the same plan, as ``tpplan check`` reports."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from tpplan.core.plan import AUTO, reserves_told
from tpplan.errors import RequestError, TpplanError
from tpplan.files.codec import document
from tpplan.hardware.spec import spec_of
from tpplan.planfile.codec import fingerprint
from tpplan.planner.draft import reserves_of
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.plan import asked_strategy, replan
from tpplan.planner.request import resolve
from tpplan.reports.diff import PlanDiff, diff
from tpplan.reports.error import ErrorBody, error_report
from tpplan.reports.manifest import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.core.device import Device
    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import Request, SplitPlan
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
    """

    current: bool
    plans: tuple[PlanCheck, ...]
    manifest: str = ""
    unlisted: tuple[str, ...] = ()


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


def _check(path: str, old: SplitPlan | TpplanError, model: ModelSpec, devices: tuple[Device, ...]) -> PlanCheck:
    if isinstance(old, TpplanError):
        return _unchecked(path, old)
    held = attrs.evolve(old, devices=devices or old.devices)
    return _compare(path, old, Inputs(model, held.devices), lambda inputs: replan(inputs.model, held))


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
    model, devices = inputs.model, inputs.devices
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
        if options:
            others, draft = _other_options(old, attrs.evolve(inputs, model=model), options)
            if others:
                reasons.append(StaleReason.OPTIONS)
                texts.append(f"the manifest asks for {'; '.join(others)}")
            if draft:
                reasons.append(StaleReason.DRAFT)
                texts.append(draft)
        new = plan(attrs.evolve(inputs, model=model))
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


def _other_options(old: SplitPlan, inputs: Inputs, options: Options) -> tuple[list[str], str]:
    """Return in words what a manifest asks for otherwise than a plan was asked for, and how its draft model changed.

    Raises:
        InfeasibleError: the draft model does not fit.
        RequestError: it asks for what is not valid for the model.
    """
    own = inputs.asked(options)
    asked, _ = inputs.with_room(own, inputs.devices)
    is_auto = asked.strategy == AUTO
    resolved = resolve(inputs.model, attrs.evolve(asked, strategy=old.request.strategy if is_auto else asked.strategy))
    before, now = _words(old.request), _words(resolved)
    if is_auto and asked_strategy(old) != AUTO:
        now["strategy"] = AUTO
    elif old.speed and not is_auto:
        before["strategy"] = AUTO
    draft, named = "", {}
    if inputs.draft and (old.request.draft, old.request.mtp) == (resolved.draft, resolved.mtp):
        before["reserve"], now["reserve"], draft = _reserves_beside(inputs.draft.name, old, inputs, own)
    else:
        before["reserve"], now["reserve"] = reserves_told(old.request.reserve, resolved.reserve)
        named = {"reserve": f"reserve, with room for {inputs.draft.name},"} if inputs.draft else {}
    others = [f"{named.get(key, key)} {now[key]} instead of {before[key]}" for key in now if now[key] != before[key]]
    return others, draft


def _reserves_beside(draft: str, old: SplitPlan, inputs: Inputs, own: Request) -> tuple[str, str, str]:
    """Return what a plan reserved beside its draft model, what a manifest does, and how the former changed, in words.

    A plan has the sum of both. Where it is not that of the manifest's reserve and of today's room for what the plan was
    asked for, one of both is another, which is told from bytes that cannot be. Other devices have other room.

    Args:
        draft: name of the draft model.
        old: the plan.
        inputs: what it is made of today.
        own: what the manifest asks for, without the room.
    """
    (told,) = reserves_told(own.reserve)
    if inputs.devices != old.devices:
        return told, told, ""
    empty = attrs.evolve(old.request, reserve=own.reserve, strategy=asked_strategy(old))
    both, _ = inputs.with_room(empty, old.devices)
    sums = [(old.request.reserved(i), both.reserved(i), own.reserved(i)) for i in range(len(old.devices))]
    if all(before == now for before, now, _ in sums):
        return told, told, ""
    reserves = [before - now + asked for before, now, asked in sums]  # if the room did not change
    rooms = [before - asked for before, _, asked in sums]  # if the manifest's reserve did not
    can_reserve = min(reserves) >= 0
    can_draft = min(rooms) >= 0 and any(reserves) and any(rooms) and (inputs.is_split or len({*rooms}) == 1)
    if not can_draft:  # or both are others
        sides = (own.reserve, reserves_of(reserves)) if can_reserve else (both.reserve, old.request.reserve)
        now, before = reserves_told(*sides)
        return before, now if can_reserve else f"(with room for {draft}) {now}", ""
    now, before = reserves_told(reserves_of([now - asked for _, now, asked in sums]), reserves_of(rooms))
    unless = ", unless the manifest's reserve did" if can_reserve else ""
    what, whose = (draft, "their") if old.request.mtp else (f"the draft model {draft}", "its")
    return told, told, f"{what} changed{unless}: {whose} room is {now} instead of {before}"


def _words(request: Request) -> dict[str, str]:
    """Return the parts of a request by the options that ask for them."""
    tokens, context = request.cache.tokens, request.sequence_tokens
    return {
        "cache": request.cache.kind,
        "context": f"{context}",
        "tokens": f"{tokens}" if tokens != context * request.batch else "for equal parts",
        **{name: str(getattr(request, name)) for name in ("batch", "layout", "strategy", "kv")},
        "max-rows": f"{request.max_rows}",
        "full-window": str(request.full_window).lower(),
        "beyond": str(request.beyond).lower(),
        "draft": request.draft or "none",
        "mtp": str(request.mtp).lower(),
    }
