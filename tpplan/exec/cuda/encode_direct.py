"""Exchanges straight between tensors on CUDA devices: the parameters of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING

from attrs import Factory, define

from tpplan.errors import InternalError
from tpplan.exec.cuda.launch import Operands, Work
from tpplan.exec.programs.program import HOST, Await, Buffer, Copy, Exchange, Flag, Signal, Sum, reads, writes
from tpplan.exec.protocol.direct import (
    _FIRST_ENTRY,
    _MOST_OPERANDS,
    ADD,
    AWAIT,
    COPY,
    OPEN,
    SEQUENCES,
    SIGNAL,
    VECTOR_BYTES,
)
from tpplan.exec.protocol.words import MOST_SEQUENCES, MOST_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpplan.exec.cuda.counters import Counters
    from tpplan.exec.programs.program import Queue, Step, View


def number(pair: Queue, counters: Counters) -> None:
    """Number the counters by which one device tells another that it may write there, and is told that it has."""
    for flag in (Flag("ready", pair, pair.place), Flag("done", pair)):
        counters.number(home(flag), flag)


def prepare(exchanges: Sequence[Exchange], item: int, counters: Counters) -> list[Work]:
    """Return the work of each device.

    Args:
        exchanges: the exchanges of a program.
        item: bytes per element.
        counters: the context's counters.
    """
    buffers, row_bytes, works = operands(exchanges), longest(exchanges) * item, []
    ends = Operands(buffers, bits(exchanges, item), VECTOR_BYTES)

    def address(flag: Flag) -> int:
        return counters.address(home(flag), flag)

    for exchange in exchanges:
        number = partial(counters.number, exchange.stream.device, "times")
        made = table(exchange, item, buffers, number, address)
        works.append(Work(exchange.stream, SEQUENCES, made, ends, row_bytes))
    return works


@define
class _Entries:
    """Builds a table.

    Attributes:
        item: bytes per element.
        operands: the program's operands in order.
        address: returns the address of a flag.
        raised: how many times the device has raised or awaited each flag in this exchange.
        steps: the words of each step.
    """

    item: int
    operands: tuple[Buffer, ...]
    address: Callable[[Flag], int]
    raised: dict[Flag, int] = Factory(dict)
    steps: list[list[int]] = Factory(list)

    def flag(self, step: Signal | Await) -> None:
        """Add a flag, to the last step if that is of the same kind."""
        worked = any(each[0] in {COPY, ADD} for each in self.steps)
        kind = AWAIT if isinstance(step, Await) else SIGNAL if worked else OPEN
        if not self.steps or self.steps[-1][0] != kind:
            self.steps.append([kind, 0])
        self.raised[step.flag] = self.raised.get(step.flag, 0) + 1
        self.steps[-1][1] += 1
        self.steps[-1] += [list(self.raised).index(step.flag), self.raised[step.flag], self.address(step.flag)]

    def view(self, view: View) -> list[int]:
        """Return a view's operand and first column."""
        return [self.operands.index(view.buffer), view.start * self.item]

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


def operands(exchanges: Iterable[Exchange]) -> tuple[Buffer, ...]:
    """Return the caller's buffers in a program, in a fixed order."""
    steps = [step for exchange in exchanges for step in exchange.steps]
    return tuple(dict.fromkeys(view.buffer for step in steps for view in (*reads(step), *writes(step))))


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


def table(
    exchange: Exchange,
    item: int,
    operands: tuple[Buffer, ...],
    counters: Callable[[Flag], int],
    address: Callable[[Flag], int],
) -> list[int]:
    """Return the table of an exchange straight between tensors, whose words follow those of the operands.

    Args:
        exchange: the exchange of one device.
        item: bytes per element.
        operands: see :func:`operands`.
        counters: returns the index of the device's counter of a flag.
        address: returns the address of a flag.

    Raises:
        InternalError: it has steps that direct kernels do not support, or too many.
    """
    entries = _Entries(item, operands, address)
    for step, others in _fused(exchange.steps):
        if isinstance(step, Copy | Sum):
            entries.work(step, others)
        else:
            entries.flag(step)
    sequences = [word for flag, times in entries.raised.items() for word in (counters(flag), times)]
    steps = [word for step in entries.steps for word in step]
    header = [len(entries.raised), _FIRST_ENTRY, len(entries.steps), _FIRST_ENTRY + len(sequences)]
    words = [*header, *sequences, *steps]
    if SEQUENCES + len(words) > MOST_WORDS or len(entries.raised) > MOST_SEQUENCES or len(operands) > _MOST_OPERANDS:
        raise InternalError(f"a table of {len(words)} words and {len(entries.raised)} sequences is too long")
    return words


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
