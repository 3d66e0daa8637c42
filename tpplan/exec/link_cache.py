"""Link reports on disk: valid for the same GPUs, driver, boot and probe, whatever the order of the GPUs."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from tpplan.exec import gpu_cache
from tpplan.exec.link_probe import PROBE_VERSION
from tpplan.exec.link_report import LinkReport, routes

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KIND = "links"


@frozen
class Origin:
    """Where verdicts come from; they are worth nothing anywhere else, and later ones take their place.

    Attributes:
        gpus: UUIDs, sorted.
        software: driver, libraries and settings.
        boot_id: of the running system.
        probe_version: of tpplan's probe.
    """

    gpus: tuple[str, ...]
    software: str
    boot_id: str
    probe_version: int


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
    told = boot_id and software and gpu_cache.are_told_apart(gpus)
    return Origin(tuple(sorted(gpus)), software, boot_id, PROBE_VERSION) if told else None


def load(origin: Origin, gpus: tuple[str, ...]) -> LinkReport | None:
    """Return the report of the same origin with the indices of ``gpus``; None if there is none, or it is damaged."""
    entry = gpu_cache.read(_KIND, origin.gpus, _Entry, "the link cache")
    if entry is None:
        return None
    report = entry.report
    whole = tuple(link.route for link in report.links) == routes(len(gpus)) and sorted(report.gpus) == sorted(gpus)
    return report.reordered(gpus) if whole and entry.origin == origin else None


def save(origin: Origin, report: LinkReport) -> None:
    """Keep a report for later processes, if the cache can be written."""
    gpu_cache.write(_KIND, origin.gpus, _Entry(origin, report))
