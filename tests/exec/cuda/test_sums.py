"""Prepared sums: what their kernels are told of the matrices, and how many blocks go through them."""

from __future__ import annotations

import ctypes
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="needs cuda.core: pip install '.[cu13]'")

from cuda.bindings import driver

from tpplan.errors import ExecutionError
from tpplan.exec.cuda import launch
from tpplan.exec.cuda.sums import Addition, prepare
from tpplan.exec.memory.binding import Memory, no_memory
from tpplan.exec.programs.fence import own
from tpplan.exec.programs.program import EXCHANGE, INPUT, OUTPUT, RESIDUAL, Buffer, Sum, View
from tpplan.exec.toolchain import kernel_cache
from tpplan.exec.toolchain.kernel_cache import MOST_SOURCES

X, MORE, OUT = Buffer(INPUT, 0), Buffer(RESIDUAL, 0), Buffer(OUTPUT, 0)
_ARGUMENTS = 6 + 2 * MOST_SOURCES


class Driver:
    """In the place of the driver: keeps what the last launch was given."""

    CUfunction, CUresult = driver.CUfunction, driver.CUresult

    def __init__(self, result: Any = driver.CUresult.CUDA_SUCCESS) -> None:
        self.result, self.words, self.blocks, self.stream = result, [0], 0, 0

    def cuLaunchKernel(self, *given: Any) -> tuple[Any]:  # noqa: N802 (the driver's name)
        """Read every argument from where its pointer says."""
        _, self.blocks, _, _, threads, _, _, _, self.stream, pointers, _ = given
        assert threads == 256
        addresses = (ctypes.c_void_p * _ARGUMENTS).from_address(pointers)
        self.words = [ctypes.c_uint64.from_address(address or 0).value for address in addresses]
        return (self.result,)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return what stands for the driver."""
    monkeypatch.setattr(launch, "driver", fake := Driver())
    return fake


def _matrix(offset: int, pitch: int) -> torch.Tensor:
    """Return three rows of 64 bytes whose first is so far behind a multiple of 64."""
    block = torch.zeros(3 * pitch + 128, dtype=torch.uint8)
    first = -block.data_ptr() % 64 + offset
    return block[first : first + 3 * pitch].view(torch.float16).view(3, -1)[:, :32]


def test_a_kernel_gets_addresses_and_pitches(fake: Driver) -> None:
    """Of the columns and rows that are meant, in the caller's tensors and in the context's memory; then zeros."""
    exchange = torch.zeros(4096, dtype=torch.uint8)
    views = View(X, 8, 16, 1, 3), View(Buffer(EXCHANGE, 0, 1, 2), 0, 8, 1, 3, 8), View(MORE, 16, 24, 1, 3)
    step = Sum(own(0), views, View(OUT, 8, 16, 1, 3))
    x, more, out = _matrix(0, 64), _matrix(0, 80), _matrix(0, 96)
    ready = Addition(1, step, Memory({0: exchange}, {}, Mock()), torch.float16)
    for _ in range(2):
        ready.bind({X: x, MORE: more, OUT: out}, 3)(123)
        places = [x.data_ptr() + 64 + 16, 64, exchange.data_ptr() + 2048, 16, more.data_ptr() + 80 + 32, 80]
        assert fake.words == [out.data_ptr() + 96 + 16, 96, 1, 16, 1, 3, *places] + [0] * (2 * MOST_SOURCES - 6)
        assert (fake.stream, fake.blocks) == (123, 1)
        fake.words = []
    ready.bind({X: x, MORE: more, OUT: out}, 1)(123)  # of which the second of three parts has nothing
    assert not fake.words


@pytest.mark.parametrize(("offset", "pitch", "vectors"), [(0, 64, 1), (16, 80, 1), (2, 64, 0), (0, 68, 0), (8, 64, 0)])
def test_vectors_are_for_what_is_aligned(offset: int, pitch: int, vectors: int, fake: Driver) -> None:
    """Addresses and pitches of all matrices count."""
    step = Sum(own(0), (View(X, 0, 32), View(MORE, 0, 32)), View(OUT, 0, 32))
    ready = Addition(1, step, no_memory(), torch.float16)
    odd, even = _matrix(offset, pitch), _matrix(0, 64)
    for matrices in ((odd, even, even), (even, odd, even), (even, even, odd)):
        ready.bind(dict(zip((X, MORE, OUT), matrices, strict=True)), 3)(0)
        assert fake.words[4] == vectors


@pytest.mark.parametrize(("columns", "rows", "blocks"), [(8, 1, 1), (2048, 1, 1), (2056, 1, 2), (2048, 999, 264)])
def test_all_threads_have_something_to_add(columns: int, rows: int, blocks: int, fake: Driver) -> None:
    """A thread adds up vectors of 16 bytes, as far as the GPU has room for blocks of them."""
    step = Sum(own(0), (View(X, 0, columns),), View(X, 0, columns))
    x = torch.zeros(rows, columns, dtype=torch.bfloat16)
    Addition(1, step, no_memory(), x.dtype).bind({X: x}, rows)(0)
    assert fake.blocks == blocks


def test_a_refused_launch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the device and what the driver says."""
    monkeypatch.setattr(launch, "driver", Driver(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY))
    step = Sum(own(3), (View(X, 0, 4),), View(X, 0, 4))
    ready = Addition(1, step, no_memory(), torch.float32)
    with pytest.raises(ExecutionError, match="a sum of device 3 was not launched: CUDA_ERROR_OUT_OF_MEMORY"):
        ready.bind({X: torch.zeros(1, 4)}, 1)(0)


def test_a_kernel_is_that_of_dtype_and_device(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for the device's compute capability."""
    kernels = {("sum_f32", (8, 0)): 5, ("sum_bf16", (8, 0)): 6, ("sum_bf16", (9, 0)): 7}
    monkeypatch.setattr(kernel_cache, "load", lambda *of: kernels[of])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8 + device.index, 0))
    step = Sum(own(0), (View(X, 0, 4),), View(X, 0, 4))
    launched = []
    for dtype, index in ((torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 1)):
        addition = prepare(step, no_memory(), dtype, torch.device("cuda", index))
        launched.append(int(addition.bind({X: torch.zeros(1, 4, dtype=dtype)}, 1).kernel))  # type: ignore[attr-defined]
    assert launched == [5, 6, 7]
