"""Placing units: against every placement there is, on instances small enough to try them all."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from attrs import evolve, frozen
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tpplan.planner.improve import Improver, _Best, numbers
from tpplan.planner.items import SHIFT, Bin, Item, Placement
from tpplan.planner.place import Effort, _Solver, solve
from tpplan.planner.search import Budget, OutOfBudgetError, search

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NEAR = Fraction(1001, 1000)
#: Larger instances take long to solve, and for ever to shrink.
few = settings(max_examples=examples(25), phases=(Phase.explicit, Phase.reuse, Phase.generate))


@frozen
class Instance:
    """Items and bins."""

    items: tuple[Item, ...]
    bins: tuple[Bin, ...]


@st.composite
def items(draw: st.DrawFn) -> Item:
    """An item of a few units; it may cost nothing, or weigh nothing."""
    count = draw(st.integers(1, 6))
    small, tiny = st.integers(0, 9), st.integers(0, 5)
    return Item(
        count,
        draw(st.integers(1, min(3, count))),
        draw(small),
        draw(tiny),
        draw(small),
        draw(tiny),
        draw(st.booleans()),
    )


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """One to three items and bins; some bins cannot be used, and often nothing fits."""
    things = draw(st.lists(items(), min_size=1, max_size=3))
    # Bins of about the size that they need to have: neither nearly always too large nor too small.
    need = sum(item.cost * item.count + item.kept for item in things)
    count = draw(st.integers(1, 3))
    room = st.integers(need // count - 8, need // count + 12)
    hosts = st.builds(Bin, room=room, speed=st.integers(1, 9), load=st.integers(0, 6))
    return Instance(tuple(things), tuple(draw(st.lists(hosts, min_size=count, max_size=count))))


@st.composite
def larger_instances(draw: st.DrawFn) -> Instance:
    """Up to three items of dozens of units on up to five bins with room enough."""
    things = []
    for _ in range(draw(st.integers(1, 3))):
        count, cost, kept = draw(st.integers(8, 40)), draw(st.integers(1, 90)), draw(st.integers(0, 200))
        load, kept_load = draw(st.integers(0, 90)), draw(st.integers(0, 200))
        things.append(Item(count, draw(st.integers(1, 8)), cost, kept, load, kept_load, draw(st.booleans())))
    need = sum(item.cost * item.count + item.kept for item in things)
    host = st.builds(Bin, room=st.integers(need // 5, need), speed=st.integers(1, 99), load=st.integers(0, 50))
    return Instance(tuple(things), tuple(draw(st.lists(host, min_size=2, max_size=5))))


def hidden(seed: int) -> tuple[Instance, Placement]:
    """An instance with hardly any slack, and the placement around which it was made, whose time is at most 1."""
    rng = random.Random(seed)
    count = rng.randint(2, 5)
    things, placement = [], []
    for _ in range(rng.randint(2, 3)):
        units = rng.randint(4, 14)
        kept = rng.choice((0, rng.randint(1, 60)))
        item = Item(units, rng.randint(1, 3), rng.randint(1, 99), kept, rng.randint(0, 99), rng.choice((0, kept)))
        hosts = rng.sample(range(count), min(count, rng.randint(1, units // item.minimum)))
        row = [item.minimum if b in hosts else 0 for b in range(count)]
        for _ in range(units - sum(row)):
            row[rng.choice(hosts)] += 1
        things.append(item)
        placement.append(tuple(row))
    task = Instance(tuple(things), (Bin(0, 1, 0),) * count)
    sizes = [used(task, placement, b) for b in range(count)]
    bins = tuple(Bin(room + rng.randint(0, 3), max(1, load + rng.randint(0, 3)), 0) for room, load in sizes)
    return evolve(task, bins=bins), tuple(placement)


def rows(item: Item, bins: int) -> Iterator[tuple[int, ...]]:
    """Every way to put an item's units into bins, whatever their room."""
    for units in product((0, *range(item.minimum, item.count + 1)), repeat=bins):
        if sum(units) == item.count:
            yield units


def used(task: Instance, placement: Sequence[Sequence[int]], b: int) -> tuple[int, int]:
    """Bytes and load that a bin bears, without its own."""
    held = [(item, row[b]) for item, row in zip(task.items, placement, strict=True) if row[b]]
    return sum(i.kept + i.cost * n for i, n in held), sum(i.kept_load + i.load * n for i, n in held)


def time(task: Instance, placement: Sequence[Sequence[int]]) -> Fraction:
    """The time of the slowest bin in use."""
    busy = [b for b in range(len(task.bins)) if any(row[b] for row in placement)]
    return max(Fraction(used(task, placement, b)[1] + task.bins[b].load, task.bins[b].speed) for b in busy)


