"""The threads of a block, on the CPU: where they meet, what the lanes of a warp tell each other, and what they share.

In shared memory nothing may depend on which thread is first.
"""

from __future__ import annotations

from threading import Barrier, local
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Of a warp.
LANES = 32
#: Bytes from the address of an array in shared memory to the next one's.
_APART = 2**20
#: Of a thread: its block and its number there, the arrays that it asked for, how often it met the others, what its
#: kernel is told, where it polled last, and groups of what it copies.
ME = local()


@define
class Block:
    """Threads that share an array.

    Attributes:
        number: of it, in two dimensions.
        size: threads.
        count: blocks that there are, likewise.
        everybody: where they meet.
        warps: where the lanes of each meet, and what they bring and get.
        arrays: in shared memory.
    """

    number: tuple[int, int]
    size: int
    count: tuple[int, int]
    everybody: Barrier = field(init=False)
    warps: list[Warp] = field(init=False)
    arrays: dict[int, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.everybody = Barrier(self.size)
        self.warps = [Warp() for _ in range(self.size // LANES)]

    def abort(self) -> None:
        """Let nobody wait."""
        self.everybody.abort()
        for warp in self.warps:
            warp.abort()


class Warp:
    """Lanes that multiply matrices together, or tell each other something."""

    def __init__(self) -> None:
        """Bring nothing yet."""
        self.barrier, self._everybody = Barrier(LANES, self._multiply), Barrier(LANES)
        self.floats: Callable[[Any], tuple[Any, Any]]  # of one word, in the product that is made
        self.brought: list[Any] = [None] * LANES
        self.found: Any = None

    def told(self, lane: int, value: Any) -> list[Any]:
        """Return what all lanes tell."""
        self.brought[lane] = value
        self._everybody.wait()
        found = list(self.brought)
        self._everybody.wait()
        return found

    def abort(self) -> None:
        """Let nobody wait."""
        self.barrier.abort()
        self._everybody.abort()

    def _multiply(self) -> None:
        left, right, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for lane, values in enumerate(self.brought):
            g, t = divmod(lane, 4)
            for i, word in enumerate(values[:4]):
                column = 2 * t + 8 * (i // 2)
                left[g + 8 * (i % 2), column : column + 2] = self.floats(word)
            for i, word in enumerate(values[4:6]):
                right[2 * t + 8 * i : 2 * t + 8 * i + 2, g] = self.floats(word)
            sums[g, 2 * t : 2 * t + 2], sums[g + 8, 2 * t : 2 * t + 2] = values[6:8], values[8:10]
        self.found = (sums + left @ right).astype(np.float32)


def told(value: Any) -> list[Any]:
    """Return what the lanes of a warp have."""
    warp, lane = ME.block.warps[ME.thread // LANES], ME.thread % LANES
    found: list[Any] = warp.told(lane, value)
    return found


def multiplied(floats: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a lane has of a product to which it brings its registers, of words that are such pairs of floats."""
    warp, lane = ME.block.warps[ME.thread // LANES], ME.thread % LANES
    warp.floats, warp.brought[lane] = floats, values
    warp.barrier.wait()
    g, t = divmod(lane, 4)
    return (*warp.found[g, 2 * t : 2 * t + 2], *warp.found[g + 8, 2 * t : 2 * t + 2])


class Shared:
    """An array in shared memory, whose threads must meet between what one writes and what another reads or writes."""

    def __init__(self, count: int, kind: Any) -> None:
        self._values: Any = np.full(count * kind().nbytes, 0xFF, np.uint8).view(kind)  # NaN
        self._written, self._read = ([(-1, -1)] * count for _ in range(2))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Any:
        me, index = (ME.met, ME.thread), int(index)
        self._read[index] = me
        assert not _is_race(self._written[index], me), "read beside a write"
        return self._values[index]

    def __setitem__(self, index: int, value: Any) -> None:
        me, index = (ME.met, ME.thread), int(index)
        others, self._written[index] = (self._written[index], self._read[index]), me
        assert not any(_is_race(other, me) for other in others), "written beside a read or a write"
        self._values[index] = value


def _is_race(other: tuple[int, int], me: tuple[int, int]) -> bool:
    """Tell whether two threads have met as often: nobody knows who is first."""
    return other[0] == me[0] and other[1] != me[1]


def shared_array(count: int, dtype: Any, alignment: int = 0) -> Any:
    """Return the next array of the block, which the first thread makes that comes."""
    ME.arrays += 1
    return ME.block.arrays.setdefault(ME.arrays, Shared(count, type(dtype(0))))


def address_of(array: Shared) -> Any:
    """Return the address of an array of the block, among those of shared memory."""
    return np.uint64(next(number for number, each in ME.block.arrays.items() if each is array) * _APART)


def _found(address: Any) -> tuple[Shared, int]:
    """Return the array that 16 bytes are in, and the number of the first word."""
    number, start = divmod(int(address), _APART)
    assert not start % 16, "not at a multiple"
    return ME.block.arrays[number], start // 4


def words_at(address: Any) -> list[Any]:
    """Return the four words there."""
    array, start = _found(address)
    return [array[start + i] for i in range(4)]


def write_words(address: Any, words: Sequence[Any]) -> None:
    """Write four words there."""
    array, start = _found(address)
    for i, word in enumerate(words):
        array[start + i] = word


def copy_words(address: Any, words: Sequence[Any]) -> None:
    """Write four words there when this thread waits for them, and until then something else."""
    assert all(address != asked for group in ME.copies for asked, _ in group), "not yet there, and asked for again"
    ME.copies[-1].append((address, list(words)))
    write_words(address, [word ^ np.uint32(0x5A5A5A5A) for word in words])


def end_copies() -> None:
    """Begin another group of copies."""
    ME.copies.append([])


def wait_for_copies(but: int = -1) -> None:
    """Do what this thread copies: all of it, or all groups that it has ended but the last ones."""
    while len(ME.copies) - 1 > but:
        for each in ME.copies.pop(0):
            write_words(*each)
    if not ME.copies:
        end_copies()


def meet() -> None:
    """Wait for all threads of the block."""
    ME.block.everybody.wait()
    ME.met += 1
