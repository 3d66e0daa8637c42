"""Which GPUs ``tpplan.exllamav2`` plans for if nobody names their memory."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.exllamav2.models import small_model
from tests.hardware.probe_cases import amd_said
from tests.nvml_replay import Replay
from tpplan.errors import DeviceError, ExecutionError
from tpplan.exllamav2 import TPContext, gpus
from tpplan.hardware.probe import amd, nvml

if TYPE_CHECKING:
    from collections.abc import Sequence

GIB = 2**30
SMALL, LARGE = "5a1f0c62-1111-2222-3333-444455556666", "5b90d7e3-7777-8888-9999-aaaabbbbcccc"


def _machine(
    monkeypatch: pytest.MonkeyPatch, uuids: Sequence[str], changes: dict[str, object] | None = None, env: str = ""
) -> None:
    """An RTX 3060 with 10.9 GiB free and an RTX 4090 with 21.6, by PCI bus; torch shows those of ``uuids``."""
    environ = {"CUDA_DEVICE_ORDER": env} if env else {}
    monkeypatch.setattr(gpus, "probe", lambda: nvml.read(Replay("nvidia_uneven", changes), environ, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(uuids))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i]))


@pytest.mark.parametrize("order", [(SMALL, LARGE), (LARGE, SMALL), (LARGE, "c0-ffee", SMALL.upper())])
def test_no_gpu_split_asks_the_gpus(monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...]) -> None:
    """None takes the GPUs of the machine with what is free on them, by the numbers that torch gives these GPUs."""
    _machine(monkeypatch, order)
    tp = TPContext(small_model(num_key_value_heads=6), None)
    small, large = ([uuid.casefold() for uuid in order].index(uuid) for uuid in (SMALL, LARGE))
    assert tp.all_devs == sorted([small, large])
    assert {device: b - a for device, a, b in tp.kv_split or ()} == {small: 2, large: 4}
    names = {device: planned.name for device, planned in zip(tp.all_devs, tp.plan.devices, strict=True)}
    assert names == {small: "RTX 3060", large: "RTX 4090"}


def test_a_gpu_that_is_left_out_moves_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU whose memory the driver does not tell has no part, a warning says so, and the next one keeps its number."""
    _machine(monkeypatch, (SMALL, LARGE), {"nvmlDeviceGetMemoryInfo(gpu0)": {"error": 3}})
    tp = TPContext(small_model(), None)
    assert (tp.kv_split, tp.all_devs, tp.num_devices) == ([(1, 0, 8)], [1], 2)
    assert [device.name for device in tp.plan.devices] == ["RTX 4090"]
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.WARNING,
        "GPU 0 (RTX 3060) is left out: NVML does not tell its memory",
    )


@pytest.mark.parametrize("uuids", [(LARGE,), (LARGE, ""), (LARGE, SMALL, SMALL), ("",), ("", "", "")])
def test_gpus_that_torch_does_not_tell_apart(monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, ...]) -> None:
    """Where torch does not show a GPU that was asked, or shows it twice, nothing is guessed."""
    _machine(monkeypatch, uuids, env="PCI_BUS_ID")
    with pytest.raises(DeviceError, match=r"RTX 3060 \(GPU-5a.*none of torch's \d GPUs\nhint: pass gpu_split"):
        TPContext(small_model(), None)


@pytest.mark.parametrize(
    ("uuids", "what"), [((), "torch shows no GPU"), (("", ""), "torch does not identify its 2 GPUs")]
)
def test_planned_by_the_driver_s_order(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, uuids: tuple[str, ...], what: str
) -> None:
    """Where torch shows no GPU, or tells none apart, they are numbered as the driver does, and a warning says so."""
    _machine(monkeypatch, uuids, env="PCI_BUS_ID")
    tp = TPContext(small_model(num_key_value_heads=6), None)
    assert tp.kv_split == [(0, 0, 2), (1, 2, 6)]
    names = f"RTX 3060 (GPU-{SMALL}), RTX 4090 (GPU-{LARGE})"
    assert caplog.messages == [f"{what}: they are numbered in the driver's order, {names}"]


