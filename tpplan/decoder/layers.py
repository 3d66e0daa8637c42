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


def linears(x: Tensor, weights: Mapping[str, Tensor], fused: str, names: Sequence[str]) -> Tensor:
    """Multiply by several matrices, side by side: by one that is made of them, where there is one, else by each."""
    if f"{fused}.weight" in weights:
        return linear(x, weights, fused)
    return torch.cat([linear(x, weights, name) for name in names], dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Divide rows by their root mean square (Zhang and Sennrich, arXiv 1910.07467), in float32.

    The weights are multiplied in float32, too, and the result is rounded once.
    """
    if not offset:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)  # one kernel on GPUs
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * (weight.float() + offset)).to(x.dtype)


def angles(sin_RW: Tensor, cos_RW: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of RoPE tables as :func:`rotate` takes them: ``[R, 1, W]``, the first half of the sines negated."""
    first, second = sin_RW.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)[:, None], cos_RW[:, None]


def rotate(x_RHK: Tensor, sin_R1W: Tensor, cos_R1W: Tensor) -> Tensor:
    """Turn the leading elements of heads by their rows' :func:`angles` (RoPE; pairs are i and i + W / 2)."""
    width = sin_R1W.shape[-1]
    x, rest = x_RHK[..., :width], x_RHK[..., width:]
    first, second = x.chunk(2, dim=-1)
    turned = torch.addcmul(x * cos_R1W, torch.cat((second, first), dim=-1), sin_R1W)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def hiding(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: nothing where a query sees a key, else minus infinity."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def attend(
    q_BHSK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: Tensor | None, *, scale: float, cap: float | None
) -> Tensor:
    """Return the values, weighed by how well their keys match the queries: ``[B, H, S, K]``.

    Args:
        q_BHSK: queries.
        k_BHTK: keys.
        v_BHTK: values.
        mask: from :func:`hiding`, ``[B or 1, 1, S or 1, T]``; None if query i sees keys 0 to i.
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
        seen = torch.ones(scores_BHST.shape[-2:], dtype=torch.bool, device=scores_BHST.device).tril()
        mask = hiding(seen, scores_BHST.dtype)
    return (scores_BHST + mask).softmax(-1, dtype=torch.float32).to(q_BHSK.dtype) @ v_BHTK
