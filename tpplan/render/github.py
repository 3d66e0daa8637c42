"""Verdicts as annotations of GitHub's workflows: a command on a line that the runner takes from a step's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.files.jsontext import visible
from tpplan.render.diff import speed_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: What may not be in a message, and what else may not be in a property: as in GitHub's toolkit.
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = str.maketrans({":": "%3A", ",": "%2C"})
_STREAM = "-"


def validation(report: dict[str, Any]) -> str:
    """Annotate a :class:`~tpplan.reports.validate.ValidationReport`: every problem, at its line."""
    return "".join(one for file in report["files"] for one in _file(file))


def check(report: dict[str, Any]) -> str:
    """Annotate a :class:`~tpplan.reports.check.CheckReport`: every plan that is not current."""
    return "".join(one for plan in report["plans"] for one in _plan(plan))


def diff(changes: dict[str, Any], path: str) -> str:
    """Annotate a :class:`~tpplan.reports.diff.PlanDiff`: what changes, on the file of the second plan."""
    if not changes["reasons"]:
        return ""
    message = _said(changes["summary"], *speed_lines(changes))
    return _command("notice", f"the plan changes ({', '.join(changes['reasons'])})", message, path)


def since(report: dict[str, Any]) -> str:
    """Annotate a :class:`~tpplan.reports.revision.RevisionDiff`: what changes, and which plans come and go."""
    return "".join(one for plan in report["plans"] for one in _changed(plan))


def error(report: dict[str, Any]) -> str:
    """Annotate an :class:`~tpplan.reports.error.ErrorReport`."""
    body = report["error"]
    return _command("error", "tpplan", _said(body["message"], body.get("hint", "")))


def _file(file: dict[str, Any]) -> Iterator[str]:
    path = file["path"]
    if "error" in file:
        yield _command("error", "the plan cannot be read", file["error"]["message"], path)
    yield from _problems(file, path)
    if line := file["uncanonical_line"]:
        yield _command("warning", "non-canonical formatting", file["hint"], path, line)


def _plan(plan: dict[str, Any]) -> Iterator[str]:
    path, found = plan["path"], plan.get("error", {})
    if found.get("problems"):
        yield from _problems(found, path)
    elif found:
        yield _command("error", "the plan is not checked", found["message"], path)
    elif not plan["current"]:
        message = _said(plan["message"], plan.get("diff", {}).get("summary", ""))
        yield _command("error", f"the plan is stale ({', '.join(plan['reasons'])})", message, path)


def _changed(plan: dict[str, Any]) -> Iterator[str]:
    if "diff" in plan:
        yield diff(plan["diff"], plan["path"])
    elif plan["change"] != "same":
        yield _command(
            "error" if "error" in plan else "notice", f"the plan is {plan['change']}", plan["message"], plan["path"]
        )


def _problems(report: dict[str, Any], path: str) -> Iterator[str]:
    for problem in report.get("problems", ()):
        message = f"at {problem['path'] or 'top level'}: {problem['message']}"
        yield _command("error", f"the plan breaks {problem['rule']}", message, path, problem.get("line", 0))
    if "unlisted" in report:
        yield _command("error", "the plan is invalid", f"and {report['unlisted']} more problems", path)


def _said(*texts: str) -> str:
    return "\n".join(filter(None, texts))


def _command(kind: str, title: str, message: str, path: str = _STREAM, line: int = 0) -> str:
    """Return a workflow command; without a file where the plan came from standard input."""
    properties = {"file": "" if path == _STREAM else path, "line": line, "title": title}
    named = ",".join(f"{key}={_escaped([str(value)], _DATA | _PROPERTY)}" for key, value in properties.items() if value)
    return f"::{kind} {named}::{_escaped(message.split(chr(10)), _DATA)}\n"


def _escaped(lines: Iterable[str], escapes: dict[int, str]) -> str:
    return "\n".join(map(visible, lines)).translate(escapes)
