"""How long a plan's operations take, in a table for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.core.sizes import counted
from tpplan.render.text import BLANK, PLAIN_COLUMNS, line, table, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.render.text import Line, Span

#: Rounds from which a tenth of them is at least one; of fewer, spreads are the least and the most.
ROUNDS_OF_TENTHS = 10

_OURS, _TORCH = "tpplan", "torch"
_HOST = -1
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def bench(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.reports.bench.BenchReport`; one that has more operations only has more lines."""
    names = report["devices"]
    where = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    if report["backend"] == "cpu":
        where = f"{counted(len(names), 'virtual device')} of this machine's CPU"
    lines = [line(f"{report['model']} on {where}", "title")]
    lines += [line(part, "dim") for text in _conventions(report) for part in wrapped(text, columns)]
    lines += [line(part, "warn") for note in report["notes"] for part in wrapped(f"note: {note}", columns)]
    told: set[str] = set()
    for operation in dict.fromkeys(one["operation"] for one in report["measured"]):
        mine = [one for one in report["measured"] if one["operation"] == operation]
        lines += [BLANK, line(operation, "head"), *_sizes(mine, _spread(report)[0], limited=bool(report["limits"]))]
        lines += [line(part, "warn") for text in _failures(mine, told) for part in wrapped(text, columns)]
    return lines


def _conventions(report: dict[str, Any]) -> Iterator[str]:
    """Say what was measured, and how."""
    slices = "+".join(map(str, report["slice_columns"]))
    yield (
        f"{', '.join(report['software'])}; transport {report['transport']}; rows of {report['columns']} "
        f"in {report['dtype']}, slices {slices}"
    )
    yield (
        f"{_OURS}: µs for one operation, the median of {report['rounds']} rounds, in each of which all implementations "
        f"take turns; {': '.join(_spread(report))}"
    )
    yield f"way: how {_OURS} moves the bytes, by the names of docs/executor.md, “From an operation to a program”"
    first = [one for one in report["measured"] if one["operation"] == report["measured"][0]["operation"]]
    if any(timed["by"] == _TORCH for one in first for timed in one.get("timed", ())):  # not between processes
        yield (
            f"{_TORCH}: the same operation by Tensor.copy_ from memory to memory; sums are added up in float32 on "
            f"every device, then rounded to {report['dtype']}"
        )
    if report["backend"] == "cuda":
        yield (
            "calls: operations are called one after the other; "
            f"graph: {report['in_a_graph']} are in one CUDA graph, as many as in a decoding step"
        )
    yield f"in brackets: an implementation's time divided by {_OURS}'s; above 1, {_OURS} is faster"
    yield (
        "payload: what every device holds in the end, of scatter and gather all slices together; "
        f"moved: what {_OURS} moves from one memory to another, all devices together"
    )
    if even := report.get("even_columns"):
        yield f"even: {_OURS}, too, with slices {'+'.join(map(str, even))}, which are as many bytes together"
    if report["limits"]:
        rates = _rates(report["limits"])
        yield f"limit: the least time that the measured rates allow, as a share of {_OURS}'s; {rates}"


def _spread(report: dict[str, Any]) -> tuple[str, str]:
    """Return the heading of what times spread over, and what its numbers are."""
    if report["rounds"] < ROUNDS_OF_TENTHS:
        return "least–most", "the fastest and the slowest round"
    return "10 %–90 %", "a tenth of the rounds was faster than the first number, a tenth slower than the second"


def _rates(limits: list[dict[str, Any]]) -> str:
    """Return the rates of copies between devices and to and from the host, the slowest and the fastest."""
    kinds = {
        "between devices": [one for one in limits if _HOST not in {one["source"], one["target"]}],
        "to the host": [one for one in limits if one["target"] == _HOST],
        "from the host": [one for one in limits if one["source"] == _HOST],
    }
    told = []
    for kind, found in kinds.items():
        rates = sorted({f"{one['bytes_per_second'] / 10**9:.0f}" for one in found}, key=int)
        if rates:
            told.append(f"{'–'.join(dict.fromkeys((rates[0], rates[-1])))} GB/s {kind}")
    return ", ".join(told) + " in each direction"


