"""A plan on one screen."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tpplan.core.model import NotPlanned
from tpplan.render.text import (
    BLANK,
    PLAIN_COLUMNS,
    abridged,
    amount,
    bar,
    buckets_of,
    elided,
    fitting,
    legend,
    line,
    line_width,
    percent,
    scale_for,
    shorten,
    shorten_name,
    table,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.render.text import Line, Span

#: Devices that a screen shows; of more, the middle is left out.
MOST_DEVICES = 32
_LONGEST_NAME = 22
_LONGEST_TITLE = 60
_LONGEST_CELL = 15
#: Times that differ by less than one part in so many are those of devices of which none limits the others.
_ALIKE = 100
_GAP = 2
_PERCENT = len(" 100.0 %")
#: Columns for a bar with its gap and percentage beside the numbers; where there are fewer, bars get lines of their own.
_LEAST_BAR = 8 + _GAP + _PERCENT
#: What the time of a step is spent on; a device waits while others are slower between two sums.
CAUSES = ("weights", "cache", "exchanges", "rest", "waits")
_BASIS = {
    "budget": "all budgets and of all bytes used",
    "bandwidth": "all bandwidth and of all bytes that a token reads",
}


def show(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.reports.show.ShowReport`."""
    return [
        *_heading(report["plan"], columns),
        BLANK,
        *_memory(report, columns),
        BLANK,
        *_cuts(report, columns),
        BLANK,
        *_speed(report, columns),
        *(line(part, "good") for part in wrapped(summary(report), columns)),
        *(line(part, "dim") for part in wrapped(exactness(report), columns)),
    ]


def _heading(plan: dict[str, Any], columns: int) -> list[Line]:
    """Say what the plan is for and what was asked."""
    texts = [part for text in request_lines(plan) for part in wrapped(text, columns - _GAP)]
    beside = [part for text in uncounted_lines(plan) for part in wrapped(text, columns - _GAP)]
    return [((shorten(plan["model"]["name"], _LONGEST_TITLE), "title"), (f" on {count(plan)}", "")),
            *(line(" " * _GAP + text, "warn") for text in beside),
            *(line(" " * _GAP + text, "dim") for text in texts)]  # fmt: skip


def uncounted_lines(plan: dict[str, Any]) -> list[str]:
    """Say what the model's files hold that the plan does not count, and what it assumes of the weights."""
    model = plan["model"]
    parts = "; ".join(NotPlanned(**part).text for part in model.get("not_planned", ()))
    assumed = model.get("assumed", "")
    return [*([f"not planned: {parts}"] if parts else []), *([f"assumed: {assumed}"] if assumed else [])]


def count(plan: dict[str, Any]) -> str:
    """Return how many devices there are, in words."""
    devices = len(plan["devices"])
    return f"{devices} device{'s' if devices > 1 else ''}"


def request_lines(plan: dict[str, Any]) -> tuple[str, str]:
    """Return the model and the request in words."""
    model, request = plan["model"], plan["request"]
    cache, batch, rows = request["cache"], request["batch"], request["max_rows"]
    sequences = f" ({batch} sequences)" if batch > 1 else ""
    if "context" in request:
        sequences = f" shared by up to {batch} sequences of at most {request['context']}"
    sequences += ", sliding windows kept whole" * ("full_window" in request)
    sequences += ", beyond the model's context" * ("beyond" in request)
    kv = ", KV heads replicated" if request["kv"] == "replicate" else ""
    caching = f"cache {cache['kind']} for {cache['tokens']} tokens{sequences}"
    return (
        f"{model['architecture']}, {model['layers']} layers, {model['dtype']}, {abridged(model['fingerprint'])}",
        f"layout {request['layout']}, strategy {request['strategy']}, {caching}, up to {rows} rows{kv}",
    )


def summary(report: dict[str, Any]) -> str:
    """Say in one line how full the devices are."""
    fullest = report["devices"][report["fullest_device"]]
    where = f"device {fullest['device']} {shorten_name(fullest['name'], _LONGEST_NAME)}"
    whole, most = percent(report["together_ppm"]), percent(report["fullest_ppm"])
    return f"{whole} of all budgets used{_or_reserved(report)}, at most {most} ({where})"


