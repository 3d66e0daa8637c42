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
_HEAD: Final = "HEAD"
#: The object type in front of a file's hash; folders and submodules have others.
_BLOB: Final = b"blob"
#: The mode of a symbolic link.
_LINK: Final = b"120000"
#: Stands for the content of a link that leads to no file within the repository.
_NOWHERE: Final = ""
#: What git tells the programs that it runs, such as hooks, of the repository that they are run for, which need not be
#: the one that a folder is in: ``git rev-parse --local-env-vars``, less those of the configuration.
_OF_ANOTHER: Final = frozenset({
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_IMPLICIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_PREFIX", "GIT_INDEX_FILE"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_GRAFT_FILE", "GIT_SHALLOW_FILE"),
    *("GIT_NO_REPLACE_OBJECTS", "GIT_REPLACE_REF_BASE", "GIT_NAMESPACE"),
})  # fmt: skip


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
            For each path as seen from the current directory what :meth:`read` takes for its content, in the order of
            git; a symbolic link has that of the file it leads to.

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
            mode, kind, content = head.split()
            if kind == _BLOB:
                found[self._outside(os.fsdecode(name))] = self._target(name) if mode == _LINK else content.decode()
        return found

    def _target(self, link: bytes) -> str:
        """Return the hash of the file that a link leads to, which git follows within the revision, and not in circles.

        Links to folders, to nothing and out of the repository are no plans.
        """
        if b"\n" in link:
            return _NOWHERE
        asked = b"%s:%s\n" % (self.commit.encode(), link)
        answer = _git(self.root, "cat-file", "--batch-check", "--follow-symlinks", standard_input=asked).split()
        return answer[0].decode() if answer[1:2] == [_BLOB] else _NOWHERE

    def read(self, content: str, what: str) -> bytes:
        """Return a file's content.

        Args:
            content: of :meth:`files`.
            what: name of the file in errors.

        Raises:
            PlanError: it has more than 16 MiB, or is a link that leads to no file within the repository.
            TpplanError: git fails.
        """
        if content == _NOWHERE:
            raise malformed(what, "is a link that leads to no file within the repository")
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
    if name == _HEAD and not _git(here, "for-each-ref", "--count=1"):
        hint = "commit the plans first; the next commit can then be compared with that one"
        unknown = UsageError(f"the repository {root!r} has no commit yet", hint)
    found = _git(here, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}", otherwise=unknown)
    return Revision(name, os.path.realpath(root), found.decode().strip())


def _no_repository(folder: str) -> UsageError:
    where = os.path.realpath(folder)
    return UsageError(f"{where!r} is in no git repository", "run it in the clone that has the plans")


def _misleads(variable: str) -> bool:
    """Tell whether a variable of the environment makes git take another repository, or paths for patterns."""
    return variable in _OF_ANOTHER or variable.endswith("_PATHSPECS")


def _git(folder: str, *arguments: str, otherwise: TpplanError | None = None, standard_input: bytes = b"") -> bytes:
    """Return what git prints, run in a folder.

    Args:
        folder: where.
        arguments: of git.
        otherwise: the error if git refuses; by default one with git's own words.
        standard_input: what git reads.
    """
    try:
        done = subprocess.run(  # noqa: S603 (no shell, and what users name is behind -- or --end-of-options)
            ["git", *arguments],  # noqa: S607 (whichever git the user has)
            cwd=folder,
            env={name: value for name, value in os.environ.items() if not _misleads(name)},
            input=standard_input,
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
