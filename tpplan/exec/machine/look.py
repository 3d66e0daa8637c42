"""The machine's devices and their memory, compared with those that a plan expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tpplan.core.sizes import format_apart, format_bytes
from tpplan.core.workspace import areas, workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.core.plan import SplitPlan


@frozen
class FoundDevice:
    """A device found on the machine.

    Attributes:
        name: name of the device.
        free_bytes: free bytes of its memory, with those that torch keeps for tensors to come.
        capability: CUDA compute capability such as ``8.9``.
        held_bytes: bytes of this process's tensors in it.
    """

    name: str
    free_bytes: int
    capability: str
    held_bytes: int = 0


def differences(
    plan: SplitPlan, found: Sequence[FoundDevice | None], *, scratch: bool = True, weights_loaded: bool = False
) -> list[str]:
    """Return where the devices do not meet the plan's requirements; a newer compute capability is accepted.

    Args:
        plan: the plan to compile.
        found: the device found for each of the plan's; None for devices not in use.
        scratch: whether its scratch is allocated.
        weights_loaded: whether everything but the workspace has its memory already.
    """
    problems = []
    sizes = areas(plan.splits, plan.model.dtype, plan.request)
    for i, (device, here) in enumerate(zip(plan.devices, found, strict=False)):
        if here is None:
            continue
        where = f"devices[{i}] ({device.name}), here {here.name}"
        memory = plan.memory[i]
        needed = memory.used_bytes - memory.overhead_bytes  # the driver's overhead is already allocated here
        what = ""
        if weights_loaded:
            needed, what = sizes[i].total_bytes - (0 if scratch else sizes[i].scratch_bytes), "the workspace "
        if here.free_bytes < needed:
            needs, free = format_apart(needed, here.free_bytes)
            held = f", this process holds {format_bytes(here.held_bytes)}" if here.held_bytes else ""
            problems.append(f"{where}: {what}needs {needs}, {free} are free{held}")
        if device.capability and _version(here.capability) < _version(device.capability):
            problems.append(f"{where}: planned for capability {device.capability}, has {here.capability}")
    return problems


def uncounted(plan: SplitPlan) -> list[str]:
    """Return where the workspace exceeds the plan's; such a plan was edited, or made by another version."""
    needed = workspace_bytes(plan.splits, plan.model.dtype, plan.request)
    problems = []
    for i, (size, memory) in enumerate(zip(needed, plan.memory, strict=True)):
        if size > memory.workspace_bytes:
            takes, counts = format_apart(size, memory.workspace_bytes)
            problems.append(f"memory[{i}]: the workspace takes {takes}, the plan counts {counts}")
    return problems


def listed(problems: Sequence[str]) -> str:
    """Return problems as lines of a message."""
    return "".join(f"\n  {problem}" for problem in problems)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def places_for(
    plan: SplitPlan,
    backend: str,
    devices: Sequence[torch.device | str | int] | None,
    own: Sequence[int] | None = None,
) -> tuple[tuple[torch.device, ...], list[str]]:
    """Return a torch device for each of the plan's devices, and the problems if that is not possible.

    Args:
        plan: the plan to compile.
        backend: ``cuda``, ``cpu`` or ``auto``.
        devices: torch devices, one for each device of the plan, or for each in ``own``.
        own: the devices that this process owns; by default all. The others are on ``meta``.
    """
    found, problems = _places(plan, backend, devices, None if own is None else len(own))
    if own is None or problems:
        return found, problems
    at = dict(zip(own, found, strict=True))
    return tuple(at.get(i, torch.device("meta")) for i in range(len(plan.devices))), []


def _places(
    plan: SplitPlan, backend: str, devices: Sequence[torch.device | str | int] | None, own: int | None
) -> tuple[tuple[torch.device, ...], list[str]]:
    """Return a torch device for each device of the plan, or for each of the ``own`` ones, and the problems."""
    if backend != "cpu" and torch.version.hip:
        return (), ["devices: this torch is for AMD's GPUs (ROCm), and plans run on NVIDIA's"]
    wanted = len(plan.devices) if own is None else own
    has = f"the plan has {wanted}" if own is None else f"this process owns {wanted}"
    here = torch.cuda.device_count() if backend != "cpu" and torch.cuda.is_available() else 0
    if devices is not None:
        found = [_place(device, backend, here) for device in devices]
        problems = [f"devices[{i}]: {problem}" for i, problem in enumerate(found) if isinstance(problem, str)]
        places = tuple(place for place in found if isinstance(place, torch.device))
        if backend != "cpu" and len(set(places)) < len(places):
            problems.append(f"devices: {', '.join(map(str, places))} are not all different")
        if len(devices) != wanted:
            problems.append(f"devices: {has}, {len(devices)} were given")
        return ((), problems) if problems else (places, [])
    if backend == "cpu":
        return (torch.device("cpu"),) * wanted, []
    if here < wanted:
        return (), [f"devices: {has}, this machine has {here} CUDA devices"]
    if own == 1:  # by convention, a process with a single GPU makes it the current one
        return (torch.device("cuda", torch.cuda.current_device()),), []
    return tuple(torch.device("cuda", i) for i in range(wanted)), []


def _place(device: torch.device | str | int, backend: str, here: int) -> torch.device | str:
    """Return the torch device that a caller names, or why it cannot be used; ``here`` is the number of CUDA devices."""
    text, kind = f"cuda:{device}" if type(device) is int else str(device), "cpu" if backend == "cpu" else "cuda"
    unknown = f"{text[:40]!r} is no torch device"
    try:
        place = torch.device(text)
    except RuntimeError:
        return unknown
    if str(place) != text:  # torch wraps ordinals that are too large
        return unknown
    if place.type != kind:
        return f"{place} is not for the backend {backend}"
    if kind == "cuda" and place.index not in range(here):
        return f"{place} is none of the {here} CUDA devices of this machine, which have numbers from 0"
    return place if kind == "cuda" else torch.device("cpu")


def look_at(device: torch.device) -> FoundDevice:
    """Return the name, free memory and compute capability of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    free, _ = torch.cuda.mem_get_info(device)
    try:
        held = torch.cuda.memory_allocated(device)
        free += torch.cuda.memory_reserved(device) - held
    except RuntimeError:  # an allocator in place of torch's has no such figures
        held = 0
    return FoundDevice(torch.cuda.get_device_name(device), free, f"{major}.{minor}", held)
