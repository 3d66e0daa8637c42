"""Planning tasks as mixed integer programs, of which HiGHS says whether they have a solution."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from attrs import frozen

from tests.later import optimize, sparse
from tests.planning_cases import MIB
from tpplan.core.axes import minimum_units
from tpplan.planner.costs import THOUSANDTHS
from tpplan.planner.speed import bandwidth_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.planning_cases import Case
    from tpplan.planner.costs import Stage

_SOLVED, _INFEASIBLE = 0, 2
_PER_SECOND = 10**6
#: What HiGHS lets a constraint miss, relative to numbers near 1.
_TOLERANCE = 1e-6


@frozen(eq=False)
class Program:
    """A task, with the strategy's measure: the largest share of a budget, or the sum of the stages' times, in µs.

    A device in use pays its overhead and the common cost, and the fixed cost of each axis of which it holds a unit.
    Variables: units x and a flag y per axis and device, a flag z per device in use, the time of the slowest device per
    stage, and the measure t, in that order.

    Attributes:
        constraints: coefficients of the variables, a row for each constraint.
        least: the least that each constraint allows.
        most: the most that each constraint allows.
        budgets: whether a constraint is a device's budget, in MiB.
        upper: the largest value of each variable; the smallest is 0.
        units: elements of a unit of each axis.
        whole: number of the variables that are whole.
    """

    constraints: Any
    least: Any
    most: Any
    budgets: Any
    upper: Any
    units: tuple[int, ...]
    whole: int

    @classmethod
    def of(cls, task: Case) -> Self:
        """Return a task's program."""
        wanted, devices = task.wanted, task.devices
        axes, count = wanted.axes, len(devices)
        flags, uses, times = len(axes) * count, 2 * len(axes) * count, 2 * len(axes) * count + count
        by_time = task.request.strategy == "latency"
        stages = stages_of(task)
        last = times + len(stages)
        rows: list[tuple[dict[int, float], float, float]] = []
        budgets = []
        for i, axis in enumerate(axes):
            minimum = minimum_units(axis.axis, axis.size, axis.unit)
            rows.append(({i * count + d: 1 for d in range(count)}, axis.units, axis.units))
            for d in range(count):
                x, y = i * count + d, flags + i * count + d
                rows.append(({x: 1, y: -axis.units}, -np.inf, 0))
                rows.append(({x: 1, y: -minimum}, 0, np.inf))
                rows.append(({y: 1, uses + d: -1}, -np.inf, 0))
        for d, device in enumerate(devices):
            used: dict[int, float] = {uses + d: wanted.common.bytes + device.overhead_bytes}
            loads: list[dict[int, float]] = [{} if by_time else dict(used) for _ in stages]
            for i, axis in enumerate(axes):
                unit, x, y = axis.unit_cost(), i * count + d, flags + i * count + d
                fixed = axis.fixed_cost()
                used |= {x: unit.bytes, y: fixed.bytes}
                load = loads[stages.index(axis.stage) if by_time else 0]
                load |= {x: unit.time if by_time else unit.bytes, y: fixed.time if by_time else fixed.bytes}
            budgets.append(len(rows))
            rows.append(({k: v / MIB for k, v in used.items()}, -np.inf, device.budget_bytes / MIB))
            speed = bandwidth_of(device) * THOUSANDTHS / _PER_SECOND if by_time else device.budget_bytes
            for s, load in enumerate(loads):
                rows.append(({times + s: -1, **{k: v / speed for k, v in load.items()}}, -np.inf, 0))
        rows.append(({last: -1, **{times + s: 1 for s in range(len(stages))}}, -np.inf, 0))
        constraints = sparse.lil_array((len(rows), last + 1))
        for r, (entries, _, _) in enumerate(rows):
            for column, value in entries.items():
                constraints[r, column] = value
        upper = np.ones(last + 1)
        upper[:flags] = np.repeat([axis.units for axis in axes], count)
        upper[times:] = np.inf
        least, most = (np.array(limits) for limits in list(zip(*rows, strict=True))[1:])
        return cls(
            constraints.tocsr(),
            least,
            most,
            np.isin(np.arange(len(rows)), budgets),
            upper,
            tuple(axis.unit for axis in axes),
            times,
        )

    def allows(self, bounds: Sequence[Sequence[int]], times: Sequence[float]) -> bool:
        """Return whether cuts of every axis are a solution, with these times of stages or this share."""
        units = [[-(-(b - a) // unit) for a, b in pairwise(row)] for row, unit in zip(bounds, self.units, strict=True)]
        flags = np.array(units) > 0
        found = self.constraints @ np.concatenate(
            [np.ravel(units), flags.ravel(), flags.any(axis=0), times, [sum(times)]]
        )
        return bool(np.all(found >= self.least - _TOLERANCE) and np.all(found <= self.most + _TOLERANCE))

    def least_lacking(self) -> float:
        """Return the fewest bytes that a cut exceeds the budgets by, summed over the devices."""
        rooms = np.flatnonzero(self.budgets)
        lacking = sparse.lil_array((self.constraints.shape[0], len(rooms)))
        for column, row in enumerate(rooms):
            lacking[row, column] = -1
        size = len(self.upper)
        answer = optimize.milp(
            np.append(np.zeros(size), np.ones(len(rooms))),
            constraints=optimize.LinearConstraint(sparse.hstack([self.constraints, lacking]), self.least, self.most),
            bounds=optimize.Bounds(np.zeros(size + len(rooms)), np.append(self.upper, [np.inf] * len(rooms))),
            integrality=np.concatenate([np.ones(self.whole), np.zeros(len(rooms) + size - self.whole)]),
            options={"time_limit": 60},
        )
        assert answer.status == _SOLVED, answer.message
        return float(answer.fun) * MIB

    def is_solvable(self, measure: float = np.inf) -> bool:
        """Return whether HiGHS finds a solution whose measure is no larger than this one."""
        upper = np.append(self.upper[:-1], measure)
        last = len(upper) - 1
        answer = optimize.milp(
            np.append(np.zeros(last), 1),  # with an aim it is faster
            constraints=optimize.LinearConstraint(self.constraints, self.least, self.most),
            bounds=optimize.Bounds(np.zeros(last + 1), upper),
            integrality=np.append(np.ones(self.whole), np.zeros(last + 1 - self.whole)),
            options={"time_limit": 60},
        )
        assert answer.status in {_SOLVED, _INFEASIBLE}, answer.message
        return bool(answer.status == _SOLVED)


def stages_of(task: Case) -> list[Stage]:
    """Return the stages that the strategy's measure adds up; ``balanced`` has a single one."""
    if task.request.strategy != "latency":
        return [("", "")]
    return [*dict.fromkeys(axis.stage for axis in task.wanted.axes)]


def measures(task: Case, bounds: Sequence[Sequence[int]]) -> list[float]:
    """Return of a plan what the measure adds up, with a shorter last unit counted as a whole one."""
    wanted, found = task.wanted, []
    for stage in stages_of(task):
        of_devices = []
        for d, device in enumerate(task.devices):
            held = [(a, -(-(row[d + 1] - row[d]) // a.unit)) for a, row in zip(wanted.axes, bounds, strict=True)]
            costs = [(a, a.unit_cost().part(n, 1) + a.fixed_cost()) for a, n in held if n]
            if task.request.strategy == "latency":
                time = sum(cost.time for axis, cost in costs if axis.stage == stage)
                of_devices.append(time / THOUSANDTHS / bandwidth_of(device) * _PER_SECOND)
            elif costs:
                load = sum((cost for _, cost in costs), wanted.common)
                of_devices.append((load.bytes + device.overhead_bytes) / device.budget_bytes)
        found.append(max(of_devices))
    return found
