"""Reading untrusted documents, and writing files atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.errors import CORRECT, FORM, PlanError, Problem, TpplanError, malformed, refusal
from tpplan.files.content import ContentError, read
from tpplan.files.jsontext import NotJSONError, read_json, shown
from tpplan.files.jsontext import decode as decode_json

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Size limit of documents, in bytes and in characters.
LARGEST_DOCUMENT = 16 * 2**20

#: End of the name of a new file until it replaces the old one, and when whoever writes it has surely gone.
_NEW = ".tpplan-new"
_STALE_SECONDS = 3600

#: How much of two names must agree, of 1, for one to be a slip of the other.
_NEAR = 0.8
#: Characters of a key that may be a slip of another one.
_LONGEST_KEY = 100


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a document's file, see :func:`tpplan.files.content.read`.

    Raises:
        PlanError: as for :func:`decode`.
        TpplanError: the file cannot be read, or is none of which documents are read.
    """
    return decode(read_bytes(path), os.fspath(path))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read the bytes of a document's file; see :func:`read_text`."""
    try:
        return read(path, LARGEST_DOCUMENT, pipes=True)
    except ContentError as error:
        if error.hint:
            raise TpplanError(f"cannot read {os.fspath(path)!r}: it {error}", error.hint) from error
        raise malformed(os.fspath(path), str(error)) from error
    except (OSError, ValueError) as error:
        hint = "check its permissions" if isinstance(error, PermissionError) else "check the path"
        if isinstance(error, IsADirectoryError) and (Path(path) / "config.json").exists():
            hint = "it is a model's; tpplan plan makes a plan of that"
        elif isinstance(error, IsADirectoryError):
            hint = f"name one of its files; validate and check also take several, such as {Path(path) / '*.json'}"
        elif isinstance(error, FileNotFoundError) and (meant := nearest(path)):
            hint = f"did you mean {meant}?"
        raise TpplanError(f"cannot read {os.fspath(path)!r}: {_reason(error)}", hint) from error


def nearest(path: str | os.PathLike[str], suffix: str = "") -> str:
    """Return the path that a missing one was probably meant as, or as much of it as is there; empty if none is near.

    Args:
        path: a path at which there is nothing.
        suffix: of files in the same directory; they are proposed whatever suffix the path has.
    """
    from difflib import get_close_matches  # noqa: PLC0415 - only for messages

    asked = path = Path(path)
    with contextlib.suppress(OSError):  # of a directory that must not be read
        while not path.parent.is_dir() and path != path.parent:
            path, suffix = path.parent, ""
        others = [entry.name for entry in path.parent.iterdir() if entry.name.endswith(suffix)]
        names = {name.removesuffix(suffix).casefold(): name for name in others if name != path.name}
        wanted = (path.stem if suffix else path.name).casefold()
        if found := get_close_matches(wanted, names, n=1, cutoff=_NEAR):
            near = path.parent / names[found[0]]
            whole = near / asked.relative_to(path)
            return str(whole if whole.exists() else near)
    return ""


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return in words that an object has a key that it cannot have, with the one that was probably meant, or all."""
    from difflib import get_close_matches  # noqa: PLC0415 - only for messages

    names = {name.replace("_", "-"): name for name in known}
    asked = key[:_LONGEST_KEY].replace("_", "-").casefold()
    near = get_close_matches(asked, names, n=1, cutoff=_NEAR)
    near = near or [name for name in names if name.startswith(f"{asked}-")]
    hint = f"did you mean {names[near[0]]}?" if near else f"known are {', '.join(names.values())}"
    return f"has the unknown key {shown(key)}; {hint}"


def decode(data: bytes, what: str) -> str:
    """Decode the bytes of a document.

    Raises:
        PlanError: they exceed 16 MiB, are not UTF-8, or start with a byte order mark.
    """
    if len(data) > LARGEST_DOCUMENT:
        raise malformed(what, f"has more than {LARGEST_DOCUMENT} bytes")
    try:
        return decode_json(data)
    except NotJSONError as error:
        raise _refusal(what, error) from error


def parse_json(text: str | bytes, what: str) -> object:
    """Parse a JSON document strictly.

    Raises:
        PlanError: it exceeds 16 MiB, or has problems that :func:`tpplan.files.jsontext.read_json` finds, all listed.
    """
    text = decode(text, what) if isinstance(text, bytes) else text
    if len(text) > LARGEST_DOCUMENT:
        raise malformed(what, f"has {len(text)} characters, the most is {LARGEST_DOCUMENT}")
    try:
        return read_json(text)
    except NotJSONError as error:
        raise _refusal(what, error) from error


def _refusal(what: str, error: NotJSONError) -> PlanError:
    found = [Problem(FORM, error.where, message) for message in error.found]
    return refusal(what, found, error.hint or CORRECT)


def cache_folder() -> Path:
    """Return the cache directory: ``$XDG_CACHE_HOME/tpplan``, or ``~/.cache/tpplan``.

    Raises:
        RuntimeError: the home directory cannot be determined.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "tpplan"


def save_text(text: str, path: str | os.PathLike[str]) -> bool:
    """Write a text file with :func:`save_bytes`, and return its result."""
    return save_bytes(text.encode(), path)


def save_bytes(data: bytes, path: str | os.PathLike[str]) -> bool:
    """Write a file atomically, unless it already has these bytes, and make the directories that are missing.

    The new file replaces the old one and keeps its mode. A symbolic link is kept, and its target is replaced. A device
    or a pipe is written to directly. If the file cannot be written, no new directory is left.

    Returns:
        Whether anything was written.

    Raises:
        TpplanError: the file cannot be written; its previous content is unchanged.
    """
    try:
        return _replace(data, Path(path))
    except (OSError, ValueError) as error:
        hint = "name a file in it" if isinstance(error, IsADirectoryError) else "choose another file"
        raise TpplanError(f"cannot write {os.fspath(path)!r}: {_reason(error)}", hint) from error


def _replace(data: bytes, path: Path) -> bool:
    """Write ``data`` to a new file beside the target of ``path`` and rename it, unless the target is equal."""
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        path.write_bytes(data)
        return True
    target = Path(os.path.realpath(path))
    if mode is not None:
        if not os.access(target, os.W_OK):  # a rename succeeds without write permission for the target
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if target.stat().st_size == len(data) and target.read_bytes() == data:
            return False
    missing = [folder for folder in target.parents if not folder.exists()]
    start = f".{target.name[:100]}."
    _remove_stale(target.parent, start)
    new = target.with_name(f"{start}{os.urandom(6).hex()}{_NEW}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with new.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            new.chmod(stat.S_IMODE(mode))
        new.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        for folder in missing:
            with contextlib.suppress(OSError):  # it was not made, or somebody else has written there
                folder.rmdir()
        raise
    return True


def _remove_stale(folder: Path, start: str) -> None:
    """Remove new files that a process left when it was killed while it saved this one."""
    left = re.compile(re.escape(start) + "[0-9a-f]{12}" + re.escape(_NEW))
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # nothing depends on it
        for entry in entries:
            if left.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                        Path(entry).unlink()


def _reason(error: OSError | ValueError) -> str:
    """Return the cause of an error in words, the operating system's if there are any."""
    return getattr(error, "strerror", None) or str(error)
