"""What random operations are tried: a kind, an axis, a size, and where the operands are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from benchmarks.contents import STARTS
from tpplan.core.axes import Axis
from tpplan.exec import HOST
from tpplan.exec.calls.operands import ADDABLE
from tpplan.exec.explain import cuts

if TYPE_CHECKING:
    from random import Random

    from tpplan.exec import TPContext

_MOVED = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.int64)
_ON_DEVICES = ("broadcast", "scatter", "allgather", "all_reduce", "add_residual")
#: Operations that add up.
ADDING = ("all_reduce", "add_residual")
_ON_HOST = ("gather", "broadcast from the host", "scatter from the host")
#: Of an all-reduce over its parts or residuals; other operations take these as given.
_OUTS = ("new", "given", "parts", "residual")
#: Operations with the host move at most so many bytes, for its one thread works out what is right.
_HOST_BYTES = 2**19
#: Devices that single tensors are on: few, for a program is made for each, and so many are remembered.
_SOURCES = 2
#: Share of operations that go beside other work, where they may.
_ASIDE = 0.2
#: Share of operations that are delayed, and most cycles, as a power of two: up to half a millisecond.
_DELAYED, _MOST_CYCLES = 0.05, 20


@frozen(kw_only=True)
class Task:
    """An operation to be tried.

    Attributes:
        kind: of operation.
        axis: as the plan's :func:`~tpplan.exec.explain.cuts` call it.
        rows: of the operands.
        columns: per element of the axis; of what is not cut, the columns.
        dtype: of the operands.
        start: of their contents.
        source: the device that a single tensor is on.
        gap: columns between the rows of operands.
        shift: elements before them.
        out: where results go: to ``new`` tensors, to ``given`` ones, over the ``parts`` or over the ``residual``.
        full: whether a residual is added, or a source of ``add_residual`` is as wide as the axis.
        delays: before the operands are written, before the operation and before the check: a device and its cycles.
        aside: whether it goes beside other work: the last delay.
    """

    kind: str
    axis: str
    rows: int
    columns: int
    dtype: torch.dtype
    start: int
    source: int
    gap: int
    shift: int
    out: str
    full: bool
    delays: tuple[tuple[int, int], ...] = ()
    aside: bool = False

    def __str__(self) -> str:
        name = str(self.dtype).partition(".")[2]
        size = f"{self.rows} x {self.columns} of {name}, {self.gap} columns apart, {self.shift} elements in"
        delayed = f", delays {self.delays}" if any(cycles for _, cycles in self.delays) else ""
        kind = f"{self.kind} aside" if self.aside else self.kind
        return f"{kind} on {self.axis}, source {self.source}, {size}, out {self.out}, full {self.full}{delayed}"


class Tasks:
    """Random operations for a context."""

    def __init__(self, context: TPContext, random: Random, largest: int, *, delays: bool, shared: bool) -> None:
        """Choose widths and sources, of which there are few.

        Args:
            context: on whatever devices.
            random: decides.
            largest: bytes of the largest tensor, but for single rows.
            delays: whether some devices are late now and then.
            shared: whether devices share a GPU: results are given tensors then, and nothing goes aside.
        """
        self._context, self._random, self._largest = context, random, largest
        self._delays, self._shared = delays, shared
        self._cuts = cuts(context.plan)
        hidden = context.plan.split(Axis.RESIDUAL).size
        self._widths = (1, 5, hidden, *(random.randint(1, hidden) for _ in range(5)))
        self._sources = random.sample(context.all_devices, min(_SOURCES, len(context.all_devices)))

    def next(self, *, host: bool) -> Task:
        """Return an operation, also one that the host takes part in if told so."""
        random = self._random
        kind = random.choice(_ON_DEVICES + _ON_HOST * host)
        whole = kind.startswith(("broadcast", "all_reduce"))
        axis = random.choice([name for name, split in self._cuts.items() if split or whole])
        split, dtype = self._cuts[axis], random.choice(ADDABLE if kind in ADDING else _MOVED)
        columns, size = random.choice(self._widths), 1
        if split and not whole:
            columns, size = random.choice((1, split.width, min(3, split.width))), split.size
        most = min(self._largest, _HOST_BYTES if kind in _ON_HOST else self._largest)
        rows = int(most ** random.random()) // (columns * size * dtype.itemsize)
        out = random.choice(_OUTS[1:] if self._shared else _OUTS)
        is_given = kind == "add_residual" or (out != "new" and kind != "gather")
        return Task(
            kind=kind,
            axis=axis,
            rows=min(max(1, rows), self._context.max_rows),
            columns=columns,
            dtype=dtype,
            start=random.randrange(STARTS),
            source=HOST if kind.endswith("host") else random.choice(self._sources),
            gap=random.choice((0, 0, 1, 8)),
            shift=random.choice((0, 0, 1, 8)),
            out=out if kind == "all_reduce" or out == "new" else "given",
            full=random.random() < 0.5,  # noqa: PLR2004
            delays=tuple(self._delay() for _ in range(3)) if self._delays else (),
            aside=random.random() < _ASIDE and is_given and not self._shared,  # new tensors would be of other streams
        )

    def _delay(self) -> tuple[int, int]:
        late = self._random.random() < _DELAYED
        return self._random.choice(self._context.all_devices), int(2 ** self._random.uniform(8, _MOST_CYCLES)) * late
