"""Lines on a stream: in colour on a terminal, plain everywhere else."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, TextIO

from tpplan.files.jsontext import visible
from tpplan.render.text import PLAIN_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.render.text import Line

_STYLES = {
    "title": "bold",
    "head": "bold",
    "dim": "dim",
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "hint": "cyan",
    "weights": "bright_blue",
    "cache": "yellow",
    "workspace": "green",
    "overhead": "magenta",
    "reserved": "cyan",
    "draft": "bright_magenta",
    "free": "dim",
}

_ASCII = str.maketrans({
    "█": "#", "▓": "=", "▒": "+", "░": "-", "▚": "%", "·": ".", "…": "...", "→": "->", "–": "-", "×": "x",
})  # fmt: skip

_NARROWEST, _WIDEST = 60, 140


def write(lines: Iterable[Line], stream: TextIO, *, plain: bool = False) -> None:
    """Write lines with their styles if the stream is a terminal that shows them, else without.

    ``NO_COLOR`` and a dumb terminal mean plain, ``FORCE_COLOR`` means colour in a pipe too.
    """
    if not plain and _coloured(stream):
        # Texts come from files that anybody may have written.
        _write_styled((tuple((visible(text), style) for text, style in one) for one in lines), stream)
    else:
        stream.write(_encodable(plain_text(lines), stream))


def plain_text(lines: Iterable[Line]) -> str:
    """Return lines without their styles."""
    return "".join(visible("".join(text for text, _ in one)).rstrip() + "\n" for one in lines)


def columns_of(stream: TextIO, *, plain: bool = False) -> int:
    """Return how many columns to fill."""
    if plain or not stream.isatty():
        return PLAIN_COLUMNS
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((PLAIN_COLUMNS, 24)).columns))


def _coloured(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def _write_styled(lines: Iterable[Line], stream: TextIO) -> None:
    from rich.console import Console  # noqa: PLC0415 (20 ms that only a terminal pays)
    from rich.text import Text  # noqa: PLC0415

    console = Console(file=stream, highlight=False, soft_wrap=True, emoji=False, markup=False)
    for one in lines:
        spans = ((_encodable(text, stream), _STYLES.get(style, "")) for text, style in one)
        console.print(Text.assemble(*spans), soft_wrap=True)


def _encodable(text: str, stream: TextIO) -> str:
    """Return a text that the stream can write, with its nearest characters where it must be."""
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text
