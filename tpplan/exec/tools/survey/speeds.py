"""How fast the GPUs of this machine are: the constants that plans predict their speed from."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from tpplan.core.speed import MIDDLE_BYTES, GpuSpeed, LinkSpeed, MeasuredSpeeds
from tpplan.errors import ExecutionError
from tpplan.exec.compiler import compile as compile_plan
from tpplan.exec.tools.bench.clock import Clock, Run
from tpplan.exec.tools.survey.survey import no_gpu
from tpplan.exec.tools.survey.timer import HIDDEN, ITEM_BYTES, synthetic_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ROUNDS = 9
_SECOND = 10**9
#: Bytes that are read, at most an eighth of what is free: many times what caches hold.
_READ_BYTES = 2 * 2**30
#: Rows and columns of the matrices that are multiplied, and of those for less than 4 GiB of free memory.
_SIDE, _SMALL_SIDE = 8192, 2048
_PLENTY = 4 * 2**30
#: Kernels of a graph that do next to nothing.
_TINY = 200
#: Bytes of a small, a middle and a large sum, and how many of them are in a graph.
_SUMS = ((8 * 2**10, 50), (MIDDLE_BYTES, 20), (16 * 2**20, 8))


def measure(busy: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()) -> MeasuredSpeeds:
    """Measure the bandwidth, the kernel boundary and the matrix rate of every GPU, and the sums of every pair.

    The GPUs should be idle. It takes some seconds for each GPU and pair.

    Args:
        busy: returns a context that is active while the named step runs.

    Raises:
        DeviceError: torch sees no GPU.
        ExecutionError: a GPU has too little free memory, or fails.
    """
    count = torch.cuda.device_count()
    if not count:
        raise no_gpu()
    gpus = []
    for i in range(count):
        with busy(f"measuring GPU {i}"), _enough_memory(f"GPU {i}"):
            gpus.append(_gpu(torch.device("cuda", i)))
    links = []
    for first, second in combinations(range(count), 2):
        with busy(f"measuring the link of GPUs {first} and {second}"), _enough_memory(f"GPUs {first} and {second}"):
            links.append(_link(first, second))
    return MeasuredSpeeds(tuple(gpus), tuple(links))


@contextmanager
def _enough_memory(what: str) -> Iterator[None]:
    """Say it clearly where GPUs have too little free memory to be measured.

    Raises:
        ExecutionError: naming them.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        told = ". ".join(str(error).split(". ")[:2])
        hint = "end other programs there (tpplan devices lists them), or leave out --measure"
        raise ExecutionError(f"{what} has too little free memory to be measured: {told}", hint) from error


def _gpu(place: torch.device) -> GpuSpeed:
    """Measure one GPU."""
    clock = Clock([place], _ROUNDS)
    free, _ = torch.cuda.mem_get_info(place)
    with torch.cuda.device(place):
        source = torch.zeros(min(_READ_BYTES, free // 8) // 4, dtype=torch.float32, device=place)
        target = torch.empty_like(source)
        side = _SIDE if free > _PLENTY else _SMALL_SIDE
        left = torch.zeros(side, side, dtype=torch.bfloat16, device=place).normal_()
        product = torch.empty_like(left)
        runs = {
            "read": Run(lambda: torch.sum(source)),
            "copy": Run(lambda: target.copy_(source)),
            "multiply": Run(lambda: torch.mm(left, left, out=product)),
            "boundary": Run(_tiny(place).replay, _TINY),
        }
        for run in runs.values():
            run.call()
        times = {name: spread.median_ns for name, spread in clock.times(runs, _raise).items()}
    size = source.numel() * source.element_size()
    uuid = str(getattr(torch.cuda.get_device_properties(place), "uuid", ""))
    return GpuSpeed(
        uuid=uuid,
        read_bytes_per_second=size * _SECOND // times["read"],
        copy_bytes_per_second=2 * size * _SECOND // times["copy"],
        boundary_ns=max(1, times["boundary"]),
        matrix_flops_per_second=2 * side**3 * _SECOND // times["multiply"],
    )


def _tiny(place: torch.device) -> torch.cuda.CUDAGraph:
    """Return a graph of kernels that each add to one element, one after the other."""
    word = torch.zeros(1, device=place)
    stream, graph = torch.cuda.Stream(place), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        word.add_(1)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_TINY):
                word.add_(1)
    return graph


def _link(first: int, second: int) -> LinkSpeed:
    """Measure sums of two GPUs, by the transport that a plan would take."""
    places = [torch.device("cuda", i) for i in (first, second)]
    clock = Clock(places, _ROUNDS)
    with compile_plan(synthetic_plan(2), backend="cuda", devices=places) as context:
        times = []
        for size, count in _SUMS:
            rows = size // (HIDDEN * ITEM_BYTES)
            parts = [torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=place) for place in places]
            context.all_reduce(parts, out=parts)
            if context.can_capture:
                with context.capture() as graph:
                    for _ in range(count):
                        context.all_reduce(parts, out=parts)
                run = Run(graph.replay, count)
            else:
                run = Run(lambda parts=parts: context.all_reduce(parts, out=parts))  # type: ignore[misc]
            run.call()
            times.append(clock.times({"sum": run}, _raise)["sum"].median_ns)
    small, middle, large = times
    further = _SUMS[-1][0] - MIDDLE_BYTES
    return LinkSpeed(
        first=first,
        second=second,
        latency_ns=max(1, small),
        bytes_per_second=max(1, further * _SECOND // max(1, large - middle)),
        middle_ns=max(1, middle),
    )


def _raise(what: str, error: Exception) -> None:
    raise ExecutionError(f"measuring {what} failed: {error}", "another program may use the GPU") from error
