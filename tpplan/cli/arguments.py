"""Arguments of commands: their choices, and what is wrong with them, in one sentence and a hint."""

from __future__ import annotations

import re
from difflib import get_close_matches
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args, get_origin

from cyclopts import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from tpplan.core.plan import AUTO, CACHE_KINDS, KV_MODES, LAYOUTS, STRATEGIES
from tpplan.errors import UsageError
from tpplan.exec.options import BACKENDS, TRANSPORTS, TRANSPORTS_OR_AUTO
from tpplan.export.names import EngineName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cyclopts import Token

#: The command that is written as an option, as in other programs.
COMPLETION = "--install-completion"

_WHOLE = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_LONGEST_NUMBER = 100
#: With one point, a number may as well be a fraction.
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:(?:[,'][0-9]{3})+|(?:\.[0-9]{3}){2,})")
_SHORT = re.compile(r"([0-9]{1,6})([kKmM])i?")
_SCALES = {"k": 2**10, "m": 2**20}
_QUOTES = "\"'"
#: How much of two choices must agree, of 1, for one to be a slip of the other.
_NEAR = 0.5
#: What people say for a choice that is spelled otherwise.
_SAID = {"gpu": "cuda", "int8": "q8", "fp6": "q6", **dict.fromkeys(("fp4", "int4", "nf4"), "q4")}

#: What to do instead of giving a command an option that another one has.
_ELSEWHERE = {
    ("tpplan fit", "--draft-output"): (
        "leave it out, and all of the draft model has room on every device;"
        " tpplan plan --draft-output FILE splits it, and says what fits then"
    )
}

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


def engine(_: object, tokens: Sequence[Any]) -> str:
    """Return the name of the engine that an argument names, which may be another name of it.

    Raises:
        RequestError: there is none.
        ValueError: it is empty.
    """
    from tpplan.export.export import engine_of  # noqa: PLC0415 (its engines take their time)

    if not tokens[0].value:
        raise ValueError(tokens[0].value)
    return engine_of(tokens[0].value).name


if TYPE_CHECKING:
    File: TypeAlias = str
    CacheKind: TypeAlias = str
    Layout: TypeAlias = str
    Strategy: TypeAlias = str
    KvMode: TypeAlias = str
    Backend: TypeAlias = str
    Transport: TypeAlias = str
    TransportOrAuto: TypeAlias = str
    Engine: TypeAlias = str
    Runner: TypeAlias = str
    View: TypeAlias = str
    Verdict: TypeAlias = str
    Shell: TypeAlias = Literal["bash", "zsh", "fish"]
else:  # types by which help and completion know what there is
    File = Annotated[Path, Parameter(converter=lambda _, tokens: tokens[0].value)]
    Shell = Literal["bash", "zsh", "fish"]
    CacheKind = Literal[tuple(CACHE_KINDS)]
    Layout = Literal[LAYOUTS]
    Strategy = Literal[(*STRATEGIES, AUTO)]
    KvMode = Literal[KV_MODES]
    Backend = Literal[BACKENDS]
    Transport = Literal[TRANSPORTS]
    TransportOrAuto = Literal[TRANSPORTS_OR_AUTO]
    Runner = Literal["auto", "tpplan", "transformers"]
    Engine = Annotated[Literal[tuple(map(str, EngineName))], Parameter(name="--for", converter=engine)]
    #: Forms of what a command shows, and of what it judges.
    View = Annotated[Literal["text", "json", "markdown"], Parameter(name="--format")]
    Verdict = Annotated[Literal["text", "json", "markdown", "github"], Parameter(name="--format")]


def form_of(form: str | None, *, json: bool) -> str:
    """Return the form in which a command answers.

    Args:
        form: of ``--format``, None without that.
        json: whether there is ``--json``.

    Raises:
        UsageError: there are both.
    """
    if form and json:
        raise UsageError(f"--json does not go with --format {form}", "leave out one of the two")
    return "json" if json else form or "text"


def form_in(tokens: Sequence[str]) -> str:
    """Return the form that arguments ask for, which may be no valid ones."""
    words = [word for token in tokens for word in (token.split("=", 1) if token.startswith("--format=") else [token])]
    named = next((after for word, after in pairwise(words) if word == "--format"), "text")
    return "json" if "--json" in words else named


def explained(error: CycloptsError, tokens: Sequence[str], commands: Sequence[str]) -> UsageError:
    """Return in words what cannot be parsed.

    Args:
        error: why.
        tokens: all arguments.
        commands: there are.
    """
    if not tokens or tokens[0] not in {*commands, COMPLETION}:
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
        meant = _ELSEWHERE.get((name, unknown.partition("=")[0]), meant)
    elif isinstance(error, UnusedCliTokensError):
        text = f"{name} takes no further argument {' '.join(error.unused_tokens or ())[:60]!r}"
        meant = _as_repeated(tokens, list(error.unused_tokens or ())) or (commas if name == "tpplan plan" else "")
    elif isinstance(error, MissingArgumentError) and argument:
        given = [token for token in tokens if token in argument.names]
        text = f"{given[0]} has no value" if given else f"{name} needs {option}"
        slips = get_close_matches(option, [token for token in tokens if token.startswith("--")], 1)
        meant = f"did you mean {option} instead of {slips[0]}?" if slips and not given else _EXAMPLES.get(option, "")
    elif isinstance(error, RepeatArgumentError):
        text = f"{error.token.keyword or option} is there twice, expected once"
        meant = commas if error.token.keyword == "--gpus" else ""
    elif isinstance(error, CoercionError) and error.token:
        text, meant = _value_problem(error, error.token, option)
    return text, meant


def _as_repeated(tokens: Sequence[str], unused: Sequence[str]) -> str:
    """Return how to write several reserves, if these are what arguments that nothing takes are; empty if not."""
    at = list(tokens).index("--reserve") + 1 if "--reserve" in tokens else len(tokens)
    given = list(takewhile(lambda token: not token.startswith("-"), tokens[at:]))
    if not {*unused} & {*given[1:]}:
        return ""
    return f"name each with an option of its own, as in {' '.join(f'--reserve {each[:40]}' for each in given[:3])}"


def _value_problem(error: CoercionError, token: Token, option: str) -> tuple[str, str]:
    """Return what is wrong with the value of an option, and what was probably meant."""
    name, value, wanted = token.keyword or option, token.value, error.target_type
    if wanted is bool:
        return f"{name} takes no value", ""
    if not value:
        return f"{name} is empty", ""
    if get_origin(wanted) is Literal:
        choices = list(map(str, get_args(wanted)))
        said = value.casefold()
        near = get_close_matches(_SAID.get(said, said), choices, 1, _NEAR)
        meant = f"did you mean {near[0]}?" if near else ""
        return f"{name} is {value[:40]!r}, expected {', '.join(choices[:-1])} or {choices[-1]}", meant
    if wanted is float:
        return f"{name} is {value[:40]!r}, expected a number", ""
    digits = _digits(value)
    text = f"{name} is {value[:40]!r}, expected a whole number in digits, such as 32768 or 32k"
    return text, f"did you mean {digits}?" if digits else ""


def _digits(text: str) -> str:
    """Return the digits of a whole number that is written as 32,768, or nothing."""
    return re.sub("[^0-9]", "", text) if _THOUSANDS.fullmatch(text) else ""
