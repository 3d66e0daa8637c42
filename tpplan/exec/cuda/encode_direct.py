"""Exchanges straight between tensors on CUDA devices: the parameters of their kernels.

A device's operands are numbered as they come in its own steps; see :mod:`tpplan.exec.protocol.direct`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, NamedTuple

from attrs import Factory, define

from tpplan.errors import InternalError
from tpplan.exec.cuda.launch import Operands, Work
from tpplan.exec.programs.program import (
    EXCHANGE,
    HOST,
    INPUT,
    OUTPUT,
    Await,
    Buffer,
    Copy,
    Exchange,
    Flag,
    Signal,
    Sum,
    reads,
    writes,
)
from tpplan.exec.protocol.direct import (
    _FIRST_ENTRY,
    _MOST_OPERANDS,
    _MOST_TOLD,
    ADD,
    AWAIT,
    COPY,
    HELD_EACH,
    LEARN,
    SEQUENCES,
    SIGNAL,
    TELL,
    TOLD,
    TOLD_COUNTERS,
    VECTOR_BYTES,
)
from tpplan.exec.protocol.words import MOST_SEQUENCES, MOST_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpplan.exec.cuda.counters import Counters
    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.programs.program import Queue, Step, View


#: Returns the address of a flag, or of the place where a pair is told of an operand of some role.
Address = Callable[["Flag | tuple[Queue, str]"], int]


def number(pair: Queue, counters: Counters) -> None:
    """Number the counters by which a device is told where it may write on another, and tells that it has written."""
    for role in (INPUT, OUTPUT):
        counters.number(pair.sender, pair, role, count=TOLD_COUNTERS)
    counters.number(pair.place, Flag("done", pair))


def prepare(exchanges: Sequence[Exchange], item: int, counters: Counters, memory: Memory) -> list[Work]:
    """Return the work of each device.

    Args:
        exchanges: the exchanges of a program.
        item: bytes per element.
        counters: the context's counters.
        memory: the context's memory, of which sums are held in exchange buffers where registers cannot.
    """
    every, row_bytes, works = touched(exchanges), longest(exchanges) * item, []
    aligned, is_one_shot = tuple(dict.fromkeys(b for each in every.values() for b in each)), holds(exchanges)

    def address(where: Flag | tuple[Queue, str]) -> int:
        if isinstance(where, Flag):
            return counters.address(home(where), where)
        return counters.address(where[0].sender, *where, count=TOLD_COUNTERS)

    for exchange in exchanges:
        number = partial(counters.number, exchange.stream.device, "times")
        made = table(exchange, item, every, number, address)
        held = {
            view.buffer: (memory.block(view.buffer, 0).data_ptr(), view.width * item)
            for step in exchange.steps
            for view in writes(step)
            if view.buffer.role == EXCHANGE
        }
        least = item if is_one_shot else 0  # else threads would copy what others have not added up yet
        ends = Operands(made.operands, bits(exchanges, item), VECTOR_BYTES, aligned, held, made.told, least)
        pieces = HELD_EACH if is_one_shot else 1
        works.append(Work(exchange.stream, SEQUENCES, made.words, ends, row_bytes, simple=is_one_shot, pieces=pieces))
    return works


def holds(exchanges: Iterable[Exchange]) -> bool:
    """Return whether these are the exchanges of a one-shot sum, which is held in the context's memory or registers."""
    return any(view.buffer.role == EXCHANGE for each in exchanges for step in each.steps for view in writes(step))


@define
class _Entries:
    """Builds a table.

    Attributes:
        item: bytes per element.
        touched: see :func:`touched`.
        address: returns the address of a flag, or of the place where a pair is told of an operand of some role.
        operands: the device's operands in order.
        told: own operands that others are told of, and for which device.
        raised: how many times the device has raised or awaited each flag in this exchange.
        steps: the words of each step.
    """

    item: int
    touched: Mapping[tuple[int, int], tuple[Buffer, ...]]
    address: Address
    operands: list[Buffer] = Factory(list)
    told: list[tuple[Buffer, int]] = Factory(list)
    raised: dict[Flag, int] = Factory(dict)
    steps: list[list[int]] = Factory(list)

    def flag(self, step: Signal | Await) -> None:
        """Add a flag, to the last step if that is of the same kind."""
        pair, is_wait = step.flag.queue, isinstance(step, Await)
        tells = step.flag.name == "ready"
        kind = (LEARN if tells else AWAIT) if is_wait else TELL if tells else SIGNAL
        if not self.steps or self.steps[-1][0] != kind:
            self.steps.append([kind, 0])
        self.raised[step.flag] = self.raised.get(step.flag, 0) + 1
        words = [list(self.raised).index(step.flag), self.raised[step.flag]]
        if not tells:
            self.steps[-1][1] += 1
            self.steps[-1] += [*words, self.address(step.flag)]
            return
        for buffer in self.touched[pair.sender, pair.place]:
            self.steps[-1][1] += 1
            self.steps[-1] += [*words, self.address((pair, buffer.role))]
            if not is_wait:
                self.steps[-1].append(TOLD + len(self.told))
                self.told.append((buffer, pair.sender))
            self.steps[-1].append(self.operand(buffer))

    def operand(self, buffer: Buffer) -> int:
        """Return the number of an operand."""
        if buffer not in self.operands:
            self.operands.append(buffer)
        return self.operands.index(buffer)

    def view(self, view: View) -> list[int]:
        """Return a view's operand and first column."""
        return [self.operand(view.buffer), view.start * self.item]

    def work(self, step: Copy | Sum, others: Iterable[View]) -> None:
        """Add a copy or a sum, whose result also goes to other targets."""
        targets = [step.target, *others]
        width = (step.target.stop - step.target.start) * self.item
        rows = [width, step.target.part, step.target.parts, len(targets)]
        to = [word for target in targets for word in self.view(target)]
        sources = [word for source in reads(step) for word in self.view(source)]
        if isinstance(step, Copy):
            self.steps.append([COPY, *sources, *rows, *to])
        else:
            self.steps.append([ADD, *rows, *to, len(step.sources), *sources])