def speed_lines(report: dict[str, Any]) -> list[str]:
    """Say how many tokens a second a plan is predicted to make, one line each for one sequence, a batch and prompts."""
    if "speed" not in report:
        return []
    speed, devices = report["speed"], report["plan"]["devices"]
    texts = []
    for one, step in zip(speed["decode"], report["plan"]["speed"]["decode"], strict=True):
        place = one["limiting_device"]
        limits = f"; device {place} ({shorten_name(devices[place]['name'], _LONGEST_NAME)}) limits"
        full = f", {one['full_tokens_per_second']:,} with a full cache"
        totals = [sum(times_of(step, each)[:-2]) for each in step["devices"]]
        differ = max(totals) * _ALIKE > min(totals) * (_ALIKE + 1)
        texts.append(f"batch {one['rows']}: {one['tokens_per_second']:,} tokens/s{full}{limits * differ}")
    prompts = (f"a prompt of {one['rows']} tokens: {one['tokens_per_second']:,} tokens/s" for one in speed["prefill"])
    return [*texts, *prompts]


def times_of(step: dict[str, Any], device: dict[str, Any]) -> list[int]:
    """Return the nanoseconds that a device spends on each of :data:`CAUSES` of a step, and those of the step."""
    own = {each["device"]: [each[f"{name}_ns"] for name in CAUSES[:-1]] for each in step["devices"]}
    times = own[device["device"]]
    whole = step.get("total_ns") or max(map(sum, own.values()))
    return [*times, whole - sum(times), whole]


def basis_of(speed: dict[str, Any], devices: int) -> str:
    """Say what a prediction rests on."""
    bandwidth = "measured bandwidths" if "bandwidth" in speed["measured"] else "bandwidths of the catalogue"
    links = "" if devices == 1 else ", measured links" if "links" in speed["measured"] else ", guessed links"
    return f"estimated for tpplan's decoder from {bandwidth}{links}"


def _speed(report: dict[str, Any], columns: int) -> list[Line]:
    """Return a row per device: the milliseconds of a decode step by cause, and what that comes to."""
    if "speed" not in report:
        return []
    step = report["plan"]["speed"]["decode"][-1]
    rows: list[list[Span]] = [[("", ""), ("", ""), *((name, "dim") for name in (*CAUSES, "together"))]]
    first, last = elided(len(step["devices"]), MOST_DEVICES)
    for place in (*first, *last):
        one = step["devices"][place]
        cells = [f"{each / 10**6:.2f}" for each in times_of(step, one)]
        rows.append([*_device(report["devices"][one["device"]]), *((cell, "") for cell in cells)])
    batch = f"a step of {step['rows']} sequences" if step["rows"] > 1 else "a step"
    head: Line = (("Speed", "head"), (f", ms of {batch} with a full cache", "dim"))
    lines = _with_gap(table(rows, "><" + ">" * (len(CAUSES) + 1)), 1 + len(first), len(step["devices"]) - len(rows) + 1)
    texts = [part for text in speed_lines(report) for part in wrapped(text, columns - _GAP)]
    basis = basis_of(report["speed"], len(step["devices"]))
    return [head, *lines, *(line(" " * _GAP + text, "good") for text in texts),
            *(line(" " * _GAP + text, "dim") for text in wrapped(basis, columns - _GAP)), BLANK]  # fmt: skip


def shares_of(report: dict[str, Any]) -> str:
    """Say what requested and achieved shares are shares of."""
    basis = _BASIS[report["share_basis"]]
    return basis + (_or_reserved(report) if report["share_basis"] == "budget" else "")


def _or_reserved(report: dict[str, Any]) -> str:
    return " or reserved" if "reserve" in report["plan"]["request"] else ""


def exactness(report: dict[str, Any]) -> str:
    """Say which numbers are exact, of what the plan counts."""
    exact, estimated = report["exact"], report["estimated"]
    counted = " of what is planned" if "not_planned" in report["plan"]["model"] else ""
    told = "are estimates" if len(estimated) > 1 else "is an estimate"
    return f"{_and(exact)}{counted} are exact; {_and(estimated)} {told}"


def _and(words: Sequence[str]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), words[-1]])


