"""Reading of files beside a checkpoint's config.json, which are untrusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.errors import ModelError
from tpplan.jsontext import NotJSONError, read_json

if TYPE_CHECKING:
    from pathlib import Path


def read_text(path: Path, hint: str) -> str:
    """Return the text of a file.

    Args:
        path: path of the file.
        hint: hint for the error.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint) from error


def read_object(path: Path, hint: str) -> dict[str, object]:
    """Return the JSON object in a file; an empty one if there is no file.

    Args:
        path: path of the file.
        hint: hint for the error.

    Raises:
        ModelError: the file cannot be read, or is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        data = read_json(read_text(path, hint))
    except NotJSONError as error:
        raise ModelError(f"{path} cannot be read: {error}", hint) from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} is no object of JSON", hint)
    return data
