"""JSON text: strict to read, canonical to write."""

from __future__ import annotations

import json
import re
from functools import partial

from tpplan.files import LARGEST_DOCUMENT, decode
from tpplan.problems import FORM, MOST_PROBLEMS, Problem, malformed, refusal

#: Columns that an object or array may take before it is broken over lines.
COLUMNS = 120

#: Characters that a terminal would obey, or that a reviewer would not see (controls, bidirectional marks, joiners).
UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")

#: Digits of a whole number; the cost of reading them grows with their square.
_DIGITS = 40


def parse_json(text: str | bytes, what: str) -> object:
    """Read JSON strictly.

    Raises:
        PlanError: listing what is wrong: no UTF-8, a byte order mark, no JSON, more than 16 MiB, too deep, a key twice
            in one object, NaN or Infinity, or a whole number beyond all reason.
    """
    text = decode(text, what) if isinstance(text, bytes) else text
    if len(text) > LARGEST_DOCUMENT:
        raise malformed(what, f"has {len(text)} characters, the most is {LARGEST_DOCUMENT}")
    found: dict[str, None] = {}  # in order, each once

    def whole(digits: str) -> int:
        if len(digits) <= _DIGITS:
            return int(digits)
        found[f"has a number of {len(digits)} digits"] = None
        return 0

    def constant(name: str) -> None:
        found[f"has {name}, which is not JSON"] = None

    try:
        data: object = json.loads(
            text, parse_int=whole, parse_constant=constant, object_pairs_hook=partial(_unique, found)
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise malformed(what, f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}", where) from error
    except RecursionError as error:
        raise malformed(what, "is nested too deeply") from error
    if found:
        raise refusal(what, [Problem(FORM, "", message) for message in found])
    return data


def render(data: object) -> str:
    """Return JSON data as people review it.

    An object or array takes one line if that fits in 120 columns, else one line for each of its members. The document
    itself and whatever contains a list of objects are always broken, so that one more object is one more line in a
    diff. Characters that nobody would see are escaped, all others are written as they are.
    """
    return _block(data, "") + "\n"


def shown(value: object) -> str:
    """Write a value for an error message, shortened."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    return _line(f"{value[:40]}…" if isinstance(value, str) and len(value) > len(value[:40]) else value)


def _unique(found: dict[str, None], pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make an object of its pairs, noting keys that come twice."""
    data: dict[str, object] = {}
    for key, value in pairs:
        if key in data and len(found) < MOST_PROBLEMS:
            found[f"has the key {shown(key)} twice in one object"] = None
        data[key] = value
    return data


def _line(data: object) -> str:
    """Write JSON on one line."""
    return UNSEEN.sub(lambda c: f"\\u{ord(c[0]):04x}", json.dumps(data, ensure_ascii=False))


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
