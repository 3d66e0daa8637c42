"""Cutting replicated KV heads where it costs least, head by head.

A device keeps a KV head once, however many of its copies it holds; so what its copies cost depends on where they lie:
three copies may be of one head or of two. The solver, to which all units are alike, counts the worst case. Here, the
copies are cut exactly, by dynamic programming over the devices in order, and the other axes are placed around them.
Where memory is plentiful and no other axis is in the heads' stage, no placement is faster. Where memory is not, the
heads are cut in several ways that take little longer than the fastest one, and leave more room where it is scarce.
Where other axes are in the stage, such as Mamba's heads in falcon_h1, each is cut exactly in turn, beside what the
others read, as long as that makes the stage faster; what the solver finds for all at once is where that starts, too.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeAlias

from attrs import evolve

from tpplan.core.axes import bounds_of
from tpplan.planner.items import SHIFT
from tpplan.planner.place import Effort

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.planner.costs import Cost, Demand, Demands, Stage
    from tpplan.planner.items import Bin

#: Units of every axis on each device.
Counts: TypeAlias = tuple[tuple[int, ...], ...]

#: Most units of an axis that is cut here: no known model has as many query heads.
_MOST_UNITS = 256
#: Room that no axis fills.
_PLENTY = 1 << 200
#: How much longer than at best attention may take where memory is scarce, in thousandths.
_SLACKS = (0, 100, 300)
_WHOLE = 1000


class Placer(Protocol):
    """Places the axes of some demands in bins."""

    def __call__(self, wanted: Demands, bins: Sequence[Bin], effort: Effort, /) -> Counts | None:
        """Return the units of each axis; None if no placement was found that fits."""


def are_replicated(wanted: Demands) -> bool:
    """Tell whether there are heads to cut here."""
    return bool(_replicated(wanted))


def _replicated(wanted: Demands) -> list[int]:
    """Return the indices of the axes that are cut here."""
    return [i for i, d in enumerate(wanted.axes) if d.replicas > 1 and d.units <= _MOST_UNITS]


def place_replicated(wanted: Demands, bins: Sequence[Bin], place: Placer, effort: Effort) -> Counts | None:
    """Return a placement of which the sum of the stages' times is small, the least where there is room for it.

    Args:
        wanted: the axes and their costs.
        bins: the devices with their rooms and bandwidths.
        place: how axes are placed whose units are all alike.
        effort: how long to look.

    Returns:
        None if no placement was found that fits.
    """
    heads = _replicated(wanted)
    others = [i for i in range(len(wanted.axes)) if i not in heads]
    rest = evolve(wanted, axes=tuple(wanted.axes[i] for i in others))
    stages = {wanted.axes[i].stage for i in heads}
    beside = [i for i in others if wanted.axes[i].stage in stages and wanted.axes[i].units <= _MOST_UNITS]

    def around(rows: Sequence[tuple[int, ...]] | None, hosts: Sequence[Bin], effort: Effort) -> Counts | None:
        """Return the placement with these rows of the heads."""
        if rows is None:
            return None
        held = _bytes(wanted, heads, rows)
        left = [evolve(host, room=host.room - size) for host, size in zip(hosts, held, strict=True)]
        placed = place(rest, left, effort)
        return None if placed is None else merged(rows, placed)

    def within(placed: Counts) -> Counts | None:
        """Return the placement with the fastest cuts of the heads in what the other axes leave."""
        kept = [placed[i] for i in others]
        held = _bytes(wanted, others, kept)
        left = [evolve(host, room=host.room - size) for host, size in zip(bins, held, strict=True)]
        rows = _cut(wanted, heads, left)
        return None if rows is None else merged(rows, kept)

    def merged(rows: Sequence[tuple[int, ...]], kept: Sequence[tuple[int, ...]]) -> Counts:
        placed = dict(zip((*heads, *others), (*rows, *kept), strict=True))
        return tuple(placed[i] for i in sorted(placed))

    def score(placed: Counts) -> tuple[int, int, int]:
        return _score(wanted, bins, placed)

    roomy = [evolve(host, room=_PLENTY) for host in bins]
    apart = around(_cut(wanted, heads, roomy), roomy, effort)
    if apart and not beside and not score(apart)[0]:
        return apart
    starts = [place(wanted, bins, effort if beside else Effort.QUICK), apart if beside else None]
    starts += [around(_cut(wanted, heads, bins, slack), bins, Effort.ANY) for slack in _SLACKS]
    found = [each for start in starts if start for each in (start, within(start)) if each]
    if beside:
        found = [_recut(wanted, (*heads, *beside), bins, each) for each in found]
    if found:
        best = min(found, key=score)
        found.append(around([best[i] for i in heads], bins, effort) or best)
    return min(found, key=score, default=None)


def _costs(demand: Demand, row: Sequence[int]) -> list[Cost]:
    bounds = bounds_of(row, demand.unit, demand.size)
    return [demand.cost(start, end) for start, end in pairwise(bounds)]


def _bytes(wanted: Demands, some: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the bytes of some axes on each device."""
    costs = (_costs(wanted.axes[i], row) for i, row in zip(some, rows, strict=True))
    return [sum(cost.bytes for cost in own) for own in zip(*costs, strict=True)]


