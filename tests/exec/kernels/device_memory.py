"""What kernels of exchanges find on some devices, in the memory of the CPU: slots, counters, a status; and operands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.exec.caller import expected, noise, widths
from tpplan.exec.cuda.counters import Counters
from tpplan.exec.memory.binding import Memory
from tpplan.exec.programs.program import HOST, RESIDUAL, Buffer, Queue
from tpplan.exec.programs.program import OPERANDS as ROLES
from tpplan.exec.protocol.direct import TOLD
from tpplan.exec.protocol.words import ALONE, COUNTER_BYTES, COUNTERS, DEADLINE, MOST_WORDS, OPERANDS, ROWS, STATUS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

    from torch import Tensor

    from tpplan.exec.cuda.launch import Work
    from tpplan.exec.programs.operation import Operation

#: Nanoseconds, more than any case takes.
_LATE = 300 * 10**9


class DeviceMemory:
    """The memory of some devices, and of the host.

    Attributes:
        memory: of a context.
        counters: of it.
        status: other than 0 where a device has waited in vain.
    """

    def __init__(self, devices: Iterable[int], slot_bytes: int, counters: int, exchange_bytes: int = 0) -> None:
        """Take it.

        Args:
            devices: each of which has its GPU to itself.
            slot_bytes: of each slot of a queue.
            counters: that there is room for, on each device and on the host.
            exchange_bytes: of each device's exchange buffer.
        """
        devices, self._slot_bytes, self._slots = list(devices), slot_bytes, dict[Queue, "Tensor"]()
        self._flags = {d: torch.zeros(counters * COUNTER_BYTES, dtype=torch.uint8) for d in (*devices, HOST)}
        self.status = torch.zeros(16, dtype=torch.int32)
        self._exchange = {d: torch.zeros(exchange_bytes, dtype=torch.uint8) for d in devices}
        self.memory = Memory(self._exchange, {}, self._slots_of, self._flags)
        self.counters = Counters(self._flags)
        for device in devices:
            self._flags[device][ALONE * COUNTER_BYTES] = 1

    def _slots_of(self, queue: Queue) -> Tensor:
        return self._slots.setdefault(queue, torch.zeros(queue.slots, self._slot_bytes, dtype=torch.uint8))

    @property
    def tensors(self) -> list[Tensor]:
        """All that kernels may touch beside operands."""
        return [*self._slots.values(), *self._flags.values(), *self._exchange.values(), self.status]

    def words(self, work: Work, operands: dict[Buffer, Tensor], rows: int) -> list[int]:
        """Return what a device's kernel is told."""
        words = [0] * MOST_WORDS
        words[ROWS], words[DEADLINE], words[STATUS] = rows, _LATE, self.status.data_ptr()
        words[COUNTERS] = self.counters.area(work.stream.device)
        of_operands = work.operands.words(operands)
        words[OPERANDS : OPERANDS + len(of_operands)] = of_operands
        words[work.place : work.place + len(work.table)] = work.table
        for index, (buffer, _) in enumerate(work.operands.told, TOLD):
            words[index] = operands[buffer].data_ptr()
        return words


def tensors_of(
    operation: Operation, rows: int, dtype: torch.dtype, random: Random
) -> tuple[dict[Buffer, Tensor], dict[Buffer, Tensor]]:
    """Return an operation's operands, whose outputs have sevens, and what the outputs should have."""
    truths = {b: noise(rows, columns, dtype, random) for b, columns in widths(operation).items()}
    for buffer in [b for b in truths if b.role == RESIDUAL]:  # which all devices have alike
        truths[buffer] = truths[Buffer(RESIDUAL, min(b.device for b in truths if b.role == RESIDUAL))]
    results = expected(operation, truths)
    outputs = {b: torch.full_like(x, 7) for b, x in results.items()}
    return {b: x.clone() for b, x in truths.items() if b.role in ROLES} | outputs, results
