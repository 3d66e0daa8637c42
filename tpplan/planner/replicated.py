"""Cutting replicated KV heads where it costs least, head by head.

A device keeps a KV head once, however many of its copies it holds; so what its copies cost depends on where they lie:
three copies may be of one head or of two. The solver, to which all units are alike, counts the worst case. Here, the
copies are cut anew, exactly: once within the room that the solver's placement of all other axes leaves, and once with
all room, in which case the other axes are placed in what that leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from attrs import evolve

from tpplan.core.axes import bounds_of
from tpplan.planner.costs import Cost, Demands
from tpplan.planner.items import SHIFT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.planner.costs import Demand
    from tpplan.planner.items import Bin

#: Units of every axis on each device.
Counts: TypeAlias = tuple[tuple[int, ...], ...]

#: Most units of an axis that is cut anew: no known model has as many query heads.
_MOST = 256


def recut(
    wanted: Demands,
    bins: Sequence[Bin],
    counts: Counts | None,
    place: Callable[[Demands, Sequence[Bin]], Counts | None],
) -> Counts | None:
    """Return a faster placement in which replicated heads are cut anew, or else the given one.

    Args:
        wanted: the axes and their costs.
        bins: the devices with their rooms and bandwidths.
        counts: a placement of all axes; None if none is known that fits.
        place: function that places the axes of some demands in bins, or gives None.
    """
    again = [i for i, d in enumerate(wanted.axes) if d.replicas > 1 and d.units <= _MOST]
    others = [i for i in range(len(wanted.axes)) if i not in again]
    found = [counts] if counts else []
    if again and (rows := _cut(wanted, again, [host.room for host in bins], bins)):
        held = _bytes(wanted, again, rows)
        left = [evolve(host, room=host.room - size) for host, size in zip(bins, held, strict=True)]
        if rest := place(evolve(wanted, axes=tuple(wanted.axes[i] for i in others)), left):
            found.append(_merged(again, rows, others, rest))
    for start in tuple(found) if again else ():
        rest = [start[i] for i in others]
        held = _bytes(wanted, others, rest)
        if rows := _cut(wanted, again, [host.room - size for host, size in zip(bins, held, strict=True)], bins):
            found.append(_merged(again, rows, others, rest))
    return min(found, key=lambda each: _score(wanted, bins, each), default=None)


def _merged(
    some: Sequence[int], rows: Sequence[tuple[int, ...]], others: Sequence[int], rest: Sequence[tuple[int, ...]]
) -> Counts:
    placed = dict(zip((*some, *others), (*rows, *rest), strict=True))
    return tuple(placed[i] for i in sorted(placed))


def _costs(demand: Demand, row: Sequence[int]) -> list[Cost]:
    bounds = bounds_of(row, demand.unit, demand.size)
    return [demand.cost(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]


def _bytes(wanted: Demands, some: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the bytes of some axes on each device."""
    costs = (_costs(wanted.axes[i], row) for i, row in zip(some, rows, strict=True))
    return [sum(cost.bytes for cost in own) for own in zip(*costs, strict=True)]


def _score(wanted: Demands, bins: Sequence[Bin], counts: Counts) -> tuple[int, int, int]:
    """Return the bytes that devices lack, the time of a pass, and how uneven its stages are."""
    held = _bytes(wanted, range(len(counts)), counts)
    stages: dict[object, list[int]] = {}
    for demand, row in zip(wanted.axes, counts, strict=True):
        own = stages.setdefault(demand.stage, [0] * len(bins))
        stages[demand.stage] = [sum(pair) for pair in zip(own, (c.reads for c in _costs(demand, row)), strict=True)]
    times = [[(load << SHIFT) // host.speed for load, host in zip(row, bins, strict=True)] for row in stages.values()]
    lack = sum(max(0, size - host.room) for size, host in zip(held, bins, strict=True))
    return lack, sum(map(max, times)), sum(time * time for row in times for time in row)


def _cut(
    wanted: Demands, some: Sequence[int], rooms: Sequence[int], bins: Sequence[Bin]
) -> list[tuple[int, ...]] | None:
    """Return the fastest cuts of some axes, one after the other; None if one does not fit."""
    rows, rooms = [], list(rooms)
    for i in some:
        row = _fastest(wanted.axes[i], rooms, bins)
        if row is None:
            return None
        rows.append(row)
        rooms = [room - cost.bytes for room, cost in zip(rooms, _costs(wanted.axes[i], row), strict=True)]
    return rows


def _fastest(demand: Demand, rooms: Sequence[int], bins: Sequence[Bin]) -> tuple[int, ...] | None:
    """Return the units of an axis on each device of which the slowest takes least time; of several, the most even.

    Each device gets one unit at least if there are as many, as heads are replicated for that.
    """
    units, least = demand.units, int(demand.units >= len(bins))
    ends = [min(n * demand.unit, demand.size) for n in range(units + 1)]
    costs = [[demand.cost(start, end) for end in ends[a:]] for a, start in enumerate(ends)]

    def times(b: int, start: int) -> list[int | None]:
        """Return how long a device takes for so many units; None where they do not fit."""
        room, speed = rooms[b], bins[b].speed
        return [(c.reads << SHIFT) // speed if c.bytes <= max(0, room) else None for c in costs[start]]

    table = [[times(b, start) for start in range(units + 1)] for b in range(len(bins))]
    longest = _best(table, units, least, lambda before, time: max(before, time))
    if longest is None:
        return None
    limit = longest[0]
    table = [[[t if t is None or t <= limit else None for t in row] for row in rows] for rows in table]
    even = _best(table, units, least, lambda before, time: before + time * time)
    return even[1] if even else None


def _best(
    table: Sequence[Sequence[Sequence[int | None]]], units: int, least: int, add: Callable[[int, int], int]
) -> tuple[int, tuple[int, ...]] | None:
    """Return the least sum of times, by ``add``, of devices that hold all units in order, and how many each holds."""
    reached: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for rows in table:
        after: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (before, row) in reached.items():
            for n in range(least, units - start + 1):
                time = rows[start][n]
                if time is not None:
                    found = add(before, time)
                    if start + n not in after or found < after[start + n][0]:
                        after[start + n] = found, (*row, n)
        reached = after
    return reached.get(units)
