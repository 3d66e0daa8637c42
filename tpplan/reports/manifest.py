"""The report of ``tpplan plan --all``: what became of every plan of a manifest."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from tpplan.core.device import Device
from tpplan.core.model import ModelSpec
from tpplan.core.sizes import format_bytes
from tpplan.core.speed import LinkSpeed
from tpplan.errors import TpplanError
from tpplan.files.codec import document
from tpplan.hardware.spec import spec_of
from tpplan.planner.draft import for_draft, reserve_for_draft, split_draft
from tpplan.planner.infeasible import InfeasibleError, Suggestion
from tpplan.planner.plan import plan_request
from tpplan.reports.diff import PlanDiff, diff
from tpplan.reports.error import ErrorBody, error_report

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.core.plan import Request, SplitPlan
    from tpplan.planner.infeasible import Room
    from tpplan.planner.manifest import Entry, Manifest
    from tpplan.planner.options import Options

#: Where the whole of a draft model is too much for a device.
_SPLIT = Suggestion("draft-output", "draft.json", -1, "split the draft model over the devices, too")


@frozen
class Inputs:
    """What the entry of a manifest is planned with.

    Attributes:
        model: the model.
        devices: the devices.
        links: measured links between them.
        draft: the draft model, or the model's prediction layers, that the plan leaves room for, if any.
        is_split: whether the draft model is split like the model; else all of it is on every device.
        drafted_for: the model that ``model`` drafts for, by whose request it is split; None for any other plan.
    """

    model: ModelSpec
    devices: tuple[Device, ...]
    links: tuple[LinkSpeed, ...] = ()
    draft: ModelSpec | None = None
    is_split: bool = False
    drafted_for: ModelSpec | None = None

    def asked(self, options: Options) -> Request:
        """Return the request that options ask for, without room for a draft model.

        Raises:
            RequestError: they are not valid.
        """
        if self.drafted_for:
            return for_draft(options.request(self.drafted_for), self.drafted_for)
        return options.request(self.model)

    def with_room(self, asked: Request, devices: tuple[Device, ...]) -> tuple[Request, SplitPlan | None]:
        """Return a request with room for the draft model, if there is any, and the plan of one that is split.

        Raises:
            InfeasibleError: not even the draft model fits.
            RequestError: the request is not valid for the draft model or the devices.
        """
        if self.draft and self.is_split:
            return split_draft(asked, self.draft, self.model, devices, self.links)
        return (reserve_for_draft(asked, self.draft, self.model, devices) if self.draft else asked), None

    def plan(self, options: Options) -> SplitPlan:
        """Make the plan that options ask for.

        Raises:
            InfeasibleError: none fits.
            RequestError: the options are not valid for the models or the devices.
        """
        try:
            return self._plan(options)
        except InfeasibleError as error:
            if not self.draft or self.is_split:
                raise
            try:
                evolve(self, is_split=True)._plan(options, is_advised=False)  # noqa: SLF001 (its own)
            except TpplanError:
                raise error from None
            raise error.with_first(_SPLIT) from None

    def _plan(self, options: Options, *, is_advised: bool = True) -> SplitPlan:
        asked = self.asked(options)
        room = self.room(asked.strategy)
        return plan_request(self.model, self.devices, asked, self.links, room, is_advised=is_advised)

    def room(self, strategy: str) -> Room | None:
        """Return what leaves room for the draft model, which is split by a strategy; None if there is none."""

        def room(request: Request, devices: tuple[Device, ...]) -> Request:
            whole, _ = self.with_room(evolve(request, strategy=strategy), devices)
            return evolve(request, draft=whole.draft)

        return room if self.draft else None


class Outcome(StrEnum):
    """What became of a plan."""

    NEW = "new"
    CHANGED = "changed"
    UNCHANGED = "unchanged"
    INFEASIBLE = "infeasible"  # it does not fit; what was there before still is
    ERROR = "error"  # the model, the devices or the file cannot be read or written, or the options are invalid


@frozen(kw_only=True)
class ManifestPlan:
    """What became of one plan.

    Attributes:
        path: path of the plan's file.
        outcome: whether the file is new, changed or unchanged, or why it was not written.
        message: the outcome in words.
        error: why the file was not written; left out if it was, or is unchanged.
        diff: what changed in the plan; left out if nothing did, or what was there before was no valid plan.
    """

    path: str
    outcome: Outcome
    message: str
    error: ErrorBody | None = None
    diff: PlanDiff | None = None


@document("manifest-report")
@frozen
class ManifestReport:
    """What became of the plans of a manifest.

    Attributes:
        ok: whether all plans were made.
        manifest: path of the manifest.
        plans: one result per plan, in the order of the manifest.
        notes: what the command noted on standard error beside it; left out for none.
    """

    ok: bool
    manifest: str
    plans: tuple[ManifestPlan, ...]
    notes: tuple[str, ...] = ()

    @property
    def only_infeasible(self) -> bool:
        """Whether those that were not made do not fit, which is an answer, rather than an error."""
        return all(plan.outcome is not Outcome.ERROR for plan in self.plans)


def make(
    manifest: Manifest,
    inputs_of: Callable[[Entry], Inputs],
    stored: Callable[[str], SplitPlan | TpplanError | None],
    save: Callable[[SplitPlan, str], bool],
) -> ManifestReport:
    """Make every plan of a manifest; one that cannot be made keeps no other from it but that of its draft model.

    Args:
        manifest: the manifest.
        inputs_of: function that reads what an entry is planned with.
        stored: function that returns the plan in a file, why it cannot be read, or None if there is no file.
        save: function that writes a plan, and tells whether it wrote anything.
    """
    plans: list[ManifestPlan] = []
    for entry in manifest.plans:
        of = plans[-1] if entry.is_draft else None  # the model's entry is the one before
        plans.append(_without(of, entry) if of and of.error else _make(entry, inputs_of, stored, save))
    return ManifestReport(all(plan.error is None for plan in plans), manifest.path, tuple(plans))


def _without(of: ManifestPlan, entry: Entry) -> ManifestPlan:
    """Return what became of the plan of a draft model that goes with a plan which was not made."""
    message = f"not made, as {of.path} was not, the plan of the model that it drafts for"
    error = ErrorBody(kind=of.error.kind if of.error else "", message=message)
    return ManifestPlan(path=entry.file, outcome=of.outcome, message=message, error=error)


def _make(
    entry: Entry,
    inputs_of: Callable[[Entry], Inputs],
    stored: Callable[[str], SplitPlan | TpplanError | None],
    save: Callable[[SplitPlan, str], bool],
) -> ManifestPlan:
    gpus = ""
    try:
        inputs = inputs_of(entry)
        gpus = spec_of(inputs.devices)
        plan, before = inputs.plan(entry.options), stored(entry.file)
        is_written = save(plan, entry.file)
    except TpplanError as error:
        outcome = Outcome.INFEASIBLE if isinstance(error, InfeasibleError) else Outcome.ERROR
        body = error_report(error, gpus).error
        return ManifestPlan(path=entry.file, outcome=outcome, message=body.message, error=body)
    if not is_written:
        return ManifestPlan(path=entry.file, outcome=Outcome.UNCHANGED, message="unchanged")
    if before is None:
        return ManifestPlan(path=entry.file, outcome=Outcome.NEW, message=in_short(plan))
    if isinstance(before, TpplanError):
        text = f"what was there was no valid plan; now {in_short(plan)}"
        return ManifestPlan(path=entry.file, outcome=Outcome.CHANGED, message=text)
    changes = diff(before, plan)
    text = changes.summary if changes else "the same plan, written as tpplan does"
    return ManifestPlan(path=entry.file, outcome=Outcome.CHANGED, message=text, diff=changes or None)


def in_short(plan: SplitPlan) -> str:
    """Return in words what a plan comes to."""
    count = len(plan.devices)
    used = format_bytes(sum(entry.used_bytes for entry in plan.memory))
    budgets = format_bytes(sum(device.budget_bytes for device in plan.devices))
    rate = f", {plan.speed.decode[0].tokens_per_second:,} tokens/s" if plan.speed else ""
    return f"{plan.model.name} on {count} device{'s' * (count > 1)}, {used} of {budgets} used{rate}"
