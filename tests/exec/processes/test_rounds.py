"""Rounds: every process does its part of a program, and all parts together do what the program does, in any order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from attrs import Factory, define
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.exec.caller import LAYOUTS, bits, expected, memory, noise, widths
from tests.exec.program_cases import OPERATIONS, ROWS, Case, case, operations
from tpplan.exec.backends.cpu import VirtualDevices, Work, add, sequence
from tpplan.exec.memory.binding import Memory, resolve
from tpplan.exec.processes.rounds import Message, Round, rounds
from tpplan.exec.programs.operation import Reduction
from tpplan.exec.programs.program import HOST, INPUT, OUTPUT, RESIDUAL, Buffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.exec.backends.cpu import Place

DTYPE = torch.bfloat16


class Divided(NamedTuple):
    """A program, divided.

    Attributes:
        case: what is lowered to the program.
        owners: of each device.
        parts: of each process.
    """

    case: Case
    owners: dict[int, int]
    parts: dict[int, tuple[Round, ...]]


@st.composite
def divided(draw: st.DrawFn) -> Divided:
    """Programs of every kind, on five devices of up to four processes."""
    operation = draw(st.one_of(operations(5), st.sampled_from([*OPERATIONS.values()])))
    found = case(operation, "events", draw(st.one_of(st.integers(1, 70), st.sampled_from(ROWS))))
    owners = dict(enumerate(draw(st.lists(st.integers(0, 3), min_size=5, max_size=5))))
    program = found.program
    return Divided(found, owners, {p: rounds(program, owners, p) for p in set(owners.values())})


@given(divided())
def test_every_command_is_run_once_by_the_owner_of_its_target(them: Divided) -> None:
    """A process writes to its own devices only, and what is written to host memory is written to that of each."""
    wanted: Counter[tuple[int, Work]] = Counter()
    for work in sequence(them.case.program):
        target = work.target.view.buffer.device
        wanted.update((p, work) for p in them.parts if target == HOST or p == them.owners[target])
    done: Counter[tuple[int, Work]] = Counter()
    for process, part in them.parts.items():
        for each in part:
            done.update((process, work) for work in each.work)
            received = [message for message in each.messages if message.receiver == process]
            done.update((process, Work(place, (source,))) for source, _, _, places in received for place in places)
    assert done == wanted


@given(divided())
def test_what_a_process_needs_of_others_is_sent(them: Divided) -> None:
    """Sender and receiver know of the same messages, in the same order; the sender is who owns the source.

    A process gets no message twice in a round, and none that it could do without.
    """
    for process, part in them.parts.items():
        for other in them.parts:
            ends = {process, other}
            mine = [m for each in part for m in each.messages if {m.sender, m.receiver} == ends]
            theirs = [m for each in them.parts[other] for m in each.messages if {m.sender, m.receiver} == ends]
            assert mine == theirs
        for each in part:
            assert all(process in {m.sender, m.receiver} and m.sender != m.receiver for m in each.messages)
            assert all(m.targets and them.owners[m.source.view.buffer.device] == m.sender for m in each.messages)
            assert len({(m.source, m.receiver) for m in each.messages}) == len(each.messages)
            assert each.messages or each.work
            places = [place for work in each.work for place in (work.target, *work.sources)]
            devices = {place.view.buffer.device for place in places}
            assert all(them.owners.get(device, process) == process for device in devices)


@pytest.mark.parametrize("name", OPERATIONS)
def test_there_are_as_few_rounds_as_can_be(name: str) -> None:
    """What need not wait for another command is in the first round; sums come between two rounds of copies."""
    owners = {device: device for device in range(5)}
    for rows in ROWS:
        found = case(OPERATIONS[name], "events", rows)
        most = max(len(rounds(found.program, owners, process)) for process in owners)
        if isinstance(found.operation, Reduction):
            assert most <= 2 * found.way.parts + 1  # a buffer is filled and read once for each part
        else:
            assert most <= (2 * found.way.parts if found.way.transport == "host" else 1)


@define(eq=False)
class Process:
    """A process that does its part.

    Attributes:
        number: its index.
        left: rounds that it has not begun.
        operands: its tensors.
        memory: of its devices and its host.
        doing: what is left of its round.
        carried: number of messages so far, by sender and receiver.
    """

    number: int
    left: list[Round]
    operands: Mapping[Buffer, Tensor]
    memory: Memory
    doing: list[tuple[Work | Message, int]] = Factory(list)
    carried: Counter[tuple[int, int]] = Factory(Counter)

    def step(self, sent: dict[tuple[int, int, int], Tensor], random: Random) -> bool:
        """Do anything of its round; return whether there was something that it did not have to wait for."""
        if not self.doing and self.left:
            self.doing = [*self._begun(self.left.pop(0))]
            random.shuffle(self.doing)
        for i, (each, turn) in enumerate(self.doing):
            if isinstance(each, Work):
                target, *sources = (self._find(place) for place in (each.target, *each.sources))
                add(target, sources) if len(sources) > 1 else target.copy_(sources[0])
            elif each.sender == self.number:
                sent[each.sender, each.receiver, turn] = self._find(each.source).clone()
            elif (each.sender, self.number, turn) in sent:
                data = sent.pop((each.sender, self.number, turn))
                for place in each.targets:
                    self._find(place).copy_(data)
            else:
                continue
            del self.doing[i]
            return True
        return False

    def _begun(self, each: Round) -> Iterator[tuple[Work | Message, int]]:
        """Yield what is to be done in a round, messages with their place in their order."""
        yield from ((work, 0) for work in each.work)
        for message in each.messages:
            self.carried[message.sender, message.receiver] += 1
            yield message, self.carried[message.sender, message.receiver]

    def _find(self, place: Place) -> Tensor:
        rows = next(iter(self.operands.values())).shape[0]
        return resolve(place.view, self.operands, self.memory, rows, DTYPE, slot=place.slot)


def run(them: Divided, operands: Mapping[Buffer, Tensor], random: Random) -> dict[int, Mapping[Buffer, Tensor]]:
    """Do all parts, in any order that messages allow, and return the tensors of each process."""
    processes = [
        Process(p, [*part], {b: x for b, x in copied(operands).items() if them.owners.get(b.device, p) == p}, memory())
        for p, part in them.parts.items()
    ]
    tensors = {process.number: process.operands for process in processes}
    sent: dict[tuple[int, int, int], Tensor] = {}
    while processes:
        random.shuffle(processes)
        assert any(process.step(sent, random) for process in processes), "all wait for each other"
        processes = [process for process in processes if process.doing or process.left]
    assert not sent
    return tensors


def copied(operands: Mapping[Buffer, Tensor]) -> dict[Buffer, Tensor]:
    """Return copies of tensors, one of each, although it may have several names."""
    copies = {id(x): x.clone() for x in operands.values()}
    return {buffer: copies[id(x)] for buffer, x in operands.items()}


@settings(max_examples=examples(200))
@given(divided(), st.sampled_from(("", INPUT, RESIDUAL)), st.integers(0, 999))
def test_all_parts_together_do_what_the_program_does(them: Divided, in_place: str, seed: int) -> None:
    """However fast each process is, and whatever it does first in a round, every tensor has the right bytes.

    So it is where outputs are inputs.
    """
    operation, random = them.case.operation, Random(seed)
    operands: dict[Buffer, Tensor] = {}
    for buffer, columns in widths(operation).items():
        is_same = buffer.role == OUTPUT and isinstance(operation, Reduction)
        own = operands.get(Buffer(in_place, buffer.device)) if is_same else None
        if own is None:
            own = random.choice(LAYOUTS)(them.case.rows, columns, DTYPE)
            own.copy_(noise(them.case.rows, columns, DTYPE, Random(seed) if buffer.role == RESIDUAL else random))
        operands[buffer] = own
    truth = copied(operands)
    VirtualDevices(memory()).run(them.case.program, truth)
    right = expected(operation, operands)
    owned: defaultdict[Buffer, int] = defaultdict(int)
    for tensors in run(them, operands, random).values():
        for buffer, x in tensors.items():
            owned[buffer] += 1
            assert torch.equal(bits(x), bits(truth[buffer])), buffer
            assert torch.equal(bits(x), bits(right.get(buffer, x))), buffer
    assert owned == {b: len(them.parts) if b.device == HOST else 1 for b in operands}