def _memory(report: dict[str, Any], columns: int) -> list[Line]:
    """Return a row per device: its buckets, its budget, a bar of them and how full it is, below if not beside them."""
    devices, memory = report["devices"], report["plan"]["memory"]
    unit, scale = scale_for(max(d["budget_bytes"] for d in devices))
    buckets = buckets_of(memory)
    rows: list[list[Span]] = [[("", ""), ("", ""), *((name, "dim") for name in (*buckets, "budget"))]]
    first, last = elided(len(devices), MOST_DEVICES)
    for i in (*first, *last):
        held = [sizes[i] for sizes in buckets.values()]
        cells = [amount(size, scale) for size in (*held, devices[i]["budget_bytes"])]
        rows.append([*_device(devices[i]), *((text, "dim" if text == "0" else "") for text in cells)])
    if len(devices) > 1:
        totals = [*map(sum, buckets.values())]
        totals.append(sum(d["budget_bytes"] for d in devices))
        rows.append([("", ""), ("together", "dim"), *((amount(size, scale), "dim") for size in totals)])
    lines = table(rows, "><" + ">" * (len(buckets) + 1))
    names: Line = (("    ", ""), *legend(buckets))
    shown, hidden = (*first, *last), len(devices) - len(first) - len(last)
    head: Line = (("Memory", "head"), (f", {unit}", "dim"))
    if columns - max(map(line_width, lines)) >= _LEAST_BAR:
        bars = _barred(lines[1 : 1 + len(shown)], shown, report, columns)
        numbers = [lines[0], *bars, *lines[1 + len(shown) :]]
        return [head, *_with_gap(numbers, 1 + len(first), hidden), names]
    bars = _barred(table([_device(devices[i]) for i in shown], "><"), shown, report, columns)
    numbers = _with_gap(lines, 1 + len(first), hidden)
    return [head, *numbers, BLANK, *_with_gap(bars, len(first), hidden), names]


def _barred(lines: Sequence[Line], shown: Sequence[int], report: dict[str, Any], columns: int) -> list[Line]:
    """Put a device's bar, and how full it is, behind each line."""
    devices, buckets = report["devices"], buckets_of(report["plan"]["memory"])
    start = max(map(line_width, lines)) + _GAP
    room = columns - start - _PERCENT
    barred: list[Line] = []
    for one, i in zip(lines, shown, strict=True):
        cells = bar({bucket: sizes[i] for bucket, sizes in buckets.items()}, devices[i]["budget_bytes"], room)
        full = (f"{percent(devices[i]['used_ppm']):>{_PERCENT}}", "")
        barred.append((*one, (" " * (start - line_width(one)), ""), *cells, full))
    return barred


def _cuts(report: dict[str, Any], columns: int) -> list[Line]:
    """Return a row per device: the share that it was to get, the one that it got, and its slice of every split."""
    devices, splits = report["devices"], report["plan"]["splits"]
    first, last = elided(len(devices), MOST_DEVICES)
    labels = ["layers", "size", "unit", *(["replicas"] if any("replicas" in s for s in splits) else [])]
    names = [[("", ""), (label, "dim")] for label in ("", *labels)]
    names += [_device(devices[i]) for i in (*first, *last)]
    shares = [
        [(title, "dim")] + [("", "")] * len(labels) + [(percent(devices[i][key]), "") for i in (*first, *last)]
        for title, key in (("requested", "requested_share_ppm"), ("achieved", "achieved_share_ppm"))
    ]
    room = columns - max(map(line_width, table(names, "><")))
    lines: list[Line] = [(("Splits", "head"), (f", start:end; shares of {shares_of(report)}", "dim"))]
    for part in fitting([*shares, *(_column(split, labels, (*first, *last)) for split in splits)], room):
        rows = [[*start, *cells] for start, cells in zip(names, zip(*part, strict=True), strict=True)]
        block = table(rows, "><" + ">" * len(part))
        lines += [BLANK] * (len(lines) > 1)
        lines += _with_gap(block, 1 + len(labels) + len(first), len(devices) - len(first) - len(last))
    return lines


def _column(split: dict[str, Any], labels: Sequence[str], shown: Sequence[int]) -> list[Span]:
    """Return the column of one split: axis, its properties, then the slice of each device."""
    defaults = {"layers": "", "replicas": 1}
    head = [(split["axis"], "head")]
    head += [(shorten(str(split.get(label, defaults.get(label, ""))), _LONGEST_CELL), "dim") for label in labels]
    cuts = list(pairwise(split["bounds"]))
    return head + [(f"{a}:{b}", "") if b > a else ("-", "dim") for a, b in (cuts[i] for i in shown)]


def _device(device: dict[str, Any]) -> list[Span]:
    return [(str(device["device"]), "dim"), (shorten_name(device["name"], _LONGEST_NAME), "")]


def _with_gap(lines: list[Line], at: int, hidden: int) -> list[Line]:
    """Say that devices are left out."""
    if not hidden:
        return lines
    return [*lines[:at], line(f"   … {hidden} more devices, see --json …", "dim"), *lines[at:]]
