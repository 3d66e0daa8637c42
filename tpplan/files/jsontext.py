"""Strict parsing and canonical formatting of JSON text."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from typing import TYPE_CHECKING

from tpplan.files.content import foreign

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Widest line of an object or array; wider ones are broken over several lines.
COLUMNS = 120

#: Characters that control a terminal or are invisible to a reviewer: control characters, lone surrogates,
#: bidirectional marks, joiners and other zero-width characters, blank letters (Hangul fillers), and tags.
UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff"
    "\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e007f]"
)

#: Most digits of a whole number; the time to parse one grows with the square of its digits.
_DIGITS = 40

#: Most problems of a text; after these, no more are looked for.
_MOST_FOUND = 10

#: Most problems in a one-line error message.
_TOLD = 3

#: Most values in a document, by the characters between and around them; this limits time and memory, since a value of
#: two characters takes up to 64 bytes.
MOST_VALUES = 1_000_000

#: Steps of the path of a value, tokens of JSON (never backtracking, which takes memory), and where its parser stopped.
_STEP = re.compile(r"([^.\[\]]+)|\[([0-9]+)\]")
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\],:]|[^\s{}\[\],:"]+')
_WHERE = re.compile("line ([0-9]+), column ")

_CONFLICT = re.compile(r"^(<<<<<<<|>>>>>>>|\|\|\|\|\|\|\|) ", re.MULTILINE)
_HEAD = 512
#: What helps against a file without anything in it.
AGAIN = "fetch or make it again"
_AGAIN = f"the file is incomplete: {AGAIN}"
_ALL_ZEROS = bytes.maketrans(b"123456789", b"000000000")


class NotJSONError(ValueError):
    """Text is not strict JSON.

    Attributes:
        found: the problems, each as the rest of a sentence: ``has NaN, which is not JSON``.
        where: line and column; empty if unknown.
        hint: what to do about it; empty if there is nothing special.
    """

    def __init__(self, *found: str, where: str = "", hint: str = "") -> None:
        super().__init__(", and ".join(found[:_TOLD]) + (f", at {where}" if where else ""))
        self.found = found
        self.where = where
        self.hint = hint


def decode(data: bytes) -> str:
    """Decode the bytes of a JSON text.

    Raises:
        NotJSONError: they are not UTF-8, or start with a byte order mark.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):  # as PowerShell writes what is redirected
            raise NotJSONError("is UTF-16 text, expected UTF-8") from error
        what, hint = foreign(data)
        if what:
            raise NotJSONError(what, hint=hint) from error
        raise NotJSONError(f"is no UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from error
    if text.startswith("\ufeff"):
        raise NotJSONError("starts with a byte order mark, which JSON does not have")
    return text


def read_json(text: str | bytes, *, constants: bool = False, most_values: int = MOST_VALUES) -> object:
    """Parse JSON strictly; the caller limits its length.

    Args:
        text: the text.
        constants: whether to accept NaN and Infinity, which Python writes.
        most_values: upper limit of the number of values.

    Raises:
        NotJSONError: it is not UTF-8, starts with a byte order mark, is not JSON, is nested too deeply or has more than
            ``most_values`` values, or has a duplicate key in an object, NaN or Infinity, or a whole number of more than
            40 digits. What is known to be another kind of file is called that.
    """
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    text = decode(text) if isinstance(text, bytes) else text
    if not text.strip():
        raise NotJSONError("is empty", hint=AGAIN)
    if sum(map(data.count, (b",", b"{", b"["))) > most_values:
        raise NotJSONError(f"has more than {most_values} values", hint="no such file is that long: check what it is")
    return _parsed(text, constants=constants, long=b"0" * (_DIGITS + 1) in data.translate(_ALL_ZEROS))


def lines_of(text: str, paths: Sequence[str]) -> list[int]:
    """Return the lines, from 1, of values in a JSON text; of the nearest value around one that is missing.

    Args:
        text: the text, which is JSON where any path is one of a value.
        paths: of the values, such as ``splits[1].bounds``; or where one is, as in :attr:`NotJSONError.where`.

    Returns:
        A line for each path; 0 if nothing of it is there.
    """
    steps = [tuple(key or int(index) for key, index in _STEP.findall(path)) for path in paths]
    wanted = {
        one[:n]
        for path, one in zip(paths, steps, strict=True)
        if not _WHERE.match(path)
        for n in range(1, 1 + len(one))
    }
    found = _starts(text, wanted) if wanted else {}
    lines = [next((found[one[:n]] for n in range(len(one), 0, -1) if one[:n] in found), 0) for one in steps]
    return [int(match[1]) if (match := _WHERE.match(path)) else n for path, n in zip(paths, lines, strict=True)]


def _starts(text: str, wanted: set[tuple[str | int, ...]]) -> dict[tuple[str | int | None, ...], int]:
    """Return the lines in which values begin, or the keys in front of them."""
    found: dict[tuple[str | int | None, ...], int] = {}
    inside: list[str | int | None] = []  # the key or index in each object and array around; None before a key
    line, end = 1, 0
    for match in _TOKEN.finditer(text):
        line, end, part = line + text.count("\n", end, match.start()), match.start(), match[0]
        if part in "}]":
            inside.pop()
        elif part == ",":
            inside[-1] = inside[-1] + 1 if isinstance(inside[-1], int) else None
        elif part != ":" and inside:
            if inside[-1] is None:
                inside[-1] = json.loads(part)
            if (place := tuple(inside)) in wanted:
                found.setdefault(place, line)
        if part in "{[":
            inside.append(None if part == "{" else 0)
    return found


def _parsed(text: str, *, constants: bool, long: bool) -> object:
    """Parse JSON strictly, as :func:`read_json` does; ``long`` says whether any number may have too many digits."""
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
        if len(data) < len(pairs) and len(found) < _MOST_FOUND:
            counts = Counter(key for key, _ in pairs)
            twice = [key for key in counts if counts[key] > 1]
            found.update((f"has the key {shown(key)} twice in one object", None) for key in twice[:_MOST_FOUND])
            if len(twice) > _MOST_FOUND:
                found[f"has {len(twice) - _MOST_FOUND} more keys twice in that object"] = None
        return data

    try:
        data: object = json.loads(
            text,
            parse_int=whole if long else None,
            parse_constant=float if constants else constant,
            object_pairs_hook=unique,
        )
    except json.JSONDecodeError as error:
        raise _explained(text, error) from error
    except RecursionError as error:
        raise NotJSONError("is nested too deeply") from error
    if found:
        raise NotJSONError(*found)
    return data


def _explained(text: str, error: json.JSONDecodeError) -> NotJSONError:
    """Return why a text is not JSON, by what it is instead if that is known."""
    what, hint = foreign(text[:_HEAD].encode(errors="replace"))
    if what:
        return NotJSONError(what, hint=hint)
    if mark := _CONFLICT.search(text):
        line = text.count("\n", 0, mark.start()) + 1
        message = f"has the conflict markers of a Git merge, from line {line}"
        return NotJSONError(message, hint="choose a side, as git checkout --ours and --theirs do")
    where = f"line {error.lineno}, column {error.colno}"
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
        return NotJSONError("ends before its JSON does", where=where, hint=_AGAIN)
    reason = error.msg.removesuffix(" starting at")
    return NotJSONError(f"is not JSON: {reason[:1].lower()}{reason[1:]}", where=where)


def render(data: object) -> str:
    """Format JSON data canonically, for review.

    An object or array is written on one line if it fits in 120 columns, otherwise on one line per member. The document
    itself and everything that contains a list of objects are always broken, so that another object adds lines to a diff
    without changing others. Invisible characters are escaped; all others are written unchanged.
    """
    return _block(data, "") + "\n"


def visible(text: str) -> str:
    """Escape invisible characters as in JSON."""
    return UNSEEN.sub(lambda c: json.dumps(c[0])[1:-1], text)


def shown(value: object) -> str:
    """Format a value for an error message, shortened."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    return _line(f"{value[:40]}…" if isinstance(value, str) and len(value) > len(value[:40]) else value)


def _line(data: object) -> str:
    """Format JSON data on one line."""
    return visible(json.dumps(data, ensure_ascii=False))


def _block(data: object, indent: str, lead: str = "") -> str:
    """Format JSON data after ``lead``, its key, at an indentation, broken as :func:`render` describes."""
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
    """Return whether ``data`` contains a list of objects at any depth."""
    if isinstance(data, dict):
        return any(map(_has_objects, data.values()))
    return isinstance(data, (list, tuple)) and any(isinstance(v, dict) or _has_objects(v) for v in data)
