"""The planner against an exact MILP solver, on more than a hundred random tasks."""

from __future__ import annotations

import pytest

from tests.plan.integer_program import Program, measure
from tests.planning_cases import case
from tpplan.planner import attempt

_PAIRS = [("reduce", "balanced"), ("reduce", "latency"), ("gather", "latency"), ("gather", "balanced")]
#: Each seed's models and devices have both layouts, and both strategies.
TASKS = [(seed, *pair) for seed in range(62) for pair in _PAIRS[seed % 2 :: 2]]


@pytest.mark.parametrize(("seed", "layout", "strategy"), TASKS)
def test_a_plan_exists_if_any_does_and_none_is_better_by_a_thousandth(seed: int, layout: str, strategy: str) -> None:
    """Where there is no plan, HiGHS has no solution; where there is one, none but within 0.1 % of its measure."""
    task = case(seed, layout, strategy)
    program, found = Program.of(task), attempt(task.model, task.devices, task.request)
    if found is None or found.lacking:
        assert not program.is_solvable()
    else:
        reached = measure(task, found.bounds)
        assert program.allows(found.bounds, reached)
        assert not program.is_solvable(reached / 1.001)


@pytest.mark.parametrize(("layout", "strategy"), _PAIRS)
def test_the_solver_finds_what_the_planner_finds(layout: str, strategy: str) -> None:
    """With the measure of a plan as the limit, HiGHS has a solution; with less than it, the plan is none."""
    task = case(7, layout, strategy)
    program, found = Program.of(task), attempt(task.model, task.devices, task.request)
    assert found
    reached = measure(task, found.bounds)
    assert program.is_solvable(reached * (1 + 1e-6))
    assert not program.allows(found.bounds, reached * (1 - 1e-3))
