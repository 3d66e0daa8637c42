"""Which plans are valid, and which are current: a line each, and what is wrong below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.render.text import PLAIN_COLUMNS, line, wrapped

if TYPE_CHECKING:
    from tpplan.render.text import Line


def validation(report: dict[str, Any], _columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.validation.ValidationReport`."""
    lines: list[Line] = []
    for file in report["files"]:
        count = len(file["problems"])
        broken = f"{count} problem{'s' if count > 1 else ''}"
        lines.append(((f"{file['path']}: ", ""), ("valid", "good") if file["ok"] else (broken, "bad")))
        lines += [((f"  {p['rule']} ", "bad"), (f"at {p['path'] or 'top level'}: {p['message']}", ""))
                  for p in file["problems"]]  # fmt: skip
        if file["uncanonical_line"]:
            lines.append(line(f"  non-canonical formatting at line {file['uncanonical_line']}", "warn"))
    return lines + _total([file["ok"] for file in report["files"]], "valid")


def check(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.check.CheckReport`."""
    lines: list[Line] = []
    for plan in report["plans"]:
        verdict = ("current", "good") if plan["current"] else (f"stale ({', '.join(plan['reasons'])})", "bad")
        lines.append(((f"{plan['path']}: ", ""), verdict))
        texts = [] if plan["current"] else [plan["message"]]
        texts += [plan["diff"]["summary"]] if "diff" in plan else []
        lines += [line(f"  {part}") for text in texts for part in wrapped(text, columns - 2)]
    return lines + _total([plan["current"] for plan in report["plans"]], "current")


def _total(verdicts: list[bool], word: str) -> list[Line]:
    good, count = sum(verdicts), len(verdicts)
    return [line(f"{good} of {count} plans {word}", "good" if good == count else "bad")] if count > 1 else []
