"""Sending to CUDA devices: what the driver is asked for moves the same bytes as tensors would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="needs cuda.core: pip install 'tpplan[cu13]'")

from cuda.bindings import runtime
from hypothesis import given
from hypothesis import strategies as st

from tests.exec.gpu.fake_driver import Runtime
from tpplan.errors import ExecutionError
from tpplan.weights import cuda
from tpplan.weights.cuda import CudaSender
from tpplan.weights.reads import Move
from tpplan.weights.staging import Sender


class Stream:
    """Stands for torch's, and counts who waits for it."""

    cuda_stream = 7

    def __init__(self, _: torch.device) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        """Be done."""
        self.waits += 1


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Return the streams that are made."""
    made: list[Stream] = []

    def make(device: torch.device) -> Stream:
        made.append(Stream(device))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", make)
    return made


@st.composite
def moves(draw: st.DrawFn) -> Move:
    """Any move within 1,000 bytes."""
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 50))
    steps = [draw(st.integers(width, 100)) for _ in range(2)]
    starts = [draw(st.integers(0, 100)) for _ in range(2)]
    return Move(0, starts[0], steps[0], starts[1], steps[1], width, rows)


@given(move=moves())
def test_a_device_gets_what_a_virtual_one_gets(move: Move) -> None:
    """Whole rows and columns of them, from and to anywhere, by one copy, and nothing beside them is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "runtime", fake := Runtime())
        buffer = torch.arange(1000).to(torch.uint8)
        mine, wanted = torch.zeros(2, 1000, dtype=torch.uint8)
        CudaSender(buffer, mine).send(move)
    Sender(buffer, wanted).send(move)
    assert torch.equal(mine, wanted)
    assert fake.copied == [(move.width, move.rows, Stream.cuda_stream)]


def test_who_was_sent_nothing_is_not_waited_for(streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait costs a call of the driver, and most reads are for few of the devices."""
    monkeypatch.setattr(cuda, "runtime", Runtime())
    sender = CudaSender(torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8))
    sender.wait()
    assert streams[0].waits == 0
    sender.send(Move(0, 0, 0, 0, 0, 8, 1))
    sender.wait()
    sender.wait()
    assert streams[0].waits == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_a_refused_copy_is_an_error(rows: int, streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the device and what the driver says; who waits then waits for what was sent before."""
    failure: Any = runtime.cudaError_t.cudaErrorIllegalAddress
    monkeypatch.setattr(cuda, "runtime", Runtime(failure))
    sender = CudaSender(torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ExecutionError, match=rf"a copy of {rows} x 4 bytes to cpu failed: cudaErrorIllegalAddress"):
        sender.send(Move(0, 0, 4, 0, 4, 4, rows))
    sender.wait()
    assert streams[0].waits == 1
