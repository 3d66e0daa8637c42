"""The table of a straight kernel: the steps of one device that reads and writes the tensors of others.

It starts with the number and the place of the sequences, each the number of a counter of the device and by how much the
exchange raises it, and with the number and the place of the steps. These are:

- ``OPEN`` and ``SIGNAL``, flags to be raised before and after there was anything to do, and ``AWAIT``: how many flags
  at once, then for each which of the sequences, how far it is past the start of the exchange, and the flag's address;
- ``COPY``: operand and first column that are read, the width, the part of the rows and of how many, how many targets,
  and the operand and the first column of each;
- ``ADD``: the same without the first two, and then how many sources, and the operand and the first column of each.

The operands are the caller's tensors on all devices, each with address and pitch, in the same order on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from attrs import Factory, define

from tpplan.errors import InternalError
from tpplan.exec.gpu.exchange_table import FIRST_OPERAND, MOST_SEQUENCES, MOST_WORDS
from tpplan.exec.programs.program import HOST, Await, Buffer, Copy, Exchange, Flag, Signal, Sum, reads, writes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.exec.programs.program import Step, View

#: Threads of a block.
THREADS = 512
#: What a thread reads at once, where everything is aligned to it.
VECTOR_BYTES = 16

#: Most operands: an input, a residual and an output of each of eight devices.
_MOST_OPERANDS = 24
#: Where the number of sequences and of steps are; their place is in the next word.
SEQUENCES = FIRST_OPERAND + 2 * _MOST_OPERANDS
STEPS = SEQUENCES + 2
_FIRST_ENTRY = SEQUENCES + 4

OPEN, SIGNAL, AWAIT, COPY, ADD = range(5)


@define
class _Entries:
    """A table in the making.

    Attributes:
        item: bytes per element.
        operands: all that the program names, in order.
        address: tells where a flag is.
        raised: how often the device has raised or awaited each flag in this exchange.
    """

    item: int
    operands: tuple[Buffer, ...]
    address: Callable[[Flag], int]
    raised: dict[Flag, int] = Factory(dict)
    steps: list[list[int]] = Factory(list)

    def flag(self, step: Signal | Await) -> None:
        """Add a flag to the last step if that is of the same kind."""
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
        """Add a copy or a sum, whose result goes to other places too."""
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
    """Return the caller's tensors that a program names, in a fixed order."""
    steps = [step for exchange in exchanges for step in exchange.steps]
    return tuple(dict.fromkeys(view.buffer for step in steps for view in (*reads(step), *writes(step))))


def longest(exchanges: Iterable[Exchange]) -> int:
    """Return the columns of a program's longest step, per row of all the operands' rows, rounded up."""
    views = (view for exchange in exchanges for step in exchange.steps for view in writes(step))
    return max((-(-(view.stop - view.start) // view.parts) for view in views), default=0)


def bits(exchanges: Iterable[Exchange], item: int) -> int:
    """Return the bits of all bytes at which something starts in a row, and of all widths, on any device.

    All devices move pieces of the same size, for a block passes on only what the same block of another has written.
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
    """Return the words of an exchange straight between tensors, which follow those of the operands.

    Args:
        exchange: of one device.
        item: bytes per element.
        operands: see :func:`operands`.
        counters: tells the number of the device's counter of a flag.
        address: tells where a flag is.

    Raises:
        InternalError: it has steps that no straight kernel knows, or too many.
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
    """Yield every step, with the targets of those that follow and copy what it writes or reads: read it only once."""
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
    """Return the device in whose memory a flag is: the one that waits for it."""
    return flag.queue.sender if flag.device != HOST else flag.queue.receivers[0]
