"""Tables of slot kernels: gone through in Python as the kernels go through them, message by message."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from attrs import define, field

from tests.exec.caller import expected, noise, widths
from tests.exec.program_cases import CASES, Case
from tpplan.core.workspace import slot_bytes
from tpplan.errors import InternalError
from tpplan.exec.cuda.encode_slots import Place, queues, table, widest
from tpplan.exec.programs.operation import Reduction
from tpplan.exec.programs.program import HOST, INPUT, OPERANDS, OUTPUT, RESIDUAL, Buffer, Exchange, Queue
from tpplan.exec.protocol import slots
from tpplan.exec.protocol.slots import (
    COLUMN,
    COUNT,
    FILLED,
    FIRST_QUEUE,
    LANES_AT,
    LOCAL,
    PACKET_BYTES,
    QUEUES,
    RECEIVES,
    RECEIVES_AT,
    SENDS,
    SENDS_AT,
    THREADS,
    WIDTH,
    capacity,
    regions,
)
from tpplan.exec.protocol.words import OWN

SMALL = {name: case for name, case in CASES.items() if case.way.small and case.way.transport != "local"}
STRIDE = 2**17


@define
class Machine:
    """Addresses and messages, as numbers and tensors of bytes.

    Attributes:
        rows: of all matrices.
        messages: in slots.
        addresses: of everything else.
    """

    rows: int
    messages: dict[int, torch.Tensor] = field(factory=dict)
    addresses: dict[tuple[Any, ...], int] = field(factory=dict)

    def address(self, *key: object) -> int:
        """Return a number for a thing, the same every time."""
        return self.addresses.setdefault(key, 1000 + 8 * len(self.addresses))

    def place(self, queue: Queue, device: int) -> Place:
        """Return where a device finds a queue."""
        readers = queue.receivers if device == queue.sender else (device,)
        messages = self.address("counter", device, queue)
        freed = tuple(self.address("freed", queue, reader) for reader in readers)
        known = tuple(
            self.address("known", queue, r) for r in readers if device == queue.sender and queue.place == HOST
        )
        return Place(self.address("slots", queue), messages, freed, known)

    def send(self, words: list[int], x: torch.Tensor, out: torch.Tensor | None) -> None:
        """Put what a device sends into slots, and what it copies into its output."""
        for entry in range(words[SENDS]):
            first, width, lane, end, local = words[words[SENDS_AT] + 5 * entry :][:5]
            message = x[:, first : first + width].clone()
            for k in range(lane, end):
                self.messages[_slots(words, words[words[LANES_AT] + k])] = message
            if local:
                assert out is not None
                out[:, local - 1 : local - 1 + width] = message

    def move(self, words: list[int], out: torch.Tensor) -> None:
        """Take what a device receives."""
        for entry in range(words[RECEIVES]):
            queue, _, message, target, skip, width = words[words[RECEIVES_AT] + 6 * entry :][:6]
            data = self.messages[_slots(words, queue)]
            assert data.shape == (self.rows, message)
            out[:, target : target + width] = data[:, skip : skip + width]

    def add(self, words: list[int], dtype: torch.dtype, ends: dict[str, torch.Tensor]) -> None:
        """Add up what a device has and receives."""
        total = None
        for entry in range(words[RECEIVES]):
            queue = words[words[RECEIVES_AT] + 2 * entry]
            own = ends.get(INPUT if queue == OWN else RESIDUAL)
            value = self.messages[_slots(words, queue)] if queue < OWN else own
            assert value is not None
            assert value.shape == (self.rows, words[slots.WIDTH])
            numbers = value.contiguous().view(dtype).float()
            total = numbers if total is None else total + numbers
        if total is not None:
            ends[OUTPUT].copy_(total.to(dtype).view(torch.uint8))


def _slots(words: list[int], queue: int) -> int:
    """Return the address of the slots of one of a device's queues."""
    assert queue < words[QUEUES]
    return words[FIRST_QUEUE + 4 * queue + 2]


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
    tables = _tables(case, machine, dtype.itemsize)
    ends = {
        device: {role: memory[Buffer(role, device)] for role in OPERANDS if Buffer(role, device) in memory}
        for device in tables
    }
    for device, words in tables.items():
        if INPUT in ends[device]:
            machine.send(words, ends[device][INPUT], ends[device].get(OUTPUT))
    for device, words in tables.items():
        if isinstance(case.operation, Reduction):
            machine.add(words, dtype, ends[device])
        elif OUTPUT in ends[device]:
            machine.move(words, ends[device][OUTPUT])
    for buffer, truth in results.items():
        assert torch.equal(memory[buffer], truth.contiguous().view(torch.uint8)), buffer
    _check_queues(tables, machine)


