"""The way of messages between processes: by kernels that write to each other's GPUs, or by torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from attrs import asdict, evolve, field, frozen

from tpplan.exec.group.members import said_of
from tpplan.exec.machine.transports import choose
from tpplan.exec.tuning import Tuning, default

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.exec.group.meeting import Meeting
    from tpplan.exec.group.members import Claim, Gpu

#: Thresholds by which every process takes the same route, whether or not it captures a graph.
_SAME = {"copies_fans_bytes": 0, "copies_exchanges_bytes": 0}
#: Between two processes, in which no copy engines take over, what fits slots takes less time there (two H100, NVLink).
_BETWEEN_TWO = {"peer_fans_bytes": 2 * 2**20, "peer_exchanges_bytes": 2**20}


@frozen
class ProcessTransport:
    """How the processes exchange messages between their GPUs, the same in all of them.

    Attributes:
        others: if by kernels, the multiprocessors of each device of another process.
        direct: whether kernels may read and write each other's tensors and mirrors, not only slots.
        tuning: thresholds, if by kernels.
        notes: reasons, and where thresholds come from.
        problem: why it is impossible, if kernels were asked for.
    """

    others: Mapping[int, int] = field(factory=dict)
    direct: bool = False
    tuning: Tuning | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""


class _Verdict(NamedTuple):
    """What a process says of kernels between it and the others.

    Attributes:
        against: why there can be none; empty if there can.
        direct: see :class:`ProcessTransport`.
    """

    against: str = ""
    direct: bool = True


def transport_between(
    meeting: Meeting, claims: Sequence[Claim], transport: str, tuning: Tuning | None
) -> ProcessTransport:
    """Choose the way between processes with GPUs; all processes call it at the same time.

    Args:
        meeting: the processes.
        claims: what each of them has told.
        transport: ``peer`` for kernels, ``events`` for torch.distributed, or ``auto`` for kernels where possible.
        tuning: thresholds of the caller.
    """
    if transport == "events":
        return ProcessTransport()
    place = meeting.gpu
    assert place is not None  # noqa: S101 (the caller has looked)
    # The first process probes the links, if nobody has; the others find its verdicts.
    first = None if meeting.process else _guarded(lambda: _verdict(claims, place))
    meeting.tell(None)
    verdicts = _exchanged(meeting, first or _guarded(lambda: _verdict(claims, place)))
    if not any(each.against for each in verdicts):
        tried = _tried(meeting, place)
        verdicts = [each if each.against else mine for each, mine in zip(tried, verdicts, strict=True)]
    told = [f"peer {each.against} (process {i})" for i, each in enumerate(verdicts) if each.against]
    if told:
        return ProcessTransport(problem=told[0] if transport == "peer" else "", notes=(told[0],))
    gpus = [gpu for claim in claims for gpu in claim.gpus]
    others = {gpu.device: gpu.processors for gpu in gpus if gpu.device not in claims[meeting.process].own}
    direct = all(each.direct for each in verdicts)
    notes = () if direct else ("what is larger than a slot goes by torch.distributed: loads from peers are unverified",)
    if tuning:
        return ProcessTransport(
            others, direct, evolve(tuning, **_SAME), (*notes, "thresholds as given, without copies_*")
        )
    measured, origin = _thresholds(gpus)
    tuning, origin = meeting.tell_and_read((asdict(measured), origin), lambda each: (Tuning(**each[0]), each[1]))[0]
    return ProcessTransport(others, direct, evolve(tuning, **_SAME), (*notes, f"thresholds {origin}"))


def _thresholds(gpus: Sequence[Gpu]) -> tuple[Tuning, str]:
    """Return the thresholds for some GPUs, and where they come from, in words."""
    from tpplan.exec.cuda.tuning_cache import stored  # noqa: PLC0415 (needs CUDA)

    devices = len(gpus)
    try:
        tuning, origin = stored(devices, "peer", [gpu.uuid for gpu in gpus])
    except Exception as error:  # noqa: BLE001 (the others wait for an answer)
        tuning, origin = default(devices), f"built in: {error}"
    return (evolve(tuning, **_BETWEEN_TWO), origin) if devices == 2 else (tuning, origin)  # noqa: PLR2004


def _guarded(find: Callable[[], _Verdict]) -> _Verdict:
    """Return a verdict, which is against it if finding one fails: the others wait for an answer."""
    try:
        return find()
    except Exception as error:  # noqa: BLE001 (whatever it is)
        return _Verdict(f"is out: {said_of(error)[0]}")


def _verdict(claims: Sequence[Claim], place: torch.device) -> _Verdict:
    """Return whether the kernels of this process, on its GPU, can reach those of the others."""
    if any(len(claim.own) > 1 for claim in claims):
        return _Verdict("is only between processes with one GPU each")
    gpus = [gpu for claim in claims for gpu in claim.gpus]
    if len({gpu.host for gpu in gpus}) > 1:
        return _Verdict("is only between processes on one host")
    choice, problems = choose([place], "auto", [gpu.uuid for gpu in gpus])
    if problems:
        return _Verdict(f"is out: {'; '.join(problems)}")
    if choice.transport == "peer":
        return _Verdict(direct=choice.direct)
    return _Verdict(choice.notes[0].removeprefix("peer ") if choice.notes else "is out")


def _tried(meeting: Meeting, place: torch.device) -> list[_Verdict]:
    """Return for each process whether it can open the memory of the others."""
    from tpplan.exec.processes.ipc import Handle, Opened  # noqa: PLC0415 (needs CUDA)

    numbers: list[torch.Tensor] = []  # kept until all have read it
    handles: list[Handle] = []

    def share() -> _Verdict:
        numbers.append(torch.full((1,), meeting.process, dtype=torch.int32, device=place))
        torch.cuda.synchronize(place)
        handles.append(Handle.of(numbers[0]))
        return _Verdict()

    def read(every: Sequence[Sequence[Handle]]) -> _Verdict:
        for process, theirs in enumerate(every):
            for handle in theirs if process != meeting.process else ():
                opened = Opened.on(place, handle)
                found = opened.read()
                opened.close()
                if found != process:
                    return _Verdict(f"is out: read {found} instead of {process} from the GPU of another process")
        return _Verdict()

    mine = _guarded(share)
    every = meeting.tell_and_read([*map(tuple, handles)], lambda each: [Handle(*handle) for handle in each])
    return _exchanged(meeting, mine if mine.against else _guarded(lambda: read(every)))


def _exchanged(meeting: Meeting, verdict: _Verdict) -> list[_Verdict]:
    """Tell all processes a verdict, and return those of all."""
    return meeting.tell_and_read(tuple(verdict), lambda each: _Verdict(*each))
