"""Routes: into how many parts large tensors are cut on their way through the host, and what kernels write there."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from tests.exec.program_cases import LIMITS
from tpplan.errors import ExecutionError
from tpplan.exec.programs.lower import Limits, route
from tpplan.exec.programs.operation import Reduction, all_reduce, allgather, broadcast
from tpplan.exec.programs.program import HOST
from tpplan.exec.tuning import Tuning

if TYPE_CHECKING:
    from tpplan.exec.programs.operation import Operation

MIB = 2**20
#: Of GPUs without links, whose kernels send messages of any length in frames.
STREAMED = Limits(
    slot_bytes=2**16, stage_bytes=2**34, exchange_bytes=2**34, frame_bytes=MIB, streams=True, spared_bytes=2**18
)


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


def _sum(senders: tuple[int, ...], receivers: tuple[int, ...], columns: int = 48) -> Reduction:
    """Return a sum."""
    return Reduction("all_reduce", columns, senders, receivers, residual=False)


@pytest.mark.parametrize(
    ("columns", "rows", "framed"),
    [(65537, 65534, True), (65537, 65535, True), (65536, 65536, False), (65537, 65536, False)],
)
def test_frames_take_what_kernels_can_count(columns: int, rows: int, framed: bool) -> None:
    """A message of less than 4 GiB goes in frames, whole; a longer one is copied in parts."""
    assert (columns * rows < 4096 * MIB) == framed
    for operation in (broadcast(0, (1,), columns), _sum((0, 1), (0, 1), columns)):
        found = route(operation, "host", rows, 1, STREAMED)
        assert (found.transport, found.small, found.framed, found.parts == 1) == ("host", False, framed, framed)


@pytest.mark.parametrize(("rows", "shared"), [(2**11, False), (2**12, False), (2**12 + 1, True), (2**20, True)])
def test_sums_are_shared_out_where_that_spares_enough(rows: int, shared: bool) -> None:
    """Of three devices, each is spared two thirds of a message: 256 KiB of one of 384 KiB, which is not yet enough."""
    found = route(_sum((0, 1, 2), (0, 1, 2)), "host", rows, 2, STREAMED)
    assert (found.framed, found.shared) == (True, shared)


@pytest.mark.parametrize(("rows", "framed"), [(2**15, True), (2**15 + 1, False)])
def test_large_sums_that_frames_cannot_share_out_are_copied(rows: int, framed: bool) -> None:
    """Where not all of three devices have a part, two thirds of 3 MiB are as much as may come in vain."""
    found = route(_sum((0, 1), (0, 1, 2)), "host", rows, 2, STREAMED)
    assert (found.framed, found.shared) == (framed, False)


@pytest.mark.parametrize(
    "operation",
    [
        _sum((0, 1), (0, 1)),
        _sum((0, 1), (0, 1, 2)),
        _sum((0, 1, 2, 3), (0, 1, 2)),
        _sum((0, 2, 3), (1, 2, 3)),
        _sum((0, 1, 2), (0, 1, 2), columns=3),
    ],
    ids=str,
)
def test_some_sums_are_never_shared_out(operation: Operation) -> None:
    """Those of two devices, who would be spared nothing, and those in which not all take part alike."""
    ways = [route(operation, "host", 2**i, 2, STREAMED) for i in range(26)]
    assert any(way.framed for way in ways)
    assert not any(way.shared for way in ways)


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        (broadcast(0, (1, 2), 48), ["slots", "frames", "copies"]),
        (_sum((0, 1), (0, 1)), ["slots", "frames", "copies"]),
        (_sum((0, 1, 2), (0, 1, 2)), ["slots", "frames", "shared frames", "copies"]),
        (_sum((0, 1, 2, 3), (0, 1, 2)), ["slots", "frames", "copies"]),
    ],
)
def test_more_rows_never_go_back_to_a_way_of_fewer(operation: Operation, found: list[str]) -> None:
    """From slots to frames, which are shared out at last if at all, and from these to copies."""
    ways = [route(operation, "host", 2**i, 2, STREAMED) for i in range(28)]
    kinds = ["slots" if way.small else "shared " * way.shared + "frames" if way.framed else "copies" for way in ways]
    assert [kind for kind, _ in groupby(kinds)] == found
