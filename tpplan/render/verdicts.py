"""Which plans are valid, and which are current: a line each, and what is wrong below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.render.blocks import INDENT, Text
from tpplan.render.text import abridged, line

if TYPE_CHECKING:
    from tpplan.render.blocks import Block


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
        wrong = "not checked" if "error" in plan else f"stale ({', '.join(plan['reasons'])})"
        wrong += f", {_count(error)}" if problems else ""
        blocks.append(((f"{plan['path']}: ", ""), ("current", "good") if plan["current"] else (wrong, "bad")))
        blocks += _problems(error)
        texts = [] if plan["current"] or problems else [plan["message"]]
        texts += [plan["diff"]["summary"]] if "diff" in plan else []
        blocks += [below for text in texts for below in _below(text)]
    return blocks + _total([plan["current"] for plan in report["plans"]], "current")


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
