"""Pointwise kernels in the decoder: the right words for the tensors that they take, and plain torch for others."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
import torch

from tests.decoder.pointwise_cases import launches
from tests.decoder.test_memory import made, planned, taken
from tests.decoder_cases import CONFIGS, LATENT
from tests.flash_cases import flash_calls
from tests.weight_plans import fine_units
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache
from tpplan.decoder import Decoder, Prompt, math
from tpplan.decoder.cache.layer import LayerCache
from tpplan.decoder.fast import fused
from tpplan.decoder.fast.launches.pointwise import Places, Pointwise
from tpplan.decoder.layer.steps import Plain
from tpplan.decoder.math import angles, best_tokens, merge_parts, rms_norm, rotate
from tpplan.decoder.prompts import NO_TOKEN
from tpplan.exec import compile as compile_plan
from tpplan.exec.toolchain import kernel_cache
from tpplan.exec.toolchain.torch_shims import flash_attention_to_part
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence
    from pathlib import Path

    from tests.flash_cases import FlashCalls
    from tpplan.core.plan import SplitPlan

__all__ = ["fine_units", "flash_calls", "launches"]  # fixtures

BATCH, LENGTH = 8, 128
CPU = torch.device("cpu")


def said(directory: Path, plan: SplitPlan) -> list[torch.Tensor]:
    """Return the logits of a prompt alone, of several at once, and of a step, and what is in all caches then."""
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        decoder = Decoder(context, directory, load_weights(plan, directory, context))
        everywhere = len(context.all_devices)
        logits = [decoder.prefill([*range(70)], 1), decoder.prefill([*range(9)], 1, 70)]
        logits.append(decoder.read([Prompt([i, 5, 7 * i][: i % 3 + 1], i) for i in (0, 2, 5, 7)]))
        tokens, positions = ([x] * everywhere for x in (torch.arange(BATCH), torch.tensor([1, 79, 3, 0, 0, 3, 0, 2])))
        logits.append(decoder.decode(tokens, positions))
        found = [context.gather(each, Axis.VOCAB).tensor.clone() for each in logits]
        stored = [heads.cache._parts for layer in decoder.stack.heads for heads in layer.values()]
        return [*found, *(part.clone() for parts in stored for part in parts)]


@pytest.mark.parametrize("layout", ["reduce", "gather"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_decoders_say_the_same(
    model_type: str, layout: str, tmp_path: Path, flash_calls: FlashCalls, request: pytest.FixtureRequest
) -> None:
    """Where kernels do what is between matrices, in every family, on one device and on uneven ones, to the bit."""
    directory = made(model_type, tmp_path)
    plans = [planned(directory, layout, shares, Cache("fp16", BATCH * LENGTH)) for shares in ((1,), (3, 1))]
    expected = [said(directory, plan) for plan in plans]
    calls: Counter[str] = request.getfixturevalue("launches")
    for plan, each in zip(plans, expected, strict=True):
        for found, right in zip(said(directory, plan), each, strict=True):
            assert torch.equal(found, right)
    gates = {"gemma": "gelu_tanh", "gpt": "swiglu_oai"}
    gate = next((gate for start, gate in gates.items() if model_type.startswith(start)), "silu")
    turned = () if model_type in LATENT else ("turn",)  # none of these kernels turns neighbours
    assert set(calls) == {"embed", "angles", "norm", gate, *turned}


def test_a_decoder_does_without_kernels(tmp_path: Path, launches: Counter[str]) -> None:
    """If it is told to."""
    directory = made("llama", tmp_path)
    plan = planned(directory, "reduce", (3, 1), Cache("fp16", BATCH * LENGTH))
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        weights = load_weights(plan, directory, context)
        Decoder(context, directory, weights, kernels=False).prefill([1, 2, 3])
        assert not launches
        Decoder(context, directory, weights).prefill([1, 2, 3])
        assert launches


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("kind", ["q8", "fp8"])
def test_caches_that_round(kind: str, model_type: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Kernels write them as torch does, to the bit, also those of windows, and behind norms."""
    directory = made(model_type, tmp_path)
    plan = planned(directory, "reduce", (3, 1), Cache(kind, BATCH * LENGTH))
    expected = said(directory, plan)
    calls: Counter[str] = request.getfixturevalue("launches")
    for found, right in zip(said(directory, plan), expected, strict=True):
        assert torch.equal(found, right)
    assert calls["turn"]


