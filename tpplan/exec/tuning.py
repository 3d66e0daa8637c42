"""Thresholds: which message sizes take which path between devices."""

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

#: Kinds of traffic: one device sends, several send, or messages are summed.
FANS, EXCHANGES, SUMS = KINDS = ("fans", "exchanges", "sums")

#: Ways: through slots, or for large messages by kernels that write directly to the destination, by copy engines, or in
#: frames through host memory; and sums of which every device reads all.
SLOTS, DIRECT, COPIES, FRAMES, ONE_SHOT = "slots", "straight", "copies", "frames", "one shot"
#: For large messages with several receivers: each receives a share and passes it on to the others.
RELAYED = "passed on"
#: Fewest devices with which a receiver has another one to pass its share on to.
_SEVERAL = 3

#: Message sizes to measure, each twice the one before.
_SIZES = tuple(2**i * KIB for i in range(2, 17))
LARGEST: int = _SIZES[-1]


@frozen(kw_only=True)
class Tuning:
    """Message sizes at which operations switch paths; the defaults were measured on two NVIDIA H200 with NVLink.

    A message is the data that one device sends to one other. Messages larger than a slot never go through slots,
    whatever the thresholds. Traffic counts as ``fans`` if one device sends, as in broadcast and scatter, and as
    ``exchanges`` if several do, as in allgather.

    Attributes:
        peer_fans_bytes: largest message through slots of ``peer`` when one device sends; 0 for none.
        peer_exchanges_bytes: largest message through slots of ``peer`` when several devices send.
        peer_sums_bytes: largest message that is summed through slots of ``peer``.
        peer_one_shot_bytes: largest message of ``peer`` of which every device reads all parts and adds up all columns,
            if it fits no slot; of larger ones a device adds up some columns, and writes them to all.
        host_fans_bytes: largest message through slots of ``host`` when one device sends.
        host_exchanges_bytes: largest message through slots of ``host`` when several devices send.
        host_sums_bytes: largest message that is summed through slots of ``host``.
        copies_fans_bytes: size from which copy engines, instead of kernels that write directly, move messages too large
            for slots of ``peer`` when one device sends; 0 for never.
        copies_exchanges_bytes: the same when several devices send.
        passed_on_bytes: bytes saved at the source from which receivers on ``peer`` pass data on to each other, if it
            fits no slot; 0 for never.
        gathers_bytes: largest slice that a device's kernel writes into host memory in a gather; copy engines move
            larger ones. 0 for none.
    """

    peer_fans_bytes: int = 512 * KIB
    peer_exchanges_bytes: int = 512 * KIB
    peer_sums_bytes: int = 512 * KIB
    peer_one_shot_bytes: int = 4 * MIB
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
        """Return the size of the largest message that goes through slots of ``peer`` or ``host``."""
        largest: int = getattr(self, slots_field(transport, kind))
        return largest

    def copies(self, kind: str) -> int:
        """Return the size from which copy engines take over; 0 for never, which is always so for sums."""
        first: int = 0 if kind == SUMS else getattr(self, copies_field(kind))
        return first


#: Defaults by number of devices, measured on NVIDIA H200 with NVLink.
_MEASURED = {
    2: Tuning(),
    4: Tuning(
        peer_fans_bytes=256 * KIB,
        peer_exchanges_bytes=128 * KIB,
        peer_sums_bytes=128 * KIB,
        peer_one_shot_bytes=0,
        copies_fans_bytes=MIB,
    ),
}


def default(devices: int) -> Tuning:
    """Return the default thresholds for this number of devices; three or more use those of four."""
    return _MEASURED[4 if devices >= _SEVERAL else 2]


def slots_field(transport: str, kind: str) -> str:
    """Return the field name of a slot threshold."""
    return f"{transport}_{kind}_bytes"


def copies_field(kind: str) -> str:
    """Return the field name of a copy-engine threshold, for ``fans`` or ``exchanges``."""
    return f"copies_{kind}_bytes"


def forced(way: str) -> Tuning:
    """Return thresholds that force every message that can to go one way."""
    slots = LARGEST if way == SLOTS else 0
    by_start = {"peer": slots, "host": slots, "copies": int(way == COPIES), "passed": int(way == RELAYED)}
    by_start["gathers"] = slots
    found = {name: by_start[name.partition("_")[0]] for name in asdict(Tuning())}
    return Tuning(**found | {"peer_one_shot_bytes": LARGEST if way == ONE_SHOT else 0})


