"""The happens-before checker: all that is lowered passes, and what is out of order is named."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.exec.program_cases import CASES, Case, cases
from tests.exec.programs.ordering_cases import MOVE, fenced, kept, kinds, of, program
from tpplan.errors import InternalError
from tpplan.exec.programs.fence import caller, order, own
from tpplan.exec.programs.operation import Reduction
from tpplan.exec.programs.ordering import GAP, OVERWRITTEN, RACE, UNWRITTEN, Call, check, verify
from tpplan.exec.programs.program import (
    EXCHANGE,
    HOST,
    INPUT,
    OUTPUT,
    RESIDUAL,
    SLOTS,
    STAGE,
    Buffer,
    Copy,
    Event,
    Program,
    Record,
    Stream,
    Sum,
    View,
    Wait,
)


def call(case: Case) -> Call:
    """A case as its caller runs it: a sum may be in place."""
    return Call(case.program, in_place=isinstance(case.operation, Reduction))


# What is lowered is in order.


@pytest.mark.parametrize("name", CASES)
def test_every_program_is_safe_any_number_of_times(name: str) -> None:
    """By every transport, small and large, alone and four times in a row, in place where it may be."""
    one = call(CASES[name])
    verify(one.program, in_place=one.in_place)
    assert check([one] * 4) == ()


@settings(max_examples=examples(150))
@given(cases())
def test_whatever_is_lowered_is_safe(case: Case) -> None:
    """Any operation, on any devices, by any transport."""
    verify(case.program, in_place=isinstance(case.operation, Reduction))


#: One program of each kind, and of each of its ways.
_KINDS = ("broadcast from", "scatter,", "allgather to", "allgather of two", "all_reduce of", "all_reduce with", "add")
KINDS = [call(case) for name, case in CASES.items() if name.startswith(_KINDS) and case.way.parts in {1, 4}]


@pytest.mark.parametrize("index", range(len(KINDS)), ids=[one.program.name for one in KINDS])
def test_every_pair_of_programs_is_safe_on_one_context(index: int) -> None:
    """Whatever runs between two runs of a program, both share rings, slots, buffers, flags and events in order.

    The run before the last three adds no order to them, so that each is between two of the other. In a circle of all
    programs, one of a pair is in the half that follows the other.
    """
    circle = [*KINDS[index:], *KINDS[:index]]
    for second in circle[1 : len(KINDS) // 2 + 1]:
        assert check([circle[0], second] * 2) == ()


@settings(max_examples=examples(150))
@given(st.lists(cases(), min_size=2, max_size=6))
def test_any_sequence_of_programs_is_safe_on_one_context(sequence: list[Case]) -> None:
    """Of any operations, transports and sizes."""
    assert check([call(case) for case in sequence]) == ()


# What is not in order is found. All columns are 8 wide unless a test says otherwise.


def test_a_finding_names_both_commands_their_columns_and_their_programs() -> None:
    """As a sentence that somebody can act on."""
    first = Copy(own(0), of(INPUT, 0), of(OUTPUT, 0))
    second = Copy(own(1), of(INPUT, 1, 2, 6), of(OUTPUT, 0, 4))
    (found, *_) = check([Call(program(first, second, devices=(0, 1)))])
    assert str(found) == (
        'race: output@0[4:8] in "own1: output@0[4:8] = input@1[2:6]" of program 1 and output@0[0:8] in '
        '"own0: output@0[0:8] = input@0[0:8]" of program 1 are in no order'
    )


@pytest.mark.parametrize(
    "missing", ["caller0: record enter(caller0)", "own0: wait enter(caller0)", "own0: record leave(own0)"]
)
def test_operands_are_the_callers_until_it_is_waited_for_and_when_it_has_waited(missing: str) -> None:
    """Also for the second of two calls, where an event of the first would be a poor substitute."""
    whole = program(MOVE)
    broken = evolve(whole, commands=tuple(c for c in whole.commands if str(c) != missing))
    assert kinds(whole, whole) == []
    assert {*kinds(broken)} == {RACE}
    assert {*kinds(whole, broken)} == {RACE}


def test_only_the_latest_record_before_a_wait_counts() -> None:
    """A record that is issued after the wait, or none at all, orders nothing; one before it does."""
    event, late = Event("read", own(0)), Copy(own(1), of(INPUT, 1), of(OUTPUT, 0))
    record, wait = Record(own(0), event), Wait(own(1), event)
    fence = tuple(order("end", own(1), own(0)))
    assert kinds(program(MOVE, record, wait, late, *fence, devices=(0, 1))) == []
    for commands in ((record, MOVE, wait), (wait, MOVE, record), (MOVE, wait)):
        assert kinds(program(*commands, late, *fence, devices=(0, 1))) == [RACE]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (of(OUTPUT, 0, 0, 4), of(OUTPUT, 0, 4, 8), False),
        (of(OUTPUT, 0, 0, 5), of(OUTPUT, 0, 4, 8), True),
        (of(OUTPUT).rows(0, 2), of(OUTPUT).rows(2, 4), False),
        (of(OUTPUT).rows(0, 2), of(OUTPUT).rows(1, 4), True),
        (of(OUTPUT).rows(1, 3), of(OUTPUT).rows(0, 2), True),
        (of(OUTPUT, 0), of(OUTPUT, 1), False),
        (kept(EXCHANGE, 0, 3), kept(EXCHANGE, 1, 3), False),
        (kept(EXCHANGE, 0, 3), kept(EXCHANGE, 1, 2), True),
        (kept(EXCHANGE, width=8)._replace(stop=4), kept(EXCHANGE, width=8)._replace(start=4), False),
        (kept(EXCHANGE, width=8)._replace(stop=4), kept(EXCHANGE, width=9)._replace(start=4), True),
        (kept(EXCHANGE).rows(0, 2), kept(EXCHANGE).rows(1, 2), True),
        (kept(STAGE, 0, SLOTS), kept(STAGE, 1, SLOTS), False),
        (kept(STAGE, 0, SLOTS), kept(EXCHANGE), False),
    ],
)
def test_which_views_share_bytes(first: View, second: View, expected: bool) -> None:
    """Operands are told apart by columns and rows; the context's memory by piece, and by columns of equal rows."""
    commands = (Copy(own(0), of(INPUT, 0), first), Copy(own(1), of(INPUT, 1), second))
    assert (RACE in kinds(fenced(*commands, devices=(0, 1)))) == expected


