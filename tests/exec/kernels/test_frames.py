"""Kernels of exchanges in frames: their source, run lane by lane on several devices, does what operations say."""

from __future__ import annotations

import ctypes
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from tests import lanes
from tests.exec.kernels.device_memory import DeviceMemory, tensors_of
from tests.exec.program_cases import OPERATIONS
from tpplan.core.workspace import FRAME_SLOTS
from tpplan.exec.cuda import encode_frames
from tpplan.exec.programs.lower import Route, lower
from tpplan.exec.programs.operation import Reduction, broadcast, scatter
from tpplan.exec.programs.program import INPUT, OUTPUT, Buffer, Exchange
from tpplan.exec.protocol.frames import FIRST_QUEUE, LINE, QUEUE_WORDS, QUEUES, VECTOR_BYTES, VECTORS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tpplan.exec.programs.operation import Operation

frame_kernels = pytest.importorskip("tpplan.exec.kernels.frame", reason="needs numba-cuda")

#: Threads of each block: a warp for what is filled, and one for what is read.
THREADS = 64
#: Bytes of a frame.
FRAME = THREADS * VECTOR_BYTES * VECTORS
WIDE = {torch.bfloat16: frame_kernels.FRAME_SUM_BF16, torch.float32: frame_kernels.FRAME_SUM_F32}


class Call:
    """An operation on tensors."""

    def __init__(
        self, operation: Operation, rows: int, dtype: torch.dtype, random: Random, *, shared: bool = False
    ) -> None:
        """Fill the tensors."""
        program = lower(operation, Route("host", framed=True, shared=shared))
        self.exchanges = [each for each in program.commands if isinstance(each, Exchange)]
        self.rows, self.item = rows, dtype.itemsize
        self.kernel = WIDE[dtype] if isinstance(operation, Reduction) else frame_kernels.FRAME_MOVE
        self.operands, self.results = tensors_of(operation, rows, dtype, random)

    def check(self) -> None:
        """Make sure that the outputs have every byte that they should."""
        for buffer, truth in self.results.items():
            assert torch.equal(self.operands[buffer], truth), buffer


class Machine:
    """The memory of some devices, whose kernels have one block each or several."""

    def __init__(self, devices: Sequence[int], blocks: int = 1) -> None:
        """Take it."""
        self._memory, self._blocks = DeviceMemory(devices, blocks * FRAME, 512), blocks

    def told(self, call: Call) -> dict[int, list[int]]:
        """Return what each device's kernel is told."""
        memory = self._memory
        works = encode_frames.prepare(call.exchanges, call.item, memory.memory, memory.counters, self._blocks)
        return {work.stream.device: memory.words(work, call.operands, call.rows) for work in works}

    def pretend(self, told: dict[int, list[int]], last: int) -> None:
        """Let all queues have had messages before, the last frame of which had this number."""
        for _, numbers in self._numbers(told):
            for number in numbers:
                number.value = last

    def noted(self, told: dict[int, list[int]]) -> list[tuple[int, list[int]]]:
        """Return blocks, and what they have noted, as :meth:`_numbers` says."""
        return [(block, [number.value for number in numbers]) for block, numbers in self._numbers(told)]

    def _numbers(self, told: dict[int, list[int]]) -> Iterator[tuple[int, list[ctypes.c_uint32]]]:
        """Yield a block's numbers of a queue: of its latest frame, those in the flags, and what the sender knows."""
        for words in told.values():
            for i in range(words[QUEUES]):
                numbers, _, full, freed, known, _ = words[FIRST_QUEUE + QUEUE_WORDS * i :][:QUEUE_WORDS]
                for b in range(self._blocks):
                    near = [address + 4 * b for address in (numbers, known) if address]
                    addresses = [near[0], full + LINE * b, freed + LINE * b, *near[1:]]
                    yield b, [ctypes.c_uint32.from_address(address) for address in addresses]

    def run(self, calls: Sequence[Call], slow: int | None = None) -> None:
        """Run the blocks of all devices' kernels together, call after call."""
        told = [self.told(call) for call in calls]
        memory = [*self._memory.tensors, *(x for call in calls for x in call.operands.values())]
        devices = [*told[0]]
        words = [[each[device] for each in told] for device in devices]
        at = None if slow is None else devices.index(slow)
        lanes.run_together([calls[0].kernel] * len(devices), THREADS, words, memory, blocks=self._blocks, slow=at)
        assert not self._memory.status.any()


def _rows(count: int, columns: int, dtype: torch.dtype) -> int:
    """Return rows whose message takes so many frames; the last one is not full."""
    return count * FRAME // (columns * dtype.itemsize) - 2


