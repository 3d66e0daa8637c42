"""The JSON Schemas of the documents that tpplan reads and writes, as they are installed, or in a clone."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from tpplan.errors import UsageError
from tpplan.files.jsontext import render

_SUFFIX: Final = ".schema.json"
_URN: Final = re.compile("urn:tpplan:([a-z-]+):1")
#: In the wheel, and in a clone that is installed in place.
_PLACES: Final = (Path(__file__).parents[1] / "schemas", Path(__file__).parents[2] / "schemas")


def names() -> tuple[str, ...]:
    """Return the names of all documents with a schema, sorted."""
    return tuple(sorted(path.name.removesuffix(_SUFFIX) for path in _folder().glob(f"*{_SUFFIX}")))


def text(name: str) -> str:
    """Return the schema of a document.

    Args:
        name: such as ``split-plan``, ``split-plan.schema.json``, or ``urn:tpplan:split-plan:1`` as documents have it.

    Raises:
        UsageError: there is no such document; the hint has the names.
    """
    short = match[1] if (match := _URN.fullmatch(name)) else name.removesuffix(_SUFFIX)
    if short not in (known := names()):
        # What ends in a word is meant rather than what begins with it: a plan rather than a plan's diff.
        words = sorted((one for one in known if short in one.split("-")), key=lambda one: not one.endswith(f"-{short}"))
        near = words[:1] if len(words) in {1, 2} else [] if words else get_close_matches(short, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"schemas are {', '.join(known)}"
        raise UsageError(f"there is no schema {name[:60]!r}", hint)
    return (_folder() / f"{short}{_SUFFIX}").read_text(encoding="utf-8")


def settings(name: str) -> str:
    """Return settings of VS Code with which it knows the schema of a document by its ``$schema``.

    Args:
        name: as for :func:`text`; empty for all documents.

    Raises:
        UsageError: there is no such document.
    """
    schemas = [json.loads(text(one)) for one in ([name] if name else names())]
    return render({"json.schemas": [{"url": schema["$id"], "schema": schema} for schema in schemas]})


def _folder() -> Path:
    return next((place for place in _PLACES if place.is_dir()), _PLACES[0])
