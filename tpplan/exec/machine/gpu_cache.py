"""Cache files on this machine's GPUs: one of each kind per set of GPUs, whatever their order."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from typing import IO, TYPE_CHECKING, Protocol, TypeVar

from attrs import frozen

from tpplan.errors import TpplanError
from tpplan.files.codec import dumps, structure
from tpplan.files.text import cache_folder, parse_json, read_text, save_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_LOG = logging.getLogger(__name__)

#: Maximum time that a change waits for others, which take milliseconds.
_LOCK_SECONDS = 2.0


@frozen
class Origin:
    """The conditions under which a cached result is valid; results from other conditions replace it.

    Attributes:
        gpus: UUIDs of the GPUs, sorted.
        software: driver, libraries, kernels and settings.
        edition: version of the measurement, and anything else that invalidates the result.
    """

    gpus: tuple[str, ...]
    software: str
    edition: str


class Entry(Protocol):
    """The content of a cache file: an attrs class, which the codec can read and write."""

    @property
    def origin(self) -> Origin:
        """The origin of the content."""


E = TypeVar("E", bound=Entry)


def gpus_meant(seen: tuple[str, ...], wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs that a result is about: all that this process sees, or the wanted ones, if it misses some.

    Args:
        seen: UUIDs of the GPUs that this process sees.
        wanted: UUIDs of GPUs, some of which other processes may have to themselves.
    """
    return seen if {*wanted} <= {*seen} else tuple(wanted)


def origin(gpus: Sequence[str], software: str, edition: str) -> Origin | None:
    """Return the origin of current results; None (no caching) if GPUs or software cannot be identified."""
    told = software and edition and all(gpus) and len(set(gpus)) == len(gpus)
    return Origin(tuple(sorted(gpus)), software, edition) if told else None


def load(kind: str, origin: Origin, entry: type[E]) -> E | None:
    """Return the content of a cache file; None if it is missing, damaged or of another origin."""
    try:
        found = structure(parse_json(read_text(_path(kind, origin)), kind), entry, kind)
    except (TpplanError, RuntimeError) as error:
        _LOG.debug("no cached %s: %s", kind, error)
        return None
    return found if found.origin == origin else None


def save(kind: str, entry: Entry) -> str:
    """Write a cache file; return the reason for a failure, empty on success."""
    try:
        file = _path(kind, entry.origin)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_text(dumps(entry), file)
    except (OSError, TpplanError, RuntimeError) as error:
        _LOG.debug("%s are not cached: %s", kind, error)
        return str(error).partition("\n")[0]
    return ""


def remove(kind: str, origin: Origin) -> None:
    """Remove a cache file if there is one and it can be removed."""
    try:
        _path(kind, origin).unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        _LOG.debug("%s are still cached: %s", kind, error)


@contextlib.contextmanager
def locked(kind: str) -> Iterator[None]:
    """Let only one process at a time read files of a kind and write them again, where the system has such locks."""
    with contextlib.ExitStack() as stack:
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            _lock(stack.enter_context((folder / f".{kind}.lock").open("ab")))
        except (ImportError, OSError, RuntimeError) as error:  # each file is still written as a whole
            _LOG.debug("no lock for %s: %s", kind, error)
        yield


def _lock(file: IO[bytes]) -> None:
    """Lock a file until it is closed.

    Raises:
        ImportError: the system has no such locks.
        OSError: the file cannot be locked, or not in time.
    """
    import fcntl  # noqa: PLC0415 (only on Unix)

    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _path(kind: str, origin: Origin) -> Path:
    """Return the path of the cache file of a kind for the GPUs of an origin.

    Raises:
        RuntimeError: the home directory is unknown.
    """
    digest = hashlib.sha256("\n".join(origin.gpus).encode()).hexdigest()
    return cache_folder() / f"{kind}-{digest[:16]}.json"
