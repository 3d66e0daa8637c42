"""What a layer computes on one device, in plain torch.

Shapes are written at the end of a name: R rows (tokens of a pass), B batch, S sequence (queries), T keys, D hidden,
H heads (KV heads of keys and values), K elements of a head, W columns of a RoPE table, I intermediate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional

from tpplan.exec.torch_shims import flash_attention, takes_cudnn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

#: Elements that are made at a time of what could take any amount of memory: of 16 bits, 32 MiB.
AT_ONCE: Final = 2**24

#: Rows that are in float32 at a time.
_WIDENED: Final = 512

#: The flash kernel takes heads of a multiple of so many elements.
_FLASH_HEADS: Final = 8


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Divide rows by their root mean square (Zhang and Sennrich, arXiv 1910.07467), and multiply them by weights.

    It is done in float32, and rounded once.

    Args:
        x: rows.
        weight: in their dtype, or in float32.
        eps: is added to the mean square.
        out: to write to, may be ``x``; a new tensor if not given.
    """
    if out is None and weight.dtype == x.dtype:
        return functional.rms_norm(x, weight.shape, weight, eps)  # one kernel on GPUs
    out = torch.empty_like(x) if out is None else out
    for to, some in zip(torch.split(out, _WIDENED), torch.split(x, _WIDENED), strict=True):
        to.copy_(functional.rms_norm(some.to(weight.dtype), weight.shape, weight, eps))
    return out


def angles(sin_RW: Tensor, cos_RW: Tensor) -> Tensor:
    """Return rows of RoPE tables as :func:`rotate` takes them.

    Args:
        sin_RW: sines.
        cos_RW: cosines.

    Returns:
        What the halves of a head count in both halves, ``[R, 1, 2, 2, W / 2]``: by the one, then by the other.
    """
    (sin_1, sin_2), (cos_1, cos_2) = sin_RW.chunk(2, dim=-1), cos_RW.chunk(2, dim=-1)
    return torch.unflatten(torch.stack((cos_1, sin_2, -sin_1, cos_2), dim=1), 1, (1, 2, 2))


def rotate(x_RHK: Tensor, by: Tensor) -> None:
    """Turn the leading elements of heads, where they are, by their rows' :func:`angles` (RoPE; pairs are i, i + W / 2).

    In two kernels: no half may be written over before all of the other is made of it.
    """
    x_RH2W = torch.unflatten(x_RHK[..., : 2 * by.shape[-1]], -1, (2, -1))
    first, second = (x_RH2W[..., None, :] * by).unbind(2)
    torch.add(first, second, out=x_RH2W)


def side_by_side(x_RHK: Tensor, y_RHK: Tensor) -> Tensor:
    """Return heads as one tensor, ``[R, 2, H, K]``; those of one matrix's rows lie so that none is copied."""
    step = y_RHK.storage_offset() - x_RHK.storage_offset()
    is_one = x_RHK.untyped_storage().data_ptr() == y_RHK.untyped_storage().data_ptr()
    if not is_one or step < 0 or x_RHK.stride() != y_RHK.stride():
        return torch.stack((x_RHK, y_RHK), dim=1)
    row, *others = x_RHK.stride()
    return x_RHK.as_strided((len(x_RHK), 2, *x_RHK.shape[1:]), (row, step, *others))


