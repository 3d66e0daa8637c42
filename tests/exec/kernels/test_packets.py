"""Kernels of small exchanges: their source, run lane by lane on several devices at once, does what operations say."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests import lanes
from tests.exec.kernels.device_memory import DeviceMemory, tensors_of
from tests.exec.program_cases import CASES, Case
from tpplan.exec.cuda import encode_slots
from tpplan.exec.programs.operation import Reduction
from tpplan.exec.programs.program import Exchange
from tpplan.exec.protocol.slots import DATA_BYTES
from tpplan.exec.protocol.words import DEADLINE, PIECE

packet_kernels = pytest.importorskip("tpplan.exec.kernels.packet", reason="needs numba-cuda")
exchange = pytest.importorskip("tpplan.exec.kernels.exchange", reason="needs numba-cuda")

#: Threads of the one block of each device: a message may be longer than what they take at a time.
THREADS = 32
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


@pytest.mark.parametrize("name", NAMES)
def test_packets_say_what_operations_say(name: str) -> None:
    """Every byte of every output, message after message, so that slots are written again."""
    case, rows, random = _case(name), 7, Random(1)
    exchanges = [each for each in case.program.commands if isinstance(each, Exchange)]
    memory = DeviceMemory([each.stream.device for each in exchanges], 2**13, 64)
    is_sum = isinstance(case.operation, Reduction)
    dtype = torch.bfloat16 if is_sum else torch.int64  # any column is a packet
    kernel = packet_kernels.PACKET_SUM_BF16 if is_sum else packet_kernels.PACKET_MOVE
    for _ in range(3):
        operands, results = tensors_of(case.operation, rows, dtype, random)
        works = encode_slots.prepare(exchanges, dtype.itemsize, memory.memory, memory.counters, 1)
        told = [memory.words(work, operands, rows) for work in works]
        assert all(work.simple for work in works)
        assert {words[PIECE] for words in told} == {DATA_BYTES}  # all is aligned to packets
        allowed = [*operands.values(), *memory.tensors]
        lanes.run_together([kernel] * len(told), THREADS, [[words] for words in told], allowed)
        assert not memory.status.any()
        for buffer, truth in results.items():
            assert torch.equal(operands[buffer], truth), buffer


@pytest.mark.parametrize(
    ("status", "deadline_ns", "polls", "told"),
    [(0, 10**6, 0xF, 1), (4, 300 * 10**9, 0xF, 4), (4, 1, 0xFFFF_FFFF, 4)],
    ids=["late", "failed elsewhere", "both"],
)
def test_waiting_ends_at_the_deadline_or_when_another_has_failed(
    status: int, deadline_ns: int, polls: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device whose partner never comes waits no longer than it may, and leaves the first cause of a failure alone."""
    monkeypatch.setattr(exchange, "_PATIENCE", 0xF)
    monkeypatch.setattr(exchange, "_LONG_PATIENCE", polls)
    case, rows = _case("all_reduce of fewer-peer"), 2
    exchanges = [each for each in case.program.commands if isinstance(each, Exchange)]
    memory = DeviceMemory([each.stream.device for each in exchanges], 2**13, 64)
    memory.status[0] = status
    operands, _ = tensors_of(case.operation, rows, torch.bfloat16, Random(1))
    (work, *_) = encode_slots.prepare(exchanges, 2, memory.memory, memory.counters, 1)
    words = memory.words(work, operands, rows)
    words[DEADLINE] = deadline_ns
    kernel = packet_kernels.PACKET_SUM_BF16
    lanes.run_together([kernel], THREADS, [[words]], [*operands.values(), *memory.tensors])
    assert memory.status[0] == told