@pytest.mark.parametrize("kind", ["fp16", "q8", "fp8"])
@pytest.mark.usefixtures("launches")
def test_kernels_write_caches_of_texts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one text alone and of several, by the kernel that turns them: torch copies none."""
    directory = made("llama", tmp_path)
    for name in ("write", "extend", "put"):
        monkeypatch.setattr(LayerCache, name, Mock(side_effect=AssertionError))
    said(directory, planned(directory, "reduce", (3, 1), Cache(kind, BATCH * LENGTH)))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "deepseek_v3"])
def test_parts_of_long_texts_are_merged(
    model_type: str, tmp_path: Path, flash_calls: FlashCalls, launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a kernel, to what the flash kernel finds of all tokens at once, but for rounding."""
    directory = made(model_type, tmp_path)
    plan = planned(directory, "reduce", (3, 1), Cache("fp16", BATCH * 4 * LENGTH))
    monkeypatch.setattr(math, "cudnn_attention_to_part", flash_attention_to_part)
    logits = []
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        weights = load_weights(plan, directory, context)
        for takes in (False, True):
            monkeypatch.setattr(math, "takes_cudnn", lambda *_, takes=takes, **__: takes)
            launches.clear()
            decoder = Decoder(context, directory, weights)
            logits.append(context.gather(decoder.prefill([i % 200 for i in range(450)]), Axis.VOCAB).tensor.float())
            assert bool(launches["merge"]) == takes
    assert not flash_calls  # of several texts
    assert (logits[1] - logits[0]).norm() < 0.02 * logits[0].norm()


@pytest.mark.parametrize("model_type", CONFIGS)
def test_kernels_fit_in_the_scratch_of_the_ledger(model_type: str, tmp_path: Path, launches: Counter[str]) -> None:
    """What they write to is no more than what torch takes."""
    directory = made(model_type, tmp_path)
    for layout, shares in product(("reduce", "gather"), ((1,), (3, 1))):
        plan = planned(directory, layout, shares, Cache("fp16", BATCH * LENGTH))
        assert all(share <= 1 for share in taken(directory, plan).values())
    assert launches


def kernels(dtype: torch.dtype = torch.bfloat16) -> Pointwise:
    """Return kernels for a dtype."""
    return Pointwise(CPU, dtype, "silu", eps=1e-5, offset=0.5)


def test_embeddings_are_those_of_the_tokens_in_a_table(launches: Counter[str]) -> None:
    """Of tokens at any stride; rows of other tables are left to torch, which finds the same."""
    kernels, plain = Pointwise(CPU, torch.bfloat16, "silu", eps=1e-5), Plain(1e-5, "silu")
    table = torch.randn(5, 24).bfloat16()
    tokens = torch.tensor([[9, 0], [10, 1], [14, 2], [15, 3], [NO_TOKEN, 4], [2**40, 5], [12, 6]])
    expected = torch.zeros(7, 16).bfloat16()
    expected[1], expected[2], expected[6] = table[0, :16], table[4, :16], table[2, :16]
    found = kernels.embed(tokens[:, 0], table[:, :16], 10)
    assert found is not None
    assert torch.equal(found, expected)
    assert torch.equal(plain.embed(tokens[:, 0], table[:, :16], 10), expected)
    assert launches == {"embed": 1}
    for ids, others in (
        (tokens[:, 0].int(), table[:, :16]),
        (tokens[:, 0], table.half()),
        (tokens[:, 0], table[:, :12]),
        (tokens[:, 0], table[:, 1:17]),
    ):
        assert kernels.embed(ids, others, 10) is None
    assert launches == {"embed": 1}


