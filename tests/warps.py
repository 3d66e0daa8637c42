"""The threads of a block, on the CPU: where they meet, what the lanes of a warp tell each other, and what they share.

In shared memory nothing may depend on which thread is first.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field
from greenlet import getcurrent, greenlet

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Of a warp.
LANES = 32
#: Bytes from the address of an array in shared memory to the next one's.
_APART = 2**20
#: Seconds that a lane sleeps which polls and is alone.
_PAUSE = 0.01
#: How often the next turn is for another thread than a slow one.
_OTHERS = 0.97
#: Of the thread that runs: its block and its number there, the arrays that it asked for, how often it met the others,
#: of its block and of its warp, what its kernel is told, where it polled last, and groups of what it copies.
ME: Any = type("Thread", (), {})()


class StuckError(Exception):
    """A thread waits for others that have ended."""


class Turns:
    """Runs threads by turns, each until it waits for others.

    They are greenlets, which take a small part of the time in which the system switches between threads of its own. Who
    comes next is drawn, as a GPU promises no order, and always in the same way; slow threads are drawn seldom.
    """

    def __init__(self) -> None:
        """Have nobody yet."""
        self._random = Random(1).random
        self._ready: list[greenlet] = []
        self._ready_slow: list[greenlet] = []
        self._waiting: set[greenlet] = set()
        self._slow: set[greenlet] = set()

    def add(self, run: Callable[[], None], *, slow: bool = False) -> None:
        """Have one more thread, which begins when it is drawn."""
        thread = greenlet(run)
        if slow:
            self._slow.add(thread)
        self.wake([thread])

    def run(self) -> None:
        """Run all threads to their ends, and raise what the first of them raises.

        Raises:
            StuckError: all that are left wait.
        """
        following = self._drawn()
        while following is not None:
            passed_on = following.switch()
            following = self._drawn() if passed_on is None else passed_on
        if self._waiting:
            raise StuckError

    def _drawn(self) -> greenlet | None:
        """Return who is next of those that are ready, if anybody is."""
        others = self._ready and (not self._ready_slow or self._random() < _OTHERS)
        some = self._ready if others else self._ready_slow
        return some.pop(int(self._random() * len(some))) if some else None

    def pause(self, *, again: bool) -> None:
        """Let others run first; where there are none, who asks for the same again waits a little."""
        if self._ready or self._ready_slow:
            self.wake([getcurrent()])
            self._let_others_run()
        elif again:
            sleep(_PAUSE)

    def wait(self) -> None:
        """Let others run until one of them wakes this thread."""
        self._waiting.add(getcurrent())
        self._let_others_run()

    def wake(self, threads: Sequence[greenlet]) -> None:
        """Let threads run again that wait."""
        self._waiting.difference_update(threads)
        for thread in threads:
            (self._ready_slow if thread in self._slow else self._ready).append(thread)

    def _let_others_run(self) -> None:
        """Return at this thread's next turn."""
        mine, me, following = ME.__dict__, getcurrent(), self._drawn()
        if following is not me:
            if following:
                following.switch()
            else:  # nobody, or one that has not begun, which would begin deep in this one's calls
                me.parent.switch(following)
            ME.__dict__ = mine


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
        self._there: list[greenlet] = []

    def wait(self) -> None:
        """Return when all are there."""
        if len(self._there) + 1 < self._size:
            self._there.append(getcurrent())
            self._turns.wait()
            return
        self._act()
        self._turns.wake(self._there)
        self._there.clear()


