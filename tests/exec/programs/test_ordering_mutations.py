"""The checker proved by mutation: no command that orders others can be lost or weakened, and it would not notice.

Every mutant of a program is run alone, several times in a row, and among programs that use the same queues, rings,
events and exchange buffers as they should.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from tests.exec.program_cases import CASES, Case, case
from tpplan.exec.programs.operation import Reduction, broadcast
from tpplan.exec.programs.ordering import Call, check
from tpplan.exec.programs.program import (
    HOST,
    LOAD,
    OWN,
    Await,
    Copy,
    Exchange,
    Program,
    Record,
    Signal,
    Step,
    Stream,
    Sum,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Place = tuple[int, ...]

#: A device that none of the mutated programs uses.
ELSEWHERE = 9

_TESTED = (
    "broadcast,",
    "broadcast from",
    "scatter,",
    "scatter from the host",
    "allgather,",
    "allgather to others",
    "allgather of two",
    "gather",
    "all_reduce with residual",
    "all_reduce of fewer",
    "all_reduce of few columns",
    "all_reduce of one",
    "add_residual",
)
#: Of frames only those in one part that are not shared out: in others, messages tell that those before were read.
TESTED = {
    name: found
    for name, found in CASES.items()
    if name.startswith(_TESTED)
    and (not found.way.shared if found.way.parts == 1 else found.way.parts == 4 and not found.way.framed)
}

_HUB = (
    "Of all senders this one tells the receivers what is staged, so that it knows that too; and its own next message "
    "comes after the copy. There is one more round, so that the next to fill this slot, after all rounds, wait for it."
)
_ALONE = (
    "The only sender adds up its own share from its own tensor, of which it sends the rest: either stream may do so. "
    "Nobody asks for the sum before all shares are added up."
)
_SAME = "What stays on a device is nobody else's: either stream may copy it, between what its caller does."
_WITHIN = {
    "own0: output@0[0:5] = input@0[0:5] in load0": _SAME,
    "own1: output@1[5:9] = input@1[0:4] in load1": _SAME,
}
_NOT_YET = "Device 2 gives nothing, so that its caller need only be waited for before the sum is there for it to fetch."

_WITHIN_TWO = {
    "own0: output@0[0:24] = input@0[0:24] in load0": _SAME,
    "own1: output@1[24:40] = input@1[0:16] in load1": _SAME,
}

#: Mutants that are as good as the program, and why.
SURVIVORS = {
    "allgather, host-1 parts": _WITHIN | {"own2: output@2[9:40] = input@2[0:31] in load2": _SAME},
    "allgather to others, host-1 parts": _WITHIN,
    "allgather of two, host-1 parts": _WITHIN_TWO,
    "allgather of two, host-4 parts": _WITHIN_TWO,
    "allgather, host-4 parts": {
        **_WITHIN,
        "own2: output@2[9:40] = input@2[0:31] in load2": _SAME,
        "load1: output@1[0:5] rows 2/4 = stage[0/2]@0[0:5] rows 2/4 in own1": _HUB,
        "load1: output@1[9:40] rows 2/4 = stage[0/2]@2[0:31] rows 2/4 in own1": _HUB,
    },
    "allgather to others, host-4 parts": {
        **_WITHIN,
        "load1: output@1[0:5] rows 2/4 = stage[0/2]@0[0:5] rows 2/4 in own1": _HUB,
        "load1: output@1[9:40] rows 2/4 = stage[0/2]@2[0:31] rows 2/4 in own1": _HUB,
    },
    "all_reduce with residual, host-4 parts": {
        "load0: output@0[0:16] rows 2/4 = input@0[0:16] rows 2/4 + stage[0/2]@1[0:16] rows 2/4 + "
        "stage[0/2]@2[0:16] rows 2/4 + residual@0[0:16] rows 2/4 in own0": _HUB,
        "load0: output@0[16:32] rows 2/4 = stage[0/2]@1[0:16] rows 2/4 in own0": _HUB,
        "load0: output@0[32:40] rows 2/4 = stage[0/2]@2[0:8] rows 2/4 in own0": _HUB,
    },
    "all_reduce of fewer, host-4 parts": {
        "load0: output@0[0:16] rows 2/4 = input@0[0:16] rows 2/4 + stage[0/2]@2[0:16] rows 2/4 + "
        "residual@0[0:16] rows 2/4 in own0": _HUB,
        "load0: output@0[16:24] rows 2/4 = stage[0/2]@1[0:8] rows 2/4 in own0": _HUB,
        "load0: output@0[24:32] rows 2/4 = stage[0/2]@2[0:8] rows 2/4 in own0": _HUB,
        "load0: output@0[32:40] rows 2/4 = stage[0/2]@3[0:8] rows 2/4 in own0": _HUB,
    },
    "all_reduce of one and few columns, events-1 parts": {
        "own0: wait enter(caller2) on the wrong side of own0: output@0[0:8] = input@0[0:8] + residual@0[0:8]": _NOT_YET,
    },
    "all_reduce of one, host-1 parts": {
        "load1: output@1[16:32] = input@1[16:32] + residual@1[16:32] in own1": _ALONE,
    },
    "all_reduce of one, host-4 parts": {
        **{
            f"load1: output@1[16:32] rows {part}/4 = input@1[16:32] rows {part}/4 + "
            f"residual@1[16:32] rows {part}/4 in own1": _ALONE
            for part in range(4)
        },
        "load0: output@0[16:32] rows 2/4 = stage[0/2]@1[0:16] rows 2/4 in own0": _HUB,
        "load0: output@0[32:40] rows 2/4 = stage[0/2]@2[0:8] rows 2/4 in own0": _HUB,
    },
}


def steps(program: Program) -> Iterator[tuple[Place, Step | Record | Wait]]:
    """Yield every command, and every step of an exchange, with its place."""
    for i, command in enumerate(program.commands):
        if isinstance(command, Exchange):
            yield from (((i, j), step) for j, step in enumerate(command.steps))
        else:
            yield (i,), command


def changed(program: Program, changes: dict[Place, Any]) -> Program:
    """Return a program with other commands in some places, or none."""
    commands: list[Any] = []
    for i, command in enumerate(program.commands):
        if isinstance(command, Exchange):
            kept = [changes.get((i, j), step) for j, step in enumerate(command.steps)]
            commands.append(evolve(command, steps=tuple(step for step in kept if step is not None)))
        else:
            commands.append(changes.get((i,), command))
    return evolve(program, commands=tuple(command for command in commands if command is not None))


def dropped(program: Program) -> Iterator[tuple[str, Program]]:
    """Yield a program without each of the commands that order others."""
    for place, step in steps(program):
        if not isinstance(step, Copy | Sum):
            yield f"no {step}", changed(program, {place: None})


def weakened(program: Program) -> Iterator[tuple[str, Program]]:
    """Yield a program in which each Await lets its flag be one further behind."""
    for place, step in steps(program):
        if isinstance(step, Await):
            yield f"later {step}", changed(program, {place: evolve(step, behind=step.behind + 1)})


def misplaced(program: Program) -> Iterator[tuple[str, Program]]:
    """Yield a program in which a device tells of its accesses before them, or waits for others behind them."""
    found = [*steps(program)]
    for place, step in found:
        if isinstance(step, Copy | Sum):
            continue
        alike: tuple[type, ...] = (Record, Signal) if isinstance(step, Record | Signal) else (Wait, Await)
        row = found[::-1] if Record in alike else found
        row = [(p, s) for p, s in row if s.stream == step.stream and p[:-1] == place[:-1]]
        after = row[row.index((place, step)) + 1 :]
        count = next((i for i, (_, s) in enumerate(after) if not isinstance(s, alike)), len(after))
        accesses = [*takewhile(lambda each: isinstance(each[1], Copy | Sum), after[count:])]
        if accesses:
            passed = [(place, step), *after[:count], *accesses]
            now = zip([p for p, _ in passed], [s for _, s in (*passed[1:], passed[0])], strict=True)
            yield f"{step} on the wrong side of {accesses[-1][1]}", changed(program, dict(now))


def moved(program: Program) -> Iterator[tuple[str, Program]]:
    """Yield a program in which each copy and sum runs in another stream of its device."""
    for place, step in steps(program):
        if isinstance(step, Copy | Sum) and step.stream.device != HOST:
            other = Stream(LOAD if step.stream.kind == OWN else OWN, step.stream.device)
            yield f"{step} in {other}", changed(program, {place: evolve(step, stream=other)})


def call(found: Case) -> Call:
    """A program as its caller runs it: a sum may be in place."""
    return Call(found.program, in_place=isinstance(found.operation, Reduction))


def neighbours(found: Case) -> list[Call]:
    """Return others on the same context: one-way messages by the same queues, and sums and rings in part elsewhere."""
    queues = {step.flag.queue for _, step in steps(found.program) if isinstance(step, Signal)}
    others = [Case(broadcast(q.sender, q.receivers, 8), found.way, 2) for q in queues if found.by_slots]
    for device in found.operation.devices:
        pair = (device, ELSEWHERE)
        others.append(case(Reduction("all_reduce", 40, pair, pair, residual=False), "events", 13))
        if found.way.transport == "host" and not found.by_slots:
            others.append(case(Reduction("all_reduce", 40, pair, pair, residual=False), "host", 13))
    return [call(other) for other in others]


def is_caught(mutant: Call, others: Iterable[Call], turns: int) -> bool:
    """Tell whether the checker finds fault with a program, alone or among others, in this many turns.

    Whatever runs earlier adds no order to what runs later: long sequences find all that shorter ones do, which are only
    there to be quick.
    """
    alone = ([mutant] * times for times in sorted({1, 2, turns + 1}))
    among = ([q] * turns + [mutant] + [q] * turns for q in others)
    around = ([mutant, *[q] * (turns - 1), mutant] for q in others)
    return any(check(sequence) for sequences in (alone, among, around) for sequence in sequences)


@pytest.mark.parametrize("name", TESTED)
def test_every_mutant_is_caught_or_explained(name: str) -> None:
    """Of every command that orders others: without it, weaker, or on the wrong side; of every access: elsewhere."""
    found = TESTED[name]
    one, others = call(found), neighbours(found)
    mutants = [mutant for mutation in (dropped, weakened, misplaced, moved) for mutant in mutation(one.program)]
    assert mutants
    assert not is_caught(one, others, found.turns)
    survivors = {what for what, program in mutants if not is_caught(evolve(one, program=program), others, found.turns)}
    assert survivors == SURVIVORS.get(name, {}).keys()
