"""What is to say of several plans, a line each and more below it: which are valid, current, made, or changed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tpplan.render.diff import diff
from tpplan.render.text import BLANK, PLAIN_COLUMNS, abridged, line, wrapped

if TYPE_CHECKING:
    from tpplan.render.text import Line

_OUTCOMES = {"infeasible": "does not fit", "error": "not made"}


def validation(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.reports.validate.ValidationReport`."""
    lines: list[Line] = []
    for file in report["files"]:
        broken = _count(file) if "error" not in file else "cannot be read"
        lines.append(((f"{file['path']}: ", ""), ("valid", "good") if file["ok"] else (broken, "bad")))
        lines += _below(file["error"]["message"], columns) if "error" in file else []
        lines += _problems(file, columns)
        if file["uncanonical_line"]:
            lines.append(line(f"  non-canonical formatting at line {file['uncanonical_line']}", "warn"))
    return lines + _total([file["ok"] for file in report["files"]], "valid")


def check(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.reports.check.CheckReport`."""
    lines: list[Line] = []
    for plan in report["plans"]:
        error = plan.get("error", {})
        problems = error.get("problems", ())
        is_new = plan["reasons"] == ["missing"]
        wrong = "not checked" if "error" in plan else f"stale ({', '.join(plan['reasons'])})"
        wrong = plan["message"] if is_new else wrong
        wrong += f", {_count(error)}" if problems else ""
        lines.append(((f"{plan['path']}: ", ""), ("current", "good") if plan["current"] else (wrong, "bad")))
        lines += _problems(error, columns)
        texts = [] if plan["current"] or problems or is_new else [plan["message"]]
        texts += [plan["diff"]["summary"]] if "diff" in plan else []
        lines += [below for text in texts for below in _below(text, columns)]
    lines += [((f"{path}: ", ""), ("not in the manifest", "warn")) for path in report.get("unlisted", ())]
    return lines + _total([plan["current"] for plan in report["plans"]], "current")


def made(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.reports.manifest.ManifestReport`."""
    lines: list[Line] = []
    for plan in report["plans"]:
        word = _OUTCOMES.get(plan["outcome"], plan["outcome"])
        style = "bad" if "error" in plan else "dim" if plan["outcome"] == "unchanged" else "good"
        lines.append(((f"{plan['path']}: ", ""), (word, style)))
        lines += _below(plan["message"], columns) if plan["outcome"] != "unchanged" else []
    return lines + _total(["error" not in plan for plan in report["plans"]], "made")


def since(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.reports.revision.RevisionDiff`."""
    lines: list[Line] = []
    plans = report["plans"]
    for plan in (plan for plan in plans if plan["change"] != "same"):
        lines.append(((f"{plan['path']}: ", ""), (plan["change"], "bad" if "error" in plan else "warn")))
        if "diff" in plan:
            lines += [*diff(plan["diff"], columns), BLANK]
        else:
            lines += _below(plan["message"], columns)
    counts = Counter(plan["change"] for plan in plans)
    told = [f"{counts[change]} {change}" for change in ("changed", "new", "deleted", "same") if counts[change]]
    count = f"{len(plans)} plan{'s' * (len(plans) != 1)} since {report['revision']}: " + ", ".join(told)
    return [*lines, *(line(text, "good" if report["same"] else "warn") for text in wrapped(count, columns))]


def _count(report: dict[str, Any]) -> str:
    count = len(report["problems"]) + report.get("unlisted", 0)
    return f"{count} problem{'s' if count > 1 else ''}"


def _problems(report: dict[str, Any], columns: int) -> list[Line]:
    """Return problems under their file's headline: the rule, and beside it the rest, wrapped."""
    lines: list[Line] = []
    for problem in report.get("problems", ()):
        rule = f"  {problem['rule']} "
        first, *more = wrapped(f"at {problem['path'] or 'top level'}: {problem['message']}", columns - len(rule))
        lines += [((rule, "bad"), (first, "")), *(line(" " * len(rule) + part) for part in more)]
    return lines + ([line(f"  and {report['unlisted']} more", "dim")] if "unlisted" in report else [])


def _below(text: str, columns: int) -> list[Line]:
    """Return a text under its headline, indented and wrapped."""
    return [line(f"  {part}") for one in abridged(text).split("\n") for part in wrapped(one, columns - 2)]


def _total(verdicts: list[bool], word: str) -> list[Line]:
    good, count = sum(verdicts), len(verdicts)
    return [line(f"{good} of {count} plans {word}", "good" if good == count else "bad")] if count > 1 else []
