"""The cache of thresholds: valid for the same GPUs, driver, kernels and version of tpplan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from tpplan import __version__
from tpplan.exec.cuda.probe_driver import TorchDriver
from tpplan.exec.machine import gpu_cache
from tpplan.exec.machine.gpu_cache import Origin
from tpplan.exec.machine.survey_report import Thresholds
from tpplan.exec.tuning import default

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.exec.tuning import Tuning

#: Increase it when older measurements become invalid, such as when operations change their routes.
_EDITION = 6

_KIND = "thresholds"


@frozen
class _Entry:
    """The content of a cache file.

    Attributes:
        origin: origin of the thresholds.
        measured: thresholds by number of devices, ascending.
    """

    origin: Origin
    measured: tuple[Thresholds, ...]


def stored(devices: int, transport: str, gpus: Sequence[str] = ()) -> tuple[Tuning, str]:
    """Return the thresholds of a transport for a number of devices, and where they come from, in words.

    They are those measured with this number of devices, else with the next larger one, else the defaults.

    Args:
        devices: number of devices.
        transport: the transport.
        gpus: UUIDs of the devices' GPUs, if they belong to several processes.
    """
    here = _origin(gpus)
    entry = gpu_cache.load(_KIND, here, _Entry) if here else None
    for one in entry.measured if entry else ():
        if one.devices >= devices and transport in one.transports:
            return one.tuning, f"measured on {one.devices} GPUs of this machine"
    return default(devices), "not measured on this machine, tpplan devices --links does that"


def save(measured: tuple[Thresholds, ...]) -> str:
    """Save thresholds for later processes; return the reason for a failure, empty on success."""
    here = _origin()
    if here is None:
        return "the GPUs or their driver cannot be told from others"
    return gpu_cache.save(_KIND, _Entry(here, measured))


def _origin(gpus: Sequence[str] = ()) -> Origin | None:
    """Return the origin of current thresholds; None (no caching) if a part of it is unknown."""
    driver = TorchDriver()
    meant = gpu_cache.gpus_meant(driver.gpus(), gpus)
    return gpu_cache.origin(meant, driver.software(), f"{__version__}, thresholds {_EDITION}")
