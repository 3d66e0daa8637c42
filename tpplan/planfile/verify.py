"""Checking a plan against the rules: after planning, on loading, and before execution."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tpplan.core.versions import OTHER_VERSION, is_newer
from tpplan.errors import MOST_PROBLEMS, Problem, refusal
from tpplan.planfile.rules import RULES
from tpplan.planfile.split_rules import MOST_SPLITS, few_splits

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan

#: Advice for a plan that breaks a rule.
REMAKE = "make it again with tpplan plan; docs/plan-format.md explains the rules"


def problems(plan: SplitPlan) -> tuple[Problem, ...]:
    """Return up to 100 violations of each rule, in the order of the rules; empty for a valid plan."""
    few = len(plan.splits) <= MOST_SPLITS  # with more, the other rules would take too long
    return tuple(
        Problem(name, path, message)
        for name, rule in RULES.items()
        if few or rule is few_splits
        for path, message in islice(rule(plan), MOST_PROBLEMS)
    )


def verify(plan: SplitPlan, what: str = "the plan", *, allow_newer: bool = False) -> None:
    """Check that a plan breaks no rule.

    Args:
        plan: the plan to check.
        what: name of the plan in the error, such as its file's name.
        allow_newer: accept a newer minor version of the format, for showing.

    Raises:
        PlanError: listing every violation, also as its ``problems``.
    """
    newer = allow_newer and is_newer(plan.format_version)
    if found := [p for p in problems(plan) if not (newer and p.rule == "TP001")]:
        raise refusal(what, found, OTHER_VERSION if all(p.rule == "TP001" for p in found) else REMAKE)
