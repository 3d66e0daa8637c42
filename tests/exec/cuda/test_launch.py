"""Launches of exchanges: what their kernels are told of the caller's tensors, and how many blocks go through them."""

from __future__ import annotations

import ctypes
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="needs cuda.core: pip install '.[cu13]'")

from cuda.bindings import driver

from tests.exec.cuda.test_encode_slots import SMALL
from tpplan.core.workspace import FRAME_BYTES, FRAME_SLOT_BYTES
from tpplan.errors import ExecutionError
from tpplan.exec.cuda import encode_frames, encode_slots, launch
from tpplan.exec.cuda.counters import Counters
from tpplan.exec.cuda.encode_slots import queues
from tpplan.exec.cuda.launch import Launch, Operands, Work
from tpplan.exec.memory.binding import Memory
from tpplan.exec.programs.lower import Route, lower
from tpplan.exec.programs.operation import scatter
from tpplan.exec.programs.program import HOST, INPUT, OUTPUT, Buffer, Exchange, Stream
from tpplan.exec.protocol.frames import LONGEST, THREADS
from tpplan.exec.protocol.words import BLOCKS, COUNTER_BYTES, DEADLINE, FIRST_OPERAND, MOST_WORDS, ROWS

X, OUT = Buffer(INPUT, 0), Buffer(OUTPUT, 0)


class Driver:
    """In the place of the driver: keeps what the last launch was given."""

    CUfunction, CUresult = driver.CUfunction, driver.CUresult

    def __init__(self, result: Any = driver.CUresult.CUDA_SUCCESS) -> None:
        self.result, self.words, self.shape, self.stream, self.kernel = result, [0], (0, 0), 0, 0

    def cuLaunchKernel(self, *given: Any) -> tuple[Any]:  # noqa: N802 (the driver's name)
        """Look at a launch as the driver does."""
        kernel, blocks, _, _, threads, _, _, _, self.stream, pointers, _ = given
        (address,) = (ctypes.c_void_p * 1).from_address(pointers)
        self.words = list((ctypes.c_uint64 * MOST_WORDS).from_address(address or 0))
        self.shape, self.kernel = (blocks, threads), int(kernel)
        return (self.result,)


def _work(*buffers: Buffer, row_bytes: int = 8) -> Work:
    return Work(Stream("own", 0), 20, (5, 6, 7), Operands(buffers, 0, 8), row_bytes)


def _launch(work: Work, blocks: int = BLOCKS) -> Launch:
    return Launch((1, 2), work, blocks, 256, {DEADLINE: 77})


def test_a_launch_gives_the_kernel_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the context and the table stay, those of the tensors are of each call."""
    monkeypatch.setattr(launch, "driver", fake := Driver())
    ready = _launch(_work(X, OUT))
    for rows in (1, 3):
        matrix = torch.zeros(rows, 8)
        ready.bind({X: matrix}, rows)(123)
        assert (fake.words[ROWS], fake.words[FIRST_OPERAND : FIRST_OPERAND + 2]) == (rows, [matrix.data_ptr(), 32])
        assert (fake.words[DEADLINE], fake.words[20:24], fake.stream) == (77, [5, 6, 7, 0], 123)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 2), (2, 4), (3, 6), (50, 100), (51, 100), (10**9, 100)])
def test_the_longest_step_and_the_gpu_set_the_blocks(rows: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of all threads of a block moves 2 KiB; there are as many as that takes, up to what has room."""
    monkeypatch.setattr(launch, "driver", fake := Driver())
    _launch(_work(row_bytes=4096), blocks=100).bind({}, rows)(0)
    assert fake.shape == (blocks, 256)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_a_frame_kernel_have_a_frame_each(seed: int) -> None:
    """As many as the longest row of a device takes for all rows, up to what has room; no block has nothing to do."""
    random = Random(seed)
    cuts = sorted(random.randrange(1, 3000) for _ in range(2))
    operation = scatter(0, ((0, 0, cuts[0]), (1, cuts[0], cuts[1]), (2, cuts[1], 3000)))
    rows, most = random.randrange(1, 2 ** random.randrange(1, 9)), random.randrange(1, 128)
    flags = {home: torch.zeros(256 * COUNTER_BYTES, dtype=torch.uint8) for home in (0, 1, 2, HOST)}
    memory = Memory({}, {}, lambda _: torch.zeros(1, FRAME_SLOT_BYTES, dtype=torch.uint8), flags)
    program = lower(operation, Route("host", framed=True))
    exchanges = [command for command in program.commands if isinstance(command, Exchange)]
    for work in encode_frames.prepare(exchanges, 2, memory, Counters(flags), most):
        longest = work.table[LONGEST - work.place]
        blocks, threads = Launch((1, 2), work, most, THREADS, {}).bind({}, rows).shape
        assert threads == THREADS
        assert blocks == most or blocks * FRAME_BYTES >= rows * longest
        assert (blocks - 1) * FRAME_BYTES < rows * longest


