"""The three standard streams: documents and views out, words beside them, files and standard input in."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from tpplan.errors import TpplanError
from tpplan.files.jsontext import visible
from tpplan.files.text import LARGEST_DOCUMENT, decode, read_text, save_text
from tpplan.render.screen import columns_of, write
from tpplan.render.text import line, shorten, width

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tpplan.render.blocks import Block
    from tpplan.render.text import Line

#: The width of what :func:`busy` has on the line of the cursor.
_busy: list[int] = []

#: Notes and warnings that the command has told so far.
_noted: list[str] = []

#: The path that means standard input or standard output.
STREAM = "-"


def stand_in() -> None:
    """Put nothing in the place of the standard streams that the caller closed, where Python has None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 (open to the end)


def begin() -> None:
    """Forget the notes of the command before, as a process may run several."""
    _noted.clear()


def noted() -> tuple[str, ...]:
    """Return the notes and warnings that the command has told so far, for its document."""
    return tuple(_noted)


def shown(path: str) -> str:
    """Return what to call a path that may be standard input."""
    return "standard input" if path == STREAM else path


def read(path: str) -> str:
    """Return the text of a file or of standard input.

    Raises:
        TpplanError: it cannot be read.
    """
    if path != STREAM:
        return read_text(path)
    try:
        data = sys.stdin.buffer.read(LARGEST_DOCUMENT + 1)
    except OSError as error:
        raise TpplanError(f"cannot read standard input: {error.strerror or error}", "name a file") from error
    return decode(data, shown(path))


def save(text: str, path: str) -> None:
    """Write a file as a whole, saying so on standard error; or write standard output.

    Raises:
        TpplanError: it cannot be written; what was there before is still there.
    """
    if path == STREAM:
        emit(text)
    else:
        say("wrote" if save_text(text, path) else "unchanged", path)


def emit(text: str) -> None:
    """Write a document to standard output: UTF-8 and its own line ends, whatever the locale."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def answer(document: object, view: Callable[[dict[str, Any], int], list[Line]], *, json: bool) -> None:
    """Write what a command has found: the document itself, or a view of its data for people."""
    from tpplan.files.codec import unstructure  # noqa: PLC0415 (not every command has a document)
    from tpplan.files.jsontext import render  # noqa: PLC0415 (not every command has a document)

    data = unstructure(document)
    if json:
        emit(render(data))
    else:
        write(view(data, columns_of(sys.stdout)), sys.stdout)


def present(
    document: object,
    view: Callable[[dict[str, Any]], Sequence[Block]],
    form: str,
    *,
    annotate: Callable[[dict[str, Any]], str] = str,
    plain: bool = False,
) -> None:
    """Write what a command has found, in one of several forms.

    Args:
        document: what was found.
        view: makes blocks of its data.
        form: ``text``, ``json``, ``markdown`` or ``github``.
        annotate: makes annotations of its data, of a command that has the form ``github``.
        plain: whether to write a text as off a terminal.
    """
    from tpplan.files.codec import unstructure  # noqa: PLC0415 (not every command has a document)
    from tpplan.files.jsontext import render  # noqa: PLC0415 (not every command has a document)
    from tpplan.render.blocks import lines_of  # noqa: PLC0415

    data = unstructure(document)
    if form == "text":
        write(lines_of(view(data), columns_of(sys.stdout, plain=plain)), sys.stdout, plain=plain)
    elif form == "markdown":
        from tpplan.render.markdown import markdown  # noqa: PLC0415

        emit(markdown(view(data)))
    else:
        emit(render(data) if form == "json" else annotate(_in_repository(data)))


def _in_repository(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a document with the paths of its files as GitHub names them."""
    lists = {key: data[key] for key in ("files", "plans") if key in data}
    return data | {key: [one | {"path": in_repository(one["path"])} for one in each] for key, each in lists.items()}


def in_repository(path: str) -> str:
    """Return a file's path as GitHub names it; standard input has none."""
    from tpplan.files import places  # noqa: PLC0415 (for one form only)

    return path if path == STREAM else places.in_repository(path)


def growing(view: Callable[[dict[str, Any], int], list[Line]]) -> Callable[[object], None]:
    """Return what writes a view of a document each time that it has grown: the lines that are new."""
    from tpplan.files.codec import unstructure  # noqa: PLC0415 (not every command has a document)

    columns, written = columns_of(sys.stdout), 0

    def more(document: object) -> None:
        nonlocal written
        lines = view(unstructure(document), columns)
        write(lines[written:], sys.stdout)
        sys.stdout.flush()
        written = len(lines)

    return more


def say(label: str, text: str, style: str = "dim", below: Iterable[str] = ()) -> None:
    """Write a line to standard error: ``note: …``; after what it is about, where both streams go to one place.

    Args:
        label: before the colon.
        text: behind it.
        style: of the label.
        below: further lines, which are indented.
    """
    if label in {"note", "warning"}:
        _noted.append(text)
    sys.stdout.flush()
    _erase()
    write([((label, style), (f": {text}", "")), *(line(f"  {one}") for one in below)], sys.stderr)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Say on a terminal what takes its time, until it is done."""
    if not sys.stderr.isatty():
        yield
        return
    text = shorten(f"{visible(what)} …", get_terminal_size().columns - 1)  # what is wrapped cannot be taken back
    sys.stderr.write(text)
    sys.stderr.flush()
    _busy.append(width(text))
    try:
        yield
    finally:
        _erase()


def _erase() -> None:
    """Take back what :func:`busy` has written, if nothing was written behind it."""
    while _busy:
        sys.stderr.write("\r" + " " * _busy.pop() + "\r")


def show_log() -> None:
    """Write what the executor logs to standard error: what takes its time, and warnings."""
    import logging  # noqa: PLC0415 (most commands log nothing)

    class Screen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            is_note = record.levelno < logging.WARNING
            say("note" if is_note else "warning", record.getMessage(), "dim" if is_note else "warn")

    log = logging.getLogger("tpplan")
    log.handlers = [Screen()]  # commands may run several times in a process
    log.setLevel(logging.INFO)


def fail(error: TpplanError, *, gpus: str, form: str) -> str:
    """Explain an error on standard error, and on standard output where that has another form than text.

    Returns:
        What kind of error it is.
    """
    from attrs import evolve  # noqa: PLC0415 (a good run needs none of these)

    from tpplan.files.codec import unstructure  # noqa: PLC0415 (a good run needs none of these)
    from tpplan.files.jsontext import render  # noqa: PLC0415 (a good run needs none of these)
    from tpplan.render import github, markdown  # noqa: PLC0415
    from tpplan.render.error import error as view  # noqa: PLC0415
    from tpplan.render.screen import plain_text  # noqa: PLC0415
    from tpplan.reports.error import error_report  # noqa: PLC0415

    report = evolve(error_report(error, gpus), notes=noted())
    data = unstructure(report)
    write(view(data, columns_of(sys.stderr)), sys.stderr)
    if form == "json":
        emit(render(data))
    elif form == "markdown":
        emit(markdown.fenced(plain_text(view(data))))
    elif form == "github":
        emit(github.error(data))
    return report.error.kind


def close() -> None:
    """Send what is still to be written nowhere: the reader of standard output is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
