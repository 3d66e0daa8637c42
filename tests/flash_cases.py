"""Flash kernels: what stands for them on the CPU, and what both have to find."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tpplan.decoder import layers
from tpplan.decoder.cache import Store
from tpplan.decoder.layers import Scoring, attend
from tpplan.exec.torch_shims import flash_attention_of_several

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Of each call, how many queries and how many keys each text has.
FlashCalls = list[list[tuple[int, int]]]


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Let the last tokens' queries attend, ``[B, H, S, K]``."""
    bias = causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=True)


def check_texts(sizes: list[int], place: torch.device, dtype: torch.dtype, width: int, tolerance: float) -> None:
    """Let the last tokens of texts that a cache has attend at once, and compare with what each finds alone in 32 bits.

    Args:
        sizes: queries of each of four texts; the last has none.
        place: of the cache.
        dtype: of its elements.
        width: of heads.
        tolerance: of the numbers.
    """
    torch.manual_seed(width)
    ends, sequences = [150, 160, 130, 9], [3, 1, 4, 0]
    q_RHK, kv = torch.randn(sum(sizes), 8, width).to(dtype), torch.randn(2, 5, 2, 160, width).to(dtype)
    store = Store("fp32" if dtype is torch.float32 else "fp16", (5, 2, 160, width), dtype, place)
    store.write(slice(None), slice(None), slice(None), kv.to(place))
    k_THK, v_THK, apart = store.in_a_row()
    numbers = [0, *accumulate(sizes)], [apart * number for number in (*sequences, 0)], ends
    bounds, starts, counts = (torch.tensor(each, dtype=torch.int32, device=place) for each in numbers)
    most = max(sizes), 160
    found = flash_attention_of_several(q_RHK.to(place), k_THK, v_THK, (bounds, starts, counts), most, scale=0.1)
    parts = (torch.split_with_sizes(x.cpu().float(), sizes)[:-1] for x in (found, q_RHK))
    for end, sequence, out_SHK, q_SHK in zip(ends, sequences, *parts, strict=False):
        k, v = kv[:, sequence, None, :, :end].float()
        alone = attend(q_SHK.transpose(0, 1)[None], k, v, scoring=Scoring(0.1))
        torch.testing.assert_close(out_SHK.transpose(0, 1)[None], alone, atol=tolerance, rtol=tolerance)


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashCalls]:
    """Let flash kernels attend on the CPU, and return what the one of several texts is given.

    It demands what the one of GPUs does, reads keys and values where that reads them, and has NaN for all that is not
    told to be a query.
    """
    calls: FlashCalls = []

    def forward(  # noqa: PLR0917 (as torch passes them)
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cum_seq_q: torch.Tensor,
        cum_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float,
        seqused_k: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        assert (dropout_p, is_causal, return_debug_mask) == (0, True, False)
        assert cum_seq_q.shape == cum_seq_k.shape == (len(seqused_k) + 1,)
        assert {x.dtype for x in (cum_seq_q, cum_seq_k, seqused_k)} == {torch.int32}
        assert all(x.is_contiguous() for x in (cum_seq_q, cum_seq_k, seqused_k))
        assert all(x.stride(-1) == 1 and x.shape[1:] == key.shape[1:] for x in (key, value))
        assert int(cum_seq_q[-1]) <= len(query)
        assert int(cum_seq_k.min()) >= 0
        assert max_q > 1  # or the kernel takes every text to have one
        found, texts = torch.full_like(query, torch.nan), []
        for (first, end), start, count in zip(
            pairwise(cum_seq_q.tolist()), cum_seq_k.tolist(), seqused_k.tolist(), strict=False
        ):
            if first == end:  # such texts may have any keys
                continue
            assert end - first <= max_q
            assert end - first <= count <= max_k
            own = query[first:end], key[start : start + count], value[start : start + count]
            q, k, v = (x.transpose(0, 1)[None] for x in own)
            found[first:end] = flash_attention(q, k, v, scale)[0].transpose(0, 1)
            texts.append((end - first, count))
        calls.append(texts)
        sums, nothing = query.new_empty(query.shape[1], len(query), dtype=torch.float32), query.new_empty(0)
        return found, sums, nothing, nothing, nothing

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_flash_attention_forward", forward, "CPU")  # type: ignore[no-untyped-call]
    monkeypatch.setattr(layers, "can_use_flash_attention", lambda _: True)
    monkeypatch.setattr(layers, "flash_attention", flash_attention)
    yield calls
    library._destroy()  # type: ignore[no-untyped-call]
