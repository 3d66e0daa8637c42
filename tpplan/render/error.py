"""An error, and for a plan that does not fit a table of what is missing and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.render.text import (
    PLAIN_COLUMNS,
    abridged,
    amount,
    elided,
    line,
    line_width,
    scale_for,
    shorten_name,
    table,
    width,
)

if TYPE_CHECKING:
    from tpplan.render.text import Line, Span

_NEEDS = ("weights", "cache", "workspace", "overhead")
_LONGEST_NAME = 22
_MOST_DEVICES = 16


def error(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out an :class:`~tpplan.reports.error.ErrorReport`."""
    body = report["error"]
    first, *more = abridged(body["message"]).split("\n")
    lines: list[Line] = [(("error", "bad"), (f": {first}", "")), *map(line, more)]
    if "shortfalls" in body:
        lines += _shortfalls(body["shortfalls"], columns)
    options = [advice for advice in body.get("suggestions", ()) if "option" in advice]
    if options:
        others = [advice["message"] for advice in body["suggestions"] if "option" not in advice]
        which = "each of these alone makes" if len(body["suggestions"]) > 1 else "this makes"
        lines.append((("hint", "hint"), (f": {which} it fit", "")))
        lines += _options(options, columns)
        lines += [line(f"  {message}") for message in others]
    elif "hint" in body:
        lines.append((("hint", "hint"), (f": {body['hint']}", "")))
    return lines


def _options(found: list[dict[str, Any]], columns: int) -> list[Line]:
    """Return a row per option and what it does; where that is too wide, a long list of GPUs has a row of its own."""
    rows: list[list[Span]] = [[("  " + advice["option"], "head"), (advice["message"], "dim")] for advice in found]
    lines = table(rows, "<<")
    if max(map(line_width, lines)) <= columns:
        return lines
    short = [row for row in rows if width(row[0][0]) <= columns // 3]
    first = max((width(option) for (option, _), _ in short), default=0) + 2
    short = [row for row in short if first + width(row[1][0]) <= columns]
    lines = table(short, "<<") if short else []
    for option, (message, style) in (row for row in rows if row not in short):
        lines += [(option,), ((f"      {message}", style),)]
    return lines


def _shortfalls(found: list[dict[str, Any]], columns: int) -> list[Line]:
    """Return a row per device: what it needs by bucket, its budget, and what is missing, by bucket if that has room."""
    unit, scale = scale_for(max(s["budget_bytes"] for s in found))
    first, last = elided(len(found), _MOST_DEVICES)
    shown = [found[i] for i in (*first, *last)]
    lines = _needs(shown, scale, by_bucket=True)
    by_bucket = max(map(line_width, lines)) <= columns
    if not by_bucket:
        lines = _needs(shown, scale, by_bucket=False)
    if last:
        lines.insert(1 + len(first), line(f"  … {len(found) - len(shown)} more devices …", "dim"))
    what = " (and what of it is missing)" if by_bucket else ""
    return [((("  Needs", "head")), (f", {unit}{what}", "dim")), *lines]


def _needs(shown: list[dict[str, Any]], scale: int, *, by_bucket: bool) -> list[Line]:
    left = [bucket for bucket in ("reserved", "draft") if any(f"{bucket}_bytes" in s for s in shown)]
    titles = (*_NEEDS, *left, "budget", "missing")
    rows: list[list[Span]] = [[("", ""), ("", ""), *((title, "dim") for title in titles)]]
    for s in shown:
        cells = [_cell(s, bucket, scale, by_bucket=by_bucket) for bucket in _NEEDS]
        cells += [(amount(s.get(f"{bucket}_bytes", 0), scale), "") for bucket in left]
        missing = (amount(s["missing_bytes"], scale), "bad" if s["missing_bytes"] else "dim")
        name = (shorten_name(s["name"], _LONGEST_NAME), "")
        rows.append([(f"  {s['device']}", "dim"), name, *cells, (amount(s["budget_bytes"], scale), ""), missing])
    return table(rows, "><" + ">" * len(titles))


def _cell(shortfall: dict[str, Any], bucket: str, scale: int, *, by_bucket: bool) -> Span:
    """Return what a bucket needs, and how much of it is missing."""
    needs, missing = shortfall[f"{bucket}_bytes"], shortfall[f"missing_{bucket}_bytes"]
    text = amount(needs, scale)
    if not missing:
        return (text, "")
    return (f"{text} (-{amount(missing, scale)})" if by_bucket else text, "bad")
