"""Multi-head latent attention on one device (MLA, DeepSeek-V2, arXiv:2405.04434).

The cache has a latent and a rotary part of each token, which all heads share. A head's keys and values are products of
the latent and its part of ``kv_b_proj``, which are absorbed: queries are multiplied by the former, so that their scores
are products with the latents themselves, and sums of latents by the latter. So a token of the cache is read once for all
heads.

Shapes: R rows, H heads, K elements of a query or key, N of which are not rotated, L of a latent, C of a latent behind
the rotary part, V of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from tpplan.decoder.cache.heads import Heads
    from tpplan.decoder.layer.passes import Pass
    from tpplan.decoder.layer.steps import NormAndRope, Plain
    from tpplan.decoder.math import Scoring
    from tpplan.decoder.weights.quantised import Matrix


@frozen(eq=False)
class Latents:
    """What the heads of a device do with latents.

    Attributes:
        heads: the attention heads of a layer on the device.
        up: matrix ``[H × (N + V), L]`` that leads from a latent to each head's key and value.
        norm: weights of the norm of latents.
        eps: epsilon that this norm adds to the mean square.
        values: V.
        most: rows that attend at a time, for the memory that absorbed queries and sums of latents take.
    """

    heads: Heads
    up: Matrix
    norm: Tensor
    eps: float
    values: int
    most: int

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
            q_RHK: queries before RoPE, the rotary part last.
            kv_RC: latents before their norm, then the rotary part of the key before RoPE.
            norm_rope: the rotation.
            scoring: how scores become weights.
            device: index of the device.
        """
        y_RHV = q_RHK.new_empty(*q_RHK.shape[:2], self.values)
        at_once = steps.heads_at_once(self.up, self.heads.queries) >= self.heads.queries
        held = list(steps.per_head(self.up, self.heads.queries, q_RHK.dtype)) if at_once else None
        for some, part in rows.pieces(self.most):
            qk_RHC = self._absorbed(self._ups(steps, q_RHK, held), steps, q_RHK[some], kv_RC[some])
            turning = norm_rope if part is rows else evolve(norm_rope, angles=norm_rope.angles[some])
            sums_RL = part.attention(steps, self.heads, qk_RHC, turning, scoring, device)
            del qk_RHC
            sums_HRL = torch.unflatten(sums_RL, 1, (self.heads.queries, -1)).transpose(0, 1)
            y_HRV = y_RHV[some].transpose(0, 1)
            for heads, up_HOL in self._ups(steps, q_RHK, held):
                torch.bmm(sums_HRL[heads], up_HOL[:, -self.values :].mT, out=y_HRV[heads])
        return y_RHV.flatten(1)

    def _ups(
        self, steps: Plain, like: Tensor, held: list[tuple[slice, Tensor]] | None
    ) -> Iterable[tuple[slice, Tensor]]:
        """Return slices of the heads with their parts of the matrix, ``[H, N + V, L]``; see :meth:`Plain.per_head`."""
        return steps.per_head(self.up, self.heads.queries, like.dtype) if held is None else held

    def _absorbed(
        self, ups: Iterable[tuple[slice, Tensor]], steps: Plain, q_RHK: Tensor, kv_RC: Tensor
    ) -> Tensor:
        """Return absorbed queries, then the key that all heads share, rotary part first: ``[R, H + 1, C]``."""
        latent, count = self.heads.cache.value_dim, self.heads.queries
        rope = self.heads.cache.head_dim - latent
        qk_RHC = q_RHK.new_empty(len(q_RHK), count + 1, rope + latent)
        q_HRN, q_HRL = q_RHK[..., :-rope].transpose(0, 1), qk_RHC[..., rope:].transpose(0, 1)
        for heads, up_HOL in ups:
            torch.bmm(q_HRN[heads], up_HOL[:, : -self.values], out=q_HRL[heads])
        qk_RHC[:, :count, :rope] = q_RHK[..., -rope:]
        qk_RHC[:, count, :rope] = kv_RC[:, latent:]
        steps.norm(kv_RC[:, :latent], self.norm, out=qk_RHC[:, count, rope:], eps=self.eps)
        return qk_RHC
