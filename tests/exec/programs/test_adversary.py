"""The adversarial scheduler finds what is unordered, and nothing else."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings

from tests.examples import examples
from tests.exec.caller import Caller, Script, memory, scripts, widths
from tests.exec.program_cases import CASES, Case
from tpplan.errors import InternalError
from tpplan.exec.backends.adversary import Adversary
from tpplan.exec.programs.fence import HOST_STREAM, caller, fence, order, own
from tpplan.exec.programs.lower import Route, lower
from tpplan.exec.programs.operation import Operation, Reduction, allgather, broadcast
from tpplan.exec.programs.ordering import verify
from tpplan.exec.programs.program import (
    HOST,
    INPUT,
    OUTPUT,
    SLOT,
    SLOTS,
    STAGE,
    Await,
    Buffer,
    Copy,
    Event,
    Exchange,
    Flag,
    Program,
    Queue,
    Record,
    Signal,
    Sum,
    View,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tpplan.exec.programs.program import Command

#: Of these every step is left out once; they have every kind of step that lowering makes.
MUTATED = (
    "broadcast, peer-small",
    "broadcast, host-small",
    "broadcast, peer-1 parts",
    "broadcast, peer-passed on",
    "broadcast, events-1 parts",
    "broadcast from the host, host-4 parts",
    "scatter from elsewhere, host-4 parts",
    "allgather, peer-small",
    "allgather to others, host-1 parts",
    "allgather of two, host-2 parts",
    "allgather of two, host-8 parts",
    "allgather of two, host-frames of 2 parts",
    "all_reduce of two, host-frames of 8 parts",
    "all_reduce with residual, host-shared frames of 1 parts",
    "gather, local-1 parts",
    "all_reduce with residual, peer-1 parts",
    "all_reduce with residual, events-1 parts",
    "all_reduce of two, host-2 parts",
    "all_reduce of fewer, peer-small",
    "add_residual, local-1 parts",
)

#: Schedules under which a broken program may go wrong; most need one or two. And a sound one, to keep tests short.
SCHEDULES, FEW = 300, 4


@settings(max_examples=examples(150))
@given(scripts())
def test_operations_in_a_row_give_what_torch_gives(script: Script) -> None:
    """Under any schedule all outputs are right to the byte, though inputs are overwritten right after each call."""
    script.play(Adversary)


@pytest.mark.parametrize("name", CASES)
def test_every_program_is_right_under_random_schedules(name: str) -> None:
    """Programs that run several times in a row, from different streams of the caller, give the right bytes."""
    case = CASES[name]
    for seed in range(3):
        assert not problem(case, case.program, seed)


@pytest.mark.parametrize("name", MUTATED)
def test_scheduler_and_checker_agree_on_every_step_that_is_left_out(name: str) -> None:
    """Without a Record, Wait, Signal or Await programs go wrong, unless the checker proves that it was not needed.

    Neither knows the other: the one sees wrong bytes and deadlocks, the other reasons about what happens before what.
    """
    case = CASES[name]
    for step, program in mutants(case.program):
        proof = objection(program, in_place=isinstance(case.operation, Reduction))
        found = any(problem(case, program, seed) for seed in range(SCHEDULES if proof else FEW))
        assert found == bool(proof), f"without {step}: {proof or 'nothing is wrong'}"


def objection(program: Program, *, in_place: bool) -> str:
    """Return what the checker has against a program, if anything."""
    try:
        verify(program, in_place=in_place)
    except InternalError as error:
        return str(error)
    return ""


def mutants(program: Program) -> Iterator[tuple[str, Program]]:
    """Yield a program without each of the steps that only wait or tell, and what that was."""
    for i, command in enumerate(program.commands):
        before, after = program.commands[:i], program.commands[i + 1 :]
        if isinstance(command, Exchange):
            for j, step in enumerate(command.steps):
                if not isinstance(step, Copy | Sum):
                    rest = evolve(command, steps=(*command.steps[:j], *command.steps[j + 1 :]))
                    yield str(step), evolve(program, commands=(*before, rest, *after))
        elif not isinstance(command, Copy | Sum):
            yield str(command), evolve(program, commands=(*before, *after))


def problem(case: Case, program: Program, seed: int) -> str:
    """Return what is wrong after a program ran some times and others ran that use the same queues, if anything is.

    Where devices send to each other, no credit is missed before one of them sends several messages unasked: one more
    than there are slots.
    """
    random = Random(seed)
    caller = Caller(Adversary(memory(), random), random, case.rows, torch.float16)
    try:
        for _ in range(case.turns + 2):
            caller.use_any(case.operation)
            caller.call(case.operation, program)
        if case.by_slots:
            for operation in one_way(case.operation):
                message = lower(operation, case.way)
                for _ in range(case.turns + 1):
                    caller.call(operation, message)
        caller.check()
    except (AssertionError, InternalError) as error:
        return str(error)
    return ""


def one_way(operation: Operation) -> Iterator[Operation]:
    """Yield a broadcast from each device to those that have an output."""
    targets = tuple(sorted(buffer.device for buffer in widths(operation) if buffer.role == OUTPUT))
    for device in operation.devices:
        if set(targets) - {device}:
            yield broadcast(device, targets, 1)


DEVICES = (0, 1, 2)
QUEUE = Queue(1, 0, (1,))


def of(role: str, device: int, start: int = 0, stop: int = 4) -> View:
    """Return columns of one of the caller's tensors."""
    return View(Buffer(role, device), start, stop)


