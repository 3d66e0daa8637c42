"""Functions of a layer on one device in plain torch: RMS norm, RoPE and attention.

Shapes are suffixes of names: R rows (tokens of a pass), B batch, S sequence (queries), T keys, D hidden, H heads (KV
heads of keys and values), K elements of a head, P pairs of elements that RoPE rotates, I intermediate.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, Self

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional

from tpplan.decoder.prompts import NO_TOKEN
from tpplan.exec.toolchain.torch_shims import (
    at_vectors,
    cudnn_attention_to_part,
    flash_attention,
    flash_attention_to_part,
    takes_cudnn,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    #: Merges attention over another part of the tokens, see :func:`merge_parts`.
    Merge = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


#: Maximum elements of a temporary tensor whose size would otherwise be unbounded: 32 MiB in 16 bits.
AT_ONCE: Final = 2**24

#: Rows that are converted to float32 at a time.
_WIDENED: Final = 512

#: Queries whose outputs are converted to float32 at a time, where a plan may have no room for more.
_MERGED: Final = 128

#: FlashAttention supports head sizes that are multiples of this.
_FLASH_HEADS: Final = 8


@frozen(eq=False)
class Scoring:
    """How the scores of queries and keys become the weights of values.

    Attributes:
        scale: factor of the scores.
        cap: soft cap: scores ``s`` become ``cap · tanh(s / cap)``; None if there is none.
        sinks: score of each query head's sink, which takes part in the softmax and has no value (Xiao et al.,
            arXiv 2309.17453), ``[H]``; None if there are none.
    """

    scale: float
    cap: float | None = None
    sinks: Tensor | None = None

    def of(self, heads: slice) -> Self:
        """Return the scoring of a slice of the query heads."""
        return self if self.sinks is None else evolve(self, sinks=slice_of(self.sinks, heads, dim=0))


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, out: Tensor | None = None) -> Tensor:
    """Return the RMS norm of rows (Zhang and Sennrich, arXiv 1910.07467), computed in float32 and rounded once.

    Args:
        x: rows.
        weight: weights of the norm, in the dtype of the rows.
        eps: epsilon added to the mean square.
        offset: number added to the weights.
        out: tensor for the result, may be ``x``; a new one if not given.
    """
    if offset:
        weight = weight.float() + offset
    if out is None and weight.dtype == x.dtype:
        return functional.rms_norm(x, weight.shape, weight, eps)  # one kernel on GPUs
    out = torch.empty_like(x) if out is None else out
    for to, some in zip(torch.split(out, _WIDENED), torch.split(x, _WIDENED), strict=True):
        to.copy_(functional.rms_norm(some.to(weight.dtype), weight.shape, weight, eps))
    return out


def angles(sin_RP: Tensor, cos_RP: Tensor) -> Tensor:
    """Return sines and cosines of rows in the layout that :func:`rotate` takes.

    Args:
        sin_RP: sines, one for each pair of elements.
        cos_RP: cosines.

    Returns:
        The factors of each input half of a head in each output half, ``[R, 1, 2, 2, P]``: input half, then output half.
    """
    return torch.unflatten(torch.stack((cos_RP, sin_RP, -sin_RP, cos_RP), dim=1), 1, (1, 2, 2))


def angles_at(sin_TP: Tensor, cos_TP: Tensor, positions_R: Tensor) -> Tensor:
    """Return the :func:`angles` of rows at these positions.

    Args:
        sin_TP: sines of all positions, one for each pair of elements.
        cos_TP: cosines.
        positions_R: position of each row.
    """
    return angles(sin_TP[positions_R], cos_TP[positions_R])


def rotate(x_RHK: Tensor, by: Tensor, *, are_neighbours: bool = False) -> None:
    """Rotate the leading elements of heads in place by the rows' :func:`angles` (RoPE, arXiv:2104.09864).

    Pairs are elements i and i + P, or neighbours 2i and 2i + 1. This takes two kernels, because each half is read for
    both halves before it is overwritten.
    """
    turned_RHK = x_RHK[..., : 2 * by.shape[-1]]
    x_RH2P = torch.unflatten(turned_RHK, -1, (-1, 2)).mT if are_neighbours else torch.unflatten(turned_RHK, -1, (2, -1))
    first, second = (x_RH2P[..., None, :] * by).unbind(2)
    torch.add(first, second, out=x_RH2P)


def stack_heads(x_RHK: Tensor, y_RHK: Tensor) -> Tensor:
    """Return two tensors of heads as one, ``[R, 2, H, K]``: a view if they share storage and strides, else a copy."""
    step = y_RHK.storage_offset() - x_RHK.storage_offset()
    is_one = x_RHK.untyped_storage().data_ptr() == y_RHK.untyped_storage().data_ptr()
    if not is_one or step < 0 or x_RHK.stride() != y_RHK.stride():
        return torch.stack((x_RHK, y_RHK), dim=1)
    row, *others = x_RHK.stride()
    return x_RHK.as_strided((len(x_RHK), 2, *x_RHK.shape[1:]), (row, step, *others))


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive attention mask: 0 where a query sees a key, else minus infinity."""
    return seen.to(dtype).log_()  # log 1 = 0, log 0 = -inf


