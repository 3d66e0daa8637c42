"""Local search that improves a placement by moving units out of its worst bin.

A move takes units of one item from the worst bin to another bin, or exchanges units of two items. The worst bin is the
one that lacks the most room; if none lacks room, it is the slowest one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tpplan.planner.items import Bin, Item
    from tpplan.planner.search import Budget

#: Most bins to consider as partners of a move: the least loaded ones.
_PARTNERS = 24
_MOST_MOVES = 400
_FEW = 12
_SHAKES = 6

#: Room and load of a bin.
Side: TypeAlias = tuple[int, int]


def numbers() -> Iterator[int]:
    """Yield pseudorandom numbers, the same sequence each time and on every version of Python."""
    state = 1
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


@frozen
class Move:
    """Units of an item from one bin to another, and perhaps units of a second item back."""

    giver: int
    taker: int
    item: int
    units: int
    back: int = 0
    back_units: int = 0


class Improver:
    """A placement under improvement.

    Attributes:
        units: number of units of each item in each bin.
        budget: a step for each amount that is considered; without steps left, the search ends.
        guarded: items that no bin may lose altogether.
        sides: remaining room of each bin, negative if it lacks room, and its load, including the bin's own.
    """

    def __init__(
        self,
        items: Sequence[Item],
        bins: Sequence[Bin],
        placement: Sequence[Sequence[int]],
        budget: Budget,
        guarded: frozenset[int] = frozenset(),
    ) -> None:
        self.items, self.bins, self.budget, self.guarded = items, bins, budget, guarded
        self.units = [[0] * len(bins) for _ in items]
        self.sides = [(host.room, host.load) for host in bins]
        self.fixed_load = sum(item.kept_load for item in items)
        for i, row in enumerate(placement):
            for b, n in enumerate(row):
                self._add(i, b, n)

    def _add(self, item: int, b: int, more: int) -> None:
        self.sides[b] = _with(self.sides[b], self.items[item], self.units[item][b], more)
        self.units[item][b] += more

    def _used(self, b: int) -> bool:
        return any(row[b] for row in self.units)

    def score(self) -> tuple[int, int]:
        """Return the bytes of room that the bins lack, and the longest time in units of 2^-64."""
        lack = sum(max(0, -room) for room, _ in self.sides)
        times = [-(-(side[1] << 64) // self.bins[b].speed) for b, side in enumerate(self.sides) if self._used(b)]
        return lack, max(times)

    def run(self, goal: int) -> None:
        """Improve until no move helps, or no bin lacks room or takes longer than ``goal``, in units of 2^-64."""
        for _ in range(_MOST_MOVES):
            if self.budget.left < 0:
                return
            worst = self._worst()
            room, load = self.sides[worst]
            if room >= 0 and load << 64 <= goal * self.bins[worst].speed:
                return
            move = self._best_move(worst)
            if move is None:
                return
            self._apply(move)

    def shake(self, numbers: Iterator[int]) -> None:
        """Move units at random, to leave a local optimum."""
        usable = [b for b, host in enumerate(self.bins) if host.room >= 0]
        for _ in range(2 + next(numbers) % _SHAKES):
            i, giver, taker, n = (next(numbers) for _ in range(4))
            item, row = self.items[i % len(self.items)], self.units[i % len(self.items)]
            full = [b for b, have in enumerate(row) if have]
            source, target = full[giver % len(full)], usable[taker % len(usable)]
            amounts = [*_amounts(row[source], row[target], item.minimum)] if source != target else []
            if amounts:
                self._apply(Move(source, target, i % len(self.items), amounts[n % len(amounts)]))

    def _apply(self, move: Move) -> None:
        self._add(move.item, move.giver, -move.units)
        self._add(move.item, move.taker, move.units)
        self._add(move.back, move.taker, -move.back_units)
        self._add(move.back, move.giver, move.back_units)

    def _worst(self) -> int:
        """Return the bin that lacks the most room, or else the slowest one."""
        worst, lack, load, speed = -1, 0, -1, 1
        for b, side in enumerate(self.sides):
            missing, s = max(0, -side[0]), self.bins[b].speed
            if (missing > lack or (missing == lack and side[1] * speed > load * s)) and self._used(b):
                worst, lack, load, speed = b, missing, side[1], s
        return worst

    def _best_move(self, giver: int) -> Move | None:
        """Return the move after which both bins lack the least room, then take the least time; None if none helps."""
        (room, load), speed = self.sides[giver], self.bins[giver].speed
        best = _Best(load, speed)
        for taker in self._partners(giver):
            other_room, other_load = self.sides[taker]
            other_speed = self.bins[taker].speed
            lack = max(0, -room) + max(0, -other_room)
            # One of both bins takes at least as long as both would evenly, if they were rid of all fixed loads.
            saved = 2 * self.fixed_load
            if best.may_be_beaten((0, load + other_load - saved), speed + other_speed, lack):
                self._consider(giver, taker, lack, best)
        return best.move

    def _partners(self, giver: int) -> list[int]:
        partners = [b for b, host in enumerate(self.bins) if b != giver and host.room >= 0]
        if len(partners) <= _PARTNERS:
            return partners
        return sorted(partners, key=lambda b: ((self.sides[b][1] << 32) // self.bins[b].speed, b))[:_PARTNERS]

    def _consider(self, giver: int, taker: int, lack: int, best: _Best) -> None:
        """Compare the moves between two bins, which now lack ``lack`` bytes, with the best one so far."""
        sides, speeds = (self.sides[giver], self.sides[taker]), (self.bins[giver].speed, self.bins[taker].speed)
        for i, item in enumerate(self.items):
            held = self.units[i][giver], self.units[i][taker]
            for n in even(item, held, sides, speeds):
                self.budget.left -= 1
                if self._may_leave(i, held, n):
                    moved = _with(sides[0], item, held[0], -n), _with(sides[1], item, held[1], n)
                    best.compare(moved, speeds, lack, (giver, taker, i, n))
            self._consider_swaps(i, giver, taker, lack, best)
            self._consider_swaps(i, taker, giver, lack, best)

    def _consider_swaps(self, i: int, giver: int, taker: int, lack: int, best: _Best) -> None:
        """Compare the moves of units of an item for units of a finer one.

        Of the coarser one every amount is tried, with the best amounts of the finer one.
        """
        item, held = self.items[i], (self.units[i][giver], self.units[i][taker])
        speeds = self.bins[giver].speed, self.bins[taker].speed
        finer = [j for j in range(i + 1, len(self.items)) if self.units[j][taker]]
        for n in _amounts(*held, item.minimum) if finer else ():
            self.budget.left -= 1
            given = _with(self.sides[giver], item, held[0], -n)
            if not best.may_be_beaten(given, speeds[0], lack) or not self._may_leave(i, held, n):
                continue
            taken = _with(self.sides[taker], item, held[1], n)
            for j in finer:
                back, theirs = self.items[j], (self.units[j][taker], self.units[j][giver])
                # The giver gets at least one unit back, the taker at most gets rid of all.
                least, most = _with(given, back, theirs[1], 1), _with(taken, back, theirs[0], -theirs[0])
                if not best.may_be_beaten(least, speeds[0], lack) or not best.may_be_beaten(most, speeds[1], lack):
                    continue
                for m in even(back, theirs, (taken, given), speeds[::-1]):
                    self.budget.left -= 1
                    if self._may_leave(j, theirs, m):
                        sides = _with(given, back, theirs[1], m), _with(taken, back, theirs[0], -m)
                        best.compare(sides, speeds, lack, (giver, taker, i, n, j, m))

    def _may_leave(self, item: int, held: tuple[int, int], units: int) -> bool:
        """Return whether units may leave the first of two bins, which hold so many: no bin may lose a guarded item."""
        return item not in self.guarded or units < held[0] or not held[1]


class _Best:
    """The best move of a bin so far.

    Attributes:
        move: the move; None if none helps.
        change: change in the bytes that both bins lack.
        load: load of the slower one of both bins after the move.
        speed: its speed.
    """

    def __init__(self, load: int, speed: int) -> None:
        self.move: Move | None = None
        self.change, self.load, self.speed = 0, load, speed

    def may_be_beaten(self, side: Side, speed: int, lack: int) -> bool:
        """Return whether a move may be better after which one bin has at most this room and at least this load."""
        change = max(0, -side[0]) - lack
        if change == 0 and lack:
            return False
        return change < self.change or (change == self.change and side[1] * self.speed < self.load * speed)

    def compare(self, sides: tuple[Side, Side], speeds: tuple[int, int], lack: int, move: tuple[int, ...]) -> None:
        """Keep a move after which two bins have these sides, if it is better."""
        given, taken = sides
        change = max(0, -given[0]) + max(0, -taken[0]) - lack
        if change > self.change or (change == 0 and lack):
            return
        slower = given[1] * speeds[1] >= taken[1] * speeds[0]
        load, speed = (given[1], speeds[0]) if slower else (taken[1], speeds[1])
        if change < self.change or load * self.speed < self.load * speed:
            self.move, self.change, self.load, self.speed = Move(*move), change, load, speed


def _with(side: Side, item: Item, have: int, more: int) -> Side:
    """Return a bin's room and load after adding ``more`` units (removing, if negative) to ``have`` of an item."""
    size, load = item.change(have, more)
    return side[0] - size, side[1] + load


