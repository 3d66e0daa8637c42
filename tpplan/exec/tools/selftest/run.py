"""The self-test of a compiled plan: every operation on every axis in many sizes, with every byte compared."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from itertools import chain, cycle
from math import prod
from random import Random
from typing import TYPE_CHECKING

import torch
from attrs import Factory, define, evolve

from tpplan.core.axes import parse_layers
from tpplan.errors import ExecutionError, TpplanError
from tpplan.exec.backends.adversary import Adversary
from tpplan.exec.build import build
from tpplan.exec.checks import name_of
from tpplan.exec.cuda.graph import give_back
from tpplan.exec.explain import Way, cuts, in_graphs
from tpplan.exec.tools.bench.clock import undisturbed
from tpplan.exec.tools.selftest.attempts import Attempts
from tpplan.exec.tools.selftest.references import KINDS
from tpplan.exec.tools.selftest.trial import FORMS, Noise, Scene, compared_bytes, issue, issue_again, judge, renew
from tpplan.reports.selftest import Fault, Refusal, SelftestReport, Tested, TestedAxis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext
    from tpplan.exec.cuda.graph import Graph
    from tpplan.exec.tools.selftest.attempts import Attempt
    from tpplan.exec.tools.selftest.references import Kind
    from tpplan.exec.tools.selftest.trial import Form, Trial


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


PLAIN, ASIDE, CAPTURED, ADVERSARIAL = "plain", "aside", "captured", "adversarial"

#: Number of replays of a graph, each with new contents.
_REPLAYS = 2

#: Random schedules in which the adversary runs everything, and the most rows of an operand there.
_SEEDS = (1, 2)
_FEW_ROWS = 4

#: Maximum number of faults described for each operation and transport.
_TOLD = 3


def selftest(
    plan: SplitPlan,
    make: Callable[[str], TPContext],
    transports: Sequence[str],
    busy: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> SelftestReport:
    """Run every operation of a compiled plan and compare every byte with CPU references.

    The trials are deterministic. All operations also run on adversarial virtual devices, which execute programs in the
    worst order that they allow.

    Args:
        plan: plan to test.
        make: compiles it for a transport.
        transports: transports to test. If one cannot be compiled, the report says so, unless none can.
        busy: returns a context that is active while the named step runs.

    Raises:
        TpplanError: the plan cannot be compiled for any of them.
    """
    tallies: list[Tally] = []
    errors: dict[str, ExecutionError] = {}
    with undisturbed():
        for transport in transports:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                give_back()
                torch.cuda.empty_cache()  # left from the last transport; compiling checks free memory
            try:
                with make(transport) as context:
                    devices, max_rows = context.devices, context.max_rows
                    tallies += _called(context, transport, busy)
                    tallies += _captured(context, transport, busy)
            except ExecutionError as error:
                errors[transport] = error
            else:
                with busy(f"testing every operation by {transport} in the worst order, on virtual devices"):
                    tallies += _adversarial(plan, transport)
    refused = tuple(Refusal(transport=x, unverified=_is_unverified(e), message=e.message) for x, e in errors.items())
    if not tallies:
        raise next((errors[one.transport] for one in refused if not one.unverified), errors[transports[0]])
    wrong = sum(tally.wrong for tally in tallies)
    return SelftestReport(
        ok=not wrong and all(one.unverified for one in refused),
        model=plan.model.name,
        devices=len(devices),
        backend=next(iter(devices.values())).device.type,
        max_rows=max_rows,
        tested=tuple(tally.tested for tally in tallies),
        checks=sum(tally.checks for tally in tallies),
        compared_bytes=sum(tally.compared_bytes for tally in tallies),
        wrong=wrong,
        faults=tuple(fault for tally in tallies for fault in tally.faults[:_TOLD]),
        refused=refused,
    )


def _is_unverified(error: ExecutionError) -> bool:
    """Tell whether compiling failed only for requirements of a transport, which another one may not have."""
    _, *problems = error.message.splitlines()
    return bool(problems) and all(problem.strip().startswith("transport: ") for problem in problems)


def _called(context: TPContext, transport: str, busy: Callable[[str], AbstractContextManager[None]]) -> Iterator[Tally]:
    """Test all sizes of every operation, one at a time, and then some beside other work."""
    random = Random(0)  # noqa: S311 (deterministic)
    noise, forms, sources = Noise(random), cycle(FORMS), cycle(context.all_devices)
    ways = context.explain().ways
    for name, kind in KINDS.items():
        mine = [way for way in ways if way.operation == name and way.transport != "refused"]
        attempts = Attempts.of(context, kind)
        tallies = Tally(name, transport, PLAIN, mine), Tally(name, transport, ASIDE)
        with busy(f"testing {name} by {transport}"):
            for attempt in chain(attempts.all(mine), attempts.aside(mine, random)):
                tally = tallies[attempt.aside]
                source = context.all_devices[0] if attempt.how else next(sources)
                scene = _scene(context, kind, attempt, noise, source=source, form=next(forms))
                trial = _issued(tally, kind, attempt, scene)
                if trial:
                    tally.judge(attempt, scene, trial)
        yield from tallies


def _captured(
    context: TPContext, transport: str, busy: Callable[[str], AbstractContextManager[None]]
) -> Iterator[Tally]:
    """Capture operations without the host, some for each route and some beside other work, and replay them.

    Each replay has new contents.
    """
    random = Random(0)  # noqa: S311 (deterministic)
    noise, ways = Noise(random), context.explain().ways
    for name, kind in ((name, kind) for name, kind in KINDS.items() if not kind.hosted):
        mine = [way for way in in_graphs(ways, name) if way.transport != "refused"]
        tally = Tally(name, transport, CAPTURED, mine)
        try:
            graph = context.capture()
        except ExecutionError:  # virtual devices have none
            return
        with busy(f"testing {name} by {transport} in a graph"):
            issued = []
            for attempt in Attempts.of(context, kind).together(mine, random):
                source = context.all_devices[0] if attempt.how else random.choice(context.all_devices)
                scene = _scene(context, kind, attempt, noise, source=source, form=random.choice(FORMS))
                trial = _issued(tally, kind, attempt, scene)  # every operation has to run once before capture
                if trial:
                    issued.append((attempt, scene, trial))
            if issued:
                _replay(graph, tally, kind, issued)
        yield tally


def _replay(graph: Graph, tally: Tally, kind: Kind, issued: list[tuple[Attempt, Scene, Trial]]) -> None:
    """Capture the issued trials in one graph, replay it with new contents, and check the results."""
    last = issued[0]
    try:
        with graph:
            for last in issued:
                issue_again(*last[1:])
        for _ in range(_REPLAYS):
            renewed = [renew(scene, trial, kind.make(scene)) for _, scene, trial in issued]
            graph.replay()
            for (attempt, scene, _), trial in zip(issued, renewed, strict=True):
                tally.judge(attempt, scene, trial)
    except TpplanError as error:
        attempt, scene, _ = last
        tally.checks += 1
        tally.fail(attempt, scene.form, error)


def _adversarial(plan: SplitPlan, transport: str) -> Iterator[Tally]:
    """Issue all operations in random order, without waiting, on adversarial virtual devices."""
    tallies = {name: Tally(name, transport, ADVERSARIAL) for name in KINDS}
    for seed in _SEEDS:
        random = Random(seed)  # noqa: S311 (deterministic)
        noise = Noise(random)
        context = _adversary(plan, transport, random)
        attempts = [(name, each) for name, kind in KINDS.items() for each in Attempts.of(context, kind).some(random)]
        random.shuffle(attempts)
        issued = []
        for name, attempt in attempts:
            source, form = random.choice(context.all_devices), random.choice(FORMS)
            scene = _scene(context, KINDS[name], attempt, noise, source=source, form=form)
            trial = _issued(tallies[name], KINDS[name], attempt, scene)
            if trial:
                issued.append((name, attempt, scene, trial))
        try:
            context.synchronize()
        except TpplanError as error:  # a stuck context also fails to close
            name, attempt, scene, _ = issued[-1]
            tallies[name].fail(attempt, scene.form, error)
            continue
        for name, attempt, scene, trial in issued:
            tallies[name].judge(attempt, scene, trial)
        context.close()
    yield from tallies.values()


def _adversary(plan: SplitPlan, transport: str, random: Random) -> TPContext:
    """Compile a plan with room for few rows on virtual devices, so that there is little memory to poison."""
    rows = min(_FEW_ROWS, plan.request.max_rows)
    return build(
        evolve(plan, request=evolve(plan.request, max_rows=rows)),
        (torch.device("cpu"),) * len(plan.devices),
        lambda memory: Adversary(memory, random),
        transport=transport,
        max_rows=rows,
        dtype=getattr(torch, plan.model.dtype),
    )


def _scene(context: TPContext, kind: Kind, attempt: Attempt, noise: Noise, *, source: int, form: Form) -> Scene:
    split = cuts(context.plan)[attempt.axis]
    return Scene(
        context=context,
        axis=split.axis if split else None,
        layer=min(parse_layers(split.layers)) if split and split.layers else None,
        source=source,
        lead=attempt.lead,
        dim=attempt.dim,
        dtype=attempt.dtype,
        form=form,
        noise=noise,
        numbers=kind.adds,
        aside=attempt.aside,
    )


def _issued(tally: Tally, kind: Kind, attempt: Attempt, scene: Scene) -> Trial | None:
    """Issue a trial and return it; if it fails, record the error and return None."""
    trial = kind.make(scene)
    try:
        issue(scene, trial)
    except TpplanError as error:
        tally.checks += 1
        tally.fail(attempt, scene.form, error)
        return None
    return trial
