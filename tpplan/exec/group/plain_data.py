"""Plain data as bytes: all that processes tell each other, so that nothing which a process receives is run."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any, Final

from tpplan.files.jsontext import NotJSONError, read_json

#: Maximum bytes of what a process tells.
MOST_BYTES: Final = 16 * 2**20
#: Maximum depth of lists, tuples and dictionaries in each other.
_DEEPEST: Final = 32
#: Whole numbers are below it; so many digits are read.
_LARGEST: Final = 10**40

#: Plain data in words.
KINDS: Final = "None, bool, int, float, str, bytes, and lists, tuples and dictionaries of these"


class NotPlainError(ValueError):
    """Something is no plain data, or bytes are none; the message is the rest of a sentence."""


def encode(value: object) -> bytes:
    """Return plain data as bytes: JSON, in which an object is a tuple, a dictionary or bytes, by the name of its key.

    Types are exact, as the receiver gets them: a ``NamedTuple`` is no plain data.

    Raises:
        NotPlainError: the value has something else in it, a whole number of more than 40 digits or 32 levels, or takes
            more than ``MOST_BYTES``.
    """
    data = json.dumps(_packed(value, _DEEPEST), separators=(",", ":")).encode()
    if len(data) > MOST_BYTES:
        raise NotPlainError(f"has {len(data)} bytes, the most is {MOST_BYTES}")
    return data


def decode(data: bytes) -> Any:
    """Return the plain data that bytes encode.

    Raises:
        NotPlainError: they encode none.
    """
    try:
        return _unpacked(read_json(data, constants=True, most_values=MOST_BYTES), _DEEPEST)
    except (NotJSONError, TypeError, ValueError) as error:  # such as keys that cannot be keys, and odd base64
        raise NotPlainError("has bytes that are no plain data") from error


def _packed(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in {bool, float, str}:
        return value
    if kind is int:
        if abs(value) >= _LARGEST:
            raise NotPlainError("has a whole number of more than 40 digits")
        return value
    if kind is bytes:
        return {"bytes": b64encode(value).decode()}
    if not depth:
        raise NotPlainError(f"has more than {_DEEPEST} levels")
    if kind is list:
        return [_packed(each, depth - 1) for each in value]
    if kind is tuple:
        return {"tuple": [_packed(each, depth - 1) for each in value]}
    if kind is dict:
        return {"dict": [[_packed(key, depth - 1), _packed(each, depth - 1)] for key, each in value.items()]}
    raise NotPlainError(f"has an object of type {kind.__module__}.{kind.__qualname__}")


def _unpacked(data: Any, depth: int) -> Any:
    if not isinstance(data, (list, dict)):
        return data
    if isinstance(data, dict):
        ((name, inside),) = data.items()
        if name == "bytes":
            return b64decode(inside, validate=True)
    else:
        name, inside = "", data
    if not depth or not isinstance(inside, list):
        raise NotPlainError("has too many levels, or other objects")
    if name == "dict":
        return {_unpacked(key, depth - 1): _unpacked(each, depth - 1) for key, each in inside}
    values = [_unpacked(each, depth - 1) for each in inside]
    if name == "tuple":
        return tuple(values)
    if not name and isinstance(data, list):
        return values
    raise NotPlainError(f"has an object {name!r:.40}")
