"""What of a model fits on devices, on one screen."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from tpplan.core.device import BANDWIDTHS_HINT, bandwidths_unknown
from tpplan.core.plan import rooms_told
from tpplan.core.sizes import format_bytes
from tpplan.render.blocks import INDENT, Heading, Table, Text
from tpplan.render.text import BLANK, shorten

if TYPE_CHECKING:
    from tpplan.render.blocks import Block
    from tpplan.render.text import Span

_LONGEST_TITLE = 60
_LONGEST_DEVICES = 60
_RATE = "quantisation_tokens_per_second"


def fit(report: dict[str, Any]) -> list[Block]:
    """Return the view of a :class:`~tpplan.reports.fit.FitReport`."""
    groups = [(name, len([*same])) for name, same in groupby(report["devices"])]
    devices = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in groups)
    now = f"{report['weight_format']}, {_bits(report['bits_tenths'])} bits per weight"
    beside = f"{format_bytes(report['budget_bytes'])} together, batch {report['batch']}"
    beside += f"; reserved: {report['reserve']}" if "reserve" in report else ""
    blocks: list[Block] = [
        Heading(shorten(report["model"], _LONGEST_TITLE), f" on {shorten(devices, _LONGEST_DEVICES)}", is_title=True),
        Text(f"{now}; {beside}", "dim", INDENT),
    ]
    if report.get("assumed"):
        blocks.append(Text(f"assumed: {report['assumed']}", "warn", INDENT))
    if "draft_bytes" in report:
        (left,) = rooms_told(tuple(report["draft_bytes"]))
        said = f"room for {report['draft']}, with {report['context']:,} tokens: {left}"
        blocks.append(Text(said, "dim", INDENT))
    return [*blocks, BLANK, *_table(report), BLANK, *_unknown(report), *_verdict(report)]


def _table(report: dict[str, Any]) -> list[Block]:
    """Return a row per context: tokens a second by cache kind, and the bits per weight that would fit."""
    kinds = [cell["cache"] for cell in report["rows"][0]["cells"]]
    rows: list[list[Span]] = []
    for row in report["rows"]:
        is_asked = row["context"] == report["context"]
        bits = _bits(row["most_bits_tenths"]) if row["most_bits_tenths"] else "-"
        rows.append(
            [
                (f"{row['context']:,}", "title" if is_asked else ""),
                *(_cell(cell) for cell in row["cells"]),
                (bits, ""),
                (row["quantisation"] or "none", "dim" if not row["quantisation"] else ""),
                (f"{rate:,}", "") if (rate := row.get(_RATE)) is not None else ("-", "dim"),
            ]
        )
    longest: list[Span] = [(f"{one['context']:,}" if one["context"] else "-", "dim") for one in report["longest"]]
    rows.append([("longest", "dim"), *longest, ("", ""), ("", ""), ("", "")])
    is_known = any(_RATE in row or any("tokens_per_second" in cell for cell in row["cells"]) for row in report["rows"])
    what = "tokens/s with a full cache, estimated" if is_known else "whether it fits"
    note = f", by context and cache: {what}; bits per weight that fit with {report['cache']}"
    heads: list[Span] = [(name, "dim") for name in ("context", *kinds, "bits", "which is", "tokens/s")]
    if not is_known:
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    sides = ">" + ">" * len(kinds) + "><>"[: 2 + is_known]
    return [Heading("What fits", note), Table(heads=heads, sides=sides, rows=rows, first=1, unnamed=0)]


def _unknown(report: dict[str, Any]) -> list[Block]:
    """Say why no speed is told, and what to do about it."""
    places = report.get("without_bandwidth", ())
    if not places:
        return []
    why = bandwidths_unknown({i: report["devices"][i] for i in places})
    return [Text(f"{why}: {BANDWIDTHS_HINT}", "warn")]


def _cell(cell: dict[str, Any]) -> Span:
    if not cell["fits"]:
        return "-", "dim"
    return (f"{cell['tokens_per_second']:,}" if "tokens_per_second" in cell else "fits"), "good"


def _verdict(report: dict[str, Any]) -> list[Block]:
    """Say whether what was asked for fits, and which changes make it fit."""
    each = " each" if report["batch"] > 1 else ""
    tokens = f"{report['context']:,} token{'s' * (report['context'] != 1)}"
    asked = f"{tokens}{each} in {report['cache']}"
    if report["fits"]:
        return [Text(f"{asked} fit", "good")]
    found = report.get("suggestions", ())
    ways = "each of these alone makes" if len(found) > 1 else "this makes"
    found = [one | {"option": "other weights"} if one["kind"] == "quantisation" else one for one in found]
    rows: list[list[Span]] = [
        [("  " + one["option"], "head"), (one["message"], "dim")] for one in found if "option" in one
    ]
    heads = [("option", ""), ("what it does", "")]
    return [
        Text(f"{asked} do not fit", "warn"),
        Text(report["reason"], lead=INDENT),
        *([Text(report["hint"], lead=INDENT)] if "hint" in report else []),
        *([Text(f"{ways} {'it' if report['context'] == 1 else 'them'} fit", "warn")] if found else []),
        *([Table(heads=heads, sides="<<", rows=rows)] if rows else []),
        *(Text(one["message"], lead=INDENT) for one in found if "option" not in one),
    ]


def _bits(tenths: int) -> str:
    return f"{tenths // 10}.{tenths % 10}"
