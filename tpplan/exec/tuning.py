"""Thresholds: up to which size a message goes which way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from math import log
from typing import TYPE_CHECKING

from attrs import asdict, evolve, frozen

from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

KIB, MIB = 2**10, 2**20

MOVES, SUMS = "moves", "sums"

#: Sizes that are measured: twice as large from one to the next.
_SLOT_SIZES = tuple(2**i * KIB for i in range(2, 14))
_COPY_SIZES = tuple(2**i * KIB for i in range(8, 17))
LARGEST = _COPY_SIZES[-1]


@frozen(kw_only=True)
class Tuning:
    """Up to which size a message goes which way; those that are not measured are those of NVIDIA H200 with NVLink.

    A message is what one device sends to one other. What is larger than a slot goes through none, whatever is here.

    Attributes:
        peer_moves_bytes: the largest that is moved through slots of ``peer``; 0 for none.
        peer_sums_bytes: the largest that is added up through them.
        host_moves_bytes: the largest that is moved through slots of ``host``.
        host_sums_bytes: the largest that is added up through them.
        copies_bytes: from which size on copy engines move what kernels of ``peer`` write straight; 0 for never.
    """

    peer_moves_bytes: int = 256 * KIB
    peer_sums_bytes: int = 256 * KIB
    host_moves_bytes: int = 64 * KIB
    host_sums_bytes: int = 64 * KIB
    copies_bytes: int = 64 * MIB

    def __attrs_post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or value < 0:
                message = f"{name} is {value!r:.40}, expected a whole number of bytes from 0"
                raise RequestError(message, "leave it out for the default")

    def slots(self, transport: str, kind: str) -> int:
        """Return the largest message that goes through slots of ``peer`` or ``host``."""
        largest: int = getattr(self, slots_field(transport, kind))
        return largest


DEFAULT = Tuning()


def slots_field(transport: str, kind: str) -> str:
    """Return the name of a threshold of slots, for ``moves`` or ``sums``."""
    return f"{transport}_{kind}_bytes"


#: Returns the time of a transport's moves or sums of some size by each of several tunings.
Time = Callable[[str, str, int, tuple[Tuning, ...]], Sequence[float]]


def tune(time: Time, slots: Mapping[str, int], *, straight: bool) -> Tuning:
    """Measure thresholds.

    Args:
        time: measures.
        slots: bytes of data that fit a slot, of each transport that is to be measured; the others keep their defaults.
        straight: whether kernels of ``peer`` can write straight into other devices' tensors.

    Returns:
        The tuning under which everything that was measured takes the least time, each size counting as much.
    """
    tuned = DEFAULT
    if straight and "peer" in slots:
        never, always = (evolve(tuned, peer_moves_bytes=0, copies_bytes=size) for size in (0, 1))
        count = _switch([time("peer", MOVES, size, (never, always)) for size in _COPY_SIZES])
        tuned = evolve(tuned, copies_bytes=(*_COPY_SIZES, 0)[count])
    for transport, room in slots.items():
        sizes = tuple(takewhile(room.__ge__, _SLOT_SIZES))
        for kind in (MOVES, SUMS):
            name = slots_field(transport, kind)
            always, never = (evolve(tuned, **{name: size}) for size in (room, 0))
            count = _switch([time(transport, kind, size, (always, never)) for size in sizes])
            tuned = evolve(tuned, **{name: (0, *sizes)[count]})
    return tuned


def _switch(times: Sequence[Sequence[float]]) -> int:
    """Return how many of the smallest sizes should go the first way, and the others the second, for the least time.

    A single size that was measured badly does not decide.

    Args:
        times: by size, of both ways.
    """
    gains = [log(second / first) for first, second in times]
    return max(range(len(gains) + 1), key=lambda count: sum(gains[:count]))
