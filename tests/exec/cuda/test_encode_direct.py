"""Tables of straight kernels: gone through in Python as the kernels go through them, step by step."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch
from attrs import define, field

from tests.exec.caller import expected, noise, widths
from tests.exec.program_cases import CASES
from tpplan.errors import InternalError
from tpplan.exec.cuda.encode_direct import bits, home, longest, table, touched
from tpplan.exec.programs.lower_flags import direct_moves, direct_reduction, one_shot_reduction
from tpplan.exec.programs.operation import Moves, all_reduce, allgather, broadcast
from tpplan.exec.programs.program import EXCHANGE, OUTPUT, RESIDUAL, Buffer, Exchange, Flag, Program, reads, writes
from tpplan.exec.protocol.direct import ADD, AWAIT, COPY, LEARN, SEQUENCES, SIGNAL, STEPS, TELL, TOLD, VECTOR_BYTES
from tpplan.exec.protocol.words import MOST_WORDS, PIECE

#: Blocks of a kernel, and their threads, each of which moves a piece at once.
BLOCKS, THREADS = 2, 3

LARGE = {n: c for n, c in CASES.items() if c.way.transport == "peer" and not c.way.small}


@define
class Block:
    """One block of a device's kernel on its way through its steps.

    Attributes:
        device: the device.
        number: index of the block.
        words: the kernel's parameter.
        places: where each operand is: a number in place of its address, None until it is known.
        at: index of the next step.
        left: number of steps to come.
        counts: number of each sequence.
    """

    device: int
    number: int
    words: list[int]
    places: list[int | None]
    at: int = 0
    left: int = 0
    counts: list[int] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.left, self.at = self.words[STEPS], self.words[STEPS + 1]


@define
class Machine:
    """Flags and counters of all devices, one for each block; an address is an index."""

    flags: Counter[tuple[int, int]] = field(factory=Counter)
    told: dict[tuple[int, int], tuple[int, int]] = field(factory=dict)
    counters: Counter[tuple[int, int, int]] = field(factory=Counter)
    known: dict[tuple[object, ...], int] = field(factory=dict)

    def index(self, *key: object) -> int:
        """Return a number for a thing, the same every time."""
        return self.known.setdefault(key, len(self.known))

    def start(self, block: Block) -> None:
        """Read and raise the counters of a device's block."""
        count, place = block.words[SEQUENCES : SEQUENCES + 2]
        for at in range(place, place + 2 * count, 2):
            number, times = block.words[at : at + 2]
            block.counts.append(self.counters[block.device, number, block.number])
            self.counters[block.device, number, block.number] += times

    def step(self, block: Block, memory: list[torch.Tensor], dtype: torch.dtype) -> bool:
        """Do the next step of a block, if it has not to wait."""
        words, at = block.words, block.at
        kind = words[at]
        assert kind != TELL or block.left == words[STEPS]  # nothing was done that a fence would be for
        if kind == TELL:
            for s, n, a, word, operand in _groups(words, at, 5):
                assert words[word] == block.places[operand]
                self.told[a, block.number] = block.counts[s] + n, words[word]
            block.at += 2 + 5 * words[at + 1]
        elif kind == LEARN:
            for s, n, a, operand in _groups(words, at, 4):
                number, place = self.told.get((a, block.number), (0, 0))
                if number != block.counts[s] + n:
                    return False
                block.places[operand] = place
            block.at += 2 + 4 * words[at + 1]
        elif kind in {SIGNAL, AWAIT}:
            flags = [words[k : k + 3] for k in range(at + 2, at + 2 + 3 * words[at + 1], 3)]
            if kind == AWAIT and any(self.flags[a, block.number] < block.counts[s] + n for s, n, a in flags):
                return False
            for sequence, times, address in flags if kind != AWAIT else ():
                self.flags[address, block.number] = block.counts[sequence] + times
            block.at += 2 + 3 * len(flags)
        else:
            block.at = self.work(block, memory, dtype)
        block.left -= 1
        return True

    def work(self, block: Block, memory: list[torch.Tensor], dtype: torch.dtype) -> int:
        """Copy or add up what is the block's; return where the next step is."""
        words, at = block.words, block.at
        copies = words[at] == COPY
        assert copies or words[at] == ADD
        place = at + (3 if copies else 1)
        width, part, parts, count = words[place : place + 4]
        end = place + 4 + 2 * count
        targets = [words[k : k + 2] for k in range(place + 4, end, 2)]
        if copies:
            sources = [words[at + 1 : at + 3]]
        else:
            sources = [words[k : k + 2] for k in range(end + 1, end + 1 + 2 * words[end], 2)]
            end += 1 + 2 * words[end]
        rows = memory[0].shape[0]
        span = slice(rows * part // parts, rows * (part + 1) // parts)
        views = [_at(memory, block, operand)[span, first : first + width] for operand, first in sources]
        assert all(view.shape[1] == width for view in views)
        if copies:
            result = views[0].clone()
        else:
            total = torch.full((len(views[0]), width // dtype.itemsize), -0.0)
            for view in views:
                total = total + view.contiguous().view(dtype).float()
            result = total.to(dtype).view(torch.uint8)
        pieces = torch.arange(len(result) * width // words[PIECE]) // THREADS % BLOCKS
        mine = (pieces == block.number).repeat_interleave(words[PIECE]).view_as(result)
        for operand, first in targets:
            _at(memory, block, operand)[span, first : first + width][mine] = result[mine]
        return end


def _groups(words: list[int], at: int, size: int) -> list[list[int]]:
    """Return what a step that tells or learns has for each operand."""
    return [words[k : k + size] for k in range(at + 2, at + 2 + size * words[at + 1], size)]


def _at(memory: list[torch.Tensor], block: Block, operand: int) -> torch.Tensor:
    """Return the memory of an operand that the block knows."""
    place = block.places[operand]
    assert place is not None
    return memory[place]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_a_table_does_what_its_operation_says(name: str, dtype: torch.dtype) -> None:
    """The blocks of all devices give every byte in any order of steps, twice in a row, and none is left waiting."""
    case, random = LARGE[name], Random(1)
    truths = {b: noise(5, columns, dtype, random) for b, columns in widths(case.operation).items()}
    for buffer in [b for b in truths if b.role == RESIDUAL]:  # which all devices have alike
        truths[buffer] = truths[Buffer(RESIDUAL, min(b.device for b in truths if b.role == RESIDUAL))]
    results = expected(case.operation, truths)
    machine = Machine()
    exchanges = [command for command in case.program.commands if isinstance(command, Exchange)]
    steps = [step for exchange in exchanges for step in exchange.steps]
    named = [*dict.fromkeys(view.buffer for step in steps for view in (*reads(step), *writes(step)))]
    held = [(b, case.operation.columns * dtype.itemsize) for b in named if b.role == EXCHANGE]
    for _ in range(2):
        memory = {buffer: tensor.clone().view(torch.uint8) for buffer, tensor in truths.items()}
        memory |= {buffer: torch.zeros(5, size, dtype=torch.uint8) for buffer, size in held}
        blocks = [
            Block(exchange.stream.device, number, *_words(exchange, exchanges, dtype.itemsize, machine, named))
            for exchange in exchanges
            for number in range(BLOCKS)
        ]
        for block in blocks:
            machine.start(block)
        while left := [block for block in blocks if block.left]:
            random.shuffle(left)
            assert any(machine.step(block, [memory[b] for b in named], dtype) for block in left), "all wait"
        for buffer, truth in results.items():
            assert torch.equal(memory[buffer], truth.contiguous().view(torch.uint8)), buffer


def _words(
    exchange: Exchange, exchanges: list[Exchange], item: int, machine: Machine, named: list[Buffer]
) -> tuple[list[int], list[int | None]]:
    """Return what a device's kernel is told, and where its own operands are."""
    device, header, every = exchange.stream.device, [0] * SEQUENCES, bits(exchanges, item) | VECTOR_BYTES
    header[PIECE] = every & -every

    def address(where: object) -> int:
        return machine.index("flag", home(where) if isinstance(where, Flag) else "told", where)

    made = table(exchange, item, touched(exchanges), lambda flag: machine.index(device, flag), address)
    for index, (buffer, _) in enumerate(made.told, TOLD):
        header[index] = named.index(buffer)
    return header + made.words, [named.index(b) if b.device == device else None for b in made.operands]


@pytest.mark.parametrize("name", LARGE)
def test_alignment_covers_all_that_is_touched(name: str) -> None:
    """The bits of a program are those of every start and width on any device."""
    exchanges = [command for command in LARGE[name].program.commands if isinstance(command, Exchange)]
    every = bits(exchanges, 2)
    for step in (step for exchange in exchanges for step in exchange.steps):
        for view in (*reads(step), *writes(step)):
            assert (2 * view.start | 2 * (view.stop - view.start) | every) == every


def _broadcasts(count: int) -> tuple[Moves, Moves]:
    """Return broadcasts to so many others, from a device that takes part and from one that does not."""
    others = tuple(range(1, count + 1))
    return broadcast(0, (0, *others), 4096), broadcast(0, others, 4096)


def test_eight_devices_fit() -> None:
    """The largest tables have room in a kernel's parameter: of slices, sums with a residual, and what is passed on."""
    devices = tuple(range(8))
    slices = tuple((d, 10 * d, 10 * d + 10) for d in devices)
    programs = [
        direct_moves(allgather("allgather", slices, devices)),
        direct_reduction(all_reduce(4096, devices, devices, residual=True)),
        one_shot_reduction(all_reduce(4096, devices, devices, residual=True)),
        *(direct_moves(each, relayed=True) for count in range(2, 8) for each in _broadcasts(count)),
    ]
    for program in programs:
        exchanges = [command for command in program.commands if isinstance(command, Exchange)]
        for exchange in exchanges:
            made = table(exchange, 2, touched(exchanges), lambda _: 1, lambda _: 1)
            assert SEQUENCES + len(made.words) <= MOST_WORDS


@pytest.mark.parametrize(
    "program",
    [
        direct_moves(allgather("allgather", tuple((d, d, d + 1) for d in range(5)), tuple(range(5)))),
        direct_reduction(all_reduce(4096, (0, 1, 2, 3, 4), (0, 1, 2, 3, 4), residual=False)),
        direct_moves(broadcast(5, (0, 1, 2, 3, 4), 4096), relayed=True),
    ],
    ids=lambda program: program.name,
)
def test_devices_never_all_write_to_the_same_one(program: Program) -> None:
    """The first that they write to are all different, and so are the second, and so on."""
    exchanges = [command for command in program.commands if isinstance(command, Exchange)]
    writing = [[view.buffer.device for step in e.steps for view in writes(step)] for e in exchanges]
    remote = [[t for t in targets if t != e.stream.device] for e, targets in zip(exchanges, writing, strict=True)]
    for together in zip(*filter(None, remote), strict=True):
        assert len({*together}) == len(together) == 5


def test_the_longest_step_sets_the_blocks() -> None:
    """All kernels of a program have as many, or their parts of a step would not be the same."""
    program = direct_reduction(all_reduce(4096, (0, 1), (0, 1), residual=False))
    assert longest(c for c in program.commands if isinstance(c, Exchange)) == 2048


def test_too_many_steps_are_refused() -> None:
    """What does not fit a kernel's parameter is an error, not a shorter exchange."""
    devices = tuple(range(40))
    program = direct_moves(allgather("allgather", tuple((d, d, d + 1) for d in devices), devices))
    exchanges = [command for command in program.commands if isinstance(command, Exchange)]
    with pytest.raises(InternalError, match="too long"):
        table(exchanges[0], 2, touched(exchanges), lambda _: 1, lambda _: 1)
    assert touched(exchanges)[0, 39] == (Buffer(OUTPUT, 39),)
