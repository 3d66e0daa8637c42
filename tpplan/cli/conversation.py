"""A conversation on a terminal: lines in, answers out, until Ctrl-D."""

from __future__ import annotations

import signal
import sys
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from tpplan.cli import console
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.decoder.generation.conversation import Conversation

_MARK = "> "


def talk(conversation: Conversation) -> None:
    """Answer each line of the terminal; Ctrl-C ends an answer, Ctrl-D the conversation."""
    with suppress(ImportError):
        import readline  # noqa: F401, PLC0415 (edits the lines of input(), and is not on Windows)
    console.say("chat", "Ctrl-D ends it, Ctrl-C ends an answer")
    while True:
        try:
            line = _line()
        except EOFError:
            console.emit("\n")
            return
        except KeyboardInterrupt:
            console.emit("\n")
            continue
        if not line.strip():
            continue
        try:
            with _interrupted() as presses, closing(conversation.answer(line)) as pieces:
                for piece in pieces:
                    console.emit(piece)
                    if presses:
                        break
        except RequestError as error:  # of this line, and not of the conversation
            console.say("error", error.message, "bad", filter(None, [error.hint]))
        else:
            console.emit("\n")


def _line() -> str:
    """Return the next line of the terminal."""
    if sys.stdout.isatty():
        return input(_MARK)
    sys.stderr.write(_MARK)
    sys.stderr.flush()
    return input()


@contextmanager
def _interrupted() -> Iterator[list[int]]:
    """Collect presses of Ctrl-C, which so break into no step of the devices."""
    presses: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: presses.append(number))
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)
