"""Files about the GPUs of this machine, in the cache folder: one of each kind for the same GPUs, in any order."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Protocol, TypeVar

from attrs import frozen

from tpplan import codec
from tpplan.errors import TpplanError
from tpplan.files import cache_folder, parse_json, read_text, save_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LOG = logging.getLogger(__name__)


@frozen
class Origin:
    """Where a file's content comes from; it is worth nothing anywhere else, and later ones take its place.

    Attributes:
        gpus: UUIDs, sorted.
        software: driver, libraries, kernels and settings.
        edition: of what was found out, and of whatever else ends its worth.
    """

    gpus: tuple[str, ...]
    software: str
    edition: str


class Entry(Protocol):
    """What a file holds: a class of attrs, so that it can be read and written."""

    @property
    def origin(self) -> Origin:
        """Where it comes from."""


E = TypeVar("E", bound=Entry)


def origin(gpus: Sequence[str], software: str, edition: str) -> Origin | None:
    """Return where what is found out now comes from; None, for no cache, if GPUs or software cannot be told."""
    told = software and edition and all(gpus) and len(set(gpus)) == len(gpus)
    return Origin(tuple(sorted(gpus)), software, edition) if told else None


def load(kind: str, origin: Origin, entry: type[E]) -> E | None:
    """Return what a file holds; None if there is none, it is of another origin, or damaged."""
    try:
        found = codec.structure(parse_json(read_text(_path(kind, origin)), kind), entry, kind)
    except (TpplanError, RuntimeError) as error:
        _LOG.debug("no cached %s: %s", kind, error)
        return None
    return found if found.origin == origin else None


def save(kind: str, entry: Entry) -> str:
    """Write a file for later processes; return why it cannot be, empty if it is."""
    try:
        file = _path(kind, entry.origin)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_text(codec.dumps(entry), file)
    except (OSError, TpplanError, RuntimeError) as error:
        _LOG.debug("%s are not cached: %s", kind, error)
        return str(error).partition("\n")[0]
    return ""


def _path(kind: str, origin: Origin) -> Path:
    """Return the file of a kind for some GPUs.

    Raises:
        RuntimeError: nobody knows the home directory.
    """
    digest = hashlib.sha256("\n".join(origin.gpus).encode()).hexdigest()
    return cache_folder() / f"{kind}-{digest[:16]}.json"
