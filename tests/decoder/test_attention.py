"""Attention against the formula: heads that share KV heads, of the last tokens, behind masks and with capped scores."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.flash_cases import check_texts, flash_calls, seen
from tpplan.decoder import math
from tpplan.decoder.math import Scoring, additive_mask, attend, merge_parts
from tpplan.exec.toolchain.torch_shims import (
    cudnn_attention_to_part,
    flash_attention,
    flash_attention_of_several,
    flash_attention_to_part,
)

if TYPE_CHECKING:
    from tests.flash_cases import FlashCalls

__all__ = ["flash_calls"]  # a fixture

SCALE, CAP, QUERIES, KEYS, GROUP = 0.3, 2.0, 5, 12, 3
SINKS = torch.linspace(-1, 2, 2 * GROUP, dtype=torch.float64)
SCORINGS = [Scoring(SCALE), Scoring(SCALE, CAP), Scoring(SCALE, sinks=SINKS), Scoring(SCALE, CAP, SINKS)]


def made(batch: int, queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make queries ``[B, H × GROUP, S, K]``, keys and values ``[B, H, T, K]``."""
    torch.manual_seed(queries)
    q = torch.randn(batch, 2 * GROUP, queries, 8, dtype=torch.float64)
    k, v = torch.randn(2, batch, 2, KEYS, 8, dtype=torch.float64)
    return q, k, v


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scoring: Scoring = SCORINGS[0]
) -> torch.Tensor:
    """Weigh the values that are seen, ``[B or 1, S, T]``, one query head after the other."""
    cap, sinks = scoring.cap, scoring.sinks
    heads = []
    for head in range(q.shape[1]):
        keys, values = k[:, head // GROUP], v[:, head // GROUP]
        scores = q[:, head] @ keys.mT * SCALE
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:  # a key that all see, without a value
            scores = torch.cat((scores, sinks[head].expand(*scores.shape[:2], 1)), dim=-1)
        heads.append(scores.softmax(-1)[..., :KEYS] @ values)
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("queries", [1, QUERIES, KEYS])
def test_the_last_tokens_see_all_before(queries: int, scoring: Scoring) -> None:
    """Without a mask, the queries are those of the last tokens, be they all, some or one."""
    q, k, v = made(1, queries)
    found = attend(q, k, v, None, scoring=scoring)
    torch.testing.assert_close(found, expected(q, k, v, seen(queries, KEYS)[None], scoring))


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(("batch", "queries"), [(1, QUERIES), (4, 1), (3, QUERIES)])
def test_masks(batch: int, queries: int, scoring: Scoring) -> None:
    """With a mask, of all sequences or of each, every query of a group sees what its token sees."""
    q, k, v = made(batch, queries)
    for count in {1, batch}:
        some = torch.rand(count, queries, KEYS) < 0.5
        some[..., 3] = True
        found = attend(q, k, v, additive_mask(some[:, None], q.dtype), scoring=scoring)
        torch.testing.assert_close(found, expected(q, k, v, some, scoring))


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("window", [1, 4, KEYS])
def test_windows(window: int, scoring: Scoring) -> None:
    """Without a mask, a query sees as many tokens as a window has, of however many queries at a time."""
    for queries in (1, QUERIES, KEYS):
        q, k, v = made(2, queries)
        right = expected(q, k, v, seen(queries, KEYS, window - 1)[None], scoring)
        for tokens in (0, 2, KEYS):
            with patch.object(math, "AT_ONCE", tokens * KEYS):
                found = attend(q, k, v, None, scoring=scoring, window=window)
            torch.testing.assert_close(found, right)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_few_scores_at_a_time(scoring: Scoring) -> None:
    """What does not fit is computed in blocks of queries, to the same numbers; one token is the least."""
    q, k, v = made(2, QUERIES)
    right = expected(q, k, v, seen(QUERIES, KEYS)[None], scoring)
    for tokens in (0, 2, QUERIES - 1):
        with patch.object(math, "AT_ONCE", tokens * GROUP * k[..., 0].numel()):
            torch.testing.assert_close(attend(q, k, v, None, scoring=scoring), right)


@pytest.mark.parametrize(("batch", "queries"), [(1, 1), (4, 1), (2, QUERIES)])
def test_masks_where_cudnn_attends(monkeypatch: pytest.MonkeyPatch, batch: int, queries: int) -> None:
    """Where torch takes cuDNN, it is given shapes that come again, with KV heads that are shared: the same numbers."""
    q, k, v = made(batch, queries)
    mask = additive_mask((torch.arange(KEYS) <= torch.arange(batch)[:, None] + 4)[:, None, None], q.dtype)
    mask = mask.expand(-1, -1, queries, -1)
    asked: list[torch.Size] = []

    def takes_cudnn(q: torch.Tensor, *_: object) -> bool:
        asked.append(q.shape)
        return True

    monkeypatch.setattr(math, "takes_cudnn", takes_cudnn)
    for recurs in (False, True):
        found = attend(q, k, v, mask, scoring=Scoring(SCALE), recurs=recurs)
        torch.testing.assert_close(found, expected(q, k, v, mask[:, 0] == 0))
    assert asked == [(batch, 2 * GROUP, queries, 8)]


class Planned:
    """Stands for cuDNN, which it lets the flash kernel do the work of.

    Attributes:
        shapes: queries and tokens of each part, and whether it is causal.
    """

    def __init__(self) -> None:
        """Have made no plan yet."""
        self.shapes: list[tuple[int, int, bool]] = []

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to a part of the tokens."""
        self.shapes.append((q.shape[2], k.shape[2], is_causal))
        return flash_attention_to_part(q, k, v, scale, is_causal=is_causal)


@pytest.fixture
def planned(flash_calls: FlashCalls, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Let torch prefer cuDNN."""
    assert not flash_calls
    monkeypatch.setattr(math, "cudnn_attention_to_part", found := Planned())
    monkeypatch.setattr(math, "takes_cudnn", lambda *_, **__: True)
    return found


@pytest.mark.parametrize("queries", [1, 3, 4, QUERIES, 6, KEYS])
def test_prompts_of_new_lengths_are_not_planned(queries: int, planned: Planned) -> None:
    """Where torch prefers cuDNN, it takes full passes behind full ones, in parts of few sizes; flash takes others."""
    q, k, v = made(2, queries)
    right = expected(q, k, v, seen(queries, KEYS)[None])
    sizes = {1: [1, 1, 2, 8], 3: [3, 3, 6], 4: [4, 8], QUERIES: [], 6: [6, 6], KEYS: [KEYS]}[queries]
    for recurs, merge, count in ((False, merge_parts, 0), (True, merge_parts, len(sizes)), (True, None, 1)):
        planned.shapes.clear()
        with patch.object(math, "flash_attention", side_effect=flash_attention) as attending:
            found = attend(q, k, v, None, scoring=SCORINGS[0], recurs=recurs, merge=merge)
        torch.testing.assert_close(found, right)
        own = [size for size in sizes[:count] if merge or queries == KEYS]  # a single part needs no merging
        assert planned.shapes == [(queries, size, i == 0) for i, size in enumerate(own)]
        assert attending.call_count == (not own)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 5), st.integers(1, 70))
