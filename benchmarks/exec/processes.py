"""What operations take between processes with a GPU each, and what NCCL and torch's symmetric memory take, in turns."""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import distributed

import tpplan
from benchmarks.common import children
from benchmarks.common.rows import ROOT
from benchmarks.exec.contender import DTYPE, OPERATIONS, Case, Contender
from benchmarks.exec.nccl import Nccl, Window
from benchmarks.exec.symmetric import Symmetric
from tpplan import Axis, Device
from tpplan import exec as tpx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from tpplan.core.plan import SplitPlan
    from tpplan.exec import TPContext

T = TypeVar("T")

MODEL = ROOT / "examples" / "models" / "Llama-3.1-8B"
#: Rows of the residual stream, of 8 KiB each.
ROWS = (1, 8, 32, 128, 512, 2048, 8192)
COLUMNS = 4096
#: Calls of an operation in one measurement, its times in a graph, replays of that, and measurements, in turns.
CALLS, TIMES, REPLAYS, ROUNDS = 60, 100, 5, 7
#: Calls between virtual devices, of which nobody wants the exact times.
FEW_CALLS = 10
#: Seconds after which a process that is at an operation of one size says where and ends, and after which all are ended.
_SECONDS, _MOST_SECONDS = 120, 580


def plan_for(processes: int) -> SplitPlan:
    """Return a plan for as many equal GPUs."""
    devices = [Device(name="GPU", budget_bytes=2**36) for _ in range(processes)]
    cache = tpplan.Cache(tokens=ROWS[-1])
    return tpplan.plan(tpplan.read_model(MODEL), devices, cache=cache, max_rows=ROWS[-1])


class Ours:
    """tpplan, which sums in place.

    Attributes:
        WAYS: who runs each operation.
    """

    WAYS: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(OPERATIONS, ("tpplan",))

    def __init__(self, ctx: TPContext) -> None:
        """Take a context."""
        self._ctx = ctx

    def contenders(self, case: Case) -> Iterator[Contender]:
        """Yield the implementation of a case."""
        ctx = self._ctx
        new = partial(torch.zeros, case.rows, dtype=DTYPE, device=ctx.devices[case.process].device)
        whole = new(sum(case.widths))
        if case.operation == "allgather":
            part = new(case.widths[case.process])
            gather = partial(ctx.allgather, [part], Axis.RESIDUAL, out=[whole])
            yield Contender(who="tpplan", operand=part, call=lambda: gather()[0])
        elif case.operation == "broadcast":
            operand = new(sum(case.widths))
            given = operand if case.given is not None else operand.to("meta")
            broadcast = partial(ctx.broadcast, given, source=ctx.all_devices[0], out=[whole])
            yield Contender(who="tpplan", operand=operand, call=lambda: broadcast()[0])
        else:
            more = None if case.residual is None else [case.residual]
            add_up = partial(ctx.all_reduce, [whole], more, out=[whole])
            yield Contender(who="tpplan", operand=whole, call=lambda: add_up()[0], in_place=True)


def agreed(action: Callable[[], T]) -> T:
    """Return what an action returns, once it has succeeded in all processes.

    Raises:
        RuntimeError: it has failed in one; the message is its reason.
    """
    reason, found = "", None
    try:
        found = action()
    except Exception as error:  # noqa: BLE001 (of any library)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
    reasons: list[str] = [""] * distributed.get_world_size()
    distributed.all_gather_object(reasons, reason)
    if any(reasons):
        raise RuntimeError(next(filter(None, reasons)))
    return found  # type: ignore[return-value]