def test_norms_take_aligned_rows(launches: Counter[str]) -> None:
    """Of the dtype that they are for, with weights in it; others are left alone."""
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()
    found = kernels().norm(x, weight)
    assert found is not None
    summed = x.clone()
    assert kernels().norm(x, weight, summed, added=True) is summed
    assert torch.equal(summed, x + found)
    assert torch.equal(found, rms_norm(x, weight, 1e-5, 0.5))
    assert kernels().norm(x[:, 8:40], weight[8:40].float()) is None
    assert kernels(torch.float16).norm(x, weight) is None
    assert kernels().norm(x[:, 1:33], weight[:32]) is None
    assert kernels().norm(x[:, :36], weight[:36]) is None
    assert kernels().norm(x.T.contiguous().T, weight) is None
    assert kernels().norm(x[:, :32], weight[1:33]) is None
    assert kernels().norm(x, weight.half()) is None
    assert kernels().norm(x[:0], weight) is None
    assert kernels().norm(x[None], weight) is None
    assert kernels().norm(x, weight, torch.empty(3, 65).bfloat16()[:, 1:]) is None
    assert launches["norm"] == 2


def test_merging_takes_rows_of_heads(launches: Counter[str]) -> None:
    """Of one text, whose heads are side by side, and logarithms in 32 bits."""
    torch.manual_seed(1)

    def merged(out: torch.Tensor, new: torch.Tensor, sums: torch.Tensor, *, takes: bool = True) -> None:
        expected = out.clone()
        right = merge_parts(expected, sums, new, sums + 1)
        found = kernels().merge(out, sums, new, sums + 1)
        assert (found is not None) == takes
        if found is not None:
            assert torch.equal(out, expected)
            assert torch.equal(found, right)

    def heads(count: int, width: int = 16, rows: int = 5) -> torch.Tensor:
        return torch.randn(1, rows, count, width).bfloat16().transpose(1, 2)

    sums = torch.randn(1, 3, 5)
    merged(heads(3), heads(3), sums)
    merged(heads(3, 8), heads(3, 8), sums)
    merged(heads(4)[:, :3], heads(7)[:, 2:5], sums)
    merged(heads(3), heads(3).contiguous(), sums, takes=False)
    merged(heads(3, 12), heads(3, 12), sums, takes=False)
    merged(heads(3, 24)[..., :16], heads(3), sums, takes=False)
    merged(heads(3).half(), heads(3).half(), sums, takes=False)
    merged(heads(3), heads(3), torch.randn(1, 5, 3).mT, takes=False)
    merged(heads(3), heads(3), sums.double(), takes=False)
    merged(heads(3).expand(2, -1, -1, -1).clone(), heads(3).expand(2, -1, -1, -1), sums.expand(2, -1, -1), takes=False)
    merged(heads(3), torch.randn(5 * 3 * 16 + 1).bfloat16()[1:].view(1, 5, 3, 16).transpose(1, 2), sums, takes=False)
    assert launches["merge"] == 3


def test_tokens_are_chosen_from_pairs(launches: Counter[str]) -> None:
    """Of whole pairs in float32, into int64; others are left to torch, which finds the same."""
    kernels = Pointwise(CPU, torch.float16, "silu", eps=1e-5)
    found = torch.tensor([[1.0, 7, 3, 9], [4, 2, 4, 1], [torch.nan, 3, 5, 6]])
    tokens, positions = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    assert kernels.next_tokens(found, tokens, positions)
    assert tokens.tolist() == best_tokens(found).tolist() == [9, 1, NO_TOKEN]
    assert positions.tolist() == [1, 2, 3]
    assert kernels.next_tokens(found[1:, 2:], tokens[:2])
    assert tokens.tolist() == [1, 6, NO_TOKEN]
    assert launches == {"next": 2}
    for others in (
        (found.double(), tokens),
        (found[:, 1:3], tokens),
        (found.mT.contiguous().mT, tokens),
        (torch.zeros(3, 5)[:, :4], tokens),
        (found, tokens.int()),
        (found, torch.zeros(6, dtype=torch.int64)[::2]),
        (found, tokens, positions.int()),
    ):
        assert not kernels.next_tokens(*others)
    assert launches == {"next": 2}