@pytest.mark.parametrize(("offset", "kernel"), [(0, 2), (8, 2), (4, 1), (1, 1)])
def test_aligned_operands_have_a_kernel_of_their_own(offset: int, kernel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is launched if every operand is at a multiple of what it moves at once."""
    monkeypatch.setattr(launch, "driver", fake := Driver())
    _launch(_work(X, OUT)).bind({X: _matrix(offset, 64, 64), OUT: _matrix(0, 64, 64)}, 3)(0)
    assert fake.kernel == kernel


def test_a_refused_launch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the device and what the driver says."""
    monkeypatch.setattr(launch, "driver", Driver(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY))
    ready = _launch(Work(Stream("own", 3), 20, (), Operands((), 0, 8), 8))
    with pytest.raises(ExecutionError, match=r"device 3 was not launched: CUDA_ERROR_OUT_OF_MEMORY"):
        ready.bind({}, 1)(0)


def _matrix(offset: int, pitch: int, width: int) -> torch.Tensor:
    """Return three rows of bytes whose first is so far behind a multiple of 64."""
    block = torch.zeros(3 * pitch + 128, dtype=torch.uint8)
    first = -block.data_ptr() % 64 + offset
    return block[first : first + 3 * pitch].view(3, pitch)[:, :width]


@pytest.mark.parametrize(
    ("offset", "pitch", "bits", "piece"),
    [(0, 64, 64, 16), (0, 72, 8, 8), (4, 64, 64, 4), (0, 64, 2, 2), (0, 33, 64, 1), (1, 64, 64, 1), (16, 48, 0, 16)],
)
def test_pieces_are_as_large_as_everything_is_aligned(offset: int, pitch: int, bits: int, piece: int) -> None:
    """Address, pitch, and where a row is read from, all count; slot kernels move 8 bytes at most, straight ones 16."""
    matrix, aligned = _matrix(offset, pitch, 32), _matrix(0, 64, 32)
    for largest in (8, 16):
        words = Operands((X, OUT), bits, largest).words({X: matrix, OUT: aligned})
        assert words == [min(piece, largest), matrix.data_ptr(), pitch, aligned.data_ptr(), 64]
        assert Operands((X, OUT), bits, largest).words({}) == [(bits | largest) & -(bits | largest), 0, 0, 0, 0]


def test_counters_have_places_of_their_own() -> None:
    """Each its own among those of its home, the same whenever it is asked for; when there is no room, an error."""
    flags = {home: torch.ones(5 * COUNTER_BYTES, dtype=torch.uint8) for home in (0, 1, HOST)}
    counters = Counters(flags)
    assert not any(bool(area.any()) for area in flags.values())
    names = [("messages", i) for i in range(3)]
    found = [counters.address(0, *name) for name in names]
    assert found == [counters.address(0, *name) for name in names]
    assert found == [
        flags[0].data_ptr() + COUNTER_BYTES * i for i in (2, 3, 4)
    ]  # behind those that no device waits for
    assert counters.address(HOST, "freed") == flags[HOST].data_ptr()
    assert (0, "messages", 1) in counters
    assert (1, "messages", 1) not in counters
    more = partial(counters.address, 0, "one more")
    with pytest.raises(ExecutionError, match="device 0 has no room for more than 5 counters"):
        more()


@pytest.mark.parametrize("name", SMALL)
def test_only_senders_through_the_host_keep_what_they_know(name: str) -> None:
    """Between peers the count itself is near its sender, and only its receiver writes it."""
    flags = {device: torch.zeros(64 * COUNTER_BYTES, dtype=torch.uint8) for device in (*range(6), HOST)}
    memory, counters = Memory({}, {}, lambda _: torch.zeros(1, dtype=torch.uint8)), Counters(flags)
    for exchange in SMALL[name].program.commands:
        device = exchange.stream.device
        for queue in queues(exchange) if isinstance(exchange, Exchange) else ():
            place = encode_slots._place(queue, device, memory, counters)
            knows = device == queue.sender and queue.place == HOST
            assert len(place.copies) == (len(place.freed) if knows else 0)
            first = flags[device].data_ptr()
            assert all(first <= address < first + 64 * COUNTER_BYTES for address in place.copies)
            assert not {*place.copies} & {*place.freed}
