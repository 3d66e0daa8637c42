"""The attention of a decoding step on a real GPU, against torch in float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from tpplan.decoder.cache.store import Store
from tpplan.decoder.fast.launches.attention import Attention, NewTokens
from tpplan.decoder.fast.launches.pointwise import Places, Pointwise
from tpplan.decoder.math import angles

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])]


class Case:
    """Random queries in the rows of a larger matrix, sinks, a cache, and positions of one token of each sequence."""

    def __init__(  # noqa: PLR0917
        self,
        dtype: torch.dtype,
        heads: tuple[int, int],
        head_dim: int,
        length: int,
        positions: Sequence[int],
        kind: str = "fp16",
        sinks: Sequence[float] = (),
    ) -> None:
        """Make them; what no token sees is not a number, or in whole numbers has a scale that is none.

        Sinks are given of the first query heads, and others have the same in turn, if there are any.
        """
        torch.manual_seed(length)
        queries, keys = heads
        count = len(positions)
        rows = torch.randn(count, (queries + 2 * keys) * head_dim, device="cuda").to(dtype)
        self.q_RHK = rows[:, : queries * head_dim].view(count, queries, head_dim)
        self.store = Store(kind, (count + 1, keys, length, head_dim), dtype, rows.device)
        every = slice(None)
        self.store.write(
            every, every, every, torch.randn(2, count + 1, keys, length, head_dim, device="cuda").to(dtype)
        )
        self.positions_R = torch.tensor(positions, device="cuda")
        self.hidden_RT = torch.arange(length, device="cuda") > self.positions_R[:, None]
        part = self.store._parts[-1][:, :count]
        part.masked_fill_(self.hidden_RT[None, :, None, :, None], 0x7F if kind == "fp8" else math.nan)
        self.scale = head_dim**-0.5
        self.sinks_H = torch.tensor((*sinks,) * queries, device="cuda")[:queries].to(dtype) if sinks else None

    def numbers(self) -> Tensor:
        """Return what keys and values are, ``[2, B, H, L, K]``: whole numbers and their scales in float16."""
        part, *scales = self.store._parts
        if scales:
            part = (torch.unflatten(part.half(), -1, (-1, 32)) * scales[0].unsqueeze(-1)).flatten(-2)
        if self.store.kind == "fp8":
            part = part.view(torch.float8_e4m3fn)
        return part.double()

    def expected(self, cap: float | None = None) -> Tensor:
        """Return what torch computes of the same numbers in float64."""
        count, queries, size = self.q_RHK.shape
        k_RHLK, v_RHLK = self.numbers()[:, :count].nan_to_num().unbind()
        q_RHGK = self.q_RHK.double().reshape(count, k_RHLK.shape[1], -1, size)
        scores = q_RHGK @ k_RHLK.mT * self.scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(self.hidden_RT[:, None, None], -math.inf)
        if self.sinks_H is not None:
            sinks_RHG1 = self.sinks_H.double().view(1, *scores.shape[1:3], 1).expand(count, -1, -1, -1)
            scores = torch.cat((scores, sinks_RHG1), -1)
        weights: Tensor = scores.softmax(-1)[..., : k_RHLK.shape[2]]
        return (weights @ v_RHLK).reshape(count, queries * size)

    def found(self, attention: Attention) -> Tensor:
        """Return what a kernel finds."""
        kv, scales = self.store.halves, self.store.scales
        return attention(self.q_RHK, *kv, self.positions_R, scales, scale=self.scale, sinks=self.sinks_H)

    def check(self, attention: Attention, cap: float | None = None) -> None:
        """Attend twice, for what blocks tell each other is used again, and compare with the nearest of 16 bits."""
        expected = self.expected(cap)
        precision = torch.finfo(self.q_RHK.dtype).eps / 2
        for _ in range(2):
            found = self.found(attention)
            torch.testing.assert_close(found.double(), expected, rtol=1.01 * precision, atol=1e-5)


def kernel(dtype: torch.dtype, head_dim: int, cap: float | None = None, kind: str = "fp16") -> Attention:
    """Return that of the first GPU."""
    return Attention(torch.device("cuda", 0), dtype, head_dim, cap, kind)


@pytest.mark.parametrize("kind", ["fp16", "fp8", "q8"])
@pytest.mark.parametrize("head_dim", [24, 64, 80, 96, 128, 192, 256])
def test_sizes_of_heads(head_dim: int, kind: str, dtype: torch.dtype) -> None:
    """Of a token that sees one place, part of a tile, several blocks', and all places."""
    if kind == "q8" and head_dim % 32:
        return
    case = Case(dtype, (8, 2), head_dim, 1000, [0, 14, 15, 16, 500, 999], kind)
    assert Attention.takes(torch.device("cuda", 0), dtype, head_dim, kind)
    case.check(kernel(dtype, head_dim, kind=kind))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 2), (32, 8), (10, 2), (9, 1), (32, 2), (71, 1)])
