"""Broadcasts that devices pass on to each other: which, what leaves whom, and what they wait for."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from attrs import evolve

from tests.program_cases import ITEM_BYTES, LIMITS
from tpplan.errors import InternalError
from tpplan.exec.lower import Route, lower, route
from tpplan.exec.lower_flags import chunks
from tpplan.exec.operation import Moves, Operation, all_reduce, allgather, broadcast, scatter
from tpplan.exec.ordering import verify
from tpplan.exec.program import Await, Copy, Exchange, Program, View
from tpplan.exec.tuning import Tuning

#: To two, three and seven others, with and without the source's own, of columns that do not divide.
BROADCASTS = {
    f"{count} others{', and itself' if own else ''}": broadcast(own[0] if own else 9, (*own, *range(1, count + 1)), 101)
    for count in (2, 3, 7)
    for own in ((), (0,))
}


def program(operation: Moves) -> Program:
    """Return the program by which receivers pass on what they get."""
    return lower(operation, Route("peer", parts=chunks(operation)))


def copies(made: Program) -> list[Copy]:
    """Return all copies of a program's exchanges."""
    exchanges = [command for command in made.commands if isinstance(command, Exchange)]
    return [step for exchange in exchanges for step in exchange.steps if isinstance(step, Copy)]


def size(view: View) -> Fraction:
    """Return how many columns a view has, of all rows."""
    return Fraction(view.stop - view.start, view.parts)


def leaving(made: Program) -> Counter[int]:
    """Return the columns that each device reads from or writes to others."""
    found: Counter[int] = Counter()
    for copy in copies(made):
        device = copy.stream.device
        for view in (copy.source, copy.target):
            if view.buffer.device != device:
                found[device] += size(view)  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("name", BROADCASTS)
def test_columns_leave_their_source_once(name: str) -> None:
    """Its link carries each column of each row once, and nobody else reads its tensor; so does no other link more."""
    operation = BROADCASTS[name]
    made = program(operation)
    source = operation.moves[0].source.buffer
    left = leaving(made)
    assert left[source.device] == operation.columns
    assert {copy.stream.device for copy in copies(made) if copy.source.buffer == source} == {source.device}
    assert all(columns <= operation.columns for columns in left.values())
    assert sum(left.values()) == operation.columns * len(
        {t.buffer.device for _, t in operation.moves} - {source.device}
    )


@pytest.mark.parametrize("name", BROADCASTS)
def test_what_has_not_come_is_not_passed_on(name: str) -> None:
    """Without any one of the waits of any device, for what comes or for the others, the checker finds fault."""
    made = program(BROADCASTS[name])
    verify(made)
    for i, command in enumerate(made.commands):
        for j, step in enumerate(command.steps if isinstance(command, Exchange) else ()):
            if isinstance(step, Await):
                assert isinstance(command, Exchange)
                rest = evolve(command, steps=(*command.steps[:j], *command.steps[j + 1 :]))
                with pytest.raises(InternalError, match="is not safe"):
                    verify(evolve(made, commands=(*made.commands[:i], rest, *made.commands[i + 1 :])))


@pytest.mark.parametrize("name", BROADCASTS)
def test_what_is_passed_on_has_the_shape_in_which_it_came(name: str) -> None:
    """Columns and rows are cut alike on their way in and out, for blocks know only of their own index."""
    made = copies(program(BROADCASTS[name]))
    source = BROADCASTS[name].moves[0].source.buffer
    came = {copy.target for copy in made if copy.source.buffer == source}
    onward = [copy for copy in made if copy.source.buffer != source]
    assert onward
    assert all(copy.source in came for copy in onward)


FOUR = (0, 1, 2, 3)
LARGE: dict[str, tuple[Operation, Route]] = {
    "a broadcast": (broadcast(0, FOUR, 40), Route("peer", parts=4)),
    "a broadcast to another": (broadcast(0, (0, 1), 40), Route("peer")),
    "a broadcast to itself": (broadcast(0, (0,), 40), Route("local")),
    "a scatter": (scatter(0, tuple((d, 10 * d, 10 * d + 10) for d in FOUR)), Route("peer")),
    "an allgather": (allgather("allgather", tuple((d, 10 * d, 10 * d + 10) for d in FOUR), FOUR), Route("peer")),
    "a sum": (all_reduce(40, FOUR, FOUR, residual=False), Route("peer")),
}


@pytest.mark.parametrize("what", LARGE)
def test_only_what_is_the_same_for_several_is_passed_on(what: str) -> None:
    """Large broadcasts to several others are; everything else goes straight, whatever its size."""
    operation, way = LARGE[what]
    assert route(operation, "peer", 1000, ITEM_BYTES, LIMITS) == way


def test_what_is_passed_on_spares_its_source_enough() -> None:
    """Two of three messages have the bytes that are asked for; copy engines get what kernels would write straight."""
    operation, limits = (
        broadcast(0, FOUR, 50),
        evolve(LIMITS, tuning=Tuning(copies_fans_bytes=300, passed_on_bytes=2000)),
    )
    passed = Route("peer", parts=chunks(operation))
    assert route(operation, "peer", 9, ITEM_BYTES, LIMITS) == Route("peer")
    assert route(operation, "peer", 10, ITEM_BYTES, LIMITS) == passed  # 2 x 10 x 50 x 2 bytes
    assert route(operation, "peer", 9, ITEM_BYTES, limits) == Route("events")
    assert route(operation, "peer", 10, ITEM_BYTES, limits) == passed
    assert route(operation, "peer", 10, ITEM_BYTES, evolve(limits, straight=False)) == Route("events")
    never = evolve(LIMITS, tuning=Tuning(passed_on_bytes=0, copies_fans_bytes=0))
    assert route(operation, "peer", 10**6, ITEM_BYTES, never) == Route("peer")
    assert route(operation, "events", 10, ITEM_BYTES, LIMITS) == Route("events")