@pytest.mark.parametrize(
    ("name", "dtype", "strided", "shared"),
    [
        ("broadcast", torch.int64, False, False),
        ("broadcast from elsewhere", torch.bfloat16, True, False),
        ("scatter", torch.bfloat16, False, False),
        ("allgather to others", torch.int64, False, False),
        ("allgather of two", torch.bfloat16, False, False),
        ("all_reduce with residual", torch.bfloat16, False, False),
        ("all_reduce of fewer", torch.float32, False, False),
        ("all_reduce of one", torch.float32, True, False),
        ("all_reduce of two", torch.bfloat16, True, False),
        ("all_reduce with residual", torch.bfloat16, False, True),
        ("all_reduce of five", torch.float32, False, True),
        ("all_reduce", torch.bfloat16, True, True),
    ],
)
def test_frames_say_what_operations_say(name: str, dtype: torch.dtype, *, strided: bool, shared: bool) -> None:
    """Every byte of every output, by two blocks, in whole vectors and, of fewer rows, in pieces; numbers wrap."""
    operation = OPERATIONS[name]
    call = Call(operation, _rows(2 if strided else 4, 40, dtype), dtype, Random(1), shared=shared)
    if strided:
        call.operands = {b: _within_wider(x) for b, x in call.operands.items()}
    machine = Machine(operation.devices, blocks=2)
    machine.pretend(machine.told(call), 2**32 - 2)
    machine.run([call])
    call.check()


@pytest.mark.parametrize("shared", [False, True])
def test_a_sum_may_be_written_over_a_part(*, shared: bool) -> None:
    """A block has sent what it has of a frame before it adds up others'."""
    operation = OPERATIONS["all_reduce"]
    call = Call(operation, _rows(2, 40, torch.bfloat16), torch.bfloat16, Random(2), shared=shared)
    call.operands |= {Buffer(OUTPUT, d): call.operands[Buffer(INPUT, d)] for d in operation.devices}
    Machine(operation.devices).run([call])
    call.check()


@pytest.mark.parametrize(("name", "blocks"), [("broadcast", 2), ("all_reduce of one", 1)])
def test_no_frame_is_filled_before_its_place_was_read(name: str, blocks: int) -> None:
    """Of more frames than slots, by a device that waits for nobody else; who reads them is much slower."""
    operation, dtype = OPERATIONS[name], torch.bfloat16
    call = Call(operation, _rows((FRAME_SLOTS + 3) * blocks, 40, dtype), dtype, Random(3))
    Machine(operation.devices, blocks).run([call], slow=2)
    call.check()


#: Of which few columns are sent, and most stay.
_UNEVEN = scatter(0, ((0, 0, 31), (1, 31, 35), (2, 35, 40)))


@pytest.mark.parametrize(
    ("operations", "counts", "blocks", "shared"),
    [
        ((_UNEVEN, broadcast(0, (0, 1, 2), 40)), (FRAME_SLOTS, 2), 1, False),
        ((OPERATIONS["all_reduce of two"],) * 3, (1, 3, 1), 2, False),
        ((OPERATIONS["all_reduce"],) * 2, (2, 1), 1, True),
    ],
)
def test_exchanges_go_on_where_the_last_one_ended(
    operations: tuple[Operation, ...], counts: tuple[int, ...], blocks: int, *, shared: bool
) -> None:
    """Whoever is done with one begins the next, while a slow device is still at it; numbers wrap meanwhile."""
    random, dtype, last = Random(4), torch.bfloat16, 2**32 - 3
    calls = []
    for operation, count in zip(operations, counts, strict=True):
        sent = 9 if operation == _UNEVEN else 40
        calls.append(Call(operation, _rows(count, sent, dtype), dtype, random, shared=shared))
    machine = Machine(operations[0].devices, blocks)
    told = machine.told(calls[0])
    machine.pretend(told, last)
    machine.run(calls, slow=1)
    for call in calls:
        call.check()
    for block, (number, full, freed, *known) in machine.noted(told):
        sent = sum(len(range(block, count, blocks)) for count in counts) * (1 + shared)
        assert number == full == freed == (last + sent) % 2**32
        assert all((number - each) % 2**32 <= FRAME_SLOTS for each in known)


def _within_wider(x: Tensor) -> Tensor:
    """Return a copy that starts at the second column of a matrix."""
    wider = torch.zeros(x.shape[0], x.shape[1] + 2, dtype=x.dtype)
    return wider[:, 1:-1].copy_(x)
