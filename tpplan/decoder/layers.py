"""What a layer computes on one device, in plain torch.

Shapes are written at the end of a name: R rows (tokens of a pass), B batch, S sequence (queries), T keys, D hidden,
H heads, K elements of a head, W columns of a RoPE table, I intermediate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


def linear(x: Tensor, weights: Mapping[str, Tensor], name: str, *, bias: bool = True) -> Tensor:
    """Multiply by the matrix of this name and add its bias, if it has one and it is wanted."""
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias") if bias else None)


def linears(
    x: Tensor, weights: Mapping[str, Tensor], fused: str, names: Sequence[str], widths: Sequence[int]
) -> Sequence[Tensor]:
    """Multiply by several matrices: by one that is made of them, where there is one, else by each."""
    if f"{fused}.weight" in weights:
        return torch.split_with_sizes(linear(x, weights, fused), list(widths), dim=-1)
    return [linear(x, weights, name) for name in names]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Divide rows by their root mean square (Zhang and Sennrich, arXiv 1910.07467), in float32.

    Families differ in where they round: those with an offset multiply by the weights in float32, as they do in
    transformers.
    """
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (x32 * (weight.float() + offset)).to(x.dtype)
    return weight * x32.to(x.dtype)


def rotate(x_RHK: Tensor, sin_RW: Tensor, cos_RW: Tensor) -> Tensor:
    """Turn the leading elements of heads by their rows' positions (RoPE; pairs are i and i + W / 2)."""
    width = sin_RW.shape[-1]
    x, rest = x_RHK[..., :width], x_RHK[..., width:]
    first, second = x.chunk(2, dim=-1)
    turned = x * cos_RW[:, None] + torch.cat((-second, first), dim=-1) * sin_RW[:, None]
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def attend(
    q_BHSK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: Tensor | None, *, scale: float, cap: float | None
) -> Tensor:
    """Return the values, weighed by how well their keys match the queries: ``[B, H, S, K]``.

    Args:
        q_BHSK: queries.
        k_BHTK: keys.
        v_BHTK: values.
        mask: true where a query sees a key, ``[B or 1, 1, S or 1, T]``; None if query i sees keys 0 to i.
        scale: of the scores.
        cap: see :class:`tpplan.decoder.settings.Settings`.
    """
    if cap is None:
        return functional.scaled_dot_product_attention(
            q_BHSK, k_BHTK, v_BHTK, attn_mask=mask, is_causal=mask is None, scale=scale
        )
    scores_BHST = (q_BHSK @ k_BHTK.transpose(-1, -2)) * scale
    scores_BHST = cap * torch.tanh(scores_BHST / cap)
    if mask is None:
        mask = torch.ones(scores_BHST.shape[-2:], dtype=torch.bool, device=scores_BHST.device).tril()
    scores_BHST = scores_BHST.masked_fill(~mask, -torch.inf)
    return scores_BHST.softmax(-1, dtype=torch.float32).to(q_BHSK.dtype) @ v_BHTK
