"""Kernels of small exchanges: their source, run lane by lane on several devices at once, does what operations say."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from tests import lanes
from tests.exec.caller import expected, noise, widths
from tests.exec.program_cases import CASES, Case
from tpplan.exec.binding import Memory
from tpplan.exec.gpu import slots
from tpplan.exec.gpu.counters import Counters
from tpplan.exec.gpu.exchange_table import ALONE, COUNTER_BYTES, COUNTERS, DEADLINE, MOST_WORDS, OPERANDS, ROWS, STATUS
from tpplan.exec.programs.operation import Reduction
from tpplan.exec.programs.program import HOST, RESIDUAL, Buffer, Exchange, Queue
from tpplan.exec.programs.program import OPERANDS as ROLES

if TYPE_CHECKING:
    from torch import Tensor

packet_kernels = pytest.importorskip("tpplan.exec.kernels.packet", reason="needs numba-cuda")

#: Threads of the one block of each device: a message may be longer than what they take at a time.
THREADS = 32
#: Bytes of a slot, and of all counters of a device.
STRIDE, FLAGS = 2**13, 64 * COUNTER_BYTES
NAMES = [
    f"{name}-{way}"
    for name in ("all_reduce of five", "all_reduce with residual", "all_reduce of fewer", "allgather of five")
    for way in ("peer", "host")
] + ["broadcast-peer"]


def _case(name: str) -> Case:
    """Return the case of an operation by slots."""
    what, _, way = name.rpartition("-")
    found = [each for key, each in CASES.items() if key.startswith(what) and each.way.transport == way]
    return next(each for each in found if each.way.small)


class Machine:
    """The memory of some devices, and what their kernels are told."""

    def __init__(self, case: Case, rows: int) -> None:
        """Take it."""
        exchanges = [each for each in case.program.commands if isinstance(each, Exchange)]
        self._exchanges, self._rows, self.slots = exchanges, rows, dict[Queue, "Tensor"]()
        devices = [each.stream.device for each in exchanges]
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
        for work in slots.prepare(self._exchanges, item, self._memory, self._counters, 1):
            assert work.simple
            words = [0] * MOST_WORDS
            words[ROWS], words[DEADLINE], words[STATUS] = self._rows, 60 * 10**9, self.status.data_ptr()
            words[COUNTERS] = self._counters.area(work.stream.device)
            of_operands = work.operands.words(operands)
            assert of_operands[0] == work.operands.piece  # all is aligned to packets
            words[OPERANDS : OPERANDS + len(of_operands)] = of_operands
            words[work.place : work.place + len(work.table)] = work.table
            found.append(words)
        return found


@pytest.mark.parametrize("name", NAMES)
def test_packets_say_what_operations_say(name: str) -> None:
    """Every byte of every output, message after message, so that slots are written again."""
    case, rows, random = _case(name), 7, Random(1)
    machine = Machine(case, rows)
    is_sum = isinstance(case.operation, Reduction)
    dtype = torch.bfloat16 if is_sum else torch.int64  # any column is a packet
    kernel = packet_kernels.PACKET_SUM_BF16 if is_sum else packet_kernels.PACKET_MOVE
    for _ in range(3):
        truths = {b: noise(rows, columns, dtype, random) for b, columns in widths(case.operation).items()}
        for buffer in [b for b in truths if b.role == RESIDUAL]:
            truths[buffer] = truths[Buffer(RESIDUAL, min(b.device for b in truths if b.role == RESIDUAL))]
        results = expected(case.operation, truths)
        operands = {b: x.clone() for b, x in truths.items() if b.role in ROLES}
        for buffer, x in results.items():
            operands[buffer] = torch.full_like(x, 7)
        told = machine.words(operands, dtype.itemsize)
        lanes.run_together(
            [kernel] * len(told),
            THREADS,
            [[words] for words in told],
            [*operands.values(), *machine.slots.values(), *machine.flags.values(), machine.status],
        )
        assert not machine.status.any()
        for buffer, truth in results.items():
            assert torch.equal(operands[buffer], truth), buffer
