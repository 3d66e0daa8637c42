"""The processes of a plan: who owns which device, and their agreement on what to run."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from attrs import asdict, field, frozen

from tpplan.errors import TpplanError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Gpu(NamedTuple):
    """A GPU that a process owns.

    Attributes:
        device: index of the device in the plan.
        host: name of the host.
        uuid: the GPU's identity there.
        processors: its multiprocessors.
    """

    device: int
    host: str
    uuid: str
    processors: int

    @classmethod
    def of(cls, device: int, place: torch.device) -> Self:
        """Return the identity of a torch device of this host."""
        found = torch.cuda.get_device_properties(place)
        uuid = getattr(found, "uuid", place.index)
        return cls(device, socket.gethostname(), str(uuid), found.multi_processor_count)


@frozen
class Claim:
    """What a process wants to run, told to all others.

    Attributes:
        own: the devices that it owns.
        terms: what has to be the same in all processes, by name.
        problems: why it cannot run the plan.
        gpus: its GPUs.
        name: a name for the context; that of the first process counts.
        hint: what to do about its problems.
    """

    own: tuple[int, ...] = ()
    terms: Mapping[str, str] = field(factory=dict)
    problems: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    name: str = ""
    hint: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the claim as plain data."""
        gpus = [tuple(gpu) for gpu in self.gpus]
        return {**asdict(self, recurse=False), "terms": dict(self.terms), "gpus": gpus}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        """Return the claim that :meth:`plain` gave."""
        return cls(**{**plain, "gpus": tuple(Gpu(*gpu) for gpu in plain["gpus"])})


def share(used: Sequence[int], processes: int, process: int) -> tuple[int, ...] | None:
    """Return the devices that a process owns by default: as many as each other, in order; None if that is impossible.

    Args:
        used: the devices in use.
        processes: number of processes.
        process: index of the process.
    """
    count, rest = divmod(len(used), processes)
    return None if rest else tuple(used[process * count : (process + 1) * count])


def owners(claims: Sequence[Claim]) -> dict[int, int]:
    """Return the index of the process that owns each device."""
    return {device: process for process, claim in enumerate(claims) for device in claim.own}


def disagreements(claims: Sequence[Claim], used: Sequence[int]) -> list[str]:
    """Return why processes cannot run a plan together, the same in all of them; empty if they can.

    Args:
        claims: what each process wants.
        used: the devices in use.
    """
    found = [f"process {i}: {problem}" for i, claim in enumerate(claims) for problem in claim.problems]
    if found and len(claims) > 1 and len({claim.problems for claim in claims}) == 1:
        return [f"all processes: {problem}" for problem in claims[0].problems]
    if found:  # the rest may follow from these
        return found
    found = differing([claim.terms for claim in claims])
    for device in used:
        holders = [i for i, claim in enumerate(claims) if device in claim.own]
        if len(holders) != 1:
            whose = f"{listed_processes(holders)} own it" if holders else "no process owns it"
            found.append(f"devices[{device}]: {whose}, expected one")
    at: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for i, claim in enumerate(claims):
        for gpu in claim.gpus:
            at[gpu.host, gpu.uuid].append(f"devices[{gpu.device}] of process {i}")
    return found + [f"{' and '.join(names)} are the same GPU" for names in at.values() if len(names) > 1]


def differing(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return what differs between processes: the name of each fact, the values, and who has them.

    Where most processes have the same value, the others are named as those that differ.

    Args:
        facts: facts of each process by name.
    """
    found = []
    for name in dict.fromkeys(name for each in facts for name in each):
        said: defaultdict[str, list[int]] = defaultdict(list)
        for i, each in enumerate(facts):
            said[each.get(name, "nothing")].append(i)
        if len(said) > 1:
            usual = max(said, key=lambda value: len(said[value]))
            if 2 * len(said[usual]) > len(facts):
                others = said.pop(usual)
                told = [f"{value} in {listed_processes(where)}" for value, where in said.items()]
                told.append(f"{usual} in {'all others' if len(others) > 1 else listed_processes(others)}")
            else:
                told = [f"{value} in {listed_processes(where)}" for value, where in said.items()]
            found.append(f"{name}: {', '.join(told)}")
    return found


def listed_processes(numbers: Sequence[int]) -> str:
    """Return processes as in a sentence."""
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def said_of(error: Exception) -> tuple[str, str]:
    """Return what the other processes are told of an error, and a hint, which may be empty."""
    if isinstance(error, TpplanError):
        return error.message, error.hint
    return f"{type(error).__name__}: {error}".partition("\n")[0], ""
