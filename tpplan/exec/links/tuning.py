"""Thresholds: up to which size a message goes which way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement, pairwise
from math import inf, log
from typing import TYPE_CHECKING

from attrs import asdict, evolve, frozen

from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

KIB, MIB = 2**10, 2**20

#: What is moved by one device, what by several, and what is added up.
FANS, EXCHANGES, SUMS = KINDS = ("fans", "exchanges", "sums")

#: Ways: through slots; what is large by kernels that write straight, by copy engines, or in frames through host memory.
SLOTS, STRAIGHT, COPIES, FRAMES = "slots", "straight", "copies", "frames"
#: What is large and for several: each gets a share, and passes it on to the others.
PASSED_ON = "passed on"
#: How many devices have somebody to pass on to.
_SEVERAL = 3

#: Sizes that are measured: twice as large from one to the next.
_SIZES = tuple(2**i * KIB for i in range(2, 17))
LARGEST: int = _SIZES[-1]


@frozen(kw_only=True)
class Tuning:
    """Up to which size a message goes which way; what is left out is as measured on two NVIDIA H200 with NVLink.

    A message is what one device sends to one other. What is larger than a slot goes through none, whatever is here.
    Moves are ``fans`` where one device sends, as in broadcast and scatter, and ``exchanges`` where several do, as in
    allgather.

    Attributes:
        peer_fans_bytes: the largest that one device sends through slots of ``peer``; 0 for none.
        peer_exchanges_bytes: the largest that each of several sends through them.
        peer_sums_bytes: the largest that is added up through them.
        host_fans_bytes: the largest that one device sends through slots of ``host``.
        host_exchanges_bytes: the largest that each of several sends through them.
        host_sums_bytes: the largest that is added up through them.
        copies_fans_bytes: from which size on copy engines move what is too large for slots of ``peer`` and what kernels
            would write straight, if one device sends; 0 for never.
        copies_exchanges_bytes: the same, if several do.
        passed_on_bytes: devices of ``peer`` pass on what would else leave its source again and again, if that spares it
            at least so many bytes, and no slot has room; 0 for never.
        gathers_bytes: the largest slice that a device's kernel writes into the host's memory, in a gather; what is
            larger, copy engines do. 0 for none.
    """

    peer_fans_bytes: int = 512 * KIB
    peer_exchanges_bytes: int = 512 * KIB
    peer_sums_bytes: int = 512 * KIB
    host_fans_bytes: int = 128 * KIB
    host_exchanges_bytes: int = 128 * KIB
    host_sums_bytes: int = 128 * KIB
    copies_fans_bytes: int = 512 * KIB
    copies_exchanges_bytes: int = 0
    passed_on_bytes: int = MIB
    gathers_bytes: int = MIB

    def __attrs_post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or value < 0:
                message = f"{name} is {value!r:.40}, expected a whole number of bytes from 0"
                raise RequestError(message, "leave it out for the default")

    def slots(self, transport: str, kind: str) -> int:
        """Return the largest message that goes through slots of ``peer`` or ``host``."""
        largest: int = getattr(self, slots_field(transport, kind))
        return largest

    def copies(self, kind: str) -> int:
        """Return from which size on copy engines take over; 0 for never, as always for sums."""
        first: int = 0 if kind == SUMS else getattr(self, copies_field(kind))
        return first


#: Defaults, as measured on so many NVIDIA H200 with NVLink.
_MEASURED = {
    2: Tuning(),
    4: Tuning(
        peer_fans_bytes=256 * KIB,
        peer_exchanges_bytes=128 * KIB,
        peer_sums_bytes=128 * KIB,
        copies_fans_bytes=MIB,
    ),
}


def default(devices: int) -> Tuning:
    """Return the thresholds for so many devices where nothing was measured: those of four for three and more."""
    return _MEASURED[4 if devices >= _SEVERAL else 2]


def slots_field(transport: str, kind: str) -> str:
    """Return the name of a threshold of slots."""
    return f"{transport}_{kind}_bytes"


def copies_field(kind: str) -> str:
    """Return the name of a threshold of copy engines, for ``fans`` or ``exchanges``."""
    return f"copies_{kind}_bytes"


def forced(way: str) -> Tuning:
    """Return the thresholds by which all goes one way that can."""
    slots = LARGEST if way == SLOTS else 0
    by_start = {"peer": slots, "host": slots, "copies": int(way == COPIES), "passed": int(way == PASSED_ON)}
    by_start["gathers"] = slots
    return Tuning(**{name: by_start[name.partition("_")[0]] for name in asdict(Tuning())})


#: Returns the times of a transport's operation of some kind and size by each of several ways.
Time = Callable[[str, str, int, tuple[str, ...]], Sequence[float]]


def largest(kind: str, devices: int) -> int:
    """Return the largest message that is measured: of exchanges, a device's part of what others send as well."""
    return LARGEST // devices if kind == EXCHANGES else LARGEST


