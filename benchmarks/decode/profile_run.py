"""One plan of a whole model, profiled in a process of its own; prints tables of its steps and of a prompt."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.decode.order import WARM, Order, long_prompt, prompts, synchronize
from tpplan.core.axes import Axis
from tpplan.decoder import Decoder, Prompt, Sampling
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tpplan.exec import TPContext


OWN: Final = "tpplan's data movement"
REST: Final = "norms and pointwise"
#: Names of kernels and of operators by kind, the first that fits: attention's kernels are made of CUTLASS's too.
KINDS: Final = {
    OWN: re.compile(r"(direct|frame|landing|packet|slot)_(move|sum_b?f\d+)|sum_b?f\d+|tpplan\..*"),
    "attention": re.compile(r".*(flash|fmha|cudnn|sdpa|attention).*"),
    "matrices": re.compile(
        r".*(gemm|gemv|skinny|cutlass|cublas|nvjet|splitk|aten\.(addmm|baddbmm|bmm|linear|mm)_?$).*"
        r"|(coded_product|dense|experts_product|packed|wide)_.*"
    ),
    "copies and fills": re.compile(
        r".*(copy|fill|memcpy|memset|catarray|aten\.(cat|clone|stack|(new_)?zeros|zero_)).*"
    ),
    REST: re.compile(r".*"),
}
#: Kernels of the list, and characters of their names.
_LISTED, _NAME = 10, 90
#: What a trace calls work of a device.
_CATEGORIES: Final = ("kernel", "gpu_memcpy", "gpu_memset")


@frozen
class Work:
    """A kernel, a copy or a fill.

    Attributes:
        name: its name in the profile.
        device: number of the device that did it.
        start: in µs, from any moment that is the same for all.
        end: in µs; the start if it was not timed.
    """

    name: str
    device: int
    start: float = 0.0
    end: float = 0.0

    @property
    def kind(self) -> str:
        """Of :data:`KINDS`."""
        return next(kind for kind, names in KINDS.items() if names.fullmatch(self.name.lower()))


def works_of(trace: Mapping[str, Any]) -> list[Work]:
    """Return what devices did by a trace of torch's profiler, the document that Chrome takes."""
    return [
        Work(event["name"], _device_of(event["args"]), event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") in _CATEGORIES
    ]


def _device_of(arguments: Mapping[str, Any]) -> int:
    """Return the number of the device that did a work; of a copy between two, that whose engine made it."""
    device: int = arguments["device"] if "device" in arguments else arguments["inDevice"]
    return device


def busy(works: Iterable[Work]) -> float:
    """Return the µs in which any of some works was done; times at which several were count once."""
    total, until = 0.0, float("-inf")
    for work in sorted(works, key=lambda work: work.start):
        total += max(0.0, work.end - max(work.start, until))
        until = max(until, work.end)
    return total


def tables(works: Sequence[Work], what: str, times: int, layers: int) -> Iterator[str]:
    """Yield the lines of two tables for each device: of kinds, and of the kernels that took most time.

    Shares are of the time from the first work of any device to the last. Work that overlaps counts once in its kind and
    once in the total. Where nothing was timed, the tables have only numbers, and the kernels that ran most often.

    Args:
        works: what all devices did.
        what: what was profiled, in words.
        times: how often it was done.
        layers: number of the model's layers.
    """
    if not works:
        yield f"{what}: the profiler has seen no work of any device"
        return
    whole = max(work.end for work in works) - min(work.start for work in works)
    for device in sorted({work.device for work in works}):
        own = [work for work in works if work.device == device]
        yield f"\nDevice {device}, {what}, of {times}:\n"
        yield "| kind | kernels | by layers | µs | share |\n|---|---|---|---|---|"
        for kind in KINDS:
            some = [work for work in own if work.kind == kind]
            yield _row(kind, len(some) / times, layers, _time(busy(some), times), _share(busy(some), whole))
        yield _row("all", len(own) / times, layers, _time(busy(own), times), _share(busy(own), whole))
        gaps = whole - busy(own)
        yield f"| gaps, in which the device has nothing | | | {_time(gaps, times)} | {_share(gaps, whole)} |"
        yield f"| from the first to the last of any device | | | {_time(whole, times)} | |\n"
        yield from _longest(own, times)


def _longest(works: Sequence[Work], times: int) -> Iterator[str]:
    """Yield a table of the kernels with most time."""
    counts, micros = Counter(work.name for work in works), defaultdict[str, float](float)
    for work in works:
        micros[work.name] += work.end - work.start
    yield "| kernel | times | µs each | µs |\n|---|---|---|---|"
    for name in sorted(counts, key=lambda name: (-micros[name], -counts[name]))[:_LISTED]:
        short = name.replace("|", "/")
        short = short if len(short) <= _NAME else f"{short[:_NAME]}…"
        each, total = _time(micros[name], counts[name]), _time(micros[name], times)
        yield f"| `{short}` | {counts[name] / times:,.1f} | {each} | {total} |"


def _row(kind: str, count: float, layers: int, time: str, share: str) -> str:
    return f"| {kind} | {count:,.1f} | {count / layers:.2f} | {time} | {share} |"


def _time(micros: float, times: int) -> str:
    return f"{micros / times:,.1f}" if micros else "–"


def _share(micros: float, whole: float) -> str:
    return f"{micros / whole:.1%}" if whole else "–"


#: Readings of the prompt that are profiled.
_PROMPTS: Final = 3
#: What a context does with tensors.
_OPERATIONS: Final = {"broadcast", "scatter", "gather", "allgather", "all_reduce", "add_residual"}
#: What GPUs do in one kernel, though torch makes it of others elsewhere; and what only takes memory.
_AS_ONE: Final = {"linear", "rms_norm", "scaled_dot_product_attention"}
_EMPTY: Final = ("empty", "new_empty")


def measure(order: Order, tell: Callable[[str], None]) -> None:
    """Load a checkpoint by a plan, and tell where the time of a step goes, and of a prompt if one is asked for."""
    plan = order.plan()
    with compile_plan(plan, backend=order.backend, transport=order.transport, scratch=False) as context:
        noting = Noting(context)
        weights = load_weights(plan, order.directory, context)
        decoder = Decoder(noting if order.backend == "cpu" else context, order.directory, weights)  # type: ignore[arg-type]
        vocabulary, layers = plan.split(Axis.VOCAB).size, len(decoder.stack.heads)
        who = f"{order.gpus} GPUs" if order.backend == "cuda" else f"all of {order.gpus} virtual devices"

        def watch(what: str, call: Callable[[], object], times: int) -> None:
            for _ in range(WARM):
                call()
            works = _operators(noting, call, times) if order.backend == "cpu" else _kernels(order, call, times)
            for line in tables(works, f"{who}, {what}", times, layers):
                tell(line)

        for batch in order.batches:
            steps = decoder.steps(batch)
            steps.start(prompts(batch, vocabulary), Sampling())
            watch(f"a step of batch {batch}", steps.step, order.tokens)
        if order.prefill:
            read = [Prompt(long_prompt(order.prefill, vocabulary))]
            watch(f"a prompt of {order.prefill} tokens", lambda: decoder.read(read), _PROMPTS)


def _kernels(order: Order, call: Callable[[], object], times: int) -> list[Work]:
    """Return what GPUs do as something is called so many times."""
    synchronize(order.places())
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:  # which warns otherwise
        for _ in range(times):
            call()
        synchronize(order.places())
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        return works_of(json.loads(path.read_bytes()))


def _operators(noting: Noting, call: Callable[[], object], times: int) -> list[Work]:
    """Return what torch and a context are called for, without times."""
    with noting.noted() as works:
        for _ in range(times):
            call()
    return works


class Noting:
    """Stands in for a context, to note what is called of it and of torch: as works of device 0, for any virtual one.

    Left out is what runs no kernel on GPUs: views, and memory that is taken. An operation of the context counts once
    for each tensor that it makes; how virtual devices do it does not.
    """

    def __init__(self, context: TPContext) -> None:
        """Stand in for a context."""
        self._context = context
        self._works: list[Work] = []

    @contextmanager
    def noted(self) -> Iterator[list[Work]]:
        """Note what is called."""
        self._works = []
        with _Calls(self._works):
            yield self._works

    def __getattr__(self, name: str) -> Any:
        """Return an operation that is noted, or whatever else the context has."""
        found = getattr(self._context, name)
        if name not in _OPERATIONS:
            return found

        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                result = found(*args, **kwargs)
            count = len(result) if isinstance(result, tuple) else 1
            self._works.extend([Work(f"tpplan.{name}", 0)] * count)
            return result

        return run


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch is called for."""

    def __init__(self, works: list[Work]) -> None:
        """Note it there."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._works = works

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what torch is told to, and note it."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        is_made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")  # noqa: SLF001
        if is_made_of_others and name not in _AS_ONE:
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        writes = func._schema.is_mutable or not _memory(result) <= _memory((args, kwargs))  # noqa: SLF001
        if writes and not name.startswith(_EMPTY):
            self._works.append(Work(f"aten.{name}", 0))
        return result


def _memory(tensors: object) -> set[int]:
    """Return what tells the memory of tensors from that of others."""
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)}  # noqa: SLF001


if __name__ == "__main__":
    measure(Order.load(sys.argv[1]), lambda line: print(line, flush=True))
