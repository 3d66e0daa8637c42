"""What a GPU does with a kernel's Python source, done on the CPU: a greenlet for each lane, block after block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import field, frozen

from tests.sources import Sources
from tests.warps import ME, Block, Meeting, Turns
from tpplan.exec.kernels.kernel import Kernel
from tpplan.exec.protocol.words import MOST_WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(  # noqa: PLR0917
    kernel: Kernel,
    blocks: int | tuple[int, int] | tuple[int, int, int],
    threads: int,
    words: Sequence[int],
    allowed: Sequence[torch.Tensor],
    shared: int = 0,
    written: Sequence[torch.Tensor] = (),
) -> None:
    """Run a kernel.

    Args:
        kernel: of which what is asked here is known.
        blocks: how many, in up to three dimensions; the last one comes first, as the first ones may wait for others.
        threads: of each, whole warps.
        words: that it is told, or that are in the array which it is told.
        allowed: what it may read and write, where it is in memory; all else fails.
        shared: bytes of shared memory besides its own arrays.
        written: what the kernel before writes, which is NaN until all threads of a block wait for its end; all do then.
    """
    values = [each.clone() for each in written]

    def write() -> None:
        for to, value in zip(written, values, strict=True):
            to.copy_(value)

    x, y, z, *_ = (blocks, 1, 1) if isinstance(blocks, int) else (*blocks, 1)
    count, function = (x, y, z), _sources(allowed).function(kernel.function)
    for number in reversed([(*each,) for each in np.ndindex(*count)]):
        turns = Turns()
        block = Block(number, threads, count, turns, shared, write if written else None)
        for each in written:
            each.fill_(torch.nan)
        _run([_Work(kernel, function, block, [words], Meeting(turns, threads))])


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
    turns, works, sources = Turns(), [], _sources(allowed)
    for i, (kernel, launches) in enumerate(zip(kernels, words, strict=True)):
        between, function = Meeting(turns, threads * blocks), sources.function(kernel.function)
        for number in range(blocks):
            block = Block((number, 0, 0), threads, (blocks, 1, 1), turns)
            works.append(_Work(kernel, function, block, launches, between, slow=i == slow))
    _run(works)


def _numbers(launches: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Return words as kernels have them."""
    return [[np.uint64(word) for word in words] for words in launches]


@frozen(eq=False)
class _Work:
    """What the threads of a block do.

    Attributes:
        kernel: that they run.
        function: its source.
        block: of threads.
        launches: the words of each.
        between: where all threads of a device meet from launch to launch.
        slow: whether they run seldom.
    """

    kernel: Kernel
    function: Callable[..., None]
    block: Block
    launches: list[list[Any]] = field(converter=_numbers)
    between: Meeting
    slow: bool = False

    def run(self, thread: int) -> None:
        """Be one of the threads."""
        ME.__dict__ = {"block": self.block, "thread": thread, "arrays": 0, "met": (0, 0)}
        ME.polled, ME.copies = None, [[]]
        with np.errstate(over="ignore"):  # numbers of messages wrap
            for i, words in enumerate(self.launches):
                if i:
                    self.between.wait()
                ME.words = words
                self.function(*words[: self.kernel.arguments])


def _sources(allowed: Sequence[torch.Tensor]) -> Sources:
    """Return the sources of kernels that may read and write these."""
    return Sources([range(x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in allowed])


def _run(works: Sequence[_Work]) -> None:
    """Run blocks at the same time."""
    for work in works:
        count, block = work.kernel.arguments, work.block
        assert all(len(words) == (count if count > 1 else MOST_WORDS) for words in work.launches)
        for i in range(block.size):
            block.turns.add(partial(work.run, i), slow=work.slow)
    works[0].block.turns.run()
