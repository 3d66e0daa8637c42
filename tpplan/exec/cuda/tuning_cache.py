"""Measured thresholds: their report, and a cache, valid for the same GPUs, driver, kernels and version of tpplan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from tpplan import __version__
from tpplan.exec.cuda.probe_driver import TorchDriver
from tpplan.exec.machine import gpu_cache
from tpplan.exec.machine.gpu_cache import Origin
from tpplan.exec.machine.link_report import Link
from tpplan.exec.tuning import Tuning, default
from tpplan.files.codec import document

if TYPE_CHECKING:
    from collections.abc import Sequence


@frozen(kw_only=True)
class Thresholds:
    """The thresholds measured on some GPUs.

    Attributes:
        devices: number of GPUs that took part, the first ones.
        transports: transports that were measured; thresholds of others are defaults.
        tuning: the thresholds.
    """

    devices: int
    transports: tuple[str, ...]
    tuning: Tuning


@frozen(kw_only=True)
class Timing:
    """The time of an operation with messages of one size by one path.

    Attributes:
        devices: number of GPUs that took part.
        transport: ``peer`` or ``host``.
        kind: ``fans``, ``exchanges`` or ``sums``.
        message_bytes: bytes from one device to one other.
        way: the path: ``slots``, ``straight``, ``copies``, ``passed on``, or ``frames``.
        time_ns: nanoseconds of one operation.
    """

    devices: int
    transport: str
    kind: str
    message_bytes: int
    way: str
    time_ns: int


@document("survey-report")
@frozen(kw_only=True)
class SurveyReport:
    """The links between this machine's GPUs, and the thresholds.

    Attributes:
        gpus: UUIDs of the GPUs, by index.
        links: the verdict on every mechanism from each GPU to each other.
        thresholds: thresholds for several numbers of GPUs, ascending.
        timings: the timings that the thresholds were chosen by.
        notes: what could not be measured or stored, and why.
    """

    gpus: tuple[str, ...]
    links: tuple[Link, ...]
    thresholds: tuple[Thresholds, ...]
    timings: tuple[Timing, ...]
    notes: tuple[str, ...]


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