def _tables(case: Case, machine: Machine, item: int) -> dict[int, list[int]]:
    """Return the words of each device."""
    tables = {}
    for exchange in case.program.commands:
        if isinstance(exchange, Exchange):
            device = exchange.stream.device
            places = {queue: machine.place(queue, device) for queue in queues(exchange)}
            tables[device] = [0] * FILLED + table(exchange, item, places, STRIDE).words
    return tables


def _check_queues(tables: dict[int, list[int]], machine: Machine) -> None:
    """Check that what receivers free is what senders wait for, and that every entry has the number of its queue."""
    keys = {address: key for key, address in machine.addresses.items()}
    awaited: set[int] = set()
    freed: set[int] = set()
    for device, words in tables.items():
        rows = [words[FIRST_QUEUE + 4 * i :][:4] for i in range(words[QUEUES])]
        for i, (messages, address, ring, known) in enumerate(rows):
            assert keys[messages] == ("counter", device, keys[address][1])
            assert not ring or keys[ring] == ("slots", keys[address][1])
            assert ring or rows[i - 1][0] == messages  # another receiver of the same slots
            (awaited if i < words[FILLED] else freed).add(address)
            assert keys[known][1:] == keys[address][1:]
            on_host = keys[address][1].place == HOST
            assert keys[known][0] == ("known" if on_host and i < words[FILLED] else "freed")
    assert awaited == freed


@pytest.mark.parametrize("name", SMALL)
def test_alignment_covers_all_that_is_touched(name: str) -> None:
    """The bits of a table are those of every start and width on either side."""
    for exchange in SMALL[name].program.commands:
        if isinstance(exchange, Exchange):
            places = {queue: Machine(1).place(queue, exchange.stream.device) for queue in queues(exchange)}
            made, doubled = (table(exchange, item, places, STRIDE) for item in (1, 2))
            assert doubled.bits == 2 * made.bits
            views = [
                v
                for step in exchange.steps
                for v in (getattr(step, "source", None), getattr(step, "target", None))
                if v
            ]
            touched = [v for v in views if v.buffer.role in {INPUT, OUTPUT}]
            assert all(v.start | v.stop - v.start | made.bits == made.bits for v in touched)


@pytest.mark.parametrize("name", SMALL)
def test_packet_kernels_find_the_only_send_in_the_header(name: str) -> None:
    """They send it to all queues, and take all of every message; whatever has more to it is not simple."""
    machine = Machine(1)
    for exchange in SMALL[name].program.commands:
        if not isinstance(exchange, Exchange):
            continue
        places = {queue: machine.place(queue, exchange.stream.device) for queue in queues(exchange)}
        made = table(exchange, 2, places, STRIDE)
        words = [0] * FILLED + made.words
        sends = [words[words[SENDS_AT] + 5 * i :][:5] for i in range(words[SENDS])]
        takes = isinstance(SMALL[name].operation, Reduction) or all(
            skip == 0 and width == message
            for _, _, message, _, skip, width in (
                words[words[RECEIVES_AT] + 6 * i :][:6] for i in range(words[RECEIVES])
            )
        )
        assert made.simple == (len(sends) < 2 and takes)
        if made.simple and sends:
            first, width, start, end, local = sends[0]
            assert (words[COLUMN], words[WIDTH], words[LOCAL]) == (first, width, local)
            lanes = words[words[LANES_AT] + start : words[LANES_AT] + end]
            assert lanes == [i for i in range(words[FILLED]) if _slots(words, i)]


