"""AMD's GPUs, asked of ``amd-smi``, which ROCm has since version 6 and alone in the newest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tpplan.errors import DeviceError
from tpplan.hardware.file import LinkKind
from tpplan.hardware.probe import amd_gpus, program
from tpplan.hardware.probe.report import DeviceReport, GpuProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tpplan.hardware.probe.system_memory import SystemMemory

NAME = "amd-smi"

#: What is asked, each with whether a report needs the answer.
QUESTIONS = {
    ("static",): True,
    ("metric", "--mem-usage"): True,
    ("list",): False,
    ("topology",): False,
    ("process",): False,
}

#: It writes MB for 2^20 bytes: 196592 of an MI300X with 192 GiB.
_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"([0-9]{1,18}) ?([A-Za-z]{1,3})")
_KINDS = {"XGMI": LinkKind.XGMI, "PCIE": LinkKind.PCIE}


def ask(path: str) -> dict[str, str]:
    """Return what ``amd-smi`` at a path answers to each command; see :func:`tpplan.hardware.probe.amd_gpus.run`."""
    until = program.deadline()
    answers = {}
    for arguments, needed in QUESTIONS.items():
        try:
            answers[arguments[0]] = amd_gpus.run(path, NAME, (*arguments, "--json"), until)
        except DeviceError:
            if needed:
                raise
    return answers


def read(
    answers: Mapping[str, str], environ: Mapping[str, str], own_pid: int, system: SystemMemory | None = None
) -> DeviceReport:
    """Return what ``amd-smi`` told of the GPUs that HIP would show to a program.

    Args:
        answers: its standard output by command: ``static`` and ``metric``, and if there are any ``list``, ``topology``
            and ``process``.
        environ: see :func:`tpplan.hardware.probe.amd_gpus.report`.
        own_pid: left out of the processes.
        system: memory of the machine, where it is known.

    Raises:
        DeviceError: the output is not what ``amd-smi`` writes, or no GPU is left.
        NoDriverError: it shows no GPU.
    """
    told: dict[int, dict[str, Any]] = {}
    for command, needed in ((arguments[0], needed) for arguments, needed in QUESTIONS.items()):
        try:
            for number, entry in _entries(answers.get(command, "[]")):
                told.setdefault(number, {})[command] = entry
        except DeviceError:
            if needed:
                raise
    cards = [_card(number, commands) for number, commands in told.items()]
    drivers = [_inner(commands, "static", "driver") for commands in told.values()]
    versions = [_text(driver, "version") or _text(driver, "driver_version") for driver in drivers]
    links = {
        (number, link["gpu"]): _KINDS[link["link_type"]]
        for number, commands in told.items()
        for link in _objects(_inner(commands, "topology").get("links"))
        if isinstance(link.get("gpu"), int) and link.get("link_type") in _KINDS
    }
    return amd_gpus.report(
        cards,
        NAME,
        environ,
        system,
        driver=next(filter(None, versions), ""),
        links=links,
        processes=[p for number, commands in told.items() for p in _processes(number, commands, own_pid)],
    )


def _entries(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each GPU in an answer, and what is told of it."""
    data = amd_gpus.parse(text, NAME)
    data = data.get("gpu_data") if isinstance(data, dict) else data  # since ROCm 7 the list is inside an object
    if not isinstance(data, list):
        raise DeviceError(f"{NAME} wrote JSON that is no list of GPUs", f"see what {NAME} itself says")
    for entry in _objects(data):
        if isinstance(number := entry.get("gpu"), int):
            yield number, entry


def _card(number: int, commands: dict[str, Any]) -> amd_gpus.Card:
    """Return what the answers tell of a card."""
    asic, memory = _inner(commands, "static", "asic"), _inner(commands, "metric", "mem_usage")
    kernel = _inner(commands, "list")
    product = _text(_inner(commands, "static", "board"), "product_name")
    bracket = re.search(
        r"\[(.+)\]", product
    )  # "Strix [Radeon 880M / 890M]", whose market name is "AMD Radeon Graphics"
    name = _text(asic, "market_name")
    target = _text(asic, "target_graphics_version")
    node = kernel.get("node_id")
    return amd_gpus.Card(
        key=f"GPU {number}",
        number=number,
        node=node if isinstance(node, int) else number,
        name=bracket[1] if bracket and name in {"", "AMD Radeon Graphics"} else name or product,
        unique=_text(asic, "asic_serial"),
        bus=_text(_inner(commands, "static", "bus"), "bdf") or _text(kernel, "bdf"),
        target=target if target.startswith("gfx") else "",
        vram=_size(memory.get("total_vram")),
        vram_used=_size(memory.get("used_vram")),
        gtt=_size(memory.get("total_gtt")),
        gtt_used=_size(memory.get("used_gtt")),
    )


def _processes(number: int, commands: dict[str, Any], own_pid: int) -> Iterator[GpuProcess]:
    """Yield the other programs on a card."""
    for item in _objects(_inner(commands, "process").get("process_list")):
        info = _inner(item, "process_info")
        pid, used = info.get("pid"), _inner(info, "memory_usage").get("vram_mem", info.get("mem_usage"))
        if isinstance(pid, int) and pid != own_pid:
            yield GpuProcess(pid=pid, name=_text(info, "name"), device=number, used_bytes=_size(used))


def _inner(data: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the object under some keys; an empty one if there is none, such as where ``N/A`` is told."""
    for key in keys:
        inner = data.get(key)
        data = inner if isinstance(inner, dict) else {}
    return data


def _objects(data: object) -> list[dict[str, Any]]:
    """Return the objects in a list."""
    return [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []


def _text(data: Mapping[str, Any], key: str) -> str:
    """Return a text; empty if there is none."""
    value = data.get(key)
    return value.strip() if isinstance(value, str) and value != "N/A" else ""


def _size(value: object) -> int:
    """Return the bytes that a value with a unit means; 0 if it tells none."""
    if isinstance(value, dict):
        value = f"{value.get('value')} {value.get('unit')}"
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    return int(match[1]) * _UNITS.get(match[2], 0) if match else 0
