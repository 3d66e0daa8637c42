"""A plan as a picture: the memory of every device by bucket, and the cut of every axis.

It stands on a card of its own, light or dark as the reader's system is, so that it can be read on any page. Colours are
told apart by people who see few of them (violets that differ in lightness and pattern for buckets; Okabe and Ito's set
for devices), and everything that a colour says is also written.
"""

from __future__ import annotations

import re
from html import escape
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from attrs import frozen

from tpplan.render.show import count, exactness, request_lines, summary, uncounted_lines, unpredicted_lines
from tpplan.render.text import (
    amount,
    buckets_of,
    elided,
    percent,
    scale_for,
    sentence,
    shorten,
    shorten_layers,
    shorten_name,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

#: Where the columns of a wide picture end: how full a device is, its buckets and its budget; and the width of the bars
#: in front of them; by the number of buckets.
_COLUMNS = {
    5: (244, (500, 564, 616, 690, 762, 818, 876)),
    6: (180, (440, 502, 554, 628, 694, 758, 814, 876)),
    7: (124, (384, 446, 498, 572, 638, 702, 758, 814, 876)),
}
_MOST_DEVICES = 48
_DIGIT = 6.7
_TICK_GAP = 5


@frozen(kw_only=True)
class _Layout:
    """Where things are, in pixels; a narrow picture is for phones, and has its labels above the bars.

    Attributes:
        name: prefix of identifiers, of which a page has both layouts.
        width: of the picture.
        edge: of what is inside, from both sides.
        bar: where slices begin.
        row: height of a device.
        split_row: height of a split.
        title: characters of the longest title.
        text: characters of the longest line.
    """

    name: str
    width: int
    edge: int
    bar: int
    row: int
    split_row: int
    title: int
    text: int

    @property
    def right(self) -> int:
        """Where everything ends."""
        return self.width - self.edge


_WIDE = _Layout(name="tpplan", width=900, edge=24, bar=196, row=26, split_row=52, title=60, text=130)
_NARROW = _Layout(name="tpplan-narrow", width=358, edge=14, bar=14, row=48, split_row=66, title=26, text=44)
#: Buckets in a line of the narrow picture's legend.
_BESIDE = 3

#: Fills of slices and the colours of text on them; the devices take them by turns.
_DEVICES = (
    ("#0072b2", "#ffffff"),
    ("#e69f00", "#000000"),
    ("#009e73", "#000000"),
    ("#cc79a7", "#000000"),
    ("#56b4e9", "#000000"),
    ("#d55e00", "#000000"),
    ("#f0e442", "#000000"),
    ("#9a9a9a", "#000000"),
)

#: Ground and pattern of each bucket; what is free is left open.
_BUCKETS = {
    "weights": ("#6f5bb5", ""),
    "cache": ("#b3a6e0", '<path d="M-1 7 7 -1M-1 3 3 -1M3 7 7 3" stroke="#3c2d73" stroke-width="1.2"/>'),
    "workspace": ("#e4def5", '<circle cx="3" cy="3" r="1.2" fill="#3c2d73"/>'),
    "overhead": ("#a7adb5", '<path d="M0 3H6M3 0V6" stroke="#4b5159" stroke-width="1"/>'),
    "reserved": ("#f4f4f4", '<path d="M-1 -1 7 7M-1 3 3 7M3 -1 7 3" stroke="#4b5159" stroke-width="1"/>'),
    "draft": ("#ffffff", '<path d="M0 1.5H6M0 4.5H6" stroke="#3c2d73" stroke-width="1"/>'),
}

#: On a page, the root is the page's, which has this anyway.
_STYLE = """
:root{max-width:100%;height:auto}
text{font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",Arial,sans-serif;font-size:12px;fill:#1f2328}
.title{font-size:20px;font-weight:600}.head{font-size:13px;font-weight:600}.dim{fill:#59636e}.small{font-size:10.5px}
.end{text-anchor:end}.mid{text-anchor:middle}.num{font-variant-numeric:tabular-nums}.strong{font-weight:600}
.card{fill:#ffffff;stroke:#d1d9e0}.track{fill:none;stroke:#59636e}.rule{stroke:#d1d9e0}.tick{stroke:#59636e}
.gap{stroke:#ffffff}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9aa4ae}.card{fill:#0d1117;stroke:#3d444d}
.track{stroke:#9aa4ae}.rule{stroke:#3d444d}.tick{stroke:#9aa4ae}.gap{stroke:#0d1117}}
"""

#: What XML 1.0 has no way to write.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def picture(report: dict[str, Any], *, narrow: bool = False) -> str:
    """Draw a :class:`~tpplan.reports.show.ShowReport`; equal reports, equal bytes.

    Args:
        report: the report's data.
        narrow: whether to draw it for a phone.
    """
    plan, at = report["plan"], _NARROW if narrow else _WIDE
    first, last = elided(len(plan["devices"]), _MOST_DEVICES)
    buckets = buckets_of(plan["memory"])
    texts = [(part, "strong") for text in uncounted_lines(plan) for part in wrapped(text, at.text)]
    for text in request_lines(plan):
        texts += [(shorten(part, at.text), "dim") for part in wrapped(text, at.text)]
    top = 82 + 18 * len(texts)
    rows_top = top + 24 + (22 * -(-len(buckets) // _BESIDE) if narrow else 0)
    splits_top = rows_top + 30 + at.row * (len(first) + len(last) + bool(last))
    bottom = splits_top + 24 + at.split_row * len(plan["splits"])
    told = [
        *((sentence(text), "dim") for text in unpredicted_lines(report)),
        (summary(report), "strong"),
        (f"Sizes in {_unit(report)[0]}; {exactness(report)}.", "dim"),
    ]
    below = [(part, style) for text, style in told for part in wrapped(text, at.text)]
    height = bottom + 16 + 18 * len(below)
    name = plan["model"]["name"]
    title = f"How {name} is split over {count(plan)}"
    size = f'viewBox="0 0 {at.width} {height}" width="{at.width}" height="{height}"'
    named = f'role="img" aria-labelledby="{at.name}-title {at.name}-about"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {named}>',
        f'<title id="{at.name}-title">{_safe(title)}</title>',
        f'<desc id="{at.name}-about">{_safe(summary(report))}</desc>',
        f"<style>{_STYLE}</style>",
        f"<defs>{''.join(_patterns(buckets, at))}</defs>",
        f'<rect class="card" x="0.5" y="0.5" width="{at.width - 1}" height="{height - 1}" rx="8"/>',
        _text(at.edge, 40, shorten(name, at.title), "title"),
        *(_text(at.edge, 62 + 18 * i, *one) for i, one in enumerate(texts)),
        _text(at.edge, top, f"Memory, {_unit(report)[0]}", "head"),
        *(_legend(buckets, top + 22, at) if narrow else _heads(buckets, top, at)),
        *_memory(report, buckets, rows_top, (first, last), at),
        *_splits(plan, splits_top, at),
        f'<path class="rule" d="M{at.edge} {bottom - 2}H{at.right}"/>',
        *(_text(at.edge, bottom + 18 + 18 * i, *one) for i, one in enumerate(below)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _heads(buckets: Mapping[str, Sequence[int]], top: int, at: _Layout) -> Iterator[str]:
    """Yield the headings of the columns, with what stands for each bucket."""
    for name, x in zip(("used", *buckets, "budget"), _COLUMNS[len(buckets)][1], strict=True):
        yield _text(x, top, name, "dim small end")
        if name in buckets:
            yield _box(x - 40, top + 5, 40, 7, _paint(name, at))


def _legend(buckets: Mapping[str, Sequence[int]], top: int, at: _Layout) -> Iterator[str]:
    """Yield what stands for each bucket, in lines of their own."""
    step = (at.right - at.edge) / _BESIDE
    for i, name in enumerate(buckets):
        x, y = at.edge + step * (i % _BESIDE), top + 22 * (i // _BESIDE)
        yield _box(x, y - 9, 26, 10, _paint(name, at))
        yield _text(x + 32, y, name, "dim")


def _memory(
    report: dict[str, Any], buckets: Mapping[str, Sequence[int]], top: int, shown: tuple[range, range], at: _Layout
) -> Iterator[str]:
    """Yield a row per device: a bar as long as its budget, and the numbers."""
    devices = report["devices"]
    y = top
    first, last = shown
    for i in (*first, *last):
        if last and i == last.start:
            yield _text(at.bar, y + 13, f"… {last.start - first.stop} more devices …", "dim")
            y += at.row
        yield from _device(report, devices[i], {bucket: sizes[i] for bucket, sizes in buckets.items()}, y, at)
        y += at.row


def _device(
    report: dict[str, Any], device: dict[str, Any], held: Mapping[str, int], y: int, at: _Layout
) -> Iterator[str]:
    fill, ink = _colours(device["device"])
    budget, is_narrow = device["budget_bytes"], at is _NARROW
    bar = at.right - at.bar if is_narrow else _COLUMNS[len(held)][0]
    bar_y = y + 22 if is_narrow else y
    yield f"<g><title>{_safe(_exact(device, held))}</title>"
    yield f'<rect x="{at.edge}" y="{y}" width="34" height="18" rx="3" fill="{fill}"/>'
    yield _text(at.edge + 17, y + 13, str(device["device"]), "mid small strong num", ink)
    yield _text(at.edge + 42, y + 13, shorten_name(device["name"], 17))
    track = max(1.0, budget * bar / max(d["budget_bytes"] for d in report["devices"]))
    ends = [end * track / budget for end in accumulate(held.values())]
    for bucket, (start, end) in zip(held, pairwise([0.0, *ends]), strict=True):
        if bucket in _BUCKETS and end > start:
            yield _box(at.bar + start, bar_y, end - start, 18, _paint(bucket, at))
    yield f'<rect class="track" x="{at.bar}" y="{bar_y}" width="{_number(track)}" height="18"/>'
    scale = _unit(report)[1]
    if is_narrow:
        kept = amount(budget - held["free"], scale)
        yield _text(at.right - 62, y + 13, f"{kept} of {amount(budget, scale)}", "end num dim")
        yield _text(at.right, y + 13, percent(device["used_ppm"]), "end num strong")
    else:
        full, *columns = _COLUMNS[len(held)][1]
        yield _text(full, y + 13, percent(device["used_ppm"]), "end num strong")
        for size, x in zip((*held.values(), budget), columns, strict=True):
            yield _text(x, y + 13, amount(size, scale), "end num" if size else "end num dim")
    yield "</g>"


def _splits(plan: dict[str, Any], top: int, at: _Layout) -> Iterator[str]:
    """Yield a row per split: its slices in the colours of their devices, and the bounds below them."""
    is_narrow = at is _NARROW
    yield f'<path class="rule" d="M{at.edge} {top - 24}H{at.right}"/>'
    yield _text(at.edge, top, "Splits", "head")
    place, side = (at.right, " end") if is_narrow else (at.bar, "")
    yield _text(place, top, "In the slices: devices. Below: bounds, in elements.", f"dim small{side}")
    for i, split in enumerate(plan["splits"]):
        y = top + 14 + at.split_row * i
        copies = f", {split['replicas']} copies" if "replicas" in split else ""
        size = f"{split['size']}, unit {split['unit']}{copies}"
        layers = "outside the layers"
        if "layers" in split:
            layers = f"layers {shorten_layers(split['layers'], (32 - len(size) if is_narrow else 28) - 7)}"
        if is_narrow:
            yield _text(at.edge, y + 15, split["axis"], "strong")
            told = f"{layers}; {size}" if "layers" in split else size
            yield _text(at.right, y + 15, shorten(told, 34), "dim small end")
        else:
            yield _text(at.edge, y + 11, split["axis"], "strong")
            yield _text(at.edge, y + 25, layers, "dim small")
            yield _text(at.edge, y + 38, shorten(size, 28), "dim small")
        yield from _cut(split, plan["devices"], y + 20 if is_narrow else y, at)


def _cut(split: dict[str, Any], devices: Sequence[dict[str, Any]], y: int, at: _Layout) -> Iterator[str]:
    room, size = at.right - at.bar, split["size"]
    for device, (start, end) in enumerate(pairwise(split["bounds"])):
        if end == start:
            continue
        fill, ink = _colours(device)
        x, wide = at.bar + start * room / size, (end - start) * room / size
        told = f"device {device} {devices[device]['name']}: {start} to {end}, {end - start} elements"
        box = f'x="{_number(x)}" y="{y}" width="{_number(wide)}" height="22"'
        yield f'<rect class="gap" {box} fill="{fill}"><title>{_safe(told)}</title></rect>'
        if wide > 7 * len(str(device)) + 5:
            yield _text(x + wide / 2, y + 15, str(device), "mid small strong num", ink)
    yield from _ticks([*dict.fromkeys(split["bounds"])], size, y + 22, at)


def _ticks(bounds: Sequence[int], size: int, y: int, at: _Layout) -> Iterator[str]:
    """Yield the bounds below a bar, those that have room; the last one always."""
    room = at.right - at.bar
    free, final = 0.0, at.right - _DIGIT * len(str(bounds[-1]))
    for bound in bounds:
        x, last = at.bar + bound * room / size, bound == bounds[-1]
        half = _DIGIT * len(str(bound)) / 2
        start, end, anchor = x - half, x + half, "mid"
        if bound == 0:
            start, end, anchor = x, x + 2 * half, ""
        elif last:
            start, end, anchor = x - 2 * half, x, "end"
        yield f'<path class="tick" d="M{_number(x)} {y}v4"/>'
        if last or (start > free and end < final - _TICK_GAP):
            yield _text(x, y + 15, str(bound), f"dim small num {anchor}".rstrip())
            free = end + _TICK_GAP


def _patterns(buckets: Iterable[str], at: _Layout) -> Iterator[str]:
    for bucket, (fill, marks) in ((bucket, _BUCKETS[bucket]) for bucket in buckets if bucket in _BUCKETS):
        yield (
            f'<pattern id="{at.name}-{bucket}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<rect width="6" height="6" fill="{fill}"/>{marks}</pattern>'
        )


def _paint(bucket: str, at: _Layout) -> str:
    """Return the attribute that fills a box as a bucket, or leaves it open."""
    return f'fill="url(#{at.name}-{bucket})"' if bucket in _BUCKETS else 'class="track"'


def _box(x: float, y: float, wide: float, high: float, paint: str) -> str:
    return f'<rect {paint} x="{_number(x)}" y="{_number(y)}" width="{_number(wide)}" height="{_number(high)}"/>'


def _text(x: float, y: float, text: str, classes: str = "", ink: str = "") -> str:
    looks = (f' class="{classes}"' if classes else "") + (f' style="fill:{ink}"' if ink else "")
    return f'<text x="{_number(x)}" y="{_number(y)}"{looks}>{_safe(text)}</text>'


def _exact(device: dict[str, Any], held: Mapping[str, int]) -> str:
    """Return all the numbers of a device to the byte."""
    buckets = ", ".join(f"{bucket} {size}" for bucket, size in held.items())
    return f"device {device['device']} {device['name']}: {buckets} of {device['budget_bytes']} bytes"


def _colours(device: int) -> tuple[str, str]:
    return _DEVICES[device % len(_DEVICES)]


def _unit(report: dict[str, Any]) -> tuple[str, int]:
    return scale_for(max(d["budget_bytes"] for d in report["devices"]))


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _safe(text: str) -> str:
    return escape(_UNWRITABLE.sub("\ufffd", text))