def test_programs_share_the_contexts_memory_whatever_they_keep_there() -> None:
    """Other columns of the same piece may be the same bytes, if the other program's rows are of another size."""

    def half(number: int, start: int, stop: int) -> Program:
        """Fill some columns of a piece in a stream that no other program uses."""
        stream = Stream(f"own{number}", 0)
        fill = Copy(stream, of(INPUT, 0, start, stop), View(Buffer(EXCHANGE, 0), start, stop, width=8))
        return Program("half", (*order("enter", caller(0), stream), fill, *order("leave", stream, caller(0))))

    assert kinds(half(1, 0, 4), half(1, 4, 8)) == []
    assert kinds(half(1, 0, 4), half(2, 4, 8)) == [RACE]
    assert kinds(half(1, 0, 4), half(1, 0, 8), half(2, 4, 8)) == [RACE, RACE]
    other = half(2, 0, 4).commands
    late = [Record(other[1].stream, Event("late", other[1].stream))] * 9  # so that it is looked at behind the others
    both = Program("halves", (*other[:2], *late, *half(1, 4, 8).commands, *other[2:]))
    assert kinds(both) == []
    assert kinds(half(1, 4, 8), both) == [RACE]


def test_outputs_in_place_are_inputs_or_residuals_too() -> None:
    """Device 1 may read what device 0 has summed only if that is nobody's input."""
    end = tuple(order("end", own(0), own(1)))
    total = Sum(own(0), (of(INPUT, 0), of(RESIDUAL, 0)), of(OUTPUT, 0))
    for role in (INPUT, RESIDUAL):
        commands = (total, *end, Copy(own(1), of(role, 0), of(OUTPUT, 1)), *order("read", own(1), own(0)))
        assert kinds(program(*commands, devices=(0, 1))) == []
        assert kinds(program(*commands, devices=(0, 1)), in_place=True) == [OVERWRITTEN]
    shifted = Sum(own(0), (of(INPUT, 0, 0, 8),), of(OUTPUT, 0, 4, 12))
    assert OVERWRITTEN in kinds(program(shifted), in_place=True)
    assert OVERWRITTEN not in kinds(program(shifted))


def test_the_host_runs_its_commands_before_it_issues_the_next() -> None:
    """What it stages is there for everything after it, and what it overwrites has to be read."""
    stage = Copy(Stream("own", HOST), View(Buffer(INPUT, HOST), 0, 8), kept(STAGE))
    read, event = Copy(own(0), kept(STAGE), of(OUTPUT)), Event("read", own(0))
    wait = Wait(Stream("own", HOST), event)
    assert kinds(program(stage, read)) == []
    assert kinds(program(stage, read), program(stage, read)) == [RACE]
    assert kinds(*[program(wait, stage, read, Record(own(0), event))] * 3) == []


