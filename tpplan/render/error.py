"""An error, and for a plan that does not fit a table of what is missing and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.render.text import amount, elided, line, scale_for, shorten_name, table

if TYPE_CHECKING:
    from tpplan.render.text import Line, Span

_NEEDS = ("weights", "cache", "workspace", "overhead")
_LONGEST_NAME = 22
_MOST_DEVICES = 16


def error(report: dict[str, Any]) -> list[Line]:
    """Lay out an :class:`~tpplan.error_report.ErrorReport`."""
    body = report["error"]
    first, *more = body["message"].split("\n")
    lines: list[Line] = [(("error", "bad"), (f": {first}", "")), *map(line, more)]
    if "shortfalls" in body:
        lines += _shortfalls(body["shortfalls"])
    options = [advice for advice in body.get("suggestions", ()) if "option" in advice]
    if options:
        others = [advice["message"] for advice in body["suggestions"] if "option" not in advice]
        which = "each of these alone makes" if len(body["suggestions"]) > 1 else "this makes"
        lines.append((("hint", "hint"), (f": {which} it fit", "")))
        lines += table([[("  " + a["option"], "head"), (a["message"], "dim")] for a in options], "<<")
        lines += [line(f"  {message}") for message in others]
    elif "hint" in body:
        lines.append((("hint", "hint"), (f": {body['hint']}", "")))
    return lines


def _shortfalls(found: list[dict[str, Any]]) -> list[Line]:
    """Return a row per device: what it needs by bucket, its budget, and what is missing, of that the cache's part."""
    unit, scale = scale_for(max(s["budget_bytes"] for s in found))
    titles = (*_NEEDS, "budget", "missing")
    rows: list[list[Span]] = [[("", ""), ("", ""), *((title, "dim") for title in titles)]]
    first, last = elided(len(found), _MOST_DEVICES)
    for s in (found[i] for i in (*first, *last)):
        cells = [_cell(s, bucket, scale) for bucket in _NEEDS]
        missing = (amount(s["missing_bytes"], scale), "bad" if s["missing_bytes"] else "dim")
        name = (shorten_name(s["name"], _LONGEST_NAME), "")
        rows.append([(f"  {s['device']}", "dim"), name, *cells, (amount(s["budget_bytes"], scale), ""), missing])
    lines = table(rows, "><>>>>>>")
    if last:
        lines.insert(1 + len(first), line(f"  … {len(found) - len(first) - len(last)} more devices …", "dim"))
    return [((("  Needs", "head")), (f", {unit} (and what of it is missing)", "dim")), *lines]


def _cell(shortfall: dict[str, Any], bucket: str, scale: int) -> Span:
    """Return what a bucket needs, and how much of it is missing."""
    needs, missing = shortfall[f"{bucket}_bytes"], shortfall[f"missing_{bucket}_bytes"]
    text = amount(needs, scale)
    return (f"{text} (-{amount(missing, scale)})", "bad") if missing else (text, "")
