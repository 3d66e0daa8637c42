"""Choosing the transport of CUDA devices: the fastest that is verified to work, or the one requested."""

from __future__ import annotations

from itertools import chain, permutations
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tpplan.exec.machine.environment import no_peer_copies, serialised, unreachable
from tpplan.exec.machine.link_report import Mechanism, Verdict
from tpplan.exec.machine.links import link_report
from tpplan.exec.toolchain import kernel_cache
from tpplan.exec.toolchain.kernel_cache import MOST_SOURCES

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Transports, fastest first, with the mechanisms that must be verified from each device to each other.
_NEEDED = {"peer": (Mechanism.COPY, Mechanism.STORE, Mechanism.FLAG), "events": (Mechanism.COPY,), "host": ()}
#: Mechanisms that ``peer`` needs besides for messages larger than a slot: sums and relays read other devices' tensors.
_DIRECT = {"straight": (Mechanism.LOAD,)}
#: Minimum compute capability: the first that rounds two numbers to 16 bits in one instruction. It also suffices for
#: the decoder's kernels: for this rounding, for matrix products of 16 columns, and for their state per lane.
_LEAST_CAPABILITY = (8, 0)
#: Maximum number of link faults listed in a message.
_NAMED = 4


@frozen
class Choice:
    """The choice of a transport.

    Attributes:
        transport: ``peer``, ``events`` or ``host``.
        waits: whether the devices' kernels may wait for each other.
        direct: whether kernels of ``peer`` may access tensors of other devices.
        notes: reasons why it is not a faster transport, or is used with restrictions.
    """

    transport: str
    waits: bool = True
    direct: bool = True
    notes: tuple[str, ...] = ()


def choose(places: Sequence[torch.device], wanted: str, gpus: Sequence[str] = ()) -> tuple[Choice, list[str]]:
    """Return the transport for CUDA devices, and the reasons why it cannot be used, if any.

    A mechanism that fails between one pair is not used between any: every operation is a program of one transport.

    Args:
        places: torch devices of this process, with their ordinals.
        wanted: a transport, or ``auto`` for the fastest usable one.
        gpus: UUIDs of the GPUs of all processes, if there are several; this one need not see those of the others.
    """
    serial = serialised()
    pairs = [(a.index, b.index) for a in places for b in places if a != b]
    against = _obstacles([*permutations(gpus, 2)] if gpus else pairs, serial, wanted)
    unread = against.pop("straight")
    usable = next(name for name, obstacle in against.items() if not obstacle)
    transport = usable if wanted == "auto" else wanted
    notes = []
    if wanted == "auto":
        notes = [f"{name} {against[name]}" for name in list(against)[: list(against).index(usable)]]
    if transport == "host" and pairs and serial:
        notes.append(f"host goes without slots: {_no_waiting(serial)}")
    if transport == "peer" and unread:
        notes.append(f"what is larger than a slot goes by events: reading from peers {unread}")
    problems = _kernel_problems(places)
    if against[transport]:
        problems.append(f"transport: {transport} {against[transport]}")
    direct = not (transport == "peer" and unread)
    return Choice(transport, waits=not serial, direct=direct, notes=tuple(notes)), problems


def _no_waiting(serial: str) -> str:
    return f"{serial}, so that kernels cannot wait for each other"


def _obstacles(pairs: Sequence[tuple[int | str, int | str]], serial: str, wanted: str) -> dict[str, str]:
    """Return for each transport, and for ``straight``, why it cannot be used between some devices; empty if it can.

    Args:
        pairs: ordinals or UUIDs of the devices.
        serial: why kernels cannot wait for each other, if they cannot.
        wanted: a transport, or ``auto``.
    """
    every = _NEEDED | _DIRECT
    against = dict.fromkeys(every, "")
    if not pairs:
        return against
    if serial:
        against["peer"] = f"is out: {_no_waiting(serial)}"
    if reason := no_peer_copies():
        return against | dict.fromkeys(("peer", "events"), f"is out: {reason}")
    if reason := unreachable():
        return against | dict.fromkeys(("peer", "events"), f"is out: {reason}, which other devices may not reach")
    if wanted == "host":
        return against  # without a probe
    apart = [(a, b) for a, b in pairs if isinstance(a, int) and not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        (a, b), more = apart[0], f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        reason = f"is out: the driver gives no peer access from GPU {a} to {b}{more}"
        return against | dict.fromkeys(("peer", "events"), reason)  # copies are staged, slower than by ``host``
    report = link_report({*chain(*pairs)})
    routes = [[gpu if isinstance(gpu, int) else report.gpus.index(gpu) for gpu in pair] for pair in pairs]
    reasons = {link.route: link.reason for link in report.links if link.verdict != Verdict.WORKS}
    for name, needed in every.items():
        missing = [(need, a, b) for need in needed for a, b in routes if not report.works(a, b, need)]
        if missing and not against[name]:
            listed = [f"{need} {a} to {b} ({reasons.get((need, a, b), 'untested')})" for need, a, b in missing[:_NAMED]]
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            against[name] = f"is not verified: {', '.join(listed)}{more}; see tpplan devices --links"
    return against


def _kernel_problems(places: Sequence[torch.device]) -> list[str]:
    """Return the reasons why kernels cannot run on all devices, if any."""
    problems = []
    if lacks := kernel_cache.lacks():
        problems.append(f"kernels: {lacks}")
    found = {place: torch.cuda.get_device_capability(place) for place in places}
    problems += [
        f"kernels: {place} has capability {major}.{minor}, they need 8.0"
        for place, (major, minor) in found.items()
        if (major, minor) < _LEAST_CAPABILITY
    ]
    if len(places) >= MOST_SOURCES:
        problems.append(f"devices: {len(places)} in use, CUDA devices add up at most {MOST_SOURCES - 1}")
    return problems
