"""The command line: arguments in, exit code out."""

from __future__ import annotations

import os
import sys
import traceback
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from cyclopts import CycloptsError

from tpplan.cli import arguments, console
from tpplan.cli.commands import FAILED, NO, OK, app
from tpplan.cli.generate import generate
from tpplan.errors import InternalError, TpplanError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

PIPE_CLOSED = 141

#: Stands for a lone ``-`` while arguments are parsed, which would take it for an option; no argument can contain it.
_DASH = "\0"

app.command(generate, sort_key=10)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 yes, 1 the answer is no, 2 there is no answer."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    console.stand_in()
    try:
        return _run(tokens)
    except BrokenPipeError:
        console.close()
        return PIPE_CLOSED
    except SystemExit as error:  # by rich, which writes help and colours
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return PIPE_CLOSED


def _run(tokens: list[str]) -> int:
    """Run a command, turning every error into an explanation and an exit code."""
    gpus = ""
    console.begin()
    try:
        command, bound = _parsed(tokens)
        gpus = bound.arguments.get("gpus", "")
        code = command(*bound.args, **bound.kwargs) or OK
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except TpplanError as error:
        problem = error
    except Exception as error:  # noqa: BLE001 (nobody should have to read a traceback)
        if os.environ.get("TPPLAN_DEBUG"):
            traceback.print_exc()
        problem = _unexpected(error)
    else:
        return int(code)
    kind = console.fail(problem, gpus=gpus, form=arguments.form_in(tokens))
    return NO if kind == "infeasible" else FAILED


def _parsed(tokens: list[str]) -> tuple[Any, Any]:
    """Return the command that arguments name, and its own arguments.

    Raises:
        UsageError: they name none.
    """
    try:
        command, bound, *_ = app.parse_args(
            [_DASH if token == console.STREAM else token for token in tokens], exit_on_error=False, print_error=False
        )
    except CycloptsError as error:
        commands = sorted((name for name in app if not name.startswith("-")), key=lambda name: app[name].sort_key)
        raise arguments.explained(error, tokens, commands) from error
    for key, value in bound.arguments.items():
        if "" in (value if isinstance(value, tuple) else (value,)):
            option = bound.signature.parameters[key].kind is Parameter.KEYWORD_ONLY
            name = f"--{key.strip('_').replace('_', '-')}" if option else key.upper()
            raise UsageError(f"{name} is empty", "a variable of the shell may have no value")
        bound.arguments[key] = _undashed(value)
    return command, bound


def _undashed(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_undashed, value))
    return console.STREAM if value == _DASH else value


def _unexpected(error: Exception) -> TpplanError:
    """Return an error that nobody foresaw as one that can be shown."""
    if isinstance(error, OSError):  # files and standard input have their own errors
        console.close()  # what standard output has not taken, it will not take at exit either
        return TpplanError(f"cannot write to standard output: {error.strerror or error}", "see that there is room")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(frame.filename)}, line {frame.lineno}"  # noqa: PTH119
    message = f"tpplan has a bug: {type(error).__name__}: {error} ({where})"
    return InternalError(message, "please report it with the command; TPPLAN_DEBUG=1 shows the traceback")
