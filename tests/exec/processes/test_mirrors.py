"""Mirrors: with them, no kernel reaches a tensor of another device, and tensors hold what they would without."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from tests.exec.caller import bits, expected, memory, noise, widths
from tests.exec.program_cases import LIMITS, OPERATIONS, RELAYED, operations
from tpplan.core.workspace import ALIGNMENT
from tpplan.errors import InternalError
from tpplan.exec.backends.cpu import add, sequence
from tpplan.exec.memory.binding import resolve
from tpplan.exec.processes.peers import Mirrors
from tpplan.exec.programs.lower import Route, lower, route
from tpplan.exec.programs.lower_flags import one_shot_reduction
from tpplan.exec.programs.operation import Reduction, all_reduce, allgather
from tpplan.exec.programs.program import EXCHANGE, INPUT, OUTPUT, RESIDUAL, Buffer, flat, reads, writes

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.exec.programs.operation import Operation
    from tpplan.exec.programs.program import Program

DTYPE = torch.bfloat16
_LIMITS = evolve(LIMITS, slot_bytes=0, mirror_bytes=LIMITS.exchange_bytes)


def _straight(operation: Operation, rows: int) -> Program | None:
    """Return the program by which kernels write directly; None if an operation has none."""
    way = route(operation, "peer", rows, DTYPE.itemsize, _LIMITS)
    return lower(operation, way) if way.transport == "peer" else None


def _run(program: Program, operands: dict[Buffer, Tensor]) -> None:
    """Run a program on mirrors, some rows after the other, where kernels reach only these and their own tensors."""
    mirrors, place = Mirrors.of(program), memory()
    rows = len(next(iter(operands.values())))
    at_once = mirrors.rows(LIMITS.exchange_bytes, DTYPE.itemsize)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        part = {buffer: x[first : first + count] for buffer, x in operands.items()}
        inside = mirrors.over(place, count, DTYPE)
        for copy in mirrors.inward():
            source, target = (resolve(v, part, place, count, DTYPE) for v in (copy.source, copy.target))
            assert target.data_ptr() == inside[copy.source.buffer].data_ptr()
            target.copy_(source)
        for work in sequence(program):
            target, *sources = (
                resolve(p.view, part | inside, place, count, DTYPE) for p in (work.target, *work.sources)
            )
            add(target, sources) if len(sources) > 1 else target.copy_(sources[0])
        for copy in mirrors.outward():
            resolve(copy.target, part, place, count, DTYPE).copy_(resolve(copy.source, part, place, count, DTYPE))


@given(st.one_of(operations(5), st.sampled_from([*OPERATIONS.values(), *RELAYED.values()])), st.integers(1, 40))
def test_tensors_hold_what_they_would_without(operation: Operation, rows: int) -> None:
    """Whatever is moved or added, directly or passed on, in as many turns as there is room for."""
    program = _straight(operation, rows)
    if program is not None and max(d for d in operation.devices) <= 5:
        _check(program, operation, rows)


@pytest.mark.parametrize("rows", [1, 6, 40])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_sums_in_one_shot(count: int, residual: bool, rows: int) -> None:
    """A residual has a mirror beside that of the input and the output; all operands have one, to be aligned alike."""
    operation = all_reduce(40, tuple(range(count)), tuple(range(count)), residual=residual)
    program = one_shot_reduction(operation)
    _check(program, operation, rows)
    mirrors = Mirrors.of(program)
    assert {*mirrors.pieces} == {*widths(operation)}
    assert all(piece.piece == (buffer.role == RESIDUAL) for buffer, piece in mirrors.pieces.items())


def _check(program: Program, operation: Operation, rows: int) -> None:
    """Hold what a program does on mirrors against what its operation says."""
    random = Random(rows)
    operands = {  # residuals are the same on all devices
        b: noise(rows, columns, DTYPE, Random(rows) if b.role == RESIDUAL else random)
        for b, columns in widths(operation).items()
    }
    truth = expected(operation, operands)
    if isinstance(operation, Reduction):  # in place
        operands |= {b: operands[Buffer(INPUT, b.device)] for b in truth if Buffer(INPUT, b.device) in operands}
    else:
        operands |= {b: torch.zeros_like(x) for b, x in operands.items() if b.role == OUTPUT}
    _run(program, operands)
    for buffer, found in truth.items():
        assert torch.equal(bits(operands[buffer]), bits(found)), buffer


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_what_is_passed_on_in_an_allgather(rows: int) -> None:
    """Every device has two mirrors: of the slice that others read, and of the whole that they write."""
    operation = allgather("allgather", ((0, 0, 33), (1, 33, 36), (2, 36, 40)), (0, 1, 2))
    program = lower(operation, Route("peer", relayed=True))
    operands = {b: noise(rows, columns, DTYPE, Random(b.device)) for b, columns in widths(operation).items()}
    truth = expected(operation, operands)
    _run(program, operands)
    assert {len({piece for b, piece in Mirrors.of(program).pieces.items() if b.device == d}) for d in range(3)} == {2}
    for buffer, found in truth.items():
        assert torch.equal(bits(operands[buffer]), bits(found)), buffer


@pytest.mark.parametrize("name", [*OPERATIONS, *RELAYED])
def test_kernels_reach_their_own_tensors_and_mirrors(name: str) -> None:
    """Each device has at most two mirrors, disjoint pieces of its exchange buffer; for sums it has one."""
    operation = (OPERATIONS | RELAYED)[name]
    program = _straight(operation, 30)
    if program is None:
        return
    mirrors = Mirrors.of(program)
    for step in flat(program):
        for view in (*reads(step), *writes(step)):
            assert view.buffer.device == step.stream.device or view.buffer in mirrors.pieces
    for buffer, piece in mirrors.pieces.items():
        alike = {other for other in mirrors.pieces.values() if other.device == buffer.device}
        mirrored = sum(other.device == buffer.device for other in mirrors.pieces)
        assert len(alike) == (1 if isinstance(operation, Reduction) else mirrored)
        assert (piece.role, piece.device, piece.pieces) == (EXCHANGE, buffer.device, len(alike))
        assert sorted(other.piece for other in alike) == [*range(len(alike))]
        assert len(alike) <= 2
    assert {*mirrors.columns} == {*mirrors.pieces}


def test_rows_that_have_no_room_go_another_way() -> None:
    """An operation whose tensors are too wide for mirrors is left to torch.distributed."""
    operation = OPERATIONS["all_reduce"]
    room = 2 * (40 * DTYPE.itemsize + ALIGNMENT)
    for size, transport in ((room, "peer"), (room - 1, "events")):
        limits = evolve(_LIMITS, mirror_bytes=size)
        assert route(operation, "peer", 30, DTYPE.itemsize, limits).transport == transport
    program = _straight(operation, 30)
    assert program is not None
    mirrors = Mirrors.of(program)
    assert mirrors.rows(room, DTYPE.itemsize) >= 1
    with pytest.raises(InternalError, match="mirrors of 40 columns have no room in 64 bytes"):
        mirrors.rows(64, DTYPE.itemsize)
