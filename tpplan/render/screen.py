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
    "free": "dim",
    "gain": "green",
    "loss": "red",
}

_ASCII = str.maketrans({
    "█": "#", "▓": "=", "▒": "+", "░": "-", "·": ".", "…": "...", "→": "->", "–": "-", "×": "x",
})  # fmt: skip

_NARROWEST, _WIDEST = 60, 140


def write(lines: Iterable[Line], stream: TextIO, *, plain: bool = False) -> None:
    """Write lines with their styles if the stream is a terminal that shows them, else without.

    ``NO_COLOR`` and a dumb terminal mean plain, ``FORCE_COLOR`` means colour in a pipe too.
    """
    # Texts come from files that anybody may have written.
    clean = [tuple((visible(text), style) for text, style in one) for one in lines]
    if not plain and _coloured(stream):
        _write_styled(clean, stream)
        return
    text = "".join("".join(part for part, _ in one).rstrip() + "\n" for one in clean)
    stream.write(_encodable(text, stream))


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
