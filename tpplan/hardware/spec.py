"""The devices that a plan is made for, and the text form in which users name them."""

from __future__ import annotations

import os
import re
from itertools import groupby
from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.core.device import MAX_DEVICES, UNMEASURED_OVERHEAD_BYTES, Device
from tpplan.core.sizes import exact_bytes, format_bytes, parse_bytes, read_size
from tpplan.errors import DeviceError
from tpplan.files.text import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.core.speed import LinkSpeed
    from tpplan.hardware.catalogue import Gpu


_LONGEST_SPEC = 100_000
_LONGEST_SLIP = 100
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_FILE = "a devices file, which ends in .json"
_EXAMPLE = "write a list such as 2x24GiB,RTX3060 or H100:72GiB, a devices file, or auto"
_SUFFIX = re.compile(r"\.(?![kmgt]i?b$)[a-z]\w*$", re.IGNORECASE)
_ENTRY = re.compile(r"(?:(?P<count>[0-9]+) ?[xX×] ?)?(?P<gpu>[^:]*)(?P<colon>:(?P<budget>.*))?", re.DOTALL)


def parse_devices(spec: str, tell: Callable[[str], None] | None = None) -> tuple[Device, ...]:
    """Parse a description of the devices to plan for.

    Args:
        spec: a list of entries such as ``2x24GiB,12GiB`` (memory), ``4xRTX4090,2xRTX3060`` (GPUs of the catalogue, with
            all memory that a program is handed out), ``H100:72GiB`` (with a budget) or ``RTX4090:48GiB`` (a modified
            card); or the path of a devices file, ending in ``.json``; or ``auto`` for the GPUs of this machine, each
            with the memory that is free on it now.
        tell: called with each note for the user, such as that ``auto`` left a GPU out, that a card is a modified one,
            or which devices of a file have no overhead of their own.

    Raises:
        DeviceError: an entry is invalid, a GPU is unknown, a budget exceeds the memory that its GPU hands out, there is
            no device or more than 4096, a devices file breaks its rules, or no GPU was found.
    """
    # Imports on demand: most commands need only Device, and these modules load the catalogue, cattrs and drivers.
    spec = spec.strip()
    if spec.casefold() == "auto":
        from tpplan.hardware import probe  # noqa: PLC0415

        report = probe.probe()
        if tell:
            for note in report.notes:
                tell(note)
        return probe.devices_file(report).to_devices()
    if is_file(spec):
        from tpplan.hardware import file  # noqa: PLC0415

        return file.load(spec, tell).to_devices()
    if not spec:
        raise DeviceError("no device was named", _EXAMPLE)
    if len(spec) > _LONGEST_SPEC:
        raise DeviceError(f"a list of devices of {len(spec)} characters is beyond {_LONGEST_SPEC}", _EXAMPLE)
    devices: list[Device] = []
    for number, entry in enumerate(spec.split(","), 1):
        count, device = _entry(entry.strip(), number, spec, tell)
        if len(devices) + count > MAX_DEVICES:
            raise DeviceError(f"{len(devices) + count} devices are more than {MAX_DEVICES}", "check the counts")
        devices += [device] * count
    return tuple(devices)


def links_of(spec: str) -> tuple[LinkSpeed, ...]:
    """Return the measured links between the devices of :func:`parse_devices`, of a devices file that has any.

    Raises:
        DeviceError: the devices file cannot be read or is invalid.
    """
    if not is_file(spec.strip()):
        return ()
    from tpplan.hardware import file  # noqa: PLC0415

    return file.load(spec.strip()).to_links()


def is_file(spec: str) -> bool:
    """Tell whether a description is the path of a devices file."""
    return spec.casefold().endswith(".json") and ("," not in spec or os.path.exists(spec))  # noqa: PTH110 (may be a list)


def spec_of(devices: Sequence[Device]) -> str:
    """Return a list that :func:`parse_devices` reads as these devices, up to their names; empty if there is none."""
    entries = []
    for device, run in groupby(devices):
        budget = device.budget_bytes
        entry = next(f"{budget // scale}{unit}" for unit, scale in _UNITS if budget % scale == 0)
        if device.bandwidth_bytes_per_second:
            name = device.name.replace(" ", "")
            entry = name if _devices_of(name) == (device,) else f"{name}:{entry}"
        count = sum(1 for _ in run)
        entries.append(f"{count}x{entry}" if count > 1 else entry)
    spec = ",".join(entries)
    found = _devices_of(spec)
    return spec if [evolve(d, name="") for d in found] == [evolve(d, name="") for d in devices] else ""


def with_budget(device: Device, budget_bytes: int) -> Device | None:
    """Return a device with another budget; None if it is a GPU of the catalogue that never has so much memory.

    Only a card that is a modified one already may be another modified one.
    """
    from tpplan.hardware import catalogue  # noqa: PLC0415

    name, other = device.name, evolve(device, budget_bytes=budget_bytes)
    known = catalogue.lookup(name) if device.bandwidth_bytes_per_second else ()
    if not known or any(budget_bytes <= (g.nominal_bytes if g.unified else g.memory_bytes) for g in known):
        return other
    is_modified = catalogue.modified(name, device.budget_bytes) and catalogue.modified(name, budget_bytes)
    return other if is_modified else None


