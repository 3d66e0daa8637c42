"""Random operations of a context, each checked on the devices themselves without waiting for it.

Of several processes, each has the same operations, and checks what its own devices get.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from benchmarks.reliability.contents import STARTS, VERSIONS, Bank, Lane, Window
from tpplan.core.axes import Axis, parse_layers
from tpplan.exec import HOST, Gathered
from tpplan.exec.calls.operands import ADDABLE
from tpplan.exec.explain import cuts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from tpplan.core.plan import Split
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
        kind: name of the operation.
        axis: name of the axis, as in the plan's :func:`~tpplan.exec.explain.cuts`.
        rows: number of rows of the operands.
        columns: columns per element of the axis; all columns of a tensor that is not cut.
        dtype: dtype of the operands.
        start: where the contents of the operands start.
        source: the device that has the tensor of an operation with only one.
        gap: columns between the rows of an operand.
        shift: elements before the first row.
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
            context: a context on any devices.
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


#: Elements between the windows of two devices.
_APART = 97
#: Results of gathers that nobody has asked for yet, at most.
_LATE = 8
#: Streams of a device that become current in turn, besides the one that is.
_STREAMS = 3


@frozen(eq=False)
class _Late:
    """A gather whose result was not asked for yet, with its check, its contents, and their version then."""

    handle: Gathered
    check: int
    window: Window
    version: int


class Stress:
    """Random operations of one context.

    Attributes:
        context: the context whose operations are tried.
        turns: how often the contents changed so far; each replay of a graph changes them as often as its tasks do.
    """

    def __init__(
        self,
        context: TPContext,
        seed: int,
        *,
        largest: int,
        delays: bool = False,
        streams: Mapping[int, torch.cuda.Stream] | None = None,
    ) -> None:
        """Allocate operands on every device.

        Args:
            context: a context on any devices.
            seed: seed of everything random.
            largest: bytes of the largest tensor, or more if a row of the widest axis has more.
            delays: whether some devices are late now and then; only with CUDA.
            streams: that the work of each device goes to where they share a GPU, whichever is current there; results
                are given tensors then, and nothing goes aside.
        """
        self.context, self.turns = context, 0
        self._random = Random(seed)  # noqa: S311 (to be the same again)
        row = max(split.size * split.width for split in context.plan.splits) * torch.int64.itemsize
        largest = -(-max(largest, row) // 8) * 8
        places = {d: device.device for d, device in context.devices.items()} | {HOST: torch.device("cpu")}
        banks = {place: Bank(place, largest) for place in dict.fromkeys(places.values())}
        self._lanes = {d: Lane(banks[place], (streams or {}).get(d)) for d, place in places.items()}
        self._cuts = cuts(context.plan)
        self._tasks = Tasks(context, self._random, largest, delays=delays, shared=streams is not None)
        self._checks: list[Task] = []
        self._late: list[_Late] = []
        self._others: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._calls: dict[str, Callable[[Task, int], None]] = {
            "broadcast": self._broadcast,
            "broadcast from the host": self._broadcast,
            "scatter": self._scatter,
            "scatter from the host": self._scatter,
            "gather": self._gather,
            "allgather": self._allgather,
            "all_reduce": self._all_reduce,
            "add_residual": self._add_residual,
        }
        for place in places.values():
            if place.type == "cuda":
                torch.cuda.synchronize(place)  # work on other streams follows

    def task(self, *, host: bool = True) -> Task:
        """Return a random operation, also one that the host takes part in if told so."""
        return self._tasks.next(host=host)

    def issue(self, task: Task) -> None:
        """Turn to the next contents, write operands, call the operation, and check its results."""
        self.turns += 1
        for device in self.context.devices:
            self._lanes[device].advance()
        self._lanes[HOST].version.fill_(self.turns % VERSIONS)
        self._checks.append(task)
        self._wait(task, 0)
        self._calls[task.kind](task, len(self._checks) - 1)

    def faults(self) -> list[str]:
        """Wait for everything, and return the checks since the last time that found something wrong, in words."""
        while self._late:
            self._settle()
        self.context.synchronize()
        found = []
        for device, lane in self._lanes.items():
            if lane.stream:
                lane.stream.synchronize()
            counts = lane.wrong.cpu()
            where = "in host memory" if device == HOST else f"on device {device}"
            wrong = [(int(counts[check]), self._checks[check]) for check in counts.nonzero().flatten().tolist()]
            found += [f"{count} elements wrong {where}: {task}" for count, task in wrong]
            with lane.working():
                lane.wrong.zero_()
        self._checks.clear()
        return found

    @property
    def last(self) -> Task | None:
        """What was issued last since :meth:`faults`."""
        return self._checks[-1] if self._checks else None

    @contextmanager
    def other_streams(self) -> Iterator[None]:
        """Make another stream current on every CUDA device: it follows the one that was, which follows it later."""
        with ExitStack() as stack:
            for place in dict.fromkeys(lane.bank.place for lane in self._lanes.values()):
                if place.type != "cuda":
                    continue
                if place not in self._others:
                    self._others[place] = [torch.cuda.Stream(place) for _ in range(_STREAMS)]  # type: ignore[no-untyped-call]
                before, then = torch.cuda.current_stream(place), self._random.choice(self._others[place])
                then.wait_stream(before)
                stack.callback(before.wait_stream, then)
                stack.enter_context(torch.cuda.stream(then))
            yield

    def _wait(self, task: Task, phase: int) -> None:
        if task.delays and (delay := task.delays[phase])[1] and delay[0] in self._lanes:
            self._lanes[delay[0]].delay(delay[1])

    @contextmanager
    def _issuing(self, task: Task) -> Iterator[None]:
        """Let a block issue an operation between two delays; if it goes aside, the second one is beside it."""
        self._wait(task, 1)
        if not task.aside:
            yield
            self._wait(task, 2)
            return
        with self.context.aside() as aside:
            yield
        self._wait(task, 2)
        aside.wait()

    def _where(self, task: Task) -> tuple[Axis | None, int | None]:
        """Return an axis and a layer whose cut it is."""
        split: Split | None = self._cuts[task.axis]
        if split is None:
            return None, None
        return split.axis, min(parse_layers(split.layers)) if split.layers else None

    def _slices(self, task: Task) -> list[tuple[int, Window]]:
        """Return the columns of the slice of each device of this process."""
        (axis, layer), whole = self._where(task), self._whole(task)
        spans = [
            (s.device, s.start * task.columns, s.end * task.columns) for s in self.context.split(axis or "", layer)
        ]
        return [(device, Window(task.start + a, b - a, whole.columns)) for device, a, b in spans]

    def _whole(self, task: Task) -> Window:
        """Return all columns of an axis that is cut."""
        split = self._cuts[task.axis]
        size = split.size * task.columns if split else 0
        return Window(task.start, size, size)

    def _holders(self, task: Task) -> tuple[int, ...]:
        """Return the devices of all processes that hold a part of an axis."""
        if (split := self._cuts[task.axis]) is None:
            return self.context.all_devices
        return tuple(d for d, (a, b) in enumerate(pairwise(split.bounds)) if a < b)

    def _place(self, task: Task, device: int, room: int, columns: int) -> Tensor:
        return self._lanes[device].room(room, task.rows, columns, task.dtype, gap=task.gap, shift=task.shift)

    def _put(self, task: Task, device: int, room: int, window: Window) -> Tensor:
        """Return an operand with the contents of a window; of another process's device, its shape."""
        if device not in self._lanes:
            return torch.empty(task.rows, window.columns, dtype=task.dtype, device="meta")
        target = self._place(task, device, room, window.columns)
        self._lanes[device].fill(target, window, numbers=task.kind in ADDING)
        return target

    def _out(self, task: Task, sizes: list[tuple[int, int]]) -> list[Tensor] | None:
        return None if task.out == "new" else [self._place(task, device, 2, columns) for device, columns in sizes]

    def _check(self, task: Task, check: int, device: int, found: Tensor, *windows: Window) -> None:
        self._lanes[device].compare(check, found, windows, numbers=task.kind in ADDING)

    def _broadcast(self, task: Task, check: int) -> None:
        axis, layer = self._where(task)
        window, targets = Window(task.start, task.columns, task.columns), self.context.devices_of(axis, layer)
        x, out = self._put(task, task.source, 0, window), self._out(task, [(d, task.columns) for d in targets])
        with self._issuing(task):
            results = self.context.broadcast(x, axis, layer=layer, source=task.source, out=out)
        for device, found in zip(targets, results, strict=True):
            self._check(task, check, device, found, window)

    def _scatter(self, task: Task, check: int) -> None:
        axis, layer = self._where(task)
        x, slices = self._put(task, task.source, 0, self._whole(task)), self._slices(task)
        out = self._out(task, [(device, cut.columns) for device, cut in slices])
        with self._issuing(task):
            results = self.context.scatter(x, axis or "", dim=task.columns, layer=layer, source=task.source, out=out)
        for (device, cut), found in zip(slices, results, strict=True):
            self._check(task, check, device, found, cut)

    def _gather(self, task: Task, check: int) -> None:
        axis, layer = self._where(task)
        parts = [self._put(task, device, 0, cut) for device, cut in self._slices(task)]
        self._wait(task, 1)
        handle = self.context.gather(parts, axis or "", dim=task.columns, layer=layer)
        self._late.append(_Late(handle, check, self._whole(task), self.turns % VERSIONS))
        if len(self._late) > _LATE:
            self._settle()

    def _settle(self) -> None:
        """Ask for the result of a random gather, and check it."""
        late, host = self._late.pop(self._random.randrange(len(self._late))), self._lanes[HOST]
        found = late.handle.tensor
        host.version.fill_(late.version)
        host.compare(late.check, found, [late.window], numbers=False)

    def _allgather(self, task: Task, check: int) -> None:
        axis, layer = self._where(task)
        whole, targets = self._whole(task), self.context.devices
        parts = [self._put(task, device, 0, cut) for device, cut in self._slices(task)]
        out = self._out(task, [(device, whole.columns) for device in targets])
        with self._issuing(task):
            results = self.context.allgather(parts, axis or "", dim=task.columns, layer=layer, out=out)
        for device, found in zip(targets, results, strict=True):
            self._check(task, check, device, found, whole)

    def _all_reduce(self, task: Task, check: int) -> None:
        axis, layer = self._where(task)
        senders, receivers, columns = self._holders(task), tuple(self.context.devices), task.columns
        windows = {device: Window(task.start + _APART * i, columns, columns) for i, device in enumerate(senders)}
        residue = Window(task.start + _APART * len(senders), columns, columns)
        own = self.context.devices_of(axis, layer)
        parts = [self._put(task, device, 0, windows[device]) for device in own]
        residual = [self._put(task, device, 1, residue) for device in receivers] if task.full else None
        out = self._out(task, [(device, columns) for device in receivers])
        if task.out == "parts" and own == receivers:
            out = parts
        elif task.out == "residual" and residual:
            out = residual
        with self._issuing(task):
            results = self.context.all_reduce(parts, residual, axis=axis, layer=layer, out=out)
        added = [*windows.values(), *((residue,) if residual else ())]
        for device, found in zip(receivers, results, strict=True):
            self._check(task, check, device, found, *added)

    def _add_residual(self, task: Task, check: int) -> None:
        axis, layer = self._where(task)
        slices, whole = self._slices(task), self._whole(task)
        before = [cut._replace(start=cut.start + _APART) for _, cut in slices]
        source = [self._put(task, device, 0, whole if task.full else cut) for device, cut in slices]
        target = [self._put(task, device, 1, held) for (device, _), held in zip(slices, before, strict=True)]
        with self._issuing(task):
            self.context.add_residual(target, source, axis or "", dim=task.columns, layer=layer)
        for (device, cut), held, found in zip(slices, before, target, strict=True):
            self._check(task, check, device, found, held, cut)
