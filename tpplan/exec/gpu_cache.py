"""Files about the GPUs of this machine, in the cache folder: one of each kind for the same GPUs, in any order."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, TypeVar

from tpplan import codec
from tpplan.errors import TpplanError
from tpplan.files import cache_folder, parse_json, read_text, save_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


def are_told_apart(gpus: Sequence[str]) -> bool:
    """Tell whether all of some GPUs have UUIDs, each its own."""
    return all(gpus) and len(set(gpus)) == len(gpus)


def path(kind: str, gpus: Iterable[str]) -> Path:
    """Return the file of a kind for GPUs with these UUIDs, sorted.

    Raises:
        RuntimeError: nobody knows the home directory.
    """
    digest = hashlib.sha256("\n".join(gpus).encode()).hexdigest()
    return cache_folder() / f"{kind}-{digest[:16]}.json"


def read(kind: str, gpus: Iterable[str], entry: type[_T], what: str) -> _T | None:
    """Return what a file holds, to be called ``what`` in errors; None if there is none, or it is damaged."""
    try:
        return codec.structure(parse_json(read_text(path(kind, gpus)), what), entry, what)
    except (TpplanError, RuntimeError) as error:
        _LOG.debug("no cached %s: %s", kind, error)
        return None


def write(kind: str, gpus: Iterable[str], entry: object) -> str:
    """Write a file for later processes; return why it cannot be, empty if it is."""
    try:
        file = path(kind, gpus)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_text(codec.dumps(entry), file)
    except (OSError, TpplanError, RuntimeError) as error:
        _LOG.debug("%s are not cached: %s", kind, error)
        return str(error).partition("\n")[0]
    return ""