def tune(time: Time, slots: Mapping[str, int], devices: int, *, straight: bool) -> Tuning:
    """Measure thresholds.

    Args:
        time: measures.
        slots: bytes of data that fit a slot, of each transport that is to be measured; the others keep their defaults.
        devices: that take part.
        straight: whether kernels of ``peer`` can write straight into other devices' tensors.

    Returns:
        The tuning under which everything that was measured takes the least time, each size counting as much. What is
        passed on instead comes on top: the rest is chosen as if nothing were, for few moves are for several devices.
    """
    tuned = default(devices)
    for transport, room in slots.items():
        for kind in KINDS:
            ways = _ways(transport, kind, devices, straight=straight)
            most = largest(kind, devices) if ways[2:] else room  # beyond slots there may be no choice
            sizes = [size for size in _SIZES if size <= min(most, largest(kind, devices))]
            times = [
                time(transport, kind, size, ways) if size <= room else (inf, *time(transport, kind, size, ways[1:]))
                for size in sizes
            ]
            own = [way for way in ways if way != PASSED_ON]
            cuts = _cuts(times, len(own))
            tuned = evolve(tuned, **_thresholds(transport, kind, sizes, cuts))
            if own != [*ways]:
                tuned = evolve(tuned, passed_on_bytes=(devices - 2) * _passed_on(sizes, times, cuts))
    return tuned


def _ways(transport: str, kind: str, devices: int, *, straight: bool) -> tuple[str, ...]:
    """Return the ways between which thresholds choose, from small to large messages."""
    if transport == "host":
        return SLOTS, FRAMES
    if not straight:
        return SLOTS, COPIES
    if kind == SUMS:
        return SLOTS, STRAIGHT
    return (SLOTS, STRAIGHT, COPIES, *([PASSED_ON] if kind == FANS and devices >= _SEVERAL else []))


def _thresholds(transport: str, kind: str, sizes: Sequence[int], cuts: tuple[int, ...]) -> dict[str, int]:
    """Return thresholds by name, for what :func:`_cuts` says of some sizes."""
    small, *rest = cuts
    found = {slots_field(transport, kind): sizes[small - 1] if small else 0}
    return found | {copies_field(kind): _start(sizes, small, first) for first in rest}


def _passed_on(sizes: Sequence[int], times: Sequence[Sequence[float]], cuts: tuple[int, ...]) -> int:
    """Return from which size on passing on, the last way, is faster than what others :func:`_cuts` has chosen."""
    chosen = [(each[sum(i >= cut for cut in cuts)], each[-1]) for i, each in enumerate(times)]
    return _start(sizes, cuts[0], *_cuts(chosen, 2))


def _start(sizes: Sequence[int], small: int, first: int) -> int:
    """Return from which size on a way is gone that is the fastest from the first of some sizes on; 0 for never.

    Args:
        sizes: that were measured.
        small: how many of them go through slots.
        first: index of the size; slots come before it.
    """
    if first == len(sizes):
        return 0
    if first > small:
        return sizes[first]
    return sizes[small - 1] if small else 1  # right after slots, with what is between two sizes


def _cuts(times: Sequence[Sequence[float]], ways: int) -> tuple[int, ...]:
    """Return how many of the sizes should go the first way, the first or second one, and so on, for the least time.

    A single size that was measured badly does not decide.

    Args:
        times: by size, of each way; infinite where there is none.
        ways: how many of them, the first ones.
    """

    def total(cuts: tuple[int, ...]) -> float:
        spans = enumerate(pairwise((0, *cuts, len(times))))
        return sum(log(each[way]) for way, (first, stop) in spans for each in times[first:stop])

    return min(combinations_with_replacement(range(len(times) + 1), ways - 1), key=total)
