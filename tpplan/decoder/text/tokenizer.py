"""Conversion between text and tokens, by a checkpoint's tokenizer.json and the library ``tokenizers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpplan.core.missing import install_command
from tpplan.decoder.text.files import read_bytes
from tpplan.decoder.text.gguf import tokenizer_in
from tpplan.errors import ExecutionError, ModelError, RequestError
from tpplan.files.content import foreign
from tpplan.weights.source import directory_of, gguf_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tpplan.weights.source import Source

#: Replacement character, which tokenizers return for an incomplete character.
_INCOMPLETE: Final = "\ufffd"
#: Limits of a tokenizer.json; the largest known one, of 262,144 tokens, has 33 MiB and 1.3 million values.
_MOST_BYTES: Final = 64 * 2**20
_MOST_VALUES: Final = 2_000_000
#: Tokens of the prompt to decode together with the first new one: they decide whether a word starts with a space.
_CONTEXT: Final = 4


def check_text(text: str, what: str) -> None:
    """Check that a text can be encoded in UTF-8.

    Args:
        text: text from the command line.
        what: name of the text for the error.

    Raises:
        RequestError: it has a lone surrogate, as which Python reads bytes of a command line that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{what} has {text[error.start]!a} at character {error.start}, which is no text"
        raise RequestError(problem, "write it in UTF-8") from error


class Tokenizer:
    """Converts text to tokens, and back."""

    def __init__(self, checkpoint: str | Path | Source) -> None:
        """Read a checkpoint's tokenizer.json; of a GGUF file without one beside it, its own tokenizer.

        Raises:
            ExecutionError: the library is not installed.
            ModelError: the file does not exist or cannot be read.
        """
        try:
            import tokenizers  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            message = "turning text into tokens needs tokenizers, which is not installed"
            raise ExecutionError(message, f"{install_command('generate')}, or give --token-ids") from error
        path, model = directory_of(checkpoint) / "tokenizer.json", gguf_of(checkpoint)
        kept, hint = "", "fetch it again, or give --token-ids"
        if model and not path.exists():
            data, path = tokenizer_in(model.file)
            kept = "" if path == model.file.path else "delete it: it is then converted again from the GGUF file"
        elif not path.exists():
            raise ModelError(f"{path} does not exist", "fetch the model's tokenizer.json, or give --token-ids")
        else:
            data = read_bytes(path, hint, _MOST_BYTES)
        if data.count(b",") > _MOST_VALUES:
            raise ModelError(f"{path} has more than {_MOST_VALUES} values", kept or hint)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises nothing narrower
            what, better = foreign(data)
            raise ModelError(f"{path} {what or f'cannot be read: {error}'}", kept or better or hint) from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, by default with the special tokens that the tokenizer puts around it.

        Raises:
            RequestError: see :func:`check_text`.
        """
        check_text(text, "the prompt")
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def texts(self, tokens: Mapping[str, int]) -> dict[str, str]:
        """Return the texts of single tokens by name, without those that the vocabulary has not."""
        found = {name: self._tokenizer.id_to_token(token) for name, token in tokens.items() if token >= 0}
        return {name: str(text) for name, text in found.items() if text is not None}

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class Stream:
    """Decodes a growing text token by token, in pieces of whole characters."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """Start after the tokens of a prompt."""
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._start, self._end = max(0, len(prompt) - _CONTEXT), len(prompt)

    def add(self, token: int) -> str:
        """Add a token, and return the new text; empty while its last character is incomplete."""
        self._tokens.append(token)
        piece = self.rest()
        if piece.endswith(_INCOMPLETE):
            return ""
        if piece:
            self._start, self._end = self._end, len(self._tokens)
        return piece

    def rest(self) -> str:
        """Return the text not yet returned by :meth:`add`, incomplete characters included."""
        before = self._tokenizer.decode(self._tokens[self._start : self._end])
        return self._tokenizer.decode(self._tokens[self._start :])[len(before) :]
