"""Thresholds on disk: valid for the same GPUs, driver, kernels and version of tpplan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from tpplan import __version__
from tpplan.exec import gpu_cache
from tpplan.exec.link_driver import TorchDriver
from tpplan.exec.survey_report import Thresholds
from tpplan.exec.tuning import DEFAULT

if TYPE_CHECKING:
    from tpplan.exec.tuning import Tuning

#: Raised whenever what was measured before is worth nothing, as when operations go other ways.
_EDITION = 2

_KIND = "thresholds"


@frozen
class Origin:
    """Where thresholds come from; they are worth nothing anywhere else, and later ones take their place.

    Attributes:
        gpus: UUIDs, sorted.
        software: driver, libraries, kernels and settings.
        version: of tpplan, and of what is measured.
    """

    gpus: tuple[str, ...]
    software: str
    version: str


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
    told = software and gpus and gpu_cache.are_told_apart(gpus)
    return Origin(tuple(sorted(gpus)), software, f"{__version__}, thresholds {_EDITION}") if told else None


def load() -> tuple[Thresholds, ...]:
    """Return what was measured on the GPUs that this process sees; nothing if it was not, or is damaged."""
    here = origin()
    if here is None:
        return ()
    entry = gpu_cache.read(_KIND, here.gpus, _Entry, "the thresholds")
    return entry.measured if entry and entry.origin == here else ()


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
    return gpu_cache.write(_KIND, here.gpus, _Entry(here, measured))
