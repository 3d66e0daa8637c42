"""Attention against the formula: heads that share KV heads, of the last tokens, behind masks and with capped scores."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tests.flash_cases import check_texts, flash_calls
from tpplan.decoder import layers
from tpplan.decoder.layers import Scoring, attend, hiding
from tpplan.exec.torch_shims import flash_attention, flash_attention_of_several

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
    seen = torch.ones(1, queries, KEYS, dtype=torch.bool).tril(KEYS - queries)
    torch.testing.assert_close(attend(q, k, v, None, scoring=scoring), expected(q, k, v, seen, scoring))


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(("batch", "queries"), [(1, QUERIES), (4, 1), (3, QUERIES)])
def test_masks(batch: int, queries: int, scoring: Scoring) -> None:
    """With a mask, of all sequences or of each, every query of a group sees what its token sees."""
    q, k, v = made(batch, queries)
    for count in {1, batch}:
        seen = torch.rand(count, queries, KEYS) < 0.5
        seen[..., 3] = True
        found = attend(q, k, v, hiding(seen[:, None], q.dtype), scoring=scoring)
        torch.testing.assert_close(found, expected(q, k, v, seen, scoring))


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("window", [1, 4, KEYS])
def test_windows(window: int, scoring: Scoring) -> None:
    """Without a mask, a query sees as many tokens as a window has, of however many queries at a time."""
    for queries in (1, QUERIES, KEYS):
        q, k, v = made(2, queries)
        seen = torch.ones(1, queries, KEYS, dtype=torch.bool).tril(KEYS - queries).triu(KEYS - queries - window + 1)
        for tokens in (0, 2, KEYS):
            with patch.object(layers, "AT_ONCE", tokens * KEYS):
                found = attend(q, k, v, None, scoring=scoring, window=window)
            torch.testing.assert_close(found, expected(q, k, v, seen, scoring))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_few_scores_at_a_time(scoring: Scoring) -> None:
    """What does not fit is computed in blocks of queries, to the same numbers; one token is the least."""
    q, k, v = made(2, QUERIES)
    seen = torch.ones(1, QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES)
    for tokens in (0, 2, QUERIES - 1):
        with patch.object(layers, "AT_ONCE", tokens * GROUP * k[..., 0].numel()):
            torch.testing.assert_close(attend(q, k, v, None, scoring=scoring), expected(q, k, v, seen, scoring))


@pytest.mark.parametrize(("batch", "queries"), [(1, 1), (4, 1), (2, QUERIES)])
def test_masks_where_cudnn_attends(monkeypatch: pytest.MonkeyPatch, batch: int, queries: int) -> None:
    """Where torch takes cuDNN, it is given shapes that come again, with KV heads that are shared: the same numbers."""
    q, k, v = made(batch, queries)
    mask = hiding((torch.arange(KEYS) <= torch.arange(batch)[:, None] + 4)[:, None, None], q.dtype)
    mask = mask.expand(-1, -1, queries, -1)
    asked: list[torch.Size] = []

    def takes_cudnn(q: torch.Tensor, *_: object) -> bool:
        asked.append(q.shape)
        return True

    monkeypatch.setattr(layers, "takes_cudnn", takes_cudnn)
    for recurs in (False, True):
        found = attend(q, k, v, mask, scoring=Scoring(SCALE), recurs=recurs)
        torch.testing.assert_close(found, expected(q, k, v, mask[:, 0] == 0))
    assert asked == [(batch, 2 * GROUP, queries, 8)]


def test_prompts_of_new_lengths_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a flash kernel, it takes all prompts but those that fill a pass from their beginning."""
    taken: list[int] = []

    def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        taken.append(q.shape[2])
        bias = causal_lower_right(q.shape[2], k.shape[2])
        return scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=True)

    monkeypatch.setattr(layers, "can_use_flash_attention", lambda _: True)
    monkeypatch.setattr(layers, "flash_attention", flash_attention)
    for queries in (1, QUERIES, KEYS):
        q, k, v = made(2, queries)
        seen = torch.ones(1, queries, KEYS, dtype=torch.bool).tril(KEYS - queries)
        for recurs in (False, True):
            found = attend(q, k, v, None, scoring=Scoring(SCALE), recurs=recurs)
            torch.testing.assert_close(found, expected(q, k, v, seen))
    assert taken == [1, 1, QUERIES, QUERIES, KEYS]


def test_this_torch_has_the_flash_kernels() -> None:
    """They take what they are given, though no GPU runs them, and what comes of it is of the queries' shape."""
    q, k, v = (torch.empty(2, 7, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (8, 2, 2))
    found = flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), SCALE)
    assert found.shape == (2, 8, 7, 16)
    three = torch.empty(3, dtype=torch.int32, device="meta")
    four = torch.empty(4, dtype=torch.int32, device="meta")
    where = four, four, three
    assert flash_attention_of_several(q[0], k[0], v[0], where, (5, 7), scale=SCALE).shape == (7, 8, 16)
    names = [each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert names[3:10] == ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask"]
    assert "seqused_k" in names[10:]


def test_texts_in_a_cache(flash_calls: FlashCalls) -> None:
    """The last tokens of each text see those before in its own, wherever these are in the cache.

    Of one text these may be all, of another one, of all one, and of a text without queries none.
    """
    for sizes in ([2, 1, 130, 0], [1, 1, 1, 0]):
        check_texts(sizes, torch.device("cpu"), torch.float32, 8, 1e-5)
    assert flash_calls == [[(2, 150), (1, 160), (130, 130)], [(1, 150), (1, 160), (1, 130)]]
