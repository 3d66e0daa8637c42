"""One plan of a whole model, profiled in a process of its own; prints tables of its steps and of a prompt."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.decode_order import WARM, Order, long_prompt, prompts, synchronize
from benchmarks.kernel_times import Work, tables, works_of
from tpplan.core.axes import Axis
from tpplan.decoder import Decoder, Prompt, Sampling
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tpplan.exec import TPContext

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
