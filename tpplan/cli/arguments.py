"""Arguments of commands: what is wrong with them, in one sentence and a hint."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from cyclopts import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from tpplan.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_WHOLE = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_LONGEST_NUMBER = 100
#: With one point, a number may as well be a fraction.
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:(?:[,'][0-9]{3})+|(?:\.[0-9]{3}){2,})")
_SHORT = re.compile(r"([0-9]{1,6})([kKmM])i?")
_SCALES = {"k": 2**10, "m": 2**20}
_QUOTES = "\"'"

#: What the options that a command cannot do without may be.
_EXAMPLES = {
    "--gpus": "write it as in --gpus RTX4090,RTX3060",
    "--model": "write it as in --model models/llama",
    "--for": "write it as in --for llama.cpp",
}


def whole(_: object, tokens: Sequence[Any]) -> int:
    """Return the whole number that an argument is, and no other: 1.5 is not 2.

    ``8k`` is 8192 and ``1M`` is 1048576, as contexts are named.

    Raises:
        ValueError: it is none.
    """
    text = tokens[0].value
    if short := _SHORT.fullmatch(text):
        return int(short[1]) * _SCALES[short[2].lower()]
    if len(text) > _LONGEST_NUMBER or not _WHOLE.fullmatch(text):
        raise ValueError(text)
    return int(text)


def explained(error: CycloptsError, tokens: Sequence[str], commands: Sequence[str]) -> UsageError:
    """Return in words what cannot be parsed.

    Args:
        error: why.
        tokens: all arguments.
        commands: there are.
    """
    if not tokens or tokens[0] not in commands:
        return _no_command(error, tokens, commands)
    name = f"tpplan {tokens[0]}"
    message, hint = _problem(error, name, tokens)
    listed = f"{name} --help lists what there is"
    joint = " " if hint.endswith("?") else "; "
    return UsageError(message, f"{hint}{joint}{listed}" if hint else listed)


def lacking(command: str, name: str, because: str = "") -> UsageError:
    """Return that a command needs an argument or option.

    Args:
        command: its name.
        name: of the argument.
        because: when, as the end of the sentence.
    """
    hint = f"{_EXAMPLES[name]}; " if name in _EXAMPLES else ""
    message = f"tpplan {command} needs {name}" + (f", {because}" if because else "")
    return UsageError(message, f"{hint}tpplan {command} --help lists what there is")


def _no_command(error: CycloptsError, tokens: Sequence[str], commands: Sequence[str]) -> UsageError:
    """Return what is said of arguments that do not begin with a command."""
    first = tokens[0] if tokens else ""
    if not isinstance(error, UnknownCommandError) or first.startswith("-"):
        return UsageError(f"the first argument is {first[:40]!r}, expected a command", _listed(commands))
    near = get_close_matches(first, commands, 1)
    return UsageError(f"unknown command {first[:40]!r}", f"did you mean {near[0]}?" if near else _listed(commands))


def _listed(commands: Sequence[str]) -> str:
    return f"commands are {', '.join(commands[:-1])} and {commands[-1]}; tpplan --help explains them"


def _problem(error: CycloptsError, name: str, tokens: Sequence[str]) -> tuple[str, str]:
    """Return the sentence, and a hint where there is a better one than to read the help."""
    argument = error.argument
    option = argument.name if argument else ""
    text = " ".join(str(error).split()).removesuffix(".")
    near = re.search(r"Did you mean (\S+)\?", text)
    meant = f"did you mean {near[1].strip(_QUOTES)}?" if near else ""
    commas = "separate GPUs by commas, as in --gpus RTX4090,RTX3060"
    if isinstance(error, UnknownOptionError):
        unknown = error.token.keyword or error.token.value
        text = f"{name} has no option {unknown[:40]}"
        names = {name for each in error.argument_collection or () for name in each.names}
        if (position := unknown.lstrip("-").upper()) in names:
            meant = f"write {position} without {unknown[:40]}"
        elif f"-{unknown}" in names:
            meant = f"did you mean -{unknown}?"
    elif isinstance(error, UnusedCliTokensError):
        text = f"{name} takes no further argument {' '.join(error.unused_tokens or ())[:60]!r}"
        meant = commas if name == "tpplan plan" else ""
    elif isinstance(error, MissingArgumentError) and argument:
        given = [token for token in tokens if token in argument.names]
        text = f"{given[0]} has no value" if given else f"{name} needs {option}"
        slips = get_close_matches(option, [token for token in tokens if token.startswith("--")], 1)
        meant = f"did you mean {option} instead of {slips[0]}?" if slips and not given else _EXAMPLES.get(option, "")
    elif isinstance(error, RepeatArgumentError):
        text = f"{error.token.keyword or option} is there twice, expected once"
        meant = commas if error.token.keyword == "--gpus" else ""
    elif isinstance(error, CoercionError) and error.token:
        wanted = "a number" if error.target_type is float else "a whole number in digits, such as 32768 or 32k"
        text = f"{error.token.keyword or option} is {error.token.value[:40]!r}, expected {wanted}"
        if error.target_type is bool:
            text = f"{error.token.keyword or option} takes no value"
        elif error.target_type is not float and (digits := _digits(error.token.value)):
            meant = f"did you mean {digits}?"
    return text, meant


def _digits(text: str) -> str:
    """Return the digits of a whole number that is written as 32,768, or nothing."""
    return re.sub("[^0-9]", "", text) if _THOUSANDS.fullmatch(text) else ""
