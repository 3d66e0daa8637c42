"""What changes from one plan to another, on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.core.sizes import counted, format_bytes
from tpplan.render.blocks import Heading, Table, Text
from tpplan.render.text import BLANK, amount, elided, scale_for, shorten, shorten_layers, shorten_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.render.blocks import Block
    from tpplan.render.text import Span

_MOST_ROWS = 32
_LONGEST_NAME = 16
_LONGEST_CELL = 20
_LONGEST_VALUE = 18
#: Values that are no words but sentences.
_SENTENCES = frozenset({"request.reserve", "request.draft.room_bytes"})
#: What follows from what was asked, and nobody asks for.
_FORMAT = "format_version"
_MARKS = {"added": "+", "removed": "-", "moved": "~", "changed": "~"}
_DEVICE = [("device", ""), ("name", "")]
_VALUES = [("what", ""), ("before", ""), ("", ""), ("after", "")]
#: Values of which more is better (1) or worse (-1); any other change is neither.
_WANTED = {
    "request.context": 1,
    "request.cache.tokens": 1,
    "budget_bytes": 1,
    "bandwidth_bytes_per_second": 1,
    "overhead_bytes": -1,
}


def diff(changes: dict[str, Any]) -> list[Block]:
    """Return the view of a :class:`~tpplan.reports.diff.PlanDiff`; colours say what is better or worse than before."""
    blocks: list[Block] = []
    for section in (_inputs(changes), _devices(changes), _splits(changes), _memory(changes), _speed(changes)):
        blocks += [*section, BLANK] if section else []
    return [*blocks, Text(changes["summary"], "" if changes["reasons"] else "good")]


def _inputs(changes: dict[str, Any]) -> list[Block]:
    """Say which values of the model and the request differ, what was chosen by them, and the format that has it all."""
    blocks: list[Block] = []
    asked = [field for field in changes["fields"] if field["path"] != _FORMAT]
    file = [field for field in changes["fields"] if field["path"] == _FORMAT]
    for title, fields in (("Inputs", asked), ("Chosen by auto", changes.get("chosen", ())), ("File", file)):
        rows = [[("~", "dim"), *_values(field)] for field in fields if field["path"] not in _SENTENCES]
        told = [field for field in fields if field["path"] in _SENTENCES]
        blocks += [Heading(title)] if fields else []
        blocks += [_named([("", ""), *_VALUES], "<<<<<", rows)] if rows else []
        blocks += [Text(f"{one['path']}: {one['before']} → {one['after']}", lead=("~  ", "dim")) for one in told]
    return blocks


def _named(heads: list[Span], sides: str, rows: list[list[Span]], gap: int = 0, hidden: int = 0) -> Table:
    """Return a table whose columns need no headings on a screen."""
    return Table(heads=heads, sides=sides, rows=rows, first=len(heads), unnamed=len(heads), gap=gap, hidden=hidden)


def _devices(changes: dict[str, Any]) -> list[Block]:
    """Say what happened to which device."""
    found = changes["devices"]
    if not found:
        return []
    first, last = elided(len(found), _MOST_ROWS)
    shown = [_device_rows(found[i]) for i in (*first, *last)]
    rows = [row for rows in shown for row in rows]
    gap = sum(len(rows) for rows in shown[: len(first)])
    return [
        Heading("Devices"),
        _named([("", ""), *_DEVICE, *_VALUES], "<><<<<<", rows, gap, len(found) - len(shown)),
    ]


def _device_rows(change: dict[str, Any]) -> list[list[Span]]:
    """Return a row per value of a device that differs, or one that says what happened to the device."""
    index, name = _label(change["device"])
    head, blank = [(_MARKS[change["change"]], "dim"), (index, "dim"), (name, "")], [("", "")] * 3
    rows = [_values(field) for field in change["fields"]] or [[(change["change"], ""), *blank]]
    return [[*(blank if i else head), *row] for i, row in enumerate(rows)]


def _splits(changes: dict[str, Any]) -> list[Block]:
    """Return a row per device: what it holds of every axis before and after."""
    splits = changes["splits"]
    if not splits:
        return []
    pairs = {(s["device"].get("before", -1), s["device"].get("after", -1)): s["device"]
             for split in splits for s in split["shares"]}  # fmt: skip
    keys = sorted(pairs, key=lambda key: (key[1] < 0, key[1], key[0]))
    first, last = elided(len(keys), _MOST_ROWS)
    shown = [keys[i] for i in (*first, *last)]
    names = [[("", ""), ("layers", "dim")], *(_name_cells(pairs[key]) for key in shown)]
    columns = [_column(split, shown) for split in splits]
    return [
        Heading("Splits", ", elements that a device holds"),
        Table(
            heads=[*_DEVICE, *((split["axis"], "head") for split in splits)],
            sides="><" + ">" * len(splits),
            rows=[[*name, *cells] for name, cells in zip(names, zip(*columns, strict=True), strict=True)],
            gap=1 + len(first),
            hidden=len(keys) - len(shown),
        ),
        *(_field_text(split, field) for split in splits for field in split["fields"]),
    ]


def _column(split: dict[str, Any], shown: list[tuple[int, int]]) -> list[Span]:
    shares = {(s["device"].get("before", -1), s["device"].get("after", -1)): s for s in split["shares"]}
    column = [(shorten_layers(split.get("layers", ""), _LONGEST_CELL), "dim")]
    for key in shown:
        share = shares.get(key)
        if not share:
            column.append(("-", "dim"))
        elif share["delta_elements"]:
            column.append((f"{share['before_elements']} → {share['after_elements']}", ""))
        else:
            column.append((str(share["after_elements"]), "dim"))
    return column


def _field_text(split: dict[str, Any], field: dict[str, Any]) -> Text:
    where = f"{split['axis']} {split.get('layers', '')}".rstrip()
    return Text(f"{where}: {field['path']} {field['before']} → {field['after']}", lead=("~  ", "dim"))


def _memory(changes: dict[str, Any]) -> list[Block]:
    """Return a row per device: what each bucket gains or loses, and how much more or less a token reads, if it does."""
    found = changes["memory"]
    if not found:
        return []
    deltas = [[bucket["delta_bytes"] for bucket in one["buckets"]] for one in found]
    total = [bucket["delta_bytes"] for bucket in changes["total"]]
    titles = [bucket["bucket"] for bucket in changes["total"]]
    if any(one.get("delta_reads_bytes") for one in found):
        titles.append("reads")
        deltas = [[*row, one["delta_reads_bytes"]] for row, one in zip(deltas, found, strict=True)]
        total.append(sum(one["delta_reads_bytes"] for one in found))
    unit, scale = scale_for(max(abs(delta) for row in (*deltas, total) for delta in row))
    first, last = elided(len(found), _MOST_ROWS)
    rows: list[list[Span]] = [
        [*_name_cells(found[i]["device"]), *_deltas(titles, deltas[i], scale)] for i in (*first, *last)
    ]
    return [
        Heading("Memory", f", {unit} more or less"),
        Table(
            heads=[*_DEVICE, *((title, "dim") for title in titles)],
            sides="><" + ">" * len(titles),
            rows=[*rows, [("", ""), ("together", "dim"), *_deltas(titles, total, scale)]],
            gap=len(first),
            hidden=len(found) - len(rows),
        ),
    ]


def _speed(changes: dict[str, Any]) -> list[Block]:
    """Return a row per pass: the tokens a second that each plan predicts."""
    rows: list[list[Span]] = []
    for one in changes.get("speed", ()):
        before, after = one.get("before_tokens_per_second"), one.get("after_tokens_per_second")
        style = _judged(after - before) if before and after else "dim"
        part = f"{100 * (after - before) / before:+.0f} %" if before and after else ""
        what, *cells = _rates(one)
        rows.append([(what, ""), (cells[0], "dim"), ("→", "dim"), (cells[1], style), (part, style)])
    heads = [("pass", ""), *_VALUES[1:], ("change", "")]
    title = Heading("Speed", ", tokens/s with a full cache, estimated for tpplan's decoder")
    why = [Text(changes["unpredicted"], "dim")] if "unpredicted" in changes else []
    return [title, _named(heads, "<><>>", rows), *why] if rows else [Heading("Speed"), *why] if why else []


def speed_lines(changes: dict[str, Any]) -> list[str]:
    """Say in a line per pass how many tokens a second each plan predicts, and then why one predicts none."""
    lines = [f"{what}: {before} → {after} tokens/s" for what, before, after in map(_rates, changes.get("speed", ()))]
    return [*lines, *([changes["unpredicted"]] if "unpredicted" in changes else [])]


def _rates(change: dict[str, Any]) -> tuple[str, str, str]:
    """Return in words what a pass is, and the tokens a second that each plan predicts of it."""
    what = f"a prompt of {counted(change['rows'], 'token')}" if change["prefill"] else f"batch {change['rows']}"
    before, after = (change.get(f"{which}_tokens_per_second") for which in ("before", "after"))
    return what, f"{before:,}" if before else "unknown", f"{after:,}" if after else "unknown"


def _deltas(buckets: Sequence[str], sizes: Sequence[int], scale: int) -> list[Span]:
    """Write what buckets gain or lose: it is good if more is free, and bad of all others."""
    return [
        (amount(size, scale, sign=True), _judged(size if bucket == "free" else -size))
        for bucket, size in zip(buckets, sizes, strict=True)
    ]


def _judged(gain: int) -> str:
    """Return the style of a change by how much better it makes a plan, or worse."""
    return "dim" if not gain else "good" if gain > 0 else "bad"


def _label(device: dict[str, Any]) -> tuple[str, str]:
    """Return a device's index, or both if they differ, and its name."""
    places = list(dict.fromkeys(str(device[key]) for key in ("before", "after") if key in device))
    return "→".join(places), shorten_name(device["name"], _LONGEST_NAME)


def _name_cells(device: dict[str, Any]) -> list[Span]:
    index, name = _label(device)
    mark = "" if "before" in device and "after" in device else " (new)" if "after" in device else " (gone)"
    return [(index, "dim"), (name + mark, "")]


def _values(field: dict[str, Any]) -> list[Span]:
    """Return cells that say what a value was and is."""
    before, after, wanted = field.get("before"), field.get("after"), _WANTED.get(field["path"], 0)
    style = ""
    if isinstance(before, int) and isinstance(after, int) and before and after:
        style = _judged(wanted * (after - before)) if wanted else ""
    return [(field["path"], ""), (_shown(field, "before"), "dim"), ("→", "dim"), (_shown(field, "after"), style)]


def _shown(field: dict[str, Any], key: str) -> str:
    value = field.get(key)
    if value is None:
        return "unknown"
    if isinstance(value, int) and field["path"].endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, int) and field["path"].endswith("_bytes_per_second"):
        return f"{value / 10**9:.0f} GB/s"
    return shorten(str(value), _LONGEST_VALUE) or "none"
