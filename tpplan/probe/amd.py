"""AMD's GPUs, asked of ``rocm-smi``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from tpplan.devices_file import Link, LinkKind
from tpplan.errors import DeviceError
from tpplan.probe.report import DeviceReport, GpuProcess, NoDriverError, SeenGpu, plain_name, seen
from tpplan.probe.visible import select
from tpplan.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

_ASKED = ("id", "productname", "uniqueid", "bus", "pids", "driverversion", "topotype")
ARGUMENTS = (*(f"--show{what}" for what in _ASKED), "--showmeminfo", "vram", "--json")
SECONDS = 30
_LONGEST = 4 * 2**20
_TRY = "see what rocm-smi itself says"

#: Graphics inside a processor has a few hundred MiB set aside: nothing to plan for.
_SMALLEST = 2**30

_CARD = re.compile(r"card([0-9]{1,6})")
_PID = re.compile(r"PID *([0-9]{1,18})")
_LINK = re.compile(r"\(Topology\) Link type between DRM devices ([0-9]{1,6}) and ([0-9]{1,6})")
_KINDS = {"XGMI": LinkKind.XGMI, "PCIE": LinkKind.PCIE}

#: A process's values after its name: GPUs, video memory, SDMA, occupied units.
_PROCESS_VALUES = 4


def probe(environ: Mapping[str, str], own_pid: int) -> DeviceReport:
    """Ask ``rocm-smi`` on this machine; see :func:`read`.

    Raises:
        DeviceError: it fails, does not answer within 30 s, answers nonsense, or no GPU is left.
        NoDriverError: it is not installed or shows no GPU.
    """
    program = shutil.which("rocm-smi")
    if program is None:
        raise NoDriverError("AMD: there is no rocm-smi")
    try:
        done = subprocess.run(  # noqa: S603 - found on the path of whoever calls
            [program, *ARGUMENTS], capture_output=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"rocm-smi did not answer within {SECONDS} s", _TRY) from error
    except OSError as error:
        raise DeviceError(f"rocm-smi does not run: {error.strerror}", _TRY) from error
    text = done.stdout.decode(errors="replace")
    if "{" not in text:  # without an amdgpu driver it complains and may still exit with 0
        last = (done.stderr.decode(errors="replace") + text).strip().rpartition("\n")[2]
        raise NoDriverError(f"AMD: rocm-smi shows no GPU (exit {done.returncode}): {last.strip()[:200]}")
    return read(text, environ, own_pid)


def read(text: str, environ: Mapping[str, str], own_pid: int) -> DeviceReport:
    """Return what ``rocm-smi`` told of the GPUs that HIP would show to a program.

    Args:
        text: its standard output, warnings before the JSON included.
        environ: of the process, for ``ROCR_VISIBLE_DEVICES``, ``HIP_VISIBLE_DEVICES`` and ``CUDA_VISIBLE_DEVICES``.
        own_pid: left out of the processes.

    Raises:
        DeviceError: the output is not what ``rocm-smi`` writes, or no GPU is left.
        NoDriverError: it shows no GPU.
    """
    data = _parse(text)
    system = {key: value for key, value in data.get("system", {}).items() if isinstance(value, str)}
    notes: list[str] = []
    found: list[tuple[int, int, SeenGpu]] = []  # node, card
    for key, card in data.items():
        if match := _CARD.fullmatch(key):
            values = {name.casefold(): str(value).strip() for name, value in card.items()}
            if gpu := _device(key, values, notes):
                found.append((_number(values.get("node id", "")), int(match[1]), gpu))
    if not found:
        raise NoDriverError(f"AMD: {'; '.join(['rocm-smi shows no GPU to plan for', *notes])}")
    found.sort(key=lambda item: item[:2])  # HIP numbers GPUs by their node
    chosen = _visible([(card, gpu) for _, card, gpu in found], environ, notes)
    index = {card: i for i, (card, _) in enumerate(chosen)}
    return DeviceReport(
        driver=f"AMD {system.get('Driver version', '')}".strip(),
        devices=tuple(gpu for _, gpu in chosen),
        links=_links(system, index),
        processes=_processes(system, own_pid),
        notes=tuple(notes),
    )


def _parse(text: str) -> dict[str, dict[str, Any]]:
    """Return the JSON object in the output, which warnings may precede."""
    if len(text) > _LONGEST:
        raise DeviceError(f"rocm-smi wrote {len(text)} characters, expected at most {_LONGEST}", _TRY)
    try:
        data = json.loads(text[max(0, text.find("{")) :])
    except (ValueError, RecursionError) as error:
        raise DeviceError(f"rocm-smi wrote no JSON: {text.strip()[:80]!r}", _TRY) from error
    if not isinstance(data, dict):
        raise DeviceError("rocm-smi wrote JSON that is not an object", _TRY)
    return {key: value for key, value in data.items() if isinstance(value, dict)}


def _number(text: str) -> int:
    """Return a whole number that ``rocm-smi`` wrote as text, 0 if it is none (``N/A``, ``unknown``)."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else 0