def pinned(start: int = 0, stop: int = 4) -> View:
    """Return columns of the four in host memory that all devices use."""
    return View(Buffer(STAGE, 0, 0, SLOTS), start, stop, width=4)


def between(*commands: Command) -> Program:
    """Return a program in which each device's stream starts after its caller's, and the other way round at the end."""
    before = [command for d in DEVICES for command in order("enter", caller(d), own(d))]
    after = [command for d in DEVICES for command in order("leave", own(d), caller(d))]
    return Program("by hand", (*before, *commands, *after))


def meet(name: str) -> list[Command]:
    """Let all devices wait for each other."""
    workers = [own(d) for d in DEVICES]
    return [*fence(name, workers, own(0), workers)]


def wrong(operation: Operation, *commands: Command) -> int:
    """Return how many of 50 schedules give wrong bytes when a program runs several times in a row."""
    case = Case(operation, Route("events"), 3)
    return sum(1 for seed in range(50) if problem(case, between(*commands), seed))


def test_a_broadcast_that_does_not_wait_for_its_download_is_caught() -> None:
    """ExLlamaV2 uploads from pinned memory while the download into it may still run."""
    download = Copy(own(0), of(INPUT, 0), pinned())
    uploads = [Copy(own(d), pinned(), of(OUTPUT, d)) for d in DEVICES]
    operation = broadcast(0, DEVICES, 4)
    assert not wrong(operation, download, *meet("downloaded"), *uploads, *meet("uploaded"))
    assert wrong(operation, download, *uploads, *meet("uploaded")) > 25


def test_an_allgather_that_does_not_wait_for_the_one_before_is_caught() -> None:
    """ExLlamaV2's second allgather writes over pinned memory from which the first may still upload."""
    cut = ((0, 0, 1), (1, 1, 3), (2, 3, 4))
    downloads = [Copy(own(d), of(INPUT, d, 0, stop - start), pinned(start, stop)) for d, start, stop in cut]
    uploads = [Copy(own(d), pinned(), of(OUTPUT, d)) for d in DEVICES]
    operation = allgather("allgather", cut, DEVICES)
    assert not wrong(operation, *downloads, *meet("downloaded"), *uploads, *meet("uploaded"))
    assert wrong(operation, *downloads, *meet("downloaded"), *uploads) > 25


def test_an_all_reduce_that_orders_two_of_three_devices_is_caught() -> None:
    """ExLlamaV2's all_reduce is ordered for two devices; the third's part may be read before it is in pinned memory."""
    parts = [View(Buffer(STAGE, 0, 0, SLOTS), 4 * d, 4 * d + 4, width=12) for d in DEVICES]
    downloads = [Copy(own(d), of(INPUT, d), part) for d, part in zip(DEVICES, parts, strict=True)]
    sums = [Sum(own(d), tuple(parts), of(OUTPUT, d)) for d in DEVICES]
    operation = Reduction("all_reduce", 4, DEVICES, DEVICES, residual=False)
    pair = [*fence("two", [own(0), own(1)], own(0), [own(0), own(1)])]
    assert not wrong(operation, *downloads, *meet("downloaded"), *sums, *meet("added"))
    assert wrong(operation, *downloads, *pair, *sums, *meet("added")) > 25


