"""What NVIDIA's driver tells of the GPUs here, replayed from recorded answers, and which driver is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from typing import TYPE_CHECKING

import pytest

from tests.hardware.probe_cases import ERROR, NOBODY, amd_said, install, nvidia_said
from tests.nvml_replay import RECORDINGS, NVMLError, Replay
from tpplan.core.device import Device
from tpplan.core.missing import install_command
from tpplan.errors import DeviceError
from tpplan.files.codec import dumps
from tpplan.hardware import file as devices_file
from tpplan.hardware import probe
from tpplan.hardware.catalogue import MIB
from tpplan.hardware.file import Link, LinkKind, LinkPath, PeerAccess
from tpplan.hardware.probe import GpuProcess, nvidia_gpus, nvml, system_memory
from tpplan.hardware.probe.system_memory import SystemMemory
from tpplan.hardware.spec import parse_devices

if TYPE_CHECKING:
    from pathlib import Path


GIB = 2**30

#: Of a DGX Spark.
MEMINFO = """MemTotal:       127601664 kB
MemFree:        120315000 kB
MemAvailable:   126976000 kB
Buffers:          101272 kB
"""


def test_h200s_of_one_host() -> None:
    """Two equal GPUs: the catalogue's name and bandwidth, all that is free as budget, NVLink, no notes."""
    report = nvidia_said("nvidia_h200_x2")
    gpu = report.devices[1]
    assert report.driver == "NVIDIA 580.159.04"
    assert (gpu.name, gpu.capability, gpu.bus) == ("H200", "9.0", "00000000:00:07.0")
    assert (gpu.memory_bytes, gpu.used_bytes) == (143771 * MIB, 644939776)
    assert gpu.budget_bytes == (143771 - 616) * MIB
    assert (gpu.overhead_bytes, gpu.overhead_source[:17]) == (890 * MIB, "measured on H200s")
    assert (gpu.bandwidth_bytes_per_second, gpu.bandwidth_source) == (4800 * 10**9, "catalogue")
    link = Link(first=0, second=1, kind=LinkKind.NVLINK, path=LinkPath.HOST_BRIDGE, peer_access=PeerAccess.YES)
    assert report.links == (link,)
    assert not report.processes
    assert not report.notes


