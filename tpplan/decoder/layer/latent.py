"""Multi-head latent attention on one device (MLA, DeepSeek-V2, arXiv:2405.04434).

The cache has a latent and a rotary part of each token, which all heads share. A head's keys and values are products of
the latent and its part of ``kv_b_proj``. Few rows absorb these: queries are multiplied by the part of keys, so that
their scores are products with latents, and sums of latents by the part of values. So a token of the cache is read once
for all heads. Many rows of a text cost less with the keys and values themselves, which are made of few heads at a time.

Quantised, ``kv_b_proj`` is dequantised in each pass, as no plan counts room for it in 16 bits; of as many heads at a
time as the elements of other matrices, once where that is all heads.

Shapes: R rows, S rows of a sequence, T tokens, H heads, K elements of a query or key, N of which are not rotated, L of
a latent, C of a rotary part with the latent behind it, V of a value.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from tpplan.decoder.cache.heads import Heads
from tpplan.decoder.math import AT_ONCE, attend, attend_over_parts, rotate, takes_flash
from tpplan.decoder.weights.quantised import Matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tpplan.decoder.layer.passes import Pass
    from tpplan.decoder.layer.steps import NormAndRope, Plain
    from tpplan.decoder.math import Scoring
    from tpplan.decoder.prompts import PromptSlice

    #: Returns slices of the heads with their parts of the matrix, ``[H, N + V, L]``.
    Ups = Callable[[], Iterable[tuple[slice, Tensor]]]

#: Tokens whose keys and values are made at a time where a kernel takes parts of them, so that these are of many heads.
_PART: Final = 2**13


@frozen(eq=False)
class Latents:
    """What the heads of a device do with latents.

    Attributes:
        heads: the attention heads of a layer on the device.
        up: matrix ``[H × (N + V), L]`` that leads from a latent to each head's key and value.
        norm: weights of the norm of latents.
        eps: epsilon that this norm adds to the mean square.
        head_dim: K.
        value_dim: V.
        most: rows that absorb at a time, for the memory that their queries and sums of latents take.
    """

    heads: Heads
    up: Matrix
    norm: Tensor
    eps: float
    head_dim: int
    value_dim: int
    most: int

    @property
    def _latent(self) -> int:
        return self.heads.cache.value_dim

    @property
    def _rope(self) -> int:
        return self.heads.cache.head_dim - self._latent

    def attend(  # noqa: PLR0917 (what a layer has on a device)
        self,
        rows: Pass,
        steps: Plain,
        q_RHK: Tensor,
        kv_RC: Tensor,
        norm_rope: NormAndRope,
        scoring: Scoring,
        device: int,
    ) -> Tensor:
        """Write the rows' latents to the cache, and return the attention output ``[R, H × V]``.

        Args:
            rows: the pass.
            steps: the computation steps of the device.
            q_RHK: queries before RoPE, the rotary part last; overwritten.
            kv_RC: latents before their norm, then the rotary part of the key before RoPE.
            norm_rope: the rotation.
            scoring: how scores become weights.
            device: index of the device.
        """
        count, dtype = self.heads.queries, q_RHK.dtype
        held = list(steps.per_head(self.up, count, dtype)) if steps.heads_at_once(self.up, count) == count else None

        def ups() -> Iterable[tuple[slice, Tensor]]:
            return steps.per_head(self.up, count, dtype) if held is None else held

        y_RHV = q_RHK.new_empty(len(q_RHK), count, self.value_dim)
        for some, part, text in rows.pieces(self.most, partial(self._expands, q_RHK)):
            turning = norm_rope if part is rows else evolve(norm_rope, angles=norm_rope.angles[some])
            qkv = q_RHK[some], kv_RC[some]
            if text:
                self._expanded(text, steps, *qkv, turning, scoring, ups, y_RHV[some])
                continue
            qk_RHC = self._absorbed(steps, *qkv, ups)
            sums_RL = part.attention(steps, self.heads, qk_RHC, turning, scoring, device)
            del qk_RHC
            sums_HRL, y_HRV = torch.unflatten(sums_RL, 1, (count, -1)).transpose(0, 1), y_RHV[some].transpose(0, 1)
            for heads, up_HOL in ups():
                torch.bmm(sums_HRL[heads], up_HOL[:, -self.value_dim :].mT, out=y_HRV[heads])
        return y_RHV.flatten(1)

    def _absorbed(self, steps: Plain, q_RHK: Tensor, kv_RC: Tensor, ups: Ups) -> Tensor:
        """Return absorbed queries, then the key that all heads share, rotary parts first: ``[R, H + 1, C]``."""
        rope, count = self._rope, self.heads.queries
        qk_RHC = q_RHK.new_empty(len(q_RHK), count + 1, rope + self._latent)
        q_HRN, q_HRL = q_RHK[..., :-rope].transpose(0, 1), qk_RHC[..., rope:].transpose(0, 1)
        for heads, up_HOL in ups():
            torch.bmm(q_HRN[heads], up_HOL[:, : -self.value_dim], out=q_HRL[heads])
        qk_RHC[:, :count, :rope] = q_RHK[..., -rope:]
        self._write_key(steps, kv_RC, qk_RHC[:, count])
        return qk_RHC

    def _write_key(self, steps: Plain, kv_RC: Tensor, out_RC: Tensor) -> None:
        """Write the shared key before RoPE, rotary part first, and its latent normed."""
        rope, latent = self._rope, self._latent
        out_RC[:, :rope] = kv_RC[:, latent:]
        steps.norm(kv_RC[:, :latent], self.norm, out=out_RC[:, rope:], eps=self.eps)

    def _expands(self, q_RHK: Tensor, text: PromptSlice) -> bool:
        """Tell whether expanding is less work for a prompt slice, and keys and values of a head are not too large."""
        latent, pair = self._latent, self.head_dim - self._rope + self.value_dim
        is_less = text.size * (2 * latent - pair) > latent * pair
        return is_less and self._heads_at_once(self._parts(q_RHK, text)) > 0

    def _parts(self, q_RHK: Tensor, text: PromptSlice) -> list[slice]:
        """Return the tokens whose keys and values are made at a time: all, or where a kernel takes them few."""
        tokens, step = text.start + text.size, max(text.size, _PART)
        q_1HSK = q_RHK[None, :1].transpose(1, 2)
        if tokens <= step or self.value_dim > self.head_dim or not takes_flash(q_1HSK, q_1HSK, q_1HSK):
            return [slice(0, tokens)]
        return [slice(max(0, end - step), end) for end in range(tokens, 0, -step)][::-1]

    def _heads_at_once(self, parts: list[slice]) -> int:
        """Return the heads whose keys and values of a part are made at a time, with an output as large."""
        longest: int = max(part.stop - part.start for part in parts)
        return AT_ONCE // (3 * longest * max(self.head_dim, self.value_dim))

    def _expanded(  # noqa: PLR0917 (what a layer has on a device)
        self,
        text: PromptSlice,
        steps: Plain,
        q_RHK: Tensor,
        kv_RC: Tensor,
        norm_rope: NormAndRope,
        scoring: Scoring,
        ups: Ups,
        out_RHV: Tensor,
    ) -> None:
        """Write a prompt slice's latents to the cache, and its attention output, by keys and values of few heads."""
        rope = self._rope
        k_R1C = torch.empty_like(kv_RC)[:, None]
        self._write_key(steps, kv_RC, k_R1C[:, 0])
        for turned in (q_RHK[..., -rope:], k_R1C):
            rotate(turned, norm_rope.angles, are_neighbours=norm_rope.are_neighbours)
        tokens, cache = self._parts(q_RHK, text), self.heads.cache
        at_once = self._heads_at_once(tokens)
        for i in range(text.count):
            rows, sequence = slice(i * text.size, (i + 1) * text.size), text.sequence + i
            cache.append(slice(sequence, sequence + 1), text.start, k_R1C[rows].transpose(0, 1)[None])
            first = 0
            for up_HOL in (some_HOL for _, all_HOL in ups() for some_HOL in torch.split(all_HOL, at_once)):
                heads = slice(first, first := first + len(up_HOL))
                q_1HSK = q_RHK[rows, heads].transpose(0, 1)[None]
                if len(tokens) > 1:
                    parts = self._pairs_of(sequence, tokens, up_HOL)
                    found_1HSK = attend_over_parts(q_1HSK, parts, scoring=scoring)
                else:
                    pair = self._pair_of(cache.latents(sequence, tokens[0]), up_HOL)
                    found_1HSK = attend(q_1HSK, *pair, scoring=scoring, recurs=text.is_full)
                    del pair
                out_RHV[rows, heads] = found_1HSK[0, ..., : self.value_dim].transpose(0, 1)
                del found_1HSK

    def _pairs_of(self, sequence: int, parts: list[slice], up_HOL: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Yield keys and values of some heads for each part of a sequence's tokens, and whether it is the last."""
        for part in parts:
            yield *self._pair_of(self.heads.cache.latents(sequence, part), up_HOL), part is parts[-1]

    def _pair_of(self, known_TC: Tensor, up_HOL: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys ``[1, H, T, K]`` and values of some heads, the latter no narrower, as kernels need them."""
        rope, (heads, tokens) = self._rope, (len(up_HOL), len(known_TC))
        k_HTK = known_TC.new_empty(heads, tokens, self.head_dim)
        v_HTV = known_TC.new_empty(heads, tokens, max(self.head_dim, self.value_dim))
        latent_HTL = known_TC[:, rope:].expand(heads, -1, -1)
        torch.bmm(latent_HTL, up_HOL[:, : -self.value_dim].mT, out=k_HTK[..., :-rope])
        torch.bmm(latent_HTL, up_HOL[:, -self.value_dim :].mT, out=v_HTV[..., : self.value_dim])
        k_HTK[..., -rope:] = known_TC[:, :rope]
        return k_HTK[None], v_HTV[None]
