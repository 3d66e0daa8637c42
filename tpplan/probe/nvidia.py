"""NVIDIA's GPUs, asked of NVML."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from tpplan import catalogue
from tpplan.devices_file import Link, LinkKind, LinkPath, PeerAccess
from tpplan.errors import DeviceError
from tpplan.extras import install_command
from tpplan.probe import system_memory
from tpplan.probe.report import DeviceReport, GpuProcess, NoDriverError, SeenGpu, plain_name, seen, unequal
from tpplan.probe.visible import select
from tpplan.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.probe.system_memory import SystemMemory

#: Exists where NVIDIA's driver is loaded (on Linux).
DRIVER = Path("/proc/driver/nvidia/version")
_VARIABLE = "CUDA_VISIBLE_DEVICES"

# The values of nvml.h; pynvml's own constants have had mistakes.
_MEMORY_CLOCK = 2
_READ, _WRITE, _NVLINK = 0, 1, 2
_STATUS_OK = 0
_PATHS = {
    0: LinkPath.BOARD,
    10: LinkPath.SWITCH,
    20: LinkPath.SWITCHES,
    30: LinkPath.HOST_BRIDGE,
    40: LinkPath.NUMA_NODE,
    50: LinkPath.SYSTEM,
}

#: NVML tells the clock; GDDR and HBM move two bits a pin in each cycle of it.
_BITS_PER_CLOCK = 2


@frozen
class _Unit:
    """A GPU, or one instance (MIG) of it.

    Attributes:
        gpu: NVML's index of the GPU.
        handle: NVML's, of the GPU or instance.
        uuid: of the GPU or instance.
        parent: NVML's handle of the GPU.
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


def probe(environ: Mapping[str, str], own_pid: int) -> DeviceReport:
    """Ask NVML on this machine; see :func:`read`.

    Raises:
        DeviceError: there is a driver, but no way to use it, or it leaves no GPU.
        NoDriverError: there is no driver.
    """
    try:
        import pynvml  # noqa: PLC0415 - an extra
    except ImportError as error:
        hint = f"to ask NVIDIA's driver: {install_command('probe')}"
        if DRIVER.exists():
            raise DeviceError("NVIDIA's driver is here, but the Python package nvidia-ml-py is not", hint) from error
        raise NoDriverError("the Python package nvidia-ml-py is not installed", hint) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if error.value in missing:
            raise NoDriverError(f"NVIDIA: {error}") from error
        raise DeviceError(f"NVIDIA's driver does not start: {error}", "see what nvidia-smi says") from error
    try:
        return read(pynvml, environ, own_pid, system_memory.read())
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVIDIA's driver stopped answering: {error}", "see what nvidia-smi says") from error
    finally:
        pynvml.nvmlShutdown()


def read(nvml: Any, environ: Mapping[str, str], own_pid: int, system: SystemMemory | None = None) -> DeviceReport:
    """Return what NVML tells of the GPUs that CUDA would show to a program.

    NVML tells no memory of GPUs that share the system's (GB10, Jetson). Those that the catalogue knows as such may take
    what the system has to spare.

    Args:
        nvml: the module ``pynvml``, initialised, or what answers like it.
        environ: of the process, for ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``.
        own_pid: whose use of the memory does not count as used.
        system: memory of the machine, where it is known.

    Raises:
        DeviceError: no GPU is left.
        NoDriverError: the driver has no GPU.
    """
    notes: list[str] = []
    gpus = _units(nvml, notes)
    if not gpus:
        raise NoDriverError("NVIDIA's driver is here, but shows no GPU")
    units = _visible(gpus, environ, notes)
    devices: list[SeenGpu] = []
    kept: list[_Unit] = []
    processes: list[GpuProcess] = []
    for unit in units:
        memory = _memory(nvml, unit, system, notes)
        if memory is None:
            continue
        total, used = memory
        users = _processes(nvml, unit.handle, len(devices))
        own = sum(p.used_bytes for p in users if p.pid == own_pid)
        processes += [p for p in users if p.pid != own_pid]
        devices.append(_device(nvml, unit, total, used - own))
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
        driver=f"NVIDIA {_text(_ask(nvml, '', nvml.nvmlSystemGetDriverVersion))}".strip(),
        devices=tuple(devices),
        links=tuple(link for a, b in combinations(range(len(kept)), 2) for link in _link(nvml, kept, a, b)),
        processes=tuple(processes),
        notes=tuple(notes),
    )


def _ask(nvml: Any, default: Any, call: Callable[..., Any], *args: Any) -> Any:
    """Return NVML's answer, or ``default`` where the GPU, the driver or the permissions give none."""
    try:
        return call(*args)
    except nvml.NVMLError:
        return default