def test_matched_by_pci_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs whose UUIDs differ between torch and the driver are the same if their PCI addresses are."""
    _machine(monkeypatch, ("aa", "bb"))
    buses = ((0, 0x21, 0), (0, 1, 0))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda i: SimpleNamespace(
            uuid="ab"[i], pci_domain_id=buses[i][0], pci_bus_id=buses[i][1], pci_device_id=buses[i][2]
        ),
    )
    tp = TPContext(small_model(num_key_value_heads=6), None)
    assert tp.kv_split == [(0, 0, 4), (1, 4, 6)]


def test_instances_of_a_gpu_are_not_matched_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """MIG instances share a PCI address, which therefore does not tell which of them torch shows."""
    _machine(monkeypatch, ("aa",))
    monkeypatch.setattr(
        gpus, "probe", lambda: nvml.read(Replay("nvidia_mig"), {"CUDA_VISIBLE_DEVICES": "MIG-c0,MIG-c1"}, 1)
    )
    one = SimpleNamespace(uuid="aa", pci_domain_id=0, pci_bus_id=7, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: one)
    with pytest.raises(DeviceError, match="which is none of torch's 1 GPUs"):
        TPContext(small_model(), None)


def test_own_tensors_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's report counts this process's memory as free; what its tensors take of it is not."""
    _machine(monkeypatch, (SMALL, LARGE))
    own = {0: 0, 1: 6 * GIB}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", own.get)
    for free, left in ((15 * GIB, (22143 - 6 * 1024) * 2**20), (20 * GIB, 20 * GIB), (30 * GIB, 22143 * 2**20)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 24 * GIB))
        tp = TPContext(small_model(), None)
        assert [device.budget_bytes for device in tp.plan.devices] == [11188 * 2**20, left]


@pytest.mark.parametrize(
    "uuids",
    [
        ("1aaaabbb-bccc-cddd", "0aaaabbb-bccc-cddd"),
        (
            "31616161-6162-6262-6263-636363646464",
            "30616161-6162-6262-6263-636363646464",
        ),  # of its letters, as HIP has it
    ],
)
def test_amd_s_gpus(monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, str]) -> None:
    """A torch for ROCm shows AMD's GPUs, which are planned for by its numbers, with what is free on them."""
    _machine(monkeypatch, uuids)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(amd, "probe", lambda *_: amd_said("amd_mi300x", {"HIP_VISIBLE_DEVICES": "0,1"}))
    tp = TPContext(small_model(), None)
    assert tp.kv_split == [(0, 0, 4), (1, 4, 8)]
    assert [device.name for device in tp.plan.devices] == ["MI300X"] * 2
    assert {device.budget_bytes for device in tp.plan.devices} == {(206141652992 - 303001600) // 2**20 * 2**20}
    with pytest.raises(ExecutionError, match=r"this torch is for AMD's GPUs \(ROCm\), and plans run on NVIDIA's"):
        tp.finalize()


def test_amd_s_gpus_beside_a_torch_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planning for AMD's GPUs needs no ROCm: their driver's order counts."""
    _machine(monkeypatch, ())
    monkeypatch.setattr(gpus, "probe", lambda: amd_said("amd_smi_mi300x"))
    tp = TPContext(small_model(), None)
    assert tp.num_devices == len(tp.plan.devices)
    assert "torch shows no GPU" in caplog.text


def test_no_gpu_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver, the error says what to pass."""

    def none() -> None:
        raise DeviceError("no GPU driver answers", "name them")

    monkeypatch.setattr(gpus, "probe", none)
    with pytest.raises(DeviceError, match=r"no GPU driver answers\nhint: pass gpu_split"):
        TPContext(small_model(), None)
