"""Columns that devices pass on for others: which, what leaves whom, and what they wait for."""

from __future__ import annotations

from collections import Counter

import pytest
from attrs import evolve
from hypothesis import given

from tests.exec.program_cases import ITEM_BYTES, LIMITS, slices
from tpplan.errors import InternalError
from tpplan.exec.cuda.encode_direct import table, touched
from tpplan.exec.programs import lower_flags
from tpplan.exec.programs.lower import Mode, Route, lower, route
from tpplan.exec.programs.operation import Moves, Operation, all_reduce, allgather, broadcast, scatter
from tpplan.exec.programs.ordering import verify
from tpplan.exec.programs.program import INPUT, Await, Copy, Exchange, Program
from tpplan.exec.tuning import Tuning

FOUR, EIGHT = (0, 1, 2, 3), tuple(range(8))

#: To two, three and seven others, with and without the source's own, of columns that do not divide; and of slices.
MOVES = {
    f"{count} others{', and itself' if own else ''}": broadcast(own[0] if own else 9, (*own, *range(1, count + 1)), 101)
    for count in (2, 3, 7)
    for own in ((), (0,))
} | {
    "slices": allgather("allgather", ((0, 0, 50), (1, 50, 150), (2, 150, 300), (3, 300, 400)), FOUR),
    "a slice for others": allgather("allgather", ((0, 0, 20), (1, 20, 30), (9, 30, 100)), FOUR),
    "two large slices": allgather("allgather", ((0, 0, 99), (1, 99, 102), (2, 102, 103), (3, 103, 203)), FOUR),
}


def program(operation: Moves) -> Program:
    """Return the program with relays."""
    return lower(operation, Route("peer", relayed=True))


def copies(made: Program) -> list[Copy]:
    """Return all copies of a program's exchanges."""
    exchanges = [command for command in made.commands if isinstance(command, Exchange)]
    return [step for exchange in exchanges for step in exchange.steps if isinstance(step, Copy)]


def leaving(made: Program) -> Counter[int]:
    """Return the columns that leave each device, because it writes them or another one reads them."""
    found = Counter[int]()
    for copy in copies(made):
        if copy.source.buffer.device != copy.target.buffer.device:
            found[copy.source.buffer.device] += copy.source.stop - copy.source.start
    return found


def reaching(operation: Moves) -> Counter[int]:
    """Return the columns that every device gets from others."""
    found = Counter[int]()
    for source, target in operation.moves:
        if source.buffer.device != target.buffer.device:
            found[target.buffer.device] += source.stop - source.start
    return found


@pytest.mark.parametrize("name", MOVES)
def test_nobody_sends_more_than_somebody_receives(name: str) -> None:
    """The busiest link is one that has to carry as much anyway, but for what cuts at whole vectors make of it."""
    operation = MOVES[name]
    left, reached = leaving(program(operation)), reaching(operation)
    assert left.total() == reached.total()
    assert max(left.values()) <= max(reached.values()) + 8 * len(operation.devices)
    direct = leaving(lower(operation, Route("peer")))
    assert lower_flags.spared(operation) == max(direct[device] - left[device] for device in operation.devices) > 0


@pytest.mark.parametrize("name", ["slices", "two large slices"])
def test_all_send_about_the_same(name: str) -> None:
    """Not only as little as somebody receives: what is large comes from several, and each of their links is busy."""
    left = leaving(program(MOVES[name]))
    assert max(left.values()) - min(left[device] for device in FOUR) <= 8 * len(FOUR)


@given(slices(EIGHT, 9000))
def test_relays_fit_and_are_safe_for_any_slices(cut: tuple[tuple[int, int, int], ...]) -> None:
    """Of eight devices, too, tables have room in a kernel's parameter, and no link has much more to carry."""
    operation = allgather("allgather", cut, EIGHT)
    made = program(operation)
    assert max(leaving(made).values()) <= max(reaching(operation).values()) + 8 * len(EIGHT) * len(EIGHT)
    exchanges = [command for command in made.commands if isinstance(command, Exchange)]
    for exchange in exchanges:
        table(exchange, 2, touched(exchanges), lambda _: 1, lambda _: 1)


