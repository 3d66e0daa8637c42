"""Text and tokens: a checkpoint's tokenizer.json, read by the library ``tokenizers``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tpplan.errors import ExecutionError, ModelError, RequestError
from tpplan.extras import install_command

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What stands for bytes that are not a whole character yet.
_INCOMPLETE: Final = "\ufffd"
#: Tokens of the prompt that the first new one is seen behind: whether a word starts with a blank depends on them.
_CONTEXT: Final = 4


def check_text(text: str, what: str) -> None:
    """Make sure that a text is one.

    Args:
        text: of the command line.
        what: it is.

    Raises:
        RequestError: it has half a character, as Python reads bytes of a command line that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{what} has {text[error.start]!a} at character {error.start}, which is no text"
        raise RequestError(problem, "write it in UTF-8") from error


class Tokenizer:
    """Text to tokens, and back."""

    def __init__(self, directory: str | Path) -> None:
        """Read a checkpoint's tokenizer.json.

        Raises:
            ExecutionError: the library is not installed.
            ModelError: there is no such file, or it is none.
        """
        try:
            import tokenizers  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            message = "turning text into tokens needs tokenizers, which is not installed"
            raise ExecutionError(message, f"{install_command('generate')}, or give --token-ids") from error
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} does not exist", "fetch the model's tokenizer.json, or give --token-ids")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path} cannot be read: {error}", "fetch it again, or give --token-ids") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts around it unless the text has them.

        Raises:
            RequestError: see :func:`check_text`.
        """
        check_text(text, "the prompt")
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class Stream:
    """A text that grows token by token, told in pieces of whole characters."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """Start behind the tokens of a prompt."""
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._start, self._told = max(0, len(prompt) - _CONTEXT), len(prompt)

    def add(self, token: int) -> str:
        """Return what one more token adds: nothing while its last character is not complete."""
        self._tokens.append(token)
        piece = self.rest()
        if piece.endswith(_INCOMPLETE):
            return ""
        if piece:
            self._start, self._told = self._told, len(self._tokens)
        return piece

    def rest(self) -> str:
        """Return what has not been told yet, incomplete or not."""
        before = self._tokenizer.decode(self._tokens[self._start : self._told])
        return self._tokenizer.decode(self._tokens[self._start :])[len(before) :]
