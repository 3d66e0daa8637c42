"""Compiling a plan in several processes: each owns some of the plan's devices."""

from __future__ import annotations

import json
from functools import partial
from hashlib import sha256
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Self

import torch
from attrs import field, frozen

import tpplan
from tpplan.errors import ExecutionError, RequestError
from tpplan.exec.build import advice, build, mismatches
from tpplan.exec.checks import name_of, seconds
from tpplan.exec.group.meeting import Meeting
from tpplan.exec.group.members import Claim, Gpu, differing, disagreements, owners, said_of, share
from tpplan.exec.group.transport import GroupTransport
from tpplan.exec.machine.look import FoundDevice, differences, listed, look_at, places_for
from tpplan.exec.processes.distributed import Processes
from tpplan.exec.processes.process_transport import ProcessTransport, transport_between
from tpplan.exec.processes.shared import Sharing
from tpplan.exec.toolchain.torch_shims import timeout_of
from tpplan.files.codec import dumps
from tpplan.files.jsontext import read_json, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import timedelta
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext
    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.processes.peers import PeerProcesses
    from tpplan.exec.tuning import Tuning

#: Transports between processes.
_TRANSPORTS = ("auto", "events", "peer")
#: Bytes of a context's name.
_NAME_BYTES = 8
#: How long kernels wait for each other if nobody says, in seconds, even if the group waits longer: torch's own 10 or 30
#: minutes are long for a GPU that does nothing else.
_MOST_SECONDS = 60.0
#: Characters of a plan's hash in messages.
_SHOWN = 12
#: Maximum number of values in which plans are said to differ.
_TOLD = 4
#: Maximum characters of such a value: more than a fingerprint has.
_LONGEST = 120
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
    weights_loaded: bool,
    timeout: float | timedelta | None,
    check: Callable[[], None],
) -> TPContext:
    """Compile a plan in all processes of a group at once; see :func:`tpplan.exec.compile`.

    ``check`` raises an error if the plan or an argument is invalid.

    Raises:
        ExecutionError: there is no group, a process cannot run its part, or the processes disagree; the same error in
            all processes.
    """
    meeting = Meeting(group)
    used = [i for i, memory in enumerate(plan.memory) if memory.used_bytes]
    here, hint = _Here(), ""
    try:  # a process that only raised here would leave the others waiting
        check()
        here = _Here.of(meeting, plan, _own(own, plan, used, meeting), backend, devices)
        lacks = differences(plan, here.reports, scratch=scratch, weights_loaded=weights_loaded)
        failures = [*here.problems, *lacks, *mismatches(plan, model, max_rows, dtype), *_unfit(transport, backend)]
    except Exception as error:  # noqa: BLE001 (whatever it is)
        message, hint = said_of(error)
        failures = [message]
    arguments = {
        "backend": "cpu" if backend == "cpu" else "cuda",
        "transport": transport,
        "max_rows": str(max_rows),
        "dtype": name_of(dtype),
        "tuning": str(tuning or "default"),
        "timeout": "default" if timeout is None or failures else f"{seconds('timeout', timeout):g} s",
        "scratch": str(scratch),
    }
    terms = {} if failures else _terms(plan, arguments, here.carrier)
    gpus = tuple(Gpu.of(i, place) for i, place in here.gpus.items())
    mine = Claim(here.own, terms, tuple(failures), gpus, token_hex(_NAME_BYTES), hint)
    claims = meeting.tell_and_read(mine.plain(), Claim.of)
    refused = f"the plan for {plan.model.name} cannot run here"
    problems = disagreements(claims, used)
    if len({claim.terms.get("plan") for claim in claims}) > 1 and all(claim.terms for claim in claims):
        problems += _in_plans(meeting, plan)
    if problems or here.carrier is None:
        have_own = any(claim.problems for claim in claims)  # beside which nobody has compared them
        hints = [*(claim.hint for claim in claims if claim.hint), advice(backend) if have_own else _HINT]
        raise ExecutionError(f"{refused}:{listed(problems)}", hints[0])
    here.carrier.name = claims[0].name
    here.carrier.open()
    way = transport_between(meeting, claims, transport, tuning) if here.gpus else ProcessTransport()
    if way.problem:
        raise ExecutionError(f"{refused}: {way.problem}", "leave out transport")
    sharing = Sharing(meeting, meeting.gpu if way.others else None)
    context, failure, hint = None, "", ""
    try:
        try:
            context = build(
                plan,
                here.places,
                partial(here.start, meeting=meeting, owners=owners(claims), way=way, sharing=sharing, timeout=timeout),
                transport="peer" if way.others else "events",
                max_rows=max_rows,
                dtype=dtype,
                direct=way.direct,
                waits=bool(way.others),
                tuning=way.tuning or tuning,
                notes=(*_notes(claims, here.carrier.backend), *way.notes),
                scratch=scratch,
                others=way.others,
                share=sharing.share,
                meeting=meeting,
            )
        except Exception as error:  # noqa: BLE001 (whatever it is)
            failure, hint = said_of(error)
            sharing.fail(failure)
        told = meeting.tell_and_read((failure, hint, sharing.addresses), _told)
    finally:  # of an interrupt too; the others learn of it when they have waited in vain
        sharing.forget_name()
    failures = [f"process {i}: {each}" for i, (each, *_) in enumerate(told) if each]
    if context is None or failures:
        sharing.end()
        if context:
            context.close()
        raise ExecutionError(f"{refused}:{listed(failures)}", next((hint for _, hint, _ in told if hint), _HINT))
    sharing.learn([addresses for *_, addresses in told])
    return context


