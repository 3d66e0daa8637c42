"""The heads of one layer on one device: which query heads read which KV heads, and their cache."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from tpplan.axes import Axis
from tpplan.decoder.cache import Store
from tpplan.decoder.layer_cache import LayerCache
from tpplan.decoder.layers import some_of, takes_flash, together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from tpplan.axes import Slice
    from tpplan.exec.context import TPContext
    from tpplan.plan import Request


@frozen
class Run:
    """Successive KV heads, each of which is read by equally many successive query heads.

    Attributes:
        queries: where the query heads are among the device's.
        keys: where the KV heads are among the device's.
        group: query heads per KV head.
    """

    queries: slice
    keys: slice
    group: int


@frozen
class Heads:
    """What a device holds of a layer's attention.

    Attributes:
        queries: query heads.
        keys: KV heads; one of which the plan gives the device several replicas counts once.
        runs: which of the former read which of the latter.
        cache: keys and values of the latter.
        have_a_kernel: whether one finds keys and values of several sequences where they are in the cache.
    """

    queries: int
    keys: int
    runs: tuple[Run, ...]
    cache: LayerCache
    have_a_kernel: bool = field(init=False)

    @have_a_kernel.default
    def _ask(self) -> bool:
        if not self.cache.is_plain:
            return False
        one_1HSK = self.cache.in_a_row()[0][None, :1, :1].transpose(1, 2)
        return takes_flash(one_1HSK, one_1HSK, one_1HSK)

    def attend_at_once(self, most: int, cap: float | None) -> bool:
        """Tell whether the rows of a pass do, whatever sequences they are of.

        It is so where rows see all that is before them, and the kernel finds that in the cache.

        Args:
            most: tokens of a sequence: its rows and all before them.
            cap: of the scores.
        """
        return self.have_a_kernel and cap is None and most <= self.cache.length

    def apart(self, qkv_RHK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of rows that have all of them side by side."""
        q_RHK, k_RHK, v_RHK = torch.split_with_sizes(qkv_RHK, [self.queries, self.keys, self.keys], dim=1)
        return q_RHK, k_RHK, v_RHK

    def runs_of(self, some: slice) -> Iterator[Run]:
        """Yield which query heads read some of the KV heads; ``keys`` are where these are among the some."""
        if some == slice(0, self.keys):
            yield from self.runs
            return
        for run in self.runs:
            first, end = max(run.keys.start, some.start), min(run.keys.stop, some.stop)
            if first < end:
                before = run.queries.start + (first - run.keys.start) * run.group
                queries = slice(before, before + (end - first) * run.group)
                yield Run(queries, slice(first - some.start, end - some.start), run.group)


def found_by(
    runs: Iterable[Run], q_BHSK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, attending: Callable[..., Tensor]
) -> Tensor:
    """Return what the queries find that read some KV heads, ``[R, H × K]``."""
    parts = []
    for run in runs:
        kv = [some_of(x_BHTK, run.keys, dim=1) for x_BHTK in (k_BHTK, v_BHTK)]
        out_BHSK = attending(some_of(q_BHSK, run.queries, dim=1), *kv)
        parts.append(out_BHSK.transpose(1, 2).flatten(2).flatten(0, 1))
    return together(parts, dim=1)


def length_of(request: Request) -> int:
    """Return the tokens that each sequence of a request can have: its part of the cache."""
    return request.cache.tokens // request.batch


def heads_of(context: TPContext, layer: int, window: int, kind: str) -> dict[int, Heads]:
    """Return what each device holds of a layer's attention, with a cache in memory of its own.

    Args:
        context: the compiled plan.
        layer: whose.
        window: tokens that a query sees, itself included; 0 for all.
        kind: of the cache.

    Raises:
        ExecutionError: the decoder has no cache of the kind.
    """
    request, split = context.plan.request, context.plan.split(Axis.KV, layer)
    group = context.plan.split(Axis.Q, layer).size // split.size
    length = min(length_of(request), window) if window else length_of(request)
    found = {}
    for part in context.split(Axis.KV, layer):
        counts = _queries_per_key(part, split.replicas, group)
        shape = (request.batch, len(counts), length, split.width)
        store = Store(kind, shape, context.dtype, context.devices[part.device].device)
        cache = LayerCache(store, length, window)
        found[part.device] = Heads(sum(counts), len(counts), _runs(counts), cache)
    return found


def _queries_per_key(part: Slice, replicas: int, group: int) -> list[int]:
    """Return how many query heads of a device read each of its KV heads; the outer ones may have fewer replicas."""
    first, last = part.start // replicas, -(-part.end // replicas)
    held = [min(part.end, (head + 1) * replicas) - max(part.start, head * replicas) for head in range(first, last)]
    return [group * count for count in held]


def _runs(counts: list[int]) -> tuple[Run, ...]:
    found, query, key = [], 0, 0
    for count, equal in groupby(counts):
        heads = len(list(equal))
        found.append(Run(slice(query, query + heads * count), slice(key, key + heads), count))
        query, key = query + heads * count, key + heads
    return tuple(found)
