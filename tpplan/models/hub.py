"""Models by their name on the Hugging Face Hub, as far as the hub's cache on this machine has them; nothing is fetched.

The cache is that of huggingface_hub: ``models--ORG--NAME`` with ``refs/REVISION``, a file that holds a commit, and
``snapshots/COMMIT``, a directory with the files.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from tpplan.errors import ModelError

#: ``org/name``, perhaps with ``@`` and a branch, a tag or a commit.
_ID: Final = re.compile(r"([\w.-]+)/([\w.-]+)(?:@([\w./-]+))?", re.ASCII)
_USUAL: Final = "main"
_HASH: Final = re.compile(r"[0-9a-f]{40}")
#: Shortest start of a commit that stands for it, and the characters of a whole one.
_LEAST, _COMMIT = 7, 40
_NAMED: Final = 4


def local(path: str | Path) -> Path:
    """Return where a model is: a path as it is, and the snapshot in the hub's cache for a name such as ``org/name``.

    A path that exists wins over a name. A name that the cache does not have is returned as it is, for the error that
    comes of reading it.

    Raises:
        ModelError: a revision leaves its directory; or the cache has the model, but not this revision, or without
            config.json.
    """
    text = os.fspath(path)
    found = _ID.fullmatch(text)
    if not found or not is_name(text):
        return Path(path)
    owner, name, revision = found.groups()
    folder = cache() / f"models--{owner}--{name}"
    parts = (revision or "").split("/")
    if revision and {"", ".", ".."} & {*parts}:
        raise ModelError(
            f"{revision!r} is no revision of {owner}/{name}: parts between slashes are empty or dots",
            "name a branch, a tag or a commit behind the @",
        )
    if ".." in text or not folder.is_dir():
        return Path(path)
    snapshot = _snapshot(folder, revision or _USUAL)
    model, option = f"{owner}/{name}", f" --revision {revision}" if revision else ""
    if snapshot is None:
        have = _revisions(folder)
        known = f", which has {', '.join(have[:_NAMED])}{', …' if have[_NAMED:] else ''}" if have else ""
        raise ModelError(
            f"the hub's cache has no revision {revision or _USUAL} of {model}{known}",
            f"hf download {model} config.json{option} fetches its config",
        )
    if not (snapshot / "config.json").exists() and not any(snapshot.glob("*.gguf")):
        raise ModelError(
            f"the hub's cache has {model} without config.json", f"hf download {model} config.json{option} fetches it"
        )
    return snapshot


def is_name(text: str, folder: str = "") -> bool:
    """Tell whether a text, read as a path from a folder, leads nowhere and has the form of a name on the hub."""
    path = os.path.join(folder, text)  # noqa: PTH118
    return bool(_ID.fullmatch(text)) and not os.path.lexists(path) and not Path(path).parent.is_dir()


def cache() -> Path:
    """Return the directory of the hub's cache, as huggingface_hub finds it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(name):
            return Path(value).expanduser()
    home = os.environ.get("HF_HOME")
    base = home or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")  # noqa: PTH118
    return Path(base).expanduser() / "hub"


def _snapshot(folder: Path, revision: str) -> Path | None:
    """Return the snapshot of a branch, a tag or a commit; None if there is none."""
    reference, commit = folder / "refs" / revision, revision
    with suppress(OSError, ValueError):
        if reference.is_file():  # a pipe would be waited for
            with reference.open(encoding="utf-8") as file:
                commit = file.read(_COMMIT).strip()
    snapshots = folder / "snapshots"
    if _HASH.fullmatch(commit) and (snapshots / commit).is_dir():
        return snapshots / commit
    known = sorted(snapshots.iterdir()) if snapshots.is_dir() else []
    if len(revision) >= _LEAST:
        known = [each for each in known if each.name.startswith(revision)]
    elif revision != _USUAL or (folder / "refs").is_dir():
        return None
    return known[0] if len(known) == 1 else None


def _revisions(folder: Path) -> list[str]:
    """Return what a model's folder has: branches and tags, else commits."""
    refs = folder / "refs"
    named = [str(path.relative_to(refs)) for path in sorted(refs.rglob("*")) if path.is_file()] if refs.is_dir() else []
    snapshots = folder / "snapshots"
    return named or ([path.name for path in sorted(snapshots.iterdir())] if snapshots.is_dir() else [])
