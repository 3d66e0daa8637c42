"""Placing units of several axes on devices: the integer program behind planning.

Every bin (device) has room in bytes and a speed. Every item (axis) consists of units that must all be placed. A bin
holds no units of an item or at least the item's minimum, and holding any has a fixed cost and a fixed load. The
objective is to minimise the time of the slowest bin: the least ``t`` such that no bin's load exceeds ``t`` times its
speed. All numbers are integers; ``t`` is a fixed-point number with ``SHIFT`` bits after the point.

There are four steps, from cheap to thorough; the later ones run only if a gap remains. A necessary condition gives a
lower bound on ``t``. A greedy placement cuts every item in proportion to the bins, coarse items first, so that finer
ones compensate their rounding; an item that is dear to hold is tried on few bins and on many. A local search
(:mod:`tpplan.planner.improve`) moves units. An exhaustive search (:mod:`tpplan.planner.search`) settles what remains.

At last, attention is given to as many bins as the tolerance of ``t`` allows.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from functools import cached_property
from itertools import accumulate, chain, product
from typing import TYPE_CHECKING, TypeAlias

from attrs import evolve, frozen

from tpplan.planner.apportion import apportion
from tpplan.planner.improve import Improver, numbers
from tpplan.planner.items import SHIFT, UNLIMITED, Bin, Item, Placement
from tpplan.planner.search import Budget, OutOfBudgetError, search

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: A placement within 1/1024 of the lower bound is good enough.
TOLERANCE_BITS = 10
#: Of placements within 1/1024 of it, one with attention in more bins is better. With more tolerance, more room could
#: make a placement slower: the next one may use it, where this one had no reason to.
TIE_BITS = 10
#: Of shares of budgets, also of placements that take less than 1/128 of what the fullest bin has left. Else the few MiB
#: that every bin with attention needs would give all of it to one, for which the others wait in every layer.
SPARE_BITS = 7
#: An item is dear to hold if that costs more than this part of all units, in all bins together.
DEAR_BITS = 13
#: Most rounds of the local search without improvement before it stops.
PATIENCE = 200
#: Steps of the local search: from each of several placements and from all of them, from the best one, to give
#: attention to more bins, and from others near the best one.
START_STEPS = 2_000
RESTART_STEPS = 25_000
RUN_STEPS = 20_000
WIDEN_STEPS = 15_000
SHAKE_STEPS = 60_000
#: Steps of the local search with less than the best effort, as many attempts have it.
ANY_STEPS = 800
#: Steps of each exhaustive search, to find a first placement or to improve one; often far fewer settle it.
SEARCH_STEPS = 30_000


class Effort(Enum):
    """How long to look for a placement.

    Attributes:
        ANY: until one fits.
        QUICK: until cuts in proportion do not get better.
        BEST: until it is proved to be good enough, or all steps are used up.
    """

    ANY = 0
    QUICK = 1
    BEST = 2


#: Number of bins that hold each item, 0 where any number will do.
Hosts: TypeAlias = tuple[int, ...]


def solve(
    items: Sequence[Item],
    bins: Sequence[Bin],
    effort: Effort = Effort.BEST,
    *,
    evenly: bool = False,
    shares: bool = False,
) -> Placement | None:
    """Return a placement whose ``t`` is within 1/1024 of the least, or None if nothing fits.

    The result does not depend on the order of the bins, except among equal ones. The exhaustive search has a budget; if
    it is used up (many bins, many coarse units, hardly any slack), the result is the best placement so far, or None.
    With less effort, an existing placement may be missed in tight cases.

    Args:
        items: the items.
        bins: the bins.
        effort: how long to look.
        evenly: whether of placements that are that good, one is returned that is as proportional as possible.
        shares: whether ``t`` is the largest share of a budget, which may be a little larger for attention in more bins.
    """
    return in_order(items, bins, lambda items, bins: _Solver(items, bins, effort, evenly, shares).solve())


def nearest(items: Sequence[Item], bins: Sequence[Bin]) -> Placement | None:
    """Return a placement that lacks little room, summed over all bins; None if no bin can be used at all."""
    return in_order(items, bins, lambda items, bins: _Solver(items, bins).nearest())


def in_order(
    items: Sequence[Item], bins: Sequence[Bin], solver: Callable[[list[Item], list[Bin]], Placement | None]
) -> Placement | None:
    """Return what a solver places, given items from coarse to fine and bins from roomy to tight, whatever their order.

    Bins that cannot be used are not among them.
    """
    usable = (b for b, host in enumerate(bins) if host.room >= 0)
    order = sorted(usable, key=lambda b: (-bins[b].room, -bins[b].speed, bins[b].load, b))
    ranks = sorted(range(len(items)), key=lambda i: (-items[i].cost, -items[i].load, i))
    found = solver([items[i] for i in ranks], [bins[b] for b in order]) if order else None
    if found is None:
        return None
    placement = [[0] * len(bins) for _ in items]
    for i, row in zip(ranks, found, strict=True):
        for b, units in zip(order, row, strict=True):
            placement[i][b] = units
    return tuple(map(tuple, placement))


@frozen(slots=False)
class _Solver:
    """Solver for items sorted from coarse to fine and bins sorted from roomy to tight."""

    items: list[Item]
    bins: list[Bin]
    effort: Effort = Effort.BEST
    evenly: bool = False
    shares: bool = False

    def solve(self) -> Placement | None:
        if not self._possible(None):
            return None
        best = self._first()
        if best is None or self.effort is Effort.ANY:
            return best
        low = self._lower_bound(self._time(best))
        best = self._descend(best, low)
        if self.effort is Effort.BEST and self._is_gap(low, self._time(best)):
            best = self._restarted(best, low)
            for shaking in (False, True):
                best = self._improve(best, low, shaking=shaking) or best
                best, low = self._close(best, low)
            best = self._evened(best, max(self._time(best), low + (low >> TOLERANCE_BITS)))
        limit = max(self._time(best), low + (low >> TIE_BITS))
        best = self._widened(self._evened(best, limit) if self.evenly else best, limit)
        return self._shared(best, low) if self.shares else best

    def _shared(self, best: Placement, low: int) -> Placement:
        """Return a placement with attention in as many of the bins in use as take a little of what is left free."""
        used = [b for b in range(len(self.bins)) if any(row[b] for row in best)]
        among = evolve(self, bins=[self.bins[b] for b in used])
        found: Placement = tuple(tuple(row[b] for b in used) for row in best)
        tie, most = low >> TIE_BITS, (1 << SHIFT) - low >> SPARE_BITS
        while 0 < tie < most:  # no more than it takes
            tie = min(2 * tie, most)
            found = among._widened(found, max(among._time(found), low + tie))  # noqa: SLF001 (of the same class)
        rows = (dict(zip(used, row, strict=True)) for row in found)
        return tuple(tuple(row.get(b, 0) for b in range(len(self.bins))) for row in rows)

    def nearest(self) -> Placement | None:
        best: Improver | None = None
        for hosts in self._choices(None):
            start = self._place(None, hosts, relaxed=True)
            if start:
                other = Improver(self.items, self.bins, start, Budget(START_STEPS))
                other.run(0)
                best = other if best is None or other.score()[0] < best.score()[0] else best
        return tuple(map(tuple, best.units)) if best else None

    def _first(self) -> Placement | None:
        """Return any placement that fits."""
        for hosts in self._choices(None):
            best = self._place(None, hosts)
            if best:
                return best
        start = self._place(None, self._free, relaxed=True)
        best = self._improve(start, 0, shaking=False)
        if best is None and self.effort is Effort.BEST:
            with suppress(OutOfBudgetError):
                return self._search(None, Budget(SEARCH_STEPS))
            best = self._improve(start, 0, shaking=True)
        return best

    @property
    def _free(self) -> Hosts:
        return (0,) * len(self.items)

    def _choices(self, t: int | None) -> Iterator[Hosts]:
        """Yield numbers of hosts: free ones, then every number for each item that is dear to hold."""
        yield self._free
        fewest, bins = self._fewest(t) or [1] * len(self.items), len(self.bins)
        cost = sum(item.cost * item.count for item in self.items) >> DEAR_BITS
        load = sum(item.load * item.count for item in self.items) >> DEAR_BITS
        for i, item in enumerate(self.items):
            if item.kept * bins > cost or item.kept_load * bins > load:
                for hosts in _steps(max(1, fewest[i]), min(bins, item.count // item.minimum)):
                    yield (*self._free[:i], hosts, *self._free[i + 1 :])

    def _descend(self, best: Placement, low: int) -> Placement:
        """Place again for longer and longer times above the lower bound, for each choice of hosts."""
        high = self._time(best)
        starts = sorted((self._lower_bound(high, low, hosts), hosts) for hosts in self._choices(high))
        for start, hosts in starts:
            t = start
            step = max(1, low >> TOLERANCE_BITS + 4)
            while t < high:
                found = self._place(t, hosts)
                if found and self._time(found) < high:
                    best, high = found, self._time(found)
                t += step
                step *= 2
        return best

    def _restarted(self, best: Placement, low: int) -> Placement:
        """Run the local search from placements that are fast but overflow, for each choice of hosts."""
        high, left = self._time(best), RESTART_STEPS
        for hosts, t in product(self._choices(high), (None, low)):
            start = self._place(t, hosts, relaxed=True)
            if start and left > 0 and self._is_gap(low, high):
                budget = Budget(START_STEPS)
                other = Improver(self.items, self.bins, start, budget)
                other.run(low)
                left -= START_STEPS - budget.left
                lack, time = other.score()
                if not lack and time < high:
                    best, high = tuple(map(tuple, other.units)), time
        return best

    def _evened(self, found: Placement, t: int) -> Placement:
        """Return a placement within ``t`` that is as proportional as possible; searches ignore proportion."""
        for fixed in range(len(self.items)):
            evened = self._place(t, self._free, found[:fixed])
            if evened and self._hosts(evened) >= self._hosts(found):
                return evened
        return found

    def _hosts(self, placement: Placement) -> int:
        """Return how many bins hold each item with attention, summed over these items."""
        return sum(n > 0 for item, row in zip(self.items, placement, strict=True) if item.attention for n in row)

    def _widened(self, best: Placement, t: int) -> Placement:
        """Return a placement with attention in as many bins as ``t`` allows, if that takes no more from others."""
        attention, left = frozenset(i for i, item in enumerate(self.items) if item.attention), WIDEN_STEPS
        held = [sum(map(bool, row)) for row in best]
        for i in attention:
            item = self.items[i]
            for number in reversed([*_steps(held[i] + 1, min(len(self.bins), item.count // item.minimum))]):
                hosts = tuple(number if j == i else held[j] if j in attention else 0 for j in range(len(held)))
                if not self._possible(t, hosts):
                    continue
                found = self._place(t, hosts)
                if not found and left > 0 and (start := self._place(t, hosts, relaxed=True)):
                    budget = Budget(START_STEPS)
                    other = Improver(self.items, self.bins, start, budget, attention)
                    other.run(t)
                    left -= START_STEPS - budget.left
                    if other.score()[0] == 0 and other.score()[1] <= t:
                        found = tuple(map(tuple, other.units))
                if found and _parts(found) >= _parts(best):
                    best, held = found, [sum(map(bool, row)) for row in found]
                    break
        return best

    def _is_gap(self, low: int, high: int) -> bool:
        return high - low > low >> TOLERANCE_BITS

    def _improve(self, start: Placement | None, low: int, *, shaking: bool) -> Placement | None:
        """Run the local search from ``start``, which may lack room, until near ``low``.

        With ``shaking``, run it also from placements near the best one, until out of steps.
        """
        if start is None:
            return None
        steps = RUN_STEPS if self.effort is Effort.BEST else ANY_STEPS
        best = Improver(self.items, self.bins, start, Budget(steps))
        best.run(low)
        score, stale = best.score(), 0
        budget, scatter = Budget(SHAKE_STEPS if shaking else -1), numbers()
        while stale < PATIENCE and budget.left > 0 and (score[0] or self._is_gap(low, score[1])):
            stale += 1
            other = Improver(self.items, self.bins, best.units, budget)
            other.shake(scatter)
            other.run(low)
            if other.score() <= score:
                stale = 0 if other.score() < score else stale
                best, score = other, other.score()
        return None if score[0] else tuple(map(tuple, best.units))

    def _close(self, best: Placement, low: int) -> tuple[Placement, int]:
        """Bisect between the lower bound and the time of the best placement; return it and a better lower bound."""
        high, budget = self._time(best), Budget(SEARCH_STEPS)
        while self._is_gap(low, high):
            middle = (low + high) // 2
            try:
                found = self._search(middle, budget)
            except OutOfBudgetError:
                break
            if found:
                best, high = found, self._time(found)
            else:
                low = middle + 1
        return best, low

    def _time(self, placement: Placement) -> int:
        """Return the time of a placement's slowest bin, the least ``t`` that it satisfies."""
        times = [0]
        for b, host in enumerate(self.bins):
            held = [(item, row[b]) for item, row in zip(self.items, placement, strict=True) if row[b]]
            if held:
                load = host.load + sum(item.kept_load + item.load * n for item, n in held)
                times.append(-(-(load << SHIFT) // host.speed))
        return max(times)

    def _lower_bound(self, high: int, low: int = 0, hosts: Hosts = ()) -> int:
        """Return the least ``t`` that satisfies the necessary condition, from ``low`` to ``high``, or little less."""
        while high - low > low >> TOLERANCE_BITS + 4:
            middle = (low + high) // 2
            if self._possible(middle, hosts):
                high = middle
            else:
                low = middle + 1
        return low

    def _fewest(self, t: int | None, hosts: Hosts = ()) -> list[int] | None:
        """Return in how many bins each item must be at least, were it alone; None if it does not fit."""
        spaces = [(b.room, limit) for b in self.bins if b.room >= 0 and (limit := b.limit(t)) >= 0]
        fewest = []
        for item, number in zip(self.items, hosts or self._free, strict=True):
            uppers = sorted((item.upper(*space) for space in spaces), reverse=True)
            held = sum(total < item.count for total in accumulate(uppers, initial=0))
            held = max(held, number)
            if held > min(sum(map(bool, uppers)), item.count // item.minimum) or (number and held > number):
                return None
            fewest.append(held)
        return fewest

    def _possible(self, t: int | None, hosts: Hosts = ()) -> bool:
        """Return whether ``t`` satisfies the necessary condition: items fit alone, and together by bytes and load."""
        fewest = self._fewest(t, hosts)
        if fewest is None:
            return False
        spaces = [(b.room, limit) for b in self.bins if b.room >= 0 and (limit := b.limit(t)) >= 0]
        for room_price, load_price in self._prices:
            # What an item takes has the lower one of two prices, that of its bytes or that of its load. At such prices
            # no bin holds more than its room is worth, nor more than its limit is worth.
            needed = sum(
                min(item.cost * room_price, item.load * load_price) * item.count
                + min(item.kept * room_price, item.kept_load * load_price) * n  # for each bin that holds it
                for item, n in zip(self.items, fewest, strict=True)
            )
            if needed > sum(min(room * room_price, limit * load_price) for room, limit in spaces):
                return False
        return True

    @cached_property
    def _prices(self) -> list[tuple[int, int]]:
        """Return prices of a byte and of a unit of load: very different ones, and such that an item's are equal."""
        equal = {(item.load, item.cost) for item in self.items if item.load and item.cost}
        return [(1, UNLIMITED), (UNLIMITED, 1), *sorted(equal)]

    def _place(
        self, t: int | None, hosts: Hosts, given: Sequence[Sequence[int]] = (), *, relaxed: bool = False
    ) -> Placement | None:
        """Cut every item as nearly in proportion to the bins as ``t`` and the rooms allow.

        Each item's target compensates for the deviations of the items before it. ``hosts`` sets the number of bins that
        hold each item; ``given`` fixes the placement of the first items; ``relaxed`` lets usable bins overflow.
        """
        rooms = [b.room for b in self.bins]
        limits = [b.limit(t) if b.room >= 0 else -1 for b in self.bins]
        fair = [max(0, room if t is None else limit) for room, limit in zip(rooms, limits, strict=True)]
        whole = sum(fair)
        wanted, borne = 0, [0] * len(rooms)
        placement: dict[int, tuple[int, ...]] = {}
        for index in self._order(hosts, len(given)):
            item = self.items[index]
            unit, kept = (item.cost, item.kept) if t is None else (item.load, item.kept_load)
            wanted += unit * item.count + kept * hosts[index]
            targets = [wanted * f // whole - have if whole else 0 for f, have in zip(fair, borne, strict=True)]
            if relaxed:
                uppers = [item.count if host.room >= 0 else 0 for host in self.bins]
            else:
                uppers = [item.upper(room, limit) for room, limit in zip(rooms, limits, strict=True)]
            if index < len(given):
                units = list(given[index])
            else:
                found = apportion(item.count, item.minimum, targets, uppers, number=hosts[index])
                if found is None:
                    return None
                units = found
            for b, n in enumerate(units):
                if n:
                    rooms[b] -= item.kept + item.cost * n
                    limits[b] -= item.kept_load + item.load * n
                    borne[b] += kept + unit * n
            placement[index] = tuple(units)
        return tuple(placement[index] for index in range(len(self.items)))

    def _order(self, hosts: Hosts, given: int) -> list[int]:
        """Return the items in the order in which to place them: those that are given, then from coarse to fine.

        Of an item with few hosts, what each of them must hold is one lump.
        """

        def lump(index: int) -> int:
            item, number = self.items[index], hosts[index]
            return item.kept + item.cost * item.count // number if number else item.cost

        return [*range(given), *sorted(range(given, len(self.items)), key=lambda index: -lump(index))]

    def _search(self, t: int | None, budget: Budget) -> Placement | None:
        """Search exhaustively, unless the necessary condition already fails."""
        if not self._possible(t):
            return None
        return search(self.items, [(b.room, b.limit(t)) for b in self.bins], budget)


def _parts(placement: Placement) -> int:
    """Return how many bins hold each item, summed over all items."""
    return sum(map(bool, chain.from_iterable(placement)))


def _steps(first: int, last: int) -> Iterator[int]:
    """Yield each small number of a range, some of the larger ones, and the last one."""
    n = first
    while n < last:
        yield n
        n += max(1, n // 8)
    if first <= last:
        yield last
