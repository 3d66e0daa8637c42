"""The happens-before checker: all that is lowered passes, and what is out of order is named."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import exllamav2_programs as exllamav2
from tests.program_cases import CASES, Case, cases
from tpplan.errors import InternalError
from tpplan.exec.fence import caller, fence, order, own
from tpplan.exec.operation import Reduction
from tpplan.exec.ordering import DEADLOCK, FLAGS, GAP, OVERWRITTEN, RACE, UNWRITTEN, check, verify
from tpplan.exec.program import (
    EXCHANGE,
    HOST,
    INPUT,
    OUTPUT,
    RESIDUAL,
    SLOT,
    SLOTS,
    STAGE,
    Await,
    Buffer,
    Command,
    Copy,
    Event,
    Exchange,
    Flag,
    Program,
    Queue,
    Record,
    Signal,
    Step,
    Stream,
    Sum,
    View,
    Wait,
)
from tpplan.exec.timeline import Call


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


@settings(max_examples=150)
@given(cases())
def test_whatever_is_lowered_is_safe(case: Case) -> None:
    """Any operation, on any devices, by any transport."""
    verify(case.program, in_place=isinstance(case.operation, Reduction))


#: One program of each kind, and of each of its ways.
_KINDS = ("broadcast from", "scatter,", "allgather to", "allgather of two", "all_reduce of", "all_reduce with", "add")
KINDS = [call(case) for name, case in CASES.items() if name.startswith(_KINDS) and case.way.parts in {1, 4}]


@pytest.mark.parametrize("first", KINDS, ids=lambda one: one.program.name)
def test_every_pair_of_programs_is_safe_on_one_context(first: Call) -> None:
    """Whatever runs between two runs of a program, both share rings, slots, buffers, flags and events in order."""
    for second in KINDS:
        assert check([first, second, first]) == ()


@settings(max_examples=150)
@given(st.lists(cases(), min_size=2, max_size=6))
def test_any_sequence_of_programs_is_safe_on_one_context(sequence: list[Case]) -> None:
    """Of any operations, transports and sizes."""
    assert check([call(case) for case in sequence]) == ()


# What is not in order is found. All columns are 8 wide unless a test says otherwise.


def of(role: str, device: int = 0, start: int = 0, stop: int = 8) -> View:
    """Columns of an operand."""
    return View(Buffer(role, device), start, stop)


def kept(role: str, piece: int = 0, pieces: int = 1, width: int = 8) -> View:
    """A piece of device 0's exchange buffer, or a slot of its ring."""
    return View(Buffer(role, 0, piece, pieces), 0, width, width=width)


def program(*commands: Command, devices: tuple[int, ...] = (0,), results: tuple[Event, ...] = ()) -> Program:
    """Put commands between the callers' streams and tpplan's on some devices."""
    enter = [command for d in devices for command in order("enter", caller(d), own(d))]
    leave = [command for d in devices for command in order("leave", own(d), caller(d))]
    return Program("test", (*enter, *commands, *leave), results)


def fenced(*commands: Command, devices: tuple[int, ...]) -> Program:
    """Put commands between all callers' streams and all of tpplan's on some devices."""
    enter = fence("enter", map(caller, devices), own(devices[0]), map(own, devices))
    leave = fence("leave", map(own, devices), own(devices[0]), map(caller, devices))
    return Program("test", (*enter, *commands, *leave))


def kinds(*programs: Program, in_place: bool = False) -> list[str]:
    """The kinds of what is found in a sequence of programs."""
    return [finding.kind for finding in check([Call(each, in_place) for each in programs])]


MOVE = Copy(own(0), of(INPUT), of(OUTPUT))


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


ONE_WAY = Queue(1, 0, (1,))
FULL, FREE = Flag("full", ONE_WAY), Flag("free", ONE_WAY, 1)
IN_SLOT = View(Buffer(SLOT, 1, queue=ONE_WAY), 0, 8, width=8)
SEND: tuple[Step, ...] = (Await(own(0), FREE, SLOTS), Copy(own(0), of(INPUT, 0), IN_SLOT), Signal(own(0), FULL))
RECEIVE: tuple[Step, ...] = (Await(own(1), FULL), Copy(own(1), IN_SLOT, of(OUTPUT, 1)), Signal(own(1), FREE))


def message(
    send: tuple[Step, ...] = SEND, receive: tuple[Step, ...] = RECEIVE, between: tuple[Command, ...] = ()
) -> Program:
    """Two kernels."""
    return program(Exchange(own(0), send), *between, Exchange(own(1), receive), devices=(0, 1))


def test_credits_keep_a_sender_from_slots_that_are_still_read() -> None:
    """With one credit too many, the message after the next takes the place of the first; with one too few it stays."""
    assert kinds(*[message()] * 5) == []
    weak = message((Await(own(0), FREE, SLOTS + 1), *SEND[1:]))
    assert kinds(*[weak] * SLOTS) == []
    assert kinds(*[weak] * (SLOTS + 1)) == [RACE]
    with pytest.raises(InternalError):
        verify(weak)
    assert kinds(*[message((Await(own(0), FREE, SLOTS - 1), *SEND[1:]))] * 5) == []


