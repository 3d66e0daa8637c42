"""What ``nvidia-smi`` tells of the GPUs here where NVML cannot be asked, from its text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.hardware.probe_cases import NOBODY, install, nvidia_said
from tests.nvml_replay import Replay
from tpplan.core.missing import install_command
from tpplan.errors import DeviceError
from tpplan.hardware import probe
from tpplan.hardware.catalogue import MIB
from tpplan.hardware.probe import GpuProcess, nvidia, nvidia_gpus, nvidia_smi
from tpplan.hardware.probe.report import NoDriverError
from tpplan.hardware.probe.system_memory import SystemMemory

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.hardware.probe import DeviceReport

#: The machine of the recording ``nvidia_uneven``.
UNEVEN = (
    "0, GPU-5a1f0c62-1111-2222-3333-444455556666, NVIDIA GeForce RTX 3060, 00000000:01:00.0, 12288, 11188, 560.35.03, "
    "[N/A], 8.6\n"
    "1, GPU-5b90d7e3-7777-8888-9999-aaaabbbbcccc, NVIDIA GeForce RTX 4090, 00000000:21:00.0, 24564, 22143, 560.35.03, "
    "[N/A], 8.9\n"
)
PROGRAMS = """\
GPU-5a1f0c62-1111-2222-3333-444455556666, 4242, 700, /usr/bin/python3
GPU-5b90d7e3-7777-8888-9999-aaaabbbbcccc, 777, 2000, [Not Found]
GPU-5b90d7e3-7777-8888-9999-aaaabbbbcccc, 778, [N/A], C:\\a, b.exe
"""
LOST = "Unable to determine the device handle for GPU0000:21:00.0: Unknown Error\n"


def _said(
    gpu: str = UNEVEN,
    environ: dict[str, str] | None = None,
    own_pid: int = NOBODY,
    programs: str = "",
    system: SystemMemory | None = None,
) -> DeviceReport:
    return nvidia_smi.read({"gpu": gpu, "compute-apps": programs}, environ or {}, own_pid, system)


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "1,0"}, {"CUDA_VISIBLE_DEVICES": "GPU-5b"}])
def test_it_tells_the_same_as_nvml(environ: dict[str, str]) -> None:
    """Names, memory, capability, catalogued bandwidth, driver and the variables' choice are as NVML has them."""
    report, other = _said(environ=environ), nvidia_said("nvidia_uneven", environ)
    for gpu, expected in zip(report.devices, other.devices, strict=True):
        assert gpu == expected
    assert (report.driver, report.notes) == (other.driver, other.notes)
    assert report.links == ()