def test_a_tensor_on_the_host_is_its_own_again_as_soon_as_the_call_returns() -> None:
    """So that a device may read it only while the call waits for that."""
    commands = (Copy(own(0), View(Buffer(INPUT, HOST), 0, 8), of(OUTPUT)), Record(own(0), Event("read", own(0))))
    assert kinds(program(*commands)) == [RACE]
    assert kinds(program(*commands, Wait(Stream("own", HOST), Event("read", own(0))))) == []


def test_a_result_on_the_host_is_read_when_its_events_have_passed() -> None:
    """All of them, and recorded behind what writes it."""
    copies = [Copy(own(d), of(INPUT, d), View(Buffer(OUTPUT, HOST), 8 * d, 8 * d + 8)) for d in (0, 1)]
    done = tuple(Event("leave", own(d)) for d in (0, 1))
    assert kinds(program(*copies, devices=(0, 1), results=done)) == []
    assert kinds(program(*copies, devices=(0, 1), results=done[:1])) == [RACE]
    assert kinds(program(*copies, devices=(0, 1), results=(done[0], Event("enter", caller(1))))) == [RACE]


def test_what_is_read_of_the_contexts_memory_was_written_by_the_same_program() -> None:
    """All of the columns, of the same rows, and behind the write."""
    fill = [Copy(own(0), of(INPUT, 0, 0, 4), kept(EXCHANGE)._replace(stop=4))]
    fill += [Copy(own(0), of(INPUT, 0, 4), kept(EXCHANGE)._replace(start=4))]
    read = Copy(own(0), kept(EXCHANGE), of(OUTPUT))
    assert kinds(program(*fill, read)) == []
    assert kinds(program(fill[0], read)) == [UNWRITTEN]
    assert kinds(program(*fill, read), program(read)) == [UNWRITTEN]
    assert kinds(program(read, *fill)) == [UNWRITTEN]
    rows = [Copy(own(0), of(INPUT).rows(part, 2), kept(STAGE).rows(part, 2)) for part in (0, 1)]
    taken = [Copy(own(0), kept(STAGE).rows(part, 2), of(OUTPUT).rows(part, 2)) for part in (0, 1)]
    assert kinds(program(rows[0], taken[0], rows[1], taken[1])) == []
    assert kinds(program(*rows, *taken)) == [UNWRITTEN]


def test_an_output_is_passed_on_only_when_it_is_written() -> None:
    """But a sum may add to what it holds."""
    on = Copy(own(0), of(OUTPUT), of(OUTPUT, 0, 8, 16))
    assert kinds(program(MOVE, on)) == []
    assert kinds(program(on, MOVE)) == [UNWRITTEN]
    assert kinds(program(Sum(own(0), (of(OUTPUT), of(INPUT)), of(OUTPUT)))) == []


@pytest.mark.parametrize(
    ("written", "gap"),
    [
        ([of(OUTPUT, 0, 0, 3), of(OUTPUT, 0, 4, 8)], "output@0[3:8]"),
        ([of(OUTPUT, 0, 1, 8)], "output@0[0:8]"),
        ([of(OUTPUT).rows(0, 2)], "output@0[0:8]"),
        ([of(OUTPUT, 0, 0, 4), of(OUTPUT, 0, 4, 8).rows(1, 2)], "output@0[4:8]"),
        ([of(OUTPUT).rows(0, 2), of(OUTPUT).rows(1, 2)], ""),
        ([of(OUTPUT, 0, 0, 4), of(OUTPUT, 0, 3, 8)], ""),
        ([of(OUTPUT, 0, 0, 8), of(OUTPUT, 0, 2, 4)], ""),
    ],
)
def test_outputs_have_no_gaps(written: list[View], gap: str) -> None:
    """In columns or in rows."""
    found = check([Call(program(*(Copy(own(0), of(INPUT), view) for view in written)))])
    assert [finding.message for finding in found] == ([f"nothing in test writes all rows of {gap}"] if gap else [])
    assert all(finding.kind == GAP for finding in found)


def test_what_is_wrong_is_told_once_however_often_the_program_runs() -> None:
    """Repetition finds more, but not the same again."""
    broken = fenced(MOVE, Copy(own(1), of(INPUT, 1), of(OUTPUT, 0)), devices=(0, 1))
    assert kinds(*[broken] * 4) == [RACE]


def test_a_program_with_findings_is_an_internal_error_that_shows_some() -> None:
    """With the name of the program, and how many more there are."""
    clash = [Copy(own(d), of(INPUT, d), of(OUTPUT, 0)) for d in range(8)]
    broken = fenced(*clash, devices=tuple(range(8)))
    with pytest.raises(InternalError) as error:
        verify(broken)
    lines = str(error.value).splitlines()
    assert lines[0] == "test is not safe:"
    assert [line.partition(":")[0] for line in lines[1:]] == [RACE] * 5 + ["and 2 more"]
