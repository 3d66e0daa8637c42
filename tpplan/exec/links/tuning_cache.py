"""Thresholds on disk: valid for the same GPUs, driver, kernels and version of tpplan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from tpplan import __version__
from tpplan.exec.links import gpu_cache
from tpplan.exec.links.driver import TorchDriver
from tpplan.exec.links.gpu_cache import Origin
from tpplan.exec.links.survey_report import Thresholds
from tpplan.exec.links.tuning import default

if TYPE_CHECKING:
    from tpplan.exec.links.tuning import Tuning

#: Raised whenever what was measured before is worth nothing, as when operations go other ways.
_EDITION = 6

_KIND = "thresholds"


@frozen
class _Entry:
    """A file of the cache.

    Attributes:
        origin: of the thresholds.
        measured: for several numbers of devices, ascending.
    """

    origin: Origin
    measured: tuple[Thresholds, ...]


def stored(devices: int, transport: str) -> tuple[Tuning, str]:
    """Return the thresholds of a transport for a number of devices, and how they came about.

    They were measured with as many devices or a few more; those that were not are defaults for as many.
    """
    here = _origin()
    entry = gpu_cache.load(_KIND, here, _Entry) if here else None
    for one in entry.measured if entry else ():
        if one.devices >= devices and transport in one.transports:
            return one.tuning, f"measured on {one.devices} GPUs of this machine"
    return default(devices), "not measured on this machine, tpplan devices --links does that"


def save(measured: tuple[Thresholds, ...]) -> str:
    """Keep thresholds for later processes; return why they cannot be kept, empty if they are."""
    here = _origin()
    if here is None:
        return "the GPUs or their driver cannot be told from others"
    return gpu_cache.save(_KIND, _Entry(here, measured))


def _origin() -> Origin | None:
    """Return where thresholds that are measured now come from; None, for no cache, if something cannot be told."""
    driver = TorchDriver()
    return gpu_cache.origin(driver.gpus(), driver.software(), f"{__version__}, thresholds {_EDITION}")
