"""What a GPU does with a kernel's Python source, done on the CPU: a greenlet for each lane, block after block."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from attrs import field, frozen
from numba import cuda
from numba.cuda import libdevice, types

from tests.intrinsics import doer
from tests.warps import LANES, ME, Block, Meeting, Turns, meet, shared_array, told
from tpplan.exec.gpu.exchange_table import MOST_WORDS
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch


class _Index:
    """Number of a thread or block, or how many there are."""

    def __init__(self, read: Callable[[], tuple[int, int]]) -> None:
        self._read = read

    @property
    def x(self) -> int:
        return self._read()[0]

    @property
    def y(self) -> int:
        return self._read()[1]


def _patches(allowed: Sequence[range]) -> Iterator[Any]:
    for name, read in {
        "threadIdx": lambda: (ME.thread, 0),
        "blockIdx": lambda: ME.block.number,
        "blockDim": lambda: (ME.block.size, 1),
        "gridDim": lambda: ME.block.count,
    }.items():
        yield patch.object(cuda, name, _Index(read))
    yield patch.object(cuda, "grid", lambda _: ME.block.number[0] * ME.block.size + ME.thread)
    yield patch.object(cuda, "gridsize", lambda _: ME.block.count[0] * ME.block.size)
    yield patch.object(cuda, "shared", SimpleNamespace(array=shared_array))
    yield patch.object(cuda, "syncthreads", meet)
    yield patch.object(cuda, "syncwarp", lambda: told(None))
    yield patch.object(cuda, "shfl_xor_sync", lambda _, value, bit: told(value)[ME.thread % LANES ^ bit])
    yield patch.object(libdevice, "expf", np.exp)
    yield patch.object(libdevice, "tanhf", np.tanh)
    yield patch.object(libdevice, "erff", lambda x: np.float32(math.erf(x)))
    yield patch.object(type(ptx.load_16), "__call__", doer(allowed))
    yield patch.object(type(types.uint64), "__call__", lambda self, value: getattr(np, self.name)(value))
    device = type(cuda.jit(device=True)(shared_array))
    yield patch.object(device, "__call__", lambda self, *values: self.py_func(*values))


def run(
    kernel: Kernel, blocks: int | tuple[int, int], threads: int, words: Sequence[int], allowed: Sequence[torch.Tensor]
) -> None:
    """Run a kernel.

    Args:
        kernel: of which what is asked here is known.
        blocks: how many, in one dimension or two; the last one comes first, as the first ones may wait for others.
        threads: of each, whole warps.
        words: that it is told, or that are in the array which it is told.
        allowed: what it may read and write, where it is in memory; all else fails.
    """
    count = (blocks, 1) if isinstance(blocks, int) else blocks
    with _patched(allowed):
        for number in reversed([*np.ndindex(count)]):
            turns = Turns()
            _run([_Work(kernel, Block(number, threads, count, turns), [words], Meeting(turns, threads))])


def run_together(
    kernels: Sequence[Kernel],
    threads: int,
    words: Sequence[Sequence[Sequence[int]]],
    allowed: Sequence[torch.Tensor],
    *,
    blocks: int = 1,
    slow: int | None = None,
) -> None:
    """Run blocks of a kernel on each of several devices at the same time, launch after launch.

    Args:
        kernels: one for each.
        threads: of a block, whole warps.
        words: that each is told, for every launch.
        allowed: what they may read and write.
        blocks: of each launch.
        slow: which device's lanes run seldom, if any one's.
    """
    turns, works = Turns(), []
    for i, (kernel, launches) in enumerate(zip(kernels, words, strict=True)):
        between = Meeting(turns, threads * blocks)
        for number in range(blocks):
            block = Block((number, 0), threads, (blocks, 1), turns)
            works.append(_Work(kernel, block, launches, between, slow=i == slow))
    with _patched(allowed):
        _run(works)


def _numbers(launches: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Return words as kernels have them."""
    return [[np.uint64(word) for word in words] for words in launches]


@frozen(eq=False)
class _Work:
    """What the threads of a block do.

    Attributes:
        kernel: that they run.
        block: of threads.
        launches: the words of each.
        between: where all threads of a device meet from launch to launch.
        slow: whether they run seldom.
    """

    kernel: Kernel
    block: Block
    launches: list[list[Any]] = field(converter=_numbers)
    between: Meeting
    slow: bool = False

    def run(self, thread: int) -> None:
        """Be one of the threads."""
        ME.__dict__ = {"block": self.block, "thread": thread, "arrays": 0, "met": 0, "polled": None, "copies": [[]]}
        with np.errstate(over="ignore"):  # numbers of messages wrap
            for i, words in enumerate(self.launches):
                if i:
                    self.between.wait()
                ME.words = words
                self.kernel.function(*words[: self.kernel.arguments])


@contextmanager
def _patched(allowed: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let kernels find lanes where they look for GPUs, and in memory what they may read and write."""
    ranges = [range(x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in allowed]
    with ExitStack() as stack:
        for each in _patches(ranges):
            stack.enter_context(each)
        yield


def _run(works: Sequence[_Work]) -> None:
    """Run blocks at the same time."""
    for work in works:
        count, block = work.kernel.arguments, work.block
        assert all(len(words) == (count if count > 1 else MOST_WORDS) for words in work.launches)
        for i in range(block.size):
            block.turns.add(partial(work.run, i), slow=work.slow)
    works[0].block.turns.run()
