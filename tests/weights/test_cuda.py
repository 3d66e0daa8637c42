"""Sending to CUDA devices: what the driver is asked for moves the same bytes as tensors would."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="needs cuda.core: pip install '.[cu13]'")

from cuda.bindings import runtime
from hypothesis import given
from hypothesis import strategies as st

from tests.exec.cuda.fake_driver import Runtime
from tpplan.errors import ExecutionError
from tpplan.weights import cuda as weights_cuda
from tpplan.weights import staging
from tpplan.weights.cuda import CudaSender
from tpplan.weights.load import Reader
from tpplan.weights.reads import Move, Read
from tpplan.weights.staging import Sender

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


#: What torch says of a device, and how to look for the reason.
_FAILURE = "CUDA error: an illegal memory access was encountered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"


class Stream:
    """Stands for torch's, and counts who waits for it.

    Attributes:
        fails: whether the device does.
    """

    cuda_stream = 7
    fails = False

    def __init__(self, _: torch.device) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        """Be done."""
        self.waits += 1
        if self.fails:
            raise RuntimeError(_FAILURE)


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
        patch.setattr(weights_cuda, "runtime", fake := Runtime())
        buffer = torch.arange(1000).to(torch.uint8)
        mine, wanted = torch.zeros(2, 1000, dtype=torch.uint8)
        CudaSender(buffer, mine).send(move)
    Sender(buffer, wanted).send(move)
    assert torch.equal(mine, wanted)
    assert fake.copied == [(move.width, move.rows, Stream.cuda_stream)]


def test_who_was_sent_nothing_is_not_waited_for(streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait costs a call of the driver, and most reads are for few of the devices."""
    monkeypatch.setattr(weights_cuda, "runtime", Runtime())
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
    monkeypatch.setattr(weights_cuda, "runtime", Runtime(failure))
    sender = CudaSender(torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ExecutionError, match=rf"a copy of {rows} x 4 bytes to cpu failed: cudaErrorIllegalAddress"):
        sender.send(Move(0, 0, 4, 0, 4, 4, rows))
    sender.wait()
    assert streams[0].waits == 1


def test_a_device_that_fails_later_is_an_error(streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that only shows when somebody waits is one of tpplan's, and does not pass when asked again."""
    monkeypatch.setattr(weights_cuda, "runtime", Runtime())
    sender = CudaSender(torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8))
    sender.send(Move(0, 0, 0, 0, 0, 8, 1))
    streams[0].fails = True
    for _ in range(2):
        with pytest.raises(ExecutionError) as caught:
            sender.wait()
        assert caught.value.message == "copies to cpu failed: CUDA error: an illegal memory access was encountered"
        assert caught.value.hint


_READ = Read("bytes", 0, 8, [Move(device, 0, 0, 0, 0, 8, 1) for device in range(2)])


@contextmanager
def reading(directory: Path, fake: Runtime) -> Iterator[Reader]:
    """Read a file for two devices that are sent to as CUDA devices are."""
    (directory / "bytes").write_bytes(bytes(8))
    blocks = {device: torch.zeros(8, dtype=torch.uint8) for device in range(2)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_cuda, "runtime", fake)
        patch.setattr(staging, "Sender", CudaSender)
        with Reader(directory, blocks) as reader:
            yield reader


@pytest.mark.parametrize("times", [2, 3], ids=["at the end", "for a buffer to be free"])
def test_all_others_are_waited_for_when_a_device_fails(times: int, streams: list[Stream], tmp_path: Path) -> None:
    """The error comes wherever it shows, and no copy is on its way then: memory goes to others soon."""

    def read() -> None:
        with reading(tmp_path, Runtime()) as reader:
            for i in range(times):
                reader.run(_READ)
                streams[0].fails = i == 1

    with pytest.raises(ExecutionError, match="copies to cpu failed: CUDA error: an illegal memory access"):
        read()
    assert len(streams) == 4
    assert all(stream.waits for stream in streams)


def test_waiting_hides_no_error(streams: list[Stream], tmp_path: Path) -> None:
    """What the driver refuses is what a person reads, though the device fails those who wait for it, too."""

    def read(fake: Runtime) -> None:
        with reading(tmp_path, fake) as reader:
            reader.run(_READ)
            for stream in streams:
                stream.fails = True
            failure: Any = runtime.cudaError_t.cudaErrorIllegalAddress
            fake.result = failure
            reader.run(_READ)

    with pytest.raises(ExecutionError, match="a copy of 1 x 8 bytes to cpu failed: cudaErrorIllegalAddress"):
        read(Runtime())
    assert [stream.waits for stream in streams] == [1, 1, 1, 0]
