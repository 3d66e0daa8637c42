"""The devices that a plan is made for, and the text form in which users name them."""

from __future__ import annotations

import os
import re
from itertools import groupby
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from tpplan.errors import DeviceError
from tpplan.files import nearest
from tpplan.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Memory of the CUDA context and libraries, where it was not measured on the device itself.
DEFAULT_OVERHEAD_BYTES = 512 * 2**20

#: More devices than this in a list is a mistake or an attack.
MAX_DEVICES = 4096

_LONGEST_SPEC = 100_000
_LONGEST_SLIP = 100
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_FILE = "a devices file, which ends in .json"
_EXAMPLE = "write a list such as 2x24GiB,RTX3060 or H100:72GiB, a devices file, or auto"
_SUFFIX = re.compile(r"\.(?![kmgt]i?b$)[a-z]\w*$", re.IGNORECASE)
_ENTRY = re.compile(r"(?:(?P<count>[0-9]+) ?[xX×] ?)?(?P<gpu>[^:]*)(?P<colon>:(?P<budget>.*))?", re.DOTALL)


@frozen(kw_only=True)
class Device:
    """A GPU, or another device with a memory budget.

    Attributes:
        name: display name such as ``RTX 4090``.
        budget_bytes: total bytes that tpplan may use on the device.
        overhead_bytes: part of the budget that the CUDA context and libraries take if the device is used.
        bandwidth_bytes_per_second: memory bandwidth, 0 if unknown.
        capability: CUDA compute capability such as ``8.9``, empty if unknown.
    """

    name: str
    budget_bytes: int
    overhead_bytes: int = DEFAULT_OVERHEAD_BYTES
    bandwidth_bytes_per_second: int = 0
    capability: str = ""


def parse_devices(spec: str, tell: Callable[[str], None] | None = None) -> tuple[Device, ...]:
    """Parse a description of the devices to plan for.

    Args:
        spec: a list of entries such as ``2x24GiB,12GiB`` (memory), ``4xRTX4090,2xRTX3060`` (GPUs of the catalogue, with
            all their memory) or ``H100:72GiB`` (with a budget); or the path of a devices file, ending in ``.json``;
            or ``auto`` for the GPUs of this machine, each with the memory that is free on it now.
        tell: called with each note about ``auto`` for the user, such as that a GPU was left out.

    Raises:
        DeviceError: an entry is invalid, a GPU is unknown (the hint has a similar name), a budget exceeds its GPU's
            memory, there is no device or more than 4096, a devices file breaks its rules, or no GPU was found.
    """
    # Imports on demand: most commands need only Device, and these modules load the catalogue, cattrs and drivers.
    spec = spec.strip()
    if spec.casefold() == "auto":
        from tpplan import probe  # noqa: PLC0415

        report = probe.probe()
        if tell:
            for note in report.notes:
                tell(note)
        return probe.devices_file(report).to_devices()
    if spec.casefold().endswith(".json") and ("," not in spec or os.path.exists(spec)):  # noqa: PTH110 (may be a list)
        from tpplan import devices_file  # noqa: PLC0415

        return devices_file.load(spec).to_devices()
    if not spec:
        raise DeviceError("no device was named", _EXAMPLE)
    if len(spec) > _LONGEST_SPEC:
        raise DeviceError(f"a list of devices of {len(spec)} characters is beyond {_LONGEST_SPEC}", _EXAMPLE)
    devices: list[Device] = []
    for number, entry in enumerate(spec.split(","), 1):
        count, device = _entry(entry.strip(), number, spec)
        if len(devices) + count > MAX_DEVICES:
            raise DeviceError(f"{len(devices) + count} devices are more than {MAX_DEVICES}", "check the counts")
        devices += [device] * count
    return tuple(devices)


def spec_of(devices: Sequence[Device]) -> str:
    """Return a list that :func:`parse_devices` reads as these devices, up to their names; empty if there is none."""
    entries = []
    for device, run in groupby(devices):
        budget = device.budget_bytes
        size = next(f"{budget // scale}{unit}" for unit, scale in _UNITS if budget % scale == 0)
        entry = size if not device.bandwidth_bytes_per_second else f"{device.name.replace(' ', '')}:{size}"
        count = sum(1 for _ in run)
        entries.append(f"{count}x{entry}" if count > 1 else entry)
    spec = ",".join(entries)
    try:
        found = parse_devices(spec)
    except DeviceError:  # neither in the catalogue nor a plain size
        return ""
    return spec if [evolve(d, name="") for d in found] == [evolve(d, name="") for d in devices] else ""