def test_a_gather_is_not_readable_before_it_is_waited_for() -> None:
    """ExLlamaV2 returns pinned memory that is still being written; here it holds garbage until the wait is over."""
    case = CASES["gather, local-1 parts"]
    programmatic = 0
    for seed in range(20):
        machine = Adversary(memory(), Random(seed))
        operands = {buffer: torch.zeros(3, columns) for buffer, columns in widths(case.operation).items()}
        output = operands[Buffer(OUTPUT, HOST)].fill_(1)
        pending = machine.run(case.program, operands)
        for _ in range(seed):
            machine.pass_time()
        programmatic += bool(output.any())
        pending.wait()
        assert pending.done()
        assert not output.any()
    assert programmatic > 10


def test_asking_often_enough_is_waiting() -> None:
    """Time passes while a caller asks whether a gather is done, so that polling it ends."""
    case = CASES["gather, local-1 parts"]
    operands = {buffer: torch.zeros(3, columns) for buffer, columns in widths(case.operation).items()}
    pending = Adversary(memory(), Random(0)).run(case.program, operands)
    assert any(pending.done() for _ in range(1000))


def test_a_wait_is_for_the_record_that_was_issued_last() -> None:
    """Neither a later Record of the event nor a missing one holds a stream; one of an earlier program does."""
    machine = Adversary(memory(), Random(0))
    there, never = Event("there", own(0)), Event("never", own(2))
    there_and_back = (*order("there", own(0), own(1)), *order("back", own(1), own(0)))
    machine.run(Program("earlier", (Wait(own(0), never), *there_and_back, Record(own(0), there))), {})
    machine.synchronize()
    flag = Flag("ready", QUEUE, 1)
    machine.run(Program("recorded late", (Exchange(own(0), (Await(own(0), flag),)), Record(own(0), there))), {})
    machine.run(Program("held", (Wait(own(1), there),)), {})
    with pytest.raises(InternalError, match=r"own1 at own1: wait there\(own0\)"):
        machine.synchronize()
    machine.run(Program("freed", (Exchange(own(2), (Signal(own(2), flag),)),)), {})
    machine.synchronize()


def test_a_deadlock_shows_what_every_stream_waits_for() -> None:
    """Two kernels that each wait for the other's flag are an error with both heads, and closing tells it once."""
    machine = Adversary(memory(), Random(0))
    ready, done = Flag("ready", QUEUE, 1), Flag("done", QUEUE)
    first = Exchange(own(0), (Await(own(0), ready), Signal(own(0), done)))
    then = Exchange(own(1), (Await(own(1), done), Signal(own(1), ready)))
    machine.run(Program("stuck", (first, then)), {})
    heads = r"deadlock: own0 at own0: await ready\(0→1\); own1 at own1: await done\(0→1\)"
    with pytest.raises(InternalError, match=heads):
        machine.close()
    machine.close()


@pytest.mark.parametrize(
    "commands",
    [
        (
            Exchange(own(0), (Signal(own(0), Flag("full", QUEUE)),)),
            Exchange(own(1), (Await(own(1), Flag("full", QUEUE)),)),
        ),
        tuple(order("there", own(0), own(1))),
    ],
    ids=["flag", "event"],
)
def test_a_stream_goes_on_as_soon_as_what_it_waited_for_is_there(commands: tuple[Command, ...]) -> None:
    """Before the other stream's next command, or long after it."""
    places = set()
    for seed in range(50):
        machine = Adversary(memory(), Random(seed))
        machine.run(Program("one waits", commands), {})
        done: list[int] = []
        for _ in range(3):
            machine.call(own(0), partial(done.append, 0))
        machine.call(own(1), partial(done.append, 1))
        machine.synchronize()
        places.add(done.index(1))
    assert {0, 3} <= places


@pytest.mark.parametrize("changed", [of(INPUT, 0), of(OUTPUT, 0)], ids=["source", "target"])
def test_what_changes_during_a_copy_becomes_garbage(changed: View) -> None:
    """Of source or target: the elements that changed, whatever they hold then, and no others."""
    for seed in range(10):
        operands = {Buffer(role, 0): torch.full((2, 4), value) for role, value in ((INPUT, 7), (OUTPUT, 0))}
        machine = Adversary(memory(), Random(seed))
        machine.run(Program("copy", (Copy(own(0), of(INPUT, 0), of(OUTPUT, 0)),)), operands)
        machine.pass_time()
        assert not operands[Buffer(OUTPUT, 0)].eq(7).any()
        operands[changed.buffer][1] += 1
        machine.synchronize()
        assert operands[Buffer(OUTPUT, 0)][0].eq(7).all()
        assert not operands[Buffer(OUTPUT, 0)][1].eq(7).any()