def test_parts_are_all_tokens_in_few_sizes(count: int, times: int) -> None:
    """Each token is in one part; before the last ones, parts are of a power of 2 times as many, each at most once."""
    tokens = torch.arange(times * count)
    k, v = tokens.expand(2, 1, 1, -1)[..., None]
    parts = math._doubling_parts(k, v, count)
    assert [is_last for *_, is_last in parts] == [True, *[False] * (len(parts) - 1)]
    found = [k.flatten() for k, _, _ in reversed(parts)]
    assert torch.equal(torch.cat(found), tokens)
    assert all(torch.equal(k, v) for k, v, _ in parts)
    own, *sizes = (k.numel() for k, _, _ in parts)
    assert own == count
    assert len(set(sizes)) == len(sizes)
    assert {*sizes} <= {count << i for i in range(7)}


def test_windows_sinks_and_other_devices_are_not_planned(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what torch would not choose cuDNN for; it is asked about the causal part."""
    q, k, v = made(1, 4)
    for scoring, window in ((SCORINGS[2], 0), (SCORINGS[0], 6)):
        attend(q, k, v, None, scoring=scoring, window=window, recurs=True, merge=merge_parts)
    asked: list[object] = []

    def takes_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object, **more: object) -> bool:
        asked.append((q.shape[2], k.shape[2], v.shape[2], *others, more))
        return False

    monkeypatch.setattr(math, "takes_cudnn", takes_cudnn)
    found = attend(q, k, v, None, scoring=SCORINGS[0], recurs=True, merge=merge_parts)
    torch.testing.assert_close(found, expected(q, k, v, seen(4, KEYS)[None]))
    assert asked == [(4, 4, 4, None, SCALE, {"is_causal": True})]
    assert not planned.shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_merged_by_how_much_their_scores_weigh(dtype: torch.dtype) -> None:
    """Few queries at a time, rounded once; a part beside which another weighs nothing stays as it is."""
    torch.manual_seed(1)
    (out, new), (sums, new_sums) = torch.randn(2, 2, 3, 7, 8).to(dtype), 9 * torch.randn(2, 2, 3, 7)
    new_sums[:, :, 2], sums[:, :, 4] = sums[:, :, 2] - 200, new_sums[:, :, 4] - 200
    weights = torch.stack((sums, new_sums)).double().softmax(0)[..., None]
    expected = (weights * torch.stack((out, new)).double()).sum(0)
    merged = out.clone()
    with patch.object(math, "_MERGED", 3):
        found = merge_parts(merged, sums, new, new_sums)
    torch.testing.assert_close(merged, expected.to(dtype))
    torch.testing.assert_close(found, torch.logaddexp(sums.double(), new_sums.double()).float())
    assert torch.equal(merged[:, :, 2], out[:, :, 2])
    assert torch.equal(merged[:, :, 4], new[:, :, 4])


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.usefixtures("flash_calls")
def test_windows_and_sinks_take_no_masks(scoring: Scoring) -> None:
    """Where there is a flash kernel, it takes them, also for prompts that fill a pass; capped scores it does not."""
    for window in (0, 1, 4, KEYS):
        for queries in (1, QUERIES, KEYS):
            q, k, v = made(2, queries)
            with patch.object(math, "additive_mask", side_effect=additive_mask) as hides:
                found = attend(q, k, v, None, scoring=scoring, window=window, recurs=True)
            hidden = seen(queries, KEYS, window - 1 if window else None)[None]
            torch.testing.assert_close(found, expected(q, k, v, hidden, scoring), atol=1e-6, rtol=1e-6)
            assert hides.called == (scoring.cap is not None)


def test_this_torch_has_the_flash_kernel() -> None:
    """It takes what it is given, though no GPU runs it, and what comes of it is of the queries' shape."""
    q, k, v = (torch.empty(2, 7, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (8, 2, 2))
    sinks = torch.empty(8, dtype=torch.bfloat16, device="meta")
    found = flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), SCALE, window=3, sinks=sinks)
    assert found.shape == (2, 8, 7, 16)
    three = torch.empty(3, dtype=torch.int32, device="meta")
    four = torch.empty(4, dtype=torch.int32, device="meta")
    where = four, four, three
    found = flash_attention_of_several(q[0], k[0], v[0], where, (5, 7), scale=SCALE, window=3, sinks=sinks)
    assert found.shape == (7, 8, 16)
    names = [each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert names[3:10] == ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask"]
    assert {"scale", "window_size_left", "window_size_right", "seqused_k"} <= set(names[10:])


def test_this_torch_has_cudnn() -> None:
    """It takes what it is given, though no GPU runs it, and returns logarithms as the flash kernel does."""
    q, k, v = (torch.empty(2, 7, heads, 16, dtype=torch.bfloat16, device="meta").transpose(1, 2) for heads in (8, 2, 2))
    found, sums = cudnn_attention_to_part(q, k, v, SCALE, is_causal=True)
    assert found.shape == (2, 8, 7, 16)
    assert found.transpose(1, 2).is_contiguous()
    assert sums.shape == (2, 8, 7)
    assert sums.dtype is torch.float32
    names = [each.name for each in torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema.arguments]
    assert names[3:] == ["attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask", "scale"]


@pytest.mark.parametrize(("window", "sinks"), [(0, False), (7, True)])
def test_texts_in_a_cache(window: int, sinks: bool, flash_calls: FlashCalls) -> None:
    """The last tokens of each text see those before in its own, wherever these are in the cache, or in a window.

    Of one text these may be all, of another one, of all one, and of a text without queries none.
    """
    for sizes in ([2, 1, 130, 0], [1, 1, 1, 0]):
        check_texts(sizes, torch.device("cpu"), torch.float32, 8, 1e-5, window=window, sinks=sinks)
    assert flash_calls == [[(2, 150), (1, 160), (130, 130)], [(1, 150), (1, 160), (1, 130)]]