def _sizes(measured: list[dict[str, Any]], spread: str, *, limited: bool) -> list[Line]:
    """Return a row for each size, and another for graphs; who has no time at all has no column.

    Args:
        measured: an operation of all sizes.
        spread: heading of what times spread over.
        limited: whether limits were measured.
    """
    timed_once = (t["by"] for one in measured for t in one.get("timed", ()) if t["by"] != _OURS and t.get("time"))
    named = [t["by"] for one in measured for t in one.get("timed", ())]
    peers = sorted({*timed_once}, key=named.index)
    titles = ["payload", "moved", "way", "", _OURS, spread, *(["limit"] if limited else []), *peers]
    rows: list[list[Span]] = [[(title, "dim") for title in titles]]
    for one in measured:
        timed = one.get("timed", ())
        for graph in sorted({t["graph"] for t in timed}) or [False]:
            by = {t["by"]: t.get("time") for t in timed if t["graph"] == graph}
            rows.append([*_labels(one, graph=graph), *_ours(by.get(_OURS), one.get("least_ns"), limited=limited)])
            rows[-1] += [_peer(by, peer) for peer in peers]
    return table(rows, ">><<>>" + ">" * limited + ">" * len(peers))


def _labels(one: dict[str, Any], *, graph: bool) -> list[Span]:
    if graph:
        fewer = f" of {one['in_a_graph']}" if "in_a_graph" in one else ""
        return [("", ""), ("", ""), (one.get("graph_way", ""), ""), (f"graph{fewer}", "dim")]
    return [(_size(one["payload_bytes"]), ""), (_size(one["link_bytes"]), ""), (one["way"], ""), ("calls", "dim")]


def _ours(time: dict[str, int] | None, least_ns: int | None, *, limited: bool) -> list[Span]:
    share = f"{100 * least_ns / time['median_ns']:.0f} %" if time and least_ns else ""
    limit: list[Span] = [(share, "")] if limited else []
    if time is None:
        return [("failed", "bad"), ("", ""), *limit]
    return [(_micros(time["median_ns"]), ""), (f"{_micros(time['low_ns'])}–{_micros(time['high_ns'])}", "dim"), *limit]


def _peer(by: dict[str, dict[str, int] | None], peer: str) -> Span:
    """Return the time of somebody else, and how many times tpplan's it is."""
    ours, theirs = by.get(_OURS), by.get(peer)
    if peer not in by:
        return "", ""
    if theirs is None:
        return "failed", "warn"
    ratio = f" ({theirs['median_ns'] / ours['median_ns']:.2f})" if ours and ours["median_ns"] else ""
    return _micros(theirs["median_ns"]) + ratio, ""


def _failures(measured: list[dict[str, Any]], told: set[str]) -> Iterator[str]:
    """Say what failed, each reason once; who failed for one reason everywhere is not told ``told`` again.

    Args:
        measured: an operation of all sizes.
        told: what was said of operations before, to which this is added.
    """
    reasons: dict[str, list[str]] = {}
    for one in measured:
        if one.get("failed"):
            reasons.setdefault(one["failed"], []).append(_size(one["payload_bytes"]))
    attempts = [(t, one["payload_bytes"]) for one in measured for t in one.get("timed", ())]
    for who in dict.fromkeys(t["by"] for t, _ in attempts):
        mine = [(t, size) for t, size in attempts if t["by"] == who]
        causes = {t.get("failed", "") for t, _ in mine}
        if len(causes) == 1 and len(mine) > 1:
            (reason,) = causes
            if reason and f"{who}: {reason}" not in told:
                told.add(f"{who}: {reason}")
                reasons.setdefault(reason, []).append(who)
            continue
        for timed, size in mine:
            if timed.get("failed"):
                where = f"{who}, {'graph' if timed['graph'] else 'calls'}, {_size(size)}"
                reasons.setdefault(timed["failed"], []).append(where)
    for reason, places in reasons.items():
        yield f"  {'; '.join(places)}: {reason}"


def _micros(nanoseconds: int) -> str:
    """Write a time in µs, with a decimal where it is short."""
    micros = nanoseconds / 1e3
    return f"{micros:.1f}" if micros < 1e2 else f"{micros:.0f}"  # noqa: PLR2004


def _size(size: int) -> str:
    """Write bytes in a few characters: ``16 KiB``, ``1.5 MiB``."""
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if size >= scale), (1, "B"))
    return f"{size / scale:.4g} {unit}"
