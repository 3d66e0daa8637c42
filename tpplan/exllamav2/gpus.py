"""The GPUs that a TPContext of ExLlamaV2 plans for, by the numbers that torch gives them."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from tpplan.core.device import UNMEASURED_OVERHEAD_BYTES, Device
from tpplan.errors import DeviceError, RequestError
from tpplan.hardware.catalogue import MIB
from tpplan.hardware.probe import amd, devices_file, probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.hardware.probe import SeenGpu

_GIB = 2**30
#: More bytes than a plan can hold.
_MOST_GIB = 2**33
_HINT = "pass gpu_split, such as [20.0, 20.0]"
_LOG = logging.getLogger(__name__)


def read_gpu_split(gpu_split: Any) -> tuple[tuple[int, ...], tuple[Device, ...]]:
    """Return the CUDA ordinals, ascending, and the devices of the GPUs that have a budget.

    Args:
        gpu_split: GiB by ordinal, 0 to leave a GPU alone; None for all that the driver shows, with what is free there.

    Raises:
        DeviceError: there is no GPU to be asked, or torch does not see one that was.
        RequestError: it is no list of budgets.
    """
    if gpu_split is None:
        return _here()
    if not isinstance(gpu_split, list | tuple):
        raise RequestError(f"gpu_split is {gpu_split!s:.40}", "pass a list of GiB, such as [20.0, 20.0]")
    for i, budget in enumerate(gpu_split):
        if not isinstance(budget, int | float) or not 0 <= budget < _MOST_GIB:
            what = f"gpu_split[{i}] is {budget!r:.40}, of the type {type(budget).__name__}"
            raise RequestError(what, "pass GiB as a number, 0 to leave a GPU alone")
    kept = {i: int(budget * _GIB) for i, budget in enumerate(gpu_split) if int(budget * _GIB)}
    if not kept:
        raise RequestError(f"gpu_split is {gpu_split!s:.40}, which has 0 devices", _HINT)
    return tuple(kept), tuple(
        Device(name=f"GPU {i}", budget_bytes=budget, overhead_bytes=UNMEASURED_OVERHEAD_BYTES)
        for i, budget in kept.items()
    )


def _here() -> tuple[tuple[int, ...], tuple[Device, ...]]:
    """Return the GPUs of this machine in torch's order, which need not be the driver's, nor has it to show all."""
    try:
        # A torch built for ROCm calls AMD's GPUs by CUDA's names, and does not see NVIDIA's.
        report = amd.probe(os.environ, os.getpid()) if torch.version.hip else probe()
    except DeviceError as error:
        raise DeviceError(error.message, _HINT) from error
    for note in report.notes:
        _LOG.warning("%s", note)
    ordinals = _ordinals(report.devices)
    devices = dict(zip(ordinals, devices_file(report).to_devices(), strict=True))
    order = tuple(sorted(ordinals))
    return order, tuple(_without_own(devices[ordinal], ordinal) for ordinal in order)


def _ordinals(gpus: Sequence[SeenGpu]) -> tuple[int, ...]:
    """Return torch's number of each GPU that the driver shows, by UUID, else by PCI address.

    Where torch shows no GPU, or as many as the driver without an identity, the driver's order counts, with a warning.

    Raises:
        DeviceError: torch does not show one.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = [_identities(torch.cuda.get_device_properties(i)) for i in range(count)]
    if not any(map(any, here)) and count in {0, len(gpus)}:
        what = f"torch does not identify its {count} GPUs" if count else "torch shows no GPU"
        _LOG.warning("%s: they are numbered in the driver's order, %s", what, ", ".join(map(_name, gpus)))
        return tuple(range(len(gpus)))
    uuids, addresses = (_indices([each[kind] for each in here]) for kind in range(2))
    told = _indices([_address(gpu.bus) for gpu in gpus])  # those of MIG instances are not unique
    found = []
    for gpu in gpus:
        address = _address(gpu.bus)
        number = uuids.get(_bare(gpu.uuid), addresses.get(address) if address in told else None)
        if number is None:
            raise DeviceError(f"the driver shows {_name(gpu)}, which is none of torch's {count} GPUs", _HINT)
        found.append(number)
    return tuple(found)


def _indices(names: Sequence[str]) -> dict[str, int]:
    """Return the index of each name that is not empty and occurs once."""
    return {name: i for i, name in enumerate(names) if name and names.count(name) == 1}


def _identities(properties: Any) -> tuple[str, str]:
    """Return the UUID and the PCI address of one of torch's GPUs; empty where this torch does not tell them."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    address = "" if None in parts else ":".join(f"{part:x}" for part in parts)
    return _bare(str(getattr(properties, "uuid", ""))), address


def _bare(uuid: str) -> str:
    """Return a UUID without the kind of device and hyphens, in small letters.

    HIP's are the letters of AMD's unique number, which torch takes for bytes and writes as hexadecimal digits.
    """
    digits = uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", "").casefold()
    try:
        letters = bytes.fromhex(digits).decode("ascii").casefold()
    except ValueError:
        return digits
    return letters if re.fullmatch("[0-9a-f]{16}", letters) else digits


def _address(bus: str) -> str:
    """Return domain, bus and device of a PCI address without leading zeros; empty if it is none."""
    match = re.match("([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)", bus.casefold())
    return ":".join(f"{int(part, 16):x}" for part in match.groups()) if match else ""


def _without_own(device: Device, ordinal: int) -> Device:
    """Return a device without the memory of this process's tensors, which the driver's report may count as free."""
    own = torch.cuda.memory_allocated(ordinal) if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    if not own:
        return device
    free, _ = torch.cuda.mem_get_info(ordinal)
    budget = min(device.budget_bytes, max(free, device.budget_bytes - own))
    return evolve(device, budget_bytes=max(1, budget // MIB * MIB))


def _name(gpu: SeenGpu) -> str:
    return f"{gpu.name} ({gpu.uuid or gpu.bus or 'without a UUID'})"
