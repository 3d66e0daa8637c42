"""``tpplan bench --processes``: starts a process for each device of a plan, and takes what they measure."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from attrs import evolve

from tpplan.core.axes import Axis, minimum_units
from tpplan.core.sizes import counted
from tpplan.errors import ExecutionError, RequestError
from tpplan.exec.tools.bench.between import children
from tpplan.exec.tools.bench.run import USUAL, check_room, with_room
from tpplan.files.codec import structure
from tpplan.files.text import parse_json
from tpplan.reports.bench import BenchReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.core.plan import SplitPlan

_LOG = logging.getLogger(__name__)
_WORKER = "tpplan.exec.tools.bench.between.worker"
#: Seconds after which all processes are ended.
_MOST_SECONDS = 1800
#: Characters of why they failed.
_MOST_SAID = 500


def bench(
    plan: SplitPlan,
    backend: str,
    transport: str,
    *,
    sizes: Sequence[int],
    rounds: int,
    busy: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    told: Callable[[BenchReport], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> BenchReport:
    """Time operations of a plan between processes with a device each, and others' implementations beside them.

    These are NCCL, NCCL with windows, and torch's symmetric memory; gloo stands in for NCCL between virtual devices.
    Each result is checked first. NVLink multicast is off.

    Args:
        plan: whose devices each hold a part of the residual stream.
        backend: ``cpu`` or ``cuda``, which ``auto`` is too.
        transport: of the contexts, or ``auto``.
        sizes: payloads in bytes, see :func:`tpplan.exec.tools.bench.run.bench`.
        rounds: in which the implementations take turns.
        busy: returns a context that is active while the processes run.
        told: called with the report whenever an operation is timed.
        note: called with sizes that the plan has no room for.

    Returns:
        What was timed; if the processes failed then, at their end or before, also why.

    Raises:
        ExecutionError: there are too few GPUs, or the processes failed before anything was timed.
        RequestError: a device holds no part, or the plan has room for none of the sizes.
    """
    held = {part.device for part in plan.slices(Axis.RESIDUAL)}
    if idle := [f"{i} ({device.name})" for i, device in enumerate(plan.devices) if i not in held]:
        split = plan.split(Axis.RESIDUAL)
        least = minimum_units(Axis.RESIDUAL, split.size, split.unit) * split.unit
        message = (
            f"--processes times operations on slices of the residual stream, and device{'s' * (len(idle) > 1)} "
            f"{', '.join(idle)} of the plan for {plan.model.name} have none: a slice has {least} of its {split.size} "
            f"columns at least"
        )
        hint = "leave out --processes, which times the plan's operations in one process"
        raise RequestError(message, f"{hint}, or plan for at most {counted(max(split.size // least, 1), 'device')}")
    backend = "cuda" if backend == "auto" else backend
    if backend == "cuda" and (here := torch.cuda.device_count()) < len(plan.devices):
        message = f"the plan has {len(plan.devices)} devices, this machine {here} GPUs"
        raise ExecutionError(message, "--backend cpu has virtual devices")
    row_bytes = plan.split(Axis.RESIDUAL).size * getattr(torch, plan.model.dtype).itemsize
    counts = sorted({-(-size // row_bytes) for size in sizes or USUAL})
    if not sizes:
        counts = with_room(counts, plan.request.max_rows, row_bytes, note)
    check_room(counts, plan.request.max_rows, row_bytes)
    counts = [rows for rows in counts if rows <= plan.request.max_rows]
    reports: list[BenchReport] = []

    def read(line: str) -> None:
        reports.append(structure(parse_json(line, "what the processes say"), BenchReport, "what the processes say"))
        told(reports[-1])

    with TemporaryDirectory() as folder, busy(f"measuring between {len(plan.devices)} processes"):
        path = Path(folder) / "plan.json"
        plan.save(path)
        asked = {"backend": backend, "transport": transport, "rows": counts, "rounds": rounds}
        # -P: the same modules as here, and none from the working directory that are not known here
        command = [sys.executable, "-P", "-m", _WORKER, str(path), json.dumps(asked)]
        found = os.pathsep.join(filter(None, sys.path))
        failure = children.run(command, len(plan.devices), _MOST_SECONDS, read, folder, more={"PYTHONPATH": found})
    if failure or not reports:
        how, _, said = failure.partition("\n")
        _LOG.debug("what the processes said: %s", failure)
        why = children.cause(said)[:_MOST_SAID]
        message = f"{how or 'the processes said nothing'}{f': {why}' if why else ''}"
        if not reports:
            raise failed(message)
        return evolve(reports[-1], failed=message)
    return reports[-1]


def failed(message: str) -> ExecutionError:
    """Return the error for processes that failed; ``message`` says how, and why."""
    return ExecutionError(message, "tpplan selftest says more of what fails")
