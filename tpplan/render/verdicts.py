"""Which plans are valid, and which are current: a line each, and what is wrong below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.render.text import PLAIN_COLUMNS, abridged, line, wrapped

if TYPE_CHECKING:
    from tpplan.render.text import Line


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
        wrong = "not checked" if "error" in plan else f"stale ({', '.join(plan['reasons'])})"
        wrong += f", {_count(error)}" if problems else ""
        lines.append(((f"{plan['path']}: ", ""), ("current", "good") if plan["current"] else (wrong, "bad")))
        lines += _problems(error, columns)
        texts = [] if plan["current"] or problems else [plan["message"]]
        texts += [plan["diff"]["summary"]] if "diff" in plan else []
        lines += [below for text in texts for below in _below(text, columns)]
    return lines + _total([plan["current"] for plan in report["plans"]], "current")


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
