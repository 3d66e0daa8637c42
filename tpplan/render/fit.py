"""What of a model fits on devices, on one screen."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from tpplan.core.sizes import format_bytes
from tpplan.render.text import BLANK, PLAIN_COLUMNS, line, shorten, table, wrapped

if TYPE_CHECKING:
    from tpplan.render.text import Line, Span

_LONGEST_TITLE = 60
_LONGEST_DEVICES = 60
_NAMED = 3


def fit(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.reports.fit.FitReport`."""
    groups = [(name, len([*same])) for name, same in groupby(report["devices"])]
    devices = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in groups)
    head: Line = (
        (shorten(report["model"], _LONGEST_TITLE), "title"),
        (f" on {shorten(devices, _LONGEST_DEVICES)}", ""),
    )
    now = f"{report['weight_format']}, {_bits(report['bits_tenths'])} bits per weight"
    beside = f"{format_bytes(report['budget_bytes'])} together, batch {report['batch']}"
    lines = [head, line(f"  {now}; {beside}", "dim")]
    if report.get("assumed"):
        lines += [line(f"  {part}", "warn") for part in wrapped(f"assumed: {report['assumed']}", columns - 2)]
    return [*lines, BLANK, *_table(report), BLANK, *_unknown(report, columns), *_verdict(report, columns)]


def _table(report: dict[str, Any]) -> list[Line]:
    """Return a row per context: tokens a second by cache kind, and the bits per weight that would fit."""
    kinds = [cell["cache"] for cell in report["rows"][0]["cells"]]
    titles = ("context", *kinds, "bits", "which is", "tokens/s")
    rows: list[list[Span]] = [[(title, "dim") for title in titles]]
    for row in report["rows"]:
        is_asked = row["context"] == report["context"]
        bits = _bits(row["most_bits_tenths"]) if row["most_bits_tenths"] else "-"
        rows.append(
            [
                (f"{row['context']:,}", "title" if is_asked else ""),
                *(_cell(cell) for cell in row["cells"]),
                (bits, ""),
                (row["quantisation"] or "none", "dim" if not row["quantisation"] else ""),
                (f"{rate:,}" if (rate := row["quantisation_tokens_per_second"]) else "-", "" if rate else "dim"),
            ]
        )
    longest: list[Span] = [(f"{one['context']:,}" if one["context"] else "-", "dim") for one in report["longest"]]
    rows.append([("longest", "dim"), *longest, ("", ""), ("", ""), ("", "")])
    is_known = any(
        rate
        for row in report["rows"]
        for rate in (row["quantisation_tokens_per_second"], *(cell["tokens_per_second"] for cell in row["cells"]))
    )
    what = "tokens/s with a full cache, estimated" if is_known else "whether it fits"
    if not is_known:
        rows = [row[:-1] for row in rows]
    title: Line = (
        ("What fits", "head"),
        (f", by context and cache: {what}; bits per weight that fit with {report['cache']}", "dim"),
    )
    return [title, *table(rows, ">" + ">" * len(kinds) + "><>"[: 2 + is_known])]


def _unknown(report: dict[str, Any], columns: int) -> list[Line]:
    """Say why no speed is told, and what to do about it."""
    places = report.get("without_bandwidth", ())
    if not places:
        return []
    named = ", ".join(f"{i} ({report['devices'][i]})" for i in places[:_NAMED]) + ", …" * (len(places) > _NAMED)
    text = f"no tokens/s, because the bandwidth of device {named} is unknown: name GPUs of the catalogue, such as "
    text += "RTX4090:20GiB, or give bandwidth_bytes_per_second in a devices file"
    return [line(part, "warn") for part in wrapped(text, columns)]


def _cell(cell: dict[str, Any]) -> Span:
    if not cell["fits"]:
        return "-", "dim"
    return (f"{cell['tokens_per_second']:,}" if cell["tokens_per_second"] else "fits"), "good"


def _verdict(report: dict[str, Any], columns: int) -> list[Line]:
    """Say whether what was asked for fits, and which changes make it fit."""
    each = " each" if report["batch"] > 1 else ""
    asked = f"{report['context']:,} tokens{each} in {report['cache']}"
    if report["fits"]:
        return [line(f"{asked} fit", "good")]
    found = report.get("suggestions", ())
    lines = [line(f"{asked} do not fit{'; each of these alone makes them fit' if found else ''}", "warn")]
    found = [one | {"option": "other weights"} if one["kind"] == "quantisation" else one for one in found]
    named = [one for one in found if "option" in one]
    rows: list[list[Span]] = [[("  " + one["option"], "head"), (one["message"], "dim")] for one in named]
    lines += table(rows, "<<") if rows else []
    for one in (one for one in found if "option" not in one):
        lines += [line(f"  {part}") for part in wrapped(one["message"], columns - 2)]
    return lines


def _bits(tenths: int) -> str:
    return f"{tenths // 10}.{tenths % 10}"