def _memory(nvml: Any, unit: _Unit, system: SystemMemory | None, notes: list[str]) -> tuple[int, int] | None:
    """Return the bytes of a GPU in all and in use; None if they are not known, with a note."""
    memory = _ask(nvml, None, nvml.nvmlDeviceGetMemoryInfo, unit.handle)
    if memory is not None and memory.total:
        return int(memory.total), int(memory.used)
    name = _text(_ask(nvml, "", nvml.nvmlDeviceGetName, unit.handle))
    told = f"GPU {unit.gpu} ({plain_name(name)})" if name else f"GPU {unit.gpu}"
    if system and system.usable_bytes and any(gpu.unified for gpu in catalogue.lookup(name)):
        left = f"{format_bytes(system.usable_bytes)} of {format_bytes(system.total_bytes)}"
        notes.append(f"{told} shares the system's memory, and may take {left} now")
        return system.total_bytes, system.total_bytes - system.usable_bytes
    notes.append(f"{told} is left out: NVML does not tell its memory")
    return None


def _text(value: str | bytes) -> str:
    """Return a text of NVML, which older versions give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _units(nvml: Any, notes: list[str]) -> list[list[_Unit]]:
    """Return for each GPU what of it can be used: itself, or its MIG instances."""
    gpus: list[list[_Unit]] = []
    for i in range(nvml.nvmlDeviceGetCount()):
        handle = _ask(nvml, None, nvml.nvmlDeviceGetHandleByIndex, i)
        if handle is None:
            notes.append(f"GPU {i} is left out: NVML has no access to it")
            gpus.append([])
            continue
        uuid = _text(_ask(nvml, "", nvml.nvmlDeviceGetUUID, handle))
        whole = _Unit(i, handle, uuid, handle, uuid)
        current, _ = _ask(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)
        gpus.append(_instances(nvml, whole) if current else [whole])
        if not gpus[-1]:
            notes.append(f"GPU {i} is left out: MIG is on, but it has no instance that this user can see")
    return gpus


def _instances(nvml: Any, whole: _Unit) -> list[_Unit]:
    """Return the MIG instances of a GPU."""
    units = []
    for i in range(_ask(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, whole.handle)):
        handle = _ask(nvml, None, nvml.nvmlDeviceGetMigDeviceHandleByIndex, whole.handle, i)
        if handle is not None:
            uuid = _text(_ask(nvml, "", nvml.nvmlDeviceGetUUID, handle))
            units.append(_Unit(whole.gpu, handle, uuid, whole.handle, whole.uuid))
    return units


def _visible(gpus: list[list[_Unit]], environ: Mapping[str, str], notes: list[str]) -> list[_Unit]:
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


def _device(nvml: Any, unit: _Unit, memory: int, used: int) -> SeenGpu:
    """Return one GPU's or instance's part of the report."""
    major, minor = _ask(nvml, (0, 0), nvml.nvmlDeviceGetCudaComputeCapability, unit.parent)
    pci = _ask(nvml, None, nvml.nvmlDeviceGetPciInfo, unit.parent)
    measured = 0
    if not unit.mig:  # an instance has an unknown part of the bus
        width = _ask(nvml, 0, nvml.nvmlDeviceGetMemoryBusWidth, unit.handle)
        megahertz = _ask(nvml, 0, nvml.nvmlDeviceGetMaxClockInfo, unit.handle, _MEMORY_CLOCK)
        measured = width * megahertz * 10**6 * _BITS_PER_CLOCK // 8
    return seen(
        name=_text(_ask(nvml, "", nvml.nvmlDeviceGetName, unit.handle)),
        uuid=unit.uuid,
        bus="" if pci is None else _text(pci.busId),
        memory=memory,
        used=used,
        capability=f"{major}.{minor}" if major else "",
        measured=measured,
    )


def _processes(nvml: Any, handle: Any, device: int) -> list[GpuProcess]:
    """Return the programs that compute or draw on a GPU, each once, the largest first."""
    used: dict[int, int] = {}
    for call in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _ask(nvml, (), call, handle):
            used[process.pid] = max(used.get(process.pid, 0), process.usedGpuMemory or 0)
    names = {pid: _text(_ask(nvml, "", nvml.nvmlSystemGetProcessName, pid)) for pid in used}
    found = [GpuProcess(pid=p, name=names[p], device=device, used_bytes=size) for p, size in used.items()]
    return sorted(found, key=lambda p: (-p.used_bytes, p.pid))


def _link(nvml: Any, units: list[_Unit], first: int, second: int) -> list[Link]:
    """Return the connection of two devices, or nothing if NVML tells nothing of it."""
    a, b = units[first].parent, units[second].parent
    if units[first].gpu == units[second].gpu:
        return []
    path = _PATHS.get(_ask(nvml, -1, nvml.nvmlDeviceGetTopologyCommonAncestor, a, b), LinkPath.UNKNOWN)
    read, write, nvlink = (_ask(nvml, None, nvml.nvmlDeviceGetP2PStatus, a, b, i) for i in (_READ, _WRITE, _NVLINK))
    if path is LinkPath.UNKNOWN and read is None and write is None:
        return []
    peer = PeerAccess.YES if read == write == _STATUS_OK else PeerAccess.NO
    return [
        Link(
            first=first,
            second=second,
            kind=LinkKind.NVLINK if nvlink == _STATUS_OK else LinkKind.PCIE,
            path=path,
            peer_access=PeerAccess.UNKNOWN if None in {read, write} else peer,
        )
    ]
