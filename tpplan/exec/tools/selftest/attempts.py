"""The sizes to test for an operation: odd ones, and some for each of its routes."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen

from tpplan.core.axes import Axis
from tpplan.core.workspace import FRAME_SLOT_BYTES, FRAME_SLOTS
from tpplan.exec.calls.operands import ADDABLE
from tpplan.exec.context import TPContext
from tpplan.exec.explain import cuts
from tpplan.exec.tools.selftest.references import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

    from tpplan.exec.explain import Way

#: Dtypes of one, two, four and eight bytes.
_MOVED = (torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64)

#: Dimensions before the columns: one row with and without any, three, and none.
_LEADS = ((), (3, 1), (1,), (0,))

#: Columns of an uncut tensor: too few for each device to sum some, and not a multiple of a vector width.
_FEW = 5

#: Size limits in bytes: for odd attempts, and for attempts chosen for a route.
_CHEAP, _SEVERAL = 2 * 2**20, 4 * 2**20

#: Size limits in bytes for a route that smaller attempts do not take: for each axis, and for at least one axis. They
#: are lower for attempts whose operands are kept together.
_LARGE, _MOST = 32 * 2**20, 128 * 2**20

#: Size limit in bytes where each byte is expensive; one row is always allowed.
_SMALL = 2**18


@frozen
class Attempt:
    """An operand size to test.

    Attributes:
        axis: name of the axis, as in the plan's :func:`~tpplan.exec.explain.cuts`.
        lead: dimensions before the columns.
        dim: columns per element of the axis; of operations that cut nothing, the columns.
        dtype: dtype of the operands.
        narrow: whether ``dim`` is not the plan's.
        how: the route it takes unless aside; empty if not known in advance.
        aside: whether the operation runs beside other work.
    """

    axis: str
    lead: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    narrow: bool = False
    how: str = ""
    aside: bool = False


@frozen
class Attempts:
    """The sizes of one operation on a context.

    Attributes:
        context: a compiled plan.
        kind: kind of operation.
        columns: columns of each axis with ``dim`` 1.
        dims: values of ``dim`` for each axis: the plan's and a narrow one.
    """

    context: TPContext
    kind: Kind
    columns: dict[str, int]
    dims: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, context: TPContext, kind: Kind) -> Attempts:
        """Look up the axes and their sizes."""
        plan = context.plan
        if not kind.cuts:
            axes = cuts(plan)
            return cls(
                context, kind, dict.fromkeys(axes, 1), dict.fromkeys(axes, (plan.split(Axis.RESIDUAL).size, _FEW))
            )
        splits = {axis: split for axis, split in cuts(plan).items() if split}
        columns = {axis: split.size for axis, split in splits.items()}
        return cls(context, kind, columns, {axis: (split.width, 1) for axis, split in splits.items()})

    def all(self, ways: Sequence[Way]) -> Iterator[Attempt]:
        """Yield odd sizes on each axis in each dtype, and for each axis and route one row and several rows."""
        yield from filter(self._is_cheap, self._odd())
        yield from self._going(ways, _LARGE, _MOST)

    def together(self, ways: Sequence[Way], random: Random) -> Iterator[Attempt]:
        """Yield fewer attempts, whose operands fit in memory together: each route, random small, some aside."""
        yield from self._going(ways, _SEVERAL, _LARGE)
        yield from self.some(random)
        yield from self.aside(ways, random)

    def aside(self, ways: Sequence[Way], random: Random) -> Iterator[Attempt]:
        """Yield attempts beside other work: a random small size on each axis, and several of each route on one axis.

        Beside other work, operations too large for slots use copies, whatever their route is otherwise.
        """
        ways = [evolve(way, axes=(random.choice(way.axes),)) for way in ways]
        for attempt in (*self.some(random), *self._going(ways, _SEVERAL, _LARGE)):
            yield evolve(attempt, aside=True)

    def some(self, random: Random) -> Iterator[Attempt]:
        """Yield a random small size on each axis."""
        for axis, dims in self.dims.items():
            rows, dim = random.randint(1, self.context.max_rows), random.choice(dims)
            attempt = self._attempt(axis, (rows,), dim, random.choice(self._dtypes))
            small = self._fits(attempt) and self._cost(attempt) <= _SMALL
            yield attempt if small else self._attempt(axis, (1,), dims[1], self._dtypes[0])

    def _going(self, ways: Sequence[Way], large: int, most: int) -> Iterator[Attempt]:
        """Yield one row and several rows for each axis and route, within size limits.

        Args:
            ways: routes to cover.
            large: limit in bytes for a route that smaller sizes do not take on an axis.
            most: limit in bytes for a route that smaller sizes do not take on any axis.
        """
        seen: set[object] = set()
        for attempt in sorted(self._of_ways(ways), key=self._cost):
            here = (attempt.axis, attempt.how, prod(attempt.lead) > 1)
            limit = _SEVERAL if here in seen else large if attempt.how in seen else most
            if self._cost(attempt) <= limit:
                seen |= {here, attempt.how}
                yield attempt

    @property
    def _dtypes(self) -> tuple[torch.dtype, ...]:
        return ADDABLE if self.kind.adds else _MOVED

    def _attempt(self, axis: str, lead: tuple[int, ...], dim: int, dtype: torch.dtype) -> Attempt:
        return Attempt(axis, lead, dim, dtype, narrow=dim != self.dims[axis][0])

    def _odd(self) -> Iterator[Attempt]:
        for axis, dims in self.dims.items():
            for (i, dtype), (j, lead) in product(enumerate(self._dtypes), enumerate(_LEADS)):
                yield self._attempt(axis, lead, dims[(i + j) % 2], dtype)  # over two dtypes, each lead has both widths
            yield self._attempt(axis, (self.context.max_rows,), dims[1], self._dtypes[0])

    def _of_ways(self, ways: Sequence[Way]) -> Iterator[Attempt]:
        for way in ways:
            for axis in way.axes:
                one = Attempt(axis, (1,), self.dims[axis][0], self.context.dtype, how=way.how)
                several = max(way.first + 1, _SEVERAL // self._cost(one))
                for rows in {way.first, min(several, way.last), way.last}:
                    yield evolve(one, lead=(rows,))
                if way.how.endswith("frames") and (rows := self._long(one)) <= way.last:
                    yield evolve(one, lead=(rows,), how=f"{way.how} in turns")

    def _long(self, one: Attempt) -> int:
        """Return the number of rows with which each device fills all frame slots once and some of them again."""
        ring = FRAME_SLOTS * FRAME_SLOT_BYTES
        senders = len(self.context.all_devices) if self.kind.cuts else 1
        return 2 + senders * ring // (self.columns[one.axis] * one.dim * one.dtype.itemsize)

    def _is_cheap(self, attempt: Attempt) -> bool:
        return self._fits(attempt) and (self._cost(attempt) <= _CHEAP or prod(attempt.lead) == 1)

    def _fits(self, attempt: Attempt) -> bool:
        """Tell whether the context has room for a sum; the plan assumes the dtype of the activations."""
        room = self.context.max_rows * self.context.dtype.itemsize
        return not self.kind.adds or prod(attempt.lead) * attempt.dtype.itemsize <= room

    def _cost(self, attempt: Attempt) -> int:
        """Return the approximate number of bytes moved."""
        size = prod(attempt.lead) * self.columns[attempt.axis] * attempt.dim * attempt.dtype.itemsize
        return size * (len(self.context.all_devices) + 1)
