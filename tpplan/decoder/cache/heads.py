"""The attention heads of one layer on one device: which query heads read which KV heads, and the cache."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

import torch
from attrs import field, frozen

from tpplan.core.axes import Axis, queries_per_key
from tpplan.decoder.cache.layer import LayerCache
from tpplan.decoder.math import concat, slice_of, takes_flash
from tpplan.decoder.prompts import length_of
from tpplan.exec.toolchain.torch_shims import takes_cudnn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from tpplan.core.model import Attention
    from tpplan.decoder.math import Scoring
    from tpplan.decoder.prompts import PassShape
    from tpplan.exec.context import TPContext

#: Rows of a sample, to ask which kernels take such heads. Some take no single row.
_SAMPLE: Final = 128


@frozen
class HeadRun:
    """Successive KV heads, each shared by the same number of successive query heads (GQA, arXiv:2305.13245).

    Attributes:
        queries: the slice of query heads, among those of the device.
        keys: the slice of KV heads, among those of the device.
        group: query heads per KV head.
    """

    queries: slice
    keys: slice
    group: int


@frozen
class Heads:
    """The attention heads of a layer on one device.

    In multi-head latent attention (MLA), all query heads share one key, whose last elements are the value, too.

    Attributes:
        queries: number of query heads.
        keys: number of KV heads; several replicas of one on the same device count once.
        runs: which query heads read which KV heads.
        cache: cache of the KV heads.
        have_a_kernel: whether an attention kernel can read several sequences directly from the cache.
    """

    queries: int
    keys: int
    runs: tuple[HeadRun, ...]
    cache: LayerCache
    have_a_kernel: bool = field(init=False)

    @have_a_kernel.default
    def _find_kernel(self) -> bool:
        if not self.cache.is_plain or self.cache.value_dim:
            return False
        one_1HSK = self.cache.as_rows()[0][None, :1, :1].transpose(1, 2)
        return takes_flash(one_1HSK, one_1HSK, one_1HSK)

    def sample(self, rows: int) -> Tensor:
        """Return queries, keys and values of rows, ``[R, H, K]``, that only have a shape."""
        return torch.empty(rows, self.queries + 2 * self.keys, self.cache.head_dim, device="meta")

    def take_cudnn(self) -> bool:
        """Tell whether torch would choose cuDNN for causal attention between many rows."""
        _, of_cache, _ = self.cache.as_rows()
        for run in self.runs:
            q_1HSK, k_1HSK = (of_cache.new_empty(1, n, _SAMPLE, self.cache.head_dim) for n in (run.group, 1))
            if not takes_cudnn(q_1HSK, k_1HSK, k_1HSK, None, 1.0, is_causal=True):
                return False
        return True

    def attend_at_once(self, pass_shape: PassShape, cap: float | None) -> bool:
        """Tell whether all rows of a pass can attend in one kernel call, whatever sequences they belong to.

        They can if there is a kernel, the scores have no cap, and the cache holds all tokens of each sequence. If it
        holds those of a window only, there must be room for a copy of at least one head.

        Args:
            pass_shape: shape of the pass.
            cap: soft cap of the scores.
        """
        if not self.have_a_kernel or cap is not None:
            return False
        length = self.cache.length
        return pass_shape.most <= length or self.cache.heads_at_once(pass_shape.beside(length)) > 0

    def split_qkv(self, qkv_RHK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the heads of rows into queries, keys and values; the latter may be the last elements of keys."""
        if self.cache.value_dim:
            q_RHK, k_RHK = torch.split_with_sizes(qkv_RHK, [self.queries, self.keys], dim=1)
            return q_RHK, k_RHK, k_RHK[..., -self.cache.value_dim :]
        q_RHK, k_RHK, v_RHK = torch.split_with_sizes(qkv_RHK, [self.queries, self.keys, self.keys], dim=1)
        return q_RHK, k_RHK, v_RHK

    def runs_of(self, some: slice) -> Iterator[HeadRun]:
        """Yield the runs of a slice of the KV heads, with ``keys`` relative to the start of the slice."""
        if some == slice(0, self.keys):
            yield from self.runs
            return
        for run in self.runs:
            first, end = max(run.keys.start, some.start), min(run.keys.stop, some.stop)
            if first < end:
                before = run.queries.start + (first - run.keys.start) * run.group
                queries = slice(before, before + (end - first) * run.group)
                yield HeadRun(queries, slice(first - some.start, end - some.start), run.group)


def attend_by_runs(
    runs: Iterable[HeadRun],
    q_BHSK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    attending: Callable[..., Tensor],
    *,
    scoring: Scoring,
) -> Tensor:
    """Return the attention output ``[R, H × K]`` of the query heads of some runs; ``attending`` computes each run."""
    parts = []
    for run in runs:
        kv = [slice_of(x_BHTK, run.keys, dim=1) for x_BHTK in (k_BHTK, v_BHTK)]
        out_BHSK = attending(slice_of(q_BHSK, run.queries, dim=1), *kv, scoring=scoring.of(run.queries))
        parts.append(out_BHSK.transpose(1, 2).flatten(2).flatten(0, 1))
    return concat(parts, dim=1)


def heads_of(
    context: TPContext, layer: int, attention: Attention | None, latent_rank: int, kind: str
) -> dict[int, Heads]:
    """Return the attention heads of a layer by device, and allocate their caches.

    Args:
        context: the compiled plan.
        layer: number of the layer.
        attention: sizes of the layer's attention; None if it has none.
        latent_rank: elements of a latent, in layers with multi-head latent attention (MLA).
        kind: kind of cache.

    Raises:
        ExecutionError: the decoder has no cache of this kind.
    """
    if attention is None:
        return {}
    if attention.latent_dim:
        return _latent_heads_of(context, layer, attention, latent_rank, kind)
    window = attention.window
    request, split = context.plan.request, context.plan.split(Axis.KV_HEADS, layer)
    group = context.plan.split(Axis.Q_HEADS, layer).size // split.size
    length = min(length_of(request), window) if window else length_of(request)
    found = {}
    for part in context.split(Axis.KV_HEADS, layer):
        counts = queries_per_key(part, split.replicas, group)
        shape = (request.batch, len(counts), length, split.width)
        cache = LayerCache(kind, shape, context.dtype, context.devices[part.device].device, window)
        found[part.device] = Heads(sum(counts), len(counts), _runs(counts), cache)
    return found


def _latent_heads_of(
    context: TPContext, layer: int, attention: Attention, value_dim: int, kind: str
) -> dict[int, Heads]:
    """Return the heads of a layer with latent attention (MLA).

    Heads are cut, and every device that has any caches the rotary part and the latent of each token.
    """
    request, found = context.plan.request, {}
    shape = (request.batch, 1, length_of(request), attention.latent_dim)
    for part in context.split(Axis.KV_HEADS, layer):
        cache = LayerCache(kind, shape, context.dtype, context.devices[part.device].device, value_dim=value_dim)
        queries = part.end - part.start
        run = HeadRun(slice(0, queries), slice(0, 1), queries)
        found[part.device] = Heads(queries, 1, (run,), cache)
    return found


def _runs(counts: list[int]) -> tuple[HeadRun, ...]:
    found, query, key = [], 0, 0
    for count, equal in groupby(counts):
        heads = len(list(equal))
        found.append(HeadRun(slice(query, query + heads * count), slice(key, key + heads), count))
        query, key = query + heads * count, key + heads
    return tuple(found)
