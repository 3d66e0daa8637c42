"""Random operations of a context, each checked on the devices themselves without waiting for it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from random import Random
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from benchmarks.contents import VERSIONS, Bank, Lane, Window
from benchmarks.tasks import ADDING, Task, Tasks
from tpplan.core.axes import parse_layers
from tpplan.exec import HOST, Gathered
from tpplan.exec.explain import cuts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from tpplan.core.axes import Axis
    from tpplan.core.plan import Split
    from tpplan.exec import TPContext

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
        context: whose operations.
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
            context: on whatever devices.
            seed: of everything random.
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
        for device in self.context.all_devices:
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
        if task.delays and (delay := task.delays[phase])[1]:
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
        """Return the columns of each device's slice."""
        axis, layer = self._where(task)
        spans = [
            (s.device, s.start * task.columns, s.end * task.columns) for s in self.context.split(axis or "", layer)
        ]
        return [(device, Window(task.start + a, b - a, spans[-1][2])) for device, a, b in spans]

    def _whole(self, task: Task) -> Window:
        """Return all columns of an axis."""
        size = self._slices(task)[0][1].pitch
        return Window(task.start, size, size)

    def _place(self, task: Task, device: int, room: int, columns: int) -> Tensor:
        return self._lanes[device].room(room, task.rows, columns, task.dtype, gap=task.gap, shift=task.shift)

    def _put(self, task: Task, device: int, room: int, window: Window) -> Tensor:
        """Return an operand with the contents of a window."""
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
        whole, targets = self._whole(task), self.context.all_devices
        parts = [self._put(task, device, 0, cut) for device, cut in self._slices(task)]
        out = self._out(task, [(device, whole.columns) for device in targets])
        with self._issuing(task):
            results = self.context.allgather(parts, axis or "", dim=task.columns, layer=layer, out=out)
        for device, found in zip(targets, results, strict=True):
            self._check(task, check, device, found, whole)

    def _all_reduce(self, task: Task, check: int) -> None:
        axis, layer = self._where(task)
        givers, takers, columns = self.context.devices_of(axis, layer), self.context.all_devices, task.columns
        windows = {device: Window(task.start + _APART * i, columns, columns) for i, device in enumerate(givers)}
        residue = Window(task.start + _APART * len(givers), columns, columns)
        parts = [self._put(task, device, 0, windows[device]) for device in givers]
        residual = [self._put(task, device, 1, residue) for device in takers] if task.full else None
        out = self._out(task, [(device, columns) for device in takers])
        if task.out == "parts" and givers == takers:
            out = parts
        elif task.out == "residual" and residual:
            out = residual
        with self._issuing(task):
            results = self.context.all_reduce(parts, residual, axis=axis, layer=layer, out=out)
        added = [*windows.values(), *((residue,) if residual else ())]
        for device, found in zip(takers, results, strict=True):
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