def even(item: Item, held: tuple[int, int], sides: tuple[Side, Side], speeds: tuple[int, int]) -> list[int]:
    """Return numbers of units to move from the first to the second of two bins, which hold so many.

    They equalise the times, just fill the second or just relieve the first one, or are the fewest or all.
    """
    giver, taker = sides
    amounts = {held[0], item.minimum, 1}
    if item.cost:
        amounts |= {-(giver[0] // item.cost), taker[0] // item.cost}
    if item.load:
        equal = (giver[1] * speeds[1] - taker[1] * speeds[0]) // (item.load * (speeds[0] + speeds[1]))
        amounts |= {equal, equal + 1}
    return allowed(item, held, amounts)


def allowed(item: Item, held: tuple[int, int], amounts: Iterable[int]) -> list[int]:
    """Return those numbers of units that leave the first and give the second of two bins none or enough of an item."""
    (have, there), least = held, item.minimum
    return sorted({n for n in amounts if 0 < n <= have and not 0 < have - n < least and there + n >= least})


def _amounts(have: int, there: int, minimum: int) -> Iterator[int]:
    """Yield numbers of units to move out of ``have``: each small number, all, and some steps between."""
    n = 1
    while n <= have:
        if not 0 < have - n < minimum and there + n >= minimum:
            yield n
        n += 1 if n < _FEW else max(1, n // 4)
    if have >= _FEW and there + have >= minimum:
        yield have
