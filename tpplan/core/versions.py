"""Versions of the plan format: which ones this tpplan reads, shows and executes."""

from __future__ import annotations

import re

from tpplan.core.plan import FORMAT_VERSION

#: What to do about a plan that :func:`version_problem` refuses.
OTHER_VERSION = "upgrade tpplan, or make the plan again with this one"

_VERSION = re.compile(r"([1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})")


def version_of(text: str) -> tuple[int, int] | None:
    """Return major and minor of a format version such as ``1.0``, None if it is none."""
    match = _VERSION.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def is_newer(version: str) -> bool:
    """Tell whether a format version is of this major but of a later minor: it can be shown, not executed."""
    known, given = version_of(FORMAT_VERSION), version_of(version)
    return known is not None and given is not None and given[0] == known[0] and given[1] > known[1]


def version_problem(version: str) -> str:
    """Return what keeps this tpplan from executing a plan of a format version, empty if nothing does."""
    major = FORMAT_VERSION.partition(".")[0]
    if is_newer(version):
        return f"is {version}, newer than {FORMAT_VERSION}, the latest that this tpplan knows"
    given = version_of(version)
    return "" if given and given[0] == int(major) else f"is {version[:40]!r}, this tpplan reads {major}.x"
