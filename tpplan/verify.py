"""Holding a plan against the rules: after planning, on load, and before it is executed."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tpplan.problems import MOST_PROBLEMS, Problem, refusal
from tpplan.rules import RULES
from tpplan.split_rules import MOST_SPLITS, few_splits
from tpplan.versions import is_newer

if TYPE_CHECKING:
    from tpplan.plan import SplitPlan

#: What to do about a plan that breaks a rule.
REMAKE = "make it again with tpplan plan; docs/plan-format.md explains the rules"


def problems(plan: SplitPlan) -> tuple[Problem, ...]:
    """Return the violations of every rule, in the order of the rules, up to 100 of each; empty for a valid plan."""
    few = len(plan.splits) <= MOST_SPLITS  # more are an attack on the time of the other rules
    return tuple(
        Problem(name, path, message)
        for name, rule in RULES.items()
        if few or rule is few_splits
        for path, message in islice(rule(plan), MOST_PROBLEMS)
    )


def verify(plan: SplitPlan, what: str = "the plan", *, allow_newer: bool = False) -> None:
    """Refuse a plan that breaks a rule.

    Args:
        plan: to look at.
        what: to call it in the error, such as its file's name.
        allow_newer: let a newer minor version of the format pass, to show it.

    Raises:
        PlanError: listing every violation, also as its ``problems``.
    """
    newer = allow_newer and is_newer(plan.format_version)
    if found := [p for p in problems(plan) if not (newer and p.rule == "TP001")]:
        raise refusal(what, found, REMAKE)
