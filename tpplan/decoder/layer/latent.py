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
from math import sqrt
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from tpplan.core.model import Attention
from tpplan.decoder.cache.heads import Heads
from tpplan.decoder.layer.steps import NormAndRope, Plain
from tpplan.decoder.math import AT_ONCE, Scoring, attend, attend_over_parts, rotate, takes_flash
from tpplan.decoder.model.settings import Settings
from tpplan.decoder.weights.device import DeviceWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tpplan.decoder.layer.passes import Pass
    from tpplan.decoder.prompts import PromptSlice

    #: Returns slices of the heads with their parts of the matrix, ``[H, N + V, L]``.
    Ups = Callable[[], Iterable[tuple[slice, Tensor]]]

#: Tokens whose keys and values are made at a time where a kernel takes parts of them, so that these are of many heads.
_PART: Final = 2**13
#: Bytes of a vector.
_VECTOR: Final = 16


@frozen(eq=False)
class Latents:
    """The latent attention of a layer on a device.

    Attributes:
        heads: the attention heads.
        steps: the computation steps of the device.
        weights: weights of the device.
        layer: number of the layer.
        attention: sizes of the heads.
        settings: settings of the model.
        max_rows: maximum rows of a pass.
    """

    heads: Heads
    steps: Plain
    weights: DeviceWeights
    layer: int
    attention: Attention
    settings: Settings
    max_rows: int

    @property
    def _latent(self) -> int:
        return self.heads.cache.value_dim

    @property
    def _rope(self) -> int:
        return self.heads.cache.head_dim - self._latent

    @property
    def _value_dim(self) -> int:
        return self.attention.v_head_dim

    @property
    def _width(self) -> int:
        """The elements of a key, or of a value if these are more."""
        return max(self.attention.head_dim, self._value_dim)

    def _name(self, module: str) -> str:
        return f"model.layers.{self.layer}.self_attn.{module}"

    def outputs(self, x_RD: Tensor, rows: Pass, device: int) -> Tensor:
        """Write the rows' latents to the cache, and return the attention output ``[R, H × V]``.

        Args:
            x_RD: rows of the residual stream.
            rows: the pass.
            device: index of the device.
        """
        settings, angles = self.settings, rows.angles[device]
        q_RHK, kv_RC = self._project(x_RD)
        if angles.growth is not None:
            q_RHK.mul_(angles.growth)
        by, are_neighbours = angles.by_kind[settings.ropes.kinds[self.layer]], settings.ropes.are_neighbours
        scoring = Scoring(settings.attention_scale or 1 / sqrt(self.attention.head_dim))
        up, count, dtype = self.weights.matrix(self._name("kv_b_proj")), self.heads.queries, x_RD.dtype
        at_once = self.steps.heads_at_once(up, count) == count
        held = list(self.steps.per_head(up, count, dtype)) if at_once else None

        def ups() -> Iterable[tuple[slice, Tensor]]:
            return self.steps.per_head(up, count, dtype) if held is None else held

        # With queries and outputs, absorbed queries and sums of latents of so many rows take less than queries, keys
        # and values, which a plan has scratch for.
        most = max(1, self.max_rows * self._width // (2 * (self.heads.cache.head_dim + self._latent)))
        y_RHV = q_RHK.new_empty(len(q_RHK), count, self._value_dim)
        for some, part, text in rows.pieces(most, partial(self._expands, q_RHK)):
            norm_rope = NormAndRope(by if part is rows else by[some], are_neighbours=are_neighbours)
            if text:
                self._expanded(text, q_RHK[some], kv_RC[some], norm_rope, scoring, ups, y_RHV[some])
                continue
            qk_RHC = self._absorbed(q_RHK[some], kv_RC[some], ups)
            sums_RL = part.attention(self.steps, self.heads, qk_RHC, norm_rope, scoring, device)
            del qk_RHC
            sums_HRL, y_HRV = torch.unflatten(sums_RL, 1, (count, -1)).transpose(0, 1), y_RHV[some].transpose(0, 1)
            for heads, up_HOL in ups():
                _multiply(sums_HRL[heads], up_HOL[:, -self._value_dim :].mT, y_HRV[heads])
        return y_RHV.flatten(1)

    def _project(self, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries ``[R, H, K]``, the rotary part last, and latents with the rotary part behind, before norms."""
        weights, width = self.weights, self.heads.cache.head_dim
        before = weights[f"model.layers.{self.layer}.{self.settings.family.norms.before_attention}.weight"]
        kv, queries = self._name("kv_a_proj_with_mqa"), self._name("q_b_proj")
        if weights.find(queries) is None:
            y_RO = self.steps.normed(x_RD, before, weights, self._name("kv_a_q_proj"), (kv, self._name("q_proj")))
            kv_RC, q_RO = y_RO[:, :width], y_RO[:, width:]
        else:
            y_RO = self.steps.normed(x_RD, before, weights, self._name("qkv_a_proj"), (self._name("q_a_proj"), kv))
            norm = weights[self._name("q_a_layernorm.weight")]
            low_RO = self.steps.norm(y_RO[:, :-width], norm, eps=self.settings.family.latent_eps)
            kv_RC, q_RO = y_RO[:, -width:], self.steps.linear(low_RO, weights, queries)
        return torch.unflatten(q_RO, -1, (self.heads.queries, -1)), kv_RC

    def _absorbed(self, q_RHK: Tensor, kv_RC: Tensor, ups: Ups) -> Tensor:
        """Return absorbed queries, then the key that all heads share, rotary parts first: ``[R, H + 1, C]``."""
        rope, count = self._rope, self.heads.queries
        qk_RHC = q_RHK.new_empty(len(q_RHK), count + 1, rope + self._latent)
        q_HRN, q_HRL = q_RHK[..., :-rope].transpose(0, 1), qk_RHC[..., rope:].transpose(0, 1)
        for heads, up_HOL in ups():
            _multiply(q_HRN[heads], up_HOL[:, : -self._value_dim], q_HRL[heads])
        qk_RHC[:, :count, :rope] = q_RHK[..., -rope:]
        self._write_key(kv_RC, qk_RHC[:, count])
        return qk_RHC

    def _write_key(self, kv_RC: Tensor, out_RC: Tensor) -> None:
        """Write the shared key before RoPE, rotary part first, and its latent normed."""
        rope, latent = self._rope, self._latent
        out_RC[:, :rope] = kv_RC[:, latent:]
        norm, eps = self.weights[self._name("kv_a_layernorm.weight")], self.settings.family.latent_eps
        self.steps.norm(kv_RC[:, :latent], norm, out=out_RC[:, rope:], eps=eps)

    def _expands(self, q_RHK: Tensor, text: PromptSlice) -> bool:
        """Tell whether expanding is less work for a prompt slice, and keys and values of a head are not too large."""
        latent, pair = self._latent, self.attention.head_dim - self._rope + self._value_dim
        is_less = text.size * (2 * latent - pair) > latent * pair
        return is_less and self._heads_at_once(self._parts(q_RHK, text)) > 0

    def _parts(self, q_RHK: Tensor, text: PromptSlice) -> list[slice]:
        """Return the tokens whose keys and values are made at a time: all, or where a kernel takes them few."""
        tokens, step = text.start + text.size, max(text.size, _PART)
        q_1HSK = q_RHK[None, :1].transpose(1, 2)
        if tokens <= step or self._value_dim > self.attention.head_dim or not takes_flash(q_1HSK, q_1HSK, q_1HSK):
            return [slice(0, tokens)]
        return [slice(max(0, end - step), end) for end in range(tokens, 0, -step)][::-1]

    def _heads_at_once(self, parts: list[slice]) -> int:
        """Return the heads whose keys and values of a part are made at a time, with an output as large."""
        longest: int = max(part.stop - part.start for part in parts)
        return AT_ONCE // (3 * longest * self._width)

    def _expanded(  # noqa: PLR0917 (what a layer has on a device)
        self,
        text: PromptSlice,
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
        self._write_key(kv_RC, k_R1C[:, 0])
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
                    found_1HSK = attend_over_parts(q_1HSK, parts, scale=scoring.scale, merge=self.steps.merge)
                else:
                    pair = self._pair_of(cache.latents(sequence, tokens[0]), up_HOL)
                    found_1HSK = attend(q_1HSK, *pair, scoring=scoring, recurs=text.is_full, merge=self.steps.merge)
                    del pair
                out_RHV[rows, heads] = found_1HSK[0, ..., : self._value_dim].transpose(0, 1)
                del found_1HSK

    def _pairs_of(self, sequence: int, parts: list[slice], up_HOL: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Yield keys and values of some heads for each part of a sequence's tokens, and whether it is the last."""
        for part in parts:
            yield *self._pair_of(self.heads.cache.latents(sequence, part), up_HOL), part is parts[-1]

    def _pair_of(self, known_TC: Tensor, up_HOL: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys ``[1, H, T, K]`` and values of some heads, the latter no narrower, as kernels need them."""
        rope, (heads, tokens) = self._rope, (len(up_HOL), len(known_TC))
        k_HTK = known_TC.new_empty(heads, tokens, self.attention.head_dim)
        v_HTV = known_TC.new_empty(heads, tokens, self._width)
        latent_HTL = known_TC[:, rope:].expand(heads, -1, -1)
        _multiply(latent_HTL, up_HOL[:, : -self._value_dim].mT, k_HTK[..., :-rope])
        _multiply(latent_HTL, up_HOL[:, -self._value_dim :].mT, v_HTV[..., : self._value_dim])
        k_HTK[..., -rope:] = known_TC[:, :rope]
        return k_HTK[None], v_HTV[None]


def _multiply(x_HRK: Tensor, y_HKN: Tensor, out_HRN: Tensor) -> None:
    """Write the products of heads' matrices.

    On GPUs, by copies of what begins between vectors of 16 bytes, as in models of a few elements a head: cuBLAS 13.0
    has ended there in a misaligned address.
    """
    if not out_HRN.is_cuda or not any(x.data_ptr() % _VECTOR for x in (x_HRK, y_HKN, out_HRN)):
        torch.bmm(x_HRK, y_HKN, out=out_HRN)
        return
    copies = (x.clone(memory_format=torch.contiguous_format) for x in (x_HRK, y_HKN))
    out_HRN.copy_(torch.bmm(*copies))
