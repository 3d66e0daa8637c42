"""Placing units of several axes on devices: the integer program behind planning.

Every bin (device) has room in bytes and a speed. Every item (axis) consists of units that must all be placed. A bin
holds no units of an item or at least the item's minimum, and holding any has a fixed cost. The objective is to minimise
the time of the slowest bin: the least ``t`` such that no bin's load exceeds ``t`` times its speed. All numbers are
integers; ``t`` is a fixed-point number with ``SHIFT`` bits after the point.

There are four steps, from cheap to thorough; the later ones run only if a gap remains. A necessary condition gives a
lower bound on ``t``. A greedy placement cuts every item in proportion to the bins, coarse items first, so that finer
ones compensate their rounding. A local search (:mod:`tpplan.improve`) moves units. An exhaustive search
(:mod:`tpplan.search`) settles what remains.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from tpplan.apportion import apportion
from tpplan.improve import Improver, numbers
from tpplan.search import OutOfBudgetError, search

if TYPE_CHECKING:
    from collections.abc import Sequence

SHIFT = 64
#: A placement within 1/2048 of the lower bound is good enough.
TOLERANCE_BITS = 11
#: Rounds of the local search without improvement before it stops, times items, times bins squared.
PATIENCE = 40_000
#: Moves that the exhaustive search may examine: to find a first placement, and to improve one.
FIRST_BUDGET = 600_000
BETTER_BUDGET = 200_000
_UNLIMITED = 1 << 200

#: Units of each item in each bin.
Placement: TypeAlias = tuple[tuple[int, ...], ...]


@frozen
class Item:
    """An item to place.

    Attributes:
        count: number of units, at least 1.
        minimum: fewest units in a bin that holds any.
        cost: bytes per unit.
        kept: fixed cost in bytes of a bin that holds any unit.
        load: load per unit.
    """

    count: int
    minimum: int
    cost: int
    kept: int
    load: int

    def upper(self, room: int, limit: int) -> int:
        """Return the most units that fit into ``room`` bytes and a load of ``limit``, 0 if below the minimum."""
        room -= self.kept
        if room < 0 or limit < 0:
            return 0
        units = self.count
        if self.cost:
            units = min(units, room // self.cost)
        if self.load:
            units = min(units, limit // self.load)
        return units if units >= self.minimum else 0


@frozen
class Bin:
    """A bin that holds units of items.

    Attributes:
        room: bytes for items; negative if the bin cannot be used.
        speed: load per unit of ``t``, positive.
        load: load of the bin without any items.
    """

    room: int
    speed: int
    load: int

    def limit(self, t: int | None) -> int:
        """Return the most load of items that keeps the bin within ``t``; None sets no limit."""
        return _UNLIMITED if t is None else (t * self.speed >> SHIFT) - self.load


def solve(items: Sequence[Item], bins: Sequence[Bin], *, thorough: bool = True) -> Placement | None:
    """Return a placement whose ``t`` is within 1/2048 of the least, or None if nothing fits.

    The result does not depend on the order of the bins, except among equal ones. The exhaustive search has a budget; if
    it is used up (many bins, many coarse units, hardly any slack), the result is the best placement so far, or None.
    Without ``thorough`` any placement is accepted, and in tight cases an existing one may be missed.
    """
    usable = (b for b, host in enumerate(bins) if host.room >= 0)
    order = sorted(usable, key=lambda b: (-bins[b].room, -bins[b].speed, bins[b].load, b))
    ranks = sorted(range(len(items)), key=lambda i: (-items[i].cost, -items[i].load, i))
    found = _Solver([items[i] for i in ranks], [bins[b] for b in order], thorough).solve()
    if found is None:
        return None
    placement = [[0] * len(bins) for _ in items]
    for i, row in zip(ranks, found, strict=True):
        for b, units in zip(order, row, strict=True):
            placement[i][b] = units
    return tuple(map(tuple, placement))


@frozen
class _Solver:
    """Solver for items sorted from coarse to fine and bins sorted from roomy to tight."""

    items: list[Item]
    bins: list[Bin]
    thorough: bool = True

    def solve(self) -> Placement | None:
        if not self._possible(None):
            return None
        best = self._place(None) or self._improve(self._place(None, relaxed=True), 0)
        if best is None and self.thorough:
            with suppress(OutOfBudgetError):
                best = self._search(None, FIRST_BUDGET)
        if best is None or not self.thorough:
            return best
        high = self._time(best)
        low = t = self._lower_bound(high)
        step = max(1, low >> (TOLERANCE_BITS + 3))
        while t < high:
            found = self._place(t)
            if found:
                best, high = found, self._time(found)
            t += step
            step *= 2
        if self._is_gap(low, high):
            best = self._improve(best, low) or best
            best = self._close(best, low)
            best = self._evened(best, self._time(best))
        return best

    def _evened(self, found: Placement, t: int) -> Placement:
        """Return a placement that is nearly as fast and as proportional as possible; searches ignore proportion."""
        for fixed in range(len(self.items)):
            evened = self._place(t + (t >> TOLERANCE_BITS + 1), found[:fixed])
            if evened:
                return evened
        return found

    def _is_gap(self, low: int, high: int) -> bool:
        return high - low > low >> TOLERANCE_BITS

    def _improve(self, start: Placement | None, low: int) -> Placement | None:
        """Run the local search from ``start``, which may lack room, until near ``low`` or out of rounds."""
        if start is None:
            return None
        best = Improver(self.items, self.bins, start)
        best.run(low)
        score = best.score()
        rounds = max(4, min(200, PATIENCE // (len(self.items) * len(self.bins) ** 2))) if self.thorough else 0
        scatter, stale = numbers(), 0
        while stale < rounds:
            if not score[0] and not self._is_gap(low, score[1]):
                break
            stale += 1
            other = Improver(self.items, self.bins, best.units)
            other.shake(scatter)
            other.run(low)
            if other.score() <= score:
                stale = 0 if other.score() < score else stale
                best, score = other, other.score()
        return None if score[0] else tuple(map(tuple, best.units))

    def _close(self, best: Placement, low: int) -> Placement:
        """Bisect between the lower bound ``low`` and the time of the best placement until the gap is small."""
        high = self._time(best)
        while self._is_gap(low, high):
            middle = (low + high) // 2
            try:
                found = self._search(middle, BETTER_BUDGET)
            except OutOfBudgetError:
                break
            if found:
                best, high = found, self._time(found)
            else:
                low = middle + 1
        return best

    def _time(self, placement: Placement) -> int:
        """Return the time of a placement's slowest bin, the least ``t`` that it satisfies."""
        times = [0]
        for b, host in enumerate(self.bins):
            units = [row[b] for row in placement]
            if any(units):
                load = sum(item.load * n for item, n in zip(self.items, units, strict=True))
                times.append(-(-((load + host.load) << SHIFT) // host.speed))
        return max(times)

    def _lower_bound(self, high: int) -> int:
        """Return the least ``t`` that satisfies the necessary condition, at most ``high``."""
        low = 0
        while low < high:
            middle = (low + high) // 2
            if self._possible(middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _possible(self, t: int | None) -> bool:
        """Return whether ``t`` satisfies the necessary condition: items fit alone, and together by bytes and load."""
        spaces = [(b.room, limit) for b in self.bins if b.room >= 0 and (limit := b.limit(t)) >= 0]
        cost = load = 0
        for item in self.items:
            uppers = sorted((item.upper(*space) for space in spaces), reverse=True)
            # At least this many bins hold the item, and each pays the fixed cost.
            hosts = sum(held < item.count for held in accumulate(uppers, initial=0))
            if hosts > min(len(uppers), item.count // item.minimum):
                return False
            cost += item.kept * hosts + item.cost * item.count
            load += item.load * item.count
        return cost <= sum(room for room, _ in spaces) and load <= sum(limit for _, limit in spaces)

    def _place(self, t: int | None, given: Sequence[Sequence[int]] = (), *, relaxed: bool = False) -> Placement | None:
        """Cut every item as nearly in proportion to the bins as ``t`` and the rooms allow.

        Each item's target compensates for the deviations of the items before it. ``given`` fixes the placement of the
        first items; ``relaxed`` lets usable bins overflow.
        """
        rooms = [b.room for b in self.bins]
        limits = [b.limit(t) if b.room >= 0 else -1 for b in self.bins]
        fair = [max(0, room if t is None else limit) for room, limit in zip(rooms, limits, strict=True)]
        whole = sum(fair)
        wanted, borne = 0, [0] * len(rooms)
        placement: list[tuple[int, ...]] = []
        for index, item in enumerate(self.items):
            measure = item.cost if t is None else item.load
            wanted += measure * item.count
            targets = [wanted * f // whole - have if whole else 0 for f, have in zip(fair, borne, strict=True)]
            if relaxed:
                uppers = [item.count if host.room >= 0 else 0 for host in self.bins]
            else:
                uppers = [item.upper(room, limit) for room, limit in zip(rooms, limits, strict=True)]
            units = given[index] if index < len(given) else apportion(item.count, item.minimum, targets, uppers)
            if units is None:
                return None
            for b, n in enumerate(units):
                if n:
                    rooms[b] -= item.kept + item.cost * n
                    limits[b] -= item.load * n
                    borne[b] += measure * n
            placement.append(tuple(units))
        return tuple(placement)

    def _search(self, t: int | None, budget: int) -> Placement | None:
        """Search exhaustively, unless the necessary condition already fails."""
        if not self._possible(t):
            return None
        return search(self.items, [(b.room, b.limit(t)) for b in self.bins], budget)