def test_a_flag_lets_one_of_two_streams_go_on() -> None:
    """Of one device, if it was raised once; the other stream is blocked again, though it was not before."""
    flag = Flag("full", QUEUE)
    waits = (Exchange(at, (Await(at, flag),)) for at in (own(1), caller(1)))
    records = (Record(at, Event("there", at)) for at in (own(1), caller(1)))
    program = Program("raised once", (Exchange(own(0), (Signal(own(0), flag),)), *waits, *records))
    for seed in range(50):
        machine = Adversary(memory(), Random(seed))
        machine.run(program, {})
        with pytest.raises(InternalError, match="deadlock"):
            machine.close()


def test_the_host_is_done_with_a_command_before_it_issues_the_next() -> None:
    """What the host copies is there when a program was issued, and what it waits for has happened by then."""
    operands = {
        buffer: torch.full((3, 4), value) for buffer, value in ((Buffer(INPUT, 0), 7), (Buffer(OUTPUT, HOST), 0))
    }
    ready = Event("ready", own(0))
    commands = (
        Copy(own(0), of(INPUT, 0), pinned()),
        Record(own(0), ready),
        Wait(HOST_STREAM, ready),
        Copy(HOST_STREAM, pinned(), of(OUTPUT, HOST)),
    )
    for seed in range(20):
        Adversary(memory(), Random(seed)).run(Program("to the host", commands), operands)
        assert operands[Buffer(OUTPUT, HOST)].eq(7).all()
        operands[Buffer(OUTPUT, HOST)].zero_()


def test_messages_take_turns_with_slots_and_wait_for_credit() -> None:
    """A sender is at most two messages ahead of its receiver; the third one goes into the first slot again."""
    mine = memory()
    machine = Adversary(mine, Random(0))
    slot = View(Buffer(SLOT, 1, queue=QUEUE), 0, 4, width=4)
    full, free = Flag("full", QUEUE), Flag("free", QUEUE, 1)
    send = Program(
        "send",
        (Exchange(own(0), (Await(own(0), free, SLOTS), Copy(own(0), of(INPUT, 0), slot), Signal(own(0), full))),),
    )
    take = Program(
        "take", (Exchange(own(1), (Await(own(1), full), Copy(own(1), slot, of(OUTPUT, 1)), Signal(own(1), free))),)
    )
    for value in (1, 2, 3):
        machine.run(send, {Buffer(INPUT, 0): torch.full((1, 4), value)})
    while machine.pass_time():
        pass
    assert [message(row) for row in mine.slots(QUEUE)] == [1, 2]
    output = torch.zeros(1, 4, dtype=torch.int64)
    output = torch.zeros(1, 4, dtype=torch.int64)
    taken: list[int] = []
    for _ in range(3):
        machine.run(take, {Buffer(OUTPUT, 1): output})
        machine.call(own(1), lambda: taken.append(message(output.view(torch.uint8)[0])))
    machine.synchronize()
    assert taken == [1, 2, 3]
    assert [message(row) for row in mine.slots(QUEUE)] == [3, 2]


def message(row: Tensor) -> int:
    """Return the number that four elements of 8 bytes hold, or -1 if they differ."""
    numbers = set(row[:32].view(torch.int64).tolist())
    return numbers.pop() if len(numbers) == 1 else -1


def test_memory_starts_as_garbage() -> None:
    """Nothing may count on zeros: not in exchange buffers, not in rings, not in slots."""
    mine = memory()
    for block in (*mine.exchange.values(), *mine.rings.values(), mine.slots(QUEUE)):
        block.zero_()
    machine = Adversary(mine, Random(0))
    slot = View(Buffer(SLOT, 1, queue=QUEUE), 0, 4, width=4)
    machine.run(Program("read", (Copy(own(1), slot, of(OUTPUT, 1)),)), {Buffer(OUTPUT, 1): torch.zeros(1, 4)})
    machine.synchronize()
    for block in (*mine.exchange.values(), *mine.rings.values(), mine.slots(QUEUE)):
        assert block.count_nonzero() > 0.9 * block.numel()