def test_a_flag_that_nobody_raises_is_waited_for_for_ever() -> None:
    """And a program that waits for the next program's flag is no better, though that one comes."""
    first = message(receive=(*RECEIVE, Await(own(1), FULL)))
    assert DEADLOCK in kinds(first)
    assert DEADLOCK in kinds(first, message())
    found = [str(finding) for finding in check([Call(first)])]
    assert (
        'deadlock: "own1: await full(0→1)" of program 1 waits for 2 signals, of which 1 are issued with it or before'
        in found
    )


def test_kernels_that_wait_for_each_other_are_a_cycle() -> None:
    """The finding goes once around it."""
    ready, done = Flag("ready", ONE_WAY, 1), Flag("done", ONE_WAY)
    there = (Await(own(0), ready), Copy(own(0), of(INPUT, 0), of(OUTPUT, 1)), Signal(own(0), done))
    assert kinds(message(there, (Signal(own(1), ready), Await(own(1), done)))) == []
    (found,) = check([Call(message(there, (Await(own(1), done), Signal(own(1), ready))))])
    assert found.kind == DEADLOCK
    assert "own0: await ready(0→1)" in found.message
    assert "own1: await done(0→1)" in found.message


def test_the_host_may_not_wait_for_a_kernel_that_needs_one_it_has_not_issued() -> None:
    """The second kernel would never start."""
    between = (Record(own(0), Event("sent", own(0))), Wait(Stream("own", HOST), Event("sent", own(0))))
    assert kinds(message(between=between)) == []
    waits = (*SEND, Await(own(0), Flag("ready", ONE_WAY, 1)))
    answers = (*RECEIVE, Signal(own(1), Flag("ready", ONE_WAY, 1)))
    assert kinds(message(waits, answers)) == []
    assert DEADLOCK in kinds(message(waits, answers, between))


@pytest.mark.parametrize(
    ("send", "receive"),
    [
        (SEND[1:], RECEIVE),
        (SEND[:-1], RECEIVE[1:]),
        (SEND, RECEIVE[:-1]),
        (SEND, RECEIVE[1:]),
        (SEND, (*RECEIVE, Signal(own(1), FREE))),
        ((*SEND, Signal(own(0), FULL)), (*RECEIVE, Await(own(1), FULL))),
        ((Await(own(0), FREE, SLOTS), *SEND), RECEIVE),
        (SEND, (*RECEIVE[:-1], Signal(own(0), FREE))),
        (SEND, (Await(Stream("load", 1), FULL), *RECEIVE[1:])),
    ],
)
def test_every_message_is_told_awaited_and_freed_once(send: tuple[Step, ...], receive: tuple[Step, ...]) -> None:
    """By those that it is for: or some later message would be looked for in the wrong slot."""
    assert FLAGS in kinds(message(send, receive))


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


# ExLlamaV2's sequences are not in order.


def pinned_races(*programs: Program) -> list[str]:
    """What is found in programs of the original, all of which is about its pinned buffer."""
    found = check([Call(each) for each in programs])
    assert all("stage@host" in finding.message for finding in found)
    return [finding.message for finding in found if finding.kind == RACE]


def test_exllamav2_broadcasts_before_it_has_downloaded() -> None:
    """Nothing orders the download from the source before the uploads to the other devices."""
    races = pinned_races(exllamav2.broadcast(0, (0, 1, 2)))
    download = '"own0: stage@host[0:12] = input@0[0:12]" of program 1'
    assert [download in race for race in races] == [True, True]
    assert '"own1: output@1[0:12] = stage@host[0:12]" of program 1' in races[0]
    assert '"own2: output@2[0:12] = stage@host[0:12]" of program 1' in races[1]


def test_exllamav2_overwrites_what_the_last_allgather_has_not_uploaded() -> None:
    """One alone is in order; the next one's download races with the uploads of the one before."""
    gather = exllamav2.allgather((0, 4, 8, 12))
    assert pinned_races(gather) == []
    races = pinned_races(gather, gather)
    assert any(
        '"own0: stage@host[0:4] = input@0[0:4]" of program 2' in race
        and '"own1: output@1[0:12] = stage@host[0:12]" of program 1' in race
        for race in races
    )


def test_exllamav2_returns_what_it_is_still_gathering() -> None:
    """The caller reads the pinned buffer with nothing to wait for; with an event to wait for it would be in order."""
    assert kinds(exllamav2.gather((0, 4, 12), waited_for=True)) == []
    found = check([Call(exllamav2.gather((0, 4, 12), waited_for=False))])
    assert [finding.kind for finding in found] == [RACE, RACE]
    assert all("the caller reads and overwrites output@host" in finding.message for finding in found)


def test_exllamav2_sums_over_what_a_third_device_has_not_fetched() -> None:
    """Two in a row are in order on two devices; on three the second one's first sum races with the last uploads."""
    assert pinned_races(*[exllamav2.all_reduce(2)] * 3) == []
    assert pinned_races(exllamav2.all_reduce(3)) == []
    (race,) = pinned_races(*[exllamav2.all_reduce(3)] * 2)
    assert '"own0: stage@host[0:12] = output@0[0:12]" of program 2' in race
    assert '"own1: output@1[0:12] = stage@host[0:12]" of program 1' in race
