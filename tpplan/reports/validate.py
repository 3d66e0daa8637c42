"""The report of ``tpplan validate``: every rule that each plan file breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.errors import PlanError, Problem, TpplanError
from tpplan.files.codec import document, uncanonical_line
from tpplan.planfile.codec import loads
from tpplan.reports.error import ErrorBody, error_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Advice for a valid plan that is not canonical JSON.
REFORMAT = "in Python, tpplan.load(path).save(path) formats a plan as tpplan does"


@frozen
class FileReport:
    """The report on one file.

    Attributes:
        path: path of the file, as given.
        ok: whether it is a valid plan.
        problems: the first 100 violations of rules.
        unlisted: how many more there are; omitted if none.
        uncanonical_line: first line that differs from the plan's canonical JSON; 0 if there is none.
        error: reason why the file cannot be read; omitted if it can.
        hint: advice; omitted if it is a valid plan in canonical JSON.
    """

    path: str
    ok: bool
    problems: tuple[Problem, ...]
    uncanonical_line: int
    unlisted: int = 0
    error: ErrorBody | None = None
    hint: str = ""


@document("validation-report")
@frozen
class ValidationReport:
    """The report on several files.

    Attributes:
        ok: whether all files are valid plans.
        files: reports on the files, in the order given.
    """

    ok: bool
    files: tuple[FileReport, ...]


def validate(paths: Iterable[str], read: Callable[[str], str]) -> ValidationReport:
    """Validate several plan files.

    Args:
        paths: paths of the files.
        read: function that returns a file's text, or raises a :class:`TpplanError`.
    """
    reports = tuple(_report(path, read) for path in paths)
    return ValidationReport(all(report.ok for report in reports), reports)


def _report(path: str, read: Callable[[str], str]) -> FileReport:
    try:
        text = read(path)
        plan = loads(text, path)
    except PlanError as error:
        found = error_report(error).error
        return FileReport(
            path, ok=False, problems=found.problems, uncanonical_line=0, unlisted=found.unlisted, hint=found.hint
        )
    except TpplanError as error:
        report = error_report(error).error
        return FileReport(path, ok=False, problems=(), uncanonical_line=0, error=report, hint=report.hint)
    line = uncanonical_line(text, plan)
    return FileReport(path, ok=True, problems=(), uncanonical_line=line, hint=REFORMAT if line else "")
