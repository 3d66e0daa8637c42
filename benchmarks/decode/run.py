"""One plan of a whole model, run and measured in a process of its own; prints a line for each figure."""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import torch
from attrs import frozen

import tpplan
from benchmarks.common.random_checkpoint import read_rate
from benchmarks.decode.nccl_context import NcclContext
from benchmarks.decode.order import PROMPT, WARM, Order, long_prompt, prompts, synchronize
from benchmarks.decode.rows import Part
from tpplan.core.axes import Axis
from tpplan.core.workspace import areas
from tpplan.decoder import Decoder, Prompt, Sampling, Startup
from tpplan.exec import compile as compile_plan
from tpplan.exec.programs.program import HOST
from tpplan.exec.tools.bench import run as bench_limits
from tpplan.weights import iter_slices, load_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.decode.rows import Row
    from tpplan.core.plan import SplitPlan
    from tpplan.decoder.decoding.steps import Steps
    from tpplan.exec import TPContext


MIB: Final = 2**20


class Buckets:
    """What tensors have asked torch's allocator for since the last look, by bucket. Virtual devices have no allocator.

    The GPUs have to be this process's own, for what the driver says is of all processes together.
    """

    def __init__(self, plan: SplitPlan, places: Sequence[torch.device]) -> None:
        """Look at what is there before."""
        self._plan = plan
        self._places = {i: place for i, place in enumerate(places) if place.type == "cuda"}
        self._before = {i: requested(place) for i, place in self._places.items()}
        self._found: dict[int, dict[str, int]] = {i: {} for i in self._places}

    def look(self, bucket: str) -> None:
        """Note that what has come since the last look is of a bucket."""
        for i, place in self._places.items():
            now = requested(place)
            self._found[i][bucket] = now - self._before[i]
            self._before[i] = now

    def start(self) -> None:
        """Forget the peak so far."""
        for place in self._places.values():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(place)

    def tell(self, part: Part) -> None:
        """Tell each device's rows: the ledger's buckets, and what of the ledger's overhead is where.

        What the libraries have in torch's memory is given back to be known: captured graphs cannot run after that.
        """
        looks = {i: _Look.at(place) for i, place in self._places.items()}
        if looks:
            torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 (there is no other way)
        divided = areas(self._plan.splits, self._plan.model.dtype, self._plan.request)
        for i, place in self._places.items():
            ledger, found, look = self._plan.memory[i], self._found[i], looks[i]
            libraries = look.now - requested(place)
            held, scratch = sum(found.values()), divided[i].scratch_bytes
            activations = look.peak - libraries - held
            planned = {
                "weights": ledger.weights_bytes,
                "cache": ledger.cache_bytes,
                "workspace": ledger.workspace_bytes - scratch,
            }
            for bucket, size in planned.items():
                note = "without the scratch" if bucket == "workspace" else ""
                _row(part, f"device {i}, {bucket}", found[bucket], size, note)
            note = f"at the peak; {_mib(look.now - libraries - held)} of them stay"
            _row(part, f"device {i}, activations, for which the plan has scratch", activations, scratch, note)
            note = (
                f"driver's context and libraries {_mib(look.used - look.reserved)}, libraries in torch's memory "
                f"{_mib(libraries)}, what torch keeps beyond the peak {_mib(look.reserved - look.peak)}"
            )
            _row(part, f"device {i}, overhead", look.used - held - activations, ledger.overhead_bytes, note)
            _row(part, f"device {i}, all that the driver says is used", look.used, ledger.used_bytes)


@frozen
class _Look:
    """What is in use on a CUDA device, in bytes.

    Attributes:
        now: what tensors and libraries have asked torch for.
        peak: the most of that.
        reserved: what torch has of the driver.
        used: what all have of the driver.
    """

    now: int
    peak: int
    reserved: int
    used: int

    @classmethod
    def at(cls, place: torch.device) -> Self:
        """Look."""
        free, total = torch.cuda.mem_get_info(place)
        return cls(requested(place), requested(place, "peak"), torch.cuda.memory_reserved(place), total - free)


def requested(place: torch.device, when: str = "current") -> int:
    """Return the bytes that a CUDA device's torch allocator is asked for: now, or the most with ``peak``."""
    count: int = torch.cuda.memory_stats(place).get(f"requested_bytes.all.{when}", 0)
    return count


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