def _told(each: Any) -> tuple[str, str, dict[int, int]]:
    """Return what a process has told: why it has failed, a hint, and where it sees the others' exchange buffers."""
    failure, hint, addresses = each
    return str(failure), str(hint), {int(device): int(address) for device, address in addresses.items()}


def _unfit(transport: str, backend: str) -> list[str]:
    """Return why several processes cannot use a transport, if they cannot."""
    if transport not in _TRANSPORTS:
        return [f"transport: {transport} is not for several processes, {' or '.join(_TRANSPORTS)} is"]
    if transport == "peer" and backend == "cpu":
        return ["transport: peer is between GPUs, these devices are virtual"]
    return []


@frozen
class _Here:
    """What a process has for its devices.

    Attributes:
        own: the devices in use that it owns.
        places: torch device for each device of the plan, ``meta`` for those of other processes.
        gpus: those of its own devices that are GPUs.
        carrier: carries messages; None if it could not be made.
        problems: why there are no such devices.
        reports: for each device of the plan, what was found of the GPU for it; None for other devices.
    """

    own: tuple[int, ...] = ()
    places: tuple[torch.device, ...] = ()
    gpus: dict[int, torch.device] = field(factory=dict)
    carrier: GroupTransport | None = None
    problems: tuple[str, ...] = ()
    reports: tuple[FoundDevice | None, ...] = ()

    @classmethod
    def of(
        cls,
        meeting: Meeting,
        plan: SplitPlan,
        own: Sequence[int],
        backend: str,
        devices: Sequence[torch.device | str | int] | None,
    ) -> Self:
        """Look at this process's devices.

        Args:
            meeting: the processes.
            plan: the plan.
            own: the devices that this process owns, in the order of ``devices``; some may be idle.
            backend: see :func:`compile_together`.
            devices: see :func:`compile_together`.

        Raises:
            ExecutionError: the group cannot carry messages between such devices.
        """
        used = tuple(sorted(device for device in own if plan.memory[device].used_bytes))
        places, problems = places_for(plan, backend, devices, used if devices is None else own)
        if problems:
            return cls(used, problems=tuple(problems))
        places = tuple(place if i in used else torch.device("meta") for i, place in enumerate(places))
        gpus = {i: places[i] for i in used if places[i].type == "cuda"}
        meeting.gpu = next(iter(gpus.values()), None)
        reports = tuple(look_at(place) if place.type == "cuda" else None for place in places)
        return cls(used, places, gpus, GroupTransport(meeting, [*gpus.values()]), reports=reports)

    def start(
        self,
        memory: Memory,
        *,
        meeting: Meeting,
        owners: Mapping[int, int],
        way: ProcessTransport,
        sharing: Sharing,
        timeout: float | timedelta | None,
    ) -> Processes | PeerProcesses:
        """Return the backend over a context's memory."""
        assert self.carrier is not None  # noqa: S101 (else the plan is refused)
        if not way.others:
            return Processes(memory, owners, meeting.process, self.carrier, [*self.gpus.values()])
        from tpplan.exec.processes.peers import PeerProcesses  # noqa: PLC0415 (needs CUDA)
        from tpplan.exec.processes.reach import Reach  # noqa: PLC0415 (needs CUDA)

        far = Processes(memory, owners, meeting.process, self.carrier, [])
        if timeout is None:
            timeout = min(_MOST_SECONDS, timeout_of(meeting.group, self.carrier.place) or _MOST_SECONDS)
        patience = seconds("timeout", timeout)
        (gpu,) = self.gpus.values()
        reach = sharing.reach = Reach(
            self.carrier.name, gpu, meeting.process, {each: owners[each] for each in way.others}
        )
        try:
            return PeerProcesses(memory, self.gpus, way.others, timeout=patience, sharing=sharing, reach=reach, far=far)
        except BaseException:
            reach.close()
            raise


