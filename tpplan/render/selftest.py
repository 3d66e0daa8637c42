"""What the test of a compiled plan has checked, on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.render.text import BLANK, PLAIN_COLUMNS, line, table, wrapped
from tpplan.sizes import format_bytes

if TYPE_CHECKING:
    from tpplan.render.text import Line, Span

#: So many faults leave the rest of a screen to the table.
_MOST_FAULTS = 6


def selftest(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.selftest_report.SelftestReport`."""
    virtual = "virtual " if report["backend"] == "cpu" else ""
    count = f"{report['devices']} {virtual}device{'s' if report['devices'] > 1 else ''}"
    axes = dict.fromkeys(axis for one in report["tested"] for axis in one["axes"])
    about = f"0 to {report['max_rows']} rows; on {', '.join(axes)}"
    lines = [line(f"{report['model']} on {count}", "title")]
    lines += [line(text, "dim") for text in wrapped(about, columns)]
    lines += [BLANK, *_operations(report), *_skipped(report, columns), BLANK]
    for fault in report["faults"][:_MOST_FAULTS]:
        where = f"{fault['operation']} on {fault['axis']}, by {fault['transport']}, {fault['schedule']}"
        rows = f"{fault['rows']} row{'' if fault['rows'] == 1 else 's'}"
        what = f"{rows} of {fault['elements']}, {fault['operands']}: {fault['message']}"
        told = wrapped(f"{where}: {what}", columns - 2)
        lines += [line(f"  {text}" if i else text, "" if i else "bad") for i, text in enumerate(told)]
    if report["wrong"] > min(len(report["faults"]), _MOST_FAULTS):
        lines.append(line("and more", "bad"))
    checked = f"{report['checks']} checks, {format_bytes(report['compared_bytes'])} compared: "
    verdict = ("every byte is right", "good") if report["ok"] else (f"{report['wrong']} checks failed", "bad")
    return [*lines, *([BLANK] if report["faults"] else []), ((checked, ""), verdict)]


def _operations(report: dict[str, Any]) -> list[Line]:
    """Return a row for each operation, with the checks by each transport and which ways it went."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {
        (one["operation"], one["transport"], one["schedule"]): one for one in report["tested"]
    }
    operations, transports, schedules = (tuple(dict.fromkeys(keys)) for keys in zip(*found, strict=True))
    rows: list[list[Span]] = [[(title, "dim") for title in ("checks", *transports, "in the worst order", "ways")]]
    for operation in operations:
        plain = [found[operation, transport, schedules[0]] for transport in transports]
        worst = [found[operation, transport, schedules[1]] for transport in transports]
        ways = dict.fromkeys(way for one in plain for way in one["ways"])
        rows.append([(operation, ""), *map(_checks, ([one] for one in plain)), _checks(worst), (", ".join(ways), "")])
    return table(rows, "<" + ">" * len(transports) + "><")


def _skipped(report: dict[str, Any], columns: int) -> list[Line]:
    """Say which ways nothing went."""
    went = {way for one in report["tested"] for way in one["ways"]}
    skipped = dict.fromkeys(way for one in report["tested"] for way in one["skipped"] if way not in went)
    text = f"not run, as only tensors too large for a test go so: {', '.join(skipped)}"
    return [line(part, "dim") for part in wrapped(text, columns)] if skipped else []


def _checks(tested: list[dict[str, Any]]) -> Span:
    checks, wrong = (sum(one[key] for one in tested) for key in ("checks", "wrong"))
    return (f"{wrong} of {checks} wrong", "bad") if wrong else (str(checks), "")
