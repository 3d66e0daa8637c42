"""Asking for NVIDIA's GPUs: by NVML, else by ``nvidia-smi``."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.errors import DeviceError
from tpplan.hardware.probe import system_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.hardware.probe.report import DeviceReport


def probe(environ: Mapping[str, str], own_pid: int) -> DeviceReport:
    """Ask NVML on this machine, or ``nvidia-smi`` if NVML does not start or the package nvidia-ml-py is missing.

    Raises:
        DeviceError: there is a driver, but no way to use it, or it leaves no GPU.
        NoDriverError: there is no driver.
    """
    from tpplan.hardware.probe import nvidia_smi, nvml  # noqa: PLC0415 (only where asked)

    system = system_memory.read()
    try:
        started = nvml.start()
    except DeviceError as error:
        path = shutil.which(nvidia_smi.NAME)
        if path is None:
            raise
        try:
            answers = nvidia_smi.ask(path)
        except DeviceError as also:
            raise type(error)(f"{error.message}; {also.message}", error.hint) from also
        seen = nvidia_smi.read(answers, environ, own_pid, system)
        note = f"{nvidia_smi.NAME} was asked, which tells neither links nor MIG instances, for {error.message}"
        return evolve(seen, notes=(*seen.notes, f"{note}; {error.hint}" if error.hint else note))
    try:
        return nvml.read(started, environ, own_pid, system)
    except started.NVMLError as error:
        raise DeviceError(f"NVIDIA's driver stopped answering: {error}", "see what nvidia-smi says") from error
    finally:
        started.nvmlShutdown()
