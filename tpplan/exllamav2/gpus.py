"""The GPUs that a TPContext of ExLlamaV2 plans for, by the numbers that torch gives them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from tpplan.devices import UNMEASURED_OVERHEAD_BYTES, Device
from tpplan.errors import DeviceError, RequestError
from tpplan.probe import devices_file, probe

if TYPE_CHECKING:
    from tpplan.probe import SeenGpu

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
        report = probe()
    except DeviceError as error:
        raise DeviceError(error.message, _HINT) from error
    for note in report.notes:
        _LOG.warning("%s", note)
    ordinals = _ordinals()
    found = {}
    for gpu, device in zip(report.devices, devices_file(report).to_devices(), strict=True):
        ordinal = ordinals.get(_bare(gpu.uuid))
        if ordinal is None:
            raise DeviceError(f"the driver shows {_name(gpu)}, which is none of torch's {len(ordinals)} GPUs", _HINT)
        found[ordinal] = device
    order = tuple(sorted(found))
    return order, tuple(found[ordinal] for ordinal in order)


def _ordinals() -> dict[str, int]:
    """Return torch's number of each of its GPUs by UUID; none of those that it cannot tell apart."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    uuids = [_bare(str(getattr(torch.cuda.get_device_properties(i), "uuid", ""))) for i in range(count)]
    return {uuid: i for i, uuid in enumerate(uuids) if uuid and uuids.count(uuid) == 1}


def _bare(uuid: str) -> str:
    """Return a UUID as torch writes it: without the kind of device, in small letters."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").casefold()


def _name(gpu: SeenGpu) -> str:
    return f"{gpu.name} ({gpu.uuid or 'without a UUID'})"
