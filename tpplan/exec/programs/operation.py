"""Operations as copies and sums between devices, independent of the transport."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from attrs import frozen

from tpplan.exec.programs.program import EXCHANGE, HOST, INPUT, OUTPUT, RESIDUAL, Buffer, Sum, View

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.exec.programs.program import Stream

#: Shares of columns start at multiples of this: a kernel reads 16 bytes at a time.
_GRAIN = 8


class Move(NamedTuple):
    """A copy of columns.

    Attributes:
        source: columns of a caller's tensor.
        target: as many columns of a caller's tensor.
    """

    source: View
    target: View


@frozen
class Moves:
    """An operation that only copies.

    Attributes:
        name: a name to display.
        moves: the copies in device order; none is empty, and no two write the same columns.
    """

    name: str
    moves: tuple[Move, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that read or write, without the host, ascending."""
        ends = {view.buffer.device for move in self.moves for view in (move.source, move.target)}
        return tuple(sorted(ends - {HOST}))

    @property
    def columns(self) -> int:
        """Columns of the widest move."""
        return max(source.stop - source.start for source, _ in self.moves)

    @property
    def reach(self) -> int:
        """Columns of the widest tensor."""
        return max(view.stop for move in self.moves for view in move)

    @property
    def span(self) -> int:
        """Columns from the first to the last that is read of one tensor; the maximum over all tensors."""
        wanted: dict[Buffer, list[View]] = {}
        for source, _ in self.moves:
            wanted.setdefault(source.buffer, []).append(source)
        return max(max(v.stop for v in views) - min(v.start for v in views) for views in wanted.values())


class Share(NamedTuple):
    """Columns that one receiver sums for all receivers.

    Attributes:
        receiver: the device that sums.
        start: first column.
        stop: one past the last column.
        part: index of the part of the rows.
        parts: number of parts of the rows.
    """

    receiver: int
    start: int
    stop: int
    part: int = 0
    parts: int = 1

    def of(self, role: str, device: int) -> View:
        """Return these columns of a caller's tensor."""
        return View(Buffer(role, device), self.start, self.stop, self.part, self.parts)


def share_out(columns: int, weights: Mapping[int, int]) -> tuple[tuple[int, int, int], ...]:
    """Divide columns among devices roughly by weight; return (device, start, stop) for each that gets any."""
    total, reached = sum(weights.values()) * _GRAIN, accumulate(weights.values(), initial=0)
    cuts = [min(columns, -(-columns * weight // total) * _GRAIN) for weight in reached]
    return tuple((device, a, b) for device, (a, b) in zip(weights, pairwise(cuts), strict=True) if b > a)


@frozen
class Reduction:
    """A reduction: every receiver gets the sum of all parts and of its residual.

    Attributes:
        name: a name to display.
        columns: columns of a part and of the sum.
        senders: devices that have a part, in the order of addition.
        receivers: devices that get the sum, ascending.
        residual: whether the receivers have a residual, which is added last.
    """

    name: str
    columns: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    residual: bool

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that read or write, ascending."""
        return tuple(sorted({*self.senders, *self.receivers}))

    @property
    def reach(self) -> int:
        """Columns of the widest tensor."""
        return self.columns

    def shares(self, part: int = 0, parts: int = 1) -> tuple[Share, ...]:
        """Divide the columns about equally among the receivers; if there are few columns, some get no share."""
        even = dict.fromkeys(self.receivers, 1)
        return tuple(Share(receiver, a, b, part, parts) for receiver, a, b in share_out(self.columns, even))

    @property
    def span(self) -> int:
        """Columns from the first to the last that others fetch of one part, or of one share; the maximum over all."""
        asked = (self.asked_of(sender) for sender in self.senders)
        shares = (share.stop - share.start for share in self.shares())
        return max((*(spans[-1][1] - spans[0][0] for spans in asked if spans), *shares))

    def asked_of(self, sender: int) -> tuple[tuple[int, int], ...]:
        """Return the columns (start, stop) of a sender's part that others sum: before and after its own share."""
        mine = [(share.start, share.stop) for share in self.shares() if share.receiver == sender]
        start, stop = mine[0] if mine else (self.columns, self.columns)
        return tuple(span for span in ((0, start), (stop, self.columns)) if span[0] < span[1])

    def others(self, receiver: int) -> tuple[int, ...]:
        """Return the senders whose parts a receiver has to fetch."""
        return tuple(sender for sender in self.senders if sender != receiver)

    def slab(self, share: Share, sender: int) -> View:
        """Return the view of the receiver's exchange buffer that receives another sender's columns of a share."""
        others = self.others(share.receiver)
        buffer = Buffer(EXCHANGE, share.receiver, others.index(sender), len(others))
        width = share.stop - share.start
        return View(buffer, 0, width, share.part, share.parts, width)

    def total(self, stream: Stream, share: Share, fetched: Callable[[int], View]) -> Sum:
        """Return the command that sums a share; ``fetched`` maps each other sender to the view of its columns."""
        own = (share.of(INPUT, g) if g == share.receiver else fetched(g) for g in self.senders)
        residual = (share.of(RESIDUAL, share.receiver),) if self.residual else ()
        return Sum(stream, (*own, *residual), share.of(OUTPUT, share.receiver))


@frozen
class Addition:
    """An operation within each device, which adds columns of its input to its output.

    Attributes:
        name: a name to display.
        shares: for each device, the columns of the input that correspond to its output.
    """

    name: str
    shares: tuple[Share, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that add, ascending."""
        return tuple(share.receiver for share in self.shares)

    @property
    def reach(self) -> int:
        """Columns of the widest tensor."""
        return max(share.stop for share in self.shares)

    @property
    def columns(self) -> int:
        """Columns of the widest share."""
        return max(share.stop - share.start for share in self.shares)


Operation = Moves | Reduction | Addition


def broadcast(source: int, targets: tuple[int, ...], columns: int) -> Moves:
    """Copy all columns of the source's tensor to every target."""
    whole = View(Buffer(INPUT, source), 0, columns)
    return Moves("broadcast", tuple(Move(whole, View(Buffer(OUTPUT, d), 0, columns)) for d in targets))


def scatter(source: int, slices: tuple[tuple[int, int, int], ...]) -> Moves:
    """Copy to each device its slice (device, start, stop) of the source's columns."""
    x = Buffer(INPUT, source)
    return Moves(
        "scatter", tuple(Move(View(x, a, b), View(Buffer(OUTPUT, d), 0, b - a)) for d, a, b in slices if b > a)
    )


def allgather(name: str, slices: tuple[tuple[int, int, int], ...], targets: tuple[int, ...]) -> Moves:
    """Copy every device's slice (device, start, stop) to these columns on every target, which may be the host."""
    return Moves(
        name,
        tuple(
            Move(View(Buffer(INPUT, s), 0, b - a), View(Buffer(OUTPUT, d), a, b))
            for d in targets
            for s, a, b in slices
            if b > a
        ),
    )


def all_reduce(columns: int, senders: tuple[int, ...], receivers: tuple[int, ...], residual: bool) -> Reduction:  # noqa: FBT001
    """Sum the senders' parts, and optionally a residual, on all receivers."""
    return Reduction("all_reduce", columns, senders, receivers, residual)


def add(slices: tuple[tuple[int, int, int], ...]) -> Addition:
    """Add to each device's output the columns (device, start, stop) of its input."""
    return Addition("add_residual", tuple(Share(device, a, b) for device, a, b in slices if b > a))
