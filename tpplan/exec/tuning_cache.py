"""Thresholds on disk: valid for the same GPUs, driver, kernels and version of tpplan."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

from attrs import frozen

from tpplan import __version__, codec
from tpplan.errors import TpplanError
from tpplan.exec.link_driver import TorchDriver
from tpplan.exec.survey_report import Thresholds
from tpplan.exec.tuning import DEFAULT
from tpplan.files import cache_folder, parse_json, read_text, save_text

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.exec.tuning import Tuning

#: Raised whenever what was measured before is worth nothing, as when operations go other ways.
_EDITION = 2

_LOG = logging.getLogger(__name__)


@frozen
class Origin:
    """Where thresholds come from; they are worth nothing anywhere else.

    Attributes:
        gpus: UUIDs, sorted.
        software: driver, libraries, kernels and settings.
        version: of tpplan, and of what is measured.
    """

    gpus: tuple[str, ...]
    software: str
    version: str

    @property
    def path(self) -> Path:
        """The file for these GPUs; what a later driver measures takes the place of what an earlier one did."""
        digest = hashlib.sha256("\n".join(self.gpus).encode()).hexdigest()
        return cache_folder() / f"thresholds-{digest[:16]}.json"


@frozen
class _Entry:
    """A file of the cache.

    Attributes:
        origin: of the thresholds.
        measured: for several numbers of devices, ascending.
    """

    origin: Origin
    measured: tuple[Thresholds, ...]


def origin() -> Origin | None:
    """Return where thresholds that are measured now come from; None, for no cache, if something cannot be told."""
    driver = TorchDriver()
    gpus, software = driver.gpus(), driver.software()
    told = software and gpus and all(gpus) and len(set(gpus)) == len(gpus)
    return Origin(tuple(sorted(gpus)), software, f"{__version__}, thresholds {_EDITION}") if told else None


def load() -> tuple[Thresholds, ...]:
    """Return what was measured on the GPUs that this process sees; nothing if it was not, or is damaged."""
    here = origin()
    if here is None:
        return ()
    try:
        entry = codec.structure(parse_json(read_text(here.path), "the thresholds"), _Entry, "the thresholds")
    except (TpplanError, RuntimeError) as error:  # RuntimeError: nobody knows the home directory
        _LOG.debug("no cached thresholds: %s", error)
        return ()
    return entry.measured if entry.origin == here else ()


def stored(devices: int) -> tuple[Tuning, str]:
    """Return the thresholds for a number of devices, and how they came about: measured with as many or a few more."""
    for one in load():
        if one.devices >= devices:
            return one.tuning, f"measured on {one.devices} GPUs of this machine"
    return DEFAULT, "not measured on this machine, tpplan devices --links does that"


def save(measured: tuple[Thresholds, ...]) -> str:
    """Keep thresholds for later processes; return why they cannot be kept, empty if they are."""
    here = origin()
    if here is None:
        return "the GPUs or their driver cannot be told from others"
    try:
        here.path.parent.mkdir(parents=True, exist_ok=True)
        save_text(codec.dumps(_Entry(here, measured)), here.path)
    except (OSError, TpplanError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return ""
