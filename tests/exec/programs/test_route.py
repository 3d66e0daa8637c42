"""Routes: into how many parts large tensors are cut on their way through the host, and what kernels write there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from tests.exec.program_cases import LIMITS
from tpplan.errors import ExecutionError
from tpplan.exec.links.tuning import Tuning
from tpplan.exec.programs.lower import route
from tpplan.exec.programs.operation import all_reduce, allgather, broadcast
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from tpplan.exec.programs.operation import Operation

MIB = 2**20


@pytest.mark.parametrize(
    ("columns", "rows", "parts"),
    [(4096, 64, 1), (4096, 128, 1), (4096, 256, 2), (4096, 1024, 8), (4096, 2048, 8), (4096, 8192, 16), (2**23, 2, 2)],
)
def test_chunks_overlap_on_their_way_through_the_host(columns: int, rows: int, parts: int) -> None:
    """One of 1 to 4 MiB is filled while another is read, however much room there is; but a row is never cut."""
    limits = evolve(LIMITS, stage_bytes=1024 * MIB)
    found = route(broadcast(0, (1,), columns), "host", rows, 2, limits)
    assert (found.transport, found.small, found.parts) == ("host", False, parts)


@pytest.mark.parametrize("columns", [100, 4096])
def test_more_rows_take_no_fewer_parts(columns: int) -> None:
    """From the smallest to the largest chunk it is eight, whether they divide the rows or not."""
    limits = evolve(LIMITS, stage_bytes=1024 * MIB)
    asked, size = broadcast(0, (1,), columns), 2 * columns
    parts = [route(asked, "host", rows, 2, limits).parts for rows in range(1, 20 * MIB // size)]
    assert parts == sorted(parts)
    assert {parts[rows - 1] for rows in range(5 * MIB // size, 15 * MIB // size)} == {8}


@pytest.mark.parametrize("operation", [broadcast(0, (1,), 4096), all_reduce(8192, (0, 1), (0, 1), residual=True)])
@pytest.mark.parametrize(("ring_rows", "slots", "parts"), [(2, 2, 32), (3, 2, 32), (4, 4, 32), (7, 4, 32), (8, 4, 16)])
def test_rings_have_four_slots_where_each_has_room_for_a_row(
    operation: Operation, ring_rows: int, slots: int, parts: int
) -> None:
    """Else two; of sums only what others add up takes room: on two devices, half of each row."""
    limits = evolve(LIMITS, stage_bytes=ring_rows * 4096)
    found = route(operation, "host", 32, 2, limits)
    assert (found.transport, found.slots, found.parts) == ("host", slots, parts)
    with pytest.raises(ExecutionError, match=r"one row takes 8\.00 KiB, but the plan left 4\.00 KiB for it"):
        route(operation, "host", 32, 2, evolve(LIMITS, stage_bytes=4096))


@pytest.mark.parametrize(("rows", "by_kernels"), [(2**19 - 1, True), (2**19, False)])
def test_kernels_write_what_they_can_count(rows: int, by_kernels: bool) -> None:
    """They have 32 bits for the bytes of a row, and take rows without gaps for one, whatever they are told to write."""
    limits = evolve(LIMITS, tuning=Tuning(gathers_bytes=2**50))
    found = route(allgather("gather", ((0, 0, 4096), (1, 4096, 4100)), (HOST,)), "peer", rows, 2, limits)
    assert (found.transport, found.small) == ("local", by_kernels)
