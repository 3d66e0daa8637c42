"""The report of ``tpplan diff --against``: what became of plans since a git revision."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from tpplan.errors import TpplanError
from tpplan.files.codec import document
from tpplan.planfile.codec import loads
from tpplan.reports.diff import PlanDiff, diff
from tpplan.reports.error import ErrorBody, error_report
from tpplan.reports.manifest import in_short

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.core.plan import SplitPlan

#: The bytes of a file, why they are not read, or None where there is none.
_File: TypeAlias = bytes | TpplanError | None


class Since(StrEnum):
    """What became of a plan."""

    SAME = "same"
    CHANGED = "changed"
    NEW = "new"
    DELETED = "deleted"


@frozen(kw_only=True)
class PlanSince:
    """What became of one plan.

    Attributes:
        path: path of the plan's file.
        change: what became of it.
        message: the change in words.
        error: why the two cannot be compared: one of them is no valid plan; left out if both are.
        diff: changes from the revision's plan to the one here; left out if there are none.
    """

    path: str
    change: Since
    message: str
    error: ErrorBody | None = None
    diff: PlanDiff | None = None


@document("revision-diff")
@frozen
class RevisionDiff:
    """What became of plans since a revision.

    Attributes:
        same: whether every plan is as it was.
        revision: the revision, as it was named.
        commit: its hash.
        plans: one result per plan.
    """

    same: bool
    revision: str
    commit: str
    plans: tuple[PlanSince, ...]


def since(revision: str, commit: str, files: Mapping[str, tuple[_File, _File]]) -> RevisionDiff:
    """Compare the plans of a revision with those that are here.

    Args:
        revision: its name.
        commit: its hash.
        files: for each path the file's bytes in the revision and here, or why they are not read; None where there is
            no file.
    """
    plans = tuple(_since(path, before, after, revision) for path, (before, after) in files.items())
    return RevisionDiff(all(plan.change is Since.SAME for plan in plans), revision, commit, plans)


def _since(path: str, before: _File, after: _File, revision: str) -> PlanSince:
    if before == after:
        return PlanSince(path=path, change=Since.SAME, message="the plans are equal")
    change = Since.NEW if before is None else Since.DELETED if after is None else Since.CHANGED
    try:
        plans = [_plan(before, f"{revision}:{path}"), _plan(after, path)]
    except TpplanError as error:
        body = error_report(error).error
        return PlanSince(path=path, change=change, message=body.message, error=body)
    old, new = plans
    if not (old and new):
        return PlanSince(path=path, change=change, message=" ".join(in_short(plan) for plan in plans if plan))
    found = diff(old, new)
    is_same = not found
    return PlanSince(
        path=path, change=Since.SAME if is_same else change, message=found.summary, diff=None if is_same else found
    )


def _plan(file: _File, name: str) -> SplitPlan | None:
    if isinstance(file, TpplanError):
        raise file
    return None if file is None else loads(file, name, allow_newer=True)
