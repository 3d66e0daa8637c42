"""What AMD's tools tell of the GPUs here, replayed from recorded answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.nvml_replay import RECORDINGS
from tests.plan.probe_cases import NOBODY, amd_said, rocm_smi
from tpplan.catalogue import MIB
from tpplan.devices_file import Link, LinkKind
from tpplan.errors import DeviceError
from tpplan.probe import amd
from tpplan.probe.report import NoDriverError

if TYPE_CHECKING:
    from pathlib import Path


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
        amd.read(text, {}, NOBODY)
    assert words in str(raised.value)


def test_rocm_smi_is_run_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program on the path is asked for JSON with every part that the report needs."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    rocm_smi(tmp_path, f'echo "$@" > "{tmp_path}/asked"; cat "{RECORDINGS}/amd_mi300x.json"')
    assert [d.name for d in amd.probe({}, NOBODY).devices] == ["MI300X", "MI300X"]
    asked = (tmp_path / "asked").read_text().split()
    assert {"--json", "--showmeminfo", "vram", "--showpids", "--showuniqueid"} <= set(asked)


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
    rocm_smi(tmp_path, script or "")
    if script is None:
        (tmp_path / "rocm-smi").write_text("#!/no/such/interpreter\n")
    with pytest.raises(error) as raised:
        amd.probe({}, NOBODY)
    assert words in str(raised.value)


def test_rocm_smi_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that does not answer is a clear error after the time allowed."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(amd, "SECONDS", 0.1)
    rocm_smi(tmp_path, "exec sleep 1000")
    with pytest.raises(DeviceError, match=r"rocm-smi did not answer within 0\.1 s"):
        amd.probe({}, NOBODY)
