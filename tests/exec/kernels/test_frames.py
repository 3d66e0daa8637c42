"""Kernels of exchanges in frames: their source, run lane by lane on several devices, does what operations say."""

from __future__ import annotations

import ctypes
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from tests import lanes
from tests.exec.caller import expected, noise, widths
from tests.exec.program_cases import OPERATIONS
from tpplan.exec.binding import Memory
from tpplan.exec.gpu import frames
from tpplan.exec.gpu.counters import Counters
from tpplan.exec.gpu.exchange_table import ALONE, COUNTER_BYTES, COUNTERS, DEADLINE, MOST_WORDS, OPERANDS, ROWS, STATUS
from tpplan.exec.gpu.frame_table import FIRST_QUEUE, QUEUE_WORDS, QUEUES, VECTOR_BYTES, VECTORS
from tpplan.exec.programs.lower import Route, lower
from tpplan.exec.programs.operation import Reduction
from tpplan.exec.programs.program import HOST, RESIDUAL, Buffer, Exchange, Queue
from tpplan.exec.programs.program import OPERANDS as ROLES
from tpplan.workspace import FRAME_SLOTS

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.exec.kernels.kernel import Kernel
    from tpplan.exec.programs.operation import Operation

frame_kernels = pytest.importorskip("tpplan.exec.kernels.frame", reason="needs numba-cuda")

#: Threads of the one block of each device: a warp for what is filled, and one for what is read.
THREADS = 64
#: Bytes of a frame, which is all that a slot of one block holds, and of all counters of a device.
STRIDE, FLAGS = THREADS * VECTOR_BYTES * VECTORS, 512 * COUNTER_BYTES
WIDE = {torch.bfloat16: frame_kernels.FRAME_SUM_BF16, torch.float32: frame_kernels.FRAME_SUM_F32}


class Machine:
    """The memory of some devices, and what their kernels are told."""

    def __init__(self, operation: Operation, rows: int, *, shared: bool) -> None:
        """Take it."""
        program = lower(operation, Route("host", framed=True, shared=shared))
        self._exchanges = [each for each in program.commands if isinstance(each, Exchange)]
        self._rows, self.slots = rows, dict[Queue, "Tensor"]()
        devices = [each.stream.device for each in self._exchanges]
        self.flags = {home: torch.zeros(FLAGS, dtype=torch.uint8) for home in (*devices, HOST)}
        self.status = torch.zeros(16, dtype=torch.int32)
        self._memory = Memory({}, {}, self._slots, self.flags)
        self._counters = Counters(self.flags)
        for device in devices:
            self.flags[device][ALONE * COUNTER_BYTES] = 1

    def _slots(self, queue: Queue) -> Tensor:
        return self.slots.setdefault(queue, torch.zeros(queue.slots, STRIDE, dtype=torch.uint8))

    def words(self, operands: dict[Buffer, Tensor], item: int) -> list[list[int]]:
        """Return what each device's kernel is told."""
        found = []
        for work in frames.prepare(self._exchanges, item, self._memory, self._counters, 1):
            words = [0] * MOST_WORDS
            words[ROWS], words[DEADLINE], words[STATUS] = self._rows, 10 * 10**9, self.status.data_ptr()
            words[COUNTERS] = self._counters.area(work.stream.device)
            of_operands = work.operands.words(operands)
            words[OPERANDS : OPERANDS + len(of_operands)] = of_operands
            words[work.place : work.place + len(work.table)] = work.table
            found.append(words)
        return found

    def pretend(self, told: list[list[int]], last: int) -> None:
        """Let all queues have had messages before, the last frame of which had this number."""
        for words in told:
            for i in range(words[QUEUES]):
                numbers, _, full, freed, known, _ = words[FIRST_QUEUE + QUEUE_WORDS * i :][:QUEUE_WORDS]
                for address in filter(None, (numbers, full, freed, known)):
                    ctypes.c_uint32.from_address(address).value = last

    def run(self, kernel: Kernel, told: list[list[int]], operands: dict[Buffer, Tensor]) -> None:
        """Run one block of each device's kernel, all together."""
        memory = [*operands.values(), *self.slots.values(), *self.flags.values(), self.status]
        lanes.run_together([kernel] * len(told), THREADS, told, memory)
        assert not self.status.any()


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
    """Every byte of every output, in whole vectors and, of fewer rows, in pieces; through more frames than slots."""
    operation, random = OPERATIONS[name], Random(1)
    kernel = WIDE[dtype] if isinstance(operation, Reduction) else frame_kernels.FRAME_MOVE
    rows = (2 if strided else FRAME_SLOTS + 1) * STRIDE // (40 * dtype.itemsize) + 3
    machine = Machine(operation, rows, shared=shared)
    for last in (0, 2**32 - 3):  # numbers wrap
        truths = {b: noise(rows, columns, dtype, random) for b, columns in widths(operation).items()}
        for buffer in [b for b in truths if b.role == RESIDUAL]:
            truths[buffer] = truths[Buffer(RESIDUAL, min(b.device for b in truths if b.role == RESIDUAL))]
        results = expected(operation, truths)
        given = {b: x for b, x in truths.items() if b.role in ROLES} | {
            b: torch.zeros_like(x) for b, x in results.items()
        }
        operands = {b: _within_wider(x) if strided else x.clone() for b, x in given.items()}
        told = machine.words(operands, dtype.itemsize)
        machine.pretend(told, last)
        machine.run(kernel, told, operands)
        for buffer, truth in results.items():
            assert torch.equal(operands[buffer], truth), buffer


def _within_wider(x: Tensor) -> Tensor:
    """Return a copy that starts at the second column of a matrix."""
    wider = torch.zeros(x.shape[0], x.shape[1] + 2, dtype=x.dtype)
    return wider[:, 1:-1].copy_(x)
