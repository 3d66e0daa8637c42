"""NVIDIA's GPUs: what NVML and ``nvidia-smi`` tell alike, and which of them is asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from tpplan.core.sizes import format_bytes
from tpplan.errors import DeviceError
from tpplan.hardware import catalogue
from tpplan.hardware.probe.report import DeviceReport, GpuProcess, NoDriverError, SeenGpu, plain_name, unequal
from tpplan.hardware.probe.visible import select

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.hardware.file import Link
    from tpplan.hardware.probe.system_memory import SystemMemory

#: Exists where NVIDIA's driver is loaded (on Linux).
DRIVER = Path("/proc/driver/nvidia/version")
_VARIABLE = "CUDA_VISIBLE_DEVICES"


@frozen
class Unit:
    """A GPU, or one instance (MIG) of it.

    Attributes:
        gpu: the driver's index of the GPU.
        handle: of the GPU or instance, for the source that it is from.
        uuid: of the GPU or instance.
        parent: handle of the GPU.
        parent_uuid: of the GPU.
    """

    gpu: int
    handle: Any
    uuid: str
    parent: Any
    parent_uuid: str

    @property
    def mig(self) -> bool:
        """Whether this is an instance."""
        return self.uuid != self.parent_uuid


class Source(Protocol):
    """A way to ask NVIDIA's driver; what it does not tell is empty, None or 0.

    Attributes:
        called: how notes name it.
    """

    called: str

    def version(self) -> str:
        """Return the driver's version."""

    def units(self, notes: list[str]) -> list[list[Unit]]:
        """Return for each GPU what of it can be used, itself or its MIG instances; add why to the notes if nothing."""

    def name(self, unit: Unit) -> str:
        """Return the name of a GPU or instance."""

    def memory(self, unit: Unit) -> tuple[int, int] | None:
        """Return the bytes in all and in use."""

    def device(self, unit: Unit, memory: int, used: int) -> SeenGpu:
        """Return the report of a GPU or instance, with bytes in all, and those that this process cannot have."""

    def processes(self, unit: Unit, device: int) -> list[GpuProcess]:
        """Return the programs on a GPU or instance, which has this index in the report, the largest first."""

    def links(self, units: list[Unit]) -> tuple[Link, ...]:
        """Return what connects the units, by their indices in this list."""


def report(source: Source, environ: Mapping[str, str], own_pid: int, system: SystemMemory | None) -> DeviceReport:
    """Return what a source tells of the GPUs that CUDA would show to a program.

    NVIDIA's driver tells no memory of GPUs that share the system's (GB10, Jetson). Those that the catalogue knows as
    such may take what the system has to spare.

    Args:
        source: the way to ask.
        environ: of the process, for ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``.
        own_pid: whose use of the memory does not count as used.
        system: memory of the machine, where it is known.

    Raises:
        DeviceError: no GPU is left.
        NoDriverError: the driver has no GPU.
    """
    notes: list[str] = []
    gpus = source.units(notes)
    if not gpus:
        raise NoDriverError("NVIDIA's driver is here, but shows no GPU")
    units = _visible(gpus, environ, notes)
    devices: list[SeenGpu] = []
    kept: list[Unit] = []
    processes: list[GpuProcess] = []
    for unit in units:
        memory = _memory(source, unit, system, notes)
        if memory is None:
            continue
        total, used = memory
        users = source.processes(unit, len(devices))
        own = sum(p.used_bytes for p in users if p.pid == own_pid)
        processes += [p for p in users if p.pid != own_pid]
        devices.append(source.device(unit, total, used - own))
        kept.append(unit)
    if not devices:
        reasons = "; ".join(["NVIDIA's driver leaves no GPU to plan for", *notes])
        size = f"{system.usable_bytes // 2**30}GiB" if system else "119GiB"
        hint = f"see what nvidia-smi says; for a GPU that shares the system's memory, name that: --gpus {size}"
        raise DeviceError(reasons, hint)
    if any(unit.mig for unit in kept):
        notes.append("a CUDA program can use only one MIG instance")
    if unequal(devices) and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        also = f", also in {_VARIABLE}" if _VARIABLE in environ else ""
        notes.append(
            "GPUs are numbered by PCI bus here; CUDA puts the fastest first"
            f"{also}, unless CUDA_DEVICE_ORDER is PCI_BUS_ID"
        )
    return DeviceReport(
        driver=f"NVIDIA {source.version()}".strip(),
        devices=tuple(devices),
        links=source.links(kept),
        processes=tuple(processes),
        notes=tuple(notes),
    )


def _memory(source: Source, unit: Unit, system: SystemMemory | None, notes: list[str]) -> tuple[int, int] | None:
    """Return the bytes of a GPU in all and in use; None if they are not known, with a note."""
    if memory := source.memory(unit):
        return memory
    name = source.name(unit)
    told = f"GPU {unit.gpu} ({plain_name(name)})" if name else f"GPU {unit.gpu}"
    if system and system.usable_bytes and any(gpu.unified for gpu in catalogue.lookup(name)):
        left = f"{format_bytes(system.usable_bytes)} of {format_bytes(system.total_bytes)}"
        notes.append(f"{told} shares the system's memory, and may take {left} now")
        return system.total_bytes, system.total_bytes - system.usable_bytes
    notes.append(f"{told} is left out: {source.called} does not tell its memory")
    return None


def _visible(gpus: list[list[Unit]], environ: Mapping[str, str], notes: list[str]) -> list[Unit]:
    """Return the units that ``CUDA_VISIBLE_DEVICES`` shows; a GPU with MIG itself stands for its first instance."""
    every = [unit for units in gpus for unit in units]
    if _VARIABLE not in environ:
        return every
    value = environ[_VARIABLE]
    # A GPU that cannot be used keeps its number, and naming it ends the list as any other invalid entry does.
    ordinals = [units[0] if units else None for units in gpus]
    named = {units[0].parent_uuid: units[0] for units in gpus if units} | {unit.uuid: unit for unit in every}
    chosen, ended = select(value, ordinals, named)
    if not chosen:
        reason = f", which ends at {ended}" if value.strip() else ""
        hint = "unset it, or write ordinals such as 0,1 or UUIDs as nvidia-smi -L shows them"
        raise DeviceError(f"{_VARIABLE} is {value[:60]!r}{reason}: it hides all {len(gpus)} GPUs", hint)
    if ended:
        notes.append(f"{_VARIABLE} is {value[:60]!r}: CUDA ignores everything from {ended} on")
    return [unit for unit in chosen if unit is not None]
