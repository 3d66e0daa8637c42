"""Operations on the GPUs of this machine, beside NCCL in the same process, called one by one and in a CUDA graph.

A payload is the bytes that every GPU holds in the end: of the tensor that is broadcast, of the whole of an allgather,
of the sum of an all_reduce. Times are in µs, of one operation of many in a row, from the first call to the last result:
the median of the rounds, and in brackets how many times as long NCCL takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.cuda import nccl

import tpplan
from benchmarks.rows import ROOT
from tpplan import Axis
from tpplan import exec as tpx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODEL = ROOT / "examples" / "models" / "Llama-3.1-8B" / "config.json"
HIDDEN = 4096
IN_A_ROW = 50
REPLAYS = 10


def main() -> None:
    """Measure, and print a table for each number of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (default 7)")
    parser.add_argument("--kib", default="8,16,64,256,1024,16384", help="payloads")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0)
    version = ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]
    print(f"{gpus} x {name}, torch {torch.__version__}, NCCL {version}; bfloat16")
    for count in (n for n in (2, 4, 8) if n <= gpus):
        model, devices = tpplan.read_model(MODEL), tpplan.parse_devices(f"{count}x40GiB")
        plan = tpplan.plan(model, devices, cache=tpplan.Cache(tokens=8192))
        with tpx.compile(plan, backend="cuda", devices=range(count)) as ctx:
            print(f"\n{count} GPUs, transport {ctx.explain().transport}\n")
            print("| KiB | | calls | in a graph |\n|---|---|---|---|")
            for kib in map(int, arguments.kib.split(",")):
                table(ctx, count, kib, arguments.rounds)


def table(ctx: tpx.TPContext, count: int, kib: int, rounds: int) -> None:
    """Print the lines of one payload."""
    rows = max(1, kib * 512 // HIDDEN)
    columns = kib * 512 // rows
    places = [torch.device("cuda", i) for i in range(count)]

    def tensors(width: int) -> list[torch.Tensor]:
        return [torch.randn(rows, width, device=place).bfloat16() for place in places]

    x, whole, results = tensors(columns), tensors(columns), tensors(HIDDEN)
    slices = [s.end - s.start for s in ctx.split(Axis.RS)]
    parts = [part[:, :width].contiguous() for part, width in zip(tensors(HIDDEN), slices, strict=True)]
    ends = tensors(columns // count)
    pairs: dict[str, tuple[Callable[[], object], Callable[..., object]]] = {
        "broadcast": (lambda: ctx.broadcast(x[0], out=whole), partial(nccl.broadcast, whole)),
        "all_reduce": (lambda: ctx.all_reduce(x, out=whole), partial(nccl.all_reduce, x, whole)),
    }
    if columns == HIDDEN and len(slices) == count:
        pairs["allgather"] = (
            lambda: ctx.allgather(parts, Axis.RS, out=results),
            partial(nccl.all_gather, ends, [result.view(-1) for result in results]),
        )
    for name, (ours, theirs) in pairs.items():
        ours(), theirs()
        graph = captured(places, theirs)
        with ctx.capture() as own:
            for _ in range(IN_A_ROW):
                ours()
        runs = {
            "ours": (repeat(ours, IN_A_ROW), IN_A_ROW),
            "nccl": (repeat(theirs, IN_A_ROW), IN_A_ROW),
            "our graph": (repeat(own.replay, REPLAYS), IN_A_ROW * REPLAYS),
            "nccl graph": (repeat(graph.replay, REPLAYS), IN_A_ROW * REPLAYS),
        }
        times = measured(runs, places, rounds)
        cells = [
            f"{times[a]:.1f} ({times[b] / times[a]:.2f})" for a, b in (("ours", "nccl"), ("our graph", "nccl graph"))
        ]
        print(f"| {kib} | {name} | {cells[0]} | {cells[1]} |", flush=True)


def repeat(call: Callable[[], object], times: int) -> Callable[[], None]:
    """Return what calls so often."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


def measured(
    runs: dict[str, tuple[Callable[[], None], int]], places: Sequence[torch.device], rounds: int
) -> dict[str, float]:
    """Return the median µs of an operation of each run, which has so many; they take turns, for noise to hit all."""
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, (run, operations) in runs.items():
            synchronize(places)
            start = time.perf_counter()
            run()
            synchronize(places)
            if turn:
                seen[name].append((time.perf_counter() - start) / operations * 1e6)
    return {name: statistics.median(times) for name, times in seen.items()}


def captured(places: Sequence[torch.device], call: Callable[..., object]) -> torch.cuda.CUDAGraph:
    """Return one graph over all devices in which NCCL does the same many times."""
    streams = [torch.cuda.Stream(place) for place in places]  # type: ignore[no-untyped-call]
    synchronize(places)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(places[0]), torch.cuda.graph(graph, stream=streams[0], capture_error_mode="relaxed"):
        for stream in streams[1:]:
            stream.wait_stream(streams[0])
        for _ in range(IN_A_ROW):
            call(streams=streams)
        for stream in streams[1:]:
            streams[0].wait_stream(stream)
    return graph


def synchronize(places: Sequence[torch.device]) -> None:
    """Wait for all devices."""
    for place in places:
        torch.cuda.synchronize(place)


if __name__ == "__main__":
    main()
