"""Flash kernels: what stands for them on the CPU, and what both have to find."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tpplan.decoder import math
from tpplan.decoder.cache import heads
from tpplan.decoder.cache.store import Store
from tpplan.decoder.layer import attention
from tpplan.decoder.math import Scoring, additive_mask, attend, attend_over_parts, merge_parts
from tpplan.exec.toolchain.torch_shims import flash_attention_of_several, flash_attention_to_cached

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Of each call, how many queries and how many keys each text has.
FlashCalls = list[list[tuple[int, int]]]
#: Of each call, how many tokens attend to each other, and whether the flash kernel lets them attend to earlier ones.
CudnnCalls = list[tuple[int, bool]]


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, *, is_causal: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the last tokens' queries attend, ``[B, S, H, K]``, and return the log-sum-exp of their scores, too.

    Each sees so many tokens before its own, all if it is not told; queries that are not causal see all tokens.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q_BHSK, k_BHTK, v_BHTK = (
        x.to(wide).transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], dim=1) for x in (q, k, v)
    )
    hidden = ~seen(q.shape[1], k.shape[1], window)
    scores = q_BHSK @ k_BHTK.mT * scale
    if is_causal:
        scores.masked_fill_(hidden, -torch.inf)
    return (scores.softmax(-1) @ v_BHTK).transpose(1, 2).to(q.dtype).contiguous(), scores.logsumexp(-1)


def seen(queries: int, total: int, before: int | None = None) -> torch.Tensor:
    """Return whether the queries of the last tokens see each token, ``[S, T]``: their own and so many before it."""
    least = -total if before is None else total - queries - before
    return torch.ones(queries, total, dtype=torch.bool).tril(total - queries).triu(least)


def check_texts(
    sizes: list[int],
    place: torch.device,
    dtype: torch.dtype,
    width: int,
    tolerance: float,
    *,
    window: int = 0,
    sinks: bool = False,
) -> None:
    """Let the last tokens of texts that a cache has attend at once, and compare with what each finds alone in 32 bits.

    Args:
        sizes: queries of each of four texts; the last has none.
        place: of the cache.
        dtype: of its elements.
        width: of heads.
        tolerance: of the numbers.
        window: tokens that a query sees, itself included; 0 for all.
        sinks: whether heads have sinks.
    """
    torch.manual_seed(width)
    ends, sequences = [150, 160, 130, 9], [3, 1, 4, 0]
    q_RHK, kv = torch.randn(sum(sizes), 8, width).to(dtype), torch.randn(2, 5, 2, 160, width).to(dtype)
    store = Store("fp32" if dtype is torch.float32 else "fp16", (5, 2, 160, width), dtype, place)
    store.write(slice(None), slice(None), slice(None), kv.to(place))
    k_THK, v_THK, apart = store.as_rows()
    numbers = [0, *accumulate(sizes)], [apart * number for number in (*sequences, 0)], ends
    bounds, starts, counts = (torch.tensor(each, dtype=torch.int32, device=place) for each in numbers)
    scores = torch.linspace(-3, 6, 8).to(dtype) if sinks else None
    found = flash_attention_of_several(
        q_RHK.to(place),
        k_THK,
        v_THK,
        (bounds, starts, counts),
        (max(sizes), 160),
        scale=0.1,
        window=window,
        sinks=None if scores is None else scores.to(place),
    )
    parts = (torch.split_with_sizes(x.cpu().float(), sizes)[:-1] for x in (found, q_RHK))
    for end, sequence, out_SHK, q_SHK in zip(ends, sequences, *parts, strict=False):
        k, v = kv[:, sequence, None, :, :end].float()
        mask = additive_mask(seen(len(q_SHK), end, window - 1 if window else None)[None, None], torch.float32)
        alone = attend(q_SHK.transpose(0, 1)[None], k, v, mask, scoring=Scoring(0.1, sinks=scores))
        torch.testing.assert_close(out_SHK.transpose(0, 1)[None], alone, atol=tolerance, rtol=tolerance)


def check_parts(tokens: int, place: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    """Let the last 40 of some tokens attend to 40 at a time, and compare with all at once in 32 bits.

    Args:
        tokens: keys, 40 or more.
        place: where the kernel is.
        dtype: of the tensors there.
        tolerance: of the numbers.
    """
    torch.manual_seed(tokens)
    q, (k, v) = torch.randn(1, 4, 40, 192).to(dtype), torch.randn(2, 1, 4, tokens, 192).to(dtype)
    bounds = [0, *range(tokens % 40 or 40, tokens + 1, 40)]
    there = [(*(x[:, :, first:end].to(place) for x in (k, v)), end == tokens) for first, end in pairwise(bounds)]
    found = attend_over_parts(q.to(place), there, scale=0.1, merge=merge_parts).cpu().float()
    alone = attend(q.float(), k.float(), v.float(), scoring=Scoring(0.1))
    torch.testing.assert_close(found, alone, atol=tolerance, rtol=tolerance)


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashCalls]:
    """Let the flash kernel attend on the CPU, and return what it is given of several texts where it is causal.

    It demands what the one of GPUs does, reads keys and values where that reads them, and has NaN for all that is not
    told to be a query.
    """
    calls: FlashCalls = []

    def forward(  # noqa: PLR0917 (as torch passes them)
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        assert (dropout_p, return_debug_mask) == (0, False)
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert window_size_right == (None if window_size_left is None else 0)
        nothing = query.new_empty(0)
        if cum_seq_q is None or cum_seq_k is None or seqused_k is None:
            assert cum_seq_q is cum_seq_k is seqused_k is None
            assert (max_q, max_k) == (query.shape[1], key.shape[1])
            found, sums = flash(query, key, value, scale, window_size_left, is_causal=is_causal)
            return found, sums, nothing, nothing, nothing
        assert is_causal or len(seqused_k) == 1
        assert cum_seq_q.shape == cum_seq_k.shape == (len(seqused_k) + 1,)
        assert {x.dtype for x in (cum_seq_q, cum_seq_k, seqused_k)} == {torch.int32}
        assert all(x.is_contiguous() for x in (cum_seq_q, cum_seq_k, seqused_k))
        assert all(x.stride(-1) == 1 and x.shape[1:] == key.shape[1:] for x in (key, value))
        assert int(cum_seq_q[-1]) <= len(query)
        assert int(cum_seq_k.min()) >= 0
        assert max_q > 1  # or the kernel takes every text to have one
        found, texts = torch.full_like(query, torch.nan), []
        sums = query.new_full(query.shape[1::-1], torch.nan, dtype=torch.float32)
        for (first, end), start, count in zip(
            pairwise(cum_seq_q.tolist()), cum_seq_k.tolist(), seqused_k.tolist(), strict=False
        ):
            if first == end:  # such texts may have any keys
                continue
            assert end - first <= max_q
            assert (end - first if is_causal else 1) <= count <= max_k
            own = query[first:end], key[start : start + count], value[start : start + count]
            q, k, v = (x[None] for x in own)
            (found[first:end],), (sums[:, first:end],) = flash(q, k, v, scale, window_size_left, is_causal=is_causal)
            texts.append((end - first, count))
        if is_causal:
            calls.append(texts)
        return found, sums, nothing, nothing, nothing

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_flash_attention_forward", forward, "CPU")  # type: ignore[no-untyped-call]
    monkeypatch.setattr(math, "can_use_flash_attention", lambda _: True)
    yield calls
    library._destroy()  # type: ignore[no-untyped-call]


@pytest.fixture
def cudnn_calls(monkeypatch: pytest.MonkeyPatch) -> CudnnCalls:
    """Let torch choose cuDNN for graphs of one sequence on the CPU; the flash kernel is that of :func:`flash_calls`."""
    calls: CudnnCalls = []

    def attend_to(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert is_causal
        calls.append((q.shape[2], False))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found, sums = flash(q, k, v, scale, None)
        return found.transpose(1, 2), sums

    def to_cached(*words: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls[-1] = calls[-1][0], True
        return flash_attention_to_cached(*words, **more)

    monkeypatch.setattr(attention, "cudnn_attention_to_part", attend_to)
    monkeypatch.setattr(attention, "flash_attention_to_cached", to_cached)
    monkeypatch.setattr(heads, "takes_cudnn", lambda *_, **__: True)
    return calls
