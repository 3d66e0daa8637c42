"""The JSON Schemas of the documents that tpplan reads and writes, as they are installed, or in a clone."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Final

from tpplan.errors import UsageError

_SUFFIX: Final = ".schema.json"
#: In the wheel, and in a clone that is installed in place.
_PLACES: Final = (Path(__file__).parents[1] / "schemas", Path(__file__).parents[2] / "schemas")


def names() -> tuple[str, ...]:
    """Return the names of all documents with a schema, sorted."""
    return tuple(sorted(path.name.removesuffix(_SUFFIX) for path in _folder().glob(f"*{_SUFFIX}")))


def text(name: str) -> str:
    """Return the schema of a document.

    Args:
        name: such as ``split-plan``; with ``.schema.json`` too.

    Raises:
        UsageError: there is no such document; the hint has the names.
    """
    name = name.removesuffix(_SUFFIX)
    if name not in (known := names()):
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"schemas are {', '.join(known)}"
        raise UsageError(f"there is no schema {name[:60]!r}", hint)
    return (_folder() / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def _folder() -> Path:
    return next((place for place in _PLACES if place.is_dir()), _PLACES[0])
