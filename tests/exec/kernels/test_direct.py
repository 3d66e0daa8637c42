"""Kernels of large exchanges: their source, run lane by lane on several devices at once, does what operations say."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from tests import lanes
from tests.exec.kernels.device_memory import DeviceMemory, tensors_of
from tpplan.exec.cuda import encode_direct
from tpplan.exec.cuda.launch import Operands, Work
from tpplan.exec.programs.fence import own
from tpplan.exec.programs.lower_flags import direct_moves, direct_reduction, one_shot_reduction
from tpplan.exec.programs.operation import Reduction, all_reduce, allgather, broadcast
from tpplan.exec.programs.program import INPUT, OUTPUT, Buffer, Exchange
from tpplan.exec.protocol.direct import HELD, STEPS, VECTOR_BYTES
from tpplan.exec.protocol.words import DEADLINE, PIECE

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.exec.programs.operation import Moves, Operation
    from tpplan.exec.programs.program import Program

direct_kernels = pytest.importorskip("tpplan.exec.kernels.direct", reason="needs numba-cuda")
one_shot_kernels = pytest.importorskip("tpplan.exec.kernels.one_shot", reason="needs numba-cuda")
exchange = pytest.importorskip("tpplan.exec.kernels.exchange", reason="needs numba-cuda")

THREADS = 64  # of a block: at least as many as there are words of operands
ALL = (0, 1, 2)


def _run(
    program: Program,
    operation: Operation,
    kernels: tuple[str, str],
    *,
    rows: int,
    in_place: bool,
    shift: int,
    blocks: int = 1,
) -> set[str]:
    """Run an operation three times on the same memory, and return the kernels that did it.

    Args:
        program: its program.
        operation: the operation.
        kernels: names of the kernel for any operands, and of that for aligned ones.
        rows: rows of the operands.
        in_place: whether sums are written over their own parts.
        shift: elements by which operands begin behind a multiple of 16 bytes.
        blocks: of each device.
    """
    random, dtype, ran = Random(rows), torch.bfloat16, set()
    exchanges = [each for each in program.commands if isinstance(each, Exchange)]
    memory = DeviceMemory([each.stream.device for each in exchanges], 0, 64, 2**13)
    for _ in range(3):
        operands, results = tensors_of(operation, rows, dtype, random)
        operands = {buffer: _moved(x, shift) for buffer, x in operands.items()}
        if in_place:
            operands |= {b: operands[Buffer(INPUT, b.device)] for b in operands if b.role == OUTPUT}
        works = encode_direct.prepare(exchanges, dtype.itemsize, memory.counters, memory.memory)
        told = [memory.words(work, operands, rows) for work in works]
        is_aligned = {words[PIECE] for words in told} == {VECTOR_BYTES}
        name = kernels[is_aligned and all(work.simple for work in works)]
        ran.add(name)
        kernel = next(k for k in (*vars(direct_kernels).values(), *vars(one_shot_kernels).values()) if _is(k, name))
        allowed = [*(x if x._base is None else x._base for x in operands.values()), *memory.tensors]
        lanes.run_together([kernel] * len(told), THREADS, [[words] for words in told], allowed, blocks=blocks)
        assert not memory.status.any()
        for buffer, truth in results.items():
            assert torch.equal(operands[buffer], truth), buffer
    return ran


def _is(kernel: object, name: str) -> bool:
    return getattr(kernel, "name", "") == name


def _moved(x: Tensor, shift: int) -> Tensor:
    """Return a copy that begins so many elements behind a multiple of 16 bytes, and whose rows have a gap."""
    whole = torch.zeros(x.shape[0], x.shape[1] + 8 + shift, dtype=x.dtype)
    found = whole[:, shift : shift + x.shape[1]]
    return found.copy_(x)


@pytest.mark.parametrize(
    ("rows", "in_place", "shift"), [(1, True, 0), (HELD, True, 0), (HELD, False, 0), (3, True, 8), (3, False, 1)]
)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_sums_in_one_shot(count: int, residual: bool, rows: int, in_place: bool, shift: int) -> None:
    """Registers hold them if all is aligned, else the exchange buffer does; sums may be over their own parts."""
    devices, columns = tuple(range(count)), 8 * THREADS
    operation = all_reduce(columns, devices, devices, residual=residual)
    names = "direct_sum_bf16", "one_shot_sum_bf16"
    ran = _run(one_shot_reduction(operation), operation, names, rows=rows, in_place=in_place, shift=shift)
    assert ran == {names[shift % 8 == 0]}


@pytest.mark.parametrize("shift", [2, 4])
def test_blocks_of_sums_in_one_shot_write_what_they_added_up(shift: int) -> None:
    """Whatever operands are aligned to: nothing tells a block that others have read or added up the rest."""
    operation = all_reduce(8 * THREADS, (0, 1), (0, 1), residual=False)
    names = "direct_sum_bf16", "one_shot_sum_bf16"
    program = one_shot_reduction(operation)
    assert _run(program, operation, names, rows=3, in_place=True, shift=shift, blocks=3) == {names[0]}


@pytest.mark.parametrize(
    ("operation", "relayed"),
    [
        (broadcast(0, ALL, 40), True),
        (broadcast(0, (1, 2), 40), False),
        (allgather("allgather", ((0, 0, 8), (1, 8, 32), (2, 32, 40)), ALL), False),
        (allgather("allgather", ((0, 0, 5), (1, 5, 36), (2, 36, 40)), ALL), True),
        (all_reduce(48, ALL, ALL, residual=True), False),
        (all_reduce(40, (1, 2), ALL, residual=False), False),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else str(value),
)
@pytest.mark.parametrize(("in_place", "shift"), [(False, 0), (True, 2)])
def test_straight_from_device_to_device(
    operation: Moves | Reduction, relayed: bool, in_place: bool, shift: int
) -> None:
    """Every byte of every output; devices tell each other where their operands are."""
    if isinstance(operation, Reduction):
        program, name = direct_reduction(operation), "direct_sum_bf16"
        in_place = in_place and operation.senders == operation.receivers
    else:
        program, name, in_place = direct_moves(operation, relayed=relayed), "direct_move", False
    assert _run(program, operation, (name, name), rows=5, in_place=in_place, shift=shift) == {name}


@pytest.mark.parametrize("lowered", [direct_reduction, one_shot_reduction])
def test_without_its_partner_a_device_writes_nothing(lowered: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits no longer than it may, says so, and leaves all operands as they are."""
    monkeypatch.setattr(exchange, "_PATIENCE", 0xF)
    operation = all_reduce(8, (0, 1), (0, 1), residual=False)
    exchanges = [each for each in lowered(operation).commands if isinstance(each, Exchange)]  # type: ignore[operator]
    memory = DeviceMemory((0, 1), 0, 64, 2**10)
    operands, _ = tensors_of(operation, 2, torch.bfloat16, Random(1))
    before = {buffer: x.clone() for buffer, x in operands.items()}
    (work, _) = encode_direct.prepare(exchanges, 2, memory.counters, memory.memory)
    words = memory.words(work, operands, 2)
    words[DEADLINE] = 10**6
    kernel = one_shot_kernels.ONE_SHOT_SUM_BF16 if work.simple else direct_kernels.DIRECT_SUM_BF16
    lanes.run_together([kernel], THREADS, [[words]], [*operands.values(), *memory.tensors])
    assert memory.status[0] == 3
    assert all(torch.equal(operands[buffer], x) for buffer, x in before.items())


