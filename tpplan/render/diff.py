"""What changes from one plan to another, on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.core.sizes import format_bytes
from tpplan.render.text import (
    BLANK,
    PLAIN_COLUMNS,
    amount,
    elided,
    fitting,
    line,
    line_width,
    scale_for,
    shorten,
    shorten_name,
    table,
    wrapped,
)

if TYPE_CHECKING:
    from tpplan.render.text import Line, Span

_MOST_ROWS = 32
_LONGEST_NAME = 16
_LONGEST_CELL = 20
_LONGEST_VALUE = 18
_MARKS = {"added": ("+", "gain"), "removed": ("-", "loss"), "moved": ("~", "warn"), "changed": ("~", "warn")}


def diff(changes: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.reports.diff.PlanDiff`."""
    sections = (
        _inputs(changes), _devices(changes), _splits(changes, columns), _memory(changes), _speed(changes)
    )  # fmt: skip
    lines: list[Line] = []
    for section in sections:
        lines += [*section, BLANK] if section else []
    style = "warn" if changes["reasons"] else "good"
    return [*lines, *(line(text, style) for text in wrapped(changes["summary"], columns))]


def _inputs(changes: dict[str, Any]) -> list[Line]:
    """Say which values of the model and the request differ, and what was chosen by them."""
    lines: list[Line] = []
    for title, fields in (("Inputs", changes["fields"]), ("Chosen by auto", changes.get("chosen", ()))):
        rows = [[("~", "warn"), (field["path"], ""), *_values(field)] for field in fields]
        lines += [line(title, "head"), *table(rows, "<<<<<")] if rows else []
    return lines


def _devices(changes: dict[str, Any]) -> list[Line]:
    """Say what happened to which device."""
    found = changes["devices"]
    if not found:
        return []
    first, last = elided(len(found), _MOST_ROWS)
    shown = [_device_rows(found[i]) for i in (*first, *last)]
    lines = table([row for rows in shown for row in rows], "<><<<<<")
    if last:
        at = sum(len(rows) for rows in shown[: len(first)])
        lines.insert(at, line(f"   … {len(found) - len(first) - len(last)} more devices, see --json …", "dim"))
    return [line("Devices", "head"), *lines]


def _device_rows(change: dict[str, Any]) -> list[list[Span]]:
    """Return a row per value of a device that differs, or one that says what happened to the device."""
    mark, style = _MARKS[change["change"]]
    index, name = _label(change["device"])
    head, blank = [(mark, style), (index, "dim"), (name, "")], [("", "")] * 3
    rows = [[(field["path"], ""), *_values(field)] for field in change["fields"]]
    rows = rows or [[(change["change"], style), *blank]]
    return [[*(blank if i else head), *row] for i, row in enumerate(rows)]


def _splits(changes: dict[str, Any], columns: int) -> list[Line]:
    """Return a row per device: what it holds of every axis before and after."""
    splits = changes["splits"]
    if not splits:
        return []
    pairs = {(s["device"].get("before", -1), s["device"].get("after", -1)): s["device"]
             for split in splits for s in split["shares"]}  # fmt: skip
    keys = sorted(pairs, key=lambda key: (key[1] < 0, key[1], key[0]))
    first, last = elided(len(keys), _MOST_ROWS)
    shown = [keys[i] for i in (*first, *last)]
    names: list[list[Span]] = [[("", ""), ("", "")], [("", ""), ("layers", "dim")]]
    names += [_name_cells(pairs[key]) for key in shown]
    room = columns - max(map(line_width, table(names, "><")))
    lines: list[Line] = [(("Splits", "head"), (", elements that a device holds", "dim"))]
    for part in fitting([_column(split, shown) for split in splits], room):
        rows = [[*start, *cells] for start, cells in zip(names, zip(*part, strict=True), strict=True)]
        block = table(rows, "><" + ">" * len(part))
        if last:
            block.insert(2 + len(first), line(f"   … {len(keys) - len(shown)} more devices, see --json …", "dim"))
        lines += [*([BLANK] if len(lines) > 1 else []), *block]
    return lines + [_field_line(split, field) for split in splits for field in split["fields"]]