@define
class Block:
    """Threads that share an array.

    Attributes:
        number: of it, in three dimensions.
        size: threads.
        count: blocks that there are, likewise.
        turns: of all threads.
        shared: bytes of shared memory that the launch asks for.
        earlier: done when all its threads wait for the kernel before to end.
        everybody: where those of the block meet.
        waiting: where they meet for that.
        warps: where the lanes of each meet, and what they bring and get.
        arrays: in shared memory.
        brought: numbers that threads bring where they meet, by how often they have met before.
    """

    number: tuple[int, int, int]
    size: int
    count: tuple[int, int, int]
    turns: Turns
    shared: int = 0
    earlier: Callable[[], None] | None = None
    everybody: Meeting = field(init=False)
    waiting: Meeting | None = field(init=False)
    warps: list[Warp] = field(init=False)
    arrays: dict[int, Any] = field(factory=dict)
    brought: dict[int, list[Any]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.everybody = Meeting(self.turns, self.size)
        self.waiting = Meeting(self.turns, self.size, self.earlier) if self.earlier else None
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


def multiplied_by_groups(floats: Any, eights: int, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a lane has of two matrices to each of which a product was added, of rows in shared memory.

    Args:
        floats: makes floats of words.
        eights: of rows.
        values: four words of both left matrices; where the right one is; then sums.
    """
    brought = told([*map(int, values[:8])])
    left = floats(brought).astype(np.float64).reshape(8, 4, 2, 2, 2, 2)  # g, t, matrix, columns, rows, pair
    left = left.transpose(2, 4, 0, 3, 1, 5).reshape(2, 16, 16)
    right = floats(_swizzled(int(values[8]), 8 * eights)).astype(np.float64).reshape(8 * eights, 16)
    g, t = divmod(ME.thread % LANES, 4)
    found = (left @ right.T).reshape(2, 2, 8, eights, 4, 2)[:, :, g, :, t].transpose(0, 2, 1, 3)
    return tuple((np.array(values[9:], np.float64) + found.ravel()).astype(np.float32))


def _swizzled(descriptor: int, rows: int) -> list[list[Any]]:
    """Return 32 bytes of each of the rows that a descriptor tells, with the swizzle of 128 bytes."""
    start, apart = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    assert (descriptor >> 62, start & 0x380) == (1, 0), "rows of 128 bytes begin elsewhere"
    found = []
    for row in range(rows):
        places = (start + row // 8 * apart + row % 8 * 128 + 16 * chunk for chunk in range(2))
        found.append([word for at in places for word in words_at(_APART + (at ^ (at >> 3 & 0x70)))])
    return found


#: A word, and the float of the same bits: numpy's scalars take twenty times as long to be viewed as another type.
_WORD = np.zeros(1, np.uint32)
_FLOAT = _WORD.view(np.float32)


def moved(value: Any) -> Any:
    """Return the bits of a float, or the float of bits."""
    if type(value) is np.float32:
        _FLOAT[0] = value
        return _WORD[0]
    assert type(value) is np.uint32, type(value)
    _WORD[0] = value
    return _FLOAT[0]


class Shared:
    """An array in shared memory, whose threads must meet between what one writes and what another reads or writes.

    Several may write the same.

    Attributes:
        kind: numpy's type of what it has.
    """

    def __init__(self, count: int, kind: Any) -> None:
        self._values: Any = np.full(count * kind().nbytes, 0xFF, np.uint8).view(kind)  # NaN
        self._words = self._values.view(np.uint32)
        self.kind = kind
        self._written, self._read = ([_NOBODY] * count for _ in range(2))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Any:
        index = int(index)
        self._reads(index, 1)
        return self._values[index]

    def words(self, start: int, count: int) -> list[Any]:
        """Return the bits of so many elements."""
        self._reads(start, count)
        return [*self._words[start : start + count]]

    def _reads(self, start: int, count: int) -> None:
        me, end = (ME.met, ME.thread), start + count
        self._read[start:end] = [me] * count
        met = ME.met[0]
        for written in self._written[start:end]:
            assert written[0][0] != met or not _is_race(written, me), "read beside a write"

    def __setitem__(self, index: int, value: Any) -> None:
        me, index = (ME.met, ME.thread), int(index)
        is_other, written, self._written[index] = self._values[index] != value, self._written[index], me
        assert not _is_race(self._read[index], me), "written beside a read"
        assert not (is_other and _is_race(written, me)), "written beside a write"
        self._values[index] = value

    def added(self, index: int, word: Any) -> Any:
        """Add to a word that is only added to between two meetings, and return what it was."""
        me, was = (ME.met, -1), self._values[index]
        assert not _is_race(self._written[index], me) or self._written[index][1] == -1, "added to beside a write"
        assert not _is_race(self._read[index], me), "added to beside a read"
        self._written[index] = me
        self._values[index] += word
        return was


#: How often somebody met others who has not begun, and its number.
_NOBODY = (-1, -1), -1


def _is_race(other: tuple[tuple[int, int], int], me: tuple[tuple[int, int], int]) -> bool:
    """Tell whether two threads have met as often: nobody knows who is first."""
    ((met, met_in_warp), thread), ((my_met, my_met_in_warp), my_thread) = other, me
    if met != my_met or thread == my_thread:
        return False
    return thread // LANES != my_thread // LANES or met_in_warp == my_met_in_warp


def shared_array(count: int, dtype: Any, alignment: int = 0) -> Any:
    """Return the next array of the block, which the first thread makes that comes; that of no size has what is left."""
    ME.arrays += 1
    arrays, number = ME.block.arrays, ME.arrays
    if number not in arrays:
        arrays[number] = Shared(count or ME.block.shared // 4, type(dtype(0)))
    return arrays[number]


def address_of(array: Shared) -> Any:
    """Return the address of an array of the block, among those of shared memory."""
    return np.uint64(next(number for number, each in ME.block.arrays.items() if each is array) * _APART)


def _found(address: Any, count: int) -> tuple[Shared, int]:
    """Return the array that so many words are in, and the number of the first one."""
    number, start = divmod(int(address), _APART)
    assert not start % (4 * count), "not at a multiple"
    return ME.block.arrays[number], start // 4


def words_at(address: Any, count: int = 4) -> list[Any]:
    """Return so many words there."""
    array, start = _found(address, count)
    return array.words(start, count)


def add_word(address: Any, word: Any) -> Any:
    """Add to the word there, which other threads may do as well, and return what it was."""
    array, start = _found(address, 1)
    return array.added(start, word)


def write_words(address: Any, words: Sequence[Any]) -> None:
    """Write words there."""
    array, start = _found(address, len(words))
    for i, word in enumerate(words):
        array[start + i] = word if array.kind is np.uint32 else moved(word)


def copy_words(address: Any, words: Sequence[Any]) -> None:
    """Write words there when this thread waits for them, and until then something else."""
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
    ME.met = ME.met[0] + 1, ME.met[1]


def meet_with(value: Any) -> bool:
    """Wait for all threads of the block, and return whether any of them brings another number than 0."""
    brought = ME.block.brought.setdefault(ME.met[0], [])
    brought.append(value)
    meet()
    return any(brought)


def meet_in_warp() -> None:
    """Wait for all lanes of the warp."""
    told(None)
    ME.met = ME.met[0], ME.met[1] + 1
