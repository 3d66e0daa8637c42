"""The links between the GPUs of a machine, and the thresholds measured on them, on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.core.sizes import format_bytes
from tpplan.render.text import BLANK, PLAIN_COLUMNS, line, table, wrapped

if TYPE_CHECKING:
    from tpplan.render.text import Line, Span

#: Links that do not work are told in words, so many of them.
_TOLD = 12
_COLUMNS = {
    "peer_fans_bytes": "peer slots, one sends",
    "peer_exchanges_bytes": "peer slots, several send",
    "peer_sums_bytes": "peer slots, sums",
    "peer_one_shot_bytes": "sums in one shot",
    "host_fans_bytes": "host slots, one sends",
    "host_exchanges_bytes": "host slots, several send",
    "host_sums_bytes": "host slots, sums",
    "copies_fans_bytes": "copy engines from, one sends",
    "copies_exchanges_bytes": "copy engines from, several send",
    "passed_on_bytes": "passed on from, spared in all",
    "gathers_bytes": "gathers by kernels, slice",
}


def survey(report: dict[str, Any], columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.exec.cuda.tuning_cache.SurveyReport`."""
    count = len(report["gpus"])
    lines = [line(f"Links between {count} GPU{'s' if count > 1 else ''}", "title")]
    if not report["links"]:
        lines += [line("one GPU has nobody to talk to")]
    else:
        lines += [*_links(report["links"], columns), BLANK]
    if report["thresholds"]:
        lines += [line("Thresholds", "head"), *_thresholds(report["thresholds"]), BLANK]
    lines += [line(part, "warn") for note in report["notes"] for part in wrapped(f"note: {note}", columns)]
    return lines if lines[-1] != BLANK else lines[:-1]


def _links(links: list[dict[str, Any]], columns: int) -> list[Line]:
    """Return a line for each mechanism, and one for each link that does not work."""
    lines: list[Line] = []
    bad = [link for link in links if link["verdict"] != "works"]
    for mechanism in dict.fromkeys(link["mechanism"] for link in links):
        mine = [link["verdict"] for link in links if link["mechanism"] == mechanism]
        works = mine.count("works")
        verdict = (f"works in all {works} directions", "good")
        if works < len(mine):
            verdict = (f"works in {works} of {len(mine)} directions", "bad")
        lines.append(((f"  {mechanism:<6}", ""), verdict))
    for link in bad[:_TOLD]:
        text = f"{link['mechanism']} {link['source']} to {link['target']}: {link['verdict']}, {link['reason']}"
        lines += [line(f"  {part}", "bad") for part in wrapped(text, columns - 2)]
    if len(bad) > _TOLD:
        lines.append(line(f"  and {len(bad) - _TOLD} more"))
    return lines


def _thresholds(thresholds: list[dict[str, Any]]) -> list[Line]:
    """Return a table with a line for each threshold, and a column for each number of GPUs."""
    rows: list[list[Span]] = [[("  message", "dim"), *((f"{one['devices']} GPUs", "dim") for one in thresholds)]]
    for key, words in _COLUMNS.items():
        cells = [("never" if key.startswith(("copies", "passed")) else "none") if not one["tuning"][key] else
                 format_bytes(one["tuning"][key]) for one in thresholds]  # fmt: skip
        rows.append([(f"  {words}", ""), *((cell, "") for cell in cells)])
    return table(rows, "<" + ">" * len(thresholds))
