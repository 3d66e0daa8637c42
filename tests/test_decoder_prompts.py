"""Prompts that are read together: how they are cut into passes, and that each is read as it would be alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tests.decoder_cases import CONFIGS, MAX_ROWS, model_of, plan_of, request_of
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.axes import Axis
from tpplan.decoder import Decoder, groups, layers, passes
from tpplan.decoder.layers import attend
from tpplan.decoder.prompts import Prompt, cut
from tpplan.errors import RequestError
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from random import Random


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 1)), min_size=1, max_size=6),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
def test_passes_have_every_token_once(sizes: list[tuple[int, int]], most: int, random: Random) -> None:
    """Passes are full but for the last; each prompt's tokens follow each other, and what ends or fills is marked."""
    numbers = [*range(len(sizes))]
    random.shuffle(numbers)
    prompts = [Prompt([100 * i + t for t in range(n)], i, start) for i, (n, start) in zip(numbers, sizes, strict=True)]
    found: dict[int, list[tuple[int, int]]] = {i: [] for i in numbers}
    lengths, ends = [], []
    for tokens, stretches in cut(prompts, most):
        assert [row for each in stretches for row in range(each.rows.start, each.rows.stop)] == [*range(len(tokens))]
        for each in stretches:
            assert each.is_full == (each.size == most)
            for i in range(each.count):
                first = each.first + i * each.size
                places = range(each.start, each.start + each.size)
                found[each.sequence + i] += zip(tokens[first : first + each.size], places, strict=True)
        ends += [token for each in stretches for token in tokens[each.ends]]
        lengths.append(len(tokens))
    assert found == {each.sequence: [*zip(each.tokens, range(each.start, 99), strict=False)] for each in prompts}
    assert ends == [each.tokens[-1] for each in prompts]
    total = sum(count for count, _ in sizes)
    assert lengths == [most] * (total // most) + [total % most] * (total % most > 0)


def test_prompts_that_are_alike_are_one_stretch() -> None:
    """As long as their sequences follow each other, begin with them, and none is cut."""
    sizes = [(4, 0), (4, 0), (3, 0), (3, 1), (3, 1)]
    prompts = [Prompt([7] * size, i, start) for i, (size, start) in enumerate(sizes)]
    ((_, stretches),) = cut(prompts, 20)
    assert [(each.first, each.size, each.sequence, each.count) for each in stretches] == [
        (0, 4, 0, 2),
        (8, 3, 2, 1),
        (11, 3, 3, 1),
        (14, 3, 4, 1),
    ]
    assert [[each.count for each in stretches] for _, stretches in cut(prompts, 6)] == [[1, 1], [1, 1, 1], [1, 1]]


@pytest.mark.parametrize("model_type", CONFIGS)
def test_together_as_alone(model_type: str) -> None:
    """Two prompts, one of which has begun: each has the logits that transformers gives it, in the order given."""
    model = model_of(model_type)
    plan = plan_of(model.directory, 3, request_of(), {}, seed=9)
    short, long = model.prompts
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx), cache="fp32")
        decoder.prefill(long[:8], 0)
        assert len(long[8:]) + len(short) > MAX_ROWS  # in two passes, of which one has rows of both
        logits = ctx.gather(decoder.read([Prompt(long[8:], 0, 8), Prompt(short, 1)]), Axis.VC).tensor
    torch.testing.assert_close(logits, model.logits.flip(0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_prompts_of_one_length(model_type: str) -> None:
    """Read at once, also in chunks, they have the logits that each has alone."""
    model = model_of(model_type)
    plan = plan_of(model.directory, 3, evolve(request_of(batch=4), max_rows=30), {}, seed=9)
    texts = [[(7 * i + 5 * t) % 200 for t in range(15)] for i in range(3)]
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx), cache="fp32")
        alone = [ctx.gather(decoder.prefill(text), Axis.VC).tensor[0].clone() for text in texts]
        for start, end in ((0, 8), (8, 15)):
            logits = decoder.read([Prompt(text[start:end], i, start) for i, text in enumerate(texts, 1)])
        together = ctx.gather(logits, Axis.VC).tensor
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=1e-4)


def test_prompts_that_cannot_be_read() -> None:
    """None at all, one without tokens, and two for the same sequence are refused."""
    model = model_of("mistral")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=2)
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx))
        for prompts, match in (
            ([], "there are no prompts"),
            ([Prompt([1], 0), Prompt([], 1)], "the prompt of sequence 1 has no tokens"),
            ([Prompt([1], 1), Prompt([2], 0), Prompt([3], 1, start=1)], "sequence 1 has two prompts"),
        ):
            with pytest.raises(RequestError, match=match):
                decoder.read(prompts)