def _row(part: Part, what: str, found: int, planned: int, note: str = "") -> None:
    part.row(what, found / MIB, "MiB", limit=planned / MIB, note=note)


#: Readings of a prompt that are timed, and before these: a pass runs as it is written, and is captured.
_PREFILLS, _WARM_PREFILLS = 3, 2
#: Bytes of the copy within a device's memory that its bandwidth is known by, turns, and copies of each.
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**24}
_TURNS, _COPIES = 3, 8


class Least(NamedTuple):
    """The least time that a step takes: that in which the slowest device reads the weights.

    Attributes:
        devices: seconds in which each device reads what every step needs, and all experts.
        chosen: part of the experts that a row is routed to.
    """

    devices: Sequence[tuple[float, float]]
    chosen: float

    def seconds(self, batch: int) -> float:
        """Return the time of a step of so many rows, of which each is equally likely to be routed to any experts."""
        part = 1 - (1 - self.chosen) ** batch
        return max(always + part * experts for always, experts in self.devices)


def measure(order: Order, tell: Callable[[Row], None]) -> None:
    """Load a checkpoint by a plan, and measure what there is to measure, the first token first."""
    if order.transport == "host":
        os.environ.setdefault("NCCL_P2P_DISABLE", "1")  # or NCCL would go by links that tpplan is not to use
    part = Part(tell, gpus=order.gpus, cut=order.cut, who="tpplan")
    startup = Startup(time.time() - order.started)
    plan = order.plan()
    memory = Buckets(plan, order.places())
    startup.mark("plan")
    with compile_plan(plan, backend=order.backend, transport=order.transport, scratch=False) as context:
        memory.look("workspace")
        startup.mark("compile")
        weights = load_weights(plan, order.directory, context)
        memory.look("weights")
        startup.mark("weights", weights.nbytes)
        decoder = Decoder(context, order.directory, weights)
        memory.look("cache")
        startup.mark("decoder")
        given = prompts(max(order.batches), plan.split(Axis.VOCAB).size)
        decoder.steps(1).start(given[:1], Sampling())
        startup.end()
        seconds = {each.what: each.time_ns / 1e9 for each in startup.parts}
        part.row(
            "plan and compile",
            seconds["plan"] + seconds["compile"],
            "s",
            note=f"{plan.devices[0].name}, transport {context.explain().transport}",
        )
        part.row("first token, after loading", seconds["decoder"] + seconds["first token"], "s")
        part.row("first token, after the process started", startup.seconds, "s", note=startup.told())
        with part.guarded("load"):
            _tell_load(part, order, context, seconds["weights"])
        least: Least | None = None
        with part.guarded("memory bandwidth"):
            least = _least(part, order, context)
        memory.start()
        _decode(part, order, decoder.steps, given, least, order.predictions(plan))
        _prefill(part, order, decoder, given)
        with part.guarded("memory"):
            memory.tell(part)
        graphs, decoder.prompt_graphs = decoder.prompt_graphs, None
        if order.eager and graphs:
            _prefill(Part(tell, gpus=order.gpus, cut=order.cut, who="tpplan, eager"), order, decoder, given)
        if order.nccl:
            decoder.stack.context = NcclContext(context)  # type: ignore[assignment]
            decoder.stack.processors_left = 0  # with 8, NCCL took a twentieth longer for 2,048 rows
            if graphs:  # of its own, too
                decoder.prompt_graphs = decoder.new_prompt_graphs(graphs.sizes)
            other = Part(tell, gpus=order.gpus, cut=order.cut, who="NCCL")
            _decode(other, order, decoder.new_steps, given, least, {})
            _prefill(other, order, decoder, given)


def _decode(  # noqa: PLR0917
    part: Part,
    order: Order,
    steps_of: Callable[[int], Steps],
    given: Sequence[list[int]],
    least: Least | None,
    predicted: Mapping[int, int],
) -> None:
    """Tell how many tokens a second come of each batch, of the median step from the host's call to its tokens."""
    for batch in order.batches:
        what = f"decode, batch {batch}"
        with part.guarded(what):
            steps = steps_of(batch)
            tokens, seconds = [steps.start(given[:batch], Sampling())[0]], []
            for _ in range(WARM + order.tokens):
                start = time.perf_counter()
                tokens.append(steps.step()[0])
                seconds.append(time.perf_counter() - start)
            median = statistics.median(seconds[WARM:])
            limit = batch / least.seconds(batch) if least else None
            note = f"{median * 1e3:.2f} ms a step"
            if batch in predicted:
                note += f", predicted {predicted[batch]} tokens/s"
            part.row(what, batch / median, "tokens/s", limit=limit, note=note, tokens=tokens)


