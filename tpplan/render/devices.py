"""The GPUs of a machine, on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.core.sizes import format_bytes
from tpplan.render.text import BLANK, PLAIN_COLUMNS, line, shorten_name, table

if TYPE_CHECKING:
    from tpplan.render.text import Line, Span

_LONGEST_NAME = 32
_MOST_LINKS = 28


def devices(report: dict[str, Any], _columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out a :class:`~tpplan.hardware.probe.report.DeviceReport`."""
    count = len(report["devices"])
    lines = [line(f"{count} GPU{'s' if count > 1 else ''}, {report['driver']}", "title"), *_gpus(report), BLANK]
    if report["links"]:
        lines += [line("Links", "head"), *_links(report["links"]), BLANK]
    if report["processes"]:
        lines += [line("Other programs on these GPUs", "head"), *_processes(report["processes"]), BLANK]
    lines += [line(f"note: {note}", "warn") for note in report["notes"]]
    return lines if lines[-1] != BLANK else lines[:-1]


def _gpus(report: dict[str, Any]) -> list[Line]:
    titles = ("", "", "memory", "used", "budget", "overhead", "bandwidth", "capability")
    rows: list[list[Span]] = [[(title, "dim") for title in titles]]
    for i, gpu in enumerate(report["devices"]):
        speed = gpu["bandwidth_bytes_per_second"]
        sizes = [format_bytes(gpu[f"{key}_bytes"]) for key in ("memory", "used", "budget", "overhead")]
        cells = [*sizes, f"{speed / 10**9:.0f} GB/s" if speed else "unknown", gpu["capability"] or "-"]
        rows.append([(str(i), "dim"), (shorten_name(gpu["name"], _LONGEST_NAME), ""), *((cell, "") for cell in cells)])
    return [*table(rows, "><>>>>>>"), *_measured(report["devices"])]


def _measured(gpus: list[dict[str, Any]]) -> list[Line]:
    """Return a table of what was measured, if anything was."""
    if not any("read_bytes_per_second" in gpu for gpu in gpus):
        return []
    titles = ("", "", "reads", "copies", "between kernels", "products")
    rows: list[list[Span]] = [[(title, "dim") for title in titles]]
    for i, gpu in enumerate(gpus):
        rates = [f"{gpu.get(f'{key}_bytes_per_second', 0) / 10**9:.0f} GB/s" for key in ("read", "copy")]
        products = f"{gpu.get('matrix_flops_per_second', 0) / 10**12:.0f} TFLOP/s"
        cells = [*rates, f"{gpu.get('boundary_ns', 0) / 1000:.2f} µs", products]
        rows.append([(str(i), "dim"), (shorten_name(gpu["name"], _LONGEST_NAME), ""), *((cell, "") for cell in cells)])
    return [BLANK, line("Measured", "head"), *table(rows, "><>>>>")]


def _links(links: list[dict[str, Any]]) -> list[Line]:
    """Return a line per pair, or per kind of link where there are very many pairs."""
    if len(links) <= _MOST_LINKS:
        return [line(f"  {one['first']}–{one['second']}  {_link(one)}") for one in links]
    counts: dict[str, int] = {}
    for one in links:
        counts[_link(one)] = counts.get(_link(one), 0) + 1
    return [line(f"  {count} pairs  {words}") for words, count in counts.items()]


def _link(link: dict[str, Any]) -> str:
    path = link.get("path", "unknown").replace("_", " ")
    through = "" if path == "unknown" else f" through {path}"
    access = link.get("peer_access", "unknown")
    speed = ""
    if link.get("latency_ns"):
        speed = f", sums {link['latency_ns'] / 1000:.1f} µs and {link['bytes_per_second'] / 10**9:.0f} GB/s"
    kind = "unknown link" if link["kind"] == "unknown" else link["kind"]
    return f"{kind}{through}, peer access {access}{speed}"


def _processes(processes: list[dict[str, Any]]) -> list[Line]:
    rows: list[list[Span]] = []
    for one in processes:
        used = format_bytes(one["used_bytes"]) if one["used_bytes"] else "unknown"
        where = str(one["device"]) if one["device"] >= 0 else "?"
        rows.append([("  device " + where, "dim"), (used, ""), (str(one["pid"]), "dim"), (one["name"], "")])
    return table(rows, "<>><")
