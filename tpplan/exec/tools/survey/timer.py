"""Times of moves and sums on GPUs: each way is captured in a CUDA graph, and the graphs take turns."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn, Self

import torch

from tpplan.core.axes import Axis
from tpplan.core.device import Device
from tpplan.core.plan import Cache
from tpplan.exec.compiler import compile as compile_plan
from tpplan.exec.tools.bench.clock import Clock, Run
from tpplan.exec.tuning import EXCHANGES, FANS, LARGEST, MIB, SLOTS, SUMS, forced
from tpplan.files.jsontext import render
from tpplan.models.config import parse_config
from tpplan.models.families import spec_from_config
from tpplan.planner.plan import plan as make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext
    from tpplan.exec.cuda.graph import Graph
    from tpplan.exec.programs.lower import Limits

HIDDEN, ITEM_BYTES = 4096, 2
#: Operations in a graph: the maximum, the total bytes that limit it for large messages, and the minimum.
_IN_A_ROW, _VOLUME, _FEWEST = 50, 128 * MIB, 4
_ROUNDS = 7


def synthetic_plan(devices: int) -> SplitPlan:
    """Return a plan of a minimal model with room for the largest messages between ``devices`` devices."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "head_dim": 64,
        "num_attention_heads": devices,
        "num_key_value_heads": devices,
        "num_hidden_layers": 1,
        "intermediate_size": 128 * devices,
        "vocab_size": 32 * devices,
        "max_position_embeddings": 128,
        "torch_dtype": "bfloat16",
    }
    model = spec_from_config(parse_config(render(config).encode(), "config.json"), "thresholds")
    gpus = [Device(name=f"GPU {i}", budget_bytes=2**60) for i in range(devices)]
    return make_plan(model, gpus, cache=Cache(tokens=128), max_rows=LARGEST // (HIDDEN * ITEM_BYTES))


class GraphTimer:
    """Times broadcasts, allgathers of about even slices and all-reduces; a :data:`tpplan.exec.tuning.Time`."""

    def __init__(self, places: Sequence[torch.device]) -> None:
        """Create a timer on given devices, with contexts of a synthetic plan."""
        self._places = places
        self._clock = Clock(places, _ROUNDS)
        self._plan = synthetic_plan(len(places))
        self._contexts: dict[tuple[str, str], TPContext] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._contexts:
            self._contexts.popitem()[1].close()

    def __call__(self, transport: str, kind: str, size: int, ways: tuple[str, ...]) -> tuple[float, ...]:
        """Return the median time of one operation in µs, for each way."""
        count = max(_FEWEST, min(_IN_A_ROW, _VOLUME // size))
        operands = self._operands(kind, size)  # must outlive the graphs
        graphs = {way: self._graph(self._context(transport, way), kind, count, *operands) for way in ways}
        times = self._clock.times({way: Run(graph.replay, count) for way, graph in graphs.items()}, _raise)
        return tuple(times[way].median_ns / 1000 for way in ways)

    def limits(self, transport: str) -> Limits:
        """Return the message size limits of a transport on these devices."""
        return self._context(transport, SLOTS).explain().limits

    def _operands(self, kind: str, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return inputs and outputs whose largest message has ``size`` bytes or slightly less."""
        taken = [min(HIDDEN, size // ITEM_BYTES)] * len(self._places)
        given = taken
        if kind == EXCHANGES:
            given, taken = (
                [part.end - part.start for part in self._plan.slices(Axis.RESIDUAL)],
                [HIDDEN] * len(self._places),
            )
        rows = max(1, size // (max(given) * ITEM_BYTES))
        return self._zeros(rows, given), self._zeros(rows, taken)

    def _zeros(self, rows: int, columns: Sequence[int]) -> list[torch.Tensor]:
        """Return a matrix for each device."""
        widths = zip(self._places, columns, strict=True)
        return [torch.zeros(rows, width, dtype=torch.bfloat16, device=place) for place, width in widths]

    def _graph(
        self, context: TPContext, kind: str, count: int, given: list[torch.Tensor], taken: list[torch.Tensor]
    ) -> Graph:
        """Return a graph of ``count`` consecutive operations."""
        call: Callable[[], object] = {
            FANS: partial(context.broadcast, given[0], out=taken),
            EXCHANGES: partial(context.allgather, given, Axis.RESIDUAL, out=taken),
            SUMS: partial(context.all_reduce, given, out=taken),
        }[kind]
        call()
        with context.capture() as graph:
            for _ in range(count):
                call()
        return graph

    def _context(self, transport: str, way: str) -> TPContext:
        """Return a context whose operations all go one way, compiling it on first use."""
        key = transport, way
        if key not in self._contexts:
            self._contexts[key] = compile_plan(
                self._plan, backend="cuda", devices=self._places, transport=transport, tuning=forced(way)
            )
        return self._contexts[key]


def _raise(_: str, error: Exception) -> NoReturn:
    raise error
