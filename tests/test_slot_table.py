"""Tables of slot kernels: gone through in Python as the kernels go through them, message by message."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from attrs import define, field

from tests.caller import expected, noise, widths
from tests.program_cases import CASES, Case
from tpplan.errors import InternalError
from tpplan.exec import slot_table
from tpplan.exec.operation import Reduction
from tpplan.exec.program import HOST, INPUT, OUTPUT, RESIDUAL, Buffer, Exchange, Queue
from tpplan.exec.slot_table import BLOCKS, PACKET_BYTES, THREADS, Place, capacity, queues, table, widest

SMALL = {name: case for name, case in CASES.items() if case.way.small}
STRIDE = 2**17


@define
class Machine:
    """Addresses and messages, as numbers and tensors of bytes.

    Attributes:
        rows: of all matrices.
        messages: in slots.
        freed: addresses of credits that were raised.
    """

    rows: int
    messages: dict[int, torch.Tensor] = field(factory=dict)
    freed: set[int] = field(factory=set)
    addresses: dict[tuple[Any, ...], int] = field(factory=dict)

    def address(self, *key: object) -> int:
        """Return a number for a thing, the same every time."""
        return self.addresses.setdefault(key, 1000 + 8 * len(self.addresses))

    def place(self, queue: Queue, device: int) -> Place:
        """Return where a device finds a queue."""
        readers = queue.receivers if device == queue.sender else (device,)
        near = queue.place != HOST and device == queue.sender
        freed = tuple(
            (self.address("credit", queue, r), self.number(device, queue, r) if near else -1) for r in readers
        )
        return Place(self.address("slots", queue), self.number(device, queue, None), freed)

    def number(self, device: int, queue: Queue, reader: int | None) -> int:
        """Return the number of one of a device's counters."""
        return self.address("counter", device, queue, reader) % 128

    def send(self, words: list[int], x: torch.Tensor) -> None:
        """Put what a device sends into slots."""
        for entry in range(words[slot_table.SENDS]):
            at = words[slot_table.SENDS + 1] + 4 * entry
            first, width, lanes, lane = words[at : at + 4]
            for k in range(lane, lane + 2 * lanes, 2):
                self.messages[words[k]] = x[:, first : first + width].clone()

    def move(self, words: list[int], x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        """Copy within a device, and take what it receives."""
        for entry in range(words[slot_table.LOCALS]):
            at = words[slot_table.LOCALS + 1] + 3 * entry
            source, target, width = words[at : at + 3]
            assert x is not None
            assert out is not None
            out[:, target : target + width] = x[:, source : source + width]
        for entry in range(words[slot_table.RECEIVES]):
            at = words[slot_table.RECEIVES + 1] + 7 * entry
            slot, _, credit, message, skip, width, target = words[at : at + 7]
            assert out is not None
            assert self.messages[slot].shape == (self.rows, message)
            out[:, target : target + width] = self.messages[slot][:, skip : skip + width]
            self.freed.add(credit)

    def add(self, words: list[int], dtype: torch.dtype, ends: dict[str, torch.Tensor]) -> None:
        """Add up what a device has and receives."""
        total = None
        for entry in range(words[slot_table.RECEIVES]):
            at = words[slot_table.RECEIVES + 1] + 4 * entry
            kind, slot, _, credit = words[at : at + 4]
            if kind == slot_table.FETCHED:
                value = self.messages[slot]
                self.freed.add(credit)
            else:
                value = ends[INPUT if kind == slot_table.OWN else RESIDUAL]
            assert value.shape == (self.rows, words[slot_table.WIDTH])
            numbers = value.contiguous().view(dtype).float()
            total = numbers if total is None else total + numbers
        if total is not None:
            ends[OUTPUT].copy_(total.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_a_table_does_what_its_operation_says(name: str, dtype: torch.dtype) -> None:
    """All devices together give every byte, and free exactly the slots for which the senders await credits."""
    case = SMALL[name]
    random, machine = Random(1), Machine(3)
    truths = {b: noise(machine.rows, columns, dtype, random) for b, columns in widths(case.operation).items()}
    for buffer in [b for b in truths if b.role == RESIDUAL]:  # which all devices have alike
        truths[buffer] = truths[Buffer(RESIDUAL, min(b.device for b in truths if b.role == RESIDUAL))]
    results = expected(case.operation, truths)
    memory = {buffer: tensor.clone().view(torch.uint8) for buffer, tensor in truths.items()}
    tables, awaited = _tables(case, machine, dtype.itemsize)
    for device, words in tables.items():
        if Buffer(INPUT, device) in memory:
            machine.send(words, memory[Buffer(INPUT, device)])
    for device, words in tables.items():
        ends = {
            role: memory[Buffer(role, device)] for role in (INPUT, RESIDUAL, OUTPUT) if Buffer(role, device) in memory
        }
        if isinstance(case.operation, Reduction):
            machine.add(words, dtype, ends)
        else:
            machine.move(words, ends.get(INPUT), ends.get(OUTPUT))
    for buffer, truth in results.items():
        assert torch.equal(memory[buffer], truth.contiguous().view(torch.uint8)), buffer
    assert machine.freed == awaited


def _tables(case: Case, machine: Machine, item: int) -> tuple[dict[int, list[int]], set[int]]:
    """Return the words of each device, and the credits that senders await."""
    tables, awaited = {}, set()
    for exchange in case.program.commands:
        if isinstance(exchange, Exchange):
            device = exchange.stream.device
            places = {queue: machine.place(queue, device) for queue in queues(exchange)}
            words = tables[device] = table(exchange, item, places, STRIDE).words
            for entry in range(words[slot_table.CREDITS]):
                at = words[slot_table.CREDITS + 1] + 3 * entry
                number, local, address = words[at : at + 3]
                assert number in words[words[slot_table.SEQUENCES + 1] :][: words[slot_table.SEQUENCES]]
                queue, reader = next(key[1:] for key, found in machine.addresses.items() if found == address)
                assert local == (machine.number(device, queue, reader) + 1 if queue.place != HOST else 0)
                awaited.add(address)
    return tables, awaited


@pytest.mark.parametrize("name", SMALL)
def test_alignment_covers_all_that_is_touched(name: str) -> None:
    """The bits of a table are those of every start and width on either side."""
    for exchange in SMALL[name].program.commands:
        if isinstance(exchange, Exchange):
            places = {queue: Machine(1).place(queue, exchange.stream.device) for queue in queues(exchange)}
            made, doubled = (table(exchange, item, places, STRIDE) for item in (1, 2))
            assert (doubled.read, doubled.written) == (2 * made.read, 2 * made.written)
            views = [
                v
                for step in exchange.steps
                for v in (getattr(step, "source", None), getattr(step, "target", None))
                if v
            ]
            read = [v for v in views if v.buffer.role == INPUT]
            assert all(v.start | v.stop - v.start | made.read == made.read for v in read)
            written = [v for v in views if v.buffer.role == OUTPUT]
            assert all(v.start | v.stop - v.start | made.written == made.written for v in written)


def test_a_message_as_large_as_the_capacity_fits_every_block() -> None:
    """The packets of a block never leave its part of a slot, however few blocks there are."""
    for stride in (2**17, 2 * 297_216, 2 * 2_080_768):
        packets = capacity(stride) // 8
        rounds = -(-packets // (BLOCKS * THREADS))
        assert rounds * THREADS * PACKET_BYTES <= stride // BLOCKS
        assert capacity(stride) == rounds * BLOCKS * THREADS * 8
    assert capacity(2**17) == 64 * 1024


def test_the_widest_message_sets_the_blocks() -> None:
    """All kernels of a program have as many, or their parts of a slot would not be the same."""
    exchanges = [c for c in CASES["allgather, peer-small"].program.commands if isinstance(c, Exchange)]
    assert widest(exchanges) == 31


def test_what_no_kernel_knows_is_refused() -> None:
    """Exchanges that write straight into other devices' tensors have other flags."""
    exchange = next(c for c in CASES["allgather, peer-1 parts"].program.commands if isinstance(c, Exchange))
    with pytest.raises(InternalError, match="no slot kernel for"):
        table(exchange, 2, {}, STRIDE)
