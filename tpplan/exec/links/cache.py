"""Link reports on disk: valid for the same GPUs, driver, boot and probe, whatever the order of the GPUs."""

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
    """A file of the cache.

    Attributes:
        origin: of the report.
        report: as it was made.
    """

    origin: Origin
    report: LinkReport


def origin(gpus: tuple[str, ...], software: str) -> Origin | None:
    """Return where verdicts on these GPUs come from now; None, for no cache, if something cannot be told."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        return None
    return gpu_cache.origin(gpus, software, f"probe {PROBE_VERSION}, boot {boot_id}") if boot_id else None


def load(origin: Origin, gpus: tuple[str, ...]) -> LinkReport | None:
    """Return the report of the same origin with the indices of ``gpus``; None if there is none, or it is damaged."""
    entry = gpu_cache.load(_KIND, origin, _Entry)
    if entry is None:
        return None
    report = entry.report
    whole = tuple(link.route for link in report.links) == routes(len(gpus)) and sorted(report.gpus) == sorted(gpus)
    return report.reordered(gpus) if whole else None


def save(origin: Origin, report: LinkReport) -> str:
    """Keep a report for later processes; return why it cannot be kept, empty if it is."""
    return gpu_cache.save(_KIND, _Entry(origin, report))