#: Returns the time of an operation by each way, given the transport, the kind, the size and the ways.
Time = Callable[[str, str, int, tuple[str, ...]], Sequence[float]]


def largest(kind: str, devices: int) -> int:
    """Return the largest message to measure; for exchanges, where all devices send, one device's share of the limit."""
    return LARGEST // devices if kind == EXCHANGES else LARGEST


def tune(time: Time, slots: Mapping[str, int], devices: int, *, direct: bool) -> Tuning:
    """Measure thresholds.

    Args:
        time: measures the time of an operation by each way.
        slots: bytes of data per slot, for each transport to measure; other transports keep their defaults.
        devices: number of devices that take part.
        direct: whether kernels of ``peer`` can write directly into other devices' tensors.

    Returns:
        The tuning with the least total time over all measurements, every size weighted equally. The threshold for
        passing on is chosen last, and the others as if nothing were passed on: few moves have several receivers.
    """
    tuned = default(devices)
    for transport, room in slots.items():
        for kind in KINDS:
            ways = _ways(transport, kind, devices, direct=direct)
            most = largest(kind, devices) if ways[2:] else room  # beyond slots there may be no choice
            sizes = [size for size in _SIZES if size <= min(most, largest(kind, devices))]
            times = [
                time(transport, kind, size, ways) if size <= room else (inf, *time(transport, kind, size, ways[1:]))
                for size in sizes
            ]
            own = [way for way in ways if way != RELAYED]
            cuts = _cuts(times, len(own))
            tuned = evolve(tuned, **_thresholds(transport, kind, sizes, cuts))
            if own != [*ways]:
                tuned = evolve(tuned, passed_on_bytes=(devices - 2) * _relayed(sizes, times, cuts))
    return tuned


def _ways(transport: str, kind: str, devices: int, *, direct: bool) -> tuple[str, ...]:
    """Return the ways that thresholds choose between, from small to large messages."""
    if transport == "host":
        return SLOTS, FRAMES
    if not direct:
        return SLOTS, COPIES
    if kind == SUMS:
        return SLOTS, ONE_SHOT, DIRECT
    return (SLOTS, DIRECT, COPIES, *([RELAYED] if kind == FANS and devices >= _SEVERAL else []))


def _thresholds(transport: str, kind: str, sizes: Sequence[int], cuts: tuple[int, ...]) -> dict[str, int]:
    """Return thresholds by field name, from the cuts that :func:`_cuts` found between the sizes."""
    small, *rest = cuts
    found = {slots_field(transport, kind): sizes[small - 1] if small else 0}
    if kind == SUMS:
        return found | {f"{transport}_one_shot_bytes": sizes[last - 1] if last > small else 0 for last in rest}
    return found | {copies_field(kind): _start(sizes, small, first) for first in rest}


def _relayed(sizes: Sequence[int], times: Sequence[Sequence[float]], cuts: tuple[int, ...]) -> int:
    """Return the size from which passing on, the last way, is faster than the way that :func:`_cuts` chose."""
    chosen = [(each[sum(i >= cut for cut in cuts)], each[-1]) for i, each in enumerate(times)]
    return _start(sizes, cuts[0], *_cuts(chosen, 2))


def _start(sizes: Sequence[int], small: int, first: int) -> int:
    """Return the threshold of a way that is the fastest from the size at index ``first``; 0 for never.

    Args:
        sizes: the measured sizes.
        small: how many of them go through slots.
        first: index of the first size for the way, at least ``small``.
    """
    if first == len(sizes):
        return 0
    if first > small:
        return sizes[first]
    return sizes[small - 1] if small else 1  # right after slots, including sizes between two measured ones


def _cuts(times: Sequence[Sequence[float]], ways: int) -> tuple[int, ...]:
    """Return how many of the sizes should go the first way, the first or second one, and so on, for the least time.

    A single bad measurement does not decide.

    Args:
        times: for each size, the time of each way; infinite where the way cannot be taken.
        ways: how many of the ways to choose between, counted from the first.
    """

    def total(cuts: tuple[int, ...]) -> float:
        spans = enumerate(pairwise((0, *cuts, len(times))))
        return sum(log(each[way]) for way, (first, stop) in spans for each in times[first:stop])

    return min(combinations_with_replacement(range(len(times) + 1), ways - 1), key=total)
