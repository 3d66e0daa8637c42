"""The test of a compiled plan: every operation, on every axis, in many sizes, and every byte of it compared."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from itertools import cycle
from math import prod
from random import Random
from typing import TYPE_CHECKING

import torch
from attrs import Factory, define, evolve

from tpplan.axes import parse_layers
from tpplan.errors import ExecutionError, RequestError, TpplanError
from tpplan.exec.adversary import Adversary
from tpplan.exec.attempts import Attempts
from tpplan.exec.compiler import build
from tpplan.exec.compiler import compile as compile_plan
from tpplan.exec.explain import cuts
from tpplan.exec.lower import TRANSPORTS
from tpplan.exec.references import KINDS
from tpplan.exec.trial import FORMS, Noise, Scene, compared_bytes, issue, judge
from tpplan.selftest_report import Fault, SelftestReport, Tested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from tpplan.exec.attempts import Attempt
    from tpplan.exec.context import TPContext
    from tpplan.exec.references import Kind
    from tpplan.exec.trial import Form, Trial
    from tpplan.plan import SplitPlan

PLAIN, ADVERSARIAL = "plain", "adversarial"

#: Random schedules in which the adversary runs everything, and the most rows of an operand there.
_SEEDS = (1, 2)
_FEW_ROWS = 4

#: So many faults of an operation by a transport are told in words.
_TOLD = 3


def selftest(
    plan: SplitPlan,
    make: Callable[[str], TPContext],
    transports: Sequence[str],
    busy: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    note: Callable[[str], None] = lambda _: None,
) -> SelftestReport:
    """Run every operation of a compiled plan and compare every byte with what slicing and adding on the CPU give.

    The trials are the same every time. Besides the devices that the plan is compiled for, all operations run on
    virtual ones that do the worst that programs allow.

    Args:
        plan: to be tested.
        make: compiles it for a transport.
        transports: to be tested; of several, those that the devices can do.
        busy: told what is being tested, for as long as it takes.
        note: told why a transport is not tested.

    Raises:
        TpplanError: the plan cannot be compiled for any of them.
    """
    tallies: list[_Tally] = []
    refused: ExecutionError | None = None
    with _one_thread():
        for transport in transports:
            try:
                context = make(transport)
            except ExecutionError as error:
                refused = error
                continue
            with context:
                devices, max_rows = context.devices, context.max_rows
                tallies += _plain(context, transport, busy)
            with busy(f"testing every operation by {transport} in the worst order"):
                tallies += _adversarial(plan, transport)
    if refused:
        if not tallies:
            raise refused
        note(f"not every transport was tested: {' '.join(refused.message.split())}")
    wrong = sum(tally.wrong for tally in tallies)
    return SelftestReport(
        ok=not wrong,
        model=plan.model.name,
        devices=len(devices),
        backend=next(iter(devices.values())).device.type,
        max_rows=max_rows,
        tested=tuple(tally.tested for tally in tallies),
        checks=sum(tally.checks for tally in tallies),
        compared_bytes=sum(tally.compared_bytes for tally in tallies),
        wrong=wrong,
        faults=tuple(fault for tally in tallies for fault in tally.faults[:_TOLD]),
    )


def compiler(plan: SplitPlan, backend: str, note: Callable[[str], None]) -> Callable[[str], TPContext]:
    """Return what compiles a plan for a transport: on virtual devices if ``backend`` is ``auto`` and no other will do.

    Args:
        plan: to be tested.
        backend: ``auto``, ``cpu`` or ``cuda``.
        note: told why the devices are virtual ones.
    """
    if backend == "auto":
        try:
            compile_plan(plan).close()
        except ExecutionError as error:
            note(f"on virtual devices, because {' '.join(error.message.split())}")
            backend = "cpu"
    return lambda transport: compile_plan(plan, backend=backend, transport=transport)


def transports(wanted: str) -> tuple[str, ...]:
    """Return the transports to test: one, or all for an empty name.

    Raises:
        RequestError: there is no such transport.
    """
    if wanted and wanted not in TRANSPORTS:
        raise RequestError(f"unknown transport {wanted!r}, expected {', '.join(TRANSPORTS)}", "or leave it out")
    return (wanted,) if wanted else TRANSPORTS


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch work in one thread: most tensors are small, and threads that wait for each other take longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@define
class _Tally:
    """What was found of an operation by a transport; see :class:`~tpplan.selftest_report.Tested`."""

    operation: str
    transport: str
    schedule: str
    axes: dict[str, None] = Factory(dict)
    ways: dict[str, None] = Factory(dict)
    skipped: tuple[str, ...] = ()
    checks: int = 0
    compared_bytes: int = 0
    wrong: int = 0
    faults: list[Fault] = Factory(list)

    @property
    def tested(self) -> Tested:
        return Tested(
            operation=self.operation,
            transport=self.transport,
            schedule=self.schedule,
            axes=tuple(self.axes),
            ways=tuple(self.ways),
            skipped=self.skipped,
            checks=self.checks,
            compared_bytes=self.compared_bytes,
            wrong=self.wrong,
        )

    def judge(self, attempt: Attempt, scene: Scene, trial: Trial) -> None:
        """Count a trial that was issued, and what is wrong with it."""
        self.checks += 1
        self.compared_bytes += compared_bytes(trial)
        self.axes[attempt.axis] = None
        if attempt.how:
            self.ways[attempt.how] = None
        try:
            found = next(judge(trial), None)
        except TpplanError as error:
            self.fail(attempt, scene.form, error)
        else:
            if found:
                self._fault(attempt, scene.form, found.message, found.device, found.byte)

    def fail(self, attempt: Attempt, form: Form, error: TpplanError) -> None:
        """Note an operation that ended with an error."""
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
                elements=str(attempt.dtype).removeprefix("torch."),
                operands=form.name,
                device=device,
                byte=byte,
                message=message,
            )
        )


def _plain(context: TPContext, transport: str, busy: Callable[[str], AbstractContextManager[None]]) -> Iterator[_Tally]:
    """Try all sizes of every operation, one after the other."""
    noise = Noise(Random(0))  # noqa: S311 (to be the same every time)
    forms, sources = cycle(FORMS), cycle(context.all_devices)
    ways = context.explain().ways
    for name, kind in KINDS.items():
        tally = _Tally(name, transport, PLAIN)
        mine = [way for way in ways if way.operation == name and way.transport != "refused"]
        with busy(f"testing {name} by {transport}"):
            for attempt in Attempts.of(context, kind).all(mine):
                source = context.all_devices[0] if attempt.how else next(sources)
                scene = _scene(context, kind, attempt, noise, source=source, form=next(forms))
                trial = _issued(tally, kind, attempt, scene)
                if trial:
                    tally.judge(attempt, scene, trial)
        tally.skipped = tuple(dict.fromkeys(way.how for way in mine if way.how not in tally.ways))
        yield tally


def _adversarial(plan: SplitPlan, transport: str) -> Iterator[_Tally]:
    """Issue all operations in random order, without waiting for any, on devices that do the worst that they may."""
    tallies = {name: _Tally(name, transport, ADVERSARIAL) for name in KINDS}
    for seed in _SEEDS:
        random = Random(seed)  # noqa: S311 (to be the same every time)
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
        except TpplanError as error:  # what is stuck cannot be closed either
            name, attempt, scene, _ = issued[-1]
            tallies[name].fail(attempt, scene.form, error)
            continue
        for name, attempt, scene, trial in issued:
            tallies[name].judge(attempt, scene, trial)
        context.close()
    yield from tallies.values()


def _adversary(plan: SplitPlan, transport: str, random: Random) -> TPContext:
    """Compile a plan with room for few rows on virtual devices, so that there is little to poison."""
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
    )


def _issued(tally: _Tally, kind: Kind, attempt: Attempt, scene: Scene) -> Trial | None:
    """Return the trial, issued; or note the error that it ended with."""
    trial = kind.make(scene)
    try:
        issue(scene, trial)
    except TpplanError as error:
        tally.checks += 1
        tally.fail(attempt, scene.form, error)
        return None
    return trial
