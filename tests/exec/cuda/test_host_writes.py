"""Writes into host memory by kernels: what is prepared, how it is counted, and when results are complete."""

from __future__ import annotations

import ctypes
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="needs cuda.core: pip install '.[cu13]'")

from cuda.bindings import driver

from tpplan.errors import ExecutionError
from tpplan.exec.cuda import host_writes, launch
from tpplan.exec.cuda.counters import Counters
from tpplan.exec.cuda.host_writes import LINE, HostWrites, HostWritesDone, writes_host_memory
from tpplan.exec.programs import lower
from tpplan.exec.programs.operation import allgather
from tpplan.exec.programs.program import HOST, INPUT, OUTPUT, Buffer, Program
from tpplan.exec.protocol.words import COUNTER_BYTES

GATHER = allgather("gather", ((0, 0, 5), (2, 5, 24)), (HOST,))
WHOLE = Buffer(OUTPUT, HOST)


class Driver:
    """In the place of the driver: runs a kernel when a test says so, as landing kernels work."""

    CUfunction, CUresult = driver.CUfunction, driver.CUresult

    def __init__(self) -> None:
        self.launched: list[tuple[int, list[int]]] = []  # stream, words
        self.blocks: list[int] = []
        self.pieces: list[int] = []

    def cuLaunchKernel(self, *given: Any) -> tuple[Any]:  # noqa: N802 (the driver's name)
        """Take the words of a launch."""
        _, blocks, _, _, _, _, _, _, stream, pointers, _ = given
        addresses = (ctypes.POINTER(ctypes.c_uint64) * 9).from_address(pointers)
        self.launched.append((stream, [address[0] for address in addresses]))
        self.blocks.append(blocks)
        return (driver.CUresult.CUDA_SUCCESS,)

    def finish(self, index: int = 0) -> None:
        """Do what was launched: copy piece by piece, count, and raise the flag."""
        _, words = self.launched.pop(index)
        target, pitch, source, source_pitch, rows, width, piece, counter, flag = words
        assert not any(value % piece for value in (target, pitch, source, source_pitch, width))
        self.pieces.append(piece)
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * source_pitch, width)
        count = ctypes.c_uint32.from_address(counter)
        count.value += 1
        ctypes.c_uint32.from_address(flag).value = count.value


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return what stands for the driver."""
    fake = Driver()
    monkeypatch.setattr(launch, "driver", fake)
    monkeypatch.setattr(host_writes, "driver", fake)
    return fake


class Devices:
    """Devices 0 and 2, with counters and flags."""

    def __init__(self, start: int = 0) -> None:
        self.areas = {d: torch.zeros(4 * COUNTER_BYTES, dtype=torch.uint8) for d in (0, 2)}
        self.flags = torch.zeros(2 * LINE, dtype=torch.int32)
        self.counters, self.check, self.busy = Counters(self.areas), Mock(), True
        self.host_writes = HostWrites((0, 2), self.flags, self.counters, self.check)
        self.host_writes.watch(lambda: self.busy)
        for d in self.areas:
            self.host_writes._counts[d] = start
            ctypes.c_uint32.from_address(self.counters.address(d, "landed")).value = start
        self.flags[:] = torch.tensor(start, dtype=torch.uint32).view(torch.int32)
        program = lower.local(GATHER, by_kernels=True)
        self.steps = self.host_writes.prepare(program, [1] * 2, 2)
        self.held: list[object] = []
        self.results = self.host_writes.results((0, 2))

    def gather(self, parts: list[torch.Tensor], whole: torch.Tensor) -> HostWritesDone:
        """Issue a gather."""
        operands = {Buffer(INPUT, 0): parts[0], Buffer(INPUT, 2): parts[1], WHOLE: whole}
        self.held.append(operands)
        for stream, step in enumerate(self.steps):
            step.bind(operands, whole.shape[0])(stream)
        return self.results()


def _noise(rows: int, columns: int, skip: int = 0, more: int = 0) -> torch.Tensor:
    """Return columns of a wider matrix."""
    held = torch.randint(-(2**15), 2**15, (rows, skip + columns + more), dtype=torch.int16)
    return held[:, skip : skip + columns]


def test_only_what_kernels_write_for_the_host_is_a_landing() -> None:
    """Copies of engines are none, nor is what kernels write for devices, nor nothing."""
    assert writes_host_memory(lower.local(GATHER, by_kernels=True))
    assert not writes_host_memory(lower.local(GATHER))
    assert not writes_host_memory(Program("nothing", ()))


@pytest.mark.parametrize("seed", range(40))
def test_columns_land_where_they_belong(seed: int, fake: Driver) -> None:
    """Of any rows, at any place in wider ones, in the largest pieces that everything allows."""
    random = Random(seed)
    rows, aligned = random.choice([1, 2, 7, 40]), seed % 2
    parts = [_noise(rows, n, *(0 if aligned else random.choice([0, 1, 4, 8]) for _ in "ab")) for n in (5, 19)]
    held = torch.zeros(rows, 32, dtype=torch.int16)
    whole = held[:, :24] if aligned else held[:, 3:27]
    devices = Devices()
    pending = devices.gather(parts, whole)
    assert [stream for stream, _ in fake.launched] == [0, 1]
    assert not pending.done()
    fake.finish(random.randrange(2))
    assert not pending.done()
    fake.finish()
    assert pending.done()
    pending.wait()
    assert torch.equal(whole, torch.cat(parts, dim=1))
    assert int(held.count_nonzero()) <= rows * 24
    devices.check.assert_called_once_with()


def test_results_come_one_after_the_other(fake: Driver) -> None:
    """The second gather is not there with the first, the first is with the second, and 32 bits are enough."""
    devices = Devices(2**32 - 2)
    parts, wholes = [_noise(2, 5), _noise(2, 19)], [torch.zeros(2, 24, dtype=torch.int16) for _ in range(4)]
    pending = [devices.gather(parts, whole) for whole in wholes]
    for count in range(4):
        assert [each.done() for each in pending] == [True] * count + [False] * (4 - count)
        assert [torch.equal(whole, torch.cat(parts, dim=1)) for whole in wholes] == [True] * count + [False] * (
            4 - count
        )
        fake.finish()
        fake.finish()
    pending[3].wait()
    pending[0].wait(0)


def test_the_first_launch_counts(fake: Driver) -> None:
    """A kernel that was launched on nothing, to be loaded, has raised the flag."""
    devices = Devices()
    devices.host_writes.nothing(0, 1)(7)
    fake.finish()
    pending = devices.gather([_noise(1, 5), _noise(1, 19)], torch.zeros(1, 24, dtype=torch.int16))
    fake.finish(1)
    assert not pending.done()
    fake.finish()
    assert pending.done()


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (2**14 // 10, 1), (2**14 // 10 + 1, 2), (2**17, 32)])
def test_more_bytes_get_more_blocks(rows: int, blocks: int, fake: Driver) -> None:
    """Each moves 16 KiB, and up to 32 of them more."""
    parts = [torch.zeros(rows, n, dtype=torch.int16) for n in (5, 19)]
    Devices().gather(parts, torch.zeros(rows, 24, dtype=torch.int16))
    assert fake.blocks[0] == blocks


def test_a_wait_ends_in_time(fake: Driver) -> None:
    """It is a TimeoutError that says how long; afterwards the result may be waited for again."""
    devices = Devices()
    pending = devices.gather([_noise(1, 5), _noise(1, 19)], torch.zeros(1, 24, dtype=torch.int16))
    for seconds in (0, 0.02):
        with pytest.raises(TimeoutError, match=f"not complete after {seconds} s"):
            pending.wait(seconds)
    fake.finish()
    fake.finish()
    pending.wait(0)


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_what_never_comes_is_an_error(timeout: float | None, fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where devices have nothing left to do, nobody waits for ever; as long as they have, everybody does."""
    monkeypatch.setattr(host_writes, "_LOOK_SECONDS", 0.0)
    devices = Devices()
    pending = devices.gather([_noise(1, 5), _noise(1, 19)], torch.zeros(1, 24, dtype=torch.int16))
    fake.finish()
    for _ in range(5):
        assert not pending.done()
    devices.busy = False
    with pytest.raises(ExecutionError, match="never arrived"):
        pending.wait(timeout)
    with pytest.raises(ExecutionError, match="never arrived"):
        pending.done()
    fake.finish()
    pending.wait(timeout)


def test_what_comes_while_devices_end_is_there(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that is raised between a look at it and a look at the devices is seen."""
    monkeypatch.setattr(host_writes, "_LOOK_SECONDS", 0.0)
    devices = Devices()
    pending = devices.gather([_noise(1, 5), _noise(1, 19)], torch.zeros(1, 24, dtype=torch.int16))
    assert not pending.done()

    def end() -> bool:
        while fake.launched:
            fake.finish()
        return False

    monkeypatch.setattr(pending, "_is_busy", end)
    assert pending.done()


def test_a_wait_tells_of_devices_that_waited_in_vain(fake: Driver) -> None:
    """What has arrived may be worth nothing."""
    devices = Devices()
    devices.check.side_effect = ExecutionError("a device waited for another one that never came")
    pending = devices.gather([_noise(1, 5), _noise(1, 19)], torch.zeros(1, 24, dtype=torch.int16))
    fake.finish()
    fake.finish()
    for timeout in (None, 1.0):
        with pytest.raises(ExecutionError, match="never came"):
            pending.wait(timeout)
