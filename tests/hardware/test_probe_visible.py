"""Which GPUs the variables of CUDA show, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hardware.probe_cases import nvidia_said
from tpplan.errors import DeviceError
from tpplan.hardware.file import Link, LinkKind, LinkPath, PeerAccess
from tpplan.hardware.probe.visible import select

# What CUDA itself showed (cuDeviceGetCount and cuDeviceGetUuid, driver 580) on the two GPUs of nvidia_h200_x2.
SHOWN = {
    "": [],
    "0": [0],
    "1": [1],
    "1,0": [1, 0],
    "0,0": [],
    "1,0,1": [],
    "-1": [],
    "0,-1,1": [0],
    "0,7,1": [0],
    "7": [],
    " 1 , 0": [1, 0],
    "1x,0x": [1, 0],
    "+1": [1],
    "x": [],
    "0,,1": [0],
    "01": [1],
    "0 1": [0],
    "GPU-ed000000-1111-2222-3333-444455556666": [1],
    "GPU-ed,GPU-b9": [1, 0],
    "GPU-ED000000": [1],
    "gpu-ed000000": [],
    "GPU-ed,GPU-ed0": [],
    "GPU-": [],
    "GPU-zz": [],
    "0,GPU-ed": [0],
    "GPU-ed,0": [1],
    "MIG-GPU-b9000000-1111-2222-3333-444455556666": [],
}


@pytest.mark.parametrize(("value", "expected"), SHOWN.items())
def test_cuda_visible_devices_shows_what_cuda_shows(value: str, expected: list[int]) -> None:
    """Every form of the variable leaves the same GPUs in the same order as CUDA; a list cut short is pointed out."""
    environ = {"CUDA_VISIBLE_DEVICES": value}
    if not expected:
        with pytest.raises(DeviceError, match=r"CUDA_VISIBLE_DEVICES is .*it hides all 2 GPUs") as raised:
            nvidia_said("nvidia_h200_x2", environ)
        assert "unset it" in raised.value.hint
        return
    report = nvidia_said("nvidia_h200_x2", environ)
    every = nvidia_said("nvidia_h200_x2").devices
    assert report.devices == tuple(every[i] for i in expected)
    entries = value.count(",") + 1
    assert any("CUDA ignores everything from" in note for note in report.notes) == (entries > len(expected))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("MIG-c1000000-1111-5222-8333-444455556666", ["MIG-c1"]),
        ("MIG-c1,MIG-c0", ["MIG-c1", "MIG-c0"]),
        ("MIG-c,MIG-c0", None),
        ("0,1", ["MIG-c0", "GPU-0b"]),
        ("GPU-0a", ["MIG-c0"]),
        ("1,2,0", ["GPU-0b"]),
        ("2", None),
    ],
)
def test_cuda_visible_devices_with_mig(value: str, expected: list[str] | None) -> None:
    """Instances go by UUID; a GPU with MIG stands for its first instance; one without access keeps its number."""
    environ = {"CUDA_VISIBLE_DEVICES": value}
    if expected is None:
        with pytest.raises(DeviceError, match="hides all 3 GPUs"):
            nvidia_said("nvidia_mig", environ)
    else:
        assert [d.uuid[:6] for d in nvidia_said("nvidia_mig", environ).devices] == expected


def test_links_and_processes_follow_the_chosen_order() -> None:
    """Indices of links and processes are of the report's devices, not of the machine's."""
    environ = {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    switch = {"nvmlDeviceGetTopologyCommonAncestor(gpu0, gpu1)": 10}
    nvlink = {f"nvmlDeviceGetP2PStatus(gpu0, gpu1, {i})": 0 for i in range(3)}
    report = nvidia_said("nvidia_uneven", environ, new=switch | nvlink)
    assert [d.name for d in report.devices] == ["RTX 4090", "RTX 3060"]
    assert [(p.pid, p.device) for p in report.processes] == [(777, 0), (4242, 1), (1801, 1)]
    link = Link(first=0, second=1, kind=LinkKind.NVLINK, path=LinkPath.SWITCH, peer_access=PeerAccess.YES)
    assert report.links == (link,)


@given(st.text(alphabet="0123-+,GPUMIabcx ", max_size=30))
def test_any_variable_chooses_each_gpu_once(value: str) -> None:
    """Whatever the variable says, no GPU is chosen twice and none that does not exist."""
    chosen, ended = select(value, ["a", "b", "c"], {"GPU-abc": "a", "GPU-abx": "b", "MIG-c": "c"})
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= {"a", "b", "c"}
    assert ended or len(chosen) == value.count(",") + 1