@pytest.mark.parametrize("name", MOVES)
def test_what_is_passed_on_is_read_once(name: str) -> None:
    """A device reads of others only what it writes to itself, and passes that on from there."""
    made = copies(program(MOVES[name]))
    fetched = [copy for copy in made if copy.source.buffer.device != copy.stream.device]
    assert fetched
    assert all(copy.target.buffer.device == copy.stream.device for copy in fetched)
    got = {copy.target for copy in fetched}
    assert all(copy.source.buffer.role == INPUT or copy.source in got for copy in made)


@pytest.mark.parametrize("name", MOVES)
def test_nothing_is_touched_before_its_device_is_ready(name: str) -> None:
    """Without any one of the waits of any device, for tensors to be ready or done with, the checker finds fault."""
    made = program(MOVES[name])
    verify(made)
    for i, command in enumerate(made.commands):
        for j, step in enumerate(command.steps if isinstance(command, Exchange) else ()):
            if isinstance(step, Await):
                assert isinstance(command, Exchange)
                rest = evolve(command, steps=(*command.steps[:j], *command.steps[j + 1 :]))
                with pytest.raises(InternalError, match="is not safe"):
                    verify(evolve(made, commands=(*made.commands[:i], rest, *made.commands[i + 1 :])))


LARGE: dict[str, tuple[Operation, Route]] = {
    "a broadcast": (broadcast(0, FOUR, 40), Route("peer", relayed=True)),
    "slices": (allgather("allgather", ((0, 0, 5), (1, 5, 90), (2, 90, 95)), (0, 1, 2)), Route("peer", relayed=True)),
    "a broadcast to another": (broadcast(0, (0, 1), 40), Route("peer")),
    "a broadcast to itself": (broadcast(0, (0,), 40), Route("local")),
    "a scatter": (scatter(0, tuple((d, 10 * d, 10 * d + 10) for d in FOUR)), Route("peer")),
    "even slices": (allgather("allgather", tuple((d, 10 * d, 10 * d + 10) for d in FOUR), FOUR), Route("peer")),
    "a sum": (all_reduce(40, FOUR, FOUR, residual=False), Route("peer")),
}


@pytest.mark.parametrize("what", LARGE)
def test_only_what_is_the_same_for_several_is_passed_on(what: str) -> None:
    """Large broadcasts to several others are, and large slices; everything else goes straight, whatever its size."""
    operation, way = LARGE[what]
    assert route(operation, "peer", 1000, ITEM_BYTES, LIMITS) == way


def test_what_is_passed_on_spares_its_source_enough() -> None:
    """Two of three messages have the bytes that are asked for; copy engines get what kernels would write straight."""
    operation, limits = (
        broadcast(0, FOUR, 50),
        evolve(LIMITS, tuning=Tuning(copies_fans_bytes=300, passed_on_bytes=2000)),
    )
    passed = Route("peer", relayed=True)
    assert route(operation, "peer", 9, ITEM_BYTES, LIMITS) == Route("peer")
    assert route(operation, "peer", 10, ITEM_BYTES, LIMITS) == passed  # 2 x 10 x 50 x 2 bytes
    assert route(operation, "peer", 9, ITEM_BYTES, limits, mode=Mode(captured=True)) == Route("events")
    assert route(operation, "peer", 10, ITEM_BYTES, limits, mode=Mode(captured=True)) == passed
    assert route(operation, "peer", 10, ITEM_BYTES, evolve(limits, direct=False)) == Route("events")
    narrow = broadcast(0, FOUR, 8)  # of which a single device would pass on all
    assert route(narrow, "peer", 10**6, ITEM_BYTES, limits, mode=Mode(captured=True)) == Route("events")
    never = evolve(LIMITS, tuning=Tuning(passed_on_bytes=0, copies_fans_bytes=0))
    assert route(operation, "peer", 10**6, ITEM_BYTES, never) == Route("peer")
    assert route(operation, "events", 10, ITEM_BYTES, LIMITS) == Route("events")