def test_gates_take_matrices_side_by_side_and_whole_ones(launches: Counter[str]) -> None:
    """Of any rows, or of any dimensions without gaps."""
    both = torch.randn(5, 128).bfloat16()
    assert kernels().gate(*both.chunk(2, dim=-1))
    gate, up = torch.randn(2, 3, 4, 16).bfloat16()
    assert kernels().gate(gate, up)
    assert not kernels().gate(gate[..., :8], up[..., :8])
    assert not kernels().gate(both[:, :60], both[:, 64:124])
    assert not kernels().gate(both[:, :64].float(), both[:, 64:])
    assert launches["silu"] == 2


def test_turns_take_heads_of_whole_vectors(launches: Counter[str]) -> None:
    """Heads and what is turned of them are of 16 elements or multiples; a norm is of a head that warps share."""

    def turn(
        heads: int, width: int, turned: int, *, norms: Sequence[torch.dtype] = (), rows: int = 4, first: int = 0
    ) -> bool:
        whole = torch.randn(rows, first + (2 + 2 * heads) * width).bfloat16()
        x = torch.unflatten(whole[:, first:], 1, (-1, width))
        table = torch.rand(2, rows, turned // 2).bfloat16()
        by = angles(*table)
        weights = [torch.randn(width).to(dtype) for dtype in norms]
        expected = x.clone()
        for weight, some in zip(weights, (expected[:, :2], expected[:, 2 : 2 + heads]), strict=False):
            some.copy_(rms_norm(some, weight, 1e-5, 0.5))
        rotate(expected[:, : 2 + heads], by)
        taken = kernels().norm_and_rope(x, (2, heads), by, weights)
        assert not taken or torch.equal(x, expected)
        return taken

    assert turn(1, 16, 16)
    assert turn(2, 80, 80)
    assert turn(2, 96, 32)
    own = torch.bfloat16
    assert turn(2, 64, 64, norms=[own, own])
    assert not turn(2, 64, 64, norms=[own, torch.float32])
    assert not turn(2, 64, 64, norms=[torch.float16] * 2)
    assert not turn(2, 64, 32, norms=[own, own])
    assert not turn(2, 80, 80, norms=[own, own])
    assert not turn(2, 64, 24)
    assert not turn(2, 24, 16)
    assert not turn(2, 64, 64, first=4)
    assert launches["turn"] == 4


def test_caches_of_other_dtypes_are_not_written(launches: Counter[str]) -> None:
    """Nor are any where rows are numbered in 32 bits."""
    x, by = torch.randn(2, 4, 16).bfloat16(), angles(*torch.rand(2, 2, 8).bfloat16())
    keys, values = torch.zeros(2, 6, 1, 16)
    numbers = torch.arange(2)
    wide = Places(keys, values, 3, numbers, numbers)
    short = Places(keys.bfloat16(), values.bfloat16(), 3, numbers.int(), numbers)
    assert not kernels().norm_and_rope(x, (2, 1), by, to=wide)
    assert not kernels().norm_and_rope(x, (2, 1), by, to=short)
    assert kernels().norm_and_rope(x, (2, 1), by, to=Places(keys.bfloat16(), values.bfloat16(), 3, numbers, numbers))
    assert launches["turn"] == 1


def test_only_cuda_devices_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, and where numba and cuda.core are installed."""
    monkeypatch.setattr(kernel_cache, "lacks", lambda: "")
    cuda = torch.device("cuda", 0)
    assert fused.has_kernels(cuda, torch.bfloat16)
    assert not fused.has_kernels(cuda, torch.float32)
    assert not fused.has_kernels(CPU, torch.bfloat16)
    monkeypatch.setattr(kernel_cache, "lacks", lambda: "numba_cuda not installed")
    assert not fused.has_kernels(cuda, torch.bfloat16)
