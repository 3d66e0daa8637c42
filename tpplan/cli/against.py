"""``tpplan diff --against``: which files of a git revision are compared with which here."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import PurePath
from typing import TYPE_CHECKING

from tpplan.cli import console
from tpplan.cli import manifest as of_manifest
from tpplan.cli import plans as on_plans
from tpplan.errors import PlanError, TpplanError, UsageError
from tpplan.files.kinds import PLAN, mistaken
from tpplan.files.places import SUFFIX, is_other, is_pattern, matches, places_of
from tpplan.files.revision import revision
from tpplan.files.text import nearest, parse_json, read_bytes
from tpplan.render.github import since as annotate
from tpplan.render.verdicts import since as view
from tpplan.reports.revision import since

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.files.revision import Revision
    from tpplan.reports.revision import RevisionDiff


def diff(plans: tuple[str, ...], name: str, manifest: str, form: str) -> RevisionDiff:
    """Compare plans with those of a revision, and show what became of each.

    Args:
        plans: files, folders and patterns; the plans of the manifest if there are none.
        name: of the revision.
        manifest: path of the manifest; the usual one if empty.
        form: ``text``, ``json``, ``markdown`` or ``github``.
    """
    if not name or (plans and manifest):
        hint = "write --against REVISION with it, and no PLANS; without --against tpplan diff compares two plans"
        raise UsageError(f"--manifest does not go with {'PLANS' if name else 'a diff of two plans'}", hint)
    found = revision(name, os.path.dirname(manifest))  # noqa: PTH120 (an empty one is the current directory)
    named = [path for argument in plans for path in _named(argument, found)]
    paths = tuple(dict.fromkeys(map(os.path.relpath, named))) if plans else of_manifest.files_since(manifest, found)
    before = {os.path.relpath(path): content for path, content in found.files(paths).items()}
    files: dict[str, tuple[bytes | TpplanError | None, bytes | TpplanError | None]] = {}
    for path in paths:
        is_here = os.path.lexists(path)
        if not is_here and path not in before:
            on_plans.note(f"{path} is neither here nor in {name}")
            continue
        old = _or_error(found.read, before[path], f"{name}:{path}") if path in before else None
        files[path] = (old, _or_error(read_bytes, path) if is_here else None)
    if not files:
        raise UsageError(f"there is no plan to compare, neither here nor in {name}", "name plan files or their folder")
    report = since(name, found.commit, files)
    console.present(report, view, form, annotate=annotate)
    return report


def _or_error(read: Callable[..., bytes], *arguments: str) -> bytes | TpplanError:
    """Return what is read, or why that is no plan."""
    try:
        return read(*arguments)
    except TpplanError as error:
        return error


def _named(argument: str, revision: Revision) -> list[str]:
    """Return the plan files that a file, a folder or a pattern names, those here and those of a revision.

    Raises:
        UsageError: there are none.
    """
    here, whole = places_of(argument), os.path.relpath(argument)
    if is_pattern(argument):
        plain = takewhile(lambda part: not is_pattern(part), PurePath(whole).parts[:-1])
        inside = revision.files((str(PurePath(*plain)),))
        there = [path for path in inside if matches(PurePath(path).as_posix(), whole)]
    else:
        inside = revision.files((argument,))
        if here is None and (os.path.lexists(argument) or whole in inside):
            return [argument]
        here = [path for path in here or () if not is_other(path)]
        there = [path for path in inside if path.endswith(SUFFIX) and _is_plan(path, inside[path], revision)]
    if not here and not there:
        raise _neither(argument, revision)
    return [*(here or ()), *there]


def _neither(argument: str, revision: Revision) -> UsageError:
    near = nearest(argument)
    hint = f"did you mean {near}?" if near else "name plan files, a folder of them, or a pattern such as 'plans/*.json'"
    return UsageError(f"{argument[:60]!r} is no plan file, neither here nor in {revision.name}", hint)


def _is_plan(path: str, content: str, revision: Revision) -> bool:
    """Tell whether a file of a revision is a plan, or what was one and cannot be read."""
    if os.path.lexists(path):
        return not is_other(path)
    try:
        return not mistaken(parse_json(revision.read(content, path), path), PLAN)
    except PlanError:
        return True
