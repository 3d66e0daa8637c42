"""What operations take between processes, and what others take, in turns, each checked first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from attrs import evolve, frozen
from torch import distributed

from tpplan.core.axes import Axis
from tpplan.exec.tools.bench.between.case import Case, Contender
from tpplan.exec.tools.bench.between.peers import Gloo, Nccl, Ours, Symmetric, Window
from tpplan.exec.tools.bench.case import Cases
from tpplan.exec.tools.bench.clock import spread
from tpplan.exec.tools.bench.peers import OURS
from tpplan.exec.tools.bench.run import reason
from tpplan.reports.bench import Timed

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.exec.context import TPContext
    from tpplan.reports.bench import Measured

T = TypeVar("T")

#: Calls of an operation in a round, and replays of its graph: as many in all processes.
CALLS, REPLAYS = 60, 5
#: Calls between virtual devices, of which nobody wants the exact times.
FEW_CALLS = 10
#: Who is measured beside tpplan; all but gloo need GPUs.
_PEERS: Mapping[str, tuple[type[Nccl | Symmetric], ...]] = {"cuda": (Nccl, Window, Symmetric), "cpu": (Gloo,)}


@frozen(eq=False)
class Entry:
    """A run to time.

    Attributes:
        call: the run.
        times: of it in a round.
        operations: of one run.
    """

    call: Callable[[], object]
    times: int
    operations: int = 1


class Turns:
    """Times operations by all implementations whose results are right.

    Attributes:
        cases: sizes, and how the context runs operations.
        widths: columns of each process's slice of the residual stream.
    """

    def __init__(self, ctx: TPContext, place: torch.device, most_rows: int, rounds: int) -> None:
        """Let everybody allocate what operations of up to so many rows need."""
        self.cases = Cases(ctx)
        self._ctx, self._place, self._rounds = ctx, place, rounds
        self.widths = tuple(part.end - part.start for part in ctx.plan.slices(Axis.RESIDUAL))
        self._on_gpus = place.type == "cuda"
        self._closed: dict[str, str] = {}
        self._kinds: list[Ours | Nccl | Symmetric] = [Ours(ctx)]
        for kind in _PEERS[place.type]:
            self._open(kind, most_rows * max(self.widths) * len(self.widths))

    def _open(self, kind: type[Nccl | Symmetric], elements: int) -> None:
        """Let a peer allocate what it needs for so many elements, or note why it cannot."""
        try:
            opened: Nccl | Symmetric = agreed(lambda: kind(self._place, elements, self._ctx.dtype), _give_back)
        except RuntimeError as error:
            self._closed |= dict.fromkeys((who for ways in kind.WAYS.values() for who in ways), str(error))
        else:
            self._kinds.append(opened)

    def close(self) -> None:
        """Give back what others must not hold when processes leave their group, once all are here."""
        self._wait()
        for kind in self._kinds:
            _give_back(kind)
        self._wait()

    def measured(self, operation: str, rows: int) -> Measured:
        """Return everybody's times of an operation on some rows, or why they have none."""
        case = Case(operation, rows, self.widths, distributed.get_rank(), place=self._place, dtype=self._ctx.dtype)
        names = [who for kind in (Ours, *_PEERS[self._place.type]) for who in kind.WAYS.get(operation, ())]
        failed = {(who, False): self._closed[who] for who in names if who in self._closed}
        calls = CALLS if self._on_gpus else FEW_CALLS
        count = self.cases.in_a_graph(rows)
        entries: dict[tuple[str, bool], Entry] = {}
        for each in [each for kind in self._kinds for each in kind.contenders(case)]:
            key = each.who, False
            try:
                self._check(case, each, each.call, 1)
                entries[key] = Entry(each.call, calls)
                if self._on_gpus:
                    key = each.who, True
                    replay = agreed(partial(self._captured, each, count))
                    self._check(case, each, replay, count)
                    entries[key] = Entry(replay, REPLAYS, count)
            except RuntimeError as error:
                failed[key] = str(error)
        times = self._times(entries)
        keys = sorted({*times, *failed}, key=lambda key: (names.index(key[0]), key[1]))
        return evolve(
            self.cases.untimed(operation, rows),
            timed=tuple(
                Timed(by=who, graph=graph, time=times.get((who, graph)), failed=failed.get((who, graph), ""))
                for who, graph in keys
            ),
        )

    def _check(self, case: Case, contender: Contender, run: Callable[[], Tensor], times: int) -> None:
        agreed(lambda: contender.check(case, run, times, self._wait))

    def _captured(self, contender: Contender, count: int) -> Callable[[], Tensor]:
        """Return what replays a graph of an operation, and returns the tensor that the last one in it writes."""
        graph: Any = torch.cuda.CUDAGraph()
        with self._ctx.capture() if contender.who == OURS else torch.cuda.graph(graph) as captured:
            for _ in range(count):
                written = contender.call()
        graph = captured or graph

        def run() -> Tensor:
            graph.replay()
            return written

        return run

    def _times(self, entries: Mapping[tuple[str, bool], Entry]) -> dict[tuple[str, bool], Any]:
        """Return how long one operation of each entry takes; all take turns."""
        found: dict[tuple[str, bool], list[float]] = {key: [] for key in entries}
        for round_ in range(self._rounds + 1):  # the first is not counted
            for key, entry in entries.items():
                self._wait()
                start = time.perf_counter()
                for _ in range(entry.times):
                    entry.call()
                self._synchronize()
                if round_:
                    found[key].append((time.perf_counter() - start) / (entry.times * entry.operations))
        return {key: spread(seconds) for key, seconds in found.items()}

    def _synchronize(self) -> None:
        if self._on_gpus:
            torch.cuda.synchronize(self._place)

    def _wait(self) -> None:
        self._synchronize()
        distributed.barrier()


def _give_back(kind: Ours | Nccl | Symmetric) -> None:
    """Give back what a peer must not hold when processes leave their group."""
    if isinstance(kind, Window):
        kind.close()


def agreed(action: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """Return what an action returns, once it has succeeded in all processes.

    Args:
        action: what all do.
        undo: takes back what the action returned here, if it has failed in another.

    Raises:
        RuntimeError: it has failed in one; the message is its reason.
    """
    why, found = "", None
    try:
        found = action()
    except Exception as error:  # noqa: BLE001 (of any library)
        why = reason(error)
    if first := next(filter(None, all_of(why)), ""):
        if not why:
            with suppress(Exception):  # why it failed elsewhere is what is told
                undo(found)  # type: ignore[arg-type]
        raise RuntimeError(first)
    return found  # type: ignore[return-value]


def all_of(own: T) -> list[T]:
    """Return what each process has, in their order."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return found
