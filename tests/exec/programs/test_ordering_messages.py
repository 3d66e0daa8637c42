"""The checker on kernels that send each other messages: credits, flags and cycles."""

from __future__ import annotations

import pytest

from tests.exec.programs.ordering_cases import kinds, of, program
from tpplan.errors import InternalError
from tpplan.exec.programs.fence import own
from tpplan.exec.programs.ordering import DEADLOCK, FLAGS, RACE, Call, check, verify
from tpplan.exec.programs.program import (
    HOST,
    INPUT,
    OUTPUT,
    SLOT,
    SLOTS,
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
    View,
    Wait,
)

ONE_WAY = Queue(1, 0, (1,))
FULL, FREE = Flag("full", ONE_WAY), Flag("free", ONE_WAY, 1)


def send(queue: Queue, credit: int) -> tuple[Step, ...]:
    """Return what the sender does, with so many messages that nobody has freed."""
    slot = View(Buffer(SLOT, queue.place, queue=queue), 0, 8, width=8)
    free, full = Flag("free", queue, 1), Flag("full", queue)
    return (Await(own(0), free, credit), Copy(own(0), of(INPUT, 0), slot), Signal(own(0), full))


def receive(queue: Queue) -> tuple[Step, ...]:
    """Return what the receiver does."""
    slot = View(Buffer(SLOT, queue.place, queue=queue), 0, 8, width=8)
    free, full = Flag("free", queue, 1), Flag("full", queue)
    return (Await(own(1), full), Copy(own(1), slot, of(OUTPUT, 1)), Signal(own(1), free))


SEND, RECEIVE = send(ONE_WAY, SLOTS), receive(ONE_WAY)


def message(
    sends: tuple[Step, ...] = SEND, receives: tuple[Step, ...] = RECEIVE, between: tuple[Command, ...] = ()
) -> Program:
    """Two kernels."""
    return program(Exchange(own(0), sends), *between, Exchange(own(1), receives), devices=(0, 1))


@pytest.mark.parametrize(("place", "slots"), [(1, 2), (HOST, 4)])
def test_credits_keep_a_sender_from_slots_that_are_still_read(place: int, slots: int) -> None:
    """With one credit too many, a message takes the place of one that is read; with one too few it stays."""
    queue = Queue(place, 0, (1,))
    right, weak, careful = (message(send(queue, slots + more), receive(queue)) for more in (0, 1, -1))
    assert verify(right) == right
    assert kinds(*[right] * 9) == kinds(*[careful] * 9) == []
    assert kinds(*[weak] * slots) == []
    assert kinds(*[weak] * (slots + 1)) == [RACE]
    with pytest.raises(InternalError):
        verify(weak)


def test_a_flag_that_nobody_raises_is_waited_for_for_ever() -> None:
    """And a program that waits for the next program's flag is no better, though that one comes."""
    first = message(receives=(*RECEIVE, Await(own(1), FULL)))
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
    ("sends", "receives"),
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
def test_every_message_is_told_awaited_and_freed_once(sends: tuple[Step, ...], receives: tuple[Step, ...]) -> None:
    """By those that it is for: or some later message would be looked for in the wrong slot."""
    assert FLAGS in kinds(message(sends, receives))
