"""Attention of the rows of several sequences by one call of a kernel that reads the cache.

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
    from tpplan.decoder.layers import Scoring
    from tpplan.decoder.plain import Plain, Turn


@frozen
class Group:
    """The rows of several sequences on a device, each sequence with any number of earlier tokens in the cache.

    Sequences and positions are in device memory and no shape depends on them, so that a graph can be captured.

    Attributes:
        sequences: sequence of each row.
        positions: position of each row.
        bounds: first row of each sequence, then the number of rows, in int32. The last sequences may have no rows.
        numbers: number of each sequence, then one meaningless value, in int32.
        ends: tokens of each sequence including these rows, in int32.
        extent: extent of the pass.
        kept: for each row, the row whose keys and values are written: the row itself, or row 0 again for padding. None
            if no row is padding.
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
        """Group rows by sequence.

        Args:
            positions: position of each row, see :func:`tpplan.decoder.prompts.numbers_of`.
            sequences: sequence of each row.
            before: for each row, the number of sequences before its own, up to a constant common to all rows.
            extent: extent of the pass.
            is_filled: whether the last rows may be padding.
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

    def attention(self, steps: Plain, heads: Heads, qkv_RHK: Tensor, turn: Turn, scoring: Scoring) -> Tensor:
        """Write the rows' keys and values to the cache, and return the attention output ``[R, H × K]``."""
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
                scale=scoring.scale,
                sinks=scoring.of(run.queries).sinks,
            )
            for run in heads.runs
        ]
        return together([out_RHK.flatten(1) for out_RHK in found], dim=1)

    def _starts_of(self, apart: int) -> Tensor:
        """Return the first row of each sequence in the cache, where sequences begin ``apart`` rows apart."""
        if apart not in self._starts:
            self._starts[apart] = self.numbers * apart
        return self._starts[apart]
