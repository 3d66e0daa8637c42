"""NVIDIA's GPUs, asked of NVML through the Python package nvidia-ml-py."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

from tpplan.core.missing import install_command
from tpplan.errors import DeviceError
from tpplan.hardware.file import Link, LinkKind, LinkPath, PeerAccess
from tpplan.hardware.probe import nvidia_gpus
from tpplan.hardware.probe.nvidia_gpus import Unit
from tpplan.hardware.probe.report import DeviceReport, GpuProcess, NoDriverError, SeenGpu, seen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.hardware.probe.system_memory import SystemMemory

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


def start() -> Any:
    """Return the module ``pynvml``, initialised.

    Raises:
        DeviceError: there is a driver, but no way to ask it.
        NoDriverError: there is no driver, or the package is missing.
    """
    try:
        import pynvml  # noqa: PLC0415 - an extra
    except ImportError as error:
        hint = f"to ask NVIDIA's driver: {install_command('probe')}"
        if nvidia_gpus.DRIVER.exists():
            raise DeviceError("NVIDIA's driver is here, but the Python package nvidia-ml-py is not", hint) from error
        raise NoDriverError("the Python package nvidia-ml-py is not installed", hint) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if error.value in missing:
            raise NoDriverError(f"NVIDIA: {error}") from error
        raise DeviceError(f"NVIDIA's driver does not start: {error}", "see what nvidia-smi says") from error
    return pynvml


def read(nvml: Any, environ: Mapping[str, str], own_pid: int, system: SystemMemory | None = None) -> DeviceReport:
    """Return what NVML tells of the GPUs that CUDA shows; see :func:`tpplan.hardware.probe.nvidia_gpus.report`.

    Args:
        nvml: the module ``pynvml``, initialised, or what answers like it.
        environ: of the process.
        own_pid: whose use of the memory does not count as used.
        system: memory of the machine, where it is known.

    Raises:
        DeviceError: no GPU is left.
        NoDriverError: the driver has no GPU.
    """
    return nvidia_gpus.report(_Nvml(nvml), environ, own_pid, system)


class _Nvml:
    """NVML as a :class:`tpplan.hardware.probe.nvidia_gpus.Source`."""

    called = "NVML"

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def version(self) -> str:
        """Return the driver's version."""
        return _text(self._ask("", self._nvml.nvmlSystemGetDriverVersion))

    def units(self, notes: list[str]) -> list[list[Unit]]:
        """Return for each GPU what of it can be used."""
        nvml, gpus = self._nvml, list[list[Unit]]()
        for i in range(nvml.nvmlDeviceGetCount()):
            handle = self._ask(None, nvml.nvmlDeviceGetHandleByIndex, i)
            if handle is None:
                notes.append(f"GPU {i} is left out: NVML has no access to it")
                gpus.append([])
                continue
            uuid = _text(self._ask("", nvml.nvmlDeviceGetUUID, handle))
            whole = Unit(i, handle, uuid, handle, uuid)
            current, _ = self._ask((0, 0), nvml.nvmlDeviceGetMigMode, handle)
            gpus.append(self._instances(whole) if current else [whole])
            if not gpus[-1]:
                notes.append(f"GPU {i} is left out: MIG is on, but it has no instance that this user can see")
        return gpus

    def name(self, unit: Unit) -> str:
        """Return the name of a GPU or instance."""
        return _text(self._ask("", self._nvml.nvmlDeviceGetName, unit.handle))

    def memory(self, unit: Unit) -> tuple[int, int] | None:
        """Return the bytes in all and in use."""
        memory = self._ask(None, self._nvml.nvmlDeviceGetMemoryInfo, unit.handle)
        return (int(memory.total), int(memory.used)) if memory is not None and memory.total else None

    def device(self, unit: Unit, memory: int, used: int) -> SeenGpu:
        """Return the report of a GPU or instance."""
        nvml = self._nvml
        major, minor = self._ask((0, 0), nvml.nvmlDeviceGetCudaComputeCapability, unit.parent)
        pci = self._ask(None, nvml.nvmlDeviceGetPciInfo, unit.parent)
        measured = 0
        if not unit.mig:  # an instance has an unknown part of the bus
            width = self._ask(0, nvml.nvmlDeviceGetMemoryBusWidth, unit.handle)
            megahertz = self._ask(0, nvml.nvmlDeviceGetMaxClockInfo, unit.handle, _MEMORY_CLOCK)
            measured = width * megahertz * 10**6 * _BITS_PER_CLOCK // 8
        return seen(
            name=self.name(unit),
            uuid=unit.uuid,
            bus="" if pci is None else _text(pci.busId),
            memory=memory,
            used=used,
            capability=f"{major}.{minor}" if major else "",
            measured=measured,
        )

    def processes(self, unit: Unit, device: int) -> list[GpuProcess]:
        """Return the programs that compute or draw on a GPU, each once, the largest first."""
        nvml, used = self._nvml, dict[int, int]()
        for call in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            for process in self._ask((), call, unit.handle):
                used[process.pid] = max(used.get(process.pid, 0), process.usedGpuMemory or 0)
        names = {pid: _text(self._ask("", nvml.nvmlSystemGetProcessName, pid)) for pid in used}
        found = [GpuProcess(pid=p, name=names[p], device=device, used_bytes=size) for p, size in used.items()]
        return sorted(found, key=lambda p: (-p.used_bytes, p.pid))

    def links(self, units: list[Unit]) -> tuple[Link, ...]:
        """Return what connects the units, by their indices in this list."""
        return tuple(link for a, b in combinations(range(len(units)), 2) for link in self._link(units, a, b))

    def _ask(self, default: Any, call: Callable[..., Any], *args: Any) -> Any:
        """Return NVML's answer, or ``default`` where the GPU, the driver or the permissions give none."""
        try:
            return call(*args)
        except self._nvml.NVMLError:
            return default

    def _instances(self, whole: Unit) -> list[Unit]:
        """Return the MIG instances of a GPU."""
        nvml, units = self._nvml, list[Unit]()
        for i in range(self._ask(0, nvml.nvmlDeviceGetMaxMigDeviceCount, whole.handle)):
            handle = self._ask(None, nvml.nvmlDeviceGetMigDeviceHandleByIndex, whole.handle, i)
            if handle is not None:
                uuid = _text(self._ask("", nvml.nvmlDeviceGetUUID, handle))
                units.append(Unit(whole.gpu, handle, uuid, whole.handle, whole.uuid))
        return units

    def _link(self, units: list[Unit], first: int, second: int) -> list[Link]:
        """Return the connection of two devices, or nothing if NVML tells nothing of it."""
        nvml, a, b = self._nvml, units[first].parent, units[second].parent
        if units[first].gpu == units[second].gpu:
            return []
        path = _PATHS.get(self._ask(-1, nvml.nvmlDeviceGetTopologyCommonAncestor, a, b), LinkPath.UNKNOWN)
        read, write, nvlink = (self._ask(None, nvml.nvmlDeviceGetP2PStatus, a, b, i) for i in (_READ, _WRITE, _NVLINK))
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


def _text(value: str | bytes) -> str:
    """Return a text of NVML, which older versions give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