@pytest.mark.parametrize(
    ("tokens", "positions", "match"),
    [
        ([], [], "devices: 2 in use, 0 with tokens, 0 with positions"),
        ([[1]], [[0], [0]], "devices: 2 in use, 1 with tokens, 2 with positions"),
        ([[1], [1]], [[0]], "devices: 2 in use, 2 with tokens, 1 with positions"),
        ([[], []], [[], []], "tokens of 0 sequences, the plan has room for 1 to 2 at a time"),
        ([[1, 2, 3]] * 2, [[0, 0, 0]] * 2, "tokens of 3 sequences, the plan has room for 1 to 2 at a time"),
        ([[1, 2]] * 2, [[0]] * 2, r"tokens or positions of shape \[1\]"),
        ([[1, 2], [1]], [[0, 0]] * 2, r"tokens or positions of shape \[1\]"),
        ([[[1]]] * 2, [[0]] * 2, r"tokens or positions of shape \[1, 1\]"),
        ([1] * 2, [0] * 2, r"tokens or positions of shape \[\]"),
    ],
)
def test_steps_that_cannot_be_taken(tokens: list[object], positions: list[object], match: str) -> None:
    """No token, or not one and a position of each sequence on each device, is refused before anything is computed."""
    model = model_of("mistral")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=2)
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx))
        given, at = ([torch.tensor(each).long() for each in some] for some in (tokens, positions))
        with pytest.raises(RequestError, match=match):
            decoder.decode(given, at)


def test_what_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, and prompts that fill a pass, have shapes that come again and again; no others."""
    asked: set[tuple[int, bool]] = set()

    def attending(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked.add((q.shape[2], kwargs["recurs"]))
        return attend(q, *args, **kwargs)

    monkeypatch.setattr(passes, "attend", attending)
    model = model_of("llama")
    plan = plan_of(model.directory, 1, request_of(), {}, seed=2)
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx))
        for size in (1, MAX_ROWS - 1, MAX_ROWS):
            decoder.prefill([1] * size)
        assert asked == {(1, False), (MAX_ROWS - 1, False), (MAX_ROWS, True)}
        decoder.decode([torch.tensor([1])], [torch.tensor([MAX_ROWS])])
    assert (1, True) in asked


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Let kernels stand in for those of GPUs, and return the lengths of the texts that attend at once."""
    taken: list[list[int]] = []

    def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        bias = causal_lower_right(q.shape[2], k.shape[2])
        return scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=True)

    def flash_attention_of_several(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, longest: int, *, scale: float
    ) -> torch.Tensor:
        sizes = bounds.diff().tolist()
        assert max(sizes) == longest
        taken.append(sizes)
        parts = [torch.split_with_sizes(x.transpose(0, 1)[None], sizes, dim=2) for x in (q, k, v)]
        found = [flash_attention(q, k, v, scale)[0] for q, k, v in zip(*parts, strict=True)]
        return torch.cat(found, dim=1).transpose(0, 1)

    monkeypatch.setattr(layers, "can_use_flash_attention", lambda _: True)
    monkeypatch.setattr(layers, "flash_attention", flash_attention)
    monkeypatch.setattr(groups, "flash_attention_of_several", flash_attention_of_several)
    return taken


@pytest.mark.parametrize("model_type", CONFIGS)
def test_beginnings_attend_at_once(model_type: str, taken: list[list[int]]) -> None:
    """Where a kernel takes texts of any lengths, those that begin in a pass attend by it, and are read as alone.

    Scores that are capped are left to others.
    """
    model = model_of(model_type)
    plan = plan_of(model.directory, 3, request_of(batch=5), {}, seed=9)
    short, long = model.prompts
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx), cache="fp32")
        decoder.prefill(short[:2], 1)
        whole = [Prompt(short[2:], 1, 2), Prompt(short[:1], 4), Prompt(short[:2], 3)]  # a pass, of two that begin
        whole += [Prompt(long[:3], 0), Prompt(long[:1], 2)]  # and another
        logits = ctx.gather(decoder.read(whole), Axis.VC).tensor
        torch.testing.assert_close(logits[0], model.logits[0], atol=1e-4, rtol=1e-4)
        rests = [(short, 1, 4), (short, 2, 3), (long, 3, 0), (long, 1, 2)]
        for i, (prompt, start, sequence) in enumerate(rests, 1):
            rest = ctx.gather(decoder.prefill(prompt[start:], sequence, start), Axis.VC).tensor[0]
            torch.testing.assert_close(rest, model.logits[int(prompt is long)], atol=1e-4, rtol=1e-4)
            alone = ctx.gather(decoder.prefill(prompt[:start], 1), Axis.VC).tensor[0]
            torch.testing.assert_close(logits[i], alone, atol=1e-4, rtol=1e-4)
    expected = {(1, 2), (3, 1)} if model_type != "gemma2" else set()
    assert set(map(tuple, taken)) == expected


@pytest.mark.parametrize(
    ("model_type", "kv", "kind", "at_once"),
    [
        ("qwen3", "replicate", "fp32", {0, 1, 2}),  # heads are shared by unequally many, also on one device
        ("qwen2", "idle", "fp32", {0}),  # the windows of the other layers are shorter than the longest text
        ("qwen3", "idle", "q8", set()),  # the cache rounds
    ],
)
def test_beginnings_of_all_kinds(
    model_type: str, kv: str, kind: str, at_once: set[int], taken: list[list[int]]
) -> None:
    """Those that see what is not just given to them do not attend at once; what follows is the same as alone."""
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
            found.append(ctx.gather(decoder.decode(tokens, positions), Axis.VC).tensor.clone())
        expected = [
            [1, 12, 9] for layer in at_once for heads in decoder.stack.heads[layer].values() for _ in heads.runs
        ]
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert taken == expected
