"""The threads of a block, on the CPU: where they meet, what the lanes of a warp tell each other, and what they share.

In shared memory nothing may depend on which thread is first.
"""

from __future__ import annotations

from random import Random
from threading import Lock, local
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Of a warp.
LANES = 32
#: Bytes from the address of an array in shared memory to the next one's.
_APART = 2**20
#: Seconds that a lane sleeps which polls and is alone.
_PAUSE = 0.01
#: How often the next turn is for another thread than a slow one.
_OTHERS = 0.97
#: Of a thread: its block and its number there, its turn, the arrays that it asked for, how often it met the others,
#: what its kernel is told, where it polled last, and groups of what it copies.
ME = local()


class StuckError(Exception):
    """A thread waits for others that have failed or ended."""


class Turns:
    """Lets one thread run at a time, until it waits for others: switching is cheap so.

    Who comes next is drawn, as a GPU promises no order, and always in the same way; slow threads are drawn seldom.
    """

    def __init__(self) -> None:
        """Have nobody yet."""
        self._random = Random(1)
        self._ready: list[Any] = []
        self._waiting: set[Any] = set()
        self._slow: set[Any] = set()
        self._is_over = False

    def new(self, *, slow: bool = False) -> Any:
        """Return the turn of a thread that is about to start; it is held until the thread may run."""
        turn = Lock()
        turn.acquire()
        if slow:
            self._slow.add(turn)
        self._ready.append(turn)
        return turn

    def begin(self) -> None:
        """Wait for the first turn of this thread, or for the next one."""
        ME.turn.acquire()
        if self._is_over:
            raise StuckError

    def end(self) -> None:
        """Let another one run; where all others wait, nobody will ever come that they wait for."""
        if self._ready:
            self._ready.pop(self._drawn()).release()
        elif self._waiting:
            self.stop()

    def _drawn(self) -> int:
        """Return which of those that are ready is next."""
        if self._slow and self._random.random() < _OTHERS:
            others = [i for i, turn in enumerate(self._ready) if turn not in self._slow]
            if others:
                return self._random.choice(others)
        return self._random.randrange(len(self._ready))

    def stop(self) -> None:
        """Let everybody fail."""
        self._is_over = True
        turns = [*self._ready, *self._waiting]
        self._ready, self._waiting = [], set()
        for turn in turns:
            turn.release()

    def pause(self, *, again: bool) -> None:
        """Let others run first; where there are none, who asks for the same again waits a little."""
        if self._ready:
            self._ready.append(ME.turn)
            self.end()
            self.begin()
        elif again:
            sleep(_PAUSE)

    def wait(self) -> None:
        """Let others run until one of them wakes this thread."""
        self._waiting.add(ME.turn)
        self.end()
        self.begin()

    def wake(self, turns: Sequence[Any]) -> None:
        """Let threads run again that wait."""
        self._waiting.difference_update(turns)
        self._ready += turns


class Meeting:
    """Where threads wait for each other, time after time."""

    def __init__(self, turns: Turns, size: int, act: Callable[[], None] = lambda: None) -> None:
        """Let nobody be there yet.

        Args:
            turns: of all threads.
            size: of those that meet.
            act: done by the last one that comes.
        """
        self._turns, self._size, self._act = turns, size, act
        self._there: list[Any] = []

    def wait(self) -> None:
        """Return when all are there."""
        if len(self._there) + 1 < self._size:
            self._there.append(ME.turn)
            self._turns.wait()
            return
        self._act()
        self._turns.wake(self._there)
        self._there.clear()


@define
class Block:
    """Threads that share an array.

    Attributes:
        number: of it, in two dimensions.
        size: threads.
        count: blocks that there are, likewise.
        turns: of all threads.
        everybody: where those of the block meet.
        warps: where the lanes of each meet, and what they bring and get.
        arrays: in shared memory.
    """

    number: tuple[int, int]
    size: int
    count: tuple[int, int]
    turns: Turns
    everybody: Meeting = field(init=False)
    warps: list[Warp] = field(init=False)
    arrays: dict[int, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.everybody = Meeting(self.turns, self.size)
        self.warps = [Warp(self.turns) for _ in range(self.size // LANES)]


class Warp:
    """Lanes that multiply matrices together, or tell each other something."""

    def __init__(self, turns: Turns) -> None:
        """Bring nothing yet."""
        self._multiplying, self._telling = Meeting(turns, LANES, self._multiply), Meeting(turns, LANES, self._tell)
        self._floats: Callable[[Any], Any]  # of words, in the product that is made
        self._brought: list[Any] = [None] * LANES
        self._found: Any = None

    def told(self, lane: int, value: Any) -> list[Any]:
        """Return what all lanes tell."""
        self._brought[lane] = value
        self._telling.wait()
        found: list[Any] = self._found
        return found

    def multiplied(self, lane: int, floats: Any, values: Sequence[Any]) -> Any:
        """Return the product of what all lanes bring."""
        self._floats, self._brought[lane] = floats, values
        self._multiplying.wait()
        return self._found

    def _tell(self) -> None:
        self._found = list(self._brought)

    def _multiply(self) -> None:
        # a lane is g and t, of eight and four; words are of columns left and right, each of rows above and below
        pairs = self._floats([values[:6] for values in self._brought]).astype(np.float64).reshape(8, 4, 6, 2)
        left = pairs[:, :, :4].reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)
        right = pairs[:, :, 4:].transpose(2, 1, 3, 0).reshape(16, 8)
        sums = np.array([values[6:] for values in self._brought]).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3)
        self._found = (sums.reshape(16, 8) + left @ right).astype(np.float32)


def told(value: Any) -> list[Any]:
    """Return what the lanes of a warp have."""
    warp, lane = ME.block.warps[ME.thread // LANES], ME.thread % LANES
    found: list[Any] = warp.told(lane, value)
    return found


def multiplied(floats: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a lane has of a product to which it brings its registers, of words that are such pairs of floats."""
    warp, lane = ME.block.warps[ME.thread // LANES], ME.thread % LANES
    found = warp.multiplied(lane, floats, values)
    g, t = divmod(lane, 4)
    return (*found[g, 2 * t : 2 * t + 2], *found[g + 8, 2 * t : 2 * t + 2])


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
