"""Keys and values of several sequences side by side, where a layer's cache is a ring that a pass overwrites.

Shapes: R rows of a pass, T rows side by side, B batch, H heads, L places of a cache, K elements of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.decoder.cache.attention import Group
    from tpplan.decoder.cache.layer import LayerCache


@frozen
class Ring:
    """The rows of a pass, each sequence's behind the tokens of its ring; equal for all caches of a length.

    Each sequence has as many rows as the cache has places, for the tokens of its ring, oldest first, and then its rows
    of the pass. If it has fewer tokens, the first of its rows are meaningless; so are all behind the last sequence.

    Attributes:
        sources: for each row, the sequence and the place in the cache of its token, ``[T]``; meaningless for rows of
            the pass.
        goals: which of all rows each row of the pass is, ``[R]``.
        starts: first row of each sequence that has a token, then one meaningless value, in int32.
        counts: rows of each sequence that have tokens, in int32.
        kept: for each row of the pass, the row whose keys and values are written: the last of its sequence that has the
            same place, so that the order of writing does not matter. For padding, it is that of row 0.
        targets: sequence and place that each row of the pass writes to.
    """

    sources: tuple[Tensor, Tensor]
    goals: Tensor
    starts: Tensor
    counts: Tensor
    kept: Tensor
    targets: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, group: Group, length: int) -> Self:
        """Return where the rows of a group are beside tokens in caches of a length; no shape depends on a value."""
        extent, bounds = group.extent, group.bounds.long()
        rows = torch.arange(extent.rows, device=bounds.device)
        owners = torch.searchsorted(bounds[1:], rows, right=True).clamp_(max=extent.count - 1)
        new = bounds.diff()
        before = group.ends - new
        firsts = bounds + torch.arange(0, (extent.count + 1) * length, length, device=bounds.device)
        cached = before.clamp(max=length)
        starts = firsts + length
        starts[:-1] -= cached

        every = torch.arange(extent.beside(length), device=bounds.device)
        whose = torch.searchsorted(firsts[:-1], every, right=True).sub_(1)
        # The oldest token of a full ring, at position before - length, is at place before modulo length.
        places = every.sub_((firsts[:-1] - before).index_select(0, whose)).remainder_(length)
        sources = group.numbers.index_select(0, whose).long(), places

        kept = rows if group.kept is None else group.kept
        last = bounds[1:].sub(1).index_select(0, owners).index_select(0, kept)
        kept = kept + (last - kept).div_(length, rounding_mode="floor").mul_(length)
        sequences, positions = (x.index_select(0, kept) for x in (group.sequences, group.positions))
        return cls(
            sources,
            rows + (owners + 1) * length,
            starts.int(),
            (cached + new).int(),
            kept,
            (sequences, positions.remainder_(length)),
        )

    def read(self, cache: LayerCache, heads: slice, kv_RHK: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return all rows of keys and of values ``[T, H, K]`` of some KV heads.

        Args:
            cache: cache of a layer, which stores elements as they are.
            heads: slice of the KV heads.
            kv_RHK: keys and values of the pass, of all KV heads.
        """
        sequences, places = self.sources
        k_THK, v_THK = (
            half_BHLK[sequences, heads, places].index_copy_(0, self.goals, new_RHK[:, heads])
            for half_BHLK, new_RHK in zip(cache.halves, kv_RHK, strict=True)
        )
        return k_THK, v_THK

    def write(self, cache: LayerCache, kv_RHK: Tensor) -> None:
        """Write the keys and values of the pass, side by side, to a cache, which then has the last of each sequence."""
        cache.put(*self.targets, *kv_RHK.index_select(0, self.kept).chunk(2, dim=1))
