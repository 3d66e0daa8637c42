"""What is to say of several plans, a line each and more below it: which are valid, current, made, or changed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tpplan.render.blocks import INDENT, Heading, Text
from tpplan.render.diff import diff
from tpplan.render.text import BLANK, abridged, line

if TYPE_CHECKING:
    from tpplan.render.blocks import Block

_OUTCOMES = {"infeasible": "does not fit", "error": "not made"}


def validation(report: dict[str, Any]) -> list[Block]:
    """Return the view of a :class:`~tpplan.reports.validate.ValidationReport`."""
    blocks: list[Block] = []
    for file in report["files"]:
        broken = _count(file) if "error" not in file else "cannot be read"
        blocks.append(((f"{file['path']}: ", ""), ("valid", "good") if file["ok"] else (broken, "bad")))
        blocks += _below(file["error"]["message"]) if "error" in file else []
        blocks += _problems(file)
        if file["uncanonical_line"]:
            blocks.append(line(f"  non-canonical formatting at line {file['uncanonical_line']}", "warn"))
    return blocks + _total([file["ok"] for file in report["files"]], "valid")


def check(report: dict[str, Any]) -> list[Block]:
    """Return the view of a :class:`~tpplan.reports.check.CheckReport`."""
    blocks: list[Block] = []
    for plan in report["plans"]:
        error = plan.get("error", {})
        problems = error.get("problems", ())
        is_new = plan["reasons"] == ["missing"]
        wrong = "not checked" if "error" in plan else f"stale ({', '.join(plan['reasons'])})"
        wrong = plan["message"] if is_new else wrong
        wrong += f", {_count(error)}" if problems else ""
        blocks.append(((f"{plan['path']}: ", ""), ("current", "good") if plan["current"] else (wrong, "bad")))
        blocks += _problems(error)
        texts = [] if plan["current"] or problems or is_new else [plan["message"]]
        texts += [plan["diff"]["summary"]] if "diff" in plan else []
        blocks += [below for text in texts for below in _below(text)]
    blocks += [((f"{path}: ", ""), ("not in the manifest", "warn")) for path in report.get("unlisted", ())]
    return blocks + _total([plan["current"] for plan in report["plans"]], "current")


def made(report: dict[str, Any]) -> list[Block]:
    """Return the view of a :class:`~tpplan.reports.manifest.ManifestReport`."""
    blocks: list[Block] = []
    for plan in report["plans"]:
        word = _OUTCOMES.get(plan["outcome"], plan["outcome"])
        style = "bad" if "error" in plan else "dim" if plan["outcome"] == "unchanged" else "good"
        blocks.append(((f"{plan['path']}: ", ""), (word, style)))
        blocks += _below(plan["message"]) if plan["outcome"] != "unchanged" else []
    return blocks + _total(["error" not in plan for plan in report["plans"]], "made")


def since(report: dict[str, Any]) -> list[Block]:
    """Return the view of a :class:`~tpplan.reports.revision.RevisionDiff`."""
    blocks: list[Block] = []
    plans = report["plans"]
    for plan in (plan for plan in plans if plan["change"] != "same"):
        blocks.append(Heading(plan["path"], f": {plan['change']}", is_title=True))
        blocks += [*diff(plan["diff"]), BLANK] if "diff" in plan else _below(plan["message"])
    counts = Counter(plan["change"] for plan in plans)
    told = [f"{counts[change]} {change}" for change in ("changed", "new", "deleted", "same") if counts[change]]
    count = f"{len(plans)} plan{'s' * (len(plans) != 1)} since {report['revision']}: " + ", ".join(told)
    return [*blocks, Text(count, "good" if report["same"] else "warn")]


def _count(report: dict[str, Any]) -> str:
    count = len(report["problems"]) + report.get("unlisted", 0)
    return f"{count} problem{'s' if count > 1 else ''}"


def _problems(report: dict[str, Any]) -> list[Block]:
    """Return problems under their file's headline: the rule, and beside it the rest."""
    blocks: list[Block] = [
        Text(f"at {problem['path'] or 'top level'}: {problem['message']}", lead=(f"  {problem['rule']} ", "bad"))
        for problem in report.get("problems", ())
    ]
    return blocks + ([line(f"  and {report['unlisted']} more", "dim")] if "unlisted" in report else [])


def _below(text: str) -> list[Block]:
    """Return a text under its headline."""
    return [Text(one, lead=INDENT) for one in abridged(text).split("\n")]


def _total(verdicts: list[bool], word: str) -> list[Block]:
    good, count = sum(verdicts), len(verdicts)
    return [line(f"{good} of {count} plans {word}", "good" if good == count else "bad")] if count > 1 else []
