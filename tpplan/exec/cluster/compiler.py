"""Compiling a plan in several processes: each owns some of the plan's devices."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import tpplan
from tpplan.codec import dumps
from tpplan.errors import ExecutionError, RequestError, TpplanError
from tpplan.exec.cluster.carrier import GroupCarrier
from tpplan.exec.cluster.meeting import Meeting
from tpplan.exec.cluster.members import Claim, Gpu, disagreements, listed, owners, share
from tpplan.exec.cluster.processes import Processes
from tpplan.exec.cluster.sharing import Sharing
from tpplan.exec.cluster.ways import Way, way_between
from tpplan.exec.compiler import build, mismatches
from tpplan.exec.machine import differences, look_at, places_for, uncounted
from tpplan.exec.tensors import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from torch.distributed import ProcessGroup

    from tpplan.exec.binding import Memory
    from tpplan.exec.context import TPContext
    from tpplan.exec.engine import Backend
    from tpplan.exec.links.tuning import Tuning
    from tpplan.model import ModelSpec
    from tpplan.plan import SplitPlan

#: Transports between processes.
_TRANSPORTS = ("auto", "events", "peer")
#: Characters of a plan's hash in messages.
_SHOWN = 12
_HINT = "give all processes the same plan and arguments, and each of the devices in use to one of them"


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
    tuning: Tuning | None,
    scratch: bool,
) -> TPContext:
    """Compile a plan in all processes of a group at once; see :func:`tpplan.exec.compile`.

    Raises:
        ExecutionError: there is no group, a process cannot run its part, or the processes disagree; the same error in
            all processes.
    """
    meeting = Meeting(group)
    used = [i for i, memory in enumerate(plan.memory) if memory.used_bytes]
    places: tuple[torch.device, ...] = ()
    try:  # a process that only raised here would leave the others waiting
        own = _own(own, plan, used, meeting)
        places, problems = places_for(plan, backend, devices, own)
        problems += [*uncounted(plan), *mismatches(plan, model, max_rows, dtype)]
        if transport not in _TRANSPORTS:
            problems.append(f"transport: {transport} is not for several processes, {' or '.join(_TRANSPORTS)} is")
        found = [look_at(place) if place.type == "cuda" else None for place in places]
        problems += differences(plan, found)
        gpus = {i: places[i] for i in own if places and places[i].type == "cuda"}
        meeting.gpu = next(iter(gpus.values()), None)
        carrier = GroupCarrier(meeting.group, [*gpus.values()])
        terms = {
            "tpplan": tpplan.__version__,
            "plan": f"{plan.model.name} ({sha256(dumps(plan).encode()).hexdigest()[:_SHOWN]})",
            "backend": "cpu" if backend == "cpu" else "cuda",
            "transport": transport,
            "max_rows": str(max_rows),
            "dtype": name_of(dtype),
            "tuning": str(tuning or "default"),
            "group": carrier.backend,
        }
        claim = Claim(own, terms, tuple(problems), tuple(Gpu.of(i, place) for i, place in gpus.items()))
    except TpplanError as error:
        claim = Claim(problems=(error.message,))
    claims = meeting.tell(claim)
    if problems := disagreements(claims, used):
        raise ExecutionError(f"the plan for {plan.model.name} cannot run here:{listed(problems)}", _HINT)
    way = way_between(meeting, claims, used, transport, tuning) if gpus else Way()
    if way.problem:
        raise ExecutionError(f"the plan for {plan.model.name} cannot run here: {way.problem}", "leave out transport")
    own_gpus, whose = [*gpus.values()], owners(claims)
    sharing = Sharing(meeting, meeting.gpu if way.others else None)

    def start(memory: Memory) -> Backend:
        far = Processes(memory, whose, meeting.process, carrier, own_gpus)
        if not way.others:
            return far
        from tpplan.exec.cluster.peers import PeerProcesses  # noqa: PLC0415 (needs CUDA)

        return PeerProcesses(memory, gpus, way.others, process=meeting.process, opened=sharing.opened, far=far)

    context, failure = None, ""
    try:
        context = build(
            plan,
            places,
            start,
            transport="peer" if way.others else "events",
            max_rows=max_rows,
            dtype=dtype,
            straight=bool(way.others),
            waits=bool(way.others),
            tuning=way.tuning or tuning,
            notes=(*_notes(claims, carrier.backend), *way.notes),
            scratch=scratch,
            others=way.others,
            share=sharing.share,
        )
    except TpplanError as error:
        failure = error.message
        sharing.fail(failure)
    failures = [f"process {i}: {each}" for i, each in enumerate(meeting.tell(failure)) if each]
    if context is None or failures:
        if context:
            context.close()
        raise ExecutionError(f"the plan for {plan.model.name} cannot run here:{listed(failures)}", "free memory there")
    return context


def _own(own: Sequence[int] | None, plan: SplitPlan, used: Sequence[int], meeting: Meeting) -> tuple[int, ...]:
    """Return the devices in use that this process owns, ascending.

    Raises:
        RequestError: they are invalid, or were left out where there is no default.
    """
    if own is None:
        shared = share(used, meeting.count, meeting.process)
        if shared is None:
            message = f"own: {len(used)} devices are in use, which {meeting.count} processes cannot own equally many of"
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


def _notes(claims: Sequence[Claim], carrier: str) -> tuple[str, str]:
    """Return notes on who owns what, and on what carries messages."""
    whose = ", ".join(f"{i} owns {', '.join(map(str, claim.own))}" for i, claim in enumerate(claims))
    return (
        f"{len(claims)} processes own the devices: {whose}",
        f"between processes, what kernels do not write goes by torch.distributed ({carrier})",
    )
