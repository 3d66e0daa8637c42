"""Waiting between streams, and programs for callers whose streams are tpplan's own."""

from __future__ import annotations

from random import Random

import pytest
import torch
from attrs import evolve

from tests.exec.caller import Caller, memory
from tests.exec.program_cases import CASES, Case
from tpplan.exec.backends.adversary import Adversary
from tpplan.exec.programs.fence import own, without_callers
from tpplan.exec.programs.program import CALLER, Program, Record, Wait, flat


def merged(program: Program) -> Program:
    """Return a program for callers whose streams are tpplan's."""
    return evolve(program, commands=without_callers(program))


def played(case: Case, program: Program, seed: int) -> None:
    """Run a program three times by the worst order, called from tpplan's own streams, and check every byte."""
    random = Random(seed)
    caller = Caller(Adversary(memory(), random), random, case.rows, torch.float16)
    for device in case.operation.devices:
        caller.use(own(device))
    for _ in range(3):
        caller.call(case.operation, program)
    caller.check()


@pytest.mark.parametrize("name", CASES)
def test_programs_without_callers_are_right(name: str) -> None:
    """What orders only a caller's stream and tpplan's is left out, and nothing goes wrong where they are the same."""
    case = CASES[name]
    program = merged(case.program)
    assert CALLER not in {command.stream.kind for command in program.commands}
    for seed in range(3):
        played(case, program, seed)


@pytest.mark.parametrize("name", ["broadcast, peer-small", "all_reduce, host-small", "allgather, peer-1 parts"])
def test_kernels_alone_are_left(name: str) -> None:
    """Where flags order everything between devices, no event is recorded and none is waited for."""
    kept = merged(CASES[name].program)
    assert not [command for command in flat(kept) if isinstance(command, Record | Wait)]
    assert len(kept.commands) == len(CASES[name].operation.devices)


def test_events_between_devices_stay() -> None:
    """A Wait for another stream is kept, with its Record."""
    before = [c for c in CASES["broadcast, events-1 parts"].program.commands if isinstance(c, Wait)]
    after = [c for c in merged(CASES["broadcast, events-1 parts"].program).commands if isinstance(c, Wait)]
    crossing = [c for c in before if c.stream.device != c.event.stream.device]
    assert [(c.stream.device, c.event) for c in after] == [(c.stream.device, c.event) for c in crossing]


def _crossing(name: str) -> list[tuple[int, int]]:
    """Return which device waits for which in a program by events, for callers whose streams are tpplan's."""
    waits = (
        command for command in merged(CASES[f"{name}, events-1 parts"].program).commands if isinstance(command, Wait)
    )
    return [(wait.stream.device, wait.event.stream.device) for wait in waits]


def test_only_who_shares_memory_waits() -> None:
    """Receivers wait for the sender, it for them, and they not for each other; two that exchange wait side by side."""
    assert _crossing("broadcast") == [(0, 1), (2, 1), (1, 0), (1, 2)]
    commands = merged(CASES["allgather of two, events-1 parts"].program).commands
    kinds = [type(command).__name__ for command in commands]
    assert kinds == ["Record", "Record", "Wait", "Wait", *["Copy"] * 4, "Record", "Record", "Wait", "Wait"]


def test_many_that_share_memory_wait_over_one() -> None:
    """Of five that exchange, four wait for one and it for them, before and after; not each for each."""
    assert len(_crossing("allgather of five")) == 2 * (4 + 4)