def hiding(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: nothing where a query sees a key, else minus infinity."""
    return seen.to(dtype).log_()  # of 1 and of 0


def attend(
    q_BHSK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    cap: float | None,
    window: int = 0,
    recurs: bool = False,
) -> Tensor:
    """Return the values, weighed by how well their keys match the queries: ``[B, H, S, K]``.

    Args:
        q_BHSK: queries; equally many successive heads of them share each KV head.
        k_BHTK: keys.
        v_BHTK: values.
        mask: from :func:`hiding`, ``[B or 1, 1, S, T]``; None if the queries are those of the last S tokens, and see
            these and all before.
        scale: of the scores.
        cap: see :class:`tpplan.decoder.settings.Settings`.
        window: tokens that a query sees without a mask, itself included; 0 for all.
        recurs: whether such shapes come again and again: cuDNN is fast, but makes a plan for each, in 36 ms on an H200.
    """
    count, total = q_BHSK.shape[2], k_BHTK.shape[2]
    if window:
        parts = []
        for some in torch.split(q_BHSK, max(1, AT_ONCE // (4 * total)), dim=2):  # a mask, and what it is made of
            hides = _hiding_others(some, total - count, total, window)
            parts.append(attend(some, k_BHTK, v_BHTK, hides, scale=scale, cap=cap, recurs=recurs))
            count -= some.shape[2]
        return together(parts, dim=2)
    out_BHSK = None if cap is not None else _fused(q_BHSK, k_BHTK, v_BHTK, mask, scale, recurs=recurs)
    if out_BHSK is not None:
        return out_BHSK
    alike = 1 if cap is None else 4  # scores, their mask, and what becomes of them
    block = max(1, AT_ONCE // (alike * q_BHSK.shape[:2].numel() * total))
    found = []
    for first in range(0, count, block):
        some = q_BHSK[:, :, first : first + block]
        hides = (
            _hiding_others(some, total - count + first, total) if mask is None else mask[:, :, first : first + block]
        )
        found.append(_behind(some, k_BHTK, v_BHTK, hides, scale=scale, cap=cap))
    return together(found, dim=2)


def takes_flash(q_BHSK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> bool:
    """Tell whether the flash kernel attends, where query heads share KV heads."""
    params = SDPAParams(q_BHSK, k_BHTK, v_BHTK, None, 0.0, False, True)  # noqa: FBT003
    return not q_BHSK.shape[3] % _FLASH_HEADS and can_use_flash_attention(params)


def _hiding_others(q_BHSK: Tensor, first: int, total: int, window: int = 0) -> Tensor:
    """Return what hides from the queries of successive tokens, from the first one on, all but their own window."""
    tokens = torch.arange(total, device=q_BHSK.device)
    query = tokens[first : first + q_BHSK.shape[2], None]
    seen = tokens <= query
    if window:
        seen &= tokens > query - window
    return hiding(seen[None, None], q_BHSK.dtype)


def together(parts: list[Tensor], dim: int) -> Tensor:
    """Join tensors; mostly there is one, which need not be copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def apart(x: Tensor, sizes: list[int], dim: int) -> Sequence[Tensor]:
    """Cut a tensor into pieces; mostly there is one, which takes no call of torch."""
    return (x,) if len(sizes) == 1 else torch.split_with_sizes(x, sizes, dim)


def some_of(x: Tensor, some: slice, dim: int) -> Tensor:
    """Return a part of a tensor; mostly it is all of it, which takes no call of torch."""
    size: int = x.shape[dim]
    return x if some.start == 0 and some.stop == size else x.narrow(dim, some.start, some.stop - some.start)


def _fused(
    q_BHSK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: Tensor | None, scale: float, *, recurs: bool
) -> Tensor | None:
    """Attend by a kernel that takes as many queries as there are and lets them share KV heads, if there is one."""
    if mask is not None:
        if not recurs or not takes_cudnn(q_BHSK, k_BHTK, v_BHTK, mask, scale):
            return None
        return functional.scaled_dot_product_attention(q_BHSK, k_BHTK, v_BHTK, mask, scale=scale, enable_gqa=True)
    if not takes_flash(q_BHSK, k_BHTK, v_BHTK):
        return None
    if recurs and q_BHSK.shape[2] == k_BHTK.shape[2]:  # by cuDNN, where torch prefers it
        return functional.scaled_dot_product_attention(
            q_BHSK, k_BHTK, v_BHTK, is_causal=True, scale=scale, enable_gqa=True
        )
    return flash_attention(q_BHSK, k_BHTK, v_BHTK, scale)


def _behind(q_BHSK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: Tensor, *, scale: float, cap: float | None) -> Tensor:
    """Attend behind a mask. Heads that share a KV head stand where those of several tokens would: none is copied."""
    q_BHGSK = torch.unflatten(q_BHSK, 1, (k_BHTK.shape[1], -1))
    q_BHRK = q_BHGSK.flatten(2, 3)
    mask_B1RT = mask[:, :, None].expand(-1, -1, q_BHGSK.shape[2], -1, -1).flatten(2, 3)
    if cap is None:
        out_BHRK = functional.scaled_dot_product_attention(q_BHRK, k_BHTK, v_BHTK, mask_B1RT, scale=scale)
    else:
        scores_BHRT = (q_BHRK @ k_BHTK.mT).mul_(scale / cap).tanh_().mul_(cap).add_(mask_B1RT)
        out_BHRK = scores_BHRT.softmax(-1) @ v_BHTK
    return torch.unflatten(out_BHRK, 2, q_BHGSK.shape[2:4]).flatten(1, 2)
