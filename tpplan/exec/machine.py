"""What the machine has for a plan: its devices, their memory, and the links between them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tpplan.exec import kernel_cache
from tpplan.exec.kernel_cache import MOST_SOURCES
from tpplan.exec.links import Mechanism, link_report
from tpplan.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.plan import SplitPlan

#: What has to be verified from each device to each other for a transport between them.
_NEEDED = {"peer": (Mechanism.COPY, Mechanism.STORE, Mechanism.FLAG), "events": (Mechanism.COPY,), "host": ()}
#: The first that rounds to bfloat16 in one instruction.
_LEAST_CAPABILITY = (8, 0)
#: Faults of links that an error names.
_NAMED = 4


@frozen
class Found:
    """What a machine has where the plan expects a device.

    Attributes:
        name: of the device.
        free_bytes: of its memory.
        capability: CUDA compute capability such as ``8.9``.
    """

    name: str
    free_bytes: int
    capability: str


def differences(plan: SplitPlan, found: Sequence[Found | None]) -> list[str]:
    """Return what the plan expects of each device and the machine does not have; a newer capability does as well.

    Args:
        plan: to be compiled.
        found: for each of the plan's devices; None where none is needed.
    """
    problems = []
    for i, (device, here) in enumerate(zip(plan.devices, found, strict=False)):
        if here is None:
            continue
        where = f"devices[{i}] ({device.name}), here {here.name}"
        memory = plan.memory[i]
        needed = memory.used_bytes - memory.overhead_bytes  # the driver's part is taken by the time of asking
        if here.free_bytes < needed:
            problems.append(f"{where}: needs {format_bytes(needed)}, {format_bytes(here.free_bytes)} are free")
        if device.capability and _version(here.capability) < _version(device.capability):
            problems.append(f"{where}: planned for capability {device.capability}, has {here.capability}")
    return problems


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def places_for(
    plan: SplitPlan, backend: str, devices: Sequence[torch.device | str | int] | None
) -> tuple[tuple[torch.device, ...], list[str]]:
    """Return a torch device for each of the plan's, and why there is none for some."""
    wanted = len(plan.devices)
    here = torch.cuda.device_count() if backend != "cpu" and torch.cuda.is_available() else 0
    if devices is not None:
        found = [_place(device, backend, here) for device in devices]
        problems = [f"devices[{i}]: {problem}" for i, problem in enumerate(found) if isinstance(problem, str)]
        places = tuple(place for place in found if isinstance(place, torch.device))
        if backend != "cpu" and len(set(places)) < len(places):
            problems.append(f"devices: {', '.join(map(str, places))} are not all different")
        if len(devices) != wanted:
            problems.append(f"devices: the plan has {wanted}, {len(devices)} were given")
        return ((), problems) if problems else (places, [])
    if backend == "cpu":
        return (torch.device("cpu"),) * wanted, []
    if here < wanted:
        return (), [f"devices: the plan has {wanted}, this machine has {here} CUDA devices"]
    return tuple(torch.device("cuda", i) for i in range(wanted)), []


def _place(device: torch.device | str | int, backend: str, here: int) -> torch.device | str:
    """Return the torch device that a caller means, or why it will not do; a machine has so many of CUDA's."""
    text, kind = f"cuda:{device}" if type(device) is int else str(device), "cpu" if backend == "cpu" else "cuda"
    unknown = f"{text[:40]!r} is no torch device"
    try:
        place = torch.device(text)
    except RuntimeError:
        return unknown
    if str(place) != text:  # numbers that are too large come out smaller
        return unknown
    if place.type != kind:
        return f"{place} is not for the backend {backend}"
    if kind == "cuda" and place.index not in range(here):
        return f"{place} is none of the {here} CUDA devices of this machine, which have numbers from 0"
    return place if kind == "cuda" else torch.device("cpu")


def transport_for(places: Sequence[torch.device], transport: str) -> tuple[str, list[str]]:
    """Return the transport for CUDA devices, and what speaks against it."""
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
    pairs = [(a.index, b.index) for a in places for b in places if a != b]
    if transport == "peer" and launches_block():
        problems.append("transport: CUDA_LAUNCH_BLOCKING is set, so that kernels cannot wait for each other")
    report = link_report() if pairs and transport != "host" else None
    missing = {
        name: [f"{need} {a} to {b}" for need in needed for a, b in pairs if report and not report.works(a, b, need)]
        for name, needed in _NEEDED.items()
    }
    if transport == "auto":
        return next(n for n, what in missing.items() if not what and not (n == "peer" and launches_block())), problems
    if what := missing[transport]:
        more = f" and {len(what) - _NAMED} more" if len(what) > _NAMED else ""
        listed = ", ".join(what[:_NAMED])
        problems.append(f"transport: {transport} is not verified: {listed}{more}; see python -m tpplan.exec.links")
    return transport, problems


def launches_block() -> bool:
    """Tell whether a launch waits for its kernel, as debugging wants it."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in {"", "0"}


def look_at(device: torch.device) -> Found:
    """Return what a CUDA device has now."""
    major, minor = torch.cuda.get_device_capability(device)
    free, _ = torch.cuda.mem_get_info(device)
    return Found(torch.cuda.get_device_name(device), free, f"{major}.{minor}")