def test_a_sum_is_not_written_while_others_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the partner tells where its part is, but never that it has read the other one, that stays as it is."""
    monkeypatch.setattr(exchange, "_PATIENCE", 0xF)
    operation = all_reduce(8, (0, 1), (0, 1), residual=False)
    exchanges = [each for each in one_shot_reduction(operation).commands if isinstance(each, Exchange)]
    memory = DeviceMemory((0, 1), 0, 64, 2**10)
    operands, _ = tensors_of(operation, 2, torch.bfloat16, Random(1))
    before = {buffer: x.clone() for buffer, x in operands.items()}
    works = encode_direct.prepare(exchanges, 2, memory.counters, memory.memory)
    words, of_partner = (memory.words(work, operands, 2) for work in works)
    words[DEADLINE], of_partner[STEPS] = 10**6, 1
    kernels = [one_shot_kernels.ONE_SHOT_SUM_BF16, direct_kernels.DIRECT_SUM_BF16]
    lanes.run_together(kernels, THREADS, [[words], [of_partner]], [*operands.values(), *memory.tensors])
    assert memory.status[0] == 3
    assert all(torch.equal(operands[buffer], x) for buffer, x in before.items())


def test_without_work_nothing_is_touched() -> None:
    """So kernels are loaded: by launches whose tables are empty."""
    memory = DeviceMemory((0,), 0, 4)
    words = memory.words(Work(own(0), 0, (), Operands((), 0, 1), 0), {}, 0)
    for kernel in (direct_kernels.DIRECT_MOVE, direct_kernels.DIRECT_SUM_F32, one_shot_kernels.ONE_SHOT_SUM_F32):
        lanes.run_together([kernel], THREADS, [[words]], memory.tensors)
    assert not memory.status.any()