def _entry(entry: str, number: int, spec: str) -> tuple[int, Device]:
    """Parse one entry into a count and a device; the hint of an error suggests what was probably meant."""
    try:
        return _parse_entry(entry, number, spec)
    except DeviceError as error:
        if path := next((path for path in (spec, entry) if os.path.exists(path)), ""):  # noqa: PTH110 (may be no path)
            kind = "directory" if os.path.isdir(path) else "file"  # noqa: PTH112
            if path == spec:
                message, hint = f"{spec[:60]!r} is a {kind}, not a list of GPUs", f"name {_FILE}"
            else:
                message, hint = f"{entry[:60]!r} is a {kind}, not a GPU", "name a devices file alone, or only GPUs"
            raise DeviceError(message, hint) from error
        if meant := _meant(entry):
            raise DeviceError(error.message, f"did you mean {meant}?") from error
        near = nearest(spec, ".json") if len(spec) < _LONGEST_SLIP else ""
        if near or (("/" in spec or _SUFFIX.search(spec)) and not error.hint.startswith("did you mean")):
            hint = f"did you mean {near}?" if near else f"name {_FILE}"
            raise DeviceError(f"{spec[:60]!r} is neither a file nor a list of GPUs", hint) from error
        raise


def _meant(entry: str) -> str:
    """Return the valid list that an invalid entry was probably meant as, or an empty string."""
    if len(entry) > _LONGEST_SLIP:
        return ""
    slips = [
        re.sub(r" +([0-9.]+ ?[A-Za-z]+)$", r":\1", entry),
        re.sub(r" *[;+&/|] *| +", ",", entry),
        re.sub(r"^(.+?) *[xX×*] *([0-9]+)$", r"\2x\1", entry),
        re.sub(r"^([0-9]+) *\* *", r"\1x", entry),
        re.sub(r"^[xX×*] *([0-9]+) *", r"\1x", entry),
        re.sub(r" *[@=] *", ":", entry),
    ]
    for slip in slips:
        try:
            for part in slip.split(","):
                _parse_entry(part, 1, slip)
        except DeviceError:
            continue
        return slip
    return ""


def _parse_entry(entry: str, number: int, spec: str) -> tuple[int, Device]:
    """Parse one entry into a count and a device."""
    from tpplan import catalogue  # noqa: PLC0415

    match = _ENTRY.fullmatch(entry)
    if not match or not match["gpu"].strip():
        what = f"entry {number} of {spec[:60]!r}"
        raise DeviceError(f"{what} is empty" if not entry else f"{what}, {entry[:60]!r}, names no GPU", _EXAMPLE)
    digits, name, budget = match["count"] or "1", match["gpu"].strip(), match["budget"]
    count = int(digits) if len(digits) < len(str(_LONGEST_SPEC)) else MAX_DEVICES + 1
    if not 0 < count <= MAX_DEVICES:
        if not name[0].isdecimal() and not catalogue.lookup(name):
            catalogue.find(entry)  # such as 7900XTX, which raises with the name in full
        raise DeviceError(f"{entry[:60]!r} asks for {digits[:20]} devices, expected 1 to {MAX_DEVICES}", _EXAMPLE)
    if budget is not None and not budget.strip():
        raise DeviceError(f"{entry[:60]!r} has no memory after the colon", _EXAMPLE)
    if name[0].isdecimal() and not match["colon"] and not catalogue.lookup(name):
        return count, Device(name=f"{name} GPU", budget_bytes=parse_bytes(name))
    gpu = catalogue.find(name)
    limit = gpu.memory_bytes if budget is None else parse_bytes(budget)
    if limit > gpu.memory_bytes:
        have = f"{format_bytes(gpu.memory_bytes)} ({gpu.memory_bytes} bytes)"
        hint = f"lower the budget, or write {budget.strip()} alone for a GPU that is not the catalogue's"
        raise DeviceError(f"a budget of {budget.strip()} is more than the {have} of the {gpu.name}", hint)
    device = Device(
        name=gpu.name,
        budget_bytes=limit,
        overhead_bytes=catalogue.overhead(gpu.capability).bytes,
        bandwidth_bytes_per_second=gpu.bandwidth_bytes_per_second,
        capability=gpu.capability,
    )
    return count, device
