"""Link reports on disk: valid for the same GPUs, driver, boot and probe, whatever the order of the GPUs."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from attrs import frozen

from tpplan import codec
from tpplan.errors import TpplanError
from tpplan.exec.link_probe import PROBE_VERSION
from tpplan.exec.link_report import LinkReport, routes
from tpplan.files import cache_folder, parse_json, read_text, save_text

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOG = logging.getLogger(__name__)


@frozen
class Origin:
    """Where verdicts come from; they are worth nothing anywhere else.

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

    @property
    def path(self) -> Path:
        """The file for these GPUs; a later boot or driver takes the place of an earlier one."""
        digest = hashlib.sha256("\n".join(self.gpus).encode()).hexdigest()
        return cache_folder() / f"links-{digest[:16]}.json"


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
    told = boot_id and software and all(gpus) and len(set(gpus)) == len(gpus)
    return Origin(tuple(sorted(gpus)), software, boot_id, PROBE_VERSION) if told else None


def load(origin: Origin, gpus: tuple[str, ...]) -> LinkReport | None:
    """Return the report of the same origin with the indices of ``gpus``; None if there is none, or it is damaged."""
    try:
        entry = codec.structure(parse_json(read_text(origin.path), "the link cache"), _Entry, "the link cache")
    except (TpplanError, RuntimeError) as error:  # RuntimeError: nobody knows the home directory
        _LOG.debug("no cached link report: %s", error)
        return None
    report = entry.report
    whole = tuple(link.route for link in report.links) == routes(len(gpus)) and sorted(report.gpus) == sorted(gpus)
    return report.reordered(gpus) if whole and entry.origin == origin else None


def save(origin: Origin, report: LinkReport) -> None:
    """Keep a report for later processes, if the cache can be written."""
    try:
        origin.path.parent.mkdir(parents=True, exist_ok=True)
        save_text(codec.dumps(_Entry(origin, report)), origin.path)
    except (OSError, TpplanError, RuntimeError) as error:
        _LOG.debug("the link report is not cached: %s", error)
