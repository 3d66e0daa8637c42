"""What AMD's tools tell of the GPUs here, replayed from recorded answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.hardware.probe_cases import NOBODY, amd_said, install
from tests.nvml_replay import RECORDINGS
from tpplan.errors import DeviceError
from tpplan.hardware.catalogue import MIB
from tpplan.hardware.file import Link, LinkKind
from tpplan.hardware.probe import GpuProcess, amd, amd_smi, program, rocm_smi
from tpplan.hardware.probe.report import NoDriverError
from tpplan.hardware.probe.system_memory import SystemMemory

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30


def test_amd_gpus_of_a_desktop() -> None:
    """Cards are in HIP's order and told apart by memory where names are lumped; the processor's own is left out."""
    report = amd_said("amd_two")
    assert report.driver == "AMD 6.10.5"
    assert [(d.name, d.bus) for d in report.devices] == [
        ("RX 7900 XTX", "0000:0B:00.0"),
        ("RX 6800/6800 XT / 6900 XT", "0000:03:00.0"),
    ]
    xtx, rx6800 = report.devices
    assert (xtx.bandwidth_bytes_per_second, rx6800.bandwidth_bytes_per_second) == (960 * 10**9, 512 * 10**9)
    assert xtx.budget_bytes == (25753026560 - 1206349824) // MIB * MIB
    assert xtx.capability == ""
    assert report.links == (Link(first=0, second=1, kind=LinkKind.PCIE),)
    assert [(p.pid, p.name, p.used_bytes) for p in report.processes] == [
        (1168, "pt main thread", 512 * MIB),
        (99, "odd", 0),
        (3722, "test_ref", 0),
    ]
    assert {p.device for p in report.processes} == {-1}
    assert report.notes == ("card2 (Raphael) is left out: it has 64.00 MiB of its own",)
    assert [p.pid for p in amd_said("amd_two", own_pid=1168).processes] == [99, 3722]


def test_amd_accelerators_of_an_older_rocm() -> None:
    """The keys of older versions ("Card series") are read too, and xGMI links are."""
    report = amd_said("amd_mi300x")
    assert [(d.name, d.uuid) for d in report.devices] == [
        ("MI300X", "GPU-0aaaabbbbccccddd"),
        ("MI300X", "GPU-1aaaabbbbccccddd"),
    ]
    assert report.devices[0].bandwidth_bytes_per_second == 5300 * 10**9
    assert report.links == (Link(first=0, second=1, kind=LinkKind.XGMI),)
    assert report.processes == ()


def test_amd_smi_tells_the_same() -> None:
    """Names, memory, HIP's order, serial numbers, links and programs are read of amd-smi's answers."""
    report = amd_said("amd_smi_desktop", own_pid=99)
    xtx, r9700 = report.devices  # by node, not by number
    assert report.driver == "AMD Linuxversion6.14.0-36-generic"
    assert (xtx.name, xtx.uuid, xtx.bus) == ("RX 7900 XTX", "GPU-1C2D3E4F5A6B7C8D", "0000:0a:00.0")
    assert (r9700.name, r9700.memory_bytes, r9700.used_bytes) == ("AI PRO R9700", 32624 * MIB, 310 * MIB)
    assert (xtx.budget_bytes, xtx.bandwidth_bytes_per_second) == ((24560 - 1150) * MIB, 960 * 10**9)
    assert report.links == (Link(first=0, second=1, kind=LinkKind.PCIE),)
    assert report.processes == (GpuProcess(pid=4242, name="llama-server", device=0, used_bytes=512 * MIB),)
    pair = amd_said("amd_smi_mi300x")
    assert [(d.name, d.memory_bytes) for d in pair.devices] == [("MI300X", 196592 * MIB)] * 2
    assert pair.links == (Link(first=0, second=1, kind=LinkKind.XGMI),)
    chosen = amd_said("amd_smi_mi300x", {"ROCR_VISIBLE_DEVICES": "GPU-1aaaabbbbccccddd"})
    assert [d.bus for d in chosen.devices] == ["0000:26:00.0"]


@pytest.mark.parametrize(
    ("recording", "cards", "every"), [("amd_desktop_igpu", "0", "0,1"), ("amd_smi_desktop", "0,1", "0,1,2")]
)
def test_graphics_of_a_desktop_s_processor_is_no_second_gpu(recording: str, cards: str, every: str) -> None:
    """Beside a card it is left out, and the note says how to take it in, and how to hide it from programs as well."""
    report = amd_said(recording)
    assert report.devices[0].name == "RX 7900 XTX"
    assert len(report.devices) == len(cards.split(","))
    (note,) = report.notes
    assert "is left out: it is part of the processor" in note
    assert f"HIP_VISIBLE_DEVICES={every} takes it in, HIP_VISIBLE_DEVICES={cards} hides it" in note
    assert len(amd_said(recording, {"HIP_VISIBLE_DEVICES": every}).devices) == len(every.split(","))
    assert amd_said(recording, {"HIP_VISIBLE_DEVICES": cards}).devices == report.devices


@pytest.mark.parametrize(
    ("recording", "gtt", "used"), [("amd_strix_halo", 96 * 1024, 3072), ("amd_smi_strix_halo", 126976, 1100)]
)
def test_a_processor_with_nothing_but_its_graphics(recording: str, gtt: int, used: int) -> None:
    """Its memory is the system's that it may take, not the few GiB set aside, and never what the system needs."""
    report = amd_said(recording)
    (gpu,) = report.devices
    assert (gpu.name, gpu.memory_bytes, gpu.budget_bytes) == ("Strix Halo", gtt * MIB, (gtt - used) * MIB)
    assert gpu.bandwidth_bytes_per_second == 256 * 10**9
    (note,) = report.notes
    assert "(8060S Graphics) shares the system's memory, and may take" in note
    system = SystemMemory(124 * GIB, 60 * GIB)
    (gpu,) = amd_said(recording, system=system).devices
    assert gpu.budget_bytes == system.usable_bytes // MIB * MIB
    assert 57 * GIB < gpu.budget_bytes < 58 * GIB