def fits(task: Instance, placement: Sequence[Sequence[int]]) -> bool:
    """Whether no bin in use overflows."""
    return all(
        used(task, placement, b)[0] <= host.room for b, host in enumerate(task.bins) if any(row[b] for row in placement)
    )


def best_time(task: Instance) -> Fraction | None:
    """The least time of all placements that fit, None if there is none."""
    every = product(*(rows(item, len(task.bins)) for item in task.items))
    return min((time(task, placement) for placement in every if fits(task, placement)), default=None)


def assert_valid(task: Instance, placement: Sequence[Sequence[int]]) -> None:
    """All units are placed, and every bin holds none or the minimum of an item."""
    for item, row in zip(task.items, placement, strict=True):
        assert len(row) == len(task.bins)
        assert sum(row) == item.count
        assert all(n == 0 or n >= item.minimum for n in row)


def as_fixed_point(t: Fraction) -> int:
    """The least number with ``SHIFT`` bits after the point that is not below ``t``."""
    return -(-(t.numerator << SHIFT) // t.denominator)


@settings(max_examples=examples(300))
@given(instances())
def test_a_placement_is_found_if_there_is_one_and_is_the_fastest(task: Instance) -> None:
    """None exactly where trying everything finds nothing; else valid, within the rooms, within 0.1 % of the best."""
    found, best = solve(task.items, task.bins), best_time(task)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert_valid(task, found)
        assert fits(task, found)
        assert best <= time(task, found) <= best * NEAR


@settings(max_examples=examples(200))
@given(instances(), st.none() | st.fractions(0, 30))
# Of two ways to the same number of coarse units left, the one that wastes less room for the fine ones must win.
@example(
    Instance((Item(2, 1, 5, 0, 0, 0), Item(6, 1, 3, 0, 0, 0)), tuple(Bin(n, 1, 0) for n in (11, 12, 5, 2, 2))), None
)
@example(Instance((Item(3, 2, 1, 0, 0, 0),), (Bin(2, 1, 0), Bin(2, 1, 0))), None)  # room for 4, but not for 3 in one
@example(Instance((Item(5, 2, 1, 0, 0, 0), Item(1, 1, 0, 0, 0, 0)), (Bin(2, 1, 0), Bin(2, 1, 0), Bin(2, 1, 0))), None)
def test_the_search_finds_a_placement_exactly_if_there_is_one(task: Instance, limit: Fraction | None) -> None:
    """With and without a limit of time, the exhaustive search agrees with trying everything."""
    t = None if limit is None else as_fixed_point(limit)
    found = search(task.items, [(host.room, host.limit(t)) for host in task.bins], Budget(10**6))
    best = best_time(task)
    assert (found is not None) == (best is not None and (limit is None or best <= limit))
    if found is not None:
        assert_valid(task, found)
        assert fits(task, found)
        assert limit is None or time(task, found) <= limit


@pytest.mark.parametrize("seed", [*range(100), 684])  # the last one is too hard for the local search
def test_hardly_any_slack_is_enough(seed: int) -> None:
    """Where rooms and speeds are made to measure for one placement, it or another one as good is found."""
    task, placement = hidden(seed)
    assert fits(task, placement)
    assert time(task, placement) <= 1
    found = search(task.items, [(host.room, host.limit(1 << SHIFT)) for host in task.bins], Budget(10**6))
    assert found is not None
    assert_valid(task, found)
    assert fits(task, found)
    assert time(task, found) <= 1
    solved = solve(task.items, task.bins)
    assert solved is not None
    assert_valid(task, solved)
    assert fits(task, solved)
    assert time(task, solved) <= NEAR


@settings(max_examples=examples(200))
@given(instances())
def test_what_is_called_impossible_is_impossible(task: Instance) -> None:
    """The necessary condition accepts every instance that has a placement, also at the very time of the best one."""
    best = best_time(task)
    assume(best is not None)
    assert best is not None
    solver = _Solver(list(task.items), list(task.bins))
    assert solver._possible(None)
    assert solver._possible(as_fixed_point(best))
    assert solver._lower_bound(as_fixed_point(best)) <= as_fixed_point(best)


@given(instances())
def test_the_time_of_a_placement_is_what_its_bins_keep(task: Instance) -> None:
    """In fixed point as in fractions: every bin keeps the time, and one of them would not keep any less."""
    solver = _Solver(list(task.items), list(task.bins))
    placement: Placement = tuple(next(rows(item, len(task.bins))) for item in task.items)
    t = solver._time(placement)
    assert t == as_fixed_point(time(task, placement))
    busy = [b for b in range(len(task.bins)) if any(row[b] for row in placement)]
    spare = [task.bins[b].limit(t) - used(task, placement, b)[1] for b in busy]
    assert min(spare) >= 0
    assert t == 0 or min(task.bins[b].limit(t - 1) - used(task, placement, b)[1] for b in busy) < 0


@few
@given(larger_instances())
def test_quick_answers_are_right_too(task: Instance) -> None:
    """Without the exhaustive search a placement may be missed, but one that is found keeps every rule."""
    found = solve(task.items, task.bins, Effort.ANY)
    if found is not None:
        assert_valid(task, found)
        assert fits(task, found)


@few
@given(larger_instances())
def test_the_local_search_keeps_the_rules_and_only_improves(task: Instance) -> None:
    """Moving and shaking keep counts and minimums, the sums kept on the side stay true, and a run never makes it worse.

    It starts with everything in one bin, which mostly overflows.
    """
    start = [[item.count, *[0] * (len(task.bins) - 1)] for item in task.items]
    improver, scatter = Improver(task.items, task.bins, start, Budget(10**6)), numbers()
    for _ in range(4):
        before = improver.score()
        improver.run(0)
        assert improver.score() <= before
        for shaken in (False, True):
            if shaken:
                improver.shake(scatter)
            assert_valid(task, improver.units)
            sums = [used(task, improver.units, b) for b in range(len(task.bins))]
            assert improver.sides == [
                (host.room - size, host.load + load) for host, (size, load) in zip(task.bins, sums, strict=True)
            ]
            lacking, longest = improver.score()
            assert (lacking == 0) == fits(task, improver.units)
            assert longest == as_fixed_point(time(task, improver.units))


@few
@given(larger_instances())
def test_moves_that_the_local_search_passes_over_are_no_better(task: Instance) -> None:
    """It makes the same moves as if it compared all of them."""
    start = [[item.count, *[0] * (len(task.bins) - 1)] for item in task.items]
    found, other = (Improver(task.items, task.bins, start, Budget(10**6)) for _ in range(2))
    found.run(0)
    with patch.object(_Best, "may_be_beaten", return_value=True):
        other.run(0)
    assert found.units == other.units


@few
@given(larger_instances(), st.randoms(use_true_random=False))
def test_bins_have_no_order(task: Instance, rng: object) -> None:
    """The same bins in another order hold the same units, but for bins that are equal."""
    order = list(range(len(task.bins)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    found, other = solve(task.items, task.bins), solve(task.items, [task.bins[b] for b in order])
    assert (found is None) == (other is None)
    if found is not None and other is not None:
        columns = Counter((host, *units) for host, units in zip(task.bins, zip(*found, strict=True), strict=True))
        others = ((task.bins[b], *units) for b, units in zip(order, zip(*other, strict=True), strict=True))
        assert columns == Counter(others)


@few
@given(larger_instances(), st.integers(-(10**9), -1))
def test_a_bin_that_cannot_be_used_changes_nothing(task: Instance, room: int) -> None:
    """Beside a bin that is too small for anything, the others hold what they would hold without it."""
    alone = solve(task.items, task.bins)
    beside = solve(task.items, (Bin(room, 50, 0), *task.bins))
    assert beside == (None if alone is None else tuple((0, *row) for row in alone))


@given(instances(), st.integers(0, 40))
def test_more_room_is_never_worse(task: Instance, more: int) -> None:
    """A larger bin never makes an instance impossible, and never slower by more than the tolerance."""
    first, *others = task.bins
    larger = evolve(task, bins=(evolve(first, room=first.room + more), *others))
    found, better = solve(task.items, task.bins), solve(task.items, larger.bins)
    if found is not None:
        assert better is not None
        assert time(larger, better) <= time(task, found) * NEAR


def test_the_search_finds_what_the_local_search_overlooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proportion fails here; if the local search does too, the exhaustive one finds the placement."""
    task = Instance((Item(2, 1, 6, 0, 6, 0), Item(3, 1, 4, 0, 4, 0)), (Bin(12, 12, 0), Bin(12, 12, 0)))
    assert _Solver(list(task.items), list(task.bins))._place(None, (0, 0)) is None
    monkeypatch.setattr(_Solver, "_improve", lambda *_, **__: None)
    found = solve(task.items, task.bins)
    assert found is not None
    assert fits(task, found)
    assert solve(task.items, task.bins, Effort.ANY) is None


def test_the_search_stops_when_its_budget_ends() -> None:
    """It says that it does not know, rather than that there is nothing."""
    things = [Item(12, 1, 5, 0, 5, 0), Item(12, 1, 7, 0, 7, 0), Item(12, 1, 9, 0, 9, 0)]
    spaces = [(64, 1000)] * 4
    with pytest.raises(OutOfBudgetError):
        search(things, spaces, Budget(50))
    assert search(things, spaces, Budget(10**6)) is not None


def test_numbers_are_the_same_on_every_machine() -> None:
    """The scattered numbers of the local search are fixed, or plans would differ between machines."""
    scatter = numbers()
    assert [next(scatter) for _ in range(4)] == [908834774, 1093944153, 1392341196, 822192870]
