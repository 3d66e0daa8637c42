"""Reading of files beside a checkpoint's config.json, which are untrusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.decoder.text.gguf import ends_in
from tpplan.errors import ModelError
from tpplan.files.content import ContentError, foreign, read
from tpplan.files.jsontext import NotJSONError, read_json
from tpplan.files.text import LARGEST_DOCUMENT
from tpplan.models.config import read_config
from tpplan.models.families.wrappers import text_part
from tpplan.weights.source import directory_of, gguf_of

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.weights.source import Source


def read_text(path: Path, hint: str, most: int = LARGEST_DOCUMENT) -> str:
    """Return the text of a file.

    Args:
        path: path of the file.
        hint: hint for the error.
        most: its largest size in bytes.

    Raises:
        ModelError: the file cannot be read, or is larger.
    """
    data = read_bytes(path, hint, most)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        what, better = foreign(data)
        raise ModelError(f"{path} {what or f'cannot be read: {error}'}", better or hint) from error


def read_bytes(path: Path, hint: str, most: int = LARGEST_DOCUMENT) -> bytes:
    """Return the bytes of a file, see :func:`read_text`."""
    try:
        return read(path, most)
    except ContentError as error:
        raise ModelError(f"{path} {error}", error.hint or hint) from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", hint) from error


def read_object(path: Path, hint: str) -> dict[str, object]:
    """Return the JSON object in a file; an empty one if there is no file.

    Args:
        path: path of the file.
        hint: hint for the error.

    Raises:
        ModelError: the file cannot be read, or is not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        data = read_json(read_bytes(path, hint), constants=True)
    except NotJSONError as error:
        raise ModelError(f"{path} cannot be read: it {error}", error.hint or hint) from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} is no object of JSON", hint)
    return data


def end_tokens(checkpoint: str | Path | Source) -> frozenset[int]:
    """Return the tokens that end a text, from generation_config.json or else config.json; empty if neither has any.

    Of a model in GGUF they are those of its metadata.

    Raises:
        ModelError: a file cannot be read, or its ``eos_token_id`` is not a token or a list of tokens.
    """
    if model := gguf_of(checkpoint):
        return ends_in(model.file)
    directory = directory_of(checkpoint)
    config = read_config(directory)
    generation = read_object(directory / "generation_config.json", "fetch it again, or remove it")
    places = generation, config.data, text_part(config)[1].data
    value = next((data["eos_token_id"] for data in places if data.get("eos_token_id") is not None), None)
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in tokens):
        raise ModelError(f"{directory}: eos_token_id is {str(value)[:60]}, expected tokens", "compare the files")
    return frozenset(tokens)
