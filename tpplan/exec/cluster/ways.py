"""The way of messages between processes: by kernels that write to each other's GPUs, or by torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from attrs import evolve, field, frozen

from tpplan.errors import ExecutionError
from tpplan.exec.cluster.members import Gpu
from tpplan.exec.links.tuning import Tuning
from tpplan.exec.transports import choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.exec.cluster.meeting import Meeting
    from tpplan.exec.cluster.members import Claim

#: Thresholds by which every process takes the same route, whether or not it captures a graph.
_SAME = {"copies_fans_bytes": 0, "copies_exchanges_bytes": 0}
#: Between two processes, slots are faster than mirrors for everything that fits them (two H100 with NVLink).
_BETWEEN_TWO = dict.fromkeys(("peer_fans_bytes", "peer_exchanges_bytes", "peer_sums_bytes"), 2 * 2**20)


@frozen
class Way:
    """How the processes exchange small messages between their GPUs, the same in all of them.

    Attributes:
        others: if by kernels, the torch device, as this process sees it, for each device of another process.
        tuning: thresholds, if by kernels.
        notes: reasons, and where thresholds come from.
        problem: why it is impossible, if kernels were asked for.
    """

    others: Mapping[int, torch.device] = field(factory=dict)
    tuning: Tuning | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""


def way_between(
    meeting: Meeting, claims: Sequence[Claim], used: Sequence[int], transport: str, tuning: Tuning | None
) -> Way:
    """Choose the way between processes with GPUs; all processes call it at the same time.

    Args:
        meeting: the processes.
        claims: what each of them has told.
        used: the devices in use.
        transport: ``peer`` for kernels, ``events`` for torch.distributed, or ``auto`` for kernels where possible.
        tuning: thresholds of the caller.
    """
    if transport == "events":
        return Way()
    seen = _seen(claims, used)
    # The first process probes the links, if nobody has; the others find its verdicts.
    reason = "" if meeting.process else _against(claims, seen)
    meeting.tell(None)
    reasons = meeting.tell(_against(claims, seen) if meeting.process else reason)
    if not any(reasons):
        reasons = _try(meeting, seen[claims[meeting.process].own[0]])
    told = [f"peer {reason} (process {i})" for i, reason in enumerate(reasons) if reason]
    if told:
        return Way(problem=told[0] if transport == "peer" else "", notes=(told[0],))
    others = {device: seen[device] for device in used if device not in claims[meeting.process].own}
    if tuning:
        return Way(others, evolve(tuning, **_SAME), ("thresholds as given",))
    from tpplan.exec.links.tuning_cache import stored  # noqa: PLC0415 (needs CUDA)

    tuning, origin = meeting.tell(stored(len(used), "peer"))[0]
    if len(used) == 2:  # noqa: PLR2004
        return Way(others, evolve(tuning, **_SAME, **_BETWEEN_TWO))
    return Way(others, evolve(tuning, **_SAME), (f"thresholds {origin}",))


def _seen(claims: Sequence[Claim], used: Sequence[int]) -> dict[int, torch.device]:
    """Return each device in use, of all processes, as this process sees it; those that it does not see are missing."""
    visible = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    here = {(gpu.host, gpu.uuid): place for place in visible for gpu in (Gpu.of(0, place),)}
    gpus = {gpu.device: here.get((gpu.host, gpu.uuid)) for claim in claims for gpu in claim.gpus}
    return {device: place for device in used if (place := gpus.get(device))}


def _against(claims: Sequence[Claim], seen: Mapping[int, torch.device]) -> str:
    """Return why the kernels of this process cannot write to the GPUs of the others; empty if they can."""
    if any(len(claim.own) > 1 for claim in claims):
        return "is only between processes with one GPU each"
    if len({gpu.host for claim in claims for gpu in claim.gpus}) > 1:
        return "is only between processes on one host"
    if len(seen) < len(claims):
        return "needs every process to see the GPUs of all: leave CUDA_VISIBLE_DEVICES alone, and name devices"
    choice, problems = choose([*seen.values()], "auto")
    if problems:
        return f"is out: {'; '.join(problems)}"
    return "" if choice.transport == "peer" else (choice.notes[0].removeprefix("peer ") if choice.notes else "is out")


def _try(meeting: Meeting, place: torch.device) -> list[str]:
    """Return for each process why it cannot open the memory of the others; empty if it can."""
    from tpplan.exec.cluster.ipc import Handle, Opened  # noqa: PLC0415 (needs CUDA)

    number = torch.full((1,), meeting.process, dtype=torch.int32, device=place)
    torch.cuda.synchronize(place)
    try:
        handle, reason = Handle.of(number), ""
    except ExecutionError as error:
        handle, reason = None, error.message
    for process, theirs in enumerate(meeting.tell(handle)):
        if theirs is None or process == meeting.process or reason:
            continue
        try:
            opened = Opened.on(place, theirs)
            found = opened.read(0)
            opened.close()
            reason = "" if found == process else f"read {found} instead of {process} from another process's GPU"
        except ExecutionError as error:
            reason = error.message
    return meeting.tell(f"is out: {reason}" if reason else "")  # only then may the memory be freed