def touched(exchanges: Iterable[Exchange]) -> dict[tuple[int, int], tuple[Buffer, ...]]:
    """Return the caller's buffers that each device reads or writes on each, itself included."""
    found: dict[tuple[int, int], dict[Buffer, None]] = {}
    for exchange in exchanges:
        for step in exchange.steps:
            for view in (*reads(step), *writes(step)):
                if view.buffer.role != EXCHANGE:
                    found.setdefault((exchange.stream.device, view.buffer.device), {})[view.buffer] = None
    return {ends: tuple(buffers) for ends, buffers in found.items()}


def longest(exchanges: Iterable[Exchange]) -> int:
    """Return the columns of a program's longest step, averaged over all rows of the operands and rounded up."""
    views = (view for exchange in exchanges for step in exchange.steps for view in writes(step))
    return max((-(-(view.stop - view.start) // view.parts) for view in views), default=0)


def bits(exchanges: Iterable[Exchange], item: int) -> int:
    """Return the bitwise or of all byte offsets in rows and of all widths, on all devices.

    All devices move pieces of the same size, as a relaying block forwards what the same block of another has written.
    """
    steps = [step for exchange in exchanges for step in exchange.steps]
    columns = (view.start | (view.stop - view.start) for step in steps for view in (*reads(step), *writes(step)))
    return item * reduce(or_, columns, 0)


class DirectTable(NamedTuple):
    """The table of a direct kernel.

    Attributes:
        words: the words from :data:`~tpplan.exec.protocol.direct.SEQUENCES` on.
        operands: the operands in order.
        told: own operands that others are told of, and for which device, in order.
    """

    words: list[int]
    operands: tuple[Buffer, ...]
    told: tuple[tuple[Buffer, int], ...]


def table(
    exchange: Exchange,
    item: int,
    touched: Mapping[tuple[int, int], tuple[Buffer, ...]],
    counters: Callable[[Flag], int],
    address: Address,
) -> DirectTable:
    """Return the table of an exchange straight between tensors.

    Args:
        exchange: the exchange of one device.
        item: bytes per element.
        touched: see :func:`touched`.
        counters: returns the index of the device's counter of a flag.
        address: returns the address of a flag, or of the place where a pair is told of an operand of some role.

    Raises:
        InternalError: it has steps that direct kernels do not support, or too many.
    """
    entries = _Entries(item, touched, address)
    for step, others in _fused(exchange.steps):
        if isinstance(step, Copy | Sum):
            entries.work(step, others)
        else:
            entries.flag(step)
    sequences = [word for flag, times in entries.raised.items() for word in (counters(flag), times)]
    steps = [word for step in entries.steps for word in step]
    header = [len(entries.raised), _FIRST_ENTRY, len(entries.steps), _FIRST_ENTRY + len(sequences)]
    words = [*header, *sequences, *steps]
    counts = (SEQUENCES + len(words), len(entries.raised), len(entries.operands), len(entries.told))
    if any(x > most for x, most in zip(counts, (MOST_WORDS, MOST_SEQUENCES, _MOST_OPERANDS, _MOST_TOLD), strict=True)):
        raise InternalError(f"a table of {len(words)} words and {len(entries.raised)} sequences is too long")
    return DirectTable(words, tuple(entries.operands), tuple(entries.told))


def _fused(steps: Iterable[Step]) -> Iterable[tuple[Step, list[View]]]:
    """Yield every step, with the targets of following copies of the same data, so that it is read only once."""
    found: list[tuple[Step, list[View]]] = []
    for step in steps:
        before = found[-1][0] if found else None
        if isinstance(step, Copy) and isinstance(before, Copy | Sum):
            same = step.source == before.target or (isinstance(before, Copy) and step.source == before.source)
            if same:
                found[-1][1].append(step.target)
                continue
        found.append((step, []))
    return found


def home(flag: Flag) -> int:
    """Return the device whose memory holds a flag: the one that waits for it."""
    return flag.queue.sender if flag.device != HOST else flag.queue.receivers[0]
