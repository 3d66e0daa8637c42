"""Asking for AMD's GPUs: by ``amd-smi``, else by ``rocm-smi``."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.errors import DeviceError
from tpplan.hardware.probe.report import DeviceReport, NoDriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def probe(environ: Mapping[str, str], own_pid: int) -> DeviceReport:
    """Ask ``amd-smi`` on this machine, or ``rocm-smi`` if that is not there or fails.

    Raises:
        DeviceError: a program fails, does not answer within 30 s, answers nonsense, or no GPU is left.
        NoDriverError: neither is installed, or they show no GPU.
    """
    from tpplan.hardware.probe import amd_smi, rocm_smi, system_memory  # noqa: PLC0415 (only where asked)

    system = system_memory.read()
    ways: dict[str, Callable[[str], DeviceReport]] = {
        amd_smi.NAME: lambda path: amd_smi.read(amd_smi.ask(path), environ, own_pid, system),
        rocm_smi.NAME: lambda path: rocm_smi.read(rocm_smi.ask(path), environ, own_pid, system),
    }
    failed: list[DeviceError] = []
    for name, way in ways.items():
        path = shutil.which(name)
        if path is None:
            continue
        try:
            found = way(path)
        except DeviceError as error:
            failed.append(error)
            continue
        notes = [f"{name} was asked, for amd-smi failed: {error.message}" for error in failed]
        return evolve(found, notes=(*notes, *found.notes))
    if failed:
        raise failed[0]
    raise NoDriverError("AMD: there is neither amd-smi nor rocm-smi")
