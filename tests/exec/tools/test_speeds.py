"""Measuring GPUs where it cannot be done."""

from __future__ import annotations

import pytest
import torch

from tpplan.errors import ExecutionError
from tpplan.exec.tools.survey import speeds


def test_too_little_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the GPU, what torch asked for, and who may have the memory."""

    def full(place: torch.device) -> None:
        message = f"CUDA out of memory. Tried to allocate 2.00 GiB. {place} has a total capacity of 11.00 GiB."
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(speeds, "_gpu", full)
    with pytest.raises(
        ExecutionError, match=r"GPU 0 has too little free memory to be measured: .* 2\.00 GiB\n"
    ) as caught:
        speeds.measure()
    assert "tpplan devices lists them" in caught.value.hint
