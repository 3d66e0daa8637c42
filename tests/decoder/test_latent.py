"""Multi-head latent attention (MLA): the cache of latents, prompts in pieces, and the matrices that lead to latents."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import tpplan
from tests.decoder_cases import (
    LENGTH,
    SIZES,
    Model,
    answered,
    check_sixteen_bits,
    decoding,
    model_of,
    plan_of,
    random_model,
    request_of,
)
from tests.examples import examples
from tests.flash_cases import check_parts, flash_calls
from tests.weight_plans import fine_units
from tpplan.core.axes import Axis
from tpplan.decoder import Decoder, Prompt, generate
from tpplan.decoder import math as layers
from tpplan.decoder.cache import layer as layer_cache
from tpplan.decoder.layer import latent
from tpplan.decoder.model.settings import check_model, settings_of
from tpplan.decoder.prompts import cut, pieces
from tpplan.decoder.weights import products
from tpplan.decoder.weights.products import ProductOptions, per_head
from tpplan.decoder.weights.quantised import IntMatrix
from tpplan.errors import ExecutionError
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.flash_cases import FlashCalls

__all__ = ["fine_units", "flash_calls"]  # fixtures

_KEPT: list[TemporaryDirectory[str]] = []


@cache
def coded() -> Model:
    """Return a model whose latents and rotary parts are groups of elements, and which expands two or more rows."""
    torch.manual_seed(3)
    sizes = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 2, "v_head_dim": 1, "kv_lora_rank": 64, "q_lora_rank": 16}
    more = {"first_k_dense_replace": 3, "num_key_value_heads": 8, "head_dim": 32}
    model = random_model("deepseek_v3", SIZES | sizes | more)
    _KEPT.append(TemporaryDirectory())
    model.save_pretrained(_KEPT[-1].name)
    return answered(model, Path(_KEPT[-1].name), 8)


def said(decoder: Decoder, prompt: list[int]) -> Iterator[torch.Tensor]:
    """Yield the logits of what follows a prompt: of reading it, and of a step with its last token."""
    context = decoder.context
    yield context.gather(decoder.prefill(prompt), Axis.VOCAB).tensor[0].clone()
    decoder.prefill(prompt[:-1])
    latest = (torch.tensor([number]) for number in (prompt[-1], len(prompt) - 1))
    tokens, positions = ([number] * len(context.all_devices) for number in latest)
    yield context.gather(decoder.decode(tokens, positions), Axis.VOCAB).tensor[0].clone()


@pytest.mark.parametrize("kind", ["fp16", "fp8", "q8", "q4"])
def test_every_device_with_heads_caches_latents_once(kind: str) -> None:
    """Of all its heads, and as many bytes as the plan counts; a device without heads caches nothing."""
    cuts: dict[Axis, tuple[int, ...]] = {Axis.KV_HEADS: (0, 0, 1, 5, 8)}
    plan = plan_of(coded().directory, 4, request_of(kind=kind), cuts, seed=3)
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        decoder = Decoder(context, coded().directory, load_weights(plan, coded().directory, context))
        taken = {device: decoder.cache_bytes(device) for device in context.all_devices}
    bits = {"fp16": 16, "fp8": 8, "q8": 8.5, "q4": 4.5}[kind]
    expected = int(3 * plan.request.cache.tokens * (64 + 32) * bits / 8)
    assert taken == {0: 0, 1: expected, 2: expected, 3: expected}
    assert [device.cache_bytes for device in plan.memory] == [*taken.values()]


@pytest.mark.parametrize(("kind", "error"), [("fp16", 4e-3), ("q8", 4e-2), ("fp8", 0.3), ("q4", 0.8)])
def test_a_smaller_cache_of_latents_loses_a_little(kind: str, error: float) -> None:
    """What few bits lose shows in the logits of prompts and of steps, and is as small as the bits promise."""
    model = coded()
    plan = plan_of(model.directory, 3, request_of(kind=kind), {}, seed=5)
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        weights = load_weights(plan, model.directory, context)
        for found in said(Decoder(context, model.directory, weights, cache="fp32"), model.prompts[1]):
            torch.testing.assert_close(found, model.logits[1], atol=3e-4, rtol=1e-4)
        for found in said(Decoder(context, model.directory, weights), model.prompts[1]):
            assert 0 < (found - model.logits[1]).abs().max() < error


def test_kinds_of_caches_that_latents_have_not() -> None:
    """They are refused before weights are read: keys and values in different bits, and latents of no whole groups."""
    for model, kind, what, hint in (
        (coded(), "q6", "latents of 64 [+] 32 elements", "fp16, fp8; q8, q4 take latents and rotary parts"),
        (model_of("deepseek_v3"), "q8", "latents of 20 [+] 4 elements", "a multiple of 32"),
    ):
        plan = plan_of(model.directory, 2, request_of(kind=kind), {}, seed=5)
        with pytest.raises(ExecutionError, match=f"no cache of kind {kind} for {what}") as error:
            check_model(model.directory, tpplan.read_model(model.directory), plan)
        assert hint in error.value.hint
    check_model(coded().directory, tpplan.read_model(coded().directory), evolve(plan, request=request_of(kind="q4")))


def test_steps_and_prompts_of_many_tokens_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few elements may be made at a time, prompts and steps say the same, by both ways to attend."""
    model, batch = coded(), 5
    plan = plan_of(model.directory, 2, evolve(request_of(kind="q8", batch=batch), max_rows=40), {}, seed=5)
    texts = [Prompt([(7 * i + 5 * t) % 200 for t in range(9 * i + 2)], i) for i in range(batch)]
    found = []
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        weights = load_weights(plan, model.directory, context)
        for at_once, ways in ((2**24, {True}), (3 * 20 * 34, {True, False}), (1, {False})):
            for module in (layers, layer_cache, latent):
                monkeypatch.setattr(module, "AT_ONCE", at_once)
            expanded: set[bool] = set()
            expands = latent.Latents._expands

            def asked(self: Any, q: Any, text: Any, expands: Any = expands, expanded: set[bool] = expanded) -> bool:
                expanded.add(found := expands(self, q, text))
                return bool(found)

            with patch.object(latent.Latents, "_expands", asked):
                decoder = Decoder(context, model.directory, weights)
                read = context.gather(decoder.read(texts), Axis.VOCAB).tensor.clone()
            assert expanded == ways
            latest = torch.arange(batch), torch.tensor([len(each.tokens) for each in texts])
            tokens, positions = ([numbers] * len(context.all_devices) for numbers in latest)
            found.append(torch.stack((read, context.gather(decoder.decode(tokens, positions), Axis.VOCAB).tensor)))
    torch.testing.assert_close(found[1:], found[:1] * 2, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_texts_in_any_pieces(seed: int) -> None:
    """Pieces of any lengths, of some sequences at a time in any order, lead to what a text has that is read alone."""
    random, batch = Random(seed), 4
    model_type = ("deepseek_v2", "kimi_k2")[seed % 2]
    model = model_of(model_type)
    request = evolve(request_of(batch=batch), max_rows=random.randint(5, 24))
    plan = plan_of(model.directory, random.randint(1, 4), request, {}, seed=seed)
    texts = [[random.randrange(200) for _ in range(random.randint(LENGTH // 4, LENGTH // 2))] for _ in range(batch)]
    done, found = [0] * batch, dict[int, torch.Tensor]()
    with decoding(plan, model_type, "fp32") as decoder:
        context = decoder.context
        while left := [i for i in range(batch) if done[i] < len(texts[i])]:
            some = random.sample(left, random.randint(1, len(left)))
            call = [Prompt(texts[i][done[i] :][: random.randint(1, 30)], i, done[i]) for i in some]
            logits = context.gather(decoder.read(call), Axis.VOCAB).tensor
            for prompt, row in zip(call, logits, strict=True):
                done[prompt.sequence] += len(prompt.tokens)
                found[prompt.sequence] = row.clone()
        for i, text in enumerate(texts):
            expected = context.gather(decoder.prefill(text, i), Axis.VOCAB).tensor[0]
            torch.testing.assert_close(found[i], expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [40, 130, 200])
@pytest.mark.usefixtures("flash_calls")
def test_parts_of_tokens(tokens: int) -> None:
    """What the last tokens find in parts of all is weighed by their scores."""
    check_parts(tokens, torch.device("cpu"), torch.float32, 1e-5)


@pytest.mark.parametrize("kind", ["fp32", "q8"])
def test_keys_and_values_of_parts_of_a_text(
    kind: str, flash_calls: FlashCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a kernel takes parts of a text's tokens, those of few are made at a time, to the same end."""
    model = coded()
    plan = plan_of(model.directory, 2, evolve(request_of(kind="q8"), max_rows=7), {}, seed=5)
    texts = [Prompt([(7 * i + 5 * t) % 200 for t in range(42 - 12 * i)], i) for i in range(2)]
    found, called = [], list[tuple[int, ...]]()

    def pair_of(self: Any, known: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        called.append((len(known), len(up)))
        return pairs(self, known, up)

    pairs = latent.Latents._pair_of
    monkeypatch.setattr(latent.Latents, "_pair_of", pair_of)
    monkeypatch.setattr(layers, "_FLASH_HEADS", 2)
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        weights = load_weights(plan, model.directory, context)
        for part, at_once in ((2**13, 2**24), (9, 2**24), (5, 3 * 7 * 34)):
            monkeypatch.setattr(latent, "_PART", part)
            monkeypatch.setattr(latent, "AT_ONCE", at_once)
            called.clear()
            decoder = Decoder(context, model.directory, weights, cache=kind)
            found.append(context.gather(decoder.read(texts), Axis.VOCAB).tensor.clone())
            assert max(tokens for tokens, _ in called) == min(42, max(part, 7))
            assert max(heads for _, heads in called) == (
                1 if at_once < 2**24 else max(each.queries for each in decoder.stack.heads[0].values())
            )
    torch.testing.assert_close(found[1:], found[:1] * 2, atol=1e-3, rtol=1e-3)
    assert not flash_calls  # of several texts


def test_texts_go_on_where_the_cache_has_them() -> None:
    """Tokens that a text has in common with the latest one are not read again."""
    model = model_of("deepseek_v3")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=5)
    with decoding(plan, "deepseek_v3", "fp32") as decoder:
        list(generate(decoder, [model.prompts[0]], 9))
        starts: list[int] = []
        begin = decoder._begin

        def beginning(prompts: list[Prompt]) -> None:
            starts.extend(prompt.start for prompt in prompts)
            begin(prompts)

        longer = [*model.prompts[0], *model.tokens[0][:6]]
        with patch.object(Decoder, "_begin", lambda _, prompts: beginning(prompts)):
            found = [token for (token,) in generate(decoder, [longer], 4, resume=True)]
    assert found == model.tokens[0][6:10]
    assert starts == [len(longer) - 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["reduce", "gather"])
def test_sixteen_bits_lose_what_they_lose_in_transformers(layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A model in 16 bits is about as near to 32 bits as transformers gets, by both ways to attend."""
    check_sixteen_bits(coded(), layout, dtype, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "fused", "is_fused"),
    [
        ("deepseek_v3", "qkv_a_proj", True),
        ("kimi_k2", "kv_a_q_proj", True),
        ("glm4_moe_lite", "qkv_a_proj", True),
        ("deepseek_v2", "kv_a_q_proj", False),  # one of both has a bias
    ],
)
def test_matrices_that_lead_down_are_one(model_type: str, fused: str, is_fused: bool) -> None:
    """What reads the residual stream is one matrix, in the memory where it was loaded."""
    model = model_of(model_type)
    plan = plan_of(model.directory, 1, request_of(), {}, seed=2)
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        weights = load_weights(plan, model.directory, context)
        decoder = Decoder(context, model.directory, weights)
        name = f"model.layers.1.self_attn.{fused}"
        assert (f"{name}.weight" in decoder.weights[0]) == is_fused
        if is_fused:
            whole = decoder.weights[0][f"{name}.weight"]
            loaded = weights[0]["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
            assert whole.untyped_storage().data_ptr() == loaded.untyped_storage().data_ptr()
            assert len(whole) > len(loaded)


def test_the_factor_of_scores() -> None:
    """YaRN's weight of all elements makes scores larger, as in DeepSeek's code; others have the usual factor."""
    for model_type, expected in (
        ("deepseek_v3", (1 + 0.08 * torch.log(torch.tensor(4.0)).item()) ** 2 / 12**0.5),
        ("deepseek_v2", 8**-0.5),
    ):
        directory = model_of(model_type).directory
        found = settings_of(directory, tpplan.read_model(directory)).attention_scale
        assert found == pytest.approx(expected, rel=1e-6)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 1)), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(1, 20),
)
def test_pieces_of_a_pass(sizes: list[tuple[int, int]], most: int, whole: int) -> None:
    """Each row is in one piece with its sequence and position; pieces are small, but for those that stay whole."""
    prompts = [Prompt([0] * size, i, start) for i, (size, start) in enumerate(sizes)]
    ((_, prompt_slices),) = cut(prompts, sum(size for size, _ in sizes) + 1)
    found = list(pieces(prompt_slices, most, lambda each: each.size >= whole))

    def rows(some: Any) -> list[tuple[int, int]]:
        found = []
        for each in some:
            found += [(each.sequence + i, each.start + t) for i in range(each.count) for t in range(each.size)]
        return found

    assert rows(found) == rows(prompt_slices)
    assert [each.rows.start for each in found[:1]] == [0]
    assert all(before.rows.stop == after.rows.start for before, after in pairwise(found))
    for each in found:
        kept = each in prompt_slices and each.size >= whole
        assert kept or each.rows.stop - each.rows.start <= most
    ends = [row for each in found if each.is_last for row in range(*each.ends.indices(1000))]
    assert ends == [row for each in prompt_slices for row in range(*each.ends.indices(1000))]


@pytest.mark.parametrize("at_once", [1, 5 * 32 * 2, 2**20])
def test_matrices_of_heads_in_the_order_of_their_inputs(at_once: int) -> None:
    """Dequantised a few heads at a time, with columns in any order, products are those of the whole matrix."""
    made = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (30, 32), generator=made, dtype=torch.uint8)
    scales = torch.rand(30, 4, generator=made)
    columns = torch.randperm(32, generator=made).int()
    matrix = IntMatrix(codes, scales, None, 0, 8, 8, columns)
    with patch.object(products, "AT_ONCE", at_once):
        parts = list(per_head(matrix, 6, torch.float32, ProductOptions(room=0)))
    assert [some.start for some, _ in parts] == list(range(0, 6, max(1, min(6, at_once // 160))))
    x = torch.rand(3, 32, generator=made)
    whole = torch.cat([part for _, part in parts]).flatten(0, 1)
    expected = matrix.ordered(x) @ matrix.dense(0, 30, torch.float32).mT
    torch.testing.assert_close(x @ whole.mT, expected, atol=1e-3, rtol=1e-5)
