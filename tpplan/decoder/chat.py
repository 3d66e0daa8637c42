"""Rendering of a checkpoint's chat template, by jinja2 in its sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, Self

from attrs import frozen
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tpplan.decoder.files import read_object, read_text
from tpplan.decoder.text import check_text
from tpplan.errors import ModelError, RequestError

if TYPE_CHECKING:
    from jinja2.parser import Parser

#: Maximum characters of a template's message in an error.
_TOLD: Final = 200
#: Usual names of special tokens.
_USUAL: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FETCH: Final = "fetch it again, or leave out --chat"


@frozen
class ChatTemplate:
    """The chat template of a checkpoint, which turns messages into a prompt.

    Attributes:
        text: the template, in jinja's language.
        source: the file that it comes from.
        tokens: special tokens by name, such as ``bos_token``.
    """

    text: str
    source: Path
    tokens: Mapping[str, str]

    @classmethod
    def read(cls, directory: str | Path) -> Self:
        """Read a checkpoint's template, from chat_template.jinja or else tokenizer_config.json, and its special tokens.

        Raises:
            ModelError: there is no template, there are several without a default, or a file cannot be read.
        """
        names = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
        alone, beside, older = (Path(directory) / name for name in names)
        config = read_object(beside, _FETCH)
        tokens = _special(config, {} if "added_tokens_decoder" in config else read_object(older, _FETCH))
        if alone.is_file():
            return cls(read_text(alone, _FETCH), alone, tokens)
        text = _default(config.get("chat_template"), beside)
        if text is None:
            hint = "fetch its chat_template.jinja or tokenizer_config.json; models that are not for chats have none"
            raise ModelError(f"{directory} has no chat template", hint)
        return cls(text, beside, tokens)

    def render(self, user: str, system: str = "") -> str:
        """Return the prompt that the model answers.

        Args:
            user: the user's message.
            system: the system message; none if empty.

        Raises:
            RequestError: the template refuses the messages, or one is not valid text, see
                :func:`tpplan.decoder.text.check_text`.
            ModelError: the template fails.
        """
        check_text(system, "--system")
        check_text(user, "the prompt")
        said = {"system": system, "user": user} if system else {"user": user}
        given = {
            "messages": [{"role": role, "content": content} for role, content in said.items()],
            "add_generation_prompt": True,
            "tools": None,  # templates compare these with None
            "documents": None,
        }
        try:
            return _environment().from_string(self.text).render({**self.tokens, **given})
        except _RefusedError as error:
            hint = "leave out --system" if system else "leave out --chat, and write the whole prompt"
            raise RequestError(f"the chat template of {self.source} refuses this: {_told(error)}", hint) from error
        except Exception as error:  # a template can raise anything
            problem = f"the chat template of {self.source} fails: {type(error).__name__}: {_told(error)}"
            raise ModelError(problem, _FETCH) from error


class _RefusedError(Exception):
    """The error of a template that refuses its messages by ``raise_exception``."""


class _Generation(Extension):
    """The tag ``{% generation %}``, by which transformers finds the assistant's text; it does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content between the tags."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of templates, with the same options, filters and functions as in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now)
    return environment


def _refuse(message: object) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the user's local date


def _tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates may pass them by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Write JSON without jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _told(error: Exception) -> str:
    return str(error).partition("\n")[0][:_TOLD]


def _special(config: Mapping[str, object], older: Mapping[str, object]) -> dict[str, str]:
    """Return special tokens by name, with the precedence of transformers if a name has several.

    Args:
        config: content of tokenizer_config.json.
        older: content of special_tokens_map.json, which older checkpoints have; empty if the former has all added
            tokens.
    """
    keys = {key: value for key, value in {**config, **older}.items() if key.endswith("_token")}
    named: dict[str, object] = {
        key: value
        for key, value in config.items()
        if key.endswith("_token") and key not in _USUAL and isinstance(value, str)
    }
    named |= _object(config.get("extra_special_tokens"))
    if not named:  # the key under which transformers saves them
        named = _object(config.get("model_specific_special_tokens"))
    told = keys | named | _object(older.get("extra_special_tokens"))
    return {key: content for key, value in told.items() if (content := _content(value)) is not None}


def _object(found: object) -> dict[str, object]:
    return found if isinstance(found, dict) else {}


def _content(token: object) -> str | None:
    """Return the text of a special token, given as text or as an object with matching options; None if neither."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _default(found: object, path: Path) -> str | None:
    """Return the default template of a tokenizer_config.json; None if there is none."""
    if isinstance(found, list):
        entries = [(each.get("name"), each.get("template")) for each in found if isinstance(each, dict)]
        named = {name: template for name, template in entries if isinstance(name, str)}
        if named and "default" not in named:
            names = ", ".join(named)[:_TOLD]
            raise ModelError(f"{path} has the chat templates {names}, and none is the default", _FETCH)
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ModelError(f"{path}: chat_template is {str(found)[:60]}, expected a text", _FETCH)
    return found