def test_programs_and_one_s_own() -> None:
    """Programs are listed by GPU, whatever is in their names; what the asking process holds counts as free."""
    report = _said(programs=PROGRAMS, own_pid=4242)
    assert [d.budget_bytes // MIB for d in report.devices] == [11188 + 700, 22143]
    assert report.processes == (
        GpuProcess(pid=777, name="", device=1, used_bytes=2000 * MIB),
        GpuProcess(pid=778, name="C:\\a, b.exe", device=1, used_bytes=0),
    )


@pytest.mark.parametrize(
    ("text", "names", "note"),
    [
        (UNEVEN.splitlines()[0] + "\n" + LOST, ["RTX 3060"], f"nvidia-smi says: {LOST.strip()}"),
        (UNEVEN.splitlines()[1], ["RTX 4090"], "GPU 0 is left out: nvidia-smi has no access to it"),
        (UNEVEN.replace("12288, 11188", "[N/A], [N/A]"), ["RTX 4090"], "nvidia-smi does not tell its memory"),
        (UNEVEN.replace("22143", "[Unknown Error]"), ["RTX 3060"], "nvidia-smi does not tell its memory"),
        (UNEVEN.replace("[N/A]", "Enabled", 1), ["RTX 4090"], "MIG is on, and nvidia-smi does not tell the memory"),
    ],
    ids=["lost", "missing", "silent", "silent by half", "MIG"],
)
def test_gpus_that_cannot_be_used(text: str, names: list[str], note: str) -> None:
    """A GPU that is lost, silent or cut into instances is left out with the reason; the others stay."""
    report = _said(text)
    assert [gpu.name for gpu in report.devices] == names
    assert note in "; ".join(report.notes)


def test_a_gpu_that_is_missing_keeps_its_number() -> None:
    """``CUDA_VISIBLE_DEVICES=1`` is the second GPU, though nothing is told of the first; naming the first ends it."""
    text = UNEVEN.splitlines()[1]
    assert [gpu.name for gpu in _said(text, {"CUDA_VISIBLE_DEVICES": "1"}).devices] == ["RTX 4090"]
    with pytest.raises(DeviceError, match="hides all 2 GPUs"):
        _said(text, {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_shared_memory() -> None:
    """A GB10, of which nvidia-smi tells no memory either, may take what the system can spare."""
    row = "0, GPU-1, NVIDIA GB10, 0000000F:01:00.0, [N/A], [N/A], 580.95.05, [N/A], 12.1\n"
    system = SystemMemory(120 * 2**30, 100 * 2**30)
    (gpu,) = _said(row, system=system).devices
    assert (gpu.name, gpu.budget_bytes) == ("GB10", system.usable_bytes // MIB * MIB)


def test_old_versions_tell_no_capability() -> None:
    """Without the fields that only newer versions know, everything else is told."""
    old = "".join(f"{line.rsplit(', ', 2)[0]}\n" for line in UNEVEN.splitlines())
    assert [(d.name, d.capability, d.budget_bytes // MIB) for d in _said(old).devices] == [
        ("RTX 3060", "", 11188),
        ("RTX 4090", "", 22143),
    ]


#: A program that answers as nvidia-smi does; with ``old`` in its place, one that does not know all fields.
SCRIPT = """case "$1" in
*compute_cap*{old}) echo 'Field "compute_cap" is not a valid field to query.'; echo; exit 2 ;;
--query-gpu=index,uuid,name,pci.bus_id,memory.total,memory.free,driver_version*) cat "$0.gpu" ;;
--query-compute-apps=gpu_uuid,pid,used_memory,process_name) cat "$0.programs" ;;
*) exit 9 ;;
esac"""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Have neither NVML's package nor AMD's programs, nor variables that hide GPUs; return the only folder for more."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("old", ["", "*"], ids=["never", "always"])
def test_it_is_asked_where_the_package_is_missing(alone: Path, old: str) -> None:
    """Without nvidia-ml-py, nvidia-smi is asked, in older fields if need be; a note says what that lacks, and why."""
    install(alone, SCRIPT.format(old=old or "never"), nvidia_smi.NAME)
    text = UNEVEN if not old else "".join(f"{line.rsplit(', ', 2)[0]}\n" for line in UNEVEN.splitlines())
    (alone / "nvidia-smi.gpu").write_text(text)
    (alone / "nvidia-smi.programs").write_text(PROGRAMS)
    report = probe.probe()
    assert [(d.name, d.budget_bytes // MIB) for d in report.devices] == [("RTX 3060", 11188), ("RTX 4090", 22143)]
    assert [p.pid for p in report.processes] == [4242, 777, 778]
    assert report.notes[-1] == (
        "nvidia-smi was asked, which tells neither links nor MIG instances, for the Python package nvidia-ml-py is not "
        f"installed; to ask NVIDIA's driver: {install_command('probe')}"
    )


def test_it_is_asked_where_nvml_does_not_start(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package does not find its library, nvidia-smi is asked; where NVML answers, it is not."""
    install(alone, SCRIPT.format(old="never"), nvidia_smi.NAME)
    (alone / "nvidia-smi.gpu").write_text(UNEVEN)
    (alone / "nvidia-smi.programs").write_text("")
    for start, asked in (({"error": Replay.NVML_ERROR_LIBRARY_NOT_FOUND}, True), (None, False)):
        monkeypatch.setitem(sys.modules, "pynvml", Replay("nvidia_uneven", {"nvmlInit()": start}))
        report = probe.probe()
        assert len(report.devices) == 2
        assert ("nvidia-smi was asked" in "; ".join(report.notes)) == asked


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'No devices were found'; exit 6", r"nvidia-smi shows no GPU \(exit 6\): No devices were found"),
        ("echo 'NVIDIA-SMI has failed.' >&2; exit 9", r"nvidia-smi shows no GPU \(exit 9\): NVIDIA-SMI has failed\."),
        ("exit 0", r"nvidia-smi shows no GPU \(exit 0\): "),
        (f"echo '{LOST.strip()}'; exit 15", r"\(exit 15\): Unable to determine"),
    ],
)
def test_a_program_that_shows_nothing(alone: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str) -> None:
    """Without a GPU to show, AMD is asked and the error says both; with a loaded driver, it is an error by itself."""
    install(alone, script, nvidia_smi.NAME)
    with pytest.raises(DeviceError, match=f"nvidia-ml-py is not installed; NVIDIA: .*{words}.*; AMD: there is neither"):
        probe.probe()
    with pytest.raises(NoDriverError):
        nvidia.probe({}, NOBODY)
    monkeypatch.setattr(nvidia_gpus, "DRIVER", alone)
    with pytest.raises(DeviceError, match=f"^NVIDIA's driver is here, .*; NVIDIA: .*{words}"):
        probe.probe()
