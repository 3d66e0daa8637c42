"""A plan for another engine: what to copy, and what is different there."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from tpplan.render.text import BLANK, PLAIN_COLUMNS, line, wrapped

if TYPE_CHECKING:
    from tpplan.render.text import Line

_GAP = 2


def export(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out an :class:`~tpplan.reports.export.ExportReport`: what to copy, then what differs."""
    if not report["possible"]:
        return _refusal(report, columns)
    return [*map(line, text(report).splitlines()), BLANK, *differences(report, columns)]


def text(report: dict[str, Any]) -> str:
    """Return what to copy: a command for a shell, or the files, which start with the command that reads them."""
    words = [*(f"{v['name']}={v['value']}" for v in report["environment"]), *map(shlex.quote, report["argv"])]
    if "files" in report:
        command = f"# {' '.join(words)}\n"
        return "\n".join(f"{command}{file['text']}" for file in report["files"])
    return " \\\n  ".join(_by_flag(words)) + "\n"


def differences(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Say what the engine does differently, and which version of it was read."""
    lines: list[Line] = [line("differs from the plan:", "head")]
    lines += [one for each in report["differences"] for one in _item(each, columns)]
    read = f"read: {report['version']}. MODEL stands for the path of {report['model']}"
    return [*lines, *(line(part, "dim") for part in wrapped(read, columns))]


def _refusal(report: dict[str, Any], columns: int) -> list[Line]:
    head = f"no, {report['engine']} cannot run this plan for {report['model']}, because"
    lines: list[Line] = [line(part, "bad") for part in wrapped(head, columns)]
    lines += [one for each in report["reasons"] for one in _item(each, columns)]
    return [*lines, *(line(p, "dim") for p in wrapped(f"read: {report['version']}", columns))]


def _item(sentence: str, columns: int) -> list[Line]:
    first, *more = wrapped(sentence, columns - _GAP)
    return [line(f"- {first}"), *(line(f"  {part}") for part in more)]


def _by_flag(words: list[str]) -> list[str]:
    """Put a command's words on lines that begin with its flags; the first has the variables and the program."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("-"):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
