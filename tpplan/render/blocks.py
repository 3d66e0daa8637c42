"""What a view consists of, before it is known whether it becomes a screen or Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from tpplan.render.text import BLANK, bar, fitting, legend, line, line_width, table, width, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence  # noqa: TC004 (of types, which nothing resolves)

    from tpplan.render.text import Line, Span  # noqa: TC004

#: The lead of a text that belongs to what stands above it.
INDENT = ("  ", "")

_GAP = 2
_PERCENT = len(" 100.0 %")
#: Columns for a bar with its gap and percentage beside the numbers; where there are fewer, bars get lines of their own.
_LEAST_BAR = 8 + _GAP + _PERCENT


@frozen
class Heading:
    """The heading of a part.

    Attributes:
        text: the heading.
        note: what follows it in smaller print, such as ``, GiB``.
        is_title: whether it is that of the whole view.
    """

    text: str
    note: str = ""
    is_title: bool = False


@frozen
class Text:
    """A paragraph, which is wrapped on a screen; one that is indented is an item of a list in Markdown.

    Attributes:
        text: the paragraph.
        style: its style.
        lead: what stands in front of it, with its style; further lines begin below its end.
    """

    text: str
    style: str = ""
    lead: Span = ("", "")


@frozen
class Bar:
    """A device's memory, drawn on screens only.

    Attributes:
        amounts: bytes by bucket.
        whole: bytes of the whole bar.
        full: how full it is, in words.
    """

    amounts: Mapping[str, int]
    whole: int
    full: str


@frozen(kw_only=True)
class Table:
    """Rows of cells under headings.

    On a screen that is too narrow for all columns, the others are dealt out to several tables with the same first ones.

    Attributes:
        heads: a heading for each column.
        sides: for each column ``<`` or ``>``, where its cells are aligned.
        rows: cells, as many as there are headings.
        first: columns that name what a row is about.
        unnamed: columns, from the left, whose headings a screen leaves out because they need none there.
        bars: a bar for each of the first rows, or none at all.
        gap: the row in front of which rows are left out.
        hidden: how many devices these are.
    """

    heads: Sequence[Span]
    sides: str
    rows: Sequence[Sequence[Span]]
    first: int = 2
    unnamed: int = 2
    bars: Sequence[Bar] = ()
    gap: int = 0
    hidden: int = 0

    @property
    def hidden_text(self) -> str:
        """Say which rows are left out."""
        return f"… {self.hidden} more devices, see --json …"


#: A line is written as it is; an indented one is an item of a list in Markdown.
Block: TypeAlias = "Line | Heading | Text | Table"


def lines_of(blocks: Iterable[Block], columns: int) -> list[Line]:
    """Lay out blocks on a screen.

    Args:
        blocks: the view.
        columns: the width of the screen.
    """
    return [one for block in blocks for one in _laid_out(block, columns)]


def _laid_out(block: Block, columns: int) -> list[Line]:
    if isinstance(block, Heading):
        styles = ("title", "") if block.is_title else ("head", "dim")
        return [((block.text, styles[0]), *([(block.note, styles[1])] if block.note else []))]
    if isinstance(block, Text):
        lead, lead_style = block.lead
        first, *more = wrapped(block.text, columns - width(lead))
        top: list[Span] = [(lead, lead_style)] if lead else []
        return [(*top, (first, block.style)), *(line(" " * width(lead) + part, block.style) for part in more)]
    return _table(block, columns) if isinstance(block, Table) else [block]


def _table(block: Table, columns: int) -> list[Line]:
    heads = [("", "") if i < block.unnamed else head for i, head in enumerate(block.heads)]
    rows = [*([heads] if any(text for text, _ in heads) else []), *block.rows]
    names, sides = [row[: block.first] for row in rows], block.sides
    others = [list(column) for column in zip(*(row[block.first :] for row in rows), strict=True)]
    room = columns - max(map(line_width, table(names, sides[: block.first])))
    parts, start = ([] if others else [table(names, sides)]), block.first
    for dealt in fitting(others, room):
        cells = [[*name, *more] for name, more in zip(names, zip(*dealt, strict=True), strict=True)]
        parts.append(table(cells, sides[: block.first] + sides[start : start + len(dealt)]))
        start += len(dealt)
    top = len(rows) - len(block.rows)
    if block.bars:
        return _with_bars(block, parts, top, columns)
    return _apart([_with_gap(block, lines, top) for lines in parts])


def _with_bars(block: Table, parts: list[list[Line]], top: int, columns: int) -> list[Line]:
    """Draw bars beside the numbers if there is room, else below them."""
    names: Line = (("    ", ""), *legend(block.bars[0].amounts))
    end = top + len(block.bars)
    if len(parts) == 1 and columns - max(map(line_width, parts[0])) >= _LEAST_BAR:
        (lines,) = parts
        lines = [*lines[:top], *_barred(lines[top:end], block.bars, columns), *lines[end:]]
        return [*_with_gap(block, lines, top), names]
    bare = table([row[: block.first] for row in block.rows[: len(block.bars)]], block.sides[: block.first])
    parts = [_with_gap(block, lines, top) for lines in parts]
    return [*_apart([*parts, _with_gap(block, _barred(bare, block.bars, columns), 0)]), names]


def _barred(lines: Sequence[Line], bars: Sequence[Bar], columns: int) -> list[Line]:
    """Put a bar, and how full it is, behind each line."""
    start = max(map(line_width, lines)) + _GAP
    barred: list[Line] = []
    for one, each in zip(lines, bars, strict=True):
        cells = bar(each.amounts, each.whole, columns - start - _PERCENT)
        barred.append((*one, (" " * (start - line_width(one)), ""), *cells, (f"{each.full:>{_PERCENT}}", "")))
    return barred


def _with_gap(block: Table, lines: list[Line], top: int) -> list[Line]:
    """Say in the place of rows that they are left out; ``top`` is how many lines are headings."""
    if not block.hidden:
        return lines
    at = top + block.gap
    return [*lines[:at], line(f"   {block.hidden_text}", "dim"), *lines[at:]]


def _apart(parts: Sequence[list[Line]]) -> list[Line]:
    """Put a blank line between several tables."""
    first, *more = parts
    return first + [one for part in more for one in (BLANK, *part)]