def _recut(wanted: Demands, some: Sequence[int], bins: Sequence[Bin], placed: Counts) -> Counts:
    """Return a placement with some axes cut anew, one by one beside all others, as long as that is better."""
    best, before = placed, None
    while best != before:
        before = best
        for i in some:
            without: Counts = (*best[:i], (0,) * len(bins), *best[i + 1 :])
            held = _bytes(wanted, range(len(without)), without)
            times = _loads(wanted, without)[wanted.axes[i].stage]
            left = [
                evolve(host, room=host.room - size, load=load)
                for host, size, load in zip(bins, held, times, strict=True)
            ]
            if row := _fastest(wanted.axes[i], left, None):
                best = min(best, (*best[:i], row, *best[i + 1 :]), key=lambda each: _score(wanted, bins, each))
    return best


def _loads(wanted: Demands, placed: Counts) -> dict[Stage, list[int]]:
    """Return the time of each device in each stage, at a bandwidth of 1, see :class:`tpplan.planner.costs.Cost`."""
    stages: dict[Stage, list[int]] = {}
    for demand, row in zip(wanted.axes, placed, strict=True):
        times = [cost.time for cost in _costs(demand, row)]
        stages[demand.stage] = [a + b for a, b in zip(stages.get(demand.stage, [0] * len(row)), times, strict=True)]
    return stages


def _score(wanted: Demands, bins: Sequence[Bin], placed: Counts) -> tuple[int, int, int]:
    """Return the bytes that devices lack, the time of a pass, and how uneven its stages are."""
    loads, held = _loads(wanted, placed).values(), _bytes(wanted, range(len(placed)), placed)
    times = [[(load << SHIFT) // host.speed for load, host in zip(row, bins, strict=True)] for row in loads]
    lack = sum(max(0, size - host.room) for size, host in zip(held, bins, strict=True))
    return lack, sum(map(max, times)), sum(time * time for row in times for time in row)


def _cut(
    wanted: Demands, heads: Sequence[int], bins: Sequence[Bin], slack: int | None = None
) -> list[tuple[int, ...]] | None:
    """Return the cuts of some axes, one after the other, see :func:`_fastest`; None if one does not fit."""
    rows, bins = [], [evolve(host, load=0) for host in bins]
    for i in heads:
        row = _fastest(wanted.axes[i], bins, slack)
        if row is None:
            return None
        rows.append(row)
        held = _costs(wanted.axes[i], row)
        bins = [evolve(host, room=host.room - cost.bytes) for host, cost in zip(bins, held, strict=True)]
    return rows


def _fastest(demand: Demand, bins: Sequence[Bin], slack: int | None) -> tuple[int, ...] | None:
    """Return the units of an axis on each device of which the slowest takes the least time.

    Each device gets one replicated head at least if there are as many, as heads are replicated for that.

    Args:
        demand: the axis.
        bins: the devices; their load is their time beside the axis.
        slack: how much longer the slowest may take, in thousandths; then, devices are filled evenly. By default, they
            take as long as evenly as possible.
    """
    units, least = demand.units, int(demand.replicas > 1 and demand.units >= len(bins))
    ends = bounds_of([1] * units, demand.unit, demand.size)
    costs = [[demand.cost(start, end) for end in ends[i:]] for i, start in enumerate(ends)]

    def table(measure: Callable[[Bin, Cost], int | None]) -> list[list[list[int | None]]]:
        return [[[measure(host, cost) for cost in row] for row in costs] for host in bins]

    def time(host: Bin, cost: Cost) -> int | None:
        return (host.load + cost.time << SHIFT) // host.speed if cost.bytes <= max(0, host.room) else None

    fastest = _least(table(time), units, least, max)
    if fastest is None:
        return None
    limit = fastest[0] * (_WHOLE + (slack or 0)) // _WHOLE

    def uneven(host: Bin, cost: Cost) -> int | None:
        long = time(host, cost)
        if long is None or long > limit:
            return None
        return (long if slack is None else (cost.bytes << SHIFT) // max(1, host.room)) ** 2

    even = _least(table(uneven), units, least, int.__add__)
    return even[1] if even else None


def _least(
    table: Sequence[Sequence[Sequence[int | None]]], units: int, least: int, add: Callable[[int, int], int]
) -> tuple[int, tuple[int, ...]] | None:
    """Return how devices hold all units in order so that the sum of what that takes is the least, and this sum.

    Args:
        table: what it takes each device to hold so many units from a first one on; None where it cannot.
        units: number of units.
        least: fewest units of each device.
        add: adds up what devices take.
    """
    reached: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for rows in table:
        after: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (before, row) in reached.items():
            for n in range(least, units - start + 1):
                more = rows[start][n]
                if more is not None:
                    total = add(before, more)
                    if start + n not in after or total < after[start + n][0]:
                        after[start + n] = total, (*row, n)
        reached = after
    return reached.get(units)
