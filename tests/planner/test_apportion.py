"""Cutting whole units in proportion to shares, within bounds."""

from __future__ import annotations

from itertools import product

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from tpplan.planner.apportion import apportion


@frozen
class Task:
    """Arguments of ``apportion``."""

    count: int
    minimum: int
    shares: tuple[int, ...]
    uppers: tuple[int, ...]


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Small tasks, feasible or not; shares may be zero, negative, equal or far apart."""
    count = draw(st.integers(1, 12))
    places = draw(st.integers(1, 4))
    share = st.integers(-3, 9) | st.sampled_from((0, 1, 1, 10**6))
    return Task(
        count,
        draw(st.integers(1, min(count, 4))),
        tuple(draw(st.lists(share, min_size=places, max_size=places))),
        tuple(draw(st.lists(st.integers(0, 13), min_size=places, max_size=places))),
    )


@st.composite
def loose_tasks(draw: st.DrawFn) -> Task:
    """Tasks without a minimum or an upper bound that matters."""
    count = draw(st.integers(1, 10_000))
    shares = tuple(draw(st.lists(st.integers(1, 10**12), min_size=1, max_size=9)))
    return Task(count, 1, shares, (count,) * len(shares))


def run(task: Task) -> list[int] | None:
    """Call it."""
    return apportion(task.count, task.minimum, task.shares, task.uppers)


def choices(task: Task) -> list[tuple[int, ...]]:
    """Every way to give out the units, by trying all."""
    ranges = [(0, *range(task.minimum, upper + 1)) for upper in task.uppers]
    return [units for units in product(*ranges) if sum(units) == task.count]


@given(tasks())
def test_units_are_given_out_if_there_is_any_way(task: Task) -> None:
    """The answer is one of all possible ones, and None only where there is none."""
    found, possible = run(task), choices(task)
    assert (found is None) == (not possible)
    assert found is None or tuple(found) in possible


@given(loose_tasks())
def test_free_units_are_proportional(task: Task) -> None:
    """Where no bound matters, whoever gets units has less than one more or fewer than the exact quota of those places.

    A place goes without only if its quota among the larger ones and itself is below one unit.
    """
    found = run(task)
    assert found is not None
    chosen = sum(share for share, n in zip(task.shares, found, strict=True) if n)
    assert all(
        abs(n * chosen - task.count * share) < 2 * chosen for share, n in zip(task.shares, found, strict=True) if n
    )
    assert all(share * task.count < chosen + share for share, n in zip(task.shares, found, strict=True) if not n)


@given(loose_tasks(), st.data())
def test_bounds_take_no_more_than_they_must(task: Task, data: st.DataObject) -> None:
    """Beside a place at its upper bound the others still share in proportion, and none of them is worse off for it."""
    uppers = tuple(data.draw(st.integers(1, task.count)) for _ in task.uppers)
    found = apportion(task.count, 1, task.shares, uppers)
    if found is None:
        assert sum(sorted(uppers)[-task.count :]) < task.count
        return
    places = [(s, n, u) for s, n, u in zip(task.shares, found, uppers, strict=True) if n]
    for share, n, _ in places:
        for other, m, upper in places:
            # ``m`` could be larger, ``n`` smaller: then ``n`` is not more than proportional, but for rounding.
            if m < upper and n > 1:
                assert (n - 1) * other <= (m + 1) * share


@given(tasks(), st.integers(1, 4))
def test_as_many_places_get_units_as_are_asked_for(task: Task, number: int) -> None:
    """Exactly these many, in one of all possible ways, and None only where there is none."""
    found = apportion(task.count, task.minimum, task.shares, task.uppers, number=number)
    possible = [units for units in choices(task) if sum(map(bool, units)) == number]
    assert (found is None) == (not possible)
    assert found is None or tuple(found) in possible


@given(tasks(), st.integers(1, 10**9))
def test_shares_need_no_common_scale(task: Task, factor: int) -> None:
    """Shares in bytes give the same answer as shares in MiB."""
    assert run(task) == apportion(task.count, task.minimum, [s * factor for s in task.shares], task.uppers)


@given(tasks(), st.randoms(use_true_random=False))
def test_places_have_no_order(task: Task, rng: object) -> None:
    """The same places in another order get the same units, but for those that are equal in everything."""
    order = list(range(len(task.shares)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    other = apportion(task.count, task.minimum, [task.shares[p] for p in order], [task.uppers[p] for p in order])
    found = run(task)
    assert (found is None) == (other is None)
    if found is not None and other is not None:
        assert sorted(zip(task.shares, task.uppers, found, strict=True)) == sorted(
            (task.shares[p], task.uppers[p], n) for p, n in zip(order, other, strict=True)
        )


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Task(8, 1, (24, 12), (8, 8)), [5, 3]),  # 5.33 and 2.67
        (Task(8, 1, (24, 24, 12), (8, 8, 8)), [3, 3, 2]),
        (Task(8, 1, (1, 1, 1), (8, 8, 8)), [3, 3, 2]),  # equal remainders: the first
        (Task(10, 1, (5, 3, 2), (4, 9, 9)), [4, 4, 2]),  # 6 left over for 3 : 2, 3.6 and 2.4
        (Task(16, 4, (10, 10, 1), (16, 16, 16)), [8, 8, 0]),  # 0.76 units are below the minimum
        (Task(16, 4, (10, 10, 4), (16, 16, 16)), [8, 8, 0]),  # 2.67 as well
        (Task(16, 4, (10, 10, 7), (16, 16, 16)), [6, 6, 4]),  # 4.15
        (Task(16, 4, (10, 10, 1), (6, 6, 16)), [6, 6, 4]),  # but where the others cannot hold it all, it helps
        (Task(16, 4, (10, 10, 0), (16, 16, 16)), [8, 8, 0]),
        (Task(16, 4, (0, 0), (16, 16)), [8, 8]),  # nobody has a share: as if all had the same
        (Task(6, 4, (1, 1), (5, 6)), [0, 6]),  # only one can hold the minimum, and only one can hold it all
        (Task(6, 4, (9, 1), (5, 5)), None),
        (Task(6, 4, (9, 1), (5, 3)), None),
    ],
)
def test_examples_by_hand(task: Task, expected: list[int] | None) -> None:
    """Proportion, remainders, bounds and minimum, each worked out on paper."""
    assert run(task) == expected
