"""Compiling a plan in several processes: each owns some of the plan's devices."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import distributed

import tpplan
from tpplan.codec import dumps
from tpplan.errors import ExecutionError, RequestError, TpplanError
from tpplan.exec.cluster.carrier import GroupCarrier
from tpplan.exec.cluster.members import Claim, Gpu, disagreements, owners, share
from tpplan.exec.cluster.processes import Processes
from tpplan.exec.compiler import build, mismatches
from tpplan.exec.machine import differences, look_at, places_for, uncounted
from tpplan.exec.tensors import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from tpplan.exec.context import TPContext
    from tpplan.model import ModelSpec
    from tpplan.plan import SplitPlan

_Told = TypeVar("_Told")

#: The only transport between processes.
_TRANSPORT = "events"
#: Characters of a plan's hash in messages.
_SHOWN = 12


def compile_together(
    plan: SplitPlan,
    group: ProcessGroup | None,
    own: Sequence[int] | None,
    *,
    backend: str,
    devices: Sequence[torch.device | str | int] | None,
    model: ModelSpec | str | Path | None,
    max_rows: int,
    dtype: torch.dtype,
    transport: str,
    scratch: bool,
) -> TPContext:
    """Compile a plan in all processes of a group at once; see :func:`tpplan.exec.compile`.

    Raises:
        ExecutionError: there is no group, a process cannot run its part, or the processes disagree; the same error in
            all processes.
    """
    group = _group(group)
    process, count = distributed.get_rank(group), distributed.get_world_size(group)
    used = [i for i, memory in enumerate(plan.memory) if memory.used_bytes]
    places: tuple[torch.device, ...] = ()
    carrier = None
    try:  # a process that only raised here would leave the others waiting
        own = _own(own, plan, used, count, process)
        places, problems = places_for(plan, backend, devices, own)
        problems += [*uncounted(plan), *mismatches(plan, model, max_rows, dtype)]
        if transport not in {"auto", _TRANSPORT}:
            problems.append(f"transport: {transport} is not for several processes, {_TRANSPORT} is")
        mine = [places[i] for i in own] if places else []
        gpus = [place for place in mine if place.type == "cuda"]
        if gpus:
            found = [look_at(place) if place.type == "cuda" else None for place in places]
            problems += differences(plan, found)
        if mine:
            carrier = GroupCarrier(group, mine)
        terms = {
            "tpplan": tpplan.__version__,
            "plan": f"{plan.model.name} ({sha256(dumps(plan).encode()).hexdigest()[:_SHOWN]})",
            "backend": "cpu" if backend == "cpu" else "cuda",
            "max_rows": str(max_rows),
            "dtype": name_of(dtype),
            "group": carrier.backend if carrier else "",
        }
        claim = Claim(own, terms, tuple(problems), tuple(_gpu(i, places[i]) for i in own) if gpus else ())
    except TpplanError as error:
        claim = Claim(problems=(error.message,))
    claims = _told(group, claim, places)
    problems = disagreements(claims, used)
    if problems or carrier is None:
        hint = "give all processes the same plan and arguments, and each of the devices in use to one of them"
        raise ExecutionError(f"the plan for {plan.model.name} cannot run here:{_listed(problems)}", hint)
    whose = owners(claims)
    start = partial(Processes, owners=whose, process=process, carrier=carrier, gpus=gpus)
    notes = [
        f"{count} processes: {', '.join(_owned(i, each.own) for i, each in enumerate(claims))}",
        f"torch.distributed carries what goes from one to another, by {carrier.backend}",
    ]
    context, failure = None, ""
    try:
        context = build(
            plan, places, start, transport=_TRANSPORT, max_rows=max_rows, dtype=dtype, scratch=scratch, notes=notes
        )
    except TpplanError as error:
        failure = error.message
    failures = [f"process {i}: {each}" for i, each in enumerate(_told(group, failure, places)) if each]
    if context is None or failures:
        if context:
            context.close()
        raise ExecutionError(f"the plan for {plan.model.name} cannot run here:{_listed(failures)}", "free memory there")
    return context


def _group(group: ProcessGroup | None) -> ProcessGroup:
    """Return a group that this process is in, by default that of all processes.

    Raises:
        ExecutionError: there is none.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        hint = "call torch.distributed.init_process_group in every process first"
        raise ExecutionError("group: torch.distributed has no processes yet", hint)
    found = group if group is not None else distributed.group.WORLD
    if not isinstance(found, distributed.ProcessGroup) or distributed.get_rank(found) < 0:
        hint = "compile only in the processes that are in the group"
        raise ExecutionError(f"group: this process is not in {group!r:.40}", hint)
    return found


def _own(own: Sequence[int] | None, plan: SplitPlan, used: Sequence[int], count: int, process: int) -> tuple[int, ...]:
    """Return the devices in use that a process owns, ascending.

    Raises:
        RequestError: they are invalid, or were left out where there is no default.
    """
    if own is None:
        shared = share(used, count, process)
        if shared is None:
            message = f"own: {len(used)} devices are in use, which {count} processes cannot own equally many of"
            raise RequestError(message, "pass the devices that each process owns")
        return shared
    every = range(len(plan.devices))
    wrong = [device for device in own if type(device) is not int or device not in every]
    if wrong or len(set(own)) < len(own):
        message = f"own: {list(own)!r:.60} are not different devices from 0 to {every[-1]}"
        raise RequestError(message, "pass indices of the plan's devices")
    found = tuple(sorted(device for device in own if device in used))
    if not found:
        raise RequestError(f"own: the plan uses none of {list(own)!r:.60}", f"devices in use: {list(used)}")
    return found


def _told(group: ProcessGroup, mine: _Told, places: Sequence[torch.device]) -> list[_Told]:
    """Tell all processes something, and return what each of them has told.

    Raises:
        ExecutionError: torch.distributed failed, as when a process has ended.
    """
    told: list[_Told | None] = [None] * distributed.get_world_size(group)
    gpu = next((place for place in places if place.type == "cuda"), None)
    try:
        with torch.cuda.device(gpu) if gpu else nullcontext():  # where NCCL carries it
            distributed.all_gather_object(told, mine, group)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        hint = "compile in all processes of the group at the same time"
        raise ExecutionError(f"the processes could not agree on the plan: {reason}", hint) from error
    return [each for each in told if each is not None]


def _gpu(device: int, place: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(place)
    return Gpu(device, socket.gethostname(), str(getattr(properties, "uuid", place.index)))


def _owned(process: int, own: Sequence[int]) -> str:
    """Return the devices of a process as in a sentence."""
    listed = f"{own[0]}-{own[-1]}" if len(own) > 1 and own[-1] - own[0] == len(own) - 1 else ", ".join(map(str, own))
    return f"{process} owns device{'s' if len(own) > 1 else ''} {listed}"


def _listed(problems: Sequence[str]) -> str:
    return "".join(f"\n  {problem}" for problem in problems)