def _column(split: dict[str, Any], shown: list[tuple[int, int]]) -> list[Span]:
    shares = {(s["device"].get("before", -1), s["device"].get("after", -1)): s for s in split["shares"]}
    column = [(split["axis"], "head"), (shorten(split.get("layers", ""), _LONGEST_CELL), "dim")]
    for key in shown:
        share = shares.get(key)
        if not share:
            column.append(("-", "dim"))
        elif share["delta_elements"]:
            style = "gain" if share["delta_elements"] > 0 else "loss"
            column.append((f"{share['before_elements']} → {share['after_elements']}", style))
        else:
            column.append((str(share["after_elements"]), "dim"))
    return column


def _field_line(split: dict[str, Any], field: dict[str, Any]) -> Line:
    where = f"{split['axis']} {split.get('layers', '')}".rstrip()
    return (("~  ", "warn"), (f"{where}: {field['path']} {field['before']} → {field['after']}", ""))


def _memory(changes: dict[str, Any]) -> list[Line]:
    """Return a row per device: what each bucket gains or loses, and how much more or less a token reads, if it does."""
    found = changes["memory"]
    if not found:
        return []
    deltas = [[bucket["delta_bytes"] for bucket in one["buckets"]] for one in found]
    total = [bucket["delta_bytes"] for bucket in changes["total"]]
    titles = [bucket["bucket"] for bucket in changes["total"]]
    if any(one["delta_reads_bytes"] for one in found):
        titles.append("reads")
        deltas = [[*row, one["delta_reads_bytes"]] for row, one in zip(deltas, found, strict=True)]
        total.append(sum(one["delta_reads_bytes"] for one in found))
    unit, scale = scale_for(max(abs(delta) for row in (*deltas, total) for delta in row))
    first, last = elided(len(found), _MOST_ROWS)
    rows: list[list[Span]] = [[("", ""), ("", ""), *((title, "dim") for title in titles)]]
    rows += [[*_name_cells(found[i]["device"]), *_deltas(deltas[i], scale)] for i in (*first, *last)]
    rows.append([("", ""), ("together", "dim"), *_deltas(total, scale)])
    lines = table(rows, "><" + ">" * len(titles))
    if last:
        hidden = len(found) - len(first) - len(last)
        lines.insert(1 + len(first), line(f"   … {hidden} more devices, see --json …", "dim"))
    return [(("Memory", "head"), (f", {unit} more or less", "dim")), *lines]


def _speed(changes: dict[str, Any]) -> list[Line]:
    """Return a row per pass: the tokens a second that each plan predicts."""
    rows: list[list[Span]] = []
    for one in changes.get("speed", ()):
        what = f"a prompt of {one['rows']} tokens" if one["prefill"] else f"batch {one['rows']}"
        before, after = one["before_tokens_per_second"], one["after_tokens_per_second"]
        style = "dim" if not before or not after or before == after else "good" if after > before else "loss"
        part = f"{100 * (after - before) / before:+.0f} %" if before and after else ""
        cells = [f"{rate:,}" if rate else "unknown" for rate in (before, after)]
        rows.append([(what, ""), (cells[0], "dim"), ("→", "dim"), (cells[1], style), (part, style)])
    title: Line = (("Speed", "head"), (", tokens/s with a full cache, estimated for tpplan's decoder", "dim"))
    return [title, *table(rows, "<><>>")] if rows else []


def _deltas(sizes: list[int], scale: int) -> list[Span]:
    return [(amount(n, scale, sign=True), "dim" if not n else "gain" if n > 0 else "loss") for n in sizes]


def _label(device: dict[str, Any]) -> tuple[str, str]:
    """Return a device's index, or both if they differ, and its name."""
    places = list(dict.fromkeys(str(device[key]) for key in ("before", "after") if key in device))
    return "→".join(places), shorten_name(device["name"], _LONGEST_NAME)


def _name_cells(device: dict[str, Any]) -> list[Span]:
    index, name = _label(device)
    mark = "" if "before" in device and "after" in device else " (new)" if "after" in device else " (gone)"
    return [(index, "dim"), (name + mark, "")]


def _values(field: dict[str, Any]) -> list[Span]:
    return [(_shown(field, "before"), "loss"), ("→", "dim"), (_shown(field, "after"), "gain")]


def _shown(field: dict[str, Any], key: str) -> str:
    value = field[key]
    if isinstance(value, int) and field["path"].endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, int) and field["path"] == "bandwidth_bytes_per_second":
        return f"{value / 10**9:.0f} GB/s"
    return shorten(str(value), _LONGEST_VALUE) or "none"