def of_size(budget_bytes: int) -> Device:
    """Return the GPU that a size alone stands for in a list."""
    (device,) = parse_devices(exact_bytes(budget_bytes))
    return device


def _devices_of(spec: str) -> tuple[Device, ...]:
    """Return the devices of a list; none if it names what is neither in the catalogue nor a plain size."""
    try:
        return parse_devices(spec)
    except DeviceError:
        return ()


def _entry(entry: str, number: int, spec: str, tell: Callable[[str], None] | None) -> tuple[int, Device]:
    """Parse one entry into a count and a device; the hint of an error suggests what was probably meant."""
    try:
        return _parse_entry(entry, number, spec, tell)
    except DeviceError as error:
        if path := next((path for path in (spec, entry) if os.path.exists(path)), ""):  # noqa: PTH110 (may be no path)
            kind = "directory" if os.path.isdir(path) else "file"  # noqa: PTH112
            if path == spec:
                message, hint = f"{spec[:60]!r} is a {kind}, not a list of GPUs", f"name {_FILE}"
            else:
                message, hint = f"{entry[:60]!r} is a {kind}, not a GPU", "name a devices file alone, or only GPUs"
            raise DeviceError(message, hint) from error
        if entry.casefold() == "auto":
            hint = "name auto alone, or write what it finds (tpplan devices -o FILE) and edit the file"
            message = "auto stands for all GPUs of this machine, so it cannot be part of a list"
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


def _parse_entry(entry: str, number: int, spec: str, tell: Callable[[str], None] | None = None) -> tuple[int, Device]:
    """Parse one entry into a count and a device."""
    from tpplan.hardware import catalogue  # noqa: PLC0415

    match = _ENTRY.fullmatch(entry)
    if not match or not match["gpu"].strip():
        what = f"entry {number} of {spec[:60]!r}"
        raise DeviceError(f"{what} is empty" if not entry else f"{what}, {entry[:60]!r}, names no GPU", _EXAMPLE)
    digits, name, budget = match["count"] or "1", match["gpu"].strip(), match["budget"]
    whole = entry.partition(":")[0].strip()
    if match["count"] and catalogue.lookup(whole):  # 7900XTX is not 7900 TX
        digits, name = "1", whole
    count = int(digits) if len(digits) < len(str(_LONGEST_SPEC)) else MAX_DEVICES + 1
    if not 0 < count <= MAX_DEVICES:
        raise DeviceError(f"{entry[:60]!r} asks for {digits[:20]} devices, expected 1 to {MAX_DEVICES}", _EXAMPLE)
    if budget is not None and not budget.strip():
        raise DeviceError(f"{entry[:60]!r} has no memory after the colon", _EXAMPLE)
    if name[0].isdecimal() and not match["colon"] and not catalogue.lookup(catalogue.split(name)[0] or name):
        size = parse_bytes(name, tell)
        name = name if re.search("i?B$", name) else read_size(name)[1]
        return count, Device(name=f"{name} GPU", budget_bytes=size, overhead_bytes=UNMEASURED_OVERHEAD_BYTES)
    gpu, limit = _with_budget(name, budget, tell)
    device = Device(
        name=gpu.name,
        budget_bytes=limit,
        overhead_bytes=catalogue.overhead(gpu.capability).bytes,
        bandwidth_bytes_per_second=gpu.bandwidth_bytes_per_second,
        capability=gpu.capability,
    )
    return count, device


def _with_budget(name: str, budget: str | None, tell: Callable[[str], None] | None) -> tuple[Gpu, int]:
    """Return the GPU of a name and the bytes to use of it: its own memory, less, or a modified card's."""
    from tpplan.hardware import catalogue  # noqa: PLC0415

    if budget is None:
        gpu = catalogue.find(name)
        return gpu, gpu.memory_bytes
    size, written = parse_bytes(budget, tell), budget.strip()
    if modified := catalogue.modified(name, size):
        if tell:
            nominal = format_bytes(modified.nominal_bytes)
            tell(f"{written} is more than the {nominal} of the {modified.name}: taken as a modified card")
        return modified, size
    gpu = catalogue.find(name)
    limit = gpu.nominal_bytes if gpu.unified else gpu.memory_bytes
    if limit < size <= gpu.nominal_bytes:  # the number on the box
        if tell:
            tell(f"{written} of the {gpu.name} is taken as the {format_bytes(limit)} that programs get of it")
        return gpu, limit
    if size > limit:
        runtime = "CUDA" if gpu.capability else "ROCm"
        have = f"{format_bytes(limit)} that {runtime} hands out of the {gpu.name}"
        short = gpu.name.replace(" ", "")
        hint = f"write {short} for all of that, or {written} alone for a GPU that is not the catalogue's"
        raise DeviceError(f"a budget of {written} is more than the {have}", hint)
    return gpu, size
