"""What ``tpplan devices --links`` tells: which links work, and from which size on which way is faster."""

from __future__ import annotations

from attrs import frozen

from tpplan.exec.link_report import Link
from tpplan.exec.tuning import Tuning


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
class SurveyReport:
    """The links between the GPUs here, and the thresholds.

    Attributes:
        gpus: UUIDs, in the order that indices refer to.
        links: the verdict on every mechanism from each GPU to each other.
        thresholds: for several numbers of GPUs, ascending.
        notes: what could not be measured or kept, and why.
    """

    gpus: tuple[str, ...]
    links: tuple[Link, ...]
    thresholds: tuple[Thresholds, ...]
    notes: tuple[str, ...]