@pytest.mark.parametrize("name", SMALL)
def test_a_message_answers_what_its_sender_was_sent(name: str) -> None:
    """By the same program, through the host: that its sender has read all that came before is then known here."""
    operation, machine = SMALL[name].operation, Machine(1)
    for exchange in SMALL[name].program.commands:
        if not isinstance(exchange, Exchange):
            continue
        places = {queue: machine.place(queue, exchange.stream.device) for queue in queues(exchange)}
        words = [0] * FILLED + table(exchange, 2, places, STRIDE).words
        keys = {address: key for key, address in machine.addresses.items()}
        rows = [keys[words[FIRST_QUEUE + 4 * i + 1]] for i in range(words[QUEUES])]
        size = 2 if isinstance(operation, Reduction) else 6
        for queue, answer in (words[words[RECEIVES_AT] + size * i :][:2] for i in range(words[RECEIVES])):
            sender = rows[queue][1].sender if queue < OWN else None
            asked = [i for i in range(words[FILLED]) if rows[i][2] == sender and rows[i][1].place == HOST]
            assert answer == (asked[0] + 1 if asked else 0)


@pytest.mark.parametrize("most", [1, 28, 64, 112, 128])
@pytest.mark.parametrize("stride", [4096, 2**17, 2 * slot_bytes(8), 2 * slot_bytes(4), 2 * slot_bytes(2)])
def test_packets_have_places_of_their_own(stride: int, most: int) -> None:
    """Those of a message as large as the capacity, and of smaller ones, whatever the blocks that a GPU has room for."""
    room, (parts, region) = capacity(stride, most), regions(stride, most)
    for size in (room, room // 2 + 8, room // 5 + 8):
        blocks = min(most, parts, -(-size // (THREADS * 8)))  # as Launch.issue does
        used = set()
        for packet in range(-(-size // 8)):
            turn, index = divmod(packet, blocks * THREADS)
            block, thread = divmod(index, THREADS)
            used.add(block * region + (turn * THREADS + thread) * PACKET_BYTES)
        assert len(used) == -(-size // 8)
        assert max(used) < stride


@pytest.mark.parametrize("name", SMALL)
def test_the_last_bits_of_a_number_tell_the_slot(name: str) -> None:
    """Every queue of a kernel has as many as its table says, a power of two: numbers go on from 0 after 2^32 - 1."""
    machine = Machine(1)
    for exchange in SMALL[name].program.commands:
        if isinstance(exchange, Exchange) and queues(exchange):
            places = {queue: machine.place(queue, exchange.stream.device) for queue in queues(exchange)}
            count = ([0] * FILLED + table(exchange, 2, places, STRIDE).words)[COUNT]
            assert {queue.slots for queue in places} == {count}
            assert 2**32 % count == 0


def test_a_slot_without_room_for_a_block_has_no_capacity() -> None:
    """Then nothing goes through slots."""
    assert capacity(4095) == 0


def test_the_widest_message_sets_the_blocks() -> None:
    """All kernels of a program have as many, or their parts of a slot would not be the same."""
    exchanges = [c for c in CASES["allgather, peer-small"].program.commands if isinstance(c, Exchange)]
    assert widest(exchanges) == 31


def test_what_no_kernel_knows_is_refused() -> None:
    """Exchanges that write straight into other devices' tensors have other flags."""
    exchange = next(c for c in CASES["allgather, peer-1 parts"].program.commands if isinstance(c, Exchange))
    with pytest.raises(InternalError, match="no slot kernel for"):
        table(exchange, 2, {}, STRIDE)
