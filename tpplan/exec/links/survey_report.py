"""What ``tpplan devices --links`` tells: which links work, and from which size on which way is faster."""

from __future__ import annotations

from attrs import frozen

from tpplan.exec.links.report import Link
from tpplan.exec.links.tuning import Tuning


@frozen(kw_only=True)
class Thresholds:
    """What was measured on some GPUs.

    Attributes:
        devices: how many took part, the first ones.
        transports: that were measured; thresholds of others are defaults.
        tuning: the thresholds.
    """

    devices: int
    transports: tuple[str, ...]
    tuning: Tuning


@frozen(kw_only=True)
class Timing:
    """How long an operation with messages of one size takes by one way.

    Attributes:
        devices: how many took part.
        transport: ``peer`` or ``host``.
        kind: ``fans``, ``exchanges`` or ``sums``.
        message_bytes: from one device to one other.
        way: ``slots``, ``straight``, ``copies``, ``passed on``, or ``frames``.
        time_ns: one operation by it.
    """

    devices: int
    transport: str
    kind: str
    message_bytes: int
    way: str
    time_ns: int


@frozen(kw_only=True)
class SurveyReport:
    """The links between the GPUs here, and the thresholds.

    Attributes:
        gpus: UUIDs, in the order that indices refer to.
        links: the verdict on every mechanism from each GPU to each other.
        thresholds: for several numbers of GPUs, ascending.
        timings: that they were chosen by.
        notes: what could not be measured or kept, and why.
    """

    gpus: tuple[str, ...]
    links: tuple[Link, ...]
    thresholds: tuple[Thresholds, ...]
    timings: tuple[Timing, ...]
    notes: tuple[str, ...]
