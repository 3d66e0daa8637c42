"""Styled lines, tables and bars: what the views are made of, whether or not anybody sees the styles."""

from __future__ import annotations

import re
from itertools import accumulate, combinations
from typing import TYPE_CHECKING
from unicodedata import combining, east_asian_width

from tpplan.core.axes import parse_layers
from tpplan.core.sizes import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: Text and the name of its style; a style is never the only thing that says something.
Span = tuple[str, str]
Line = tuple[Span, ...]

#: Columns off a terminal: they fit in a pull request.
PLAIN_COLUMNS = 100
BLANK: Line = ()

#: Of the buckets, those that are left to others, which few plans have.
_LEFT = ("reserved", "draft")
_GLYPHS = dict(zip(("weights", "cache", "workspace", "overhead", *_LEFT, "free"), "█▓▒░:▚·", strict=True))
_SCALES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_GAP = 2
_MOST_WORDS = 12
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")
#: As much of a fingerprint as mostly tells models apart, with the name of its hash.
_ENOUGH = 19


def line(text: str, style: str = "") -> Line:
    """Return a line in one style."""
    return ((text, style),)


def width(text: str) -> int:
    """Return the columns that a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in {"W", "F"} else 1 for c in text)


def line_width(spans: Line) -> int:
    """Return the columns that a line takes."""
    return sum(width(text) for text, _ in spans)


def shorten(text: str, columns: int) -> str:
    """Cut out the middle of a text that takes more than ``columns``."""
    if width(text) <= columns:
        return text
    head, tail = text, ""
    while width(head) + width(tail) + 1 > columns:
        # Both halves shrink by turns; the end of a name often tells more than its middle.
        if not tail:
            half = len(head) // 2
            head, tail = head[:half], head[half:]
        elif width(head) > width(tail):
            head = head[:-1]
        else:
            tail = tail[1:]
    return f"{head}…{tail}"


def shorten_name(name: str, columns: int) -> str:
    """Cut whole words out of a long name, and rather those without digits: they tell GPUs apart less.

    A name of very many words, and one of which hardly anything would be left, is cut as any text.
    """
    words = name.split(" ")
    if width(name) <= columns or len(words) > _MOST_WORDS:
        return shorten(name, columns)
    places = range(len(words) + 1)
    cuts = [f"{' '.join(words[:i])}…{' '.join(words[j:])}" for i, j in combinations(places, 2)]
    fitting = [cut for cut in cuts if columns // 2 < width(cut) <= columns]
    return max(fitting, key=lambda cut: (sum(map(str.isdigit, cut)), width(cut)), default=shorten(name, columns))


def shorten_layers(layers: str, columns: int) -> str:
    """Leave out ranges of layers that take more than ``columns``, but the first ones and the last: ``0-4,6,…,30``.

    Where not even these fit, it is said how many layers there are.
    """
    if len(layers) <= columns:
        return layers
    *first, last = layers.split(",")
    while first:
        first.pop()
        if len(text := ",".join([*first, "…", last])) <= columns and first:
            return text
    return counted(len(parse_layers(layers)), "layer")


def abridged(text: str) -> str:
    """Shorten the fingerprints in a text, which are whole in documents only, but not so far that two become equal."""
    different = set(_FINGERPRINT.findall(text))
    if len({each[:_ENOUGH] for each in different}) == len(different):
        return _FINGERPRINT.sub(lambda match: f"{match[0][:_ENOUGH]}…", text)
    return text


def sentence(text: str) -> str:
    """Return a text as a sentence of its own: with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def wrapped(text: str, columns: int) -> list[str]:
    """Break a text between words into lines of at most ``columns``, if its words are no longer."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and width(lines[-1]) + 1 + width(word) <= columns:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def table(rows: Sequence[Sequence[Span]], sides: str) -> list[Line]:
    """Align rows of cells to columns.

    Args:
        rows: of equal length.
        sides: for each column ``<`` or ``>``.
    """
    widths = [max(width(text) for text, _ in column) for column in zip(*rows, strict=True)]
    return [_row(row, widths, sides) for row in rows]


def _row(row: Sequence[Span], widths: Sequence[int], sides: str) -> Line:
    spans: list[Span] = []
    for i, ((text, style), columns, side) in enumerate(zip(row, widths, sides, strict=True)):
        pad = " " * (columns - width(text))
        before, after = (" " * _GAP * (i > 0) + (pad if side == ">" else "")), (pad if side == "<" else "")
        spans += [(before, ""), (text, style), (after, "")]
    while spans and not spans[-1][0].strip():
        spans.pop()
    return tuple(span for span in spans if span[0])


def fitting(found: Sequence[list[Span]], room: int) -> list[list[list[Span]]]:
    """Deal columns out to as many tables as are needed."""
    parts: list[list[list[Span]]] = []
    left = 0
    for column in found:
        needs = max(width(text) for text, _ in column) + _GAP
        if not parts or needs > left:
            parts.append([])
            left = room
        parts[-1].append(column)
        left -= needs
    return parts


def buckets_of(memory: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Return for each bucket of a ledger the bytes on every device; what is left to others only where something is."""
    found = {bucket: [entry.get(f"{bucket}_bytes", 0) for entry in memory] for bucket in _GLYPHS}
    return {bucket: sizes for bucket, sizes in found.items() if bucket not in _LEFT or any(sizes)}


def bar(amounts: Mapping[str, int], whole: int, columns: int) -> list[Span]:
    """Draw the buckets of a device, ``free`` last, each with its own glyph and style."""
    ends = [round(end * columns / whole) for end in accumulate(amounts.values())]
    cells = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return [(_GLYPHS[bucket] * count, bucket) for bucket, count in zip(amounts, cells, strict=True) if count > 0]


def legend(buckets: Iterable[str]) -> list[Span]:
    """Say which glyph stands for which bucket."""
    return [span for b in buckets for span in ((_GLYPHS[b], b), (f" {b}  ", "dim"))]


def scale_for(largest: int) -> tuple[str, int]:
    """Return the unit in which to write numbers of which ``largest`` is the largest, and its bytes."""
    return next((unit, scale) for unit, scale in _SCALES[1:] if largest >= scale or scale == 1)


def amount(size: int, scale: int, *, sign: bool = False) -> str:
    """Write bytes in a unit with two decimals: nothing is ``0``, next to nothing is ``<0.01``."""
    if not size:
        return "0"
    text = f"{abs(size) / scale:.2f}" if scale > 1 else str(abs(size))
    text = "<0.01" if float(text) == 0 else text
    return ("-" if size < 0 else "+" if sign else "") + text


#: All millionths.
_WHOLE = 10**6


def percent(ppm: int) -> str:
    """Write millionths as a percentage; only all of them are 100 %."""
    return f"{ppm / 10_000 if ppm >= _WHOLE else min(ppm, _WHOLE - 501) / 10_000:.1f} %"


def elided(count: int, most: int) -> tuple[range, range]:
    """Return which of ``count`` things to show, at most ``most``: the first ones, and the last few."""
    if count <= most:
        return range(count), range(0)
    last = most // 4
    return range(most - last), range(count - last, count)
