"""The GPUs of this machine, asked of their drivers; no context is created on any of them.

NVIDIA answers through NVML or ``nvidia-smi``, AMD through ``amd-smi`` or ``rocm-smi``. The variables that hide GPUs
from programs are obeyed.
"""

from __future__ import annotations

import os

from tpplan.errors import DeviceError
from tpplan.hardware.probe import amd, nvidia
from tpplan.hardware.probe.report import (
    DeviceReport,
    GpuProcess,
    NoDriverError,
    SeenGpu,
    devices_file,
    with_speeds,
)

__all__ = ["DeviceReport", "GpuProcess", "SeenGpu", "devices_file", "probe", "with_speeds"]


def probe() -> DeviceReport:
    """Return what the drivers tell of the GPUs here: NVIDIA's if there are any, else AMD's.

    Raises:
        DeviceError: neither vendor's driver is here, or a driver or a variable such as ``CUDA_VISIBLE_DEVICES`` leaves
            no GPU to use.
    """
    missing: list[NoDriverError] = []
    for ask in (nvidia.probe, amd.probe):
        try:
            return ask(os.environ, os.getpid())
        except NoDriverError as error:
            missing.append(error)
    reasons = "; ".join(error.message for error in missing)
    hints = [error.hint for error in missing if error.hint]
    hint = "; ".join([*hints, 'to plan for GPUs elsewhere, name them: --gpus "2x24GiB"'])
    raise DeviceError(f"no GPU driver answers on this machine: {reasons}", hint)
