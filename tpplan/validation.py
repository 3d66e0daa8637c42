"""The report of ``tpplan validate``: every rule that each plan file breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.codec import loads, uncanonical_line
from tpplan.error_report import ErrorBody, error_report
from tpplan.errors import PlanError, TpplanError
from tpplan.problems import Problem
from tpplan.verify import REMAKE
from tpplan.versions import OTHER_VERSION

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
        problems: every rule that it breaks.
        uncanonical_line: first line that differs from the plan's canonical JSON; 0 if there is none.
        error: reason why the file cannot be read; omitted if it can.
    """

    path: str
    ok: bool
    problems: tuple[Problem, ...]
    uncanonical_line: int
    error: ErrorBody | None = None

    @property
    def hint(self) -> str:
        """Advice for the file; empty if it is a valid plan in canonical JSON."""
        if self.error:
            return self.error.hint
        if not self.problems:
            return REFORMAT if self.uncanonical_line else ""
        return OTHER_VERSION if all(problem.rule == "TP001" for problem in self.problems) else REMAKE


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
        return FileReport(path, ok=False, problems=error.problems, uncanonical_line=0)
    except TpplanError as error:
        return FileReport(path, ok=False, problems=(), uncanonical_line=0, error=error_report(error).error)
    return FileReport(path, ok=True, problems=(), uncanonical_line=uncanonical_line(text, plan))
