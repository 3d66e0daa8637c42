"""Which GPUs ``tpplan.exllamav2`` plans for if nobody names their memory."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.exllamav2.models import small_model
from tests.nvml_replay import Replay
from tpplan.errors import DeviceError
from tpplan.exllamav2 import TPContext, gpus
from tpplan.probe import nvml

if TYPE_CHECKING:
    from collections.abc import Sequence


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


@pytest.mark.parametrize("uuids", [(), (LARGE,), (LARGE, ""), (LARGE, SMALL, SMALL)])
def test_gpus_that_torch_does_not_tell_apart(monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, ...]) -> None:
    """Where torch does not show a GPU that was asked, or shows it twice, nothing is guessed."""
    _machine(monkeypatch, uuids, env="PCI_BUS_ID")
    with pytest.raises(DeviceError, match=r"RTX 3060 \(GPU-5a.*none of torch's \d GPUs\nhint: pass gpu_split"):
        TPContext(small_model(), None)


def test_no_gpu_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver, the error says what to pass."""

    def none() -> None:
        raise DeviceError("no GPU driver answers", "name them")

    monkeypatch.setattr(gpus, "probe", none)
    with pytest.raises(DeviceError, match=r"no GPU driver answers\nhint: pass gpu_split"):
        TPContext(small_model(), None)
