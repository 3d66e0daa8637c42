"""Attention of the rows of several sequences by one call of a kernel that reads the cache, or a copy of its windows.

Shapes: R rows, T places of a cache, H heads, K elements of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from tpplan.decoder.cache.rings import Ring
from tpplan.decoder.generation.prompts import Extent
from tpplan.decoder.layer.math import together
from tpplan.exec.toolchain.torch_shims import flash_attention_of_several

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.decoder.cache.heads import Heads, Run
    from tpplan.decoder.layer.math import Scoring
    from tpplan.decoder.layer.steps import Plain, Turn


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
    _rings: dict[int, Ring] = field(default=Factory(dict), init=False)

    @classmethod
    def of(cls, positions: Tensor, sequences: Tensor, before: Tensor, extent: Extent, *, is_filled: bool) -> Self:
        """Group rows by sequence.

        Args:
            positions: position of each row, see :func:`tpplan.decoder.generation.prompts.numbers_of`.
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
        cache, length, most = heads.cache, heads.cache.length, self.extent.most
        if most <= length:
            steps.keep(qkv_RHK, heads, turn, self.sequences, self.positions, kept=self.kept)
            k_THK, v_THK, apart = cache.in_a_row()
            where = self._starts_of(apart), self.ends
            return together(self._attend(heads.runs, qkv_RHK, (k_THK, v_THK), where, most, scoring=scoring), dim=1)
        steps.turn(qkv_RHK, heads, turn)
        ring = self._ring_of(length)
        where, most = (ring.starts, ring.counts), min(most, length + self.extent.longest)
        found = []
        for some in cache.slices(self.extent.beside(length)):
            kv = ring.read(cache, some, heads.apart(qkv_RHK)[1:])
            found += self._attend(heads.runs_of(some), qkv_RHK, kv, where, most, scoring=scoring, window=length)
            del kv
        ring.write(cache, qkv_RHK[:, heads.queries :])
        return together(found, dim=1)

    def _attend(
        self,
        runs: Iterable[Run],
        qkv_RHK: Tensor,
        kv: tuple[Tensor, Tensor],
        where: tuple[Tensor, Tensor],
        most: int,
        *,
        scoring: Scoring,
        window: int = 0,
    ) -> list[Tensor]:
        """Return the attention output ``[R, H × K]`` of each run of heads.

        Args:
            runs: which query heads read which KV heads.
            qkv_RHK: queries, then keys, then values of the rows.
            kv: keys and values that the rows see, ``[T, H, K]``.
            where: the first of them of each sequence, then one meaningless value; and their number, in int32.
            most: maximum keys of a sequence.
            scoring: how scores become weights.
            window: tokens that a query sees, itself included; 0 for all.
        """
        found = []
        for run in runs:
            k_THK, v_THK = (x_THK[:, run.keys] for x_THK in kv)
            out_RHK = flash_attention_of_several(
                qkv_RHK[:, run.queries],
                k_THK,
                v_THK,
                (self.bounds, *where),
                (self.extent.longest, most),
                scale=scoring.scale,
                window=window,
                sinks=scoring.of(run.queries).sinks,
            )
            found.append(out_RHK.flatten(1))
        return found

    def _starts_of(self, apart: int) -> Tensor:
        """Return the first row of each sequence in the cache, where sequences begin ``apart`` rows apart."""
        if apart not in self._starts:
            self._starts[apart] = self.numbers * apart
        return self._starts[apart]

    def _ring_of(self, length: int) -> Ring:
        """Return where the rows are beside the tokens of caches of a length."""
        if length not in self._rings:
            self._rings[length] = Ring.of(self, length)
        return self._rings[length]
