"""When slots are filled again: by the tables of slot kernels, with devices and blocks at a random pace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING

import pytest
from attrs import define, field

from tests.exec.cuda.test_encode_slots import SMALL, STRIDE, Machine
from tests.exec.program_cases import CASES
from tpplan.core.workspace import HOST_SLOTS
from tpplan.exec.cuda.encode_slots import queues, table, widest
from tpplan.exec.programs.operation import Reduction
from tpplan.exec.programs.program import Await, Exchange, flat
from tpplan.exec.protocol.slots import (
    COUNT,
    DATA_BYTES,
    FILLED,
    FIRST_QUEUE,
    LANES_AT,
    QUEUES,
    RECEIVES,
    RECEIVES_AT,
    SENDS,
    SENDS_AT,
    THREADS,
    WIDTH,
)
from tpplan.exec.protocol.words import OWN

if TYPE_CHECKING:
    from tests.exec.program_cases import Case

DEVICES = range(5)
BLOCK_BYTES = DATA_BYTES * THREADS


@define
class Memory:
    """What all devices see.

    Attributes:
        counts: of messages, and of what is known of them, by address and block.
        slots: the number of the message in each, by address, which of the queue's, and block.
        readers: who reads which number of a slot.
        asked: how often a sender had to look at the receiver's own count.
    """

    counts: Counter[tuple[int, int]] = field(factory=Counter)
    slots: Counter[tuple[int, int, int]] = field(factory=Counter)
    readers: defaultdict[tuple[int, int, int], list[int]] = field(factory=lambda: defaultdict(list))
    asked: int = 0


@define
class Block:
    """A block of a kernel, as far as it has come; its generators yield whether it got on.

    Attributes:
        words: of the table.
        rows: of all operands.
        index: of the block.
        memory: of all devices.
        adds: whether the kernel adds up.
        last: number of the message before, of each queue.
    """

    words: list[int]
    rows: int
    index: int
    memory: Memory
    adds: bool
    last: list[int] = field(factory=list)

    def run(self) -> Iterator[bool]:
        """Go through the table."""
        yield from self._begin()
        yield from self._send()
        yield from self._receive()

    def _queue(self, queue: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int, int], tuple[int, int]]:
        """Return where a queue's counter, what was freed, this message's slot, and what is known of the former are."""
        messages, freed, slots, known = self.words[FIRST_QUEUE + 4 * queue :][:4]
        slot = slots, (self.last[queue] + 1) % self.words[COUNT] if self.last else 0, self.index
        return (messages, self.index), (freed, self.index), slot, (known, self.index)

    def _has_packets(self, width: int) -> bool:
        """Tell whether the block has any of a message of so many bytes a row; its first thread has the first."""
        return BLOCK_BYTES * self.index < self.rows * width

    def _begin(self) -> Iterator[bool]:
        """Number the messages, tell what was read, and wait for the slots to be filled."""
        counts, every = self.memory.counts, range(self.words[QUEUES])
        read = [counts[self._queue(i)[3]] for i in every]
        self.last = [counts[self._queue(i)[0]] for i in every]
        yield True
        for i in every:
            freed, _, known = self._queue(i)[1:]
            if i >= self.words[FILLED]:
                counts[freed] = self.last[i]
            elif self.last[i] + 1 - read[i] > self.words[COUNT]:
                self.memory.asked += 1
                while self.last[i] + 1 - (seen := counts[freed]) > self.words[COUNT]:
                    yield False
                yield True
                if known != freed:
                    counts[known] = seen
        counts.update({self._queue(i)[0]: 1 for i in every if self._queue(i)[0] not in self._earlier(i)})

    def _earlier(self, queue: int) -> list[tuple[int, int]]:
        """Return the counters of the queues before one: entries for receivers of the same messages share theirs."""
        return [self._queue(i)[0] for i in range(queue)]

    def _send(self) -> Iterator[bool]:
        """Fill slots."""
        for k in range(self.words[SENDS]):
            _, width, lane, end, _ = self.words[self.words[SENDS_AT] + 5 * k :][:5]
            lanes = self.words[self.words[LANES_AT] + lane : self.words[LANES_AT] + end]
            for i in lanes if self._has_packets(width) else ():
                slot = self._queue(i)[2]
                assert all(number > self.last[i] for number in self.memory.readers[slot]), "written while it is read"
                self.memory.slots[slot] = self.last[i] + 1
                yield True

    def _receive(self) -> Iterator[bool]:
        """Wait for messages, and note what they tell."""
        size = 2 if self.adds else 6
        for k in range(self.words[RECEIVES]):
            entry = self.words[self.words[RECEIVES_AT] + size * k :][:size]
            i, answer, width = (*entry, self.words[WIDTH])[:3]
            if i >= OWN or not self._has_packets(width):
                continue
            slot, number = self._queue(i)[2], self.last[i] + 1
            self.memory.readers[slot].append(number)
            while self.memory.slots[slot] != number:
                assert self.memory.slots[slot] < number, "written before it was read"
                yield False
            yield True
            self.memory.readers[slot].remove(number)
            if answer:
                self.memory.counts[self._queue(answer - 1)[3]] = self.last[answer - 1]


def kernels(words: list[int], rows: int, blocks: int, memory: Memory, random: Random, *, adds: bool) -> Iterator[bool]:
    """Go through all blocks of a kernel, in any order."""
    left = [Block(words, rows, index, memory, adds).run() for index in range(blocks)]
    while left:
        one = random.choice(left)
        try:
            yield next(one)
        except StopIteration:
            left.remove(one)


@define
class Streams:
    """What the devices are to run, each its own kernels in order.

    Attributes:
        random: decides who gets on.
        memory: of all devices.
        machine: gives everything its address.
        left: the kernels, by device.
    """

    random: Random
    memory: Memory = field(factory=Memory)
    machine: Machine = field(factory=lambda: Machine(0))
    left: dict[int, list[Iterator[bool]]] = field(factory=lambda: {device: [] for device in DEVICES})

    def issue(self, case: Case, rows: int) -> None:
        """Put a program's kernels behind what is there."""
        exchanges = [each for each in case.program.commands if isinstance(each, Exchange)]
        blocks = -(-rows * widest(exchanges) * DATA_BYTES // BLOCK_BYTES)
        for each in exchanges:
            device = each.stream.device
            places = {queue: self.machine.place(queue, device) for queue in queues(each)}
            words = [0] * FILLED + table(each, DATA_BYTES, places, STRIDE).words
            adds = isinstance(case.operation, Reduction)
            self.left[device].append(kernels(words, rows, blocks, self.memory, self.random, adds=adds))

    def finish(self) -> None:
        """Run everything; some devices are far ahead of others."""
        idle, pace = 0, [1] * len(DEVICES)
        while left := [device for device in DEVICES if self.left[device]]:
            pace = pace if self.random.random() < 0.99 else [self.random.choice((1, 30, 300)) for _ in DEVICES]
            device = self.random.choices(left, [pace[device] for device in left])[0]
            try:
                idle = 0 if next(self.left[device][0]) else idle + 1
            except StopIteration:
                del self.left[device][0]
            assert idle < 100_000, "all wait"


@pytest.mark.parametrize("transport", ["peer", "host"])
def test_slots_are_filled_again_when_they_were_read(transport: str) -> None:
    """Nothing is written over what somebody still needs, and nobody waits for ever, whatever messages tell besides."""
    asked = 0
    for seed in range(20):
        streams = Streams(Random(seed))
        names = streams.random.sample([name for name in SMALL if f", {transport}" in name], 3)  # so queues come again
        for _ in range(60):
            streams.issue(CASES[streams.random.choice(names)], streams.random.choice((1, 2, 40, 130)))
        streams.finish()
        asked += streams.memory.asked
    assert asked  # or credits were not scarce


@pytest.mark.parametrize(
    ("name", "seldom"), [("broadcast, host-small", 1 / (HOST_SLOTS - 1)), ("all_reduce, host-small", 0)]
)
def test_a_sender_that_knows_enough_does_not_look(name: str, seldom: float) -> None:
    """If nobody lags behind, it looks for what was read of every third message; if they are answered, of none."""
    streams, messages = Streams(Random(1)), 40
    for _ in range(messages):
        streams.issue(CASES[name], 1)
        streams.finish()
    receivers = {step.flag for step in flat(CASES[name].program) if isinstance(step, Await) and step.behind}
    assert streams.memory.asked <= seldom * messages * len(receivers)