def test_memory_set_aside_counts_where_it_is_more() -> None:
    """A Strix Halo with 96 GiB set aside and 15 GiB of the system's memory has 96 GiB, whatever the system has left."""
    card = {"Card Series": "Radeon 8060S Graphics", "GFX Version": "gfx1151", "Node ID": "1"}
    sizes = {"VRAM Total Memory (B)": 96 * GIB, "VRAM Total Used Memory (B)": GIB, "GTT Total Memory (B)": 15 * GIB}
    text = json.dumps({"card0": card | {key: str(size) for key, size in sizes.items()}})
    (gpu,) = rocm_smi.read(text, {}, NOBODY, SystemMemory(31 * GIB, 20 * GIB)).devices
    assert gpu.budget_bytes == 95 * GIB


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, ["RX 6800/6800 XT / 6900 XT"]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["RX 7900 XTX"]),
        ({"HIP_VISIBLE_DEVICES": "1,0", "CUDA_VISIBLE_DEVICES": "0"}, ["RX 6800/6800 XT / 6900 XT", "RX 7900 XTX"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["RX 6800/6800 XT / 6900 XT"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-9246aabbccddeeff"}, ["RX 6800/6800 XT / 6900 XT"]),
        ({"ROCR_VISIBLE_DEVICES": "1,GPU-1C2D"}, ["RX 6800/6800 XT / 6900 XT", "RX 7900 XTX"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, "HIP_VISIBLE_DEVICES is '1', which ends at '1'"),
        ({"HIP_VISIBLE_DEVICES": ""}, "HIP_VISIBLE_DEVICES is '': it hides all 2 GPUs"),
    ],
)
def test_amd_visible_devices(environ: dict[str, str], expected: list[str] | str) -> None:
    """ROCR_VISIBLE_DEVICES chooses first; of the rest HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES in its place."""
    if isinstance(expected, str):
        with pytest.raises(DeviceError) as raised:
            amd_said("amd_two", environ)
        assert expected in raised.value.message
    else:
        report = amd_said("amd_two", environ)
        assert [d.name for d in report.devices] == expected
        assert len(report.links) == len(expected) - 1


def test_amd_variables_cut_short_are_pointed_out() -> None:
    """An entry that names no GPU ends the list, and the report says so."""
    report = amd_said("amd_two", {"HIP_VISIBLE_DEVICES": "1,7,0"})
    assert [d.name for d in report.devices] == ["RX 6800/6800 XT / 6900 XT"]
    assert report.notes[-1] == "HIP_VISIBLE_DEVICES is '1,7,0': everything from '7' on is ignored"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "rocm-smi wrote no JSON: '{'"),
        ("[1]", "JSON that is not an object"),
        ("{" + " " * 5_000_000 + "}", "rocm-smi wrote 5000002 characters, expected at most 4194304"),
        ("{}", "rocm-smi shows no GPU to plan for"),
        ('{"card0": {"VRAM Total Memory (B)": "N/A"}}', "card0 (GPU) is left out: it does not tell its memory"),
        ('{"card0": 7, "system": []}', "rocm-smi shows no GPU to plan for"),
    ],
)
def test_strange_answers_of_rocm_smi(text: str, words: str) -> None:
    """Output that is cut, huge, of another shape or without a usable card is a DeviceError that says so."""
    with pytest.raises(DeviceError) as raised:
        rocm_smi.read(text, {}, NOBODY)
    assert words in str(raised.value)


