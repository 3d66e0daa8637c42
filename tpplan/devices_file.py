"""The devices file: the GPUs of a machine and their budgets, to plan for them elsewhere and to commit.

It names no machine: host names, serial numbers, times and processes are for the screen (see :mod:`tpplan.probe`).
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import frozen

from tpplan import codec
from tpplan.devices import DEFAULT_OVERHEAD_BYTES, MAX_DEVICES, Device
from tpplan.documents import DEVICES, mistaken
from tpplan.errors import DeviceError, TpplanError
from tpplan.files import parse_json, read_text, save_text
from tpplan.jsontext import UNSEEN
from tpplan.problems import FORM, Problem, refusal
from tpplan.rules import CAPABILITY, LONGEST_NAME, MOST

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

FORMAT_VERSION = "1.0"


class LinkKind(StrEnum):
    """What connects two GPUs."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    PCIE = "pcie"


class LinkPath(StrEnum):
    """The nearest thing that two GPUs have in common on the PCIe side."""

    BOARD = "board"
    SWITCH = "switch"
    SWITCHES = "switches"
    HOST_BRIDGE = "host_bridge"
    NUMA_NODE = "numa_node"
    SYSTEM = "system"
    UNKNOWN = "unknown"


class PeerAccess(StrEnum):
    """Whether the driver says that one GPU can read and write the other's memory; only a test on data proves it."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@frozen(kw_only=True)
class FileDevice:
    """A GPU as a devices file describes it.

    Attributes:
        name: what people call it, such as ``RTX 4090``.
        memory_bytes: of the GPU, as its driver counts them.
        budget_bytes: that tpplan may use: what was free when the file was made, or what somebody wrote there.
        overhead_bytes: of these, what the driver's context and libraries take once the device is used; 512 MiB by
            default.
        overhead_source: how that is known.
        bandwidth_bytes_per_second: of its memory, 0 if unknown.
        capability: CUDA compute capability such as ``8.9``, empty if unknown.
    """

    name: str
    memory_bytes: int
    budget_bytes: int
    overhead_bytes: int = DEFAULT_OVERHEAD_BYTES
    overhead_source: str = ""
    bandwidth_bytes_per_second: int = 0
    capability: str = ""


@frozen(kw_only=True)
class Link:
    """The connection of two GPUs.

    Attributes:
        first: index of one device.
        second: index of the other, larger.
        kind: NVLink, xGMI or PCIe.
        path: what the two have in common on the PCIe side.
        peer_access: what the driver says of direct access.
    """

    first: int
    second: int
    kind: LinkKind
    path: LinkPath = LinkPath.UNKNOWN
    peer_access: PeerAccess = PeerAccess.UNKNOWN


@frozen(kw_only=True)
class DevicesFile:
    """A machine's GPUs.

    Attributes:
        format_version: of the file format.
        devices: in the order that indices refer to.
        links: of pairs of devices, where the driver tells.
    """

    format_version: str = FORMAT_VERSION
    devices: tuple[FileDevice, ...]
    links: tuple[Link, ...] = ()

    def to_devices(self) -> tuple[Device, ...]:
        """Return the devices as the planner wants them."""
        return tuple(
            Device(
                name=d.name,
                budget_bytes=d.budget_bytes,
                overhead_bytes=d.overhead_bytes,
                bandwidth_bytes_per_second=d.bandwidth_bytes_per_second,
                capability=d.capability,
            )
            for d in self.devices
        )


def loads(text: str | bytes, what: str = "the devices file") -> DevicesFile:
    """Read a devices file strictly.

    Args:
        text: of the file.
        what: to call it in errors, such as its name.

    Raises:
        DeviceError: listing every problem.
    """
    try:
        return _read(parse_json(text, what), what)
    except TpplanError as error:
        raise DeviceError(error.message, "correct it, or make it again with tpplan devices -o") from error


def load(path: str | os.PathLike[str]) -> DevicesFile:
    """Read a devices file from disk; see :func:`loads`.

    Raises:
        DeviceError: the file cannot be read, or listing every problem in it.
    """
    try:
        text = read_text(path)
    except TpplanError as error:
        raise DeviceError(error.message, error.hint) from error
    return loads(text, str(path))


def dumps(file: DevicesFile) -> str:
    """Return the canonical JSON of a devices file: equal machines, equal bytes."""
    return codec.dumps(file)


def save(file: DevicesFile, path: str | os.PathLike[str]) -> None:
    """Write a devices file as a whole or not at all; one that has this text already is left alone.

    Raises:
        TpplanError: the file cannot be written; what was there before is still there.
    """
    save_text(dumps(file), path)


def _read(data: object, what: str) -> DevicesFile:
    """Turn JSON data into a devices file that keeps every rule."""
    if message := mistaken(data, DEVICES):
        raise refusal(what, [Problem(FORM, "", message)])
    version = data.get("format_version") if isinstance(data, dict) else None
    if isinstance(version, str) and version != FORMAT_VERSION:  # other keys would be misread before this was said
        message = f"is {version[:40]!r}, this tpplan reads {FORMAT_VERSION}"
        raise refusal(what, [Problem(FORM, "format_version", message)])
    file = codec.structure(data, DevicesFile, what)
    if found := [Problem(FORM, path, message) for path, message in _problems(file)]:
        raise refusal(what, found)
    return file


def _problems(file: DevicesFile) -> Iterator[tuple[str, str]]:
    """Yield path and message of everything that types alone do not rule out."""
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


def _device_problems(device: FileDevice) -> Iterator[tuple[str, str]]:
    """Yield key and message of every value of a device that is out of range."""
    ranges = {
        "memory_bytes": (device.memory_bytes, 1, MOST),
        "budget_bytes": (device.budget_bytes, 1, device.memory_bytes),
        "overhead_bytes": (device.overhead_bytes, 0, MOST),
        "bandwidth_bytes_per_second": (device.bandwidth_bytes_per_second, 0, MOST),
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
