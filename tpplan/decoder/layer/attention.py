"""Prefill attention of several sequences by one call of FlashAttention (arXiv:2307.08691) with variable lengths.

It reads the KV cache in place or, for a sliding window, a copy of the windows with the new rows behind them. If all
rows are sure to be of one sequence, cuDNN attends to them, which is faster.

Shapes: R rows, T places of a cache, H heads, K elements of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from tpplan.decoder.math import concat, slice_of
from tpplan.decoder.prompts import PassShape
from tpplan.exec.toolchain.torch_shims import (
    cudnn_attention_to_part,
    flash_attention_of_several,
    flash_attention_to_cached,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpplan.decoder.cache.heads import HeadRun, Heads
    from tpplan.decoder.cache.layer import LayerCache
    from tpplan.decoder.layer.steps import NormAndRope, Plain
    from tpplan.decoder.math import Scoring


@frozen
class Ring:
    """Indices that unroll ring buffers of a sliding window, with the rows of a pass behind; shared by all such layers.

    The unrolled keys and values have, for each sequence, a row for each place of its ring buffer, oldest first, and
    then its rows of the pass. If a sequence has fewer tokens than places, its first rows are meaningless; so are all
    rows behind the last sequence.

    Attributes:
        sources: for each row, the sequence and the place in the cache of its token, ``[T]``; meaningless for rows of
            the pass.
        goals: index among the unrolled rows of each row of the pass, ``[R]``.
        starts: first row of each sequence that has a token, then one meaningless value, in int32.
        counts: rows of each sequence that have tokens, in int32.
        rows_to_write: for each row of the pass, the row whose keys and values are written: the last of its sequence
            with the same place, so that the order of writing does not matter. For padding, it is that of row 0.
        targets: sequence and place that each row of the pass writes to.
    """

    sources: tuple[Tensor, Tensor]
    goals: Tensor
    starts: Tensor
    counts: Tensor
    rows_to_write: Tensor
    targets: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, group: Group, length: int) -> Self:
        """Return where the rows of a group are beside tokens in caches of a length; no shape depends on a value."""
        pass_shape, bounds = group.pass_shape, group.bounds.long()
        rows = torch.arange(pass_shape.rows, device=bounds.device)
        owners = torch.searchsorted(bounds[1:], rows, right=True).clamp_(max=pass_shape.count - 1)
        new = bounds.diff()
        before = group.ends - new
        firsts = bounds + torch.arange(0, (pass_shape.count + 1) * length, length, device=bounds.device)
        cached = before.clamp(max=length)
        starts = firsts + length
        starts[:-1] -= cached

        every = torch.arange(pass_shape.beside(length), device=bounds.device)
        whose = torch.searchsorted(firsts[:-1], every, right=True).sub_(1)
        # The oldest token of a full ring, at position before - length, is at place before modulo length.
        places = every.sub_((firsts[:-1] - before).index_select(0, whose)).remainder_(length)
        sources = group.numbers.index_select(0, whose).long(), places

        rows_to_write = rows if group.rows_to_write is None else group.rows_to_write
        last = bounds[1:].sub(1).index_select(0, owners).index_select(0, rows_to_write)
        rows_to_write = rows_to_write + (last - rows_to_write).div_(length, rounding_mode="floor").mul_(length)
        sequences, positions = (x.index_select(0, rows_to_write) for x in (group.sequences, group.positions))
        return cls(
            sources,
            rows + (owners + 1) * length,
            starts.int(),
            (cached + new).int(),
            rows_to_write,
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
        cache.put(*self.targets, *kv_RHK.index_select(0, self.rows_to_write).chunk(2, dim=1))


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
        earlier: if all rows are sure to be of one sequence behind others: 0 and the number of rows with padding, and
            how many tokens the sequence has before them, ``[1]``, in int32; else None.
        pass_shape: shape of the pass.
        rows_to_write: for each row, the row whose keys and values are written: the row itself, or row 0 again for
            padding. None if no row is padding.
    """

    sequences: Tensor
    positions: Tensor
    bounds: Tensor
    numbers: Tensor
    ends: Tensor
    earlier: tuple[Tensor, Tensor] | None
    pass_shape: PassShape
    rows_to_write: Tensor | None = None
    _starts: dict[int, Tensor] = field(default=Factory(dict), init=False)
    _rings: dict[int, Ring] = field(default=Factory(dict), init=False)

    @classmethod
    def of(
        cls, positions: Tensor, sequences: Tensor, before: Tensor, pass_shape: PassShape, *, is_filled: bool
    ) -> Self:
        """Group rows by sequence.

        Args:
            positions: position of each row, see :func:`tpplan.decoder.forward.numbers_of`.
            sequences: sequence of each row.
            before: for each row, the number of sequences before its own, up to a constant common to all rows.
            pass_shape: shape of the pass.
            is_filled: whether the last rows may be padding.
        """
        rows_to_write = None
        if is_filled:
            rows_to_write = torch.arange(len(before), device=before.device)
            rows_to_write.mul_(sequences >= 0)
        counts = torch.arange(pass_shape.count + 1, device=before.device)
        bounds = torch.searchsorted(before - before[0], counts, out_int32=True)
        numbers = sequences.index_select(0, bounds.clamp(max=len(before) - 1)).int().clamp_(min=0)
        ends = positions.index_select(0, bounds[1:] - 1).add_(1).int()
        earlier = None
        if pass_shape.goes_on:
            rows = pass_shape.rows
            every = torch.arange(0, 2 * rows, rows, dtype=torch.int32, device=before.device)
            earlier = every, positions[:1].int()
        return cls(sequences, positions, bounds, numbers, ends, earlier, pass_shape, rows_to_write)

    def attention(
        self, steps: Plain, heads: Heads, qkv_RHK: Tensor, norm_rope: NormAndRope, scoring: Scoring
    ) -> Tensor:
        """Write the rows' keys and values to the cache, and return the attention output ``[R, H × K]``."""
        cache, length, most = heads.cache, heads.cache.length, self.pass_shape.most
        if most <= length:
            steps.append_kv(qkv_RHK, heads, norm_rope, self.sequences, self.positions, rows_to_write=self.rows_to_write)
            k_THK, v_THK, stride = cache.as_rows()
            if self.pass_shape.goes_on is not None:
                return self._attend_alone(steps, heads, qkv_RHK, (k_THK, v_THK), stride, scoring.scale)
            where = self._starts_of(stride), self.ends
            return concat(self._attend(heads.runs, qkv_RHK, (k_THK, v_THK), where, most, scoring=scoring), dim=1)
        steps.norm_and_rope(qkv_RHK, heads, norm_rope)
        ring = self._ring_of(length)
        where, most = (ring.starts, ring.counts), min(most, length + self.pass_shape.longest)
        found = []
        for some in cache.slices(self.pass_shape.beside(length)):
            kv = ring.read(cache, some, heads.split_qkv(qkv_RHK)[1:])
            found += self._attend(heads.runs_of(some), qkv_RHK, kv, where, most, scoring=scoring, window=length)
            del kv
        ring.write(cache, qkv_RHK[:, heads.queries :])
        return concat(found, dim=1)

    def _attend(
        self,
        runs: Iterable[HeadRun],
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
                (self.pass_shape.longest, most),
                scale=scoring.scale,
                window=window,
                sinks=scoring.of(run.queries).sinks,
            )
            found.append(out_RHK.flatten(1))
        return found

    def _attend_alone(  # noqa: PLR0917 (what a layer has on a device)
        self,
        steps: Plain,
        heads: Heads,
        qkv_RHK: Tensor,
        kv: tuple[Tensor, Tensor],
        stride: int,
        scale: float,
    ) -> Tensor:
        """Return the attention output ``[R, H × K]`` of one sequence.

        cuDNN attends to the rows. Padding comes last, and must be finite: a weight of 0 times NaN is NaN. Of earlier
        tokens only devices know the number, and cuDNN makes a plan for each: the flash kernel attends to these.

        Args:
            steps: the computation steps of the device.
            heads: the attention heads of the layer on the device.
            qkv_RHK: queries, keys and values of the rows.
            kv: keys and values of the cache, ``[T, H, K]``.
            stride: how many rows apart sequences begin in them.
            scale: scale of the scores.
        """
        merge, found = steps.merge_within_room(qkv_RHK, heads), []
        own = [x_RHK.unsqueeze(0).transpose(1, 2) for x_RHK in heads.split_qkv(qkv_RHK)]
        for run in heads.runs:
            which = run.queries, run.keys, run.keys
            q_1HRK, k_1HRK, v_1HRK = (slice_of(x, some, dim=1) for x, some in zip(own, which, strict=True))
            out_1HRK, sums_1HR = cudnn_attention_to_part(q_1HRK, k_1HRK, v_1HRK, scale, is_causal=True)
            if self.earlier:
                assert merge  # noqa: S101 - see Stack.attends_alone
                every, count = self.earlier
                q_RHK, (k_THK, v_THK) = qkv_RHK[:, run.queries], (x_THK[:, run.keys] for x_THK in kv)
                where, most = (every, self._starts_of(stride), count), (self.pass_shape.rows, self.pass_shape.most)
                merge(out_1HRK, sums_1HR, *flash_attention_to_cached(q_RHK, k_THK, v_THK, where, most, scale=scale))
            found.append(out_1HRK.transpose(1, 2).flatten(2).squeeze(0))
        return concat(found, dim=1)

    def _starts_of(self, stride: int) -> Tensor:
        """Return the first row of each sequence in the cache, where sequences begin ``stride`` rows apart."""
        if stride not in self._starts:
            self._starts[stride] = self.numbers * stride
        return self._starts[stride]

    def _ring_of(self, length: int) -> Ring:
        """Return where the rows are beside the tokens of caches of a length."""
        if length not in self._rings:
            self._rings[length] = Ring.of(self, length)
        return self._rings[length]
