"""Rows of several sequences that attend at once: which do, and that each is read as it would be alone."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from attrs import evolve

from tests.decoder_cases import CONFIGS, HYBRIDS, LATENT, LENGTH, model_of, plan_of, request_of
from tests.flash_cases import flash_calls
from tests.weight_plans import fine_units
from tpplan.core.axes import Axis
from tpplan.decoder import Decoder, math
from tpplan.decoder.cache import layer
from tpplan.decoder.layer.attention import Group
from tpplan.decoder.prompts import Prompt
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from tests.flash_cases import FlashCalls

__all__ = ["fine_units", "flash_calls"]  # fixtures


@pytest.mark.parametrize("model_type", CONFIGS)
def test_several_attend_at_once(model_type: str, flash_calls: FlashCalls) -> None:
    """Where a kernel takes texts of any lengths, those of a pass attend by it, also behind others, and as alone.

    Scores that are capped are left to others, and so are those of latents.
    """
    model = model_of(model_type)
    plan = plan_of(model.directory, 3, request_of(batch=5), {}, seed=9)
    short, long = model.prompts
    # Norms of what linear attention gives enlarge roundings where that is small: in transformers up to 1e-4 here.
    error = 1e-3 if model_type in HYBRIDS else 1e-4
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx), cache="fp32")
        decoder.prefill(short[:2], 1)
        whole = [Prompt(short[2:], 1, 2), Prompt(short[:1], 4), Prompt(short[:2], 3)]  # a pass
        whole += [Prompt(long[:3], 0), Prompt(long[:1], 2)]  # and another
        logits = ctx.gather(decoder.read(whole), Axis.VOCAB).tensor
        torch.testing.assert_close(logits[0], model.logits[0], atol=1e-4, rtol=1e-4)
        rests = [(short, 1, 4), (short, 2, 3), (long, 3, 0), (long, 1, 2)]
        for i, (prompt, start, sequence) in enumerate(rests, 1):
            rest = ctx.gather(decoder.prefill(prompt[start:], sequence, start), Axis.VOCAB).tensor[0]
            torch.testing.assert_close(rest, model.logits[int(prompt is long)], atol=1e-4, rtol=1e-4)
            alone = ctx.gather(decoder.prefill(prompt[:start], 1), Axis.VOCAB).tensor[0]
            torch.testing.assert_close(logits[i], alone, atol=error, rtol=1e-4)
    expected = {((3, 5), (1, 1), (2, 2)), ((3, 3), (1, 1))} if model_type not in {"gemma2", *LATENT} else set()
    assert set(map(tuple, flash_calls)) == expected


@pytest.mark.parametrize(
    ("model_type", "kv", "kind", "at_once"),
    [
        ("qwen3", "replicate", "fp32", {0, 1, 2}),  # heads are shared by unequally many, also on one device
        ("qwen2", "replicate", "fp32", {0, 1, 2}),  # the windows of two layers are shorter than the longest text
        ("qwen3", "idle", "q8", set()),  # the cache rounds
    ],
)
def test_groups_of_all_kinds(model_type: str, kv: str, kind: str, at_once: set[int], flash_calls: FlashCalls) -> None:
    """Rows that see what is not just in the cache do not attend at once; what follows is the same as alone."""
    model = model_of(model_type)
    plan = plan_of(model.directory, 5, evolve(request_of(kv=kv, batch=3), max_rows=30), {}, seed=5)
    texts = [[(7 * i + 5 * t) % 200 for t in range(size)] for i, size in enumerate((12, 1, 9))]
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx), cache=kind)
        found = []
        for passes in ([[0], [1], [2]], [[1, 0, 2]]):
            for some in passes:
                decoder.read([Prompt(texts[i], i) for i in some])
            used = ctx.all_devices
            tokens, positions = ([torch.tensor(each)] * len(used) for each in ([3, 4, 5], [12, 1, 9]))
            found.append(ctx.gather(decoder.decode(tokens, positions), Axis.VOCAB).tensor.clone())
        expected = [
            [(1, 1), (12, 12), (9, 9)]
            for layer in at_once
            for heads in decoder.stack.heads[layer].values()
            for _ in heads.runs
        ]
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert flash_calls == expected


@pytest.mark.parametrize("kind", ["fp32", "q8"])
@pytest.mark.usefixtures("flash_calls")
def test_no_groups_where_none_attends_at_once(kind: str) -> None:
    """Devices make no tensors that say whose rows these are, but where one of their kernels reads them."""
    model = model_of("qwen3")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=9)
    with compile_plan(plan, backend="cpu") as ctx, patch.object(Group, "of", side_effect=Group.of) as grouped:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx), cache=kind)
        decoder.read([Prompt([1, 2, 3], 0), Prompt([4], 1)])
        holders = {device for layer in decoder.stack.heads for device in layer}
    assert grouped.call_count == (len(holders) if kind == "fp32" else 0)


@pytest.mark.parametrize("seed", range(6))
def test_texts_in_any_pieces(seed: int, flash_calls: FlashCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of any lengths, of some sequences at a time in any order, lead to what a text has that is read at once.

    So it is on uneven devices, some of which have no heads, also repeated ones, and behind windows, however few heads
    are copied at a time; without the kernel there is the same, and so there is after a step.
    """
    random = Random(seed)
    model_type, kv = ("llama", "qwen3", "gemma3_text")[seed % 3], random.choice(["idle", "replicate"])
    monkeypatch.setattr(layer, "AT_ONCE", random.choice([2**24, 3200, 1500]))  # of one head, or too few for it
    model, batch = model_of(model_type), random.randint(3, 5)
    plan = plan_of(
        model.directory,
        random.randint(1, 5),
        evolve(request_of(kv=kv, batch=batch), max_rows=random.randint(5, 24)),
        {},
        seed=seed,
    )
    texts = [[random.randrange(200) for _ in range(random.randint(LENGTH // 4, LENGTH // 2))] for _ in range(batch)]
    calls: list[list[Prompt]] = []
    done = [0] * batch
    while any(count < len(text) for count, text in zip(done, texts, strict=True)):
        call = []
        for i in random.sample(range(batch), random.randint(1, batch)):
            if piece := texts[i][done[i] :][: random.randint(1, 30)]:
                call.append(Prompt(piece, i, done[i]))
                done[i] += len(piece)
        calls += [call] if call else []
    found: dict[int, torch.Tensor] = {}
    with compile_plan(plan, backend="cpu") as ctx:
        weights = load_weights(plan, model.directory, ctx)
        decoder = Decoder(ctx, model.directory, weights, cache="fp32")
        for call in calls:
            logits = ctx.gather(decoder.read(call), Axis.VOCAB).tensor
            found |= {prompt.sequence: row.clone() for prompt, row in zip(call, logits, strict=True)}
        assert any(len(call) > 1 and any(keys > queries for queries, keys in call) for call in flash_calls)
        monkeypatch.undo()
        assert not math.takes_flash(*[torch.zeros(1, 1, 1, 8)] * 3)
        alone = Decoder(ctx, model.directory, weights, cache="fp32")
        for i, text in enumerate(texts):
            expected = ctx.gather(alone.prefill(text, i), Axis.VOCAB).tensor[0]
            torch.testing.assert_close(found[i], expected, atol=1e-4, rtol=1e-4)
        latest = torch.tensor([[1] * batch, [*map(len, texts)]])
        tokens, positions = ([numbers] * len(ctx.all_devices) for numbers in latest)
        steps = [ctx.gather(each.decode(tokens, positions), Axis.VOCAB).tensor.clone() for each in (decoder, alone)]
        torch.testing.assert_close(*steps, atol=1e-4, rtol=1e-4)
