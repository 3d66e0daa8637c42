"""Accumulated test results of an operation on a transport."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING

from attrs import Factory, define

from tpplan.errors import TpplanError
from tpplan.exec.explain import Way
from tpplan.exec.tensors import name_of
from tpplan.exec.tools.selftest.trial import compared_bytes, judge
from tpplan.reports.selftest import Fault, Tested, TestedAxis

if TYPE_CHECKING:
    from tpplan.exec.tools.selftest.attempts import Attempt
    from tpplan.exec.tools.selftest.trial import Form, Scene, Trial


@define
class _Axis:
    """The trials on an axis; see :class:`~tpplan.reports.selftest.TestedAxis`."""

    rows: set[int] = Factory(set)
    narrow_rows: set[int] = Factory(set)
    ways: dict[str, None] = Factory(dict)


@define
class Tally:
    """The test results of an operation on a transport; see :class:`~tpplan.reports.selftest.Tested`."""

    operation: str
    transport: str
    schedule: str
    possible: list[Way] = Factory(list)
    axes: defaultdict[str, _Axis] = Factory(lambda: defaultdict(_Axis))
    checks: int = 0
    compared_bytes: int = 0
    wrong: int = 0
    faults: list[Fault] = Factory(list)

    @property
    def tested(self) -> Tested:
        """The results for the report."""
        return Tested(
            operation=self.operation,
            transport=self.transport,
            schedule=self.schedule,
            axes=tuple(self._axis(name, axis) for name, axis in self.axes.items()),
            checks=self.checks,
            compared_bytes=self.compared_bytes,
            wrong=self.wrong,
        )

    def _axis(self, name: str, axis: _Axis) -> TestedAxis:
        ways = dict.fromkeys(way.how for way in self.possible if name in way.axes)
        return TestedAxis(
            axis=name,
            rows=tuple(sorted(axis.rows)),
            narrow_rows=tuple(sorted(axis.narrow_rows)),
            ways=tuple(axis.ways),
            skipped=tuple(way for way in ways if way not in axis.ways),
        )

    def judge(self, attempt: Attempt, scene: Scene, trial: Trial) -> None:
        """Count an issued trial and its faults."""
        self.checks += 1
        self.compared_bytes += compared_bytes(trial)
        axis, rows = self.axes[attempt.axis], prod(attempt.lead)
        (axis.narrow_rows if attempt.narrow else axis.rows).add(rows)
        if attempt.how and not attempt.aside:
            axis.ways[attempt.how] = None
        try:
            found = next(judge(trial), None)
        except TpplanError as error:
            self.fail(attempt, scene.form, error)
        else:
            if found:
                self._fault(attempt, scene.form, found.message, found.device, found.byte)

    def fail(self, attempt: Attempt, form: Form, error: TpplanError) -> None:
        """Record an operation that raised an error."""
        self._fault(attempt, form, error.message)

    def _fault(
        self, attempt: Attempt, form: Form, message: str, device: int | None = None, byte: int | None = None
    ) -> None:
        self.wrong += 1
        self.faults.append(
            Fault(
                operation=self.operation,
                transport=self.transport,
                schedule=self.schedule,
                axis=attempt.axis,
                rows=prod(attempt.lead),
                dim=attempt.dim,
                elements=name_of(attempt.dtype),
                operands=f"{form.name}, aside" if attempt.aside else form.name,
                device=device,
                byte=byte,
                message=message,
            )
        )
