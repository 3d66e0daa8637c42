"""JSON text: strict to read, canonical to write."""

from __future__ import annotations

import json
import re
from collections import Counter

from tpplan.problems import MOST_PROBLEMS

#: Columns that an object or array may take before it is broken over lines.
COLUMNS = 120

#: Characters that a terminal would obey, or that a reviewer would not see: controls, lone surrogates, bidirectional
#: marks, joiners and other characters of no width, letters that are blank (Hangul fillers), and tags.
UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff"
    "\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e007f]"
)

#: Digits of a whole number; the cost of reading them grows with their square.
_DIGITS = 40

#: Problems that an error of one line tells.
_TOLD = 3


class NotJSONError(ValueError):
    """What is not strict JSON.

    Attributes:
        found: what is wrong, each as the rest of a sentence: ``has NaN, which is not JSON``.
        where: the line and column; empty if there is none.
    """

    def __init__(self, *found: str, where: str = "") -> None:
        super().__init__(", and ".join(found[:_TOLD]) + (f", at {where}" if where else ""))
        self.found = found
        self.where = where


def decode(data: bytes) -> str:
    """Return the text of JSON.

    Raises:
        NotJSONError: it is no UTF-8, or starts with a byte order mark.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise NotJSONError(f"is no UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from error
    if text.startswith("\ufeff"):
        raise NotJSONError("starts with a byte order mark, which JSON does not have")
    return text


def read_json(text: str | bytes) -> object:
    """Read JSON strictly; how long it may be is up to the caller.

    Raises:
        NotJSONError: it is no UTF-8, starts with a byte order mark, is no JSON or too deep, or has a key twice in one
            object, NaN or Infinity, or a whole number beyond all reason.
    """
    text = decode(text) if isinstance(text, bytes) else text
    if not text.strip():
        raise NotJSONError("is empty")
    found: dict[str, None] = {}  # in order, each once

    def whole(digits: str) -> int:
        if len(digits) <= _DIGITS:
            return int(digits)
        found[f"has a number of {len(digits)} digits"] = None
        return 0

    def constant(name: str) -> None:
        found[f"has {name}, which is not JSON"] = None

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        data = dict(pairs)
        if len(data) < len(pairs) and len(found) < MOST_PROBLEMS:
            counts = Counter(key for key, _ in pairs)
            found.update((f"has the key {shown(key)} twice in one object", None) for key in counts if counts[key] > 1)
        return data

    try:
        data: object = json.loads(text, parse_int=whole, parse_constant=constant, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise NotJSONError(f"is not JSON: {error.msg[:1].lower()}{error.msg[1:]}", where=where) from error
    except RecursionError as error:
        raise NotJSONError("is nested too deeply") from error
    if found:
        raise NotJSONError(*found)
    return data


def render(data: object) -> str:
    """Return JSON data as people review it.

    An object or array takes one line if that fits in 120 columns, else one line for each of its members. The document
    itself and whatever contains a list of objects are always broken, so that one more object is one more line in a
    diff. Characters that nobody would see are escaped, all others are written as they are.
    """
    return _block(data, "") + "\n"


def visible(text: str) -> str:
    """Escape the characters that nobody would see, as JSON does."""
    return UNSEEN.sub(lambda c: json.dumps(c[0])[1:-1], text)


def shown(value: object) -> str:
    """Write a value for an error message, shortened."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    return _line(f"{value[:40]}…" if isinstance(value, str) and len(value) > len(value[:40]) else value)


def _line(data: object) -> str:
    """Write JSON on one line."""
    return visible(json.dumps(data, ensure_ascii=False))


def _block(data: object, indent: str, lead: str = "") -> str:
    """Write JSON at an indentation, with its key before it, on as many lines as :func:`render` says."""
    if not data or not isinstance(data, (dict, list, tuple)):
        return f"{indent}{lead}{_line(data)}"
    if indent and not _has_objects(data):
        line = f"{indent}{lead}{_line(data)}"
        if len(line) < COLUMNS:  # leaves room for a comma
            return line
    deeper = indent + "  "
    if isinstance(data, dict):
        inside = [_block(value, deeper, f"{_line(key)}: ") for key, value in data.items()]
    else:
        inside = [_block(value, deeper) for value in data]
    opening, closing = "{}" if isinstance(data, dict) else "[]"
    return "\n".join((f"{indent}{lead}{opening}", ",\n".join(inside), f"{indent}{closing}"))


def _has_objects(data: object) -> bool:
    """Tell whether there is a list of objects anywhere in ``data``."""
    if isinstance(data, dict):
        return any(map(_has_objects, data.values()))
    return isinstance(data, (list, tuple)) and any(isinstance(v, dict) or _has_objects(v) for v in data)
