"""What the test of a compiled plan has checked, on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.core.sizes import format_bytes
from tpplan.render.text import BLANK, PLAIN_COLUMNS, line, table, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.render.text import Line, Span

_KEYS = ("transport", "operation")

#: What to add to a transport; what goes aside says so itself.
_SCHEDULES = {"plain": "", "aside": "", "captured": ", in a graph", "adversarial": ", in the worst order"}

#: Titles of columns that are of all transports.
_OTHERS = {"aside": "aside", "in a graph": "captured", "worst order": "adversarial"}

#: So many faults leave the rest of a screen to the table.
_MOST_FAULTS = 6


def selftest(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.reports.selftest.SelftestReport`."""
    virtual = "virtual " if report["backend"] == "cpu" else ""
    count = f"{report['devices']} {virtual}device{'s' if report['devices'] > 1 else ''}"
    lines = [line(f"{report['model']} on {count}", "title")]
    lines += [line(text, "dim") for text in wrapped(_rows(report), columns)]
    lines += [BLANK, *_operations(report)]
    lines += [line(part, "dim") for text in _remarks(report) for part in wrapped(text, columns)]
    lines.append(BLANK)
    for told, style in _troubles(report):
        parts = wrapped(told, columns - 2)
        lines += [line(f"  {text}" if i else text, "" if i else style) for i, text in enumerate(parts)]
    if report["wrong"] > min(len(report["faults"]), _MOST_FAULTS):
        lines.append(line("and more", "bad"))
    checked = f"{report['checks']} checks, {format_bytes(report['compared_bytes'])} compared: "
    gap = [BLANK] if report["faults"] or report["refused"] else []
    return [*lines, *gap, ((checked, ""), _verdict(report))]


def _verdict(report: dict[str, Any]) -> Span:
    failed = [one["transport"] for one in report["refused"] if not one["unverified"]]
    wrong = [f"{report['wrong']} checks failed"] if report["wrong"] else []
    bad = ", ".join((*wrong, *(f"{transport} ended with an error" for transport in failed)))
    return (bad, "bad") if bad else ("every byte is right", "good")


def _troubles(report: dict[str, Any]) -> Iterator[Span]:
    """Yield what was wrong, and what was refused."""
    for fault in report["faults"][:_MOST_FAULTS]:
        where = f"{fault['operation']} on {fault['axis']}, by {fault['transport']}{_SCHEDULES[fault['schedule']]}"
        rows = f"{fault['rows']} row{'' if fault['rows'] == 1 else 's'}"
        yield (
            f"{where}: {rows} of {fault['elements']}, dim {fault['dim']}, {fault['operands']}: {fault['message']}",
            "bad",
        )
    for one in report["refused"]:
        what = "was not tested" if one["unverified"] else "ended with an error"
        yield f"{one['transport']} {what}: {' '.join(one['message'].split())}", "warn" if one["unverified"] else "bad"


def _of(report: dict[str, Any], schedule: str) -> list[dict[str, Any]]:
    return [one for one in report["tested"] if one["schedule"] == schedule]


def _rows(report: dict[str, Any]) -> str:
    """Say how many rows of the plan's width every operation on an axis had, by every transport."""
    most: dict[str, int] = {}
    for axis in (axis for one in _of(report, "plain") for axis in one["axes"]):
        rows = max(axis["rows"], default=0)
        most[axis["axis"]] = min(rows, most.get(axis["axis"], rows))
    listed = ", ".join(f"{rows} on {axis}" for axis, rows in most.items())
    return f"most rows that every operation had at full width: {listed}; the plan has room for {report['max_rows']}"


def _operations(report: dict[str, Any]) -> list[Line]:
    """Return a row for each operation, with the checks by each transport and which ways it went."""
    transports, operations = (tuple(dict.fromkeys(one[key] for one in report["tested"])) for key in _KEYS)
    others = {title: tested for title, schedule in _OTHERS.items() if (tested := _of(report, schedule))}
    rows: list[list[Span]] = [[(title, "dim") for title in ("checks", *transports, *others, "ways")]]
    for operation in operations:
        mine = [one for one in _of(report, "plain") if one["operation"] == operation]
        by = [[one for one in mine if one["transport"] == transport] for transport in transports]
        by += [[one for one in tested if one["operation"] == operation] for tested in others.values()]
        ways = dict.fromkeys(way for one in mine for axis in one["axes"] for way in axis["ways"])
        rows.append([(operation, ""), *map(_checks, by), (", ".join(ways), "")])
    return table(rows, "<" + ">" * (len(transports) + len(others)) + "<")


def _remarks(report: dict[str, Any]) -> Iterator[str]:
    """Say what was tried otherwise, and which ways nothing went."""
    yield "aside: some sizes, as they go beside other work: what no slot takes goes by copies"
    if _of(report, "captured"):
        yield "in a graph: captured, some sizes that go each way and some aside, and replayed on other contents"
    yield "worst order: on virtual devices, which run commands as late and as mixed as programs allow"
    axes = [axis for one in _of(report, "plain") for axis in one["axes"]]
    went = {way for axis in axes for way in axis["ways"]}
    skipped = dict.fromkeys(way for axis in axes for way in axis["skipped"])
    if skipped:
        listed = ", ".join(f"{way} on some axes" if way in went else way for way in skipped)
        yield f"not run, as only tensors too large for a test go so: {listed}"


def _checks(tested: list[dict[str, Any]]) -> Span:
    checks, wrong = (sum(one[key] for one in tested) for key in ("checks", "wrong"))
    return (f"{wrong} of {checks} wrong", "bad") if wrong else (str(checks), "")
