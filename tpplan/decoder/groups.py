"""Rows of a pass that attend at once: those of several sequences, by one call of a kernel that reads their cache.

Shapes: R rows, T places of a cache, H heads, K elements of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from tpplan.decoder.layers import together
from tpplan.decoder.prompts import Extent
from tpplan.exec.torch_shims import flash_attention_of_several

if TYPE_CHECKING:
    from tpplan.decoder.heads import Heads
    from tpplan.decoder.plain import Plain, Turn


@frozen
class Group:
    """Rows of several sequences on a device, each behind any number of tokens that its sequence has already.

    Whose rows these are and where they go is in the device's memory: no shape depends on it, so that a graph can do it.

    Attributes:
        sequences: of each row.
        positions: of each row.
        bounds: with which row each sequence begins, and the number of rows, in 32 bits. The last may have none.
        numbers: of each sequence, and one more that means nothing, in 32 bits.
        ends: tokens that each has with these rows, in 32 bits.
        extent: of the pass.
        kept: the row whose keys and values are written for each: its own, or of nobody's the first once more. None if
            all are somebody's.
    """

    sequences: Tensor
    positions: Tensor
    bounds: Tensor
    numbers: Tensor
    ends: Tensor
    extent: Extent
    kept: Tensor | None = None
    _starts: dict[int, Tensor] = field(default=Factory(dict), init=False)

    @classmethod
    def of(cls, positions: Tensor, sequences: Tensor, before: Tensor, extent: Extent, *, is_filled: bool) -> Self:
        """Group rows.

        Args:
            positions: of each, see :func:`tpplan.decoder.prompts.numbers_of`.
            sequences: of each.
            before: of each, but for a number that is the same for all.
            extent: of the pass.
            is_filled: whether the last rows may be nobody's.
        """
        kept = None
        if is_filled:
            kept = torch.arange(len(before), device=before.device)
            kept.mul_(sequences >= 0)
        counts = torch.arange(extent.count + 1, device=before.device)
        bounds = torch.searchsorted(before - before[0], counts, out_int32=True)
        numbers = sequences.index_select(0, bounds.clamp(max=len(before) - 1)).int().clamp_(min=0)
        ends = positions.index_select(0, bounds[1:] - 1).add_(1).int()
        return cls(sequences, positions, bounds, numbers, ends, extent, kept)

    def attention(self, steps: Plain, heads: Heads, qkv_RHK: Tensor, turn: Turn, *, scale: float) -> Tensor:
        """Keep the rows' keys and values, and return what their queries find, ``[R, H × K]``."""
        steps.keep(qkv_RHK, heads, turn, self.sequences, self.positions, kept=self.kept)
        q_RHK = qkv_RHK[:, : heads.queries]
        k_THK, v_THK, apart = heads.cache.in_a_row()
        found = [
            flash_attention_of_several(
                q_RHK[:, run.queries],
                k_THK[:, run.keys],
                v_THK[:, run.keys],
                (self.bounds, self._starts_of(apart), self.ends),
                (self.extent.longest, self.extent.most),
                scale=scale,
            )
            for run in heads.runs
        ]
        return together([out_RHK.flatten(1) for out_RHK in found], dim=1)

    def _starts_of(self, apart: int) -> Tensor:
        """Return with which place each sequence begins, where these are so many places apart."""
        if apart not in self._starts:
            self._starts[apart] = self.numbers * apart
        return self._starts[apart]
