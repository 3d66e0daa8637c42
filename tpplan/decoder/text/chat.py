"""The chat template of a checkpoint, and what it makes of a prompt within limits of time and memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import TYPE_CHECKING, Any, Final, Self

from attrs import frozen

from tpplan.decoder.text.files import read_object, read_text
from tpplan.decoder.text.gguf import special_in, template_in
from tpplan.decoder.text.tokenizer import Tokenizer, check_text
from tpplan.errors import ExecutionError, ModelError, RequestError

if TYPE_CHECKING:
    from tpplan.models.gguf.header import Gguf

if find_spec("jinja2") is None:  # reported before anything is read; templates.py imports it
    raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")

#: Maximum characters of names in an error.
_MOST_SHOWN: Final = 200
#: Maximum seconds for a template; usual ones take some milliseconds.
_SECONDS: Final = 2.0
#: Usual names of special tokens.
_USUAL: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
#: What errors call the messages of a command line.
_NAMES: Final = {"system": "--system", "user": "the prompt"}
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

    @classmethod
    def of_gguf(cls, file: Gguf, tokenizer: Tokenizer) -> Self:
        """Read the template in a GGUF file, or beside it.

        Args:
            file: the file.
            tokenizer: its tokenizer.

        Raises:
            ModelError: there is no template, or it cannot be read.
        """
        tokens = tokenizer.texts(special_in(file))
        alone = file.path.with_name("chat_template.jinja")
        if alone.is_file():
            return cls(read_text(alone, _FETCH), alone, tokens)
        text = template_in(file)
        if text is None:
            raise ModelError(f"{file.path.name} has no chat template", "leave out --chat, and write the whole prompt")
        return cls(text, file.path, tokens)

    def render(self, user: str, system: str = "") -> str:
        """Return the prompt that the model answers, of a message and perhaps a system message; see :meth:`converse`."""
        return self.converse(messages_of(user, system))

    def converse(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, object] | None = None) -> str:
        """Return the prompt that the model answers.

        Args:
            messages: what was said so far: ``role``, such as ``system``, ``user`` or ``assistant``, and ``content``.
            variables: further variables of the template, such as ``enable_thinking``.

        Raises:
            RequestError: the template refuses the messages, or one is not valid text, see
                :func:`tpplan.decoder.text.tokenizer.check_text`.
            ModelError: the template fails.
        """
        for message in messages:
            check_text(message["content"], _NAMES.get(message["role"], f"the message of {message['role']}"))
        usual = {
            "add_generation_prompt": True,
            "tools": None,  # templates compare these with None
            "documents": None,
        }
        request: dict[str, Any] = {
            "template": self.text,
            "variables": {**self.tokens, **usual, **(variables or {}), "messages": [*messages]},
            "now": datetime.now().isoformat(),  # noqa: DTZ005 - the user's local date
        }
        answer = _answered(request)
        if "text" in answer:
            return answer["text"]
        if "refused" in answer:
            has_system = any(message["role"] == "system" for message in messages)
            hint = "leave out --system" if has_system else "leave out --chat, and write the whole prompt"
            raise RequestError(f"the chat template of {self.source} refuses this: {answer['refused']}", hint)
        raise ModelError(f"the chat template of {self.source} fails: {answer['failed']}", _FETCH)


def messages_of(user: str, system: str = "") -> list[dict[str, str]]:
    """Return the messages of a chat that begins: the system's, unless it is empty, and the user's."""
    said = (("system", system), ("user", user)) if system else (("user", user),)
    return [{"role": role, "content": content} for role, content in said]


def _answered(request: dict[str, Any]) -> dict[str, str]:
    """Return the outcome of :func:`tpplan.decoder.text.templates.outcome` in a process of its own, within limits.

    Raises:
        ExecutionError: no process can be started.
    """
    # Neither site-packages nor the environment are looked at again: what this process imports from is known.
    command = [sys.executable or "python3", "-P", "-S", "-s", str(Path(__file__).with_name("templates.py"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        process = Popen(command, env=environment, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, bufsize=0)  # noqa: S603
    except OSError as error:
        problem = f"a process for the chat template cannot be started: {error.strerror}"
        raise ExecutionError(problem, "leave out --chat, and write the whole prompt") from error
    with process:
        assert process.stdout  # noqa: S101 - as asked for
        try:
            process.stdout.read(1)  # when it has started, which takes its time on some disks
            output, _ = process.communicate(json.dumps(request).encode(), _SECONDS)
        except TimeoutExpired:
            return {"failed": f"it takes more than {_SECONDS:g} s"}
        finally:
            process.kill()
    try:
        answer: dict[str, str] = json.loads(output)
    except ValueError:  # it did not come to an end, so there is no more than a part
        return {"failed": f"the process that renders it ended with code {process.returncode}"}
    return answer


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
    special = keys | named | _object(older.get("extra_special_tokens"))
    return {key: content for key, value in special.items() if (content := _content(value)) is not None}


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
            names = ", ".join(named)[:_MOST_SHOWN]
            raise ModelError(f"{path} has the chat templates {names}, and none is the default", _FETCH)
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ModelError(f"{path}: chat_template is {str(found)[:60]}, expected a text", _FETCH)
    return found
