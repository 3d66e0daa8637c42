"""What is said to a model as one text: a checkpoint's chat template, rendered by jinja2 in its sandbox."""

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

#: Characters that an error tells of what a template says.
_TOLD: Final = 200
#: Special tokens that models have by these names.
_USUAL: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FETCH: Final = "fetch it again, or leave out --chat"


@frozen
class ChatTemplate:
    """How a checkpoint writes down who says what.

    Attributes:
        text: in jinja's language.
        source: the file that has it.
        tokens: special ones by name, such as ``bos_token``.
    """

    text: str
    source: Path
    tokens: Mapping[str, str]

    @classmethod
    def read(cls, directory: str | Path) -> Self:
        """Read a checkpoint's template, and its special tokens: chat_template.jinja, else of tokenizer_config.json.

        Raises:
            ModelError: there is none, there are several without a default, or a file cannot be read.
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
        """Return the text behind which the model answers.

        Args:
            user: what the user says.
            system: what the system says before; nothing if empty.

        Raises:
            RequestError: the template refuses this, or what is said has half a character.
            ModelError: the template fails.
        """
        check_text(system, "--system")
        check_text(user, "the prompt")
        said = {"system": system, "user": user} if system else {"user": user}
        given = {
            "messages": [{"role": role, "content": content} for role, content in said.items()],
            "add_generation_prompt": True,
            "tools": None,  # templates ask whether they are none
            "documents": None,
        }
        try:
            return _environment().from_string(self.text).render({**self.tokens, **given})
        except _RefusedError as error:
            hint = "leave out --system" if system else "leave out --chat, and write the whole prompt"
            raise RequestError(f"the chat template of {self.source} refuses this: {_told(error)}", hint) from error
        except Exception as error:  # a template can do anything wrong
            problem = f"the chat template of {self.source} fails: {type(error).__name__}: {_told(error)}"
            raise ModelError(problem, _FETCH) from error


class _RefusedError(Exception):
    """What a template raises on purpose."""


class _Generation(Extension):
    """``{% generation %}``, by which transformers finds what the assistant said; the text is what it is without."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Return what is between the tags."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return what templates find around them, which is what transformers gives them."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now)
    return environment


def _refuse(message: object) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the date where the user is


def _tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates may give them by place
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Write JSON without jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _told(error: Exception) -> str:
    return str(error).partition("\n")[0][:_TOLD]


def _special(config: Mapping[str, object], older: Mapping[str, object]) -> dict[str, str]:
    """Return special tokens by name: of several with the same name the one that transformers takes.

    Args:
        config: of tokenizer_config.json.
        older: of special_tokens_map.json, which older checkpoints have; empty where the former has all added tokens.
    """
    keys = {key: value for key, value in {**config, **older}.items() if key.endswith("_token")}
    named: dict[str, object] = {
        key: value
        for key, value in config.items()
        if key.endswith("_token") and key not in _USUAL and isinstance(value, str)
    }
    named |= _object(config.get("extra_special_tokens"))
    if not named:  # what transformers writes where it saves them
        named = _object(config.get("model_specific_special_tokens"))
    told = keys | named | _object(older.get("extra_special_tokens"))
    return {key: content for key, value in told.items() if (content := _content(value)) is not None}


def _object(found: object) -> dict[str, object]:
    return found if isinstance(found, dict) else {}


def _content(token: object) -> str | None:
    """Return a special token's text, which may stand beside how it is matched."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _default(found: object, path: Path) -> str | None:
    """Return the template of a tokenizer_config.json; None if there is none."""
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