def attend(
    q_BHSK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    mask: Tensor | None = None,
    *,
    scoring: Scoring,
    window: int = 0,
    recurs: bool = False,
    merge: Merge | None = None,
) -> Tensor:
    """Return the attention output ``[B, H, S, K]``.

    Args:
        q_BHSK: queries; each KV head is shared by equally many successive query heads (GQA, arXiv:2305.13245).
        k_BHTK: keys.
        v_BHTK: values; if they are narrower than keys, as latents are (MLA), the output is as narrow.
        mask: mask from :func:`additive_mask`, ``[B or 1, 1, S, T]``; None for causal attention, where the queries
            belong to the last S tokens.
        scoring: how scores become weights.
        window: tokens that a query sees without a mask, itself included; 0 for all.
        recurs: whether these shapes occur repeatedly. Only then is cuDNN worth using: it is fast, but builds a plan for
            each shape, which takes 36 ms on an H200.
        merge: merges outputs over parts of the tokens, see :func:`merge_parts`. If there is room for two outputs, cuDNN
            attends to tokens before the queries' own, too.
    """
    are_latents = v_BHTK.shape[3] < k_BHTK.shape[3]
    if scoring.cap is None and not are_latents:
        out_BHSK = _fused(q_BHSK, k_BHTK, v_BHTK, mask, scoring, window=window, recurs=recurs, merge=merge)
        if out_BHSK is not None:
            return out_BHSK
    count, total = q_BHSK.shape[2], k_BHTK.shape[2]
    if window:
        parts = []
        for some in torch.split(q_BHSK, max(1, AT_ONCE // (4 * total)), dim=2):  # mask and temporaries
            first = total - count
            hides = causal_mask(slice(first, first + some.shape[2]), slice(0, total), some, window)
            parts.append(attend(some, k_BHTK, v_BHTK, hides, scoring=scoring, recurs=recurs))
            count -= some.shape[2]
        return concat(parts, dim=2)
    is_plain = scoring.cap is None and scoring.sinks is None and not are_latents
    alike = 1 if is_plain else 4  # tensors of this size: scores, their mask, and temporaries
    block = max(1, AT_ONCE // (alike * q_BHSK.shape[:2].numel() * total))
    if are_latents and mask is not None:  # of all heads, but few sequences at a time
        at_once = max(1, AT_ONCE // (alike * q_BHSK.shape[1:3].numel() * total))
        by_sequence = zip(*(torch.split(x, at_once) for x in (q_BHSK, k_BHTK, v_BHTK, mask)), strict=True)
        return concat([_masked_attention(q, k, v, hides, scoring) for q, k, v, hides in by_sequence], dim=0)
    found = []
    for first in range(0, count, block):
        some = q_BHSK[:, :, first : first + block]
        at = total - count + first
        hides = (
            mask[:, :, first : first + block]
            if mask is not None
            else causal_mask(slice(at, at + some.shape[2]), slice(0, total), some)
        )
        found.append(_masked_attention(some, k_BHTK, v_BHTK, hides, scoring))
    return concat(found, dim=2)


def attend_in_parts(q_BHSK: Tensor, parts: Iterable[tuple[Tensor, Tensor, Tensor]], *, scoring: Scoring) -> Tensor:
    """Return the attention output ``[B, H, S, K]`` over tokens that are read a part at a time (arXiv:1805.02867).

    Args:
        q_BHSK: queries; they share one KV head.
        parts: keys ``[B, 1, T, K]`` and values of successive tokens, with their masks, see :func:`attend`. Every query
            sees a token of the first part.
        scoring: how scores become weights, without cap and sinks.
    """
    q_BRK = q_BHSK.flatten(1, 2)
    most_BR1 = q_BRK.new_full((*q_BRK.shape[:2], 1), -inf, dtype=torch.float32)
    total_BR1, out_BRK = torch.zeros_like(most_BR1), most_BR1.new_zeros(())
    for k_B1TK, v_B1TK, mask_B1ST in parts:
        scores_BRT = (q_BRK @ k_B1TK.squeeze(1).mT).float()
        scores_BHST = torch.unflatten(scores_BRT, 1, q_BHSK.shape[1:3])
        torch.add(mask_B1ST, scores_BHST, alpha=scoring.scale, out=scores_BHST)
        before_BR1, most_BR1 = most_BR1, torch.maximum(most_BR1, scores_BRT.amax(-1, keepdim=True))
        scores_BRT.sub_(most_BR1).exp_()
        faded_BR1 = before_BR1.sub_(most_BR1).exp_()
        total_BR1.mul_(faded_BR1).add_(scores_BRT.sum(-1, keepdim=True))
        out_BRK = out_BRK * faded_BR1 + scores_BRT.to(q_BRK.dtype) @ v_B1TK.squeeze(1)
    return torch.unflatten(out_BRK.div_(total_BR1).to(q_BRK.dtype), 1, q_BHSK.shape[1:3])


def attend_over_parts(
    q_BHSK: Tensor,
    parts: Iterable[tuple[Tensor, Tensor, bool]],
    *,
    scale: float,
    merge: Merge,
    attend_to: Callable[..., tuple[Tensor, Tensor]] = flash_attention_to_part,
) -> Tensor:
    """Return causal attention ``[B, H, S, K]`` over successive tokens by a fused kernel, a part of them at a time.

    Args:
        q_BHSK: queries of the last S tokens, see :func:`takes_flash`.
        parts: keys and values of parts of the tokens, and whether these are the last ones: S or more.
        scale: factor of the scores.
        merge: merges the outputs of parts, see :func:`merge_parts`.
        attend_to: returns the attention over a part; see :func:`flash_attention_to_part`.
    """
    found: tuple[Tensor, Tensor] | None = None
    for k_BHTK, v_BHTK, is_last in parts:
        new = attend_to(q_BHSK, k_BHTK, v_BHTK, scale, is_causal=is_last)
        del k_BHTK, v_BHTK  # the next ones are made in their memory
        found = new if found is None else (found[0], merge(*found, *new))
        del new
    assert found is not None  # noqa: S101 - there are tokens
    return found[0]


def merge_parts(out_BHSK: Tensor, sums_BHS: Tensor, new_BHSK: Tensor, new_sums_BHS: Tensor) -> Tensor:
    """Merge attention over another part of the tokens into ``out_BHSK``, computed in float32 and rounded.

    Args:
        out_BHSK: attention over the tokens so far.
        sums_BHS: logarithms of its softmaxes' denominators, in float32.
        new_BHSK: attention over others.
        new_sums_BHS: logarithms of the denominators of these.

    Returns:
        The logarithms of the denominators over all of them.
    """
    weight_BHS1 = torch.sigmoid(new_sums_BHS - sums_BHS).unsqueeze(-1)
    pieces = (torch.split(x, _MERGED, dim=2) for x in (out_BHSK, new_BHSK, weight_BHS1))
    for to, some, weight in zip(*pieces, strict=True):
        to.copy_(to.to(weight.dtype).lerp_(some.to(weight.dtype), weight))
    return torch.logaddexp(sums_BHS, new_sums_BHS)


def takes_flash(q_BHSK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> bool:
    """Tell whether torch's FlashAttention supports these tensors, with query heads that share KV heads."""
    params = SDPAParams(q_BHSK, k_BHTK, v_BHTK, None, 0.0, False, True)  # noqa: FBT003
    return not q_BHSK.shape[3] % _FLASH_HEADS and can_use_flash_attention(params)


def causal_mask(queries: slice, tokens: slice, like: Tensor, window: int = 0) -> Tensor:
    """Return the mask of successive tokens, with a window if it is not 0, for queries of others: ``[1, 1, S, T]``.

    Args:
        queries: positions of the queries.
        tokens: positions of the keys.
        like: a tensor of the mask's dtype, on its device.
        window: tokens that a query sees, itself included; 0 for all.
    """
    token = torch.arange(tokens.start, tokens.stop, device=like.device)
    query = torch.arange(queries.start, queries.stop, device=like.device)[:, None]
    seen = token <= query
    if window:
        seen &= token > query - window
    return additive_mask(seen[None, None], like.dtype)


def concat(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate tensors; a single one, the usual case, is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def split_rows(x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Split the rows of a tensor into pieces; a single one, the usual case, takes no torch call."""
    return (x,) if len(sizes) == 1 else torch.split_with_sizes(x, sizes)


def slice_of(x: Tensor, some: slice, dim: int) -> Tensor:
    """Return a slice of a tensor along a dimension; the whole, the usual case, takes no torch call."""
    size: int = x.shape[dim]
    return x if some.start == 0 and some.stop == size else x.narrow(dim, some.start, some.stop - some.start)


def _fused(
    q_BHSK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    *,
    window: int,
    recurs: bool,
    merge: Merge | None,
) -> Tensor | None:
    """Return the output of a fused attention kernel with shared KV heads for all queries, or None if none applies."""
    scale, sinks = scoring.scale, scoring.sinks
    if mask is not None:
        if sinks is not None or not recurs or not takes_cudnn(q_BHSK, k_BHTK, v_BHTK, mask, scale):
            return None
        q, k, v = map(at_vectors, (q_BHSK, k_BHTK, v_BHTK))
        return functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    if not takes_flash(q_BHSK, k_BHTK, v_BHTK):
        return None
    count, total = q_BHSK.shape[2], k_BHTK.shape[2]
    if recurs and not window and sinks is None and (total == count or (merge and not total % count)):
        parts = _doubling_parts(k_BHTK, v_BHTK, count)
        k_own, v_own, _ = parts[0]
        if takes_cudnn(q_BHSK, k_own, v_own, None, scale, is_causal=True):
            merge, attend_to = merge or merge_parts, cudnn_attention_to_part
            return attend_over_parts(q_BHSK, parts, scale=scale, merge=merge, attend_to=attend_to)
    return flash_attention(q_BHSK, k_BHTK, v_BHTK, scale, window=window, sinks=sinks)


def _doubling_parts(k_BHTK: Tensor, v_BHTK: Tensor, count: int) -> list[tuple[Tensor, Tensor, bool]]:
    """Return keys and values of the last ``count`` tokens, and of powers of 2 times as many before them.

    So texts of any length have few shapes, whose number grows as the logarithm of the longest. To merge a part costs a
    sixth of attention to as many tokens as there are queries, and less of attention to more.
    """
    end = k_BHTK.shape[2] - count
    bounds, size = [(end, count)], count
    while end:
        if end // size % 2:
            end -= size
            bounds.append((end, size))
        size *= 2
    return [(k_BHTK.narrow(2, *each), v_BHTK.narrow(2, *each), each is bounds[0]) for each in bounds]


def _masked_attention(q_BHSK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Return masked attention. Query heads that share a KV head become extra queries, so that no KV head is copied.

    Fused kernels give the queries of a KV head to one processor. Those of latents, which all heads share, are so many
    that products of whole matrices are faster.
    """
    q_BHGSK = torch.unflatten(q_BHSK, 1, (k_BHTK.shape[1], -1))
    q_BHRK = q_BHGSK.flatten(2, 3)
    cap, sinks_H = scoring.cap, scoring.sinks
    if cap is None and sinks_H is None and v_BHTK.shape[3] < k_BHTK.shape[3]:
        scores_BHRT = q_BHRK @ k_BHTK.mT
        scores_BHGST = torch.unflatten(scores_BHRT, 2, q_BHGSK.shape[2:4])
        torch.add(mask[:, :, None], scores_BHGST, alpha=scoring.scale, out=scores_BHGST)
        out_BHRK = scores_BHRT.softmax(-1) @ v_BHTK
        return torch.unflatten(out_BHRK, 2, q_BHGSK.shape[2:4]).flatten(1, 2)
    mask_B1RT = mask[:, :, None].expand(-1, -1, q_BHGSK.shape[2], -1, -1).flatten(2, 3)
    if cap is None and sinks_H is None:
        out_BHRK = functional.scaled_dot_product_attention(q_BHRK, k_BHTK, v_BHTK, mask_B1RT, scale=scoring.scale)
        return torch.unflatten(out_BHRK, 2, q_BHGSK.shape[2:4]).flatten(1, 2)
    scores_BHRT = (q_BHRK @ k_BHTK.mT).mul_(scoring.scale if cap is None else scoring.scale / cap)
    if cap is not None:
        scores_BHRT.tanh_().mul_(cap)
    scores_BHRT.add_(mask_B1RT)
    out_BHRK = scores_BHRT.softmax(-1) @ v_BHTK
    if sinks_H is not None:
        wide = torch.promote_types(scores_BHRT.dtype, torch.float32)
        sums_BHR1 = scores_BHRT.to(wide).logsumexp(-1, keepdim=True)
        sinks_HG1 = torch.unflatten(sinks_H.to(wide), 0, q_BHGSK.shape[1:3])[..., None]
        sinks_HR1 = sinks_HG1.expand(-1, -1, q_BHGSK.shape[3]).flatten(1)[..., None]
        out_BHRK.mul_((sums_BHR1 - sinks_HR1).sigmoid_())
    return torch.unflatten(out_BHRK, 2, q_BHGSK.shape[2:4]).flatten(1, 2)


def argmax_columns(logits_BV: Tensor, start: int, place: int, places: int, parts: int) -> Tensor:
    """Return the largest logit of each row, or of parts of it, and its token (argmax), in pairs of columns.

    Args:
        logits_BV: logits of a range of tokens.
        start: the first token of the range.
        place: number of the range among all; its pairs are filled, those of all others are zeros.
        places: number of ranges.
        parts: pairs of a range, for kernels that search parts of it at a time; here all are of the whole range.

    Returns:
        ``[B, 2 × places × parts]`` in float32.
    """
    best_B, token_B = logits_BV.max(-1)
    found_BP2 = logits_BV.new_zeros(len(logits_BV), places * parts, 2, dtype=torch.float32)
    own_BP2 = found_BP2[:, place * parts : (place + 1) * parts]
    own_BP2[..., 0], own_BP2[..., 1] = best_B[:, None], token_B[:, None] + start
    return found_BP2.flatten(1)


def best_tokens(found_B2P: Tensor) -> Tensor:
    """Return the token of the largest logit of each row, of equal ones the smallest, in float32.

    It is ``NO_TOKEN`` where the largest logit is not finite; NaN counts as largest.

    Args:
        found_B2P: pairs of a logit and its token.
    """
    logits_BP, tokens_BP = found_B2P[:, ::2], found_B2P[:, 1::2]
    best_B1 = logits_BP.amax(1, keepdim=True)  # NaN if any logit is
    tokens_B = tokens_BP.masked_fill(logits_BP < best_B1, inf).amin(1)
    return tokens_B.masked_fill_(~(best_B1[:, 0].abs() < inf), NO_TOKEN)
