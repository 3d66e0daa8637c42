"""NVIDIA's GPUs, asked of ``nvidia-smi``, which comes with the driver."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tpplan.hardware.probe import nvidia_gpus, program
from tpplan.hardware.probe.nvidia_gpus import Unit
from tpplan.hardware.probe.report import DeviceReport, GpuProcess, NoDriverError, SeenGpu, seen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.hardware.file import Link
    from tpplan.hardware.probe.system_memory import SystemMemory

NAME = "nvidia-smi"
_FORMAT = "--format=csv,noheader,nounits"
#: What every version knows, and what versions from 2022 on know too.
FIELDS = ("index", "uuid", "name", "pci.bus_id", "memory.total", "memory.free", "driver_version")
_LATER = ("mig.mode.current", "compute_cap")
#: The name is the last: it may contain commas.
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")

_MIB = 2**20
_CAPABILITY = re.compile(r"[0-9]{1,2}\.[0-9]")


def ask(path: str) -> dict[str, str]:
    """Return what ``nvidia-smi`` at a path answers on GPUs (``gpu``) and on programs that compute (``compute-apps``).

    Raises:
        DeviceError: it does not run, or does not answer within 30 s.
        NoDriverError: it shows no GPU.
    """
    until = program.deadline()
    answer = program.run(path, NAME, (f"--query-gpu={','.join(FIELDS + _LATER)}", _FORMAT), until)
    if answer.code and "is not a valid field to query" in answer.text:
        answer = program.run(path, NAME, (f"--query-gpu={','.join(FIELDS)}", _FORMAT), until)
    if not _rows(answer.text):
        raise NoDriverError(f"NVIDIA: {NAME} shows no GPU (exit {answer.code}): {answer.last_line}")
    programs = program.run(path, NAME, (f"--query-compute-apps={','.join(PROCESS_FIELDS)}", _FORMAT), until)
    return {"gpu": answer.text, "compute-apps": programs.text}


def read(
    answers: Mapping[str, str], environ: Mapping[str, str], own_pid: int, system: SystemMemory | None = None
) -> DeviceReport:
    """Return what ``nvidia-smi`` told of GPUs that CUDA shows; see :func:`tpplan.hardware.probe.nvidia_gpus.report`.

    Args:
        answers: what :func:`ask` returns.
        environ: of the process.
        own_pid: whose use of the memory does not count as used.
        system: memory of the machine, where it is known.

    Raises:
        DeviceError: no GPU is left.
        NoDriverError: there is no GPU.
    """
    return nvidia_gpus.report(_Text(answers), environ, own_pid, system)


class _Text:
    """What ``nvidia-smi`` wrote, as a :class:`~tpplan.hardware.probe.nvidia_gpus.Source`; a handle is a GPU's row."""

    called = NAME

    def __init__(self, answers: Mapping[str, str]) -> None:
        self._rows = _rows(answers["gpu"])
        self._unread = [line for line in answers["gpu"].splitlines() if line.strip() and not _row(line)]
        split = (line.split(", ", len(PROCESS_FIELDS) - 1) for line in answers["compute-apps"].splitlines())
        self._programs = [dict(zip(PROCESS_FIELDS, parts, strict=True)) for parts in split if _is_program(parts)]

    def version(self) -> str:
        """Return the driver's version."""
        return next((row["driver_version"] for row in self._rows.values()), "")

    def units(self, notes: list[str]) -> list[list[Unit]]:
        """Return for each GPU itself, unless it cannot be used."""
        notes += [f"{NAME} says: {line.strip()[:200]}" for line in self._unread]
        gpus: list[list[Unit]] = []
        for i in range(max(self._rows, default=-1) + 1):
            row = self._rows.get(i)
            if row is None:
                notes.append(f"GPU {i} is left out: {NAME} has no access to it")
            elif row.get("mig.mode.current") == "Enabled":
                notes.append(f"GPU {i} is left out: MIG is on, and {NAME} does not tell the memory of instances")
                row = None
            gpus.append([Unit(i, row, row["uuid"], row, row["uuid"])] if row else [])
        return gpus

    def name(self, unit: Unit) -> str:
        """Return the name of a GPU."""
        name: str = unit.handle["name"]
        return "" if name.startswith("[") else name

    def memory(self, unit: Unit) -> tuple[int, int] | None:
        """Return the bytes in all and in use, which include those that the driver keeps for itself."""
        total, free = (_number(unit.handle[field]) for field in ("memory.total", "memory.free"))
        return None if not total or free is None else (total * _MIB, (total - free) * _MIB)

    def device(self, unit: Unit, memory: int, used: int) -> SeenGpu:
        """Return the report of a GPU."""
        capability = unit.handle.get("compute_cap", "")
        return seen(
            name=self.name(unit),
            uuid=unit.uuid,
            bus=unit.handle["pci.bus_id"],
            memory=memory,
            used=used,
            capability=capability if _CAPABILITY.fullmatch(capability) else "",
        )

    def processes(self, unit: Unit, device: int) -> list[GpuProcess]:
        """Return the programs that compute on a GPU, the largest first."""
        found = [
            GpuProcess(
                pid=int(each["pid"]),
                name="" if each["process_name"].startswith("[") else each["process_name"],
                device=device,
                used_bytes=(_number(each["used_memory"]) or 0) * _MIB,
            )
            for each in self._programs
            if each["gpu_uuid"] == unit.uuid
        ]
        return sorted(found, key=lambda p: (-p.used_bytes, p.pid))

    def links(self, units: list[Unit]) -> tuple[Link, ...]:  # noqa: ARG002
        """Return nothing: only its tables for people tell links."""
        return ()


def _rows(text: str) -> dict[int, dict[str, str]]:
    """Return what is told of each GPU, by its index."""
    rows = [row for line in text.splitlines() if (row := _row(line))]
    return {int(row["index"]): row for row in rows}


def _row(line: str) -> dict[str, str]:
    """Return the fields of a line; nothing if it is a sentence, such as of a GPU that is lost."""
    parts = [part.strip() for part in line.split(",")]
    fields = FIELDS + _LATER if len(parts) == len(FIELDS + _LATER) else FIELDS
    whole = len(parts) == len(fields) and _number(parts[0]) is not None
    return dict(zip(fields, parts, strict=True)) if whole else {}


def _is_program(parts: list[str]) -> bool:
    return len(parts) == len(PROCESS_FIELDS) and _number(parts[1]) is not None


def _number(text: str) -> int | None:
    """Return a whole number, None if it is none (``[N/A]``, ``[Insufficient Permissions]``)."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None
