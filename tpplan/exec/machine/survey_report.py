"""The report of ``tpplan devices --links``: which links work, and from which size on each path is faster."""

from __future__ import annotations

from attrs import frozen

from tpplan.exec.machine.link_report import Link
from tpplan.exec.tuning import Tuning


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
