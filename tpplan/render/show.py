"""A plan on one screen."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tpplan.core.device import bandwidths_unknown
from tpplan.core.model import PREDICTION, NotPlanned
from tpplan.core.sizes import counted, listed
from tpplan.render.blocks import INDENT, Bar, Heading, Table, Text
from tpplan.render.text import (
    BLANK,
    abridged,
    amount,
    buckets_of,
    elided,
    percent,
    scale_for,
    shorten,
    shorten_layers,
    shorten_name,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.render.blocks import Block
    from tpplan.render.text import Span

#: Devices that a screen shows; of more, the middle is left out.
MOST_DEVICES = 32
_LONGEST_NAME = 22
_LONGEST_TITLE = 60
_LONGEST_CELL = 15
#: Times that differ by less than one part in so many are those of devices of which none limits the others.
_ALIKE = 100
#: What the time of a step is spent on; a device waits while others are slower between two sums.
CAUSES = ("weights", "cache", "exchanges", "rest", "waits")
#: Headings of the columns that say which device a row is about.
_NAMES = (("device", ""), ("name", ""))
_BASIS = {
    "budget": "all budgets and of all bytes used",
    "bandwidth": "all bandwidth and of all bytes that a token reads",
}


def show(report: dict[str, Any]) -> list[Block]:
    """Return the view of a :class:`~tpplan.reports.show.ShowReport`."""
    return [
        *_heading(report["plan"]),
        BLANK,
        *_memory(report),
        BLANK,
        *_cuts(report),
        BLANK,
        *(_speed(report) if "speed" in report else []),
        *(Text(text, "dim") for text in unpredicted_lines(report)),
        Text(summary(report), "good"),
        Text(exactness(report), "dim"),
    ]


def _heading(plan: dict[str, Any]) -> list[Block]:
    """Say what the plan is for and what was asked."""
    return [
        Heading(shorten(plan["model"]["name"], _LONGEST_TITLE), f" on {count(plan)}", is_title=True),
        *(Text(text, "warn", INDENT) for text in uncounted_lines(plan)),
        *(Text(text, "dim", INDENT) for text in request_lines(plan)),
    ]


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
    cache, batch, rows = request["cache"], request["batch"], counted(request["max_rows"], "row")
    sequences = f" ({counted(batch, 'sequence')})" if batch > 1 else ""
    if "context" in request:
        sequences = f" shared by up to {counted(batch, 'sequence')} of at most {request['context']}"
    sequences += ", sliding windows kept whole" * ("full_window" in request)
    sequences += ", beyond the model's context" * ("beyond" in request)
    kv = ", KV heads replicated" if request["kv"] == "replicate" else ""
    room = f", room for {draft_told(request)}" if "draft" in request else ""
    room += f", drafts for {request['drafts_for']}, whose plan has the overhead" if "drafts_for" in request else ""
    stored, whole = [model[key] for key in ("weight_format",) if key in model], abridged(model["fingerprint"])
    caching = f"cache {cache['kind']} for {counted(cache['tokens'], 'token')}{sequences}"
    return (
        ", ".join((model["architecture"], counted(model["layers"], "layer"), model["dtype"], *stored, whole)),
        f"layout {request['layout']}, strategy {request['strategy']}, {caching}, up to {rows}{kv}{room}",
    )


def draft_told(request: dict[str, Any]) -> str:
    """Say what has room beside the model."""
    name = PREDICTION if "mtp" in request else f"the draft model {request['draft']['name']}"
    return f"{name}, {'split' if 'split' in request['draft'] else 'whole on every device'}"


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
    prompts = (
        f"a prompt of {counted(one['rows'], 'token')}: {one['tokens_per_second']:,} tokens/s"
        for one in speed["prefill"]
    )
    return [*texts, *prompts]


def unpredicted_lines(report: dict[str, Any]) -> list[str]:
    """Say why a plan predicts nothing, where a bandwidth is unknown."""
    places, devices = report.get("without_bandwidth", ()), report["plan"]["devices"]
    if "speed" in report or not places:
        return []
    return [bandwidths_unknown({i: shorten_name(devices[i]["name"], _LONGEST_NAME) for i in places})]


def times_of(step: dict[str, Any], device: dict[str, Any]) -> list[int]:
    """Return the nanoseconds that a device spends on each of :data:`CAUSES` of a step, and those of the step."""
    own = {each["device"]: [each[f"{name}_ns"] for name in CAUSES[:-1]] for each in step["devices"]}
    times = own[device["device"]]
    whole = step.get("total_ns") or max(map(sum, own.values()))
    return [*times, whole - sum(times), whole]


def basis_of(speed: dict[str, Any], devices: int) -> str:
    """Say what a prediction rests on."""
    bandwidth = "measured bandwidths" if "bandwidth" in speed["measured"] else "bandwidths that were not measured"
    links = "" if devices == 1 else ", measured links" if "links" in speed["measured"] else ", guessed links"
    return f"estimated for tpplan's decoder from {bandwidth}{links}"


def _speed(report: dict[str, Any]) -> list[Block]:
    """Return a row per device: the milliseconds of a decode step by cause, and what that comes to."""
    step = report["plan"]["speed"]["decode"][-1]
    rows: list[list[Span]] = []
    first, last = elided(len(step["devices"]), MOST_DEVICES)
    for place in (*first, *last):
        one = step["devices"][place]
        cells = [f"{each / 10**6:.2f}" for each in times_of(step, one)]
        rows.append([*_device(report["devices"][one["device"]]), *((cell, "") for cell in cells)])
    batch = f"a step of {counted(step['rows'], 'sequence')}" if step["rows"] > 1 else "a step"
    return [
        Heading("Speed", f", ms of {batch} with a full cache"),
        Table(
            heads=[*_NAMES, *((name, "dim") for name in (*CAUSES, "together"))],
            sides="><" + ">" * (len(CAUSES) + 1),
            rows=rows,
            gap=len(first),
            hidden=len(step["devices"]) - len(rows),
        ),
        *(Text(text, "good", INDENT) for text in speed_lines(report)),
        Text(basis_of(report["speed"], len(step["devices"])), "dim", INDENT),
        BLANK,
    ]


def shares_of(report: dict[str, Any]) -> str:
    """Say what requested and achieved shares are shares of."""
    basis = _BASIS[report["share_basis"]]
    return basis + (_or_reserved(report) if report["share_basis"] == "budget" else "")


def _or_reserved(report: dict[str, Any]) -> str:
    request = report["plan"]["request"]
    words = ["reserved"] * ("reserve" in request) + ["left to what drafts"] * ("draft" in request)
    return ", ".join(["", *words[:-1]]) + f" or {words[-1]}" if words else ""


def exactness(report: dict[str, Any]) -> str:
    """Say which numbers are exact, of what the plan counts."""
    exact, estimated = report["exact"], report["estimated"]
    counted = " of what is planned" if "not_planned" in report["plan"]["model"] else ""
    told = "are estimates" if len(estimated) > 1 else "is an estimate"
    return f"{listed(exact)}{counted} are exact" + (f"; {listed(estimated)} {told}" if estimated else "")


def _memory(report: dict[str, Any]) -> list[Block]:
    """Return a row per device: its buckets, its budget, a bar of them and how full it is."""
    devices, buckets = report["devices"], buckets_of(report["plan"]["memory"])
    unit, scale = scale_for(max(d["budget_bytes"] for d in devices))
    first, last = elided(len(devices), MOST_DEVICES)
    rows: list[list[Span]] = []
    bars = []
    for i in (*first, *last):
        held = {bucket: sizes[i] for bucket, sizes in buckets.items()}
        budget = devices[i]["budget_bytes"]
        cells = [amount(size, scale) for size in (*held.values(), budget)]
        rows.append([*_device(devices[i]), *((text, "dim" if text == "0" else "") for text in cells)])
        bars.append(Bar(held, budget, percent(devices[i]["used_ppm"])))
    if len(devices) > 1:
        totals = [*map(sum, buckets.values()), sum(d["budget_bytes"] for d in devices)]
        rows.append([("", ""), ("together", "dim"), *((amount(size, scale), "dim") for size in totals)])
    return [
        Heading("Memory", f", {unit}"),
        Table(
            heads=[*_NAMES, *((name, "dim") for name in (*buckets, "budget"))],
            sides="><" + ">" * (len(buckets) + 1),
            rows=rows,
            bars=bars,
            gap=len(first),
            hidden=len(devices) - len(bars),
        ),
    ]


def _cuts(report: dict[str, Any]) -> list[Block]:
    """Return a row per device: the share that it was to get, the one that it got, and its slice of every split."""
    devices, splits = report["devices"], report["plan"]["splits"]
    first, last = elided(len(devices), MOST_DEVICES)
    labels = ["layers", "size", "unit", *(["replicas"] if any("replicas" in s for s in splits) else [])]
    names = [[("", ""), (label, "dim")] for label in labels] + [_device(devices[i]) for i in (*first, *last)]
    shares: list[list[Span]] = [
        [(title, "dim")] + [("", "")] * len(labels) + [(percent(devices[i][key]), "") for i in (*first, *last)]
        for title, key in (("requested", "requested_share_ppm"), ("achieved", "achieved_share_ppm"))
    ]
    heads, *rows = zip(*shares, *(_column(split, labels, (*first, *last)) for split in splits), strict=True)
    return [
        Heading("Splits", f", start:end; shares of {shares_of(report)}"),
        Table(
            heads=[*_NAMES, *heads],
            sides="><" + ">" * len(heads),
            rows=[[*name, *row] for name, row in zip(names, rows, strict=True)],
            gap=len(labels) + len(first),
            hidden=len(devices) - len(first) - len(last),
        ),
    ]


def _column(split: dict[str, Any], labels: Sequence[str], shown: Sequence[int]) -> list[Span]:
    """Return the column of one split: axis, its properties, then the slice of each device."""
    told = {"replicas": 1} | split | {"layers": shorten_layers(split.get("layers", ""), _LONGEST_CELL)}
    head = [(split["axis"], "head"), *((str(told[label]), "dim") for label in labels)]
    cuts = list(pairwise(split["bounds"]))
    return head + [(f"{a}:{b}", "") if b > a else ("-", "dim") for a, b in (cuts[i] for i in shown)]


def _device(device: dict[str, Any]) -> list[Span]:
    return [(str(device["device"]), "dim"), (shorten_name(device["name"], _LONGEST_NAME), "")]
