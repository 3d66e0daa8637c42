"""What operations take between processes with a GPU each, and what NCCL takes, in turns."""

from __future__ import annotations

import os
import statistics
import sys
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import distributed

import tpplan
from benchmarks.common import children
from benchmarks.common.rows import ROOT
from tpplan import Axis, Device
from tpplan import exec as tpx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tpplan.core.plan import SplitPlan
    from tpplan.exec import TPContext

MODEL = ROOT / "examples" / "models" / "Llama-3.1-8B"
#: Rows of the residual stream, of 8 KiB each.
ROWS = (1, 8, 32, 128, 512, 2048)
#: Calls of an operation in one measurement, its times in a graph, replays of that, and measurements, in turns.
CALLS, TIMES, REPLAYS, ROUNDS = 60, 100, 5, 7
#: Calls between virtual devices, of which nobody wants the exact times.
FEW_CALLS = 10
COLUMNS = 4096
_SECONDS = 600


def plan_for(processes: int) -> SplitPlan:
    """Return a plan for as many equal GPUs."""
    devices = [Device(name="GPU", budget_bytes=2**36) for _ in range(processes)]
    return tpplan.plan(tpplan.read_model(MODEL), devices, cache=tpplan.Cache(tokens=8192))


class Pair:
    """An operation of ours and its counterpart, on the same tensors.

    Attributes:
        name: of the operation.
        rows: of its tensors.
        ours: calls it.
        theirs: calls torch.distributed's.
    """

    def __init__(self, name: str, rows: int, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
        self.name, self.rows, self.ours, self.theirs = name, rows, ours, theirs


def pairs(ctx: TPContext, rows: int, place: torch.device) -> Iterator[Pair]:
    """Yield the operations on so many rows of bfloat16."""
    process = distributed.get_rank()
    new = partial(torch.zeros, dtype=torch.bfloat16, device=place)
    x, out = new(rows, COLUMNS), new(rows, COLUMNS)
    yield Pair("all_reduce", rows, lambda: ctx.all_reduce([x], out=[x]), lambda: distributed.all_reduce(x))
    parts = [new(rows, s.end - s.start) for s in ctx.split(Axis.RESIDUAL)]
    gathered = new(distributed.get_world_size() * rows, parts[0].shape[1])  # one part behind the other, as NCCL does
    gather = partial(distributed.all_gather_into_tensor, gathered, parts[0])
    yield Pair("allgather", rows, lambda: ctx.allgather(parts, Axis.RESIDUAL, out=[out]), gather)
    given = x if process == 0 else torch.empty(rows, COLUMNS, dtype=x.dtype, device="meta")
    broadcast = partial(distributed.broadcast, out, 0)
    yield Pair("broadcast", rows, lambda: ctx.broadcast(given, source=ctx.all_devices[0], out=[out]), broadcast)


def measured(calls: Sequence[Callable[[], object]], times: int, wait: Callable[[], None]) -> list[list[float]]:
    """Return the microseconds that each of some calls took in every round; they take turns."""
    found: list[list[float]] = [[] for _ in calls]
    for round_ in range(ROUNDS + 1):  # the first is not counted
        for i, call in enumerate(calls):
            wait()
            distributed.barrier()
            start = time.perf_counter()
            for _ in range(times):
                call()
            wait()
            if round_:
                found[i].append((time.perf_counter() - start) * 1e6 / times)
    return found


def graphs_of(ctx: TPContext, pair: Pair) -> list[Callable[[], object]]:
    """Return what replays a graph of an operation, and one of its counterpart."""
    pair.ours(), pair.theirs()
    with ctx.capture() as ours:
        for _ in range(TIMES):
            pair.ours()
    theirs = torch.cuda.CUDAGraph()
    with torch.cuda.graph(theirs):
        for _ in range(TIMES):
            pair.theirs()
    return [ours.replay, theirs.replay]


def run(*, on_gpus: bool) -> None:
    """Measure as one of the processes; the first prints."""
    process, count = distributed.get_rank(), distributed.get_world_size()
    place = torch.device("cuda", process) if on_gpus else torch.device("cpu")

    def wait() -> None:
        if on_gpus:
            torch.cuda.synchronize(place)

    backend = "cuda" if on_gpus else "cpu"
    with tpx.compile(plan_for(count), backend=backend, group=distributed.group.WORLD) as ctx:
        if process == 0:
            print(*ctx.explain().notes, sep="\n")
        calls = CALLS if on_gpus else FEW_CALLS
        for rows in ROWS if on_gpus else ROWS[:2]:
            for pair in pairs(ctx, rows, place):
                _tell(pair, "eager", *measured([pair.ours, pair.theirs], calls, wait))
                if on_gpus:
                    graphs = graphs_of(ctx, pair)
                    _tell(pair, "graph", *([us / TIMES for us in each] for each in measured(graphs, REPLAYS, wait)))
                    del graphs


def _tell(pair: Pair, how: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    if distributed.get_rank() == 0:
        mine, other = statistics.median(ours), statistics.median(theirs)
        size = pair.rows * COLUMNS * 2 // 1024
        spread = f"{min(ours):.1f}-{max(ours):.1f}"
        print(f"{pair.name:10} {size:6} KiB {how}: {mine:7.1f} us ({spread}), theirs {other:7.1f}, {other / mine:.2f}x")


def main(processes: int, *, on_gpus: bool) -> None:
    """Start the processes, or be one of them.

    Args:
        processes: how many.
        on_gpus: whether each has a GPU; otherwise devices are virtual.
    """
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "benchmarks.bench_exec", *sys.argv[1:]]
        failure = children.run(command, processes, _SECONDS, lambda line: print(line, flush=True), ROOT)
        sys.exit(failure or 0)
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=60))
    run(on_gpus=on_gpus)
    distributed.destroy_process_group()