def _prefill(part: Part, order: Order, decoder: Decoder, given: Sequence[list[int]]) -> None:
    """Tell how many tokens a second a long prompt is read at, and those that are decoded from, if there are several."""
    long = long_prompt(order.prefill, decoder.context.plan.split(Axis.VOCAB).size)
    texts: dict[str, Sequence[list[int]]] = {f"prefill of {order.prefill} tokens": [long]}
    if len(given) > 1:
        texts[f"prefill of {len(given)} prompts of {PROMPT} tokens"] = given
    for what, each in texts.items():
        with part.guarded(what):
            read, seconds = [Prompt(text, sequence) for sequence, text in enumerate(each)], []
            for _ in range(_WARM_PREFILLS + _PREFILLS):
                start = time.perf_counter()
                decoder.read(read)
                synchronize(order.places())
                seconds.append(time.perf_counter() - start)
            median, count = statistics.median(seconds[_WARM_PREFILLS:]), sum(map(len, each))
            part.row(what, count / median, "tokens/s", note=f"{median * 1e3:.1f} ms")


def _tell_load(part: Part, order: Order, context: TPContext, seconds: float) -> None:
    """Tell at which rate the weights were loaded, against reading the file alone and the links to the GPUs."""
    files = {file: file.stat().st_size for file in Path(order.directory).glob("*.safetensors")}
    size = sum(files.values())
    limits = {"reading the file into memory": read_rate(max(files, key=lambda file: files[file]))}
    links = bench_limits.measure({i: device.device for i, device in context.devices.items()})
    if to_gpus := sum(link.bytes_per_second for link in links if link.source == HOST):
        limits["the links to all GPUs"] = to_gpus
    which = min(limits, key=lambda name: limits[name])
    note = f"{size / 1e9:.1f} GB in {seconds:.2f} s; the limit is {which}"
    part.row("load", size / seconds / 1e9, "GB/s", limit=limits[which] / 1e9, note=note)


def _least(part: Part, order: Order, context: TPContext) -> Least:
    """Find what a step has to read, and tell the bandwidths."""
    model = tpplan.read_model(order.directory)
    lookups = {parameter.name for parameter in model.parameters if parameter.lookup}
    sizes, of_experts = (dict.fromkeys(context.all_devices, 0) for _ in range(2))
    for one in iter_slices(context.plan, model):
        counted = of_experts if ".experts." in one.name else sizes
        counted[one.device] += 0 if one.name in lookups else one.nbytes
    chosen = max(block.experts_per_token / block.experts if block.experts else 0 for block in model.blocks)
    devices = []
    for i, size in sizes.items():
        rate = _bandwidth(context.devices[i].device)
        devices.append((size / rate, of_experts[i] / rate))
        note = f"of a copy, read and written; a step reads {size / 1e9:.2f} GB of weights"
        if of_experts[i]:
            note += f", and of {of_experts[i] / 1e9:.2f} GB of experts those that are chosen"
        part.row(f"device {i}, memory bandwidth", rate / 1e9, "GB/s", note=note)
    return Least(devices, chosen)


def _bandwidth(place: torch.device) -> float:
    """Return the bytes per second that a copy within a device's memory reads and writes, of the fastest turn."""
    source, target = (torch.ones(_COPY_BYTES[place.type], dtype=torch.uint8, device=place) for _ in range(2))
    best = float("inf")
    for _ in range(_TURNS):
        synchronize([place])
        start = time.perf_counter()
        for _ in range(_COPIES):
            target.copy_(source)
        synchronize([place])
        best = min(best, time.perf_counter() - start)
    return 2 * _COPIES * source.nbytes / best


if __name__ == "__main__":
    measure(Order.load(sys.argv[1]), lambda row: print(row.line(), flush=True))
