"""Reading the bytes of untrusted files: regular ones up to a size, pipes up to a size and a time, and nothing else."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from pathlib import Path
from select import select
from time import monotonic
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds in which a pipe has to end. Slower ones have standard input, which is waited for.
PIPE_SECONDS: Final = 4.0

_PIECE: Final = 2**16
_KINDS: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISFIFO, "a pipe"),
)
_PULL: Final = "fetch the file itself, with git lfs pull in the clone, or with hf download"
_PAGE: Final = "fetch the file itself with hf download, or from the hub's link with /resolve/ in it, not /blob/"
_AGAIN: Final = "fetch it again; hf download completes what was cut off"
_PICKLE: Final = "take a checkpoint in safetensors; tpplan reads no pickles, which can run code"
_UNPACK: Final = "unpack it first"
#: What files are by how they start, in lower case, and what to do about it.
_STARTS: Final[tuple[tuple[tuple[bytes, ...], str, str], ...]] = (
    (
        (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/"),
        "is a pointer of Git LFS, not the file that it stands for",
        _PULL,
    ),
    (
        (b"<!doctype html", b"<html", b"<head", b"<?xml"),
        "is a web page, as servers send it in place of a file",
        _PAGE,
    ),
    (
        (b"entry not found", b"repository not found", b"invalid username or password", b"access to model"),
        "is a hub's refusal, not the file",
        "sign in with hf auth login, check the name, and fetch the file with hf download",
    ),
    ((b"gguf",), "is a GGUF file", "rename it to end in .gguf, and name it where a model is asked for"),
    ((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zxz", b"bzh"), "is a compressed file", _UNPACK),
    ((b"pk\x03\x04",), "is a zip archive, or a checkpoint of torch.save", f"{_UNPACK}, or {_PICKLE}"),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "is a pickle of Python", _PICKLE),
    ((b"\0" * 16,), "starts with zeros, as files do whose download or copy was cut off", _AGAIN),
)
_HEAD: Final = 512


class ContentError(ValueError):
    """A file is not read; the message is the rest of a sentence that starts with its name.

    Attributes:
        hint: what to do about it; empty if there is nothing special.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def foreign(head: bytes) -> tuple[str, str]:
    """Tell what a file is that is not what was expected, by its first bytes.

    Args:
        head: the file's first bytes, 512 or more if it has them.

    Returns:
        What it is, as the rest of a sentence, and a hint; both empty if it cannot be told.
    """
    start = head[:_HEAD].lstrip(b" \t\r\n\xef\xbb\xbf").lower()
    for starts, what, hint in _STARTS:
        if start.startswith(starts):
            return what, hint
    return "", ""


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[tuple[IO[bytes], int]]:
    """Open a regular file, or a link to one, and yield it, unbuffered, with its size in bytes.

    Raises:
        OSError: it cannot be opened.
        ContentError: it is a pipe, a device or a socket.
    """
    with _any(path, pipes=False) as (file, found):
        yield file, found.st_size


def read(path: str | os.PathLike[str], most: int, *, pipes: bool = False) -> bytes:
    """Read a regular file, or a pipe such as a shell's ``<(command)``.

    Args:
        path: path of the file.
        most: its largest size in bytes; a larger one is not read.
        pipes: whether it may be a pipe, as only what a user names may be.

    Raises:
        OSError: it cannot be read.
        ValueError: the path has a null byte.
        ContentError: it is larger, is no regular file, or is a pipe that does not end within 4 seconds.
    """
    with _any(path, pipes=pipes) as (file, found):
        if found.st_size > most:
            raise ContentError(f"has {found.st_size} bytes, the most is {most}")
        data = _drained(file.fileno(), most) if stat.S_ISFIFO(found.st_mode) else _whole(file, most)
    if len(data) > most:
        raise ContentError(f"has more than {most} bytes")
    return data


@contextmanager
def _any(path: str | os.PathLike[str], *, pipes: bool) -> Iterator[tuple[IO[bytes], os.stat_result]]:
    """Open what can be read without side effects; a pipe without a writer does not keep one waiting."""
    _check_kind(
        Path(path).stat().st_mode, pipes=pipes
    )  # before it is opened: that alone does something to some devices
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(number, "rb", buffering=0) as file:
        found = os.fstat(number)
        _check_kind(found.st_mode, pipes=pipes)
        yield file, found


def _check_kind(mode: int, *, pipes: bool) -> None:
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode)):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "of an unknown kind")
    raise ContentError(f"is {kind}, not a regular file", "write what it gives to a file, or name another file")


def _whole(file: IO[bytes], most: int) -> bytes:
    """Return a regular file's bytes, at most one more than ``most``; some of the system's files claim to be empty."""
    pieces, left = [], most + 1
    while left and (piece := file.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _drained(number: int, most: int) -> bytes:
    """Return a pipe's bytes, at most one more than ``most``."""
    end = monotonic() + PIPE_SECONDS
    pieces, left = [], most + 1
    while left:
        ready, _, _ = select([number], [], [], max(0.0, end - monotonic()))
        if not ready:
            message = f"is a pipe that did not end within {PIPE_SECONDS:.0f} seconds"
            raise ContentError(message, "write it to a file first, or to standard input, which is named -")
        piece = os.read(number, min(left, _PIECE))
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
