"""A plan as a page of its own: the picture, and tables with every number to the byte."""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tpplan.core.model import NotPlanned
from tpplan.core.plan import Reserve, reserves_told, rooms_told
from tpplan.render.show import (
    CAUSES,
    basis_of,
    count,
    draft_told,
    exactness,
    shares_of,
    speed_lines,
    summary,
    times_of,
    uncounted_lines,
    unpredicted_lines,
)
from tpplan.render.svg import picture
from tpplan.render.text import buckets_of, percent, sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Columns that a phone shows side by side.
_MOST_COLUMNS = 3

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--dim:#59636e;--line:#d1d9e0;--page:#f6f8fa;--card:#fff}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9aa4ae;--line:#3d444d;--page:#010409;--card:#0d1117}}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Arial,sans-serif;color:var(--ink);background:var(--page);
margin:2rem auto;max-width:1160px;padding:0 1rem}
svg{display:block;width:100%;height:auto;max-width:900px;margin:0 auto}.narrow{display:none}
@media (max-width:720px){body{margin-top:1rem}.wide{display:none}.narrow{display:block}.narrow svg{max-width:460px}
.many tr{display:grid;grid-template-columns:1fr 1fr;padding:.35rem 0;border-bottom:1px solid var(--line)}
.many tr:first-child{display:none}.many tr:last-child{border-bottom:0}
.many td{display:flex;justify-content:space-between;gap:.4rem;border:0;padding:.1rem .5rem;font-size:12px}
.many td::before{content:attr(data-name);color:var(--dim)}
.many td:first-child{grid-column:1/3;font-size:15px;font-weight:600}.many td:first-child::before{content:none}}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:8px;background:var(--card)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .75rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{color:var(--dim);font-weight:600}th:first-child,td:first-child,.left{text-align:left}
tr:last-child td{border-bottom:0}p{color:var(--dim)}
.facts td,.facts th{text-align:left}
.facts td:last-child{white-space:normal;overflow-wrap:anywhere}
"""


def page(report: dict[str, Any]) -> str:
    """Write a :class:`~tpplan.reports.show.ShowReport` as one self-contained file; equal reports, equal bytes."""
    plan = report["plan"]
    title = f"{plan['model']['name']} on {count(plan)}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>{_told(report)}</p>
<div class="wide">{picture(report)}</div>
<div class="narrow">{picture(report, narrow=True)}</div>
<h2>Request</h2>
{_table(("asked for", "value"), _request(plan), kind="facts")}
<h2>Memory, bytes</h2>
{_table(("device", *buckets_of(plan["memory"]), "budget", "used"), _memory(report))}
{_speed(report)}<h2>Shares</h2>
<p>Requested and achieved shares of {escape(shares_of(report))}.</p>
{_table(("device", "requested", "achieved"), _shares(report))}
<h2>Splits, elements</h2>
{_table(("axis", "layers", "size", "unit", "device", "start", "end", "elements"), _slices(plan))}
</body>
</html>
"""


def _told(report: dict[str, Any]) -> str:
    """Return as HTML what the plan leaves out, how full the devices are, and which numbers are exact."""
    beside = (f"<strong>{escape(sentence(text))}</strong> " for text in uncounted_lines(report["plan"]))
    return f"{''.join(beside)}{escape(summary(report))}. {escape(exactness(report).capitalize())}."


def _speed(report: dict[str, Any]) -> str:
    """Return as HTML how fast the plan is predicted to be, or which bandwidths it would need."""
    if "speed" not in report:
        return "".join(f"<h2>Speed</h2>\n<p>{escape(sentence(text))}</p>\n" for text in unpredicted_lines(report))
    devices = report["devices"]
    steps = report["plan"]["speed"]["decode"]
    rows = [
        (
            f"{one['device']} {devices[one['device']]['name']}",
            f"{step['rows']}",
            *(f"{each / 10**6:.3f}" for each in times_of(step, one)),
        )
        for step in steps
        for one in step["devices"]
    ]
    texts = "; ".join((*speed_lines(report), basis_of(report["speed"], len(steps[0]["devices"]))))
    table = _table(("device", "batch", *CAUSES, "together"), rows)
    return f"<h2>Speed, milliseconds of a decode step</h2>\n<p>{escape(sentence(texts))}</p>\n{table}\n"


def _request(plan: dict[str, Any]) -> list[tuple[str, ...]]:
    model, request = plan["model"], plan["request"]
    rows = [(f"model {key}", value) for key, value in model.items() if key != "not_planned"]
    rows += [("not planned", NotPlanned(**part).text) for part in model.get("not_planned", ())]
    rows += [(key, value) for key, value in request.items() if key not in {"cache", "reserve", "draft"}]
    rows += [(f"cache {key}", value) for key, value in request["cache"].items()]
    reserves = tuple(Reserve(**each) for each in request.get("reserve", ()))
    rows += [("reserve", text) for text in reserves_told(reserves) if reserves]
    if "draft" in request:
        (room,) = rooms_told(tuple(request["draft"]["room_bytes"]))
        rows += [("room for", draft_told(request)), ("room", room)]
    return [(key.replace("_", " "), str(value)) for key, value in rows]


def _memory(report: dict[str, Any]) -> list[tuple[str, ...]]:
    buckets = buckets_of(report["plan"]["memory"]).values()
    return [
        (
            f"{device['device']} {device['name']}",
            *(f"{sizes[i]:,}" for sizes in buckets),
            f"{device['budget_bytes']:,}",
            percent(device["used_ppm"]),
        )
        for i, device in enumerate(report["devices"])
    ]


def _shares(report: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (f"{d['device']} {d['name']}", percent(d["requested_share_ppm"]), percent(d["achieved_share_ppm"]))
        for d in report["devices"]
    ]


def _slices(plan: dict[str, Any]) -> list[tuple[str, ...]]:
    names = [f"{i} {device['name']}" for i, device in enumerate(plan["devices"])]
    return [
        (split["axis"], split.get("layers", ""), *map(str, (split["size"], split["unit"])), names[i], *map(str, cut))
        for split in plan["splits"]
        for i, (start, end) in enumerate(pairwise(split["bounds"]))
        for cut in ((start, end, end - start),)
        if end > start
    ]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table; one of many columns names each cell, because on a phone its rows are no lines."""
    kind = kind or ("many" if len(titles) > _MOST_COLUMNS else "sizes")
    names = [f' data-name="{escape(title)}"' if kind == "many" else "" for title in titles]
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    cells = ("".join(f"<td{name}>{escape(cell)}</td>" for name, cell in zip(names, row, strict=True)) for row in rows)
    body = "\n".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table class="{kind}">\n<tr>{head}</tr>\n{body}\n</table></div>'
