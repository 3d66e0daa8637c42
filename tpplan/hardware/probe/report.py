"""What a driver tells of its GPUs, and the devices file made of it."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from tpplan.errors import DeviceError
from tpplan.files.codec import document
from tpplan.files.jsontext import UNSEEN
from tpplan.hardware import catalogue
from tpplan.hardware.file import (
    FIRST_VERSION,
    FORMAT_VERSION,
    MEASURED_IN_FILE,
    DevicesFile,
    FileDevice,
    Link,
    LinkKind,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.core.speed import MeasuredSpeeds

_VENDOR = ("NVIDIA ", "AMD ", "GeForce ", "Radeon ")
_LONGEST = 100


class NoDriverError(DeviceError):
    """A vendor's driver, or the way to ask it, is not on this machine."""


@frozen(kw_only=True)
class GpuProcess:
    """A program that uses a GPU.

    Attributes:
        pid: its process number, as the driver sees it.
        name: of its program; empty if the driver does not tell.
        device: index of the GPU in the report; -1 if the driver does not tell.
        used_bytes: of the GPU's memory; 0 if the driver does not tell.
    """

    pid: int
    name: str
    device: int
    used_bytes: int


@frozen(kw_only=True)
class SeenGpu:
    """A GPU, or an instance of a GPU (MIG), that programs can use.

    Attributes:
        name: the catalogue's, else the driver's without the vendor.
        uuid: the driver's; empty if it does not tell.
        bus: PCI address; empty if the driver does not tell.
        memory_bytes: in all.
        used_bytes: by other programs and the driver.
        budget_bytes: what they leave, in whole MiB.
        overhead_bytes: of the budget, what the context and libraries of a program will take.
        overhead_source: how that is known.
        bandwidth_bytes_per_second: of its memory, 0 if unknown.
        bandwidth_source: ``catalogue``, ``driver`` (clock and bus width) or empty.
        capability: CUDA compute capability such as ``8.9``, empty for AMD.
        read_bytes_per_second: measured, as are the next three; see :class:`tpplan.core.speed.GpuSpeed`.
        copy_bytes_per_second: of copies within the memory.
        boundary_ns: between kernels.
        matrix_flops_per_second: of large products.
    """

    name: str
    uuid: str
    bus: str
    memory_bytes: int
    used_bytes: int
    budget_bytes: int
    overhead_bytes: int
    overhead_source: str
    bandwidth_bytes_per_second: int
    bandwidth_source: str
    capability: str
    read_bytes_per_second: int = 0
    copy_bytes_per_second: int = 0
    boundary_ns: int = 0
    matrix_flops_per_second: int = 0


@document("device-report")
@frozen(kw_only=True)
class DeviceReport:
    """The GPUs here.

    Attributes:
        driver: vendor and version.
        devices: that programs can use, in the order of the variable that chooses them, else of the PCI bus.
        links: of pairs of devices, where the driver tells.
        processes: other programs that use the devices.
        notes: what a person should know of how this came about.
    """

    driver: str
    devices: tuple[SeenGpu, ...]
    links: tuple[Link, ...]
    processes: tuple[GpuProcess, ...]
    notes: tuple[str, ...]


def seen(*, name: str, uuid: str, bus: str, memory: int, used: int, capability: str = "", measured: int = 0) -> SeenGpu:
    """Complete a driver's answers by the catalogue.

    Args:
        name: the driver's.
        uuid: the driver's.
        bus: PCI address.
        memory: in bytes.
        used: bytes that this process cannot have.
        capability: CUDA compute capability.
        measured: bandwidth in bytes/s by the driver's clock and bus width, for GPUs that the catalogue has not.
    """
    known = catalogue.identify(name, memory)
    speeds = {gpu.bandwidth_bytes_per_second for gpu in known}
    speed, source = (speeds.pop(), "catalogue") if len(speeds) == 1 else (measured, "driver" if measured else "")
    overhead = catalogue.overhead(capability)
    return SeenGpu(
        name=known[0].name if len(known) == 1 else plain_name(name),
        uuid=uuid,
        bus=bus,
        memory_bytes=memory,
        used_bytes=used,
        budget_bytes=max(1, (memory - used) // catalogue.MIB * catalogue.MIB),
        overhead_bytes=overhead.bytes,
        overhead_source=overhead.source,
        bandwidth_bytes_per_second=speed,
        bandwidth_source=source,
        capability=capability,
    )


def plain_name(name: str) -> str:
    """Return a driver's name of a GPU without the vendor and without anything that a devices file refuses."""
    for word in _VENDOR:
        name = name.removeprefix(word)
    return UNSEEN.sub("", name)[:_LONGEST].strip() or "GPU"


def devices_file(report: DeviceReport) -> DevicesFile:
    """Return the part of a report that is worth keeping: no serial numbers, no processes."""
    return DevicesFile(
        devices=tuple(
            FileDevice(
                name=gpu.name,
                memory_bytes=gpu.memory_bytes,
                budget_bytes=gpu.budget_bytes,
                overhead_bytes=gpu.overhead_bytes,
                overhead_source=gpu.overhead_source,
                bandwidth_bytes_per_second=gpu.bandwidth_bytes_per_second,
                capability=gpu.capability,
                **{name: getattr(gpu, name) for name in MEASURED_IN_FILE},
            )
            for gpu in report.devices
        ),
        links=report.links,
        format_version=FORMAT_VERSION if any(gpu.read_bytes_per_second for gpu in report.devices) else FIRST_VERSION,
    )


def with_speeds(report: DeviceReport, measured: MeasuredSpeeds) -> DeviceReport:
    """Return a report with what was measured of its GPUs, which are told apart by UUID.

    Raises:
        DeviceError: a GPU of the report was not measured.
    """
    places = {each.uuid.removeprefix("GPU-"): i for i, each in enumerate(measured.gpus)}
    found = [places.get(gpu.uuid.removeprefix("GPU-"), -1) for gpu in report.devices]
    if not any(gpu.uuid for gpu in report.devices) and len(report.devices) == len(measured.gpus):
        found = [*range(len(measured.gpus))]  # where the driver tells none, the order has to do
    if -1 in found:
        i = found.index(-1)
        raise DeviceError(f"torch does not see device {i} ({report.devices[i].name})", "leave out --measure")
    devices = tuple(
        evolve(gpu, **{name: getattr(measured.gpus[place], name) for name in MEASURED_IN_FILE})
        for gpu, place in zip(report.devices, found, strict=True)
    )
    speeds = {frozenset((link.first, link.second)): link for link in measured.links}
    told = {(link.first, link.second): link for link in report.links}
    links = []
    for first, second in combinations(range(len(devices)), 2):
        link = told.get((first, second))
        speed = speeds.get(frozenset((found[first], found[second])))
        if speed:
            link = link or Link(first=first, second=second, kind=LinkKind.UNKNOWN)
            link = evolve(
                link,
                latency_ns=speed.latency_ns,
                bytes_per_second=speed.bytes_per_second,
                middle_ns=speed.middle_ns,
            )
        links += [link] if link else []
    return evolve(report, devices=devices, links=tuple(links))


def unequal(devices: Sequence[SeenGpu]) -> bool:
    """Tell whether the devices are of more than one kind."""
    return len({gpu.name for gpu in devices}) > 1
