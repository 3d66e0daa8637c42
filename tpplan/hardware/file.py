"""The devices file: the GPUs of a machine and their budgets, for planning elsewhere and for version control.

It does not identify the machine: host names, serial numbers, times and processes are only shown on the screen (see
:mod:`tpplan.hardware.probe`).
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.core.device import (
    DEFAULT_OVERHEAD_BYTES,
    MAX_DEVICES,
    MEASURED,
    UNMEASURED_OVERHEAD_BYTES,
    Device,
    named,
)
from tpplan.core.limits import CAPABILITY, LONGEST_NAME, MOST
from tpplan.core.sizes import format_bytes
from tpplan.core.speed import LinkSpeed
from tpplan.errors import CORRECT, FORM, DeviceError, Problem, TpplanError, refusal
from tpplan.files import codec
from tpplan.files.codec import document, structure
from tpplan.files.jsontext import AGAIN, UNSEEN
from tpplan.files.kinds import DEVICES, mistaken
from tpplan.files.text import parse_json, read_text, save_text

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

#: The version of files with measured speeds, and of those without.
FORMAT_VERSION = "1.1"
FIRST_VERSION = "1.0"

#: Keys of a device that are measured; the planner does not need all.
MEASURED_IN_FILE = (*MEASURED, "copy_bytes_per_second")


class LinkKind(StrEnum):
    """The kind of connection between two GPUs."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    PCIE = "pcie"
    UNKNOWN = "unknown"  # measured, but the driver does not say


class LinkPath(StrEnum):
    """The nearest common ancestor of two GPUs in the PCIe topology."""

    BOARD = "board"
    SWITCH = "switch"
    SWITCHES = "switches"
    HOST_BRIDGE = "host_bridge"
    NUMA_NODE = "numa_node"
    SYSTEM = "system"
    UNKNOWN = "unknown"


class PeerAccess(StrEnum):
    """Whether the driver reports peer access between two GPUs; only a test with data proves that it works."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@frozen(kw_only=True)
class FileDevice:
    """A GPU as a devices file describes it.

    Attributes:
        name: display name such as ``RTX 4090``.
        memory_bytes: memory of the GPU, as its driver reports it.
        budget_bytes: bytes that tpplan may use: those that were free when the file was made, or an edited value.
        overhead_bytes: part of the budget that the driver context and libraries take if the device is used; 512 MiB if
            left out, while decoders took up to 890 MiB on H100s and H200s.
        overhead_source: how the overhead was determined.
        bandwidth_bytes_per_second: memory bandwidth, 0 if unknown.
        capability: CUDA compute capability such as ``8.9``, empty if unknown.
        read_bytes_per_second: measured bandwidth of kernels that only read, 0 if not measured.
        copy_bytes_per_second: measured bandwidth of copies within the memory, read and written, 0 if not measured.
        boundary_ns: measured nanoseconds from a tiny kernel of a CUDA graph to the next, 0 if not measured.
        matrix_flops_per_second: measured rate of large products in 16 bits, 0 if not measured.
    """

    name: str
    memory_bytes: int
    budget_bytes: int
    overhead_bytes: int = DEFAULT_OVERHEAD_BYTES
    overhead_source: str = ""
    bandwidth_bytes_per_second: int = 0
    capability: str = ""
    read_bytes_per_second: int = 0
    copy_bytes_per_second: int = 0
    boundary_ns: int = 0
    matrix_flops_per_second: int = 0


@frozen(kw_only=True)
class Link:
    """The connection of two GPUs.

    Attributes:
        first: index of the first device.
        second: index of the second device, larger than ``first``.
        kind: NVLink, xGMI or PCIe, unknown where the driver does not say.
        path: nearest common ancestor of the two in the PCIe topology.
        peer_access: whether the driver reports peer access.
        latency_ns: measured nanoseconds of a sum of 8 KiB on both, 0 if not measured.
        bytes_per_second: measured rate of large sums, their bytes on one device divided by the time; 0 if not measured.
        middle_ns: measured nanoseconds of a sum of 512 KiB on both, 0 if not measured.
    """

    first: int
    second: int
    kind: LinkKind
    path: LinkPath = LinkPath.UNKNOWN
    peer_access: PeerAccess = PeerAccess.UNKNOWN
    latency_ns: int = 0
    bytes_per_second: int = 0
    middle_ns: int = 0


@document("devices-file")
@frozen(kw_only=True)
class DevicesFile:
    """The GPUs of a machine.

    Attributes:
        format_version: version of the file format.
        devices: the devices, in the order that indices refer to.
        links: connections of pairs of devices, as far as the driver reports them.
    """

    format_version: str = FIRST_VERSION
    devices: tuple[FileDevice, ...]
    links: tuple[Link, ...] = ()

    def to_devices(self) -> tuple[Device, ...]:
        """Convert the entries to devices for the planner."""
        return tuple(
            Device(
                name=d.name,
                budget_bytes=d.budget_bytes,
                overhead_bytes=d.overhead_bytes,
                bandwidth_bytes_per_second=d.bandwidth_bytes_per_second,
                capability=d.capability,
                read_bytes_per_second=d.read_bytes_per_second,
                boundary_ns=d.boundary_ns,
                matrix_flops_per_second=d.matrix_flops_per_second,
            )
            for d in self.devices
        )

    def to_links(self) -> tuple[LinkSpeed, ...]:
        """Return the links that were measured, for the planner."""
        return tuple(
            LinkSpeed(
                first=link.first,
                second=link.second,
                latency_ns=link.latency_ns,
                bytes_per_second=link.bytes_per_second,
                middle_ns=link.middle_ns,
            )
            for link in self.links
            if link.latency_ns and link.bytes_per_second
        )


def loads(text: str | bytes, what: str = "the devices file", tell: Callable[[str], None] | None = None) -> DevicesFile:
    """Parse a devices file strictly.

    Args:
        text: text of the file.
        what: name of the document in errors, such as its file's name.
        tell: called with a note on devices whose overhead the file leaves out.

    Raises:
        DeviceError: listing every problem.
    """
    try:
        data = parse_json(text, what)
        file = _read(data, what)
    except TpplanError as error:
        raise DeviceError(error.message, _hint(error)) from error
    if tell and isinstance(data, dict):
        without = {i: one["name"] for i, one in enumerate(data["devices"]) if "overhead_bytes" not in one}
        if without:
            usual, most = format_bytes(DEFAULT_OVERHEAD_BYTES), format_bytes(UNMEASURED_OVERHEAD_BYTES)
            told = f"context and libraries are counted as {usual} and took up to {most} where that was measured"
            more = f'write "overhead_bytes": {UNMEASURED_OVERHEAD_BYTES}, or what they take'
            tell(f"{what} has no overhead_bytes of {named(without)}: {told}; {more}")
    return file


def load(path: str | os.PathLike[str], tell: Callable[[str], None] | None = None) -> DevicesFile:
    """Read a devices file; see :func:`loads`.

    Raises:
        DeviceError: the file cannot be read or is invalid; the error lists every problem.
    """
    try:
        text = read_text(path)
    except TpplanError as error:
        hint = "name a devices file in it" if Path(path).is_dir() else _hint(error)
        raise DeviceError(error.message, hint) from error
    return loads(text, str(path), tell)


def _hint(error: TpplanError) -> str:
    """Return the hint of a document's error, with the command that makes a devices file where it names none."""
    made = {CORRECT: f"{CORRECT} devices -o", AGAIN: f"{AGAIN} with tpplan devices -o"}
    return made.get(error.hint, error.hint)