@pytest.mark.parametrize("command", ["static", "metric", "list", "topology", "process"])
@pytest.mark.parametrize(
    "answer", ["{", "[1]", "7", '"x"', "null", '{"gpu_data": {}}', '[{"gpu": "0"}]', '[{"gpu": 0, "asic": "N/A"}]', ""]
)
def test_strange_answers_of_amd_smi(command: str, answer: str) -> None:
    """An answer that a report needs is missed with an error; without the others there is a report all the same."""
    recorded = json.loads((RECORDINGS / "amd_smi_mi300x.json").read_text())
    answers = {key: json.dumps(value) for key, value in recorded.items()} | {command: answer}
    if command == "metric" or (command == "static" and not answer.startswith("[")):
        with pytest.raises(DeviceError, match="amd-smi"):
            amd_smi.read(answers, {}, NOBODY)
    else:
        assert len(amd_smi.read(answers, {}, NOBODY).devices) == 2


def test_amd_smi_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its commands is run with --json; what a report can do without may fail."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for command, answer in json.loads((RECORDINGS / "amd_smi_desktop.json").read_text()).items():
        (tmp_path / f"{command}.json").write_text(json.dumps(answer))
    install(tmp_path, "exit 1")
    install(tmp_path, f'echo "$@" >> "{tmp_path}/asked"; cat "{tmp_path}/$1.json"', "amd-smi")
    assert len(amd.probe({}, NOBODY).links) == 1
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["static --json", "metric --mem-usage --json", "list --json", "topology --json", "process --json"]
    for command in ("list", "topology", "process"):
        (tmp_path / f"{command}.json").unlink()
    report = amd.probe({}, NOBODY)
    assert ([d.name for d in report.devices], report.links) == (["AI PRO R9700", "RX 7900 XTX"], ())


def test_rocm_smi_is_asked_where_amd_smi_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older program answers in its place, and a note has the reason; if both fail, amd-smi's error is told."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    install(tmp_path, "echo 'ImportError: no module named yaml' >&2; exit 1", "amd-smi")
    install(tmp_path, f'cat "{RECORDINGS}/amd_mi300x.json"')
    report = amd.probe({}, NOBODY)
    assert len(report.devices) == 2
    told = "amd-smi shows no GPU (exit 1): ImportError: no module named yaml"
    assert report.notes == (f"rocm-smi was asked, for amd-smi failed: AMD: {told}",)
    install(tmp_path, "exit 2")
    with pytest.raises(DeviceError, match="ImportError"):
        amd.probe({}, NOBODY)


def test_rocm_smi_is_run_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program on the path is asked for JSON with every part that the report needs."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    install(tmp_path, f'echo "$@" > "{tmp_path}/asked"; cat "{RECORDINGS}/amd_mi300x.json"')
    assert [d.name for d in amd.probe({}, NOBODY).devices] == ["MI300X", "MI300X"]
    asked = (tmp_path / "asked").read_text().split()
    assert {"--json", "--showmeminfo", "vram", "gtt", "--showpids", "--showuniqueid"} <= set(asked)


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("echo 'ERROR:root:Driver not initialized' >&2; exit 1", NoDriverError, "(exit 1): ERROR:root:Driver not"),
        ("printf '{\\377'", DeviceError, "rocm-smi wrote no JSON"),
        (None, DeviceError, "rocm-smi does not run: "),
    ],
)
def test_rocm_smi_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, error: type[DeviceError], words: str
) -> None:
    """A program that fails, cannot run or writes nonsense is a clear error."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    install(tmp_path, script or "")
    if script is None:
        (tmp_path / "rocm-smi").write_text("#!/no/such/interpreter\n")
    with pytest.raises(error) as raised:
        amd.probe({}, NOBODY)
    assert words in str(raised.value)


def test_rocm_smi_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that does not answer is a clear error after the time allowed."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(program, "SECONDS", 0.1)
    install(tmp_path, "exec sleep 1000")
    with pytest.raises(DeviceError, match=r"rocm-smi did not answer within 0\.1 s"):
        amd.probe({}, NOBODY)
