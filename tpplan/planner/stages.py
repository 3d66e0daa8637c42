"""Placing units so that a pass takes the least time, where devices wait for each other after every stage.

A stage is what devices compute between two sums: attention, the MLP or the experts, the logits. A pass takes the sum of
the stages' times, and a stage takes as long as its slowest bin. Where memory is plentiful, each stage is cut on its
own, and no placement is faster. Where it is not, a local search moves units, and exchanges them for those of other
items, until no move helps: first to keep within every room, then to take less time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from attrs import evolve

from tpplan.planner.improve import Move, allowed, even, numbers
from tpplan.planner.items import SHIFT
from tpplan.planner.place import Effort, in_order, solve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.planner.items import Bin, Item, Placement

#: Room that no item fills.
_PLENTY = 1 << 200
#: Moves that are considered, by effort; they are counted, because time differs between machines.
_STEPS = {Effort.ANY: 5_000, Effort.QUICK: 20_000, Effort.BEST: 120_000}
#: A placement within 1/1024 of the bound is good enough.
_TOLERANCE_BITS = 10
_SHAKES, _PATIENCE = 4, 100
#: How much more a stage counts than others where it is tried first.
_MORE = 8

#: Bytes that bins lack, the time of the pass, and a measure of how uneven stages are, which decides between others.
_Score: TypeAlias = tuple[int, int, int]


def solve_stages(items: Sequence[Item], bins: Sequence[Bin], effort: Effort = Effort.BEST) -> Placement | None:
    """Return a placement of which the sum of the stages' times is small, the least where there is room for it.

    Args:
        items: the items, with their stages.
        bins: the bins; of what they bear without these items, only what items say of it counts for their stage.
        effort: how long to look.

    Returns:
        None if no placement was found that fits.
    """
    return in_order(items, bins, lambda items, bins: _solve(items, bins, effort))


def _solve(items: Sequence[Item], bins: Sequence[Bin], effort: Effort) -> Placement | None:
    apart = _apart(items, bins, effort)
    if apart is None:
        return None
    best = _Search(items, bins, apart, _STEPS[effort])
    bound = best.score[1]
    if best.score[0] == 0:
        return apart
    best.run()
    found = [best]
    for start in _starts(items, bins, effort, Effort.QUICK if best.score[0] == 0 else effort):
        other = _Search(items, bins, start, _STEPS[effort])
        other.run()
        found.append(other)
    best = min(found, key=lambda each: each.score)
    if best.score[0]:
        return None
    if effort is Effort.BEST:
        best = best.shaken(bound + (bound >> _TOLERANCE_BITS))
    return best.placement


def _starts(items: Sequence[Item], bins: Sequence[Bin], effort: Effort, first: Effort) -> Iterator[Placement]:
    """Yield placements that fit, by the longest time of a bin for all of its load, whatever the stages.

    With the best effort, also those for which one stage counts more than the others.

    Args:
        items: the items.
        bins: the bins.
        effort: how long to look in all.
        first: how long to look for the first of them.
    """
    found = [solve(items, bins, first)]
    for stage in dict.fromkeys(item.stage for item in items) if effort is Effort.BEST else ():
        own = [evolve(i, load=_MORE * i.load, kept_load=_MORE * i.kept_load) if i.stage == stage else i for i in items]
        found.append(solve(own, bins, Effort.QUICK))
    yield from filter(None, found)


def _apart(items: Sequence[Item], bins: Sequence[Bin], effort: Effort) -> Placement | None:
    """Return the fastest placement of every stage, whatever room the bins have.

    Bins that are equally fast hold equal parts of a stage whose items can be divided so. To leave an item that is dear
    to hold to some of them, and more of the others to the rest, gains less than times are known to.
    """
    rows: dict[int, tuple[int, ...]] = {}
    count, is_even = len(bins), len({host.speed for host in bins}) == 1
    for stage in dict.fromkeys(item.stage for item in items):
        own = [i for i, item in enumerate(items) if item.stage == stage]
        if is_even and all(items[i].count % count == 0 and items[i].count // count >= items[i].minimum for i in own):
            rows |= {i: (items[i].count // count,) * count for i in own}
            continue
        borne = sum(items[i].borne for i in own)
        roomy = [evolve(host, room=_PLENTY, load=borne) for host in bins]
        found = solve([items[i] for i in own], roomy, effort, evenly=len(own) > 1)
        if found is None:
            return None
        rows.update(zip(own, found, strict=True))
    return tuple(rows[i] for i in range(len(items)))


class _Search:
    """A placement under improvement.

    Attributes:
        score: how good it is; less is better.
    """

    def __init__(self, items: Sequence[Item], bins: Sequence[Bin], placement: Placement, steps: int) -> None:
        self.items, self.bins, self.steps = items, bins, steps
        stages = [*dict.fromkeys(item.stage for item in items)]
        self.stage_of = [stages.index(item.stage) for item in items]
        self.units = [list(row) for row in placement]
        self.rooms = [host.room for host in bins]
        self.loads = [[0] * len(bins) for _ in stages]
        for i, item in enumerate(items):
            self.loads[self.stage_of[i]] = [load + item.borne for load in self.loads[self.stage_of[i]]]
            for b in range(len(bins)):
                room, load = item.change(0, self.units[i][b])
                self.rooms[b] -= room
                self.loads[self.stage_of[i]][b] += load
        self.score: _Score = (0, 0, 0)
        self._settle()

    @property
    def placement(self) -> Placement:
        """The units of every item in every bin."""
        return tuple(map(tuple, self.units))

    def run(self) -> None:
        """Take the best move until none helps, or no steps are left."""
        while self.steps > 0 and (move := self._best_move()):
            self._apply(move)

    def shaken(self, goal: int) -> _Search:
        """Search from placements near the best one, until its time is ``goal`` or no steps are left."""
        best, scatter, stale = self, numbers(), 0
        while stale < _PATIENCE and best.steps > 0 and (best.score[0] or best.score[1] > goal):
            other = _Search(self.items, self.bins, best.placement, best.steps)
            other._scatter(scatter)
            other.run()
            best.steps = other.steps
            stale = 0 if other.score[:2] < best.score[:2] else stale + 1
            best = other if other.score[:2] <= best.score[:2] else best
        return best

    def _scatter(self, numbers: Iterator[int]) -> None:
        """Move units at random, to leave a local optimum."""
        for _ in range(1 + next(numbers) % _SHAKES):
            i, giver, taker, n = (next(numbers) for _ in range(4))
            item, row = self.items[i % len(self.items)], self.units[i % len(self.items)]
            full = [b for b, have in enumerate(row) if have]
            source, target = full[giver % len(full)], taker % len(self.bins)
            amounts = allowed(item, (row[source], row[target]), (1, item.minimum, row[source] // 2, row[source]))
            if source != target and amounts:
                self._apply(Move(source, target, i % len(self.items), amounts[n % len(amounts)]))

    def _apply(self, move: Move) -> None:
        for item, source, target, n in (
            (move.item, move.giver, move.taker, move.units),
            (move.back, move.taker, move.giver, move.back_units),
        ):
            for b, more in ((source, -n), (target, n)):
                room, load = self._change(item, b, more)
                self.rooms[b] -= room
                self.loads[self.stage_of[item]][b] += load
                self.units[item][b] += more
        self._settle()

    def _settle(self) -> None:
        """Compute the score, and of every stage which bins are slowest."""
        times = [
            [(load << SHIFT) // host.speed for load, host in zip(row, self.bins, strict=True)] for row in self.loads
        ]
        self.times = times
        self.slowest = [sorted(range(len(row)), key=lambda b: -row[b])[:3] for row in times]
        lack = sum(max(0, -room) for room in self.rooms)
        total = sum(row[slow[0]] for row, slow in zip(times, self.slowest, strict=True))
        self.score = lack, total, sum(time * time for row in times for time in row) >> SHIFT

    def _change(self, item: int, b: int, more: int) -> tuple[int, int]:
        """Return the bytes and the load that more units of an item add to a bin."""
        return self.items[item].change(self.units[item][b], more)

    def _best_move(self) -> Move | None:
        best, score = None, self.score
        for move in self._moves():
            self.steps -= 1
            after = self._after(move)
            if after < score:
                best, score = move, after
        return best

    def _after(self, move: Move) -> _Score:
        """Return the score after a move."""
        giver, taker = pair = move.giver, move.taker
        lack, total, uneven = self.score
        before = giver_room, taker_room = self.rooms[giver], self.rooms[taker]
        stage, back_stage = self.stage_of[move.item], self.stage_of[move.back]
        gained, lost = self._change(move.item, taker, move.units), self._change(move.item, giver, -move.units)
        loads = [(stage, lost[1], gained[1])]
        giver_room, taker_room = giver_room - lost[0], taker_room - gained[0]
        if move.back_units:
            gained = self._change(move.back, giver, move.back_units)
            lost = self._change(move.back, taker, -move.back_units)
            giver_room, taker_room = giver_room - gained[0], taker_room - lost[0]
            if back_stage == stage:
                loads = [(stage, loads[0][1] + gained[1], loads[0][2] + lost[1])]
            else:
                loads.append((back_stage, gained[1], lost[1]))
        lack += sum(max(0, -room) for room in (giver_room, taker_room)) - sum(max(0, -room) for room in before)
        if lack > self.score[0]:
            return lack, total, uneven
        for s, more, other in loads:
            times, own = self.times[s], self.loads[s]
            one = ((own[giver] + more) << SHIFT) // self.bins[giver].speed
            two = ((own[taker] + other) << SHIFT) // self.bins[taker].speed
            others = next((times[b] for b in self.slowest[s] if b not in pair), 0)
            total += max(others, one, two) - times[self.slowest[s][0]]
            uneven += (one * one + two * two - times[giver] * times[giver] - times[taker] * times[taker]) >> SHIFT
        return lack, total, uneven

    def _moves(self) -> Iterator[Move]:
        """Yield moves out of the bin that lacks most, or else out of the slowest of each stage."""
        lacking = min(range(len(self.bins)), key=lambda b: self.rooms[b])
        if self.rooms[lacking] < 0:
            givers = [(lacking, i) for i, item in enumerate(self.items) if item.cost or item.kept]
        else:
            givers = [(self.slowest[s][0], i) for i, s in enumerate(self.stage_of)]
        for giver, i in givers:
            if self.units[i][giver]:
                for taker in range(len(self.bins)):
                    if taker != giver:
                        yield from self._between(giver, taker, i)

    def _between(self, giver: int, taker: int, i: int) -> Iterator[Move]:
        """Yield moves of an item from one bin to another, alone and in exchange for units of other items."""
        for n in self._amounts(i, giver, taker, self.rooms[giver], self.rooms[taker]):
            yield Move(giver, taker, i, n)
            left = self.rooms[giver] - self._change(i, giver, -n)[0], self.rooms[taker] - self._change(i, taker, n)[0]
            if left[1] < 0:
                for j in range(len(self.items)):
                    if j != i and self.units[j][taker]:
                        for m in self._amounts(j, taker, giver, left[1], left[0]):
                            yield Move(giver, taker, i, n, j, m)

    def _amounts(self, i: int, giver: int, taker: int, room: int, other_room: int) -> list[int]:
        """Return numbers of units to move: few, all, such that both take as long, or as the rooms ask for."""
        item, loads = self.items[i], self.loads[self.stage_of[i]]
        held, sides = (self.units[i][giver], self.units[i][taker]), ((room, loads[giver]), (other_room, loads[taker]))
        return allowed(item, held, {2, *even(item, held, sides, (self.bins[giver].speed, self.bins[taker].speed))})