def _device(key: str, values: Mapping[str, str], notes: list[str]) -> SeenGpu | None:
    """Return one card's part of the report, unless nobody can plan with it."""
    series = values.get("card series") or values.get("device name") or ""
    name = re.sub(r".*\[(.+)\].*", r"\1", series)  # "Navi 21 [Radeon RX 6800/6800 XT / 6900 XT]"
    memory = _number(values.get("vram total memory (b)", ""))
    if memory < _SMALLEST:
        tells = f"has {format_bytes(memory)} of its own" if memory else "does not tell its memory"
        notes.append(f"{key} ({plain_name(name)}) is left out: it {tells}")
        return None
    unique = values.get("unique id", "")
    return seen(
        name=name,
        uuid=f"GPU-{unique[2:]}" if unique.startswith("0x") else "",
        bus=values.get("pci bus", ""),
        memory=memory,
        used=_number(values.get("vram total used memory (b)", "")),
    )


def _visible(
    gpus: list[tuple[int, SeenGpu]], environ: Mapping[str, str], notes: list[str]
) -> list[tuple[int, SeenGpu]]:
    """Return the cards that the variables show: ROCm's runtime chooses, then HIP of what is left."""
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environ else "CUDA_VISIBLE_DEVICES"
    for variable in ("ROCR_VISIBLE_DEVICES", hip):
        if variable not in environ:
            continue
        value = environ[variable]
        named = {gpu.uuid: (card, gpu) for card, gpu in gpus if gpu.uuid}
        chosen, ended = select(value, gpus, named, mixed=True)
        if not chosen:
            reason = f", which ends at {ended}" if value.strip() else ""
            hint = "unset it, or write ordinals such as 0,1"
            raise DeviceError(f"{variable} is {value[:60]!r}{reason}: it hides all {len(gpus)} GPUs", hint)
        if ended:
            notes.append(f"{variable} is {value[:60]!r}: everything from {ended} on is ignored")
        gpus = chosen
    return gpus


def _links(system: Mapping[str, str], index: Mapping[int, int]) -> tuple[Link, ...]:
    """Return the connections of the cards in the report."""
    links = {}
    for key, value in system.items():
        if (match := _LINK.fullmatch(key)) and value in _KINDS:
            pair = sorted(index.get(int(card), -1) for card in match.groups())
            if -1 < pair[0] < pair[1]:
                links[pair[0], pair[1]] = Link(first=pair[0], second=pair[1], kind=_KINDS[value])
    return tuple(links[pair] for pair in sorted(links))


def _processes(system: Mapping[str, str], own_pid: int) -> tuple[GpuProcess, ...]:
    """Return the programs that compute on some card (``rocm-smi`` does not say on which), the largest first."""
    found = []
    for key, value in system.items():
        match = _PID.fullmatch(key)
        words = value.split(", ")  # it also writes the blanks in a name as ", "
        if match and int(match[1]) != own_pid and len(words) > _PROCESS_VALUES:
            name, used = " ".join(words[:-_PROCESS_VALUES]), _number(words[-_PROCESS_VALUES + 1])
            found.append(GpuProcess(pid=int(match[1]), name=name, device=-1, used_bytes=used))
    return tuple(sorted(found, key=lambda p: (-p.used_bytes, p.pid)))
