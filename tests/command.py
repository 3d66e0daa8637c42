"""The command line run in this process, with streams of its own."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from attrs import frozen

from tpplan.__main__ import main


@frozen
class Done:
    """What a command came to.

    Attributes:
        code: its exit code.
        out: standard output.
        err: standard error.
    """

    code: int
    out: str
    err: str


class _Stream(io.TextIOWrapper):
    """A stream that may call itself a terminal."""

    terminal = False

    def isatty(self) -> bool:
        """Tell whether this stream pretends to be a terminal."""
        return self.terminal


def command(*arguments: object, stdin: bytes = b"", terminal: bool = False, encoding: str = "utf-8") -> Done:
    """Run ``tpplan`` with these arguments."""
    out, err = (_Stream(io.BytesIO(), encoding=encoding, newline="", write_through=True) for _ in range(2))
    out.terminal = err.terminal = terminal
    source = io.TextIOWrapper(io.BytesIO(stdin))
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "stdin", source):
        code = main([str(argument) for argument in arguments])
    texts = [stream.buffer.getvalue().decode(encoding) for stream in (out, err)]  # type: ignore[attr-defined]
    return Done(code, *texts)
