"""Files as a git revision has them, read without a checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path, PurePath
from typing import Final

from attrs import frozen

from tpplan.errors import TpplanError, UsageError, malformed
from tpplan.files.text import LARGEST_DOCUMENT

#: Seconds after which git is not waited for any longer.
_PATIENCE: Final = 60
#: The object type in front of a file's hash; folders and submodules have others.
_BLOB: Final = b"blob"


@frozen
class Revision:
    """A revision of the repository that a folder is in.

    Attributes:
        name: as it was asked for.
        root: the repository's folder.
        commit: its hash.
    """

    name: str
    root: str
    commit: str

    def files(self, paths: tuple[str, ...]) -> dict[str, str]:
        """Return the files at or below some paths, as the revision has them.

        Args:
            paths: as seen from the current directory; what is not in the revision gives nothing.

        Returns:
            For each path as seen from the current directory the hash of its content, in the order of git.

        Raises:
            UsageError: a path is outside of the repository.
            TpplanError: git fails.
        """
        if not paths:
            return {}
        inside = [self._inside(path) for path in paths]
        listed = _git(self.root, "ls-tree", "-r", "-z", "--full-tree", self.commit, "--", *inside)
        found = {}
        for entry in filter(None, listed.split(b"\0")):
            head, _, name = entry.partition(b"\t")
            _, kind, content = head.split()
            if kind == _BLOB:
                found[self._outside(os.fsdecode(name))] = content.decode()
        return found

    def read(self, content: str, what: str) -> bytes:
        """Return a file's content by its hash.

        Raises:
            PlanError: it has more than 16 MiB.
            TpplanError: git fails.
        """
        size = int(_git(self.root, "cat-file", "-s", content))
        if size > LARGEST_DOCUMENT:
            raise malformed(what, f"has {size} bytes, the most is {LARGEST_DOCUMENT}")
        return _git(self.root, "cat-file", "blob", content)

    def _inside(self, path: str) -> str:
        """Return a path as git names it."""
        folder, name = os.path.split(os.path.abspath(path))  # noqa: PTH100 (a link is a file to git)
        found = os.path.relpath(os.path.join(os.path.realpath(folder), name), self.root)  # noqa: PTH118
        if PurePath(found).parts[:1] == (os.pardir,) or PurePath(found).is_absolute():
            raise UsageError(f"{path!r} is outside of the repository {self.root!r}", "name plans within it")
        return found.replace(os.sep, "/")

    def _outside(self, name: str) -> str:
        """Return a path as seen from the current directory."""
        return os.path.relpath(os.path.join(self.root, name), os.path.realpath(os.curdir))  # noqa: PTH118


def revision(name: str, folder: str = "") -> Revision:
    """Return a revision of the repository that a folder is in, the current directory by default.

    Args:
        name: a branch, a tag, a commit, or what else git takes for one, such as ``HEAD~1``.
        folder: of the repository, or in it.

    Raises:
        UsageError: the folder is in no repository, or this has no such revision.
        TpplanError: git is not installed, or fails.
    """
    here = folder or os.curdir
    root = os.fsdecode(_git(here, "rev-parse", "--show-toplevel", otherwise=_no_repository(here))).rstrip("\r\n")
    hint = "git fetch brings it; in a workflow, fetch-depth: 0 of actions/checkout brings all of them"
    unknown = UsageError(f"there is no revision {name[:60]!r} in {root!r}", hint)
    if "\0" in name:
        raise unknown
    found = _git(here, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}", otherwise=unknown)
    return Revision(name, os.path.realpath(root), found.decode().strip())


def _no_repository(folder: str) -> UsageError:
    where = os.path.realpath(folder)
    return UsageError(f"{where!r} is in no git repository", "run it in the clone that has the plans")


def _git(folder: str, *arguments: str, otherwise: TpplanError | None = None) -> bytes:
    """Return what git prints, run in a folder.

    Args:
        folder: where.
        arguments: of git.
        otherwise: the error if git refuses; by default one with git's own words.
    """
    try:
        done = subprocess.run(  # noqa: S603 (no shell, and what users name is behind -- or --end-of-options)
            ["git", *arguments],  # noqa: S607 (whichever git the user has)
            cwd=folder,
            env={name: value for name, value in os.environ.items() if not name.endswith("_PATHSPECS")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except FileNotFoundError as error:
        if not Path(folder).is_dir():
            raise UsageError(f"there is no folder {folder[:60]!r}", "name one that is in a git repository") from error
        raise TpplanError("git is not installed, or not on the PATH", "install git") from error
    except subprocess.TimeoutExpired as error:
        raise TpplanError(f"git {arguments[0]} did not end within {_PATIENCE} seconds", "try it in a shell") from error
    except OSError as error:
        raise TpplanError(f"git cannot be run: {error.strerror or error}", "check that git works in a shell") from error
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        if "dubious ownership" in "".join(words):
            hint = f"git config --global --add safe.directory {os.path.realpath(folder)}"
            raise TpplanError(f"git refuses {os.path.realpath(folder)!r}, which belongs to another user", hint)
        raise otherwise or TpplanError(f"git {arguments[0]} failed: {' '.join(words)[:300]}", "try it in a shell")
    return done.stdout