def test_groups(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Any number of query heads shares a KV head."""
    Case(dtype, heads, 128, 700, [650, 3, 699]).check(kernel(dtype, 128))


@pytest.mark.parametrize("kind", ["fp16", "fp8", "q8"])
@pytest.mark.parametrize("length", [1, 13, 128, 16384])
def test_rings(length: int, kind: str, dtype: torch.dtype) -> None:
    """A token behind the end of a cache sees all of it, also where all blocks have a part."""
    positions = [0, length - 1, length, 3 * length + 1]
    Case(dtype, (8, 2), 128, length, positions, kind).check(kernel(dtype, 128, kind=kind))


@pytest.mark.parametrize("count", [9, 30, 65])
def test_many_tokens(count: int, dtype: torch.dtype) -> None:
    """Of lengths that differ, where a few blocks share a token, and where each has one of its own."""
    Case(dtype, (32, 8), 128, 600, [7 * row % 600 for row in range(count)]).check(kernel(dtype, 128))


@pytest.mark.parametrize("kind", ["fp16", "fp8", "q8"])
@pytest.mark.parametrize("cap", [5.0, 50.0])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_capped_scores(head_dim: int, cap: float, kind: str, dtype: torch.dtype) -> None:
    """As in Gemma 2."""
    case = Case(dtype, (8, 4), head_dim, 600, [599, 10], kind)
    case.scale = 1.0
    case.check(kernel(dtype, head_dim, cap, kind), cap)


@pytest.mark.parametrize("kind", ["fp16", "fp8", "q8"])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_sinks(cap: float | None, kind: str, dtype: torch.dtype) -> None:
    """As in gpt-oss: of one place, of those of one block and of several; below all scores, among them and above."""
    case = Case(dtype, (64, 8), 64, 1000, [0, 40, 999], kind, [-30.0, -1.0, 0.0, 2.5, 60.0])
    case.check(kernel(dtype, 64, cap, kind), cap)


def test_a_graph_serves_any_length(dtype: torch.dtype) -> None:
    """Nothing of a launch depends on positions: a graph finds what they are when it runs."""
    case, attention = Case(dtype, (8, 2), 128, 3000, [2999, 2999]), kernel(dtype, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.found(attention)
    for positions in ([0, 2999], [130, 17], [2998, 1000]):
        case.positions_R.copy_(torch.tensor(positions))
        case.hidden_RT = torch.arange(3000, device="cuda") > case.positions_R[:, None]
        graph.replay()
        precision = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(found.double(), case.expected(), rtol=1.01 * precision, atol=1e-5)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "size", "turned"),
    [((8, 2), 128, 128), ((7, 1), 96, 32), ((16, 1), 64, 64), ((4, 4), 80, 80), ((8, 1), 256, 256)],
    ids=str,
)
@pytest.mark.parametrize("length", [1, 100, 16384])
def test_new_tokens(  # noqa: PLR0917
    length: int, heads: tuple[int, int], size: int, turned: int, is_normed: bool, dtype: torch.dtype
) -> None:
    """One kernel writes to the cache, and returns, what that which turns and one behind it do, to the bit."""
    torch.manual_seed(length)
    (queries, keys), rows = heads, torch.tensor([0, length - 1, length, 3 * length + 1], device="cuda")
    numbers, gpu = torch.arange(len(rows), device="cuda"), torch.device("cuda", 0)
    x_RHK = torch.randn(len(rows), queries + 2 * keys, size, device="cuda").to(dtype)
    angle = 6 * torch.rand(len(rows), turned // 2, device="cuda")
    by = angles(angle.sin().to(dtype), angle.cos().to(dtype))
    norms = tuple(torch.randn(2, size, device="cuda").to(dtype)) if is_normed else ()
    pointwise, attention = Pointwise(gpu, dtype, "silu", eps=1e-5, offset=0.5), kernel(dtype, size)
    turn = pointwise.words_of_turn(x_RHK, by, norms)
    if turn is None:
        assert is_normed
        assert turned < size or size == 80
        return
    stores = [Store("fp16", (len(rows), keys, length, size), dtype, gpu) for _ in range(2)]
    old = torch.randn(2, len(rows), keys, length, size, device="cuda").to(dtype)
    for store in stores:
        store.write(slice(None), slice(None), slice(None), old)
    turned_RHK = x_RHK.clone()
    to = Places(*stores[0].as_rows(), numbers, rows % length)
    assert pointwise.norm_and_rope(turned_RHK, heads, by, norms, to)
    expected = attention(turned_RHK[:, :queries], *stores[0].halves, rows, scale=size**-0.5)
    new = NewTokens(x_RHK[:, queries : queries + keys], x_RHK[:, queries + keys :], turn)
    found = attention(x_RHK[:, :queries], *stores[1].halves, rows, scale=size**-0.5, new=new)
    assert torch.equal(found, expected)
    for part, right in zip(stores[1].halves, stores[0].halves, strict=True):
        assert torch.equal(part, right)
