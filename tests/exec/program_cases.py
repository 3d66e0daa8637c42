"""Operations of every kind on up to five devices, and their programs by every transport, small and in several parts."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import evolve, frozen
from hypothesis import strategies as st

from tpplan.core.workspace import FRAME_SLOTS, HOST_SLOTS
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.programs.lower import Limits, Route, lower, route
from tpplan.exec.programs.operation import Addition, Operation, Reduction, Share, allgather, broadcast, scatter
from tpplan.exec.programs.program import HOST, SLOTS, Program
from tpplan.exec.tuning import Tuning

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Of 40 columns, a slot holds 3 rows and a ring's 6; of 8 columns, 16 and 32. Kernels gather slices as large as a slot.
LIMITS = Limits(
    slot_bytes=256, stage_bytes=1024, exchange_bytes=1024, tuning=Tuning(passed_on_bytes=2000, gathers_bytes=256)
)
#: The same where kernels send in frames what no slot takes, 6 rows of 40 columns at a time, and share out all sums of
#: three devices and more.
FRAMED = evolve(LIMITS, frame_bytes=512, spared_bytes=250)
#: The same where every device adds up all of a sum that half of its exchange buffer holds, 6 rows of 40 columns.
HELD = evolve(LIMITS, held_bytes=512)
ITEM_BYTES = 2

#: With 40 columns: small; large in 1, 2, 4, 8 and 16 parts. With few columns the last two are large.
ROWS = (2, 5, 7, 13, 30, 70)

Slices = tuple[tuple[int, int, int], ...]


@frozen
class Case:
    """An operation on its way.

    Attributes:
        operation: what it does.
        way: by which route.
        rows: of the operands, each element of which has ``ITEM_BYTES``.
    """

    operation: Operation
    way: Route
    rows: int

    @property
    def program(self) -> Program:
        """The operation, lowered."""
        return lower(self.operation, self.way)

    @property
    def by_slots(self) -> bool:
        """Whether kernels do it through slots."""
        return self.way.small or self.way.framed

    @property
    def turns(self) -> int:
        """How often it runs until a slot's turn comes again."""
        if self.way.framed:
            return -(-FRAME_SLOTS // self.way.parts)
        return HOST_SLOTS if self.way.transport == "host" and self.way.small else SLOTS

    def __str__(self) -> str:
        size = "small" if self.way.small else "passed on" if self.way.relayed else f"{self.way.parts} parts"
        size = "one shot" if self.way.one_shot else size
        size = f"{'shared ' * self.way.shared}frames of {size}" if self.way.framed else size
        return f"{self.operation.name}-{self.way.transport}-{size}"


def case(operation: Operation, transport: str, rows: int, limits: Limits = LIMITS) -> Case:
    """Return an operation on the route that limits give it."""
    return Case(operation, route(operation, transport, rows, ITEM_BYTES, limits), rows)


def add_residual(cut: Slices) -> Addition:
    """Add to each device's tensor its slice of its residual."""
    return Addition("add_residual", tuple(Share(*each) for each in cut if each[2] > each[1]))


_UNEVEN: Slices = ((0, 0, 5), (1, 5, 9), (2, 9, 40))
_WITH_NONE: Slices = ((0, 0, 8), (1, 8, 8), (2, 8, 21), (3, 21, 40))
_FIVE: Slices = ((0, 0, 1), (1, 1, 17), (2, 17, 20), (3, 20, 32), (4, 32, 40))

#: One of every kind that lowering tells apart, by what is special about it.
OPERATIONS: dict[str, Operation] = {
    "broadcast": broadcast(1, (0, 1, 2), 40),
    "broadcast from elsewhere": broadcast(3, (0, 1, 2), 40),
    "broadcast to one other": broadcast(0, (1,), 40),
    "broadcast on one device": broadcast(0, (0,), 40),
    "broadcast from the host": broadcast(HOST, (0, 1, 2), 40),
    "scatter": scatter(0, _UNEVEN),
    "scatter from elsewhere": scatter(4, _WITH_NONE),
    "scatter from the host": scatter(HOST, _UNEVEN),
    "allgather": allgather("allgather", _UNEVEN, (0, 1, 2)),
    "allgather with none": allgather("allgather", _WITH_NONE, (0, 2, 3)),
    "allgather to others": allgather("allgather", _UNEVEN, (0, 1, 3)),
    "allgather of five": allgather("allgather", _FIVE, (0, 1, 2, 3, 4)),
    "allgather of two": allgather("allgather", ((0, 0, 24), (1, 24, 40)), (0, 1)),
    "gather": allgather("gather", _WITH_NONE, (HOST,)),
    "all_reduce": Reduction("all_reduce", 40, (0, 1, 2), (0, 1, 2), residual=False),
    "all_reduce with residual": Reduction("all_reduce", 40, (0, 1, 2), (0, 1, 2), residual=True),
    "all_reduce of fewer": Reduction("all_reduce", 40, (0, 2), (0, 1, 2, 3), residual=True),
    "all_reduce of one": Reduction("all_reduce", 40, (1,), (0, 1, 2), residual=True),
    "all_reduce of one and few columns": Reduction("all_reduce", 8, (0,), (0, 1, 2), residual=True),
    "all_reduce of few columns": Reduction("all_reduce", 8, (0, 1, 2), (0, 1, 2), residual=True),
    "all_reduce of two": Reduction("all_reduce", 40, (0, 1), (0, 1), residual=False),
    "all_reduce of five": Reduction("all_reduce", 40, (0, 1, 2, 3, 4), (0, 1, 2, 3, 4), residual=False),
    "all_reduce on one device": Reduction("all_reduce", 40, (0,), (0,), residual=True),
    "add_residual": add_residual(_UNEVEN),
}


def ways(operation: Operation) -> tuple[Case, ...]:
    """Return an operation once for each route that any transport and any of ``ROWS`` give it."""
    found = [case(operation, transport, rows) for rows in ROWS for transport in TRANSPORTS]
    found += [case(operation, "host", rows, FRAMED) for rows in ROWS]
    found += [case(operation, "peer", rows, HELD) for rows in ROWS]
    return tuple({each.way: each for each in found}.values())


def kept(found: Case) -> Iterator[Case]:
    """Yield a case unless it has more parts than fill its rings twice; those of four parts have rings of two slots."""
    way = found.way
    if way.parts <= (8 if way.transport == "host" else 4):
        yield evolve(found, way=evolve(way, slots=2)) if way.parts == 4 and not way.framed else found


#: More that devices pass on to each other: to many of them, and so few columns that not all have some to pass on.
RELAYED: dict[str, Operation] = {
    "broadcast to seven others": broadcast(7, (0, 1, 2, 3, 4, 5, 6), 75),
    "broadcast to all of eight": broadcast(2, (0, 1, 2, 3, 4, 5, 6, 7), 100),
    "broadcast of few columns": broadcast(0, (0, 1, 2, 3), 13),
}

#: Every program of every operation, by name.
CASES: dict[str, Case] = {
    f"{name}, {str(each).partition('-')[2]}": each
    for name, operation in OPERATIONS.items()
    for found in ways(operation)
    for each in kept(found)
}
CASES |= {f"{name}, passed on": case(operation, "peer", ROWS[-1]) for name, operation in RELAYED.items()}


@st.composite
def slices(draw: st.DrawFn, devices: tuple[int, ...], columns: int) -> Slices:
    """Uneven slices of all columns, of which devices may have none."""
    cuts = draw(st.lists(st.integers(0, columns), min_size=len(devices) - 1, max_size=len(devices) - 1))
    spans = pairwise((0, *sorted(cuts), columns))
    return tuple((device, start, stop) for device, (start, stop) in zip(devices, spans, strict=True))


@st.composite
def operations(draw: st.DrawFn, devices: int = 5) -> Operation:
    """Operations of every kind, on up to so many devices, of 1 to 40 columns."""
    some = st.sets(st.integers(0, devices - 1), min_size=1).map(sorted).map(tuple)
    targets, others, columns = draw(some), draw(some), draw(st.integers(1, 40))
    source = draw(st.integers(HOST, devices - 1))
    cut = draw(slices(targets, columns))
    receivers = tuple(sorted({*targets, *draw(st.sampled_from(((), others)))}))
    senders = tuple(draw(st.permutations(targets)))
    kinds: tuple[Operation, ...] = (
        broadcast(source, targets, columns),
        scatter(source, cut),
        allgather("allgather", cut, others),
        allgather("gather", cut, (HOST,)),
        Reduction("all_reduce", columns, senders, receivers, residual=draw(st.booleans())),
        add_residual(cut),
    )
    return draw(st.sampled_from(kinds))


@st.composite
def cases(draw: st.DrawFn, devices: int = 5) -> Case:
    """Operations on the route of any transport, with frames or without, and of 1 to 70 rows."""
    limits = draw(st.sampled_from((LIMITS, FRAMED, HELD)))
    return case(draw(operations(devices)), draw(st.sampled_from(TRANSPORTS)), draw(st.integers(1, 70)), limits)