def _own(own: Sequence[int] | None, plan: SplitPlan, used: Sequence[int], meeting: Meeting) -> tuple[int, ...]:
    """Return the devices that a process owns, in the order given.

    Raises:
        RequestError: they are invalid, or were left out where there is no default.
    """
    if own is None:
        shared = share(used, meeting.count, meeting.process)
        if shared is None:
            in_use = "1 device is in use" if len(used) == 1 else f"{len(used)} devices are in use"
            message = f"own: {in_use}, which {meeting.count} processes cannot own equally many of"
            raise RequestError(message, "start a process for each, or pass as own= the devices that each process owns")
        return shared
    every = range(len(plan.devices))
    wrong = [device for device in own if type(device) is not int or device not in every]
    if wrong or len(set(own)) < len(own):
        message = f"own: {list(own)!r:.60} are not different devices from 0 to {every[-1]}"
        raise RequestError(message, "pass indices of the plan's devices")
    if not set(own) & set(used):
        raise RequestError(f"own: the plan uses none of {list(own)!r:.60}", f"devices in use: {list(used)}")
    return tuple(own)


def _terms(plan: SplitPlan, arguments: Mapping[str, str], carrier: GroupTransport | None) -> dict[str, str]:
    """Return what has to be the same in all processes, by name."""
    hashed = sha256(dumps(plan).encode()).hexdigest()[:_SHOWN]
    versions = {"tpplan": tpplan.__version__, "torch": ".".join(torch.__version__.split(".")[:2])}
    terms = {**versions, "plan": f"{plan.model.name} ({hashed})", **arguments}
    return terms | {"group": carrier.backend if carrier else ""}


def _in_plans(meeting: Meeting, plan: SplitPlan) -> list[str]:
    """Return the first values in which the plans of the processes differ; all call it at once."""
    plans = meeting.tell_and_read(dumps(plan), lambda text: dict(_leaves(read_json(text), "")))
    found = [f"plan{each}" for each in differing(plans)]
    return found[:_TOLD] + ([f"and {len(found) - _TOLD} more values of the plans"] if len(found) > _TOLD else [])


def _leaves(data: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every value in a document of JSON."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(data, list):
        for i, value in enumerate(data):
            yield from _leaves(value, f"{path}[{i}]")
    else:
        yield path, visible(json.dumps(data, ensure_ascii=False))[:_LONGEST]


def _notes(claims: Sequence[Claim], carrier: str) -> tuple[str, str]:
    """Return notes on who owns what, and on what carries messages."""
    whose = ", ".join(f"{i} owns {', '.join(map(str, claim.own))}" for i, claim in enumerate(claims))
    return (
        f"{len(claims)} processes own the devices: {whose}",
        f"between processes, what kernels do not write goes by torch.distributed ({carrier})",
    )