class Turns:
    """Times operations of all implementations, those whose results are right.

    Attributes:
        left_out: implementations that are not timed, each with the reason.
    """

    def __init__(self, ctx: TPContext, place: torch.device) -> None:
        """Let everybody allocate what it needs."""
        self._ctx, self._place = ctx, place
        self._widths = [s.end - s.start for s in ctx.plan.slices(Axis.RESIDUAL)]
        self._on_gpus = place.type == "cuda"
        elements = (ROWS[-1] if self._on_gpus else ROWS[1]) * max(self._widths) * len(self._widths)
        self.left_out: dict[str, str] = {}
        self._kinds: list[Ours | Nccl | Symmetric] = [Ours(ctx)]
        for kind in (Nccl, Window, Symmetric):
            self._open(kind, elements)

    def _open(self, kind: type[Nccl | Symmetric], elements: int) -> None:
        """Let a peer allocate what it needs for so many elements, or note why it cannot."""
        try:
            opened: Nccl | Symmetric = agreed(lambda: kind(self._place, elements))
        except RuntimeError as error:
            self.left_out |= dict.fromkeys((who for ways in kind.WAYS.values() for who in ways), str(error))
        else:
            self._kinds.append(opened)

    def names(self, operation: str) -> list[str]:
        """Return who runs an operation, tpplan first."""
        return [who for kind in (Ours, Nccl, Window, Symmetric) for who in kind.WAYS.get(operation, ())]

    def measured(self, operation: str, rows: int) -> Iterator[tuple[str, dict[str, list[float]]]]:
        """Yield how an operation was run, and everybody's microseconds in each round, of those who ran it right."""
        case = Case(operation, rows, self._widths, distributed.get_rank(), self._place)
        contenders = [each for kind in self._kinds for each in kind.contenders(case)]
        calls = CALLS if self._on_gpus else FEW_CALLS
        right = [each for each in contenders if self._right(case, each, each.call, 1)]
        yield "called", self._times({each.who: each.call for each in right}, calls, 1)
        if self._on_gpus:
            graphs: dict[str, Callable[[], object]] = {}
            for each in right:
                try:
                    replay = agreed(partial(self._captured, each))
                except RuntimeError as error:
                    self._tell(f"{each.who}, in a graph", str(error))
                    continue
                if self._right(case, each, replay, TIMES):
                    graphs[each.who] = replay
            yield "in a graph", self._times(graphs, REPLAYS, TIMES)

    def _right(self, case: Case, contender: Contender, run: Callable[[], Tensor], times: int) -> bool:
        try:
            agreed(lambda: contender.check(case, run, times, self._wait))
        except RuntimeError as error:
            how = " in a graph" if times > 1 else ""
            self._tell(contender.who, f"{case.operation} of {case.rows} rows{how}: {error}")
            return False
        return True

    def _captured(self, contender: Contender) -> Callable[[], Tensor]:
        """Return what replays a graph of an operation, and returns the tensor that the last one in it writes."""
        graph: Any = torch.cuda.CUDAGraph()
        with self._ctx.capture() if contender.who == "tpplan" else torch.cuda.graph(graph) as captured:
            for _ in range(TIMES):
                written = contender.call()
        graph = captured or graph

        def run() -> Tensor:
            graph.replay()
            return written

        return run

    def _times(self, calls: Mapping[str, Callable[[], object]], times: int, operations: int) -> dict[str, list[float]]:
        """Return the microseconds that an operation took in every round; all take turns."""
        found: dict[str, list[float]] = {who: [] for who in calls}
        for round_ in range(ROUNDS + 1):  # the first is not counted
            for who, call in calls.items():
                self._wait()
                start = time.perf_counter()
                for _ in range(times):
                    call()
                self._synchronize()
                if round_:
                    found[who].append((time.perf_counter() - start) * 1e6 / (times * operations))
        return found

    def _tell(self, who: str, why: str) -> None:
        self.left_out.setdefault(who, why)

    def _synchronize(self) -> None:
        if self._on_gpus:
            torch.cuda.synchronize(self._place)

    def _wait(self) -> None:
        self._synchronize()
        distributed.barrier()


def cells(size: int, how: str, names: Sequence[str], found: Mapping[str, Sequence[float]]) -> str:
    """Return the row of a table: medians in µs, tpplan's spread, others' share of it, and the best of them."""
    medians = {who: statistics.median(each) for who, each in found.items()}
    ours = medians.get("tpplan")
    texts = ["failed" if ours is None else f"{ours:.2f} ({min(found['tpplan']):.2f}-{max(found['tpplan']):.2f})"]
    for who in names[1:]:
        share = f" ({medians[who] / ours:.2f})" if ours and who in medians else ""
        texts.append(f"{medians[who]:.2f}{share}" if who in medians else "-")
    others = {who: each for who, each in medians.items() if who != "tpplan"}
    best = min(others, key=lambda who: others[who], default="")
    texts.append(f"{others[best] / ours:.2f}, {best}" if best and ours else "-")
    return f"| {size // 1024} KiB | {how} | {' | '.join(texts)} |"


def run(place: torch.device) -> bool:
    """Measure as one of the processes; the first prints. Return whether tpplan was right in all."""
    first, complete = distributed.get_rank() == 0, True

    def say(*lines: str) -> None:
        if first:
            print(*lines, sep="\n", flush=True)

    with tpx.compile(plan_for(distributed.get_world_size()), backend=place.type, group=distributed.group.WORLD) as ctx:
        say(*ctx.explain().notes)
        turns = Turns(ctx, place)
        for operation in OPERATIONS:
            names = turns.names(operation)
            say(f"\n{operation}, µs; in brackets how many times as long as tpplan. {children.NO_MULTICAST}\n")
            say(f"| size | how | {' | '.join(names)} | best of the others |", "|---" * (len(names) + 3) + "|")
            for rows in ROWS if place.type == "cuda" else ROWS[:2]:
                faulthandler.dump_traceback_later(_SECONDS, exit=True)
                for how, found in turns.measured(operation, rows):
                    say(cells(rows * COLUMNS * DTYPE.itemsize, how, names, found))
                    complete &= "tpplan" in found
        say("", *(f"{who} was left out: {why}" for who, why in turns.left_out.items()))
    return complete


def main(processes: int, *, on_gpus: bool) -> None:
    """Start the processes, or be one of them.

    Args:
        processes: how many.
        on_gpus: whether each has a GPU; otherwise devices are virtual.
    """
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "benchmarks.bench_exec", *sys.argv[1:]]
        failure = children.run(command, processes, _MOST_SECONDS, lambda line: print(line, flush=True), ROOT)
        sys.exit(failure or 0)
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(place)
    distributed.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=60))
    complete = run(place)
    distributed.destroy_process_group()
    if not complete:
        sys.exit("tpplan was wrong, or failed: see above")