def dumps(file: DevicesFile) -> str:
    """Return the canonical JSON of a devices file; equal machines give equal bytes."""
    return codec.dumps(file)


def save(file: DevicesFile, path: str | os.PathLike[str]) -> None:
    """Write a devices file atomically, unless it already has this text.

    Raises:
        TpplanError: the file cannot be written; its previous content is unchanged.
    """
    save_text(dumps(file), path)


def _read(data: object, what: str) -> DevicesFile:
    """Convert JSON data to a devices file and check its rules."""
    if message := mistaken(data, DEVICES):
        raise refusal(what, [Problem(FORM, "", message)])
    version = data.get("format_version") if isinstance(data, dict) else None
    if isinstance(version, str) and version not in {FIRST_VERSION, FORMAT_VERSION}:  # before the keys
        message = f"is {version[:40]!r}, this tpplan reads {FIRST_VERSION} and {FORMAT_VERSION}"
        raise refusal(what, [Problem(FORM, "format_version", message)])
    file = structure(data, DevicesFile, what)
    if found := [Problem(FORM, path, message) for path, message in _problems(file)]:
        raise refusal(what, found)
    return file


def _problems(file: DevicesFile) -> Iterator[tuple[str, str]]:
    """Yield path and message of each violation that type checks do not catch."""
    if not 0 < len(file.devices) <= MAX_DEVICES:
        yield "devices", f"has {len(file.devices)} devices, expected 1 to {MAX_DEVICES}"
        return
    for i, device in enumerate(file.devices):
        yield from ((f"devices[{i}].{key}", message) for key, message in _device_problems(device))
    pairs: set[tuple[int, int]] = set()
    for i, link in enumerate(file.links):
        pair = link.first, link.second
        if not 0 <= link.first < link.second < len(file.devices):
            yield f"links[{i}]", f"joins {link.first} and {link.second}, expected two of {len(file.devices)} devices"
        elif pair in pairs:
            yield f"links[{i}]", f"joins {link.first} and {link.second} for the second time"
        pairs.add(pair)
        for name in ("latency_ns", "bytes_per_second", "middle_ns"):
            if not 0 <= (value := getattr(link, name)) <= MOST:
                yield f"links[{i}].{name}", f"is {value}, expected 0 to {MOST}"


def _device_problems(device: FileDevice) -> Iterator[tuple[str, str]]:
    """Yield key and message of each invalid value of a device."""
    ranges = {
        "memory_bytes": (device.memory_bytes, 1, MOST),
        "budget_bytes": (device.budget_bytes, 1, device.memory_bytes),
        "overhead_bytes": (device.overhead_bytes, 0, MOST),
        "bandwidth_bytes_per_second": (device.bandwidth_bytes_per_second, 0, MOST),
        **{name: (getattr(device, name), 0, MOST) for name in MEASURED_IN_FILE},
    }
    for key, (value, least, most) in ranges.items():
        if not least <= value <= most:
            yield key, f"is {value}, expected {least} to {most}"
    for key, text in (("name", device.name), ("overhead_source", device.overhead_source)):
        if len(text) > LONGEST_NAME:
            yield key, f"has {len(text)} characters, the most is {LONGEST_NAME}"
        elif hidden := UNSEEN.search(text):
            yield key, f"has the invisible character U+{ord(hidden[0]):04X} at position {hidden.start()}"
    if not device.name.strip():
        yield "name", "is empty"
    if not re.fullmatch(CAPABILITY, device.capability):
        yield "capability", f"is {device.capability[:40]!r}, expected such as '8.9'"
