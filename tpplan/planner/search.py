"""Exhaustive search for a placement: dynamic programming over the bins, limited to states that can still succeed."""

from __future__ import annotations

from itertools import accumulate
from operator import le, mul, sub
from typing import TYPE_CHECKING, TypeAlias

from attrs import define

from tpplan.planner.apportion import apportion

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.planner.items import Item


#: Filler units that fit in all bins so far, the previous state, and the bin's coarse units and filler units.
_Step: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], int]


class OutOfBudgetError(Exception):
    """The search used up its budget without an answer."""


@define
class Budget:
    """The number of steps that searches may still take together; counted, because time differs between machines.

    Attributes:
        left: steps left; negative if more were taken.
    """

    left: int

    def spend(self, steps: int) -> None:
        """Take steps.

        Raises:
            OutOfBudgetError: there are fewer left.
        """
        self.left -= steps
        if self.left < 0:
            raise OutOfBudgetError


def search(
    items: Sequence[Item], spaces: Sequence[tuple[int, int]], budget: Budget
) -> tuple[tuple[int, ...], ...] | None:
    """Return units of every item per bin that fit, or None if there is no such placement.

    The finest item, the filler, fills the space that the other items leave in the bins. A state is the number of units
    of each other item that are not yet placed. Of several paths to a state, only the one with the most filler counts.

    Args:
        items: the items to place.
        spaces: room in bytes and limit of load of each bin; a bin with a negative value cannot be used.
        budget: a step for each move that is examined.

    Raises:
        OutOfBudgetError: the budget was used up.
    """
    finest = max(range(len(items)), key=lambda i: (items[i].count // items[i].minimum, -items[i].cost))
    # The filler needs its minimum for every bin: otherwise its total space does not decide, and it is coarse too.
    filler = items[finest] if items[finest].count // items[finest].minimum >= len(spaces) else None
    coarse = [item for i, item in enumerate(items) if filler is None or i != finest]
    steps = _Walk(coarse, filler, spaces, budget).steps()
    state = (0,) * len(coarse)
    if state not in steps[-1]:
        return None
    rows = [[0] * len(spaces) for _ in coarse]
    uppers = [0] * len(spaces)
    for b in reversed(range(len(spaces))):
        _, before, units, uppers[b] = steps[b][state]
        state = before
        for row, n in zip(rows, units, strict=True):
            row[b] = n
    if filler:
        rows.insert(finest, apportion(filler.count, filler.minimum, uppers, uppers) or [])
    return tuple(map(tuple, rows))


class _Walk:
    """A forward pass over the bins that keeps the states from which a placement is still possible."""

    def __init__(
        self, coarse: list[Item], filler: Item | None, spaces: Sequence[tuple[int, int]], budget: Budget
    ) -> None:
        self.coarse, self.filler, self.spaces, self.budget = coarse, filler, spaces, budget
        usable = [space if min(space) >= 0 else (0, 0) for space in spaces]
        self.later = [*accumulate(reversed(usable), lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0))][::-1][1:]
        uppers = [[item.upper(*space) for item in coarse] for space in spaces]
        totals = accumulate(
            reversed(uppers), lambda a, b: [x + y for x, y in zip(a, b, strict=True)], initial=[0] * len(coarse)
        )
        self.later_units = [*totals][::-1][1:]
        self.costs, self.loads = [item.cost for item in coarse], [item.load for item in coarse]
        self.kept, self.kept_loads = [item.kept for item in coarse], [item.kept_load for item in coarse]

    def steps(self) -> list[dict[tuple[int, ...], _Step]]:
        """Return the states after each bin, each with the step that reached it."""
        steps: list[dict[tuple[int, ...], _Step]] = []
        states: dict[tuple[int, ...], _Step] = {tuple(item.count for item in self.coarse): (0, (), (), 0)}
        for b in range(len(self.spaces)):
            reached: dict[tuple[int, ...], _Step] = {}
            for state, (filled, *_) in states.items():
                for units, room, limit in self._moves(b, state):
                    upper = self.filler.upper(room, limit) if self.filler else 0
                    left = tuple(map(sub, state, units))
                    # With more filler a state is no less hopeful than it was.
                    if filled + upper > reached[left][0] if left in reached else self._hopeful(b, left, filled + upper):
                        reached[left] = (filled + upper, state, units, upper)
            steps.append(reached)
            states = reached
        last = steps[-1].get((0,) * len(self.coarse))
        if self.filler and last and last[0] < self.filler.count:
            steps[-1] = {}
        return steps

    def _moves(self, b: int, state: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Yield the units of the coarse items that a bin may take, with the remaining room and limit.

        Units of the last item that would leave more of it than the bins after ``b`` can hold are left out.
        """
        space, last = self.spaces[b], len(state) - 1
        if min(space) < 0:
            yield (0,) * len(state), 0, -1
            return
        partial: list[tuple[tuple[int, ...], int, int]] = [((), *space)]
        for i, (item, have) in enumerate(zip(self.coarse, state, strict=True)):
            least = max(0, have - self.later_units[b][i]) if i == last else 0
            longer = []
            for units, room, limit in partial:
                most = min(have, item.upper(room, limit))
                self.budget.spend(1 + most)
                for n in (*range(1 - least), *range(max(item.minimum, least), most + 1)):
                    if 0 < have - n < item.minimum:
                        continue
                    used = (item.kept + item.cost * n, item.kept_load + item.load * n) if n else (0, 0)
                    longer.append(((*units, n), room - used[0], limit - used[1]))
            partial = longer
        yield from partial

    def _hopeful(self, b: int, left: tuple[int, ...], filled: int) -> bool:
        """Return whether the bins after ``b`` could hold the remaining units by number, bytes and load."""
        if not all(map(le, left, self.later_units[b])):
            return False
        room, limit = self.later[b]
        cost: int = sum(map(mul, self.costs, left)) + sum(kept for kept, n in zip(self.kept, left, strict=True) if n)
        load: int = sum(map(mul, self.loads, left)) + sum(f for f, n in zip(self.kept_loads, left, strict=True) if n)
        if self.filler:
            missing = max(0, self.filler.count - filled)
            cost, load = cost + self.filler.cost * missing, load + self.filler.load * missing
        return cost <= room and load <= limit
