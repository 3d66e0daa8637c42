"""The cache of link reports: valid for the same GPUs in any order, software, boot and probe version."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from tpplan.exec.links import gpu_cache
from tpplan.exec.links.gpu_cache import Origin
from tpplan.exec.links.probe import PROBE_VERSION
from tpplan.exec.links.report import LinkReport, routes

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KIND = "links"


@frozen
class _Entry:
    """The content of a cache file.

    Attributes:
        origin: origin of the report.
        report: the report, with the GPU order of the probe.
    """

    origin: Origin
    report: LinkReport


def origin(gpus: tuple[str, ...], software: str) -> Origin | None:
    """Return the origin of current verdicts on these GPUs; None (no caching) if a part of it is unknown."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        return None
    return gpu_cache.origin(gpus, software, f"probe {PROBE_VERSION}, boot {boot_id}") if boot_id else None


def load(origin: Origin, gpus: tuple[str, ...]) -> LinkReport | None:
    """Return the cached report of an origin, reordered to ``gpus``; None if it is missing or damaged."""
    entry = gpu_cache.load(_KIND, origin, _Entry)
    if entry is None:
        return None
    report = entry.report
    whole = tuple(link.route for link in report.links) == routes(len(gpus)) and sorted(report.gpus) == sorted(gpus)
    return report.reordered(gpus) if whole else None


def save(origin: Origin, report: LinkReport) -> str:
    """Save a report for later processes; return the reason for a failure, empty on success."""
    return gpu_cache.save(_KIND, _Entry(origin, report))