def test_uneven_gpus_with_other_programs_on_them() -> None:
    """Each GPU's budget is what others leave; they are listed once per GPU; the order of numbers is pointed out."""
    report = nvidia_said("nvidia_uneven")
    assert [(d.name, d.budget_bytes // MIB) for d in report.devices] == [("RTX 3060", 11188), ("RTX 4090", 22143)]
    assert report.processes == (
        GpuProcess(pid=4242, name="/usr/bin/python3", device=0, used_bytes=700 * MIB),
        GpuProcess(pid=1801, name="/usr/lib/xorg/Xorg", device=0, used_bytes=350 * MIB),
        GpuProcess(pid=777, name="", device=1, used_bytes=2000 * MIB),
    )
    link = Link(first=0, second=1, kind=LinkKind.PCIE, path=LinkPath.NUMA_NODE, peer_access=PeerAccess.NO)
    assert report.links == (link,)
    assert "CUDA puts the fastest first" in report.notes[0]
    assert nvidia_said("nvidia_uneven", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).notes == ()


def test_own_use_is_not_somebody_else_s() -> None:
    """What the asking process holds itself counts as free for it, and it is not listed among the others."""
    report = nvidia_said("nvidia_uneven", own_pid=777)
    assert report.devices[1].budget_bytes == (24564 - 2421 + 2000) * MIB
    assert [p.pid for p in report.processes] == [4242, 1801]


def test_a_full_gpu_keeps_a_budget_of_a_byte() -> None:
    """A GPU without a free MiB stays in the list, so that the others keep their numbers, with next to no budget."""
    memory = {"total": 12288 * MIB, "free": 0, "used": 12288 * MIB}
    report = nvidia_said("nvidia_uneven", new={"nvmlDeviceGetMemoryInfo(gpu0)": memory})
    assert [d.budget_bytes // MIB for d in report.devices] == [0, 22143]
    assert devices_file.loads(devices_file.dumps(probe.devices_file(report))).devices[0].budget_bytes == 1


def test_mig_instances_and_refused_permissions() -> None:
    """A GPU with MIG on is its instances; what the driver refuses to tell is unknown; what it hides is left out."""
    report = nvidia_said("nvidia_mig")
    assert [(d.name, d.uuid[:6], d.memory_bytes // MIB, d.capability) for d in report.devices] == [
        ("A100-SXM4-40GB MIG 3g.20gb", "MIG-c0", 19968, "8.0"),
        ("A100-SXM4-40GB MIG 1g.5gb", "MIG-c1", 4864, "8.0"),
        ("A100 40GB", "GPU-0b", 40960, "8.0"),
    ]
    assert [d.bandwidth_bytes_per_second for d in report.devices] == [0, 0, 1555 * 10**9]
    assert report.links == tuple(
        Link(first=i, second=2, kind=LinkKind.PCIE, path=LinkPath.SYSTEM, peer_access=PeerAccess.UNKNOWN)
        for i in (0, 1)
    )
    assert report.notes[:2] == (
        "GPU 2 is left out: NVML has no access to it",
        "a CUDA program can use only one MIG instance",
    )


def test_gpus_outside_the_catalogue_get_bandwidth_from_the_driver() -> None:
    """Without a catalogue entry, bandwidth is clock × 2 × bus width; memory use that Windows hides is 0."""
    report = nvidia_said("nvidia_laptop")
    gpu = report.devices[0]
    assert (gpu.name, gpu.bandwidth_source) == ("RTX 4090 Laptop GPU", "driver")
    assert gpu.bandwidth_bytes_per_second == 9001 * 10**6 * 2 * 256 // 8
    assert [(p.pid, p.used_bytes) for p in report.processes] == [(900, 0)]
    unknown = nvidia_said("nvidia_laptop", new={"nvmlDeviceGetMemoryBusWidth(gpu0)": ERROR}).devices[0]
    assert (unknown.bandwidth_bytes_per_second, unknown.bandwidth_source) == (0, "")


@pytest.mark.parametrize("recording", ["nvidia_h200_x2", "nvidia_uneven", "nvidia_laptop"])
def test_the_driver_s_own_numbers_agree_with_the_catalogue(recording: str) -> None:
    """Clock × 2 × bus width of a GPU in the catalogue is the catalogue's bandwidth within 1 %."""
    replay = Replay(recording)
    for i, gpu in enumerate(nvml.read(replay, {}, NOBODY).devices):
        width = replay.answers[f"nvmlDeviceGetMemoryBusWidth(gpu{i})"]
        clock = replay.answers[f"nvmlDeviceGetMaxClockInfo(gpu{i}, 2)"]
        assert gpu.bandwidth_bytes_per_second == pytest.approx(clock * 1e6 * 2 * width / 8, rel=0.01)


def test_a_gpu_without_memory_to_tell_is_left_out() -> None:
    """A GPU whose memory NVML does not tell cannot be planned for; if that leaves none, it is an error."""
    silent = {"nvmlDeviceGetMemoryInfo(gpu0)": ERROR}
    report = nvidia_said("nvidia_uneven", new=silent)
    assert [d.name for d in report.devices] == ["RTX 4090"]
    assert [p.device for p in report.processes] == [0]
    told = "GPU 0 (RTX 3060) is left out: NVML does not tell its memory"
    assert report.notes == (told,)
    with pytest.raises(
        DeviceError, match=r"leaves no GPU to plan for; GPU 0 .* NVML does not tell its memory"
    ) as raised:
        nvidia_said("nvidia_laptop", new=silent)
    assert raised.value.hint.endswith("for a GPU that shares the system's memory, name that: --gpus 119GiB")
    with pytest.raises(DeviceError) as raised:
        nvidia_said("nvidia_laptop", new=silent, system=SystemMemory(64 * GIB, 50 * GIB))
    assert raised.value.hint.endswith("--gpus 48GiB")


@pytest.mark.parametrize(("name", "gpu"), [("NVIDIA GB10", "GB10"), ("NVIDIA Thor", "Jetson AGX Thor")])
def test_a_gpu_that_shares_the_system_s_memory_takes_what_that_can_spare(name: str, gpu: str) -> None:
    """NVML tells no memory of such a GPU: it is the kernel's, of which what is available may be used, but a share."""
    system = system_memory.parse(MEMINFO)
    assert system == SystemMemory(127601664 * 2**10, 126976000 * 2**10)
    new = {"nvmlDeviceGetMemoryInfo(gpu0)": ERROR, "nvmlDeviceGetName(gpu0)": name}
    report = nvidia_said("nvidia_laptop", new=new, system=system)
    (device,) = report.devices
    assert (device.name, device.memory_bytes) == (gpu, system.total_bytes)
    assert device.budget_bytes == system.usable_bytes // MIB * MIB
    assert device.budget_bytes // GIB == 118
    assert (device.bandwidth_bytes_per_second, device.bandwidth_source) == (273 * 10**9, "catalogue")
    short = gpu if gpu == "GB10" else "Thor"
    assert report.notes == (f"GPU 0 ({short}) shares the system's memory, and may take 118.66 GiB of 121.69 GiB now",)
    with pytest.raises(DeviceError, match="does not tell its memory"):
        nvidia_said("nvidia_laptop", new=new)


@pytest.mark.parametrize(
    "text", ["", "MemTotal: 12 kB\n", "MemTotal:       0 kB\nMemAvailable:       0 kB\n", "\0" * 99]
)
def test_memory_that_the_kernel_does_not_tell(text: str) -> None:
    """What is not the kernel's file, or not all of it, tells nothing; a full machine has nothing to spare."""
    assert system_memory.parse(text) is None
    assert SystemMemory(8 * GIB, GIB).usable_bytes == 0


def test_asking_creates_no_context() -> None:
    """Only questions are asked of NVML, nothing that changes or uses a GPU."""
    replay = Replay("nvidia_uneven")
    nvml.read(replay, {}, NOBODY)
    assert {call[: len("nvmlDeviceGet")] for call in replay.asked} == {"nvmlDeviceGet", "nvmlSystemGet"}


def test_mig_without_instances() -> None:
    """A GPU with MIG on and no instance cannot be used, and the error says why nothing is left."""
    new = {"nvmlDeviceGetMigMode(gpu0)": [1, 1], "nvmlDeviceGetMaxMigDeviceCount(gpu0)": 0}
    with pytest.raises(DeviceError, match="GPU 0 is left out: MIG is on, but it has no instance"):
        nvidia_said("nvidia_laptop", new=new)


def test_a_link_that_nobody_knows_is_not_written() -> None:
    """Where NVML answers nothing of a pair, there is no link."""
    silent = {f"nvmlDeviceGetP2PStatus(gpu0, gpu1, {i})": ERROR for i in range(3)}
    silent["nvmlDeviceGetTopologyCommonAncestor(gpu0, gpu1)"] = ERROR
    assert not nvidia_said("nvidia_uneven", new=silent).links


def test_reports_are_plain_json() -> None:
    """A report can be written as a document, with the programs and serial numbers that the devices file leaves out."""
    data = json.loads(dumps(nvidia_said("nvidia_uneven")))
    assert data["devices"][1]["uuid"].startswith("GPU-5b")
    assert data["processes"][0] == {"pid": 4242, "name": "/usr/bin/python3", "device": 0, "used_bytes": 700 * MIB}
    assert data["links"][0]["kind"] == "pcie"


@pytest.fixture
def no_amd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave neither amd-smi nor rocm-smi on the path and no variable that hides GPUs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_amd")
def test_auto_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` gives the devices that the driver shows, each with what is free on it, and closes NVML."""
    replay = Replay("nvidia_uneven")
    monkeypatch.setitem(sys.modules, "pynvml", replay)
    rtx3060, rtx4090 = parse_devices("AUTO")
    assert rtx3060 == Device(
        name="RTX 3060",
        budget_bytes=11188 * MIB,
        overhead_bytes=890 * MIB,
        bandwidth_bytes_per_second=360 * 10**9,
        capability="8.6",
    )
    assert (rtx4090.name, rtx4090.budget_bytes) == ("RTX 4090", 22143 * MIB)
    assert replay.asked[0] == "nvmlInit()"
    assert replay.asked[-1] == "nvmlShutdown()"


@pytest.mark.usefixtures("no_amd")
@pytest.mark.parametrize("code", [Replay.NVML_ERROR_LIBRARY_NOT_FOUND, Replay.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver_of_either_vendor(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Without any driver there is one error that names both vendors and says how to go on without GPUs."""
    monkeypatch.setitem(sys.modules, "pynvml", Replay("nvidia_uneven", {"nvmlInit()": {"error": code}}))
    with pytest.raises(DeviceError) as raised:
        probe.probe()
    assert f"NVIDIA: NVML error {code}; AMD: there is neither amd-smi nor rocm-smi" in raised.value.message
    assert '--gpus "2x24GiB"' in raised.value.hint


@pytest.mark.usefixtures("no_amd")
def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvidia-ml-py the hint is the command that installs it."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(DeviceError) as raised:
        probe.probe()
    assert "nvidia-ml-py" in raised.value.message
    assert f"to ask NVIDIA's driver: {install_command('probe')}" in raised.value.hint


@pytest.mark.usefixtures("no_amd")
def test_missing_package_beside_a_driver_is_an_error_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where NVIDIA's driver runs, the missing package is the one thing that the error is about."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvidia_gpus, "DRIVER", tmp_path)
    with pytest.raises(
        DeviceError, match="NVIDIA's driver is here, but the Python package nvidia-ml-py is not"
    ) as raised:
        probe.probe()
    assert raised.value.hint.endswith(install_command("probe"))


@pytest.mark.usefixtures("no_amd")
@pytest.mark.parametrize("call", ["nvmlInit()", "nvmlDeviceGetCount()"])
def test_a_driver_in_trouble_is_not_a_missing_driver(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A driver that is there but fails is an error by itself; AMD is not asked instead."""
    monkeypatch.setitem(sys.modules, "pynvml", Replay("nvidia_uneven", {call: {"error": 18}}))
    with pytest.raises(DeviceError, match=r"^NVIDIA's driver .*: NVML error 18\nhint: see what nvidia-smi says"):
        probe.probe()


@pytest.mark.usefixtures("no_amd")
def test_amd_is_asked_where_nvidia_has_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with NVIDIA's driver and no NVIDIA GPU shows its AMD GPUs."""
    monkeypatch.setitem(sys.modules, "pynvml", Replay("nvidia_uneven", {"nvmlDeviceGetCount()": 0}))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    install(tmp_path, f'cat "{RECORDINGS}/amd_mi300x.json"')
    assert probe.probe().driver == "AMD 6.3.6"


@pytest.mark.parametrize("recording", sorted(path.stem for path in RECORDINGS.glob("*.json")))
def test_devices_files_keep_machines_private(recording: str) -> None:
    """The file made of a report can be read back, and holds no serial number, process, driver or bus address."""
    report = (nvidia_said if recording.startswith("nvidia") else amd_said)(recording)
    file = probe.devices_file(report)
    text = devices_file.dumps(file)
    assert devices_file.loads(text) == file
    assert [d.budget_bytes for d in file.to_devices()] == [d.budget_bytes for d in report.devices]
    private = [*(d.uuid for d in report.devices), *(d.bus for d in report.devices), report.driver]
    private += [p.name for p in report.processes]
    assert not [word for word in private if word and word in text]


def test_names_that_a_plan_would_refuse_are_cleaned() -> None:
    """Whatever a driver calls its GPU, the devices file made of it can be read."""
    for name in ("", "\x00\x1b[31m", "GPU " * 100, "NVIDIA "):
        report = nvidia_said("nvidia_laptop", new={"nvmlDeviceGetName(gpu0)": name})
        file = probe.devices_file(report)
        assert devices_file.loads(devices_file.dumps(file)) == file


def test_replay_speaks_as_pynvml_does() -> None:
    """The real package has every function that the recordings replay, under the same name, and the same error type."""
    pynvml = pytest.importorskip("pynvml")
    called = {
        call.partition("(")[0] for path in RECORDINGS.glob("nvidia*.json") for call in json.loads(path.read_text())
    }
    assert all(isinstance(getattr(pynvml, name), types.FunctionType) for name in called)
    assert pynvml.NVMLError(3).value == NVMLError(3).value == 3
    for name in ("NVML_ERROR_DRIVER_NOT_LOADED", "NVML_ERROR_LIBRARY_NOT_FOUND"):
        assert getattr(pynvml, name) == getattr(Replay, name)
    assert (pynvml.NVML_CLOCK_MEM, pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_STATUS_OK) == (2, 2, 0)


def test_parsing_names_loads_no_driver_package() -> None:
    """Reading a list of GPUs imports neither pynvml nor cattrs: every command that plans pays for what it imports."""
    code = (
        "import sys; from tpplan.hardware.spec import parse_devices; parse_devices('2xRTX4090,8GiB');"
        "print(sorted({'pynvml', 'cattrs', 'subprocess', 'torch', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"
