"""The survey of a machine: probes links, measures thresholds, and saves both for later processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from tpplan.core.sizes import counted
from tpplan.errors import DeviceError
from tpplan.exec.cuda import tuning_cache
from tpplan.exec.cuda.tuning_cache import SurveyReport, Thresholds, Timing
from tpplan.exec.machine.links import link_report
from tpplan.exec.machine.transports import choose
from tpplan.exec.toolchain.kernel_cache import MOST_SOURCES
from tpplan.exec.tools.survey.timer import GraphTimer
from tpplan.exec.tuning import tune
from tpplan.hardware import probe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Transports that have thresholds.
_TUNED = ("peer", "host")


def survey(busy: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()) -> SurveyReport:
    """Probe the links between the GPUs that this process sees, measure thresholds, and keep them.

    Args:
        busy: returns a context that is active while the named step runs.

    Returns:
        What was found; nothing where there is a single GPU.

    Raises:
        DeviceError: torch sees no GPU.
        ExecutionError: a GPU has too little memory, or fails.
    """
    report = link_report(use_cache=False)  # which logs that it tests them
    if not report.gpus:
        raise no_gpu()
    measured: list[Thresholds] = []
    timings: list[Timing] = []
    notes: list[str] = []
    for count in _counts(len(report.gpus)):
        places = [torch.device("cuda", i) for i in range(count)]
        usable, against = _usable(places)
        notes += against
        if usable:
            with busy(f"measuring on {count} GPUs by {' and '.join(usable)}"):
                measured.append(_measured(places, usable, timings))
    if measured and (reason := tuning_cache.save(tuple(measured))):
        notes.append(f"thresholds are not kept: {reason}")
    return SurveyReport(
        gpus=report.gpus,
        links=report.links,
        thresholds=tuple(measured),
        timings=tuple(timings),
        notes=tuple(dict.fromkeys(notes)),
    )


def no_gpu() -> DeviceError:
    """Return the error where torch sees no GPU: whether drivers see any decides what helps."""
    what = "torch sees no GPU on this machine"
    try:
        found = probe.probe().devices
    except DeviceError as error:
        return DeviceError(f"{what}: {error.message}", f"measure on a machine with GPUs; {error.hint}")
    names = ", ".join(dict.fromkeys(device.name for device in found))
    if not torch.version.cuda:
        hint = 'this torch is built for the CPU: python3 -m pip install ".[cu13]", or ".[cu12]", has one for GPUs'
    else:
        hint = "python3 -c 'import torch; torch.cuda.init()' says what torch lacks"
    return DeviceError(f"{what}, its driver sees {counted(len(found), 'device')} ({names})", hint)


def _counts(gpus: int) -> tuple[int, ...]:
    """Return the numbers of GPUs to measure with: two, four, and the most that a plan can use."""
    most = min(gpus, MOST_SOURCES - 1)
    return tuple(sorted({count for count in (2, 4, most) if 1 < count <= most}))


def _usable(places: Sequence[torch.device]) -> tuple[list[str], list[str]]:
    """Return the transports whose thresholds can be measured, and notes on why others cannot."""
    usable, notes = [], []
    for transport in _TUNED:
        choice, problems = choose(places, transport)
        if problems or not choice.waits:
            notes += [f"not measured: {problem}" for problem in problems or choice.notes]
        else:
            usable.append(transport)
    return usable, notes


def _measured(places: Sequence[torch.device], transports: Sequence[str], timings: list[Timing]) -> Thresholds:
    """Return the thresholds measured on given GPUs; append the measured times to ``timings``."""
    with GraphTimer(places) as timer:

        def time(transport: str, kind: str, size: int, ways: tuple[str, ...]) -> Sequence[float]:
            times = timer(transport, kind, size, ways)
            for way, each in zip(ways, times, strict=True):
                timings.append(
                    Timing(
                        devices=len(places),
                        transport=transport,
                        kind=kind,
                        message_bytes=size,
                        way=way,
                        time_ns=round(each * 1000),
                    )
                )
            return times

        limits = {transport: timer.limits(transport) for transport in transports}
        slots = {transport: limit.slot_bytes for transport, limit in limits.items()}
        direct = "peer" in limits and limits["peer"].direct
        tuning = tune(time, slots, len(places), direct=direct)
    return Thresholds(devices=len(places), transports=tuple(transports), tuning=tuning)
