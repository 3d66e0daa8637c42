"""AMD's GPUs, asked of ``rocm-smi``, which ROCm had up to version 6."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tpplan.errors import DeviceError
from tpplan.hardware.file import LinkKind
from tpplan.hardware.probe import amd_gpus, program
from tpplan.hardware.probe.report import DeviceReport, GpuProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.hardware.probe.system_memory import SystemMemory

NAME = "rocm-smi"
_ASKED = ("id", "productname", "uniqueid", "bus", "pids", "driverversion", "topotype")
ARGUMENTS = (*(f"--show{what}" for what in _ASKED), "--showmeminfo", "vram", "gtt", "--json")

_CARD = re.compile(r"card([0-9]{1,6})")
_PID = re.compile(r"PID *([0-9]{1,18})")
_LINK = re.compile(r"\(Topology\) Link type between DRM devices ([0-9]{1,6}) and ([0-9]{1,6})")
_KINDS = {"XGMI": LinkKind.XGMI, "PCIE": LinkKind.PCIE}

#: A process's values after its name: GPUs, video memory, SDMA, occupied units.
_PROCESS_VALUES = 4


def ask(path: str) -> str:
    """Return what ``rocm-smi`` at a path writes; see :func:`tpplan.hardware.probe.amd_gpus.run`."""
    return amd_gpus.run(path, NAME, ARGUMENTS, program.deadline())


def read(text: str, environ: Mapping[str, str], own_pid: int, system: SystemMemory | None = None) -> DeviceReport:
    """Return what ``rocm-smi`` told of the GPUs that HIP would show to a program.

    Args:
        text: its standard output, warnings before the JSON included.
        environ: see :func:`tpplan.hardware.probe.amd_gpus.report`.
        own_pid: left out of the processes.
        system: memory of the machine, where it is known.

    Raises:
        DeviceError: the output is not what ``rocm-smi`` writes, or no GPU is left.
        NoDriverError: it shows no GPU.
    """
    data = amd_gpus.parse(text, NAME)
    if not isinstance(data, dict):
        raise DeviceError(f"{NAME} wrote JSON that is not an object", f"see what {NAME} itself says")
    objects = {key: value for key, value in data.items() if isinstance(value, dict)}
    told = {key: value for key, value in objects.get("system", {}).items() if isinstance(value, str)}
    cards = [_card(match, objects[key]) for key in objects if (match := _CARD.fullmatch(key))]
    links = {
        (int(match[1]), int(match[2])): _KINDS[value]
        for key, value in told.items()
        if (match := _LINK.fullmatch(key)) and value in _KINDS
    }
    return amd_gpus.report(
        cards,
        NAME,
        environ,
        system,
        driver=told.get("Driver version", ""),
        links=links,
        processes=_processes(told, own_pid),
    )


def _card(match: re.Match[str], told: Mapping[str, Any]) -> amd_gpus.Card:
    """Return what the report tells of a card; the capitals of its keys differ between versions."""
    values = {key.casefold(): str(value).strip() for key, value in told.items()}
    series = values.get("card series") or values.get("device name") or ""
    return amd_gpus.Card(
        key=match[0],
        number=int(match[1]),
        node=_number(values.get("node id", "")),
        name=re.sub(r".*\[(.+)\].*", r"\1", series),  # "Navi 21 [Radeon RX 6800/6800 XT / 6900 XT]"
        unique=values.get("unique id", ""),
        bus=values.get("pci bus", ""),
        target=values.get("gfx version", "") if values.get("gfx version", "").startswith("gfx") else "",
        vram=_number(values.get("vram total memory (b)", "")),
        vram_used=_number(values.get("vram total used memory (b)", "")),
        gtt=_number(values.get("gtt total memory (b)", "")),
        gtt_used=_number(values.get("gtt total used memory (b)", "")),
    )


def _number(text: str) -> int:
    """Return a whole number that ``rocm-smi`` wrote as text, 0 if it is none (``N/A``, ``unknown``)."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else 0


def _processes(told: Mapping[str, str], own_pid: int) -> list[GpuProcess]:
    """Return the programs that compute on some card; ``rocm-smi`` does not say on which."""
    found = []
    for key, value in told.items():
        match = _PID.fullmatch(key)
        words = value.split(", ")  # it also writes the blanks in a name as ", "
        if match and int(match[1]) != own_pid and len(words) > _PROCESS_VALUES:
            name, used = " ".join(words[:-_PROCESS_VALUES]), _number(words[-_PROCESS_VALUES + 1])
            found.append(GpuProcess(pid=int(match[1]), name=name, device=-1, used_bytes=used))
    return found
