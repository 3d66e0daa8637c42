"""Plan files by folders and patterns, for shells that leave patterns alone, and for continuous integration."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final

from attrs import frozen

from tpplan.errors import TpplanError, UsageError
from tpplan.files.kinds import PLAN, mistaken
from tpplan.files.text import nearest, parse_json, read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SUFFIX: Final = ".json"
_MAGIC: Final = re.compile(r"[*?[]")
#: Most files of a folder or a pattern: beyond, it is probably not the one that was meant.
_MOST: Final = 10_000


@frozen
class Files:
    """The files that arguments name.

    Attributes:
        paths: in the order of the arguments, those of a folder or a pattern sorted.
        others: JSON files in folders that are no plans, but other documents.
        counts: how many plans there are in each folder and of each pattern.
    """

    paths: tuple[str, ...]
    others: tuple[str, ...]
    counts: dict[str, int]


def files_of(arguments: Iterable[str]) -> Files:
    """Return the files that arguments name: files, folders with all plans in them, patterns such as ``plans/*.json``.

    What is neither stays as it is, for the error that comes of reading it. In a folder, and in those within, everything
    that ends in ``.json`` is taken for a plan, unless it can be read and is another document.

    Raises:
        UsageError: a folder or a pattern has no plan, or more than 10,000 files.
    """
    paths: list[str] = []
    others: list[str] = []
    counts: dict[str, int] = {}
    for argument in arguments:
        found = places_of(argument)
        if found is None:
            paths.append(argument)
            continue
        if not is_pattern(argument):
            others += [path for path in found if is_other(path)]
            found = [path for path in found if path not in others]
        if not found:
            raise UsageError(f"no plan file is {_where(argument)}", _instead(argument))
        paths += found
        counts[argument] = len(found)
    return Files(tuple(dict.fromkeys(paths)) if counts else tuple(paths), tuple(others), counts)


def places_of(argument: str) -> list[str] | None:
    """Return the paths that a folder or a pattern stands for, sorted; None if the argument is neither.

    Raises:
        UsageError: there are more than 10,000.
    """
    if os.path.isdir(argument):  # noqa: PTH112 (an argument may be anything)
        return _limited(argument, walk(argument))
    if is_pattern(argument):
        found = sorted(glob(argument, recursive=True))  # noqa: PTH207 (which keeps the path as it is written)
        return _limited(argument, filter(os.path.isfile, found))
    return None


def is_pattern(argument: str) -> bool:
    """Tell whether an argument is a pattern, and no file of that name."""
    return bool(_MAGIC.search(argument)) and not os.path.lexists(argument)


def in_repository(path: str) -> str:
    """Return a path as seen from the root of the repository that it is in, with ``/``, as GitHub names files.

    The root is GITHUB_WORKSPACE, or else the folder that has ``.git``. A path in neither is returned as it is.
    """
    whole = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))  # noqa: PTH118, PTH119, PTH120
    workspace = os.environ.get("GITHUB_WORKSPACE", "")
    roots = [os.path.realpath(workspace)] if workspace else []
    roots += [str(folder) for folder in Path(whole).parents if (folder / ".git").exists()]
    for root in roots:
        if PurePath(whole).is_relative_to(root):
            return PurePath(whole).relative_to(root).as_posix()
    return path


def walk(folder: str) -> Iterator[str]:
    """Yield the paths of JSON files in a folder and those within, except hidden ones, sorted."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (
            os.path.join(parent, name)  # noqa: PTH118
            for name in sorted(names)
            if name.endswith(SUFFIX) and not name.startswith(".")
        )


def is_other(path: str) -> bool:
    """Tell whether a file can be read as JSON and is a document other than a plan."""
    try:
        return bool(mistaken(parse_json(read_text(path), path), PLAN))
    except TpplanError:
        return False


def matches(path: str, pattern: str) -> bool:
    """Tell whether a path with ``/`` matches a pattern as :func:`glob.glob` does, where ``**`` is any folders."""
    return _match(path.split("/"), PurePath(pattern).as_posix().split("/"))


def _match(names: list[str], parts: list[str]) -> bool:
    if not parts or not names:
        return not names and parts in ([], ["**"])
    if parts[0] == "**":
        return _match(names, parts[1:]) or _match(names[1:], parts)
    return fnmatchcase(names[0], parts[0]) and _match(names[1:], parts[1:])


def _limited(argument: str, paths: Iterable[str]) -> list[str]:
    found = []
    for path in paths:
        found.append(path)
        if len(found) > _MOST:
            raise UsageError(f"more than {_MOST} files are {_where(argument)}", "name a smaller folder")
    return found


def _where(argument: str) -> str:
    return f"{'named by' if _MAGIC.search(argument) else 'in the folder'} {argument[:60]!r}"


def _instead(argument: str) -> str:
    """Return what may have been meant with a pattern or a folder without plans."""
    start = argument if not is_pattern(argument) else re.split(_MAGIC, argument)[0].rpartition("/")[0]
    if start and not Path(start).exists():
        near = nearest(start)
        return f"there is no folder {start!r}" + (f"; did you mean {near}?" if near else "")
    return "plan files end in .json; tpplan plan … -o FILE writes one, and a folder stands for all in it and below"
