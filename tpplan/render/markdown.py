"""Views as Markdown that GitHub renders: in comments, issues, and the summary of a workflow."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tpplan.files.jsontext import visible
from tpplan.render.blocks import Heading, Table, Text
from tpplan.render.text import width

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpplan.render.blocks import Block
    from tpplan.render.text import Line, Span

#: Styles of what stands out, and of a verdict, which stands out in sentences only; other colours have no counterpart.
_STRONG, _VERDICT = frozenset({"title", "head"}), "bad"
#: What would be markup; an underscore inside a word is none.
_MARKUP = re.compile(r"[\\`*\[\]<>&|~$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
#: Where GitHub would see a mention of somebody, an issue, or a link, if nothing stood between.
_LINKED = re.compile(r"(?<![0-9A-Za-z]@)(?<=@)(?=[0-9A-Za-z])|(?<=#)(?=[0-9])|(?<=:)(?=//)|(?i:(?<=www)(?=\.))")
_NOTHING = "<!-- -->"
#: What makes a list, a heading, a quotation or a rule of the line that it begins.
_START = re.compile(r"[0-9]{1,9}(?=[.)](\s|$))|(?=[-+#=])")


def markdown(blocks: Iterable[Block]) -> str:
    """Write blocks as CommonMark with the tables of GitHub."""
    text, was_item = "", False
    for block in blocks:
        if written := _written(block):
            is_item = written.startswith("- ")
            text += ("\n" if text and not (is_item and was_item) else "") + written
            was_item = is_item
    return text


def fenced(text: str) -> str:
    """Write a text as it is, in a block of code."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}{fence}\n"


def escaped(text: str) -> str:
    """Return a text so that nothing in it is markup, and that it calls nobody and leads nowhere."""
    return _LINKED.sub(_NOTHING, _MARKUP.sub(lambda match: f"\\{match[0]}", visible(text.strip(" "))))


def _written(block: Block) -> str:
    """Return the lines of a block; none for what only makes room on a screen."""
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Heading):
        return f"{'###' if block.is_title else '####'} {escaped(f'{block.text}{block.note}')}\n"
    spans: Line = (block.lead, (block.text, block.style)) if isinstance(block, Text) else block
    is_item = "".join(text for text, _ in spans).startswith(" ")
    text = _joined((text, "head" if style == _VERDICT else style) for text, style in spans)
    if match := _START.match(text):
        text = f"{match[0]}\\{text[match.end() :]}"
    return f"{'- ' * is_item}{text}\n" if text else ""


def _joined(spans: Iterable[Span]) -> str:
    """Return spans as one text, strong where they are."""
    parts: list[str] = []
    for text, style in spans:
        before, after = text[: len(text) - len(text.lstrip(" "))], text[len(text.rstrip(" ")) :]
        found = escaped(text)
        parts += [before, f"**{found}**" if found and style in _STRONG else found, after]
    return re.sub(" +", " ", "".join(parts)).strip(" ")


def _table(block: Table) -> str:
    sides, heads = block.sides, [escaped(text) for text, _ in block.heads]
    rows = [[_joined([cell]) for cell in row] for row in block.rows]
    if block.bars:
        sides, heads = f"{sides}>", [*heads, "full"]
        full = [each.full for each in block.bars]
        rows = [[*row, *full[i : i + 1]] for i, row in enumerate(rows)]
        rows = [row + [""] * (len(heads) - len(row)) for row in rows]
    if block.hidden:
        rows.insert(block.gap, ["", escaped(block.hidden_text), *[""] * (len(heads) - 2)])
    widths = [max(3, *map(width, column)) for column in zip(heads, *rows, strict=True)]
    rule = ["-" * (n - 1) + ":" if side == ">" else "-" * n for n, side in zip(widths, sides, strict=True)]
    return "".join(_row(cells, widths, sides) for cells in (heads, rule, *rows))


def _row(cells: Sequence[str], widths: Sequence[int], sides: str) -> str:
    padded = (
        " " * (n - width(cell)) + cell if side == ">" else cell + " " * (n - width(cell))
        for cell, n, side in zip(cells, widths, sides, strict=True)
    )
    return f"| {' | '.join(padded)} |\n"
